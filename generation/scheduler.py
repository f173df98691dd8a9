"""Many requests of uneven length through a fixed number of cache slots, in one process.

    scheduler = Scheduler(model, slots=8)
    print(scheduler.budget)                            # bytes of cache needed and available, before any work
    requests = (Request(ids, pixels, options=GenerationOptions(max_new_tokens=32), key=n) for n, ... in ...)
    for output in scheduler.run(requests):             # as they finish, not in order
        print(output.key, output.token_ids, output.stop_reason, output.error)

A row that has finished leaves its slot to the next request at once. Prompts share what they have in common
with another slot's prompt from the front, an image above all: it is encoded and prefilled once, and copied.
Where requests run out, the rows that are left move together and the batch becomes narrower. Each request gets
the tokens that `model.generate` gives it alone, in any order and with any number of slots (in float32; in
16 bits rounding differs between batch sizes, as everywhere).

Requests are taken from their iterable only when a slot is free, so images may be loaded while iterating. A
`LazyRequest` may fail, and fails alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from generation import kv_cache as kv
from generation.decoding import prefill
from generation.kv_cache import Prompt, seen_tokens
from generation.memory import available_bytes
from generation.options import (
    MAX_SEED,
    GenerationOptions,
    NotFiniteError,
    SamplingParams,
    check_integer,
    with_overrides,
)
from generation.prefix import CacheBudget, FeatureCache, KeyedPrompt, SlotCache, embed_rest, read_prompt
from generation.protocol import Pixels, VisionLanguage
from generation.sampling import make_seeds, sample, uniforms
from generation.steps import DecodeStep, PromptStep, eager_step

REQUEST_ERRORS = (ValueError, OSError)  # what may be wrong with one request; anything else ends the run
SHARE_FROM = 32  # positions of text that are worth sharing; an image always is
PADDED_AT_MOST = 1.25  # prompts are prefilled together while padding costs no more than this ...
SMALL_PREFILL = 64  # ... or all of them are so few positions that reading the weights costs more
LARGE_PREFILL = 2048  # positions that several prompts may have together: activations take memory
_BAD = -1  # in place of a token id, where logits are not finite


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and the options for its answer.

    input_ids: (T,) int64, without padding.
    pixel_values: (n, 3, H, W), still as bytes or not, or (1, n, 3, H, W) as processors pad them, or None.
    pixel_attention_mask: (n, H, W) or (1, n, H, W), or None.
    options: of one answer; for several, make a request for each with a seed of its own (`each_answer`).
    key: comes back with the output.
    """

    input_ids: Tensor
    pixel_values: Pixels | None = None
    pixel_attention_mask: Tensor | None = None
    options: GenerationOptions = field(default_factory=GenerationOptions)
    key: Any = None


@dataclass(frozen=True, eq=False)
class LazyRequest:
    """A request that is prepared when a slot is free for it. `prepare` may raise ValueError or OSError."""

    key: Any
    prepare: Callable[[], Request]


@dataclass(frozen=True)
class RequestOutput:
    """The answer to a request.

    token_ids: with the stop token; empty after an error.
    stop_reason: "stop", "length" or "error".
    prompt_tokens: positions of the prompt, images included; 0 after an error.
    reused_tokens: how many of them were copied from another prompt.
    error: what was wrong with this request, or None.
    """

    key: Any
    token_ids: list[int]
    stop_reason: str
    prompt_tokens: int = 0
    reused_tokens: int = 0
    error: Exception | None = None


def each_answer(options: GenerationOptions) -> list[GenerationOptions]:
    """Options of `num_return_sequences` requests that get what `model.generate` gives with these options."""
    count, seed = options.num_return_sequences, options.seed
    seeds = [None if seed is None else (seed + answer) % MAX_SEED for answer in range(count)]
    return [replace(options, num_return_sequences=1, decode_step=None, seed=own) for own in seeds]


@dataclass(eq=False)
class Sequence:
    """A request that is being answered in a slot. `reused` positions of its prompt were copied from another.

    params: what `sample` goes by; rows with equal ones are sampled together.
    prefill_embeds: (1, L - reused, D), until the prompt is prefilled.
    seed: set with the first random number.
    seen: (V,) bool, the tokens so far, for a repetition penalty.
    """

    key: Any
    options: GenerationOptions
    params: SamplingParams
    prompt: KeyedPrompt
    slot: int = -1
    reused: int = 0
    prefill_embeds: Tensor | None = None
    tokens: list[int] = field(default_factory=list)
    seed: int | None = None
    seen: Tensor | None = None

    @property
    def position(self) -> int:
        """Where the last sampled token goes."""
        return len(self.prompt) + len(self.tokens) - 1

    def worth_sharing(self, start: int, end: int) -> bool:
        """Whether getting positions start … end - 1 for free is worth an arrangement."""
        return end - start >= SHARE_FROM or bool((self.prompt.keys[start:end] < 0).any())


