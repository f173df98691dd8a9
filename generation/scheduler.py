"""Many requests of uneven length through a fixed number of cache slots, in one process.

    scheduler = Scheduler(model, slots=8)
    print(scheduler.cache)                             # bytes needed and available, before any work
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

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from generation import kv_cache as kv
from generation.features import FeatureCache
from generation.keyed_prompts import KeyedPrompt, embed_after, first_part, read_prompt
from generation.kv_cache import STATE_WINDOW, has_states
from generation.options import GenerationOptions, check_integer, with_overrides
from generation.prefix_store import PrefixStore
from generation.protocol import VisionLanguage
from generation.recorded import VIEW_STEP, Recorder, alike
from generation.requests import LazyRequest, NewTokens, Request, RequestOutput, SlotRow, Stats
from generation.sampling import Chosen, Row, choose
from generation.score import decide
from generation.slots import SlotCache
from generation.speculation import propose, proposer_of, verify
from generation.steps import Step

REQUEST_ERRORS = (ValueError, OSError)  # what may be wrong with one request; anything else ends the run
PADDED_AT_MOST = 1.25  # prompts are prefilled together while padding costs no more than this ...
# ... or all of them are so few positions that reading the weights costs more, and up to so many positions,
# because activations take memory. A GPU's are estimated: its arithmetic is ahead of its memory by about 200
# positions, a CPU's by 64.
LIMITS = {"cpu": (64, 2048), "cuda": (256, 16_384)}
LAG = 1  # steps of a GPU that are launched before the tokens of one are read


class Scheduler:
    """See the module's docstring.

    Args:
        model: a `VisionLanguageModel` in eval mode, whose weights do not change during a run.
        slots: rows of the cache, which is how many requests are answered at the same time.
        decode_step: in place of the eager one.
        feature_cache: of this model, for images that come again after their slots have gone to others.
        prefixes: of this model: what a row held is kept, for prompts that begin alike. May be given later,
            or taken away.
        prefill_chunk: positions of prompts that are computed between two decode steps at most, or one tile,
            so that a long prompt holds nobody up; None computes prompts at once. `chunk` is this number, and
            may be changed.

    `cache` has the slots: what they hold and need (`str(scheduler.cache)`), and `prefixes`.

    Raises CacheMemoryError (a ValueError) if the cache does not fit into memory.
    """

    def __init__(
        self,
        model: VisionLanguage,
        slots: int = 8,
        decode_step: Step | None = None,
        feature_cache: FeatureCache | None = None,
        prefill_chunk: int | None = None,
        prefixes: PrefixStore | None = None,
    ):
        check_integer("slots", slots, low=1)
        if prefill_chunk is not None:
            check_integer("prefill_chunk", prefill_chunk, low=1)
        self.model, self.slots, self.chunk = model, slots, prefill_chunk
        self._step = decode_step or Step(model.language_model)
        self._features = FeatureCache(model, 0) if feature_cache is None else feature_cache
        self._small, self._large = LIMITS.get(model.device.type, LIMITS["cpu"])
        self.lag = LAG if model.device.type == "cuda" else 0
        self._most = STATE_WINDOW // 2 if has_states(model.language_model.cache_layout) else 2**31
        self.cache = SlotCache(model.language_model, slots, prefixes)
        self._tokens = torch.zeros(slots, 1, dtype=torch.int64, device=model.device)  # to be fed in each slot
        self._recorder = Recorder(self._step, self._tokens) if self._step.records else None
        self._step.rehearse(slots)
        self.stats = Stats()
        self.reset()

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the cache as it is now."""
        return kv.size_in_bytes(self.cache.kv_cache)

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
        self.cache.forget()
        self._entered: deque[SlotRow] = deque()  # without a slot yet
        self._waiting: deque[SlotRow] = deque()  # in their slots, with positions to compute; the next first
        self._rows: list[SlotRow | None] = [None] * self.slots
        self._launched: deque[Chosen] = deque()
        self._events: list[NewTokens | RequestOutput] = []
        self._forget_buffers()

    def _forget_buffers(self) -> None:
        """The cache gets other buffers, beside which views and recordings would keep the old ones."""
        self._view: tuple[tuple[int, int, int], kv.KVCache] | None = None
        if self._recorder is not None:
            self._recorder.replay = None

    # --------------------------------------------------------------------------------------- the loop

    def run(self, requests: Iterable[Request | LazyRequest]) -> Iterator[RequestOutput]:
        """Answer requests and yield each output as it finishes, with the error of a request that fails.

        Raises ValueError while this scheduler has other work, and whatever the iterable raises.
        """
        if not self.idle:
            raise ValueError("this scheduler is running already: make another one")
        self.reset()  # the weights may have changed since the last run
        try:
            queue, drained = iter(requests), False
            while not (drained and self.idle):
                while self.free and not drained:
                    if (request := next(queue, None)) is None:
                        drained = True
                        break
                    try:
                        self.add(request)
                    except REQUEST_ERRORS as error:
                        self._events.append(RequestOutput(request.key, [], "error", error=error))
                yield from (event for event in self.step() if isinstance(event, RequestOutput))
        finally:
            self.reset()

    def add(self, request: Request | LazyRequest) -> None:
        """Take a request in; one of the next steps begins with its prompt.

        Raises ValueError or OSError for one that cannot be answered, and ValueError if no slot is `free`.
        """
        if not self.free:
            raise ValueError(f"all {self.slots} slots are taken")
        with self._timed("prepare"):
            ready = request.prepare() if isinstance(request, LazyRequest) else request
            options = ready.options
            if options != replace(
                options, num_return_sequences=1, use_cache=True, decode_step=None, prefill_chunk=None
            ):
                raise ValueError(
                    "a request cannot have num_return_sequences, use_cache, decode_step and prefill_chunk: "
                    "make one for each answer, and give the scheduler step and chunk"
                )
            options = with_overrides(options, {}, self.model.config.eos_token_ids)
            inputs = ready.input_ids[None], ready.pixel_values, ready.pixel_attention_mask
            prompt = read_prompt(self.model, *inputs, max_new_tokens=options.max_new_tokens)
        self.enter(request.key, prompt, options)

    def enter(self, key: Any, prompt: KeyedPrompt, options: GenerationOptions) -> SlotRow:
        """`add` of a prompt that was read, for options that were looked at. Returns its row, which says how
        its answer grows."""
        row = SlotRow(options, prompt.input_ids, key=key, prompt=prompt)
        row.proposer = proposer_of(row, self._step, self.model.config.image_token_id)
        self._forget_buffers()
        self.cache.reserve(row.room)
        self._entered.append(row)
        return row

    def give_back(self) -> None:
        """Give back the memory of the slots if nothing is in work; what they hold may be in `prefixes`."""
        if self.idle:
            self.cache.kv_cache = []
            self.reset()

    @torch.no_grad()
    def step(self) -> list[NewTokens | RequestOutput]:
        """Compute prompts, all that wait or one chunk, then a token for each row that decodes. If nothing was
        decoding, the first tokens are returned before another step runs."""
        others = any(row is not None and row.decodes for row in self._rows)
        self._compute_prompts()
        if others or not self._events:
            self._decode()
        events, self._events = self._events, []
        return events

    @torch.no_grad()
    def cancel(self, key: Any) -> bool:
        """Give up the request with this key; nothing more comes of it. False if it has ended."""
        self._collect(0)  # what is under way for its slot must not meet the next request there
        found = [row for row in {*self._entered, *self._rows} if row is not None and row.key == key]
        for row in found:
            if row in self._entered:  # also where an interrupt has left it in its slot as well
                self._entered.remove(row)
            if row in self._rows:
                # A partly prefilled prompt has no logits yet, so its cache is checked for NaN.
                self._leave(row, kept=row.launched > 0 or self.cache.is_finite(row.slot))
            row.stop_reason = row.stop_reason or "cancelled"
        self._events = [event for event in self._events if not (found and event.key == key)]
        self.stats.cancelled += bool(found)
        return bool(found)

    # ------------------------------------------------------------------------------------------ prompts

    def _compute_prompts(self) -> None:
        """All prompts, or one chunk or tile of one, each in turn; rows whose prompt is complete get their
        first token."""
        complete, last = list[SlotRow](), list[Tensor]()
        while self._entered or self._waiting:
            while self._entered and None in self._rows and self._place(self._entered[0]):
                self._entered.popleft()
            if not self._waiting:  # what has entered waits for the tokens of rows at their limit
                break
            if self.chunk is None:
                for row in list(self._waiting):
                    self._encode(row, None)
                passes = self._groups()
            else:
                head = self._waiting[0]
                self._waiting.rotate(-1)
                passes = [] if self._encode(head, 1) else [one for one in self._groups() if head in one]
            for rows in passes:
                with self._timed("prefill"):
                    logits = self._prefill(rows)
                ends = [index for index, row in enumerate(rows) if row.embeds is None]
                for index in ends:
                    self._waiting.remove(rows[index])
                    complete.append(rows[index])
                last.append(logits if len(ends) == len(rows) else logits[ends])
            if self.chunk is not None:
                break
        if complete:
            with self._timed("prefill"):
                self._launch(complete, torch.cat(last))
                self._collect(self._lag)

    def _place(self, row: SlotRow) -> bool:
        """Give a prompt a free slot, with what it shares with others; False if it waits to share what is
        still to be computed."""
        free = [slot for slot, other in enumerate(self._rows) if other is None]
        taken = self.cache.take(row.prompt, free, {other.slot: other.ahead for other in self._waiting})
        if taken is None:
            return False
        row.slot, row.reused = taken
        row.part, _ = first_part(row.prompt, row.reused)
        row.start, self._rows[row.slot], row.stops = row.reused, row, self.cache.stops(row.prompt)
        self._waiting.append(row)
        return True

    def _encode(self, row: SlotRow, most: int | None) -> int:
        """Encode up to `most` more tiles of a prompt, and make its embeddings once it has all of them.
        Returns how many were encoded; equal ones cost nothing."""
        prompt, encoded = row.prompt, 0
        if row.embeds is not None:
            return 0
        with self._timed("vision"):
            while (first := row.part + len(row.features)) < len(prompt.items) and encoded != most:
                assert prompt.parts is not None, "a prompt with items has parts"
                some = slice(first, None if most is None else first + 1)
                features, new = self._features.encode(prompt.parts[some], prompt.digests[some])
                row.features += features
                encoded += new
            if first >= len(prompt.items):
                row.embeds = embed_after(self.model, prompt, row.reused, row.features)
                row.prompt, row.features = replace(prompt, parts=None), []
        self.stats.tiles_encoded += encoded
        return encoded

    def _groups(self) -> list[list[SlotRow]]:
        """The prompts that wait and are encoded, neighbours of similar length together."""
        groups: list[list[SlotRow]] = []
        ready = [row for row in self._waiting if row.embeds is not None]
        for row in sorted(ready, key=lambda row: row.slot):
            if groups and groups[-1][-1].slot == row.slot - 1 and self._together([*groups[-1], row]):
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def _together(self, rows: list[SlotRow]) -> bool:
        """Whether one pass over these prompts, padded to the longest, is better than several."""
        lengths, large = [row.upcoming for row in rows], min(self.chunk or self._large, self._large)
        if self._step.alone:
            return sum(lengths) <= large
        padded, end = len(rows) * max(lengths), max(row.start for row in rows) + max(lengths)
        if padded > large or end > self.cache.capacity:
            return False
        return padded <= self._small or padded <= PADDED_AT_MOST * sum(lengths)

    def _prefill(self, rows: list[SlotRow]) -> Tensor:
        """One pass over the next positions of rows in neighbouring slots: logits (k, V) of their last."""
        lengths = [min(row.upcoming, self.chunk or row.upcoming) for row in rows]
        starts, longest = [row.start for row in rows], max(lengths)
        embeds = [row.embeds[0, :length] for row, length in zip(rows, lengths) if row.embeds is not None]
        width = max(one.shape[1] for one in embeds)  # more where layers get features of images, too
        x = torch.stack([F.pad(one, (0, width - one.shape[1], 0, longest - len(one))) for one in embeds])
        every = [row.prompt.places for row in rows]
        ahead = [own[:, row.start :][:, :longest] for row, own in zip(rows, every) if own is not None]
        places = [F.pad(own, (0, longest - own.shape[1])) for own in ahead]  # (3, longest) of each row
        turned_by = kv.to_device(torch.stack(places, 1), x.device) if places else None
        end = min(max(starts) + longest, self.cache.capacity)  # no more than that is real
        cache = kv.view(self.cache.kv_cache, end, rows[0].slot, len(rows))
        for row in rows:
            self.cache.compute(row.slot)
        logits = self._step.prefill(x, lengths, cache, kv.per_row(starts, x.device), turned_by)
        for row, length in zip(rows, lengths, strict=True):
            assert row.embeds is not None
            row.embeds = row.embeds[:, length:] if length < row.embeds.shape[1] else None
            row.start += length
            self.cache.compute(row.slot, min(row.start, row.length))
            if row.start in row.stops:
                self.cache.keep(row.slot, row.start)
            self.stats.prefilled += length
            self.stats.reused += row.reused if row.start == row.length else 0
        return logits

    # ------------------------------------------------------------------------------------------- tokens

    def _choose(self, rows: Sequence[Row], logits: Tensor) -> Chosen:
        """The next token of each row, or one of its whole answers, from logits (k, V)."""

        def at(number: int) -> tuple[int, int, int]:
            row = rows[number]
            assert isinstance(row, SlotRow), "whatever chooses here has a slot"
            return row.slot, row.length + len(row.tokens), row.prompt.offset

        decide(rows, logits, self._step, self.cache.kv_cache, at)
        return choose(rows, logits)

    def _decode(self) -> None:
        """One step for all rows that decode; without any, what is under way is read."""
        if any(row is not None and row.position == self.cache.capacity for row in self._rows):
            self._collect(0)  # it has ended, and its slot has no place for a token in vain
        self._compact()
        rows = [row for row in self._rows if row is not None and row.decodes]
        if not rows:
            self._collect(0)
            return
        with self._timed("decode"):
            span = [row for row in self._rows[: 1 + rows[-1].slot] if row is not None]
            for row in rows:
                self.cache.compute(row.slot)
            positions = [self._place_of(row) for row in span]
            self.stats.decode_steps, count = self.stats.decode_steps + 1, len(span)
            proposals: list[list[int]] = []
            if any(row.proposer or row.constraint for row in rows):
                most = min(self._most, self.cache.capacity - 1 - max(positions))
                proposals = propose(rows, most, self._step.pass_steps)
                self.stats.proposed += sum(map(len, proposals))
            if any(proposals):
                self._several(rows, span, positions, proposals)
            elif self._recorder is not None and alike(rows):
                cache, offsets = self._view_of(count, max(positions) + 1), [row.prompt.offset for row in span]
                own = slice(count) if len(rows) == count else self._index(rows)
                self._launched.append(self._recorder(rows, span, positions, offsets, cache, own))
            else:
                self._one_token(rows, span, positions)
            self._collect(self._lag)

    @property
    def _lag(self) -> int:
        """Steps whose tokens may be unread: none where these say what is proposed or allowed next."""
        held = any(row is not None and (row.proposer or row.constraint) for row in self._rows)
        return 0 if held else self.lag

    def _place_of(self, row: SlotRow) -> int:
        """The position that a step writes in a row's slot. An idle row between active ones is fed a dummy
        token at its next free position."""
        if row.decodes:
            return row.position
        place = row.position if row.launched else row.start
        self.cache.filled[row.slot] = min(self.cache.filled[row.slot], place)
        return place

    def _one_token(self, rows: list[SlotRow], span: list[SlotRow], positions: list[int]) -> None:
        """A step of the first slots, `span`, of which `rows` decode."""
        device, count = self.model.device, len(span)
        start_pos = kv.per_row(positions, device)
        offset = kv.per_row([row.prompt.offset for row in span], device)
        cache = self._view_of(count, max(positions) + 1)
        logits = self._step(self._tokens[:count], cache, start_pos, offset)
        self._launch(rows, logits if len(rows) == count else logits[self._index(rows)])

    def _several(
        self, rows: list[SlotRow], span: list[SlotRow], positions: list[int], proposals: list[list[int]]
    ) -> None:
        """A pass over the last tokens of rows and their proposals, which are verified."""
        after = {row.slot: ids for row, ids in zip(rows, proposals, strict=True)}
        ids = [[*row.tokens[-1:], *after[row.slot]] if row.slot in after else [0] for row in span]
        cache = self._view_of(len(span), max(positions) + max(map(len, ids)))
        logits = self._step.ragged(ids, cache, positions, [row.prompt.offset for row in span])
        own = [logits[row.slot] for row in rows]
        self.stats.accepted += verify(rows, proposals, own, self._choose)
        last = torch.tensor([row.tokens[-1:] for row in rows])
        self._tokens[self._index(rows)] = kv.to_device(last, self.model.device)
        for row in rows:
            self._report(row)

    def _view_of(self, count: int, longest: int) -> kv.KVCache:
        """The cache of the first `count` slots as a step reads it: as far as the longest."""
        capacity = self.cache.capacity
        length = min(kv.round_up(longest, VIEW_STEP), capacity)
        wanted = (count, length, capacity)
        if self._view is None or self._view[0] != wanted:
            self._view = (wanted, kv.view(self.cache.kv_cache, length, 0, count))
        return self._view[1]

    def _launch(self, rows: list[SlotRow], logits: Tensor) -> None:
        """Choose the next token of each row, logits (k, V), without waiting for it."""
        chosen = self._choose(rows, logits)
        first = [row.slot for row in rows] == list(range(len(rows)))
        self._tokens[slice(len(rows)) if first else self._index(rows)] = chosen.token
        self._launched.append(chosen.send())

    def _index(self, rows: list[SlotRow]) -> Tensor:
        return kv.to_device(torch.tensor([row.slot for row in rows]), self.model.device)

    # --------------------------------------------------------------------------------------------- ends

    def _collect(self, lag: int) -> None:
        """Read the tokens of all steps but the last `lag`: the loop's one read from the device."""
        while len(self._launched) > lag:
            chosen = self._launched.popleft()
            going = [row for row in chosen.rows if not row.stop_reason]
            chosen.read()
            for row in going:
                assert isinstance(row, SlotRow), "whatever was launched here has a slot"
                self._report(row)

    def _report(self, row: SlotRow) -> None:
        """Say what is new of a row, whose slot is free at its end."""
        if row.error is not None:
            self._leave(row, kept=False)
            self._events.append(RequestOutput(row.key, [], "error", error=row.error))
            return
        new, logprobs = row.tokens[row.told :], row.logprobs and row.logprobs[row.told :]
        self._events.append(NewTokens(row.key, new, logprobs, row.reused))
        row.told = len(row.tokens)
        if row.stop_reason:
            self._leave(row)
            self.stats.new_tokens += len(row.tokens)
            counts = row.stop_reason, row.length, row.reused
            said = row.confidence, row.decision, row.logprobs
            self._events.append(RequestOutput(row.key, row.tokens, *counts, *said))

    def _leave(self, row: SlotRow, kept: bool = True) -> None:
        """Give a row's slot to others, with what was computed for it."""
        self._rows[row.slot], row.stop_reason = None, row.stop_reason or "cancelled"
        if row in self._waiting:
            self._waiting.remove(row)
        if kept:
            self.cache.put(row.slot, row.prompt, row.tokens)
        else:
            self.cache.drop(row.slot)

    def _compact(self) -> None:
        """Move rows that decode from the last slots into free ones before them."""
        for source in reversed(range(self.slots)):
            row = self._rows[source]
            if row is None or not row.decodes:
                continue
            if None not in self._rows[:source]:
                return
            target = self._rows.index(None)
            self.cache.move(source, target, row.position)
            self._tokens[target] = self._tokens[source]
            row.slot, self._rows[target], self._rows[source] = target, row, None

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.stats.seconds[name] += time.perf_counter() - began
