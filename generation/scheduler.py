"""Many requests of uneven length through a fixed number of cache slots, in one process.

    scheduler = Scheduler(model, slots=8)
    print(scheduler.budget)                            # bytes of cache needed and available, before any work
    requests = (Request(ids, pixels, options=GenerationOptions(max_new_tokens=32), key=n) for n, ... in ...)
    for output in scheduler.run(requests):             # as they finish, not in order
        print(output.key, output.token_ids, output.stop_reason, output.error)

or, where requests come and go at any time, as at a server:

    scheduler.add(request)                             # while scheduler.free
    for event in scheduler.step():                     # until scheduler.idle: NewTokens or RequestOutput
        ...
    scheduler.cancel(request.key)

A row that has finished leaves its slot to the next request at once. Prompts share what they have in common
with another slot's prompt or answer from the front, an image above all: it is encoded and prefilled once, and
copied. The rows that decode stand in the first slots, so that a batch is as narrow as what there is to do.
Each request gets the tokens that `model.generate` gives it alone, in any order and with any number of slots
(in float32; in 16 bits rounding differs between batch sizes, as everywhere).

The loop does not wait for a GPU: the tokens of a step are read while the next one runs (`LAG`). So a row that
stops is computed once more in vain, inside its own slot.

`run` takes requests from their iterable only when a slot is free, so images may be loaded while iterating. A
`LazyRequest` may fail, and fails alone.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from generation import kv_cache as kv
from generation.confidence import (
    TokenLogprobs,
    chosen_logprobs,
    confidence_of,
    likeliest,
    token_logprobs,
)
from generation.kv_cache import seen_tokens
from generation.memory import available_bytes
from generation.options import (
    CacheMemoryError,
    ConstraintError,
    NotFiniteError,
    SamplingParams,
    check_integer,
    with_overrides,
)
from generation.prefix import (
    CacheBudget,
    FeatureCache,
    SlotCache,
    embed_after,
    first_tile,
    read_prompt,
)
from generation.prefix_store import PrefixStore
from generation.protocol import VisionLanguage
from generation.requests import (
    LazyRequest,
    NewTokens,
    Request,
    RequestOutput,
    Sequence,
    Stats,
)
from generation.sampling import sample, uniforms
from generation.steps import DecodeStep, step_of

REQUEST_ERRORS = (ValueError, OSError)  # what may be wrong with one request; anything else ends the run
PADDED_AT_MOST = 1.25  # prompts are prefilled together while padding costs no more than this ...
SPARE_FROM = 16  # requests one after another, for all of which half of the slots' length would do
LAG = 1  # steps of a GPU that are launched before the tokens of one are read
_BAD = -1  # in place of a token id, where logits are not finite


class _Limits(NamedTuple):
    """small: ... or all of them are so few positions that reading the weights costs more. large: positions
    that several prompts may have together, because activations take memory."""

    small: int
    large: int


# A GPU's are estimated: its arithmetic is ahead of its memory by about 200 positions, a CPU's by 64.
LIMITS = {"cpu": _Limits(64, 2048), "cuda": _Limits(256, 16_384)}


class _Chosen(NamedTuple):
    """Tokens on their way to the host: ids (k,) of k rows, the likeliest tokens of rows that report them, and
    `chosen_logprobs` (2, k) where a row asks for its confidence."""

    rows: list[Sequence]
    ids: Tensor
    logprobs: dict[int, tuple[Tensor, Tensor]]
    chosen: Tensor | None
    copied: torch.cuda.Event | None


class Scheduler:
    """See the module's docstring.

    Args:
        model: a `VisionLanguageModel` in eval mode, whose weights do not change during a run.
        slots: rows of the cache, which is how many requests are answered at the same time.
        decode_step: replaces the eager one: (ids (B, 1), kv_cache, start_pos int or (B,)) -> logits (B, V),
            for every B up to `slots`.
        feature_cache: of this model, for images that come again after their slots have gone to others.
        prefixes: of this model: what a row held is kept, for prompts that begin alike. May be given later,
            or taken away.
        prefill_chunk: positions of prompts that are computed between two decode steps at most, or one tile,
            so that a long prompt holds nobody up; None computes prompts at once.

    Raises CacheMemoryError (a ValueError) if the cache does not fit into memory.
    """

    def __init__(
        self,
        model: VisionLanguage,
        slots: int = 8,
        decode_step: DecodeStep | None = None,
        feature_cache: FeatureCache | None = None,
        prefill_chunk: int | None = None,
        prefixes: PrefixStore | None = None,
    ):
        check_integer("slots", slots, low=1)
        if prefill_chunk is not None:
            check_integer("prefill_chunk", prefill_chunk, low=1)
        self.model, self.slots, self._chunk = model, slots, prefill_chunk
        self._step = step_of(decode_step, model.language_model)
        self._features = FeatureCache(model, 0) if feature_cache is None else feature_cache
        self.prefixes = prefixes
        self._limits = LIMITS.get(model.device.type, LIMITS["cpu"])
        self.lag = LAG if model.device.type == "cuda" else 0
        self.budget = CacheBudget.of(model.language_model, slots, lambda: available_bytes(model.device))
        self.budget.check(self.budget.positions)
        self._cache = SlotCache(model.language_model, self.budget)
        # Of each slot: the token to be fed; its position, the row's seed, how many numbers it has drawn, and
        # the token that a recorded step has chosen, or _BAD.
        self._tokens = torch.zeros(slots, 1, dtype=torch.int64, device=model.device)
        self._counters = torch.zeros(4, slots, dtype=torch.int64, device=model.device)
        self._logprobs = torch.zeros(2, slots, device=model.device)  # `chosen_logprobs` of a recorded step
        self._running = False
        self._spared = 0  # see SPARE_FROM
        self.stats = Stats()
        self.reset()

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the cache as it is now."""
        return kv.size_in_bytes(self._cache.kv_cache)

    @property
    def free(self) -> int:
        """How many requests `add` takes now."""
        return self._rows.count(None) - len(self._entered)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._entered or self._launched or self._events) and self._rows == [None] * self.slots

    def reset(self) -> None:
        """Give up all requests and forget what the slots hold, as after an error or for other weights."""
        self._cache.forget()
        self._entered: deque[Sequence] = deque()  # without a slot yet
        self._waiting: deque[Sequence] = deque()  # in their slots, with positions to compute; the next first
        self._rows: list[Sequence | None] = [None] * self.slots
        self._launched: deque[_Chosen] = deque()
        self._events: list[NewTokens | RequestOutput] = []
        self._view: tuple[tuple[int, int, int], kv.KVCache] | None = None
        self._replay: tuple[kv.KVCache, tuple[SamplingParams, bool], Callable[[], None]] | None = None
        self._counted: list[tuple[Sequence, int]] = []  # rows and positions that the counters stand at

    # --------------------------------------------------------------------------------------- the loop

    @torch.no_grad()
    def run(self, requests: Iterable[Request | LazyRequest]) -> Iterator[RequestOutput]:
        """Answer requests and yield each output as it finishes, with the error of a request that fails.

        Raises ValueError while another run of this scheduler goes on, and whatever the iterable raises.
        """
        if self._running or not self.idle:
            raise ValueError("this scheduler is running already: make another one")
        self._running = True
        self.reset()  # the weights may have changed since the last run
        try:
            queue, drained = iter(requests), False
            while not (drained and self.idle):
                while self.free and not drained:
                    request = next(queue, None)
                    if request is None:
                        drained = True
                    else:
                        try:
                            self.add(request)
                        except REQUEST_ERRORS as error:
                            self._events.append(self._failed(request.key, error))
                self._compute_prompts()
                if drained or not self.free:
                    self._decode()
                for event in self._take_events():
                    if isinstance(event, RequestOutput):
                        yield event
        finally:
            self.reset()
            self._running = False

    def add(self, request: Request | LazyRequest) -> None:
        """Take a request in; one of the next steps begins with its prompt.

        Raises ValueError or OSError for one that cannot be answered, and ValueError if no slot is `free`.
        """
        if not self.free:
            raise ValueError(f"all {self.slots} slots are taken")
        with self._timed("prepare"):
            ready = request.prepare() if isinstance(request, LazyRequest) else request
            row = self._read(ready, request.key)
        self._view = self._replay = None  # they would keep the old buffers beside the grown ones
        while True:
            try:
                self._cache.reserve(row.room)
                break
            except CacheMemoryError:
                # Prefixes lie in the host's memory; who asks now comes before who may ask again.
                if self.model.device.type != "cpu" or not self.prefixes or not self.prefixes.give_back():
                    raise
        self._entered.append(row)
        self._spared = self._spared + 1 if self._cache.spare(self._room) else 0
        if self._spared >= SPARE_FROM:
            self.give_back()

    @property
    def _room(self) -> int:
        """Positions that the requests in work need in a slot."""
        return max((row.room for row in (*self._entered, *self._rows) if row is not None), default=0)

    def give_back(self) -> None:
        """Give back the memory of slots that a long request has grown and none in work needs. Where they hold
        more of a prompt, that part is computed again or taken from `prefixes`."""
        self._spared, self._view, self._replay = 0, None, None
        self._cache.shrink(self._room)

    @torch.no_grad()
    def step(self) -> list[NewTokens | RequestOutput]:
        """Compute prompts, all that wait or one chunk, then a token for each row that decodes."""
        self._compute_prompts()
        self._decode()
        return self._take_events()

    @torch.no_grad()
    def cancel(self, key: Any) -> bool:
        """Give up the request with this key; nothing more comes of it. False if it has ended."""
        self._collect(0)  # what is under way for its slot must not meet the next request there
        for row in [*self._entered, *self._rows]:
            if row is not None and row.key == key:
                if row in self._entered:
                    self._entered.remove(row)
                else:
                    # Of a part of a prompt no logits have been seen that would tell.
                    self._leave(row, kept=row.launched > 0 or self._cache.is_finite(row.slot))
                self._events = [event for event in self._events if event.key != key]
                self.stats.cancelled += 1
                return True
        return False

    def _take_events(self) -> list[NewTokens | RequestOutput]:
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------------------------------------ prompts

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
        constraint = None if options.constraint is None else options.constraint()
        return Sequence(key, options, options.choice, prompt, constraint)

    def _compute_prompts(self) -> None:
        """All prompts, or one chunk or tile of one, each in turn; rows whose prompt is complete get their
        first token."""
        fresh: list[tuple[list[Sequence], Tensor]] = []
        while self._entered or self._waiting:
            while self._entered and None in self._rows and self._place(self._entered[0]):
                self._entered.popleft()
            if not self._waiting:  # what has entered waits for the tokens of rows at their limit
                break
            if self._chunk is None:
                for row in self._waiting:
                    self._encode(row, None)
                passes = [(rows, [row.missing for row in rows]) for rows in self._groups()]
            else:
                head = self._waiting[0]
                self._waiting.rotate(-1)
                passes = [] if self._encode(head, 1) else [self._chunk_of(head)]
            for rows, lengths in passes:
                with self._timed("prefill"):
                    logits = self._prefill(rows, lengths)
                complete = [index for index, row in enumerate(rows) if row.embeds is None]
                for index in complete:
                    self._waiting.remove(rows[index])
                if complete:
                    own = logits if len(complete) == len(rows) else logits[complete]
                    fresh.append(([rows[index] for index in complete], own))
            if self._chunk is not None:
                break
        if fresh:
            with self._timed("prefill"):
                self._launch([row for rows, _ in fresh for row in rows], torch.cat([own for _, own in fresh]))
                self._collect(self.lag)

    def _place(self, row: Sequence) -> bool:
        """Choose a free slot for a prompt and copy there what it shares with another one; False if it waits
        to share what is still to be computed."""
        last = len(row.prompt) - 1  # always computed, because its logits are not kept
        common = [min(shared, last) for shared in self._cache.in_common(row.prompt.keys)]
        ready = [min(shared, filled) for shared, filled in zip(common, self._cache.filled)]
        coming = max((common[other.slot] for other in self._waiting), default=0)
        if row.worth_sharing(max(ready), coming):
            held = self.prefixes.match(row.prompt.keys, row.prompt.digests) if self.prefixes else 0
            if row.worth_sharing(held, coming):
                return False
        source = max(range(self.slots), key=ready.__getitem__)
        free = [slot for slot, other in enumerate(self._rows) if other is None]
        slot = max(free, key=ready.__getitem__)
        if not row.worth_sharing(ready[slot], ready[source]):
            source = slot
        row.reused = row.start = ready[source] if row.worth_sharing(0, ready[source]) else 0
        self._cache.assign(slot, row.prompt.keys, source, row.reused)
        if self.prefixes is not None:
            row.reused = row.start = self.prefixes.extend(self._cache, slot, row.prompt, row.reused)
        row.tile, _ = first_tile(self.model, row.prompt, row.reused)
        row.slot, self._rows[slot] = slot, row
        self._waiting.append(row)
        return True

    def _encode(self, row: Sequence, most: int | None) -> int:
        """Encode up to `most` more tiles of a prompt, and make its embeddings once it has all of them.
        Returns how many were encoded; equal ones cost nothing."""
        prompt, encoded = row.prompt, 0
        if row.embeds is not None:
            return 0
        with self._timed("vision"):
            while (first := row.tile + len(row.features)) < len(prompt.digests) and encoded != most:
                assert prompt.tiles is not None, "a prompt with digests has tiles"
                some = slice(first, None if most is None else first + 1)
                masks = None if prompt.masks is None else prompt.masks[some]
                features, new = self._features.encode(prompt.tiles[some], masks, prompt.digests[some])
                row.features += features.split(1)
                encoded += new
            if first >= len(prompt.digests):
                rest = torch.cat(row.features) if row.features else None
                row.embeds = embed_after(self.model, prompt, row.reused, rest)
                row.prompt, row.features = replace(prompt, tiles=None, masks=None), []
        self.stats.tiles_encoded += encoded
        return encoded

    def _groups(self) -> list[list[Sequence]]:
        """The prompts that wait and are encoded, neighbours of similar length together."""
        groups: list[list[Sequence]] = []
        ready = [row for row in self._waiting if row.embeds is not None]
        for row in sorted(ready, key=lambda row: row.slot):
            if groups and groups[-1][-1].slot == row.slot - 1 and self._together([*groups[-1], row]):
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def _chunk_of(self, head: Sequence) -> tuple[list[Sequence], list[int]]:
        """What is computed next of a prompt, or all of several short ones with it."""
        assert self._chunk is not None
        rows = next(rows for rows in self._groups() if head in rows)
        return rows, [min(row.missing, self._chunk) for row in rows]

    def _together(self, rows: list[Sequence]) -> bool:
        """Whether one pass over these prompts, padded to the longest, is better than several."""
        lengths = [row.missing for row in rows]
        large = self._limits.large if self._chunk is None else min(self._chunk, self._limits.large)
        if self._step.alone:
            return sum(lengths) <= large
        padded, end = len(rows) * max(lengths), max(row.start for row in rows) + max(lengths)
        if padded > large or end > self._cache.capacity:
            return False
        return padded <= self._limits.small or padded <= PADDED_AT_MOST * sum(lengths)

    def _prefill(self, rows: list[Sequence], lengths: list[int]) -> Tensor:
        """One pass over the next `lengths` positions of rows in neighbouring slots: logits (k, V) of the last
        of each."""
        longest, starts = max(lengths), [row.start for row in rows]
        embeds = [
            row.embeds[:, :length]
            for row, length in zip(rows, lengths, strict=True)
            if row.embeds is not None
        ]
        x = torch.cat([F.pad(own, (0, 0, 0, longest - own.shape[1])) for own in embeds])
        start_pos = starts[0] if len(set(starts)) == 1 else kv.to_device(torch.tensor(starts), x.device)
        end = min(max(starts) + longest, self._cache.capacity)  # no more than that is real
        cache = kv.view(self._cache.kv_cache, end, rows[0].slot, len(rows))
        logits = self._step.prefill(x, lengths, cache, start_pos)
        for row, length in zip(rows, lengths, strict=True):
            assert row.embeds is not None
            row.embeds = row.embeds[:, length:] if length < row.embeds.shape[1] else None
            row.start += length
            self._cache.filled[row.slot] = max(self._cache.filled[row.slot], min(row.start, len(row.prompt)))
            self.stats.prefilled += length
            self.stats.reused += row.reused if row.start == len(row.prompt) else 0
        return logits

    # ------------------------------------------------------------------------------------------- tokens

    def _decode(self) -> None:
        """One step for all rows that decode; without any, what is under way is read."""
        self._compact()
        rows = [row for row in self._rows if row is not None and row.decodes]
        if not rows:
            self._collect(0)
            return
        with self._timed("decode"):
            span = [row for row in self._rows[: 1 + rows[-1].slot] if row is not None]
            positions = [self._place_of(row) for row in span]
            params, count = rows[0].params, len(span)
            record = self._step.records and all(row.params == params and row.plain for row in rows)
            if not record and min(positions) == max(positions):
                start_pos: int | Tensor = positions[0]
                self._counted = []
            else:
                self._count(span, positions)
                start_pos = self._counters[0, :count]
            cache = self._view_of(count, None if isinstance(start_pos, int) else max(positions) + 1)
            tokens = self._tokens[:count]
            self.stats.decode_steps += 1
            if record:
                assert isinstance(start_pos, Tensor)
                sure = any(row.options.confidence for row in rows)
                self._recorded(count, cache, params, sure)()
                idle = len(rows) < count
                own = self._index([row.slot for row in rows]) if idle else slice(count)
                chosen = self._logprobs[:, own].clone() if sure else None
                self._push(rows, self._counters[3, own].clone(), {}, chosen)
            else:
                logits = self._step(tokens, cache, start_pos)
                if not isinstance(start_pos, int):
                    self._counters[::2, :count] += 1
                if len(rows) < count:
                    logits = logits[self._index([row.slot for row in rows])]
                self._launch(rows, logits)
            self._collect(0 if any(row.constraint for row in rows) else self.lag)

    def _place_of(self, row: Sequence) -> int:
        """Where a step writes in a row's slot. One that does not decode, between others that do, gets a token
        for nothing, in a place that holds nothing yet."""
        if row.decodes:
            return row.position
        place = row.position if row.launched and row.embeds is None else row.start
        place = min(place, self._cache.capacity - 1)
        self._cache.filled[row.slot] = min(self._cache.filled[row.slot], place)
        return place

    def _count(self, span: list[Sequence], positions: list[int]) -> None:
        """Have the counters of these rows on the device, which counts on by itself while rows stay."""
        if self._counted != list(zip(span, positions)):
            seeds = [0 if row.params.greedy else row.first_seed() for row in span]
            counters = torch.tensor([positions, seeds, [row.launched for row in span]])
            self._counters[:3, : len(span)] = kv.to_device(counters, self.model.device)
        self._counted = [(row, position + 1) for row, position in zip(span, positions)]

    def _view_of(self, count: int, longest: int | None) -> kv.KVCache:
        """The cache of the first `count` slots as a step reads it: as far as the longest, or all of it."""
        capacity = self._cache.capacity
        length = capacity if longest is None else kv.view_length(longest, self._cache.kv_cache)
        wanted = (count, length, capacity)
        if self._view is None or self._view[0] != wanted:
            self._view = (wanted, kv.view(self._cache.kv_cache, length, 0, count))
        return self._view[1]

    def _recorded(
        self, count: int, cache: kv.KVCache, params: SamplingParams, sure: bool
    ) -> Callable[[], None]:
        """A step of the first `count` slots with its choice, recorded; asked for anew where those change."""
        if self._replay is None or self._replay[0] is not cache or self._replay[1] != (params, sure):
            tokens, counters = self._tokens[:count], self._counters[:, :count]
            choose = _chooser(tokens, counters, params, self._logprobs[:, :count] if sure else None)
            state = [self._tokens, self._counters, self._logprobs]
            replay = self._step.recorded(tokens, cache, counters[0], choose, state, (count, params, sure))
            self._replay = cache, (params, sure), replay
        return self._replay[2]

    def _launch(self, rows: list[Sequence], logits: Tensor) -> None:
        """Choose the next token of each row, logits (k, V), without waiting for it."""
        held = [(index, row) for index, row in enumerate(rows) if row.constraint is not None]
        for index, row in held:
            assert row.constraint is not None
            row.constraint.close(logits[index])
        logprobs = {
            index: logits[index : index + 1].float().log_softmax(-1)
            for index, row in enumerate(rows)
            if row.options.logprobs is not None
        }
        best = logits.argmax(-1).tolist() if held else []
        for index, row in held:
            assert row.constraint is not None
            try:
                alone = row.params.likeliest and not row.options.confidence
                if not alone or not row.constraint.allows(best[index]):
                    row.constraint.mask(logits[index])
            except ConstraintError as error:  # of this row alone
                row.error = error
                logits[index] = math.nan
        token = sample_rows(rows, logits)  # (k, 1)
        slots = [row.slot for row in rows]
        if slots == list(range(len(rows))):
            self._tokens[: len(rows)] = token
        else:
            self._tokens[self._index(slots)] = token
        found = {}
        for index, own in logprobs.items():
            values, ids = likeliest(own, token[index : index + 1], rows[index].options.logprobs or 0)
            found[index] = self._to_host(values[0]), self._to_host(ids[0])
        finite = logits.amax(-1).isfinite()  # the maximum is NaN or +inf if any logit is
        sure = any(row.options.confidence for row in rows)
        chosen = chosen_logprobs(logits, token) if sure else None
        self._push(rows, token[:, 0].masked_fill(~finite, _BAD), found, chosen)

    def _push(
        self,
        rows: list[Sequence],
        ids: Tensor,
        logprobs: dict[int, tuple[Tensor, Tensor]],
        chosen: Tensor | None,
    ) -> None:
        """Send the chosen ids (k,) to the host; `_collect` reads them there."""
        ids, copied = self._to_host(ids), None
        chosen = None if chosen is None else self._to_host(chosen)
        if self.model.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self.model.device))
        self._launched.append(_Chosen(rows, ids, logprobs, chosen, copied))
        for row in rows:
            row.launched += 1

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A copy that has arrived once what was launched so far has run; on a CPU the tensor itself."""
        if self.model.device.type != "cuda":
            return tensor.cpu()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def _index(self, numbers: list[int]) -> Tensor:
        return kv.to_device(torch.tensor(numbers), self.model.device)

    # --------------------------------------------------------------------------------------------- ends

    def _collect(self, lag: int) -> None:
        """Read the tokens of all steps but the last `lag`: the loop's one read from the device."""
        while len(self._launched) > lag:
            rows, ids, logprobs, chosen, copied = self._launched.popleft()
            if copied is not None:
                copied.synchronize()
            own = [(0.0, 0.0)] * len(rows) if chosen is None else chosen.T.tolist()
            for index, (row, token_id) in enumerate(zip(rows, ids.tolist(), strict=True)):
                if not row.ended:
                    if token_id not in row.stop_ids or not row.tokens:
                        row.sums = (row.sums[0] + own[index][0], row.sums[1] + own[index][1])
                    self._take(row, token_id, logprobs.get(index))

    def _take(self, row: Sequence, token_id: int, logprobs: tuple[Tensor, Tensor] | None) -> None:
        """Note a row's next token, and what a constraint forces after it."""
        if token_id == _BAD:
            self._leave(row, kept=False)
            error = row.error or NotFiniteError(len(row.tokens) + 1)
            self._events.append(self._failed(row.key, error))
            return
        new_ids, limit = [token_id], row.options.max_new_tokens - len(row.tokens)
        if row.constraint is not None:
            row.constraint.accept(token_id)
            if token_id not in row.stop_ids:
                new_ids += row.constraint.forced()
                ends = [number for number, one in enumerate(new_ids, 1) if one in row.stop_ids]
                del new_ids[min([limit, *ends]) :]
                for forced in new_ids[1:]:
                    row.constraint.accept(forced)
        row.tokens += new_ids
        reports = None
        if logprobs is not None:
            reports = [token_logprobs(logprobs[0].tolist(), logprobs[1].tolist())]
            reports += [TokenLogprobs(None, [])] * (len(new_ids) - 1)
        self._events.append(NewTokens(row.key, new_ids, reports, row.reused))
        stopped = new_ids[-1] in row.stop_ids
        if stopped or len(row.tokens) >= row.options.max_new_tokens:
            self._leave(row)
            self.stats.completed += 1
            self.stats.new_tokens += len(row.tokens)
            reason = "stop" if stopped else "length"
            sure = confidence_of(*row.sums) if row.options.confidence else None
            self._events.append(RequestOutput(row.key, row.tokens, reason, len(row.prompt), row.reused, sure))
        elif len(new_ids) > 1:  # they are computed like a prompt
            row.start = row.position
            row.launched += len(new_ids) - 1
            ids = kv.to_device(torch.tensor([new_ids]), self.model.device)
            if row.seen is not None:
                row.seen[ids[0]] = True
            row.embeds = self.model.language_model.embed_tokens(ids)
            self._waiting.append(row)

    def _leave(self, row: Sequence, kept: bool = True) -> None:
        """Give a row's slot to others, with what was computed for it."""
        self._rows[row.slot], row.ended = None, True
        if row in self._waiting:
            self._waiting.remove(row)
        if not kept:
            self._cache.clear(row.slot)
        elif row.tokens and self._cache.filled[row.slot] == len(row.prompt):
            fed = len(row.tokens) - 1 if row.embeds is None else row.start - len(row.prompt)
            self._cache.append(row.slot, torch.tensor(row.tokens[:fed], dtype=torch.int64))
        if kept and self.prefixes is not None:
            keys = self._cache.keys(row.slot)
            self.prefixes.save(keys, row.prompt.digests, self._cache.kv_cache, row.slot)

    def _failed(self, key: Any, error: Exception) -> RequestOutput:
        self.stats.failed += 1
        return RequestOutput(key, [], "error", error=error)

    def _compact(self) -> None:
        """Move rows that decode from the last slots into free ones before them."""
        for source in reversed(range(self.slots)):
            row = self._rows[source]
            if row is None or not row.decodes:
                continue
            if None not in self._rows[:source]:
                return
            target = self._rows.index(None)
            self._cache.move(source, target, row.position)
            self._tokens[target] = self._tokens[source]
            row.slot, self._rows[target], self._rows[source] = target, row, None

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.stats.seconds[name] += time.perf_counter() - began