@dataclass
class Stats:
    """What a scheduler has done so far.

    On a GPU `seconds` counts work where a result is read, images as part of the prefill: the device is not
    waited for to take the time.
    """

    completed: int = 0
    failed: int = 0
    new_tokens: int = 0
    prefilled: int = 0
    reused: int = 0
    tiles_encoded: int = 0
    decode_steps: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prepare", "vision", "prefill", "decode"), 0.0)
    )


class Scheduler:
    """See the module's docstring. One run at a time.

    Args:
        model: a `VisionLanguageModel` in eval mode, whose weights do not change during a run.
        slots: rows of the cache, which is how many requests are answered at the same time.
        decode_step: replaces the eager one: (ids (B, 1), kv_cache, start_pos int or (B,)) -> logits (B, V),
            for every B up to `slots`.
        feature_cache: of this model, for images that come again after their slots have gone to others.

    Raises CacheMemoryError (a ValueError) if the cache does not fit into memory.
    """

    def __init__(
        self,
        model: VisionLanguage,
        slots: int = 8,
        decode_step: DecodeStep | None = None,
        feature_cache: FeatureCache | None = None,
    ):
        check_integer("slots", slots, low=1)
        self.model, self.slots = model, slots
        self._step = decode_step or eager_step(model.language_model)
        self._features = FeatureCache(model, 0) if feature_cache is None else feature_cache
        self.budget = CacheBudget.of(model.language_model, slots, available_bytes(model.device))
        self.budget.check(self.budget.positions)
        self._cache = SlotCache(model.language_model, self.budget)
        self._tokens = torch.zeros(slots, 1, dtype=torch.int64, device=model.device)
        self._running = False
        self.stats = Stats()
        self._start()

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the cache as it is now."""
        return kv.size_in_bytes(self._cache.kv_cache)

    def _start(self) -> None:
        self._cache.forget()  # the weights may change between runs
        self._rows: list[Sequence | None] = [None] * self.slots
        self._waiting: list[Sequence] = []  # in their slots, but not prefilled
        self._fresh: list[tuple[list[Sequence], Tensor]] = []  # prefilled, with logits (k, V), not sampled
        self._drained = False
        self._view: tuple[tuple[int, int, int], kv.KVCache] | None = None
        self._start_pos: Tensor | None = None  # (B,), while the rows stay the same

    @torch.no_grad()
    def run(self, requests: Iterable[Request | LazyRequest]) -> Iterator[RequestOutput]:
        """Answer requests and yield each output as it finishes, with the error of a request that fails.

        Raises ValueError while another run of this scheduler goes on, and whatever the iterable raises.
        """
        if self._running:
            raise ValueError("this scheduler is running already: make another one")
        self._running = True
        try:
            queue = iter(requests)
            while True:
                yield from self._admit(queue)
                self._compact()
                if self._rows[0] is None:
                    return
                yield from self._decode()
        finally:
            self._start()
            self._running = False

    # ------------------------------------------------------------------------------------------ prompts

    def _admit(self, queue: Iterator[Request | LazyRequest]) -> Iterator[RequestOutput]:
        """Give free slots to the next requests, until each is taken by one that goes on, or none are left."""
        while not self._drained and None in self._rows:
            while not self._drained and None in self._rows:
                request = next(queue, None)
                if request is None:
                    self._drained = True
                elif failed := self._enter(request):
                    yield failed
            self._prefill_waiting()
            fresh, self._fresh = self._fresh, []
            if fresh:
                rows = [row for group, _ in fresh for row in group]
                with self._timed("prefill"):
                    ended = self._sample(rows, torch.cat([logits for _, logits in fresh]))
                yield from ended

    def _enter(self, request: Request | LazyRequest) -> RequestOutput | None:
        """Put a request into a free slot, or return why it cannot be answered."""
        try:
            with self._timed("prepare"):
                ready = request.prepare() if isinstance(request, LazyRequest) else request
                row = self._read(ready, request.key)
            self._view = None  # it would keep the old buffers beside the grown ones
            self._cache.reserve(len(row.prompt) + row.options.max_new_tokens - 1)
        except REQUEST_ERRORS as error:
            return self._failed(request.key, error)
        self._place(row)
        return None

    def _read(self, request: Request, key: Any) -> Sequence:
        options = request.options
        if options.num_return_sequences != 1 or not options.use_cache or options.decode_step is not None:
            raise ValueError(
                "a request cannot have num_return_sequences, use_cache or decode_step: "
                "make one for each answer, and give the scheduler the decode step"
            )
        options = with_overrides(options, {}, self.model.config.eos_token_ids)
        prompt = read_prompt(
            self.model,
            request.input_ids[None],
            request.pixel_values,
            request.pixel_attention_mask,
            max_new_tokens=options.max_new_tokens,
        )
        params = SamplingParams(repetition_penalty=options.repetition_penalty)
        if not options.greedy:
            values = {one.name: getattr(options, one.name) for one in fields(SamplingParams)}
            params = SamplingParams(**values | {"seed": None})
        return Sequence(key, options, params, prompt)

    def _place(self, row: Sequence) -> None:
        """Choose a slot for a prompt, encode its images, and copy there what it shares with another slot."""
        last = len(row.prompt) - 1  # always computed, because its logits are not kept
        common = [min(shared, last) for shared in self._cache.in_common(row.prompt.keys)]
        ready = [min(shared, filled) for shared, filled in zip(common, self._cache.filled)]
        if row.worth_sharing(max(ready), max(common)):  # with a prompt that waits: prefill that first
            self._prefill_waiting()
            ready = common
        source = max(range(self.slots), key=ready.__getitem__)
        free = [slot for slot, other in enumerate(self._rows) if other is None]
        slot = max(free, key=ready.__getitem__)
        if not row.worth_sharing(ready[slot], ready[source]):
            source = slot
        row.reused = ready[source] if row.worth_sharing(0, ready[source]) else 0
        with self._timed("vision"):
            row.prefill_embeds, encoded = embed_rest(self.model, self._features, row.prompt, row.reused)
        row.prompt = replace(row.prompt, tiles=None, masks=None)
        self.stats.tiles_encoded += encoded
        self._cache.assign(slot, row.prompt.keys, source, row.reused)
        row.slot, self._rows[slot] = slot, row
        self._waiting.append(row)

    def _prefill_waiting(self) -> None:
        """Prefill the rows that wait, neighbours of similar length together."""
        waiting, self._waiting = sorted(self._waiting, key=lambda row: row.slot), []
        groups: list[list[Sequence]] = []
        for row in waiting:
            if groups and groups[-1][-1].slot == row.slot - 1 and self._together([*groups[-1], row]):
                groups[-1].append(row)
            else:
                groups.append([row])
        for rows in groups:
            with self._timed("prefill"):
                self._fresh.append((rows, self._prefill(rows)))

    def _together(self, rows: list[Sequence]) -> bool:
        """Whether one pass over these prompts, padded to the longest, is better than several."""
        lengths = [len(row.prompt) - row.reused for row in rows]
        if isinstance(self._step, PromptStep):  # without padding, and with the bits of prompts alone
            return sum(lengths) <= LARGE_PREFILL
        padded, end = len(rows) * max(lengths), max(row.reused for row in rows) + max(lengths)
        if padded > LARGE_PREFILL or end > self._cache.capacity:
            return False
        return padded <= SMALL_PREFILL or padded <= PADDED_AT_MOST * sum(lengths)

    def _prefill(self, rows: list[Sequence]) -> Tensor:
        """One pass over prompts in neighbouring slots: logits (k, V) of their last positions."""
        lengths = tuple(len(row.prompt) - row.reused for row in rows)
        longest, starts = max(lengths), [row.reused for row in rows]
        embeds = [row.prefill_embeds for row in rows if row.prefill_embeds is not None]
        x = torch.cat([F.pad(own, (0, 0, 0, longest - own.shape[1])) for own in embeds])
        start_pos = starts[0] if len(set(starts)) == 1 else torch.tensor(starts, device=x.device)
        end = min(max(starts) + longest, self._cache.capacity)  # no more than that is real
        cache = kv.view(self._cache.kv_cache, end, rows[0].slot, len(rows))
        logits = prefill(self.model.language_model, Prompt(x, lengths), cache, start_pos, self._step)
        for row, length in zip(rows, lengths):
            row.prefill_embeds = None
            self._cache.filled[row.slot] = len(row.prompt)
            self.stats.prefilled += length
            self.stats.reused += row.reused
        return logits

    # ------------------------------------------------------------------------------------------- tokens

    def _decode(self) -> Iterator[RequestOutput]:
        """One step for all rows, which are in the first slots; yields the outputs that end with it."""
        with self._timed("decode"):
            rows = [row for row in self._rows if row is not None]
            cache, start_pos = self._positions(rows)
            logits = self._step(self._tokens[: len(rows)], cache, start_pos)
            self.stats.decode_steps += 1
            ended = self._sample(rows, logits)
        yield from ended

    def _positions(self, rows: list[Sequence]) -> tuple[kv.KVCache, int | Tensor]:
        """What a decode step reads and where it writes; see `CachePosition.advance`."""
        positions = [row.position for row in rows]
        shared, longest = min(positions) == max(positions), max(positions) + 1
        length = self._cache.capacity if shared else kv.view_length(longest, self._cache.kv_cache)
        wanted = (len(rows), length, self._cache.capacity)
        if self._view is None or self._view[0] != wanted:
            self._view = (wanted, kv.view(self._cache.kv_cache, length, 0, len(rows)))
        if shared:
            self._start_pos = None
            return self._view[1], positions[0]
        if self._start_pos is None:
            self._start_pos = torch.tensor(positions, device=self.model.device)
        else:
            self._start_pos = self._start_pos + 1
        return self._view[1], self._start_pos

    def _sample(self, rows: list[Sequence], logits: Tensor) -> list[RequestOutput]:
        """The next token of each row, logits (k, V); the rows that end with it leave their slots."""
        token = sample_rows(rows, logits)  # (k, 1)
        slots = [row.slot for row in rows]
        if slots == list(range(len(rows))):
            self._tokens[: len(rows)] = token
        else:
            self._tokens[torch.tensor(slots, device=token.device)] = token
        # The maximum is NaN or +inf if any logit is. This is the step's one read from the device:
        finite = logits.amax(-1).isfinite()
        ended = []
        for row, token_id in zip(rows, token[:, 0].masked_fill(~finite, _BAD).tolist(), strict=True):
            if completed := self._take(row, token_id):
                self._rows[row.slot] = None
                ended.append(completed)
        if ended:
            self._start_pos = None
        return ended

    # --------------------------------------------------------------------------------------------- ends

    def _take(self, row: Sequence, token_id: int) -> RequestOutput | None:
        """Note a row's next token; its output if it ends there."""
        if token_id == _BAD:
            self._cache.clear(row.slot)
            return self._failed(row.key, NotFiniteError(len(row.tokens) + 1))
        row.tokens.append(token_id)
        stopped = token_id in (row.options.stop_token_ids or ())
        if not stopped and len(row.tokens) < row.options.max_new_tokens:
            return None
        self.stats.completed += 1
        self.stats.new_tokens += len(row.tokens)
        reason = "stop" if stopped else "length"
        return RequestOutput(row.key, row.tokens, reason, len(row.prompt), row.reused)

    def _failed(self, key: Any, error: Exception) -> RequestOutput:
        self.stats.failed += 1
        return RequestOutput(key, [], "error", error=error)

    def _compact(self) -> None:
        """Once requests have run out, move rows from the last slots into free ones before them."""
        count = sum(row is not None for row in self._rows)
        free = (slot for slot in range(count) if self._rows[slot] is None)
        for source in range(count, self.slots):
            row = self._rows[source]
            if row is None:
                continue
            target = next(free)
            self._cache.move(source, target, row.position)
            self._tokens[target] = self._tokens[source]
            row.slot, self._rows[target], self._rows[source] = target, row, None
            self._start_pos = None

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.stats.seconds[name] += time.perf_counter() - began


