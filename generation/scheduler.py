"""Many requests of uneven length through a fixed number of cache slots, in one process.

    scheduler = Scheduler(model, slots=8)
    print(scheduler.plan())                            # bytes of cache needed and had, before any work
    requests = (Request(ids, pixels, options=GenerationOptions(max_new_tokens=32), key=n) for n, ... in ...)
    for done in scheduler.run(requests):               # as they finish, not in order
        print(done.key, done.token_ids, done.stop_reason, done.error)

A row that has finished leaves its slot to the next request at once. Prompts share what they have in common
with another slot's prompt from the front, an image above all: it is encoded and prefilled once, and copied.
Where requests run out, the rows that are left move together and the batch becomes narrower. Each request gets
the tokens that `model.generate` gives it alone, in any order and with any number of slots (in float32; in
16 bits rounding differs between batch sizes, as everywhere).

Requests are taken from their iterable only when a slot is free, so images may be loaded while iterating;
those made by a `Deferred` may fail, and fail alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from generation import kv_cache as kv
from generation.chooser import NotFiniteError
from generation.decoding import VIEW_STEP, DecodeStep, eager_step, prefill
from generation.feature_cache import FeatureCache
from generation.memory import available_bytes, bytes_per_position
from generation.options import check_integer
from generation.prompt import Prompt
from generation.requests import Completed, Deferred, Request, RequestReader, Row
from generation.row_sampling import sample_rows
from generation.slots import Plan, SlotCache

REQUEST_ERRORS = (ValueError, OSError)  # what may be wrong with one request; anything else ends the run
PADDED_AT_MOST = 1.25  # prompts are prefilled together while padding costs no more than this ...
SMALL_PREFILL = 64  # ... or all of them are so few positions that reading the weights costs more
LARGE_PREFILL = 2048  # positions that several prompts may have together: activations take memory
_BAD = -1  # in place of a token id, where logits are not finite


@dataclass
class Stats:
    """What a scheduler has done so far; `decoded_rows` / `decode_steps` is the mean width of a step.

    The device is not waited for to take the time: on a GPU, `seconds` counts its work where a result is read,
    images as part of the prefill.
    """

    completed: int = 0
    failed: int = 0
    new_tokens: int = 0
    prefilled: int = 0
    reused: int = 0
    tiles_encoded: int = 0
    decode_steps: int = 0
    decoded_rows: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prepare", "vision", "prefill", "decode"), 0.0)
    )


class Scheduler:
    """See the module's docstring. One run at a time.

    Args:
        model: a `VisionLanguageModel` in eval mode, whose weights stay as they are during a run.
        slots: rows of the cache, requests in work at the same time.
        max_bytes: of the cache; None is what this machine has free.
        context: positions that every slot must have room for, reserved up front; None begins with
            `kv.STEP` and grows when a request needs it, up to the model's context.
        decode_step: replaces the eager one: (ids (B, 1), kv_cache, start_pos int or (B,)) -> logits (B, V),
            for every B up to `slots`.
        feature_cache: of this model, for images that come again after their slots have gone to others.

    Raises:
        CacheMemoryError: the cache does not fit the memory; a ValueError in one sentence.
        ValueError: other arguments that cannot be.
    """

    def __init__(
        self,
        model,
        slots: int = 8,
        max_bytes: int | None = None,
        context: int | None = None,
        decode_step: DecodeStep | None = None,
        feature_cache: FeatureCache | None = None,
    ):
        check_integer("slots", slots, low=1)
        text = model.config.text
        if context is not None:
            check_integer("context", context, low=1, high=text.max_position_embeddings)
        self.model, self.slots = model, slots
        self._step = decode_step or eager_step(model.language_model)
        self._features = FeatureCache(model, 0) if feature_cache is None else feature_cache
        limit, dtype = text.max_position_embeddings, model.language_model.cache_dtype
        self._plan = Plan(
            slots,
            positions=min(kv.STEP, limit) if context is None else context,
            context=limit if context is None else context,
            bytes_per_position=bytes_per_position(model.language_model),
            had=available_bytes(model.device) if max_bytes is None else max_bytes,
        )
        self._plan.check()
        self._cache = SlotCache(text, self._plan, dtype, model.device)
        self._tokens = torch.zeros(slots, 1, dtype=torch.int64, device=model.device)
        self._reader = RequestReader(model, self._plan.context)
        self._running = False
        self.stats = Stats()
        self._start()

    def plan(self) -> Plan:
        """Memory of the cache: needed and had, in bytes. `str` of it is one line."""
        return self._plan

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the cache as it is now."""
        return kv.size_in_bytes(self._cache.kv_cache) if self._cache.kv_cache else 0

    def _start(self) -> None:
        self._cache.forget()  # the weights may change between runs
        self._rows: list[Row | None] = [None] * self.slots
        self._waiting: list[Row] = []  # in their slots, but not prefilled
        self._fresh: list[tuple[list[Row], Tensor]] = []  # prefilled, without a first token: logits (k, V)
        self._drained = False
        self._view: tuple[tuple[int, int, int], kv.KVCache] | None = None
        self._start_pos: Tensor | None = None  # (B,), while the rows stay the same

    @torch.no_grad()
    def run(self, requests: Iterable[Request | Deferred]) -> Iterator[Completed]:
        """Answer requests; yields each as it finishes. What is wrong with one of them is in its result.

        Raises:
            ValueError: another run of this scheduler is not at its end.
            Exception: what the iterable itself raises, or the model for reasons that are no request's.
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

    def _admit(self, queue: Iterator[Request | Deferred]) -> Iterator[Completed]:
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
                    ended = self._choose(rows, torch.cat([logits for _, logits in fresh]))
                yield from ended

    def _enter(self, request: Request | Deferred) -> Completed | None:
        """Put a request into a free slot; or say why not."""
        try:
            with self._timed("prepare"):
                made = request.prepare() if isinstance(request, Deferred) else request
                row = self._reader.read(replace(made, key=request.key))
            self._view = None  # it would keep the old buffers beside the grown ones
            self._cache.make_room(row.prompt + row.options.max_new_tokens - 1)
        except REQUEST_ERRORS as error:
            return self._failed(request.key, error)
        self._place(row)
        return None

    def _place(self, row: Row) -> None:
        """Choose a slot for a prompt and put there what it shares with another one; encode its images."""
        common = [min(shared, row.prompt - 1) for shared in self._cache.common(row.keys)]
        ready = [min(shared, filled) for shared, filled in zip(common, self._cache.filled)]
        if row.gains(max(ready), max(common)):  # with a prompt that waits: it goes first
            self._prefill_waiting()
            ready = common
        source = max(range(self.slots), key=ready.__getitem__)
        free = [slot for slot, other in enumerate(self._rows) if other is None]
        slot = max(free, key=ready.__getitem__)
        if not row.gains(ready[slot], ready[source]):
            source = slot
        row.reused = ready[source] if row.gains(0, ready[source]) else 0
        with self._timed("vision"):
            row.rest = self._embed_rest(row)
        self._cache.take_over(slot, row.keys, source, row.reused)
        row.slot, self._rows[slot] = slot, row
        self._waiting.append(row)

    def _embed_rest(self, row: Row) -> Tensor:
        """Embeddings (1, L - reused, D) of what is not in the cache."""
        model, features, masks = self.model, None, row.masks
        tile, place = divmod(int((row.keys[: row.reused] < 0).sum()), model.config.tokens_per_tile)
        if tile < len(row.digests):
            masks = None if masks is None else masks[tile:]
            features, encoded = self._features.encode(row.tiles[tile:], masks, row.digests[tile:])
            features = features.flatten(0, 1)[place:][None]  # (N, S, D) -> (1, N · S - place, D)
            self.stats.tiles_encoded += encoded
        front = row.prompt - len(row.input_ids)
        ids = row.input_ids[None, max(0, row.reused - front) :].to(model.device)
        return model.place_features(ids, model.language_model.embed_tokens(ids), features)

    def _prefill_waiting(self) -> None:
        """Prefill the rows that wait, neighbours of similar length together."""
        waiting, self._waiting = sorted(self._waiting, key=lambda row: row.slot), []
        groups: list[list[Row]] = []
        for row in waiting:
            if groups and groups[-1][-1].slot == row.slot - 1 and self._together([*groups[-1], row]):
                groups[-1].append(row)
            else:
                groups.append([row])
        for rows in groups:
            with self._timed("prefill"):
                self._fresh.append((rows, self._prefill(rows)))

    def _together(self, rows: list[Row]) -> bool:
        """Whether one pass over these prompts' rests, padded to the longest, is better than several."""
        lengths = [row.prompt - row.reused for row in rows]
        padded, reach = len(rows) * max(lengths), max(row.reused for row in rows) + max(lengths)
        if padded > LARGE_PREFILL or reach > self._cache.capacity:
            return False
        return padded <= SMALL_PREFILL or padded <= PADDED_AT_MOST * sum(lengths)

    def _prefill(self, rows: list[Row]) -> Tensor:
        """One pass over the rests of prompts in neighbouring slots: logits (k, V) of their last positions."""
        lengths = tuple(row.rest.shape[1] for row in rows)
        x = torch.cat([F.pad(row.rest, (0, 0, 0, max(lengths) - row.rest.shape[1])) for row in rows])
        starts = [row.reused for row in rows]
        start_pos: int | Tensor = starts[0]
        if len(set(starts)) > 1:
            start_pos = torch.tensor(starts, device=x.device)
        cache = self._cache.rows(rows[0].slot, len(rows), max(starts) + max(lengths))
        logits = prefill(self.model.language_model, Prompt(x, lengths), cache, start_pos)
        for row in rows:
            row.rest = row.tiles = row.masks = None
            self._cache.filled[row.slot] = row.prompt
            self.stats.prefilled += row.prompt - row.reused
            self.stats.reused += row.reused
        return logits

    # ------------------------------------------------------------------------------------------- tokens

    def _decode(self) -> Iterator[Completed]:
        """One step for all rows, which stand in the first slots; yields those that end with it."""
        with self._timed("decode"):
            rows = [row for row in self._rows if row is not None]
            cache, start_pos = self._positions(rows)
            logits = self._step(self._tokens[: len(rows)], cache, start_pos)
            self.stats.decode_steps += 1
            self.stats.decoded_rows += len(rows)
            ended = self._choose(rows, logits)
        yield from ended

    def _positions(self, rows: list[Row]) -> tuple[kv.KVCache, int | Tensor]:
        """What a decode step reads and where it writes; see `CacheCursor.advance`."""
        positions = [row.position for row in rows]
        shared = min(positions) == max(positions)
        if shared:
            length = self._cache.capacity
        else:
            length = min(kv.round_up(max(positions) + 1, VIEW_STEP), self._cache.capacity)
        wanted = (len(rows), length, self._cache.capacity)
        if self._view is None or self._view[0] != wanted:
            self._view = (wanted, self._cache.rows(0, len(rows), length))
        if shared:
            self._start_pos = None
            return self._view[1], positions[0]
        if self._start_pos is None:
            self._start_pos = torch.tensor(positions, device=self.model.device)
        else:
            self._start_pos = self._start_pos + 1
        return self._view[1], self._start_pos

    def _choose(self, rows: list[Row], logits: Tensor) -> list[Completed]:
        """The next token of each row, logits (k, V); the rows that end with it leave their slots."""
        token = sample_rows(rows, logits)  # (k, 1)
        if [row.slot for row in rows] == list(range(len(rows))):
            self._tokens[: len(rows)] = token
        else:
            self._tokens[torch.tensor([row.slot for row in rows], device=token.device)] = token
        # The maximum is NaN where anything is, and +inf where anything is. The step's one read-back:
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

    def _take(self, row: Row, token_id: int) -> Completed | None:
        """Note a row's next token; its result where it ends there."""
        if token_id == _BAD:
            self._cache.clear(row.slot)
            return self._failed(row.key, NotFiniteError(len(row.tokens) + 1))
        row.tokens.append(token_id)
        stopped = token_id in row.options.stop_token_ids
        if not stopped and len(row.tokens) < row.options.max_new_tokens:
            return None
        self.stats.completed += 1
        self.stats.new_tokens += len(row.tokens)
        return Completed(row.key, row.tokens, "stop" if stopped else "length", row.prompt, row.reused)

    def _failed(self, key, error: Exception) -> Completed:
        self.stats.failed += 1
        return Completed(key, [], "error", error=error)

    def _compact(self) -> None:
        """Where requests have run out, move rows from the last slots into free ones in front of them."""
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