def _chooser(
    tokens: Tensor, counters: Tensor, params: SamplingParams, logprobs: Tensor | None
) -> Callable[[Tensor], None]:
    """What a recorded step does with its logits (B, V): the next tokens (B, 1), the counters (4, B) and, if
    wanted, the tokens' `chosen_logprobs` (2, B)."""
    _, seeds, drawn, chosen = counters

    def choose(logits: Tensor) -> None:
        token = sample(logits, params, None if params.greedy else uniforms(seeds, drawn))
        tokens.copy_(token)
        if logprobs is not None:
            logprobs.copy_(chosen_logprobs(logits, token))
        chosen.copy_(token[:, 0].masked_fill(~logits.amax(-1).isfinite(), _BAD))
        counters[::2] += 1  # positions and drawn

    return choose


def sample_rows(rows: list[Sequence], logits: Tensor) -> Tensor:
    """One token for each row, which may want different things: logits (k, V) -> (k, 1), on the device.

    Each row draws with the seed that `model.generate` gives it alone.
    """
    alike: dict[SamplingParams, list[int]] = {}
    for number, row in enumerate(rows):
        alike.setdefault(row.params, []).append(number)
    if len(alike) == 1:  # no copy of the logits
        return _sample_alike(rows, logits)
    token = torch.empty(len(rows), 1, dtype=torch.int64, device=logits.device)
    for members in alike.values():
        index = kv.to_device(torch.tensor(members), logits.device)
        token[index] = _sample_alike([rows[member] for member in members], logits[index])
    return token


def _sample_alike(rows: list[Sequence], logits: Tensor) -> Tensor:
    """`sample` for rows with equal parameters."""
    params, uniform, seen, device = rows[0].params, None, None, logits.device
    if not params.greedy:
        counts = torch.tensor([[row.first_seed(), row.launched] for row in rows]).T
        uniform = uniforms(*kv.to_device(counts, device))
    if params.repetition_penalty != 1:
        for row in rows:
            if row.seen is None:
                ids = kv.to_device(row.prompt.input_ids[None], device)
                (row.seen,) = seen_tokens(ids, None, logits.shape[1], 1)
        seen = torch.stack([row.seen for row in rows if row.seen is not None])  # (k, V)
    token = sample(logits, params, uniform, seen)
    for row, own in zip(rows, token, strict=True):
        if row.seen is not None:
            row.seen.scatter_(0, own, True)
    return token