def sample_rows(rows: list[Sequence], logits: Tensor) -> Tensor:
    """One token for each row, which may want different things: logits (k, V) -> (k, 1), on the device.

    Each row draws with the seed that `model.generate` gives it alone.
    """
    alike: dict[SamplingParams, list[int]] = {}
    for index, row in enumerate(rows):
        alike.setdefault(row.params, []).append(index)
    if len(alike) == 1:  # no copy of the logits
        return _sample_alike(rows, logits)
    token = torch.empty(len(rows), 1, dtype=torch.int64, device=logits.device)
    for members in alike.values():
        token[members] = _sample_alike([rows[index] for index in members], logits[members])
    return token


def _sample_alike(rows: list[Sequence], logits: Tensor) -> Tensor:
    """`sample` for rows with equal parameters."""
    params, uniform, seen = rows[0].params, None, None
    if not params.greedy:
        for row in rows:
            if row.seed is None:
                (row.seed,) = make_seeds(row.options.seed, 1, 1)
        seeds, drawn = torch.tensor([[row.seed, len(row.tokens)] for row in rows]).T
        uniform = uniforms(seeds, drawn).to(logits.device)
    if params.repetition_penalty != 1:
        for row in rows:
            if row.seen is None:
                ids = row.prompt.input_ids[None].to(logits.device)
                (row.seen,) = seen_tokens(ids, None, logits.shape[1], 1)
        seen = torch.stack([row.seen for row in rows if row.seen is not None])  # (k, V)
    token = sample(logits, params, uniform, seen)
    for row, own in zip(rows, token, strict=True):
        if row.seen is not None:
            row.seen.scatter_(0, own, True)
    return token
