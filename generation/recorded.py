"""Steps that are recorded with their choice: a token of each row is one launch.

    recorder = Recorder(step, tokens)                  # (slots, 1): what is fed next
    if step.records and alike(rows):
        chosen = recorder(rows, rows, positions, offsets, kv_cache)

The tokens are those of `choose`. Sessions, schedulers and `model.generate` decode so where a step records.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.confidence import Notes
from generation.draws import BAD, chosen_logprobs, sample, uniforms
from generation.kv_cache import KVCache
from generation.options import SamplingParams
from generation.sampling import Chosen, Row

VIEW_STEP = 128  # rows of different lengths read the cache up to the longest, rounded up to this


def alike(rows: Sequence[Row]) -> bool:
    """Whether one recording can choose for all of them."""
    return all(row.params == rows[0].params and row.plain for row in rows)


class Recorder:
    """Decodes rows that are `alike`, in the first of some slots.

    Args:
        step: one that records.
        tokens: (slots, 1) int64 on the device: of each slot the token to be fed, which becomes the next one.
    """

    def __init__(self, step: Any, tokens: Tensor):
        self._step, self._tokens = step, tokens
        # Of each slot its position, the row's seed, how many numbers it has drawn, the offset of its rotary
        # places, the token that was chosen, or BAD; and its `chosen_logprobs`. An even number of slots, so
        # that all begin at 16 bytes: Triton compiles for that, and would once more for others.
        self._counters = tokens.new_zeros(5, kv.round_up(len(tokens), 2))
        self._logprobs = torch.zeros(2, len(tokens), device=tokens.device)
        self._counted: list[tuple[Row, int, int]] = []  # rows, positions and draws that the counters stand at
        self.replay: tuple[KVCache, tuple, Callable[[], None]] | None = None  # of a cache and a way to choose

    def __call__(
        self,
        rows: Sequence[Row],
        span: Sequence[Row],
        positions: Sequence[int],
        offsets: Sequence[int],
        kv_cache: KVCache,
        own: slice | Tensor = slice(None),
    ) -> Chosen:
        """The next tokens of `rows`, which stand at `own` in `span`, the rows of the first slots; of these
        `positions`, where their tokens go, and `offsets`, their rotary places less those. The cache has as
        many rows, and holds the positions."""
        count, params = len(span), rows[0].params
        # The device counts on by itself while rows stay.
        drawn = [row.launched for row in span]
        if self._counted != list(zip(span, positions, drawn)):
            seeds = [0 if row.params.greedy else row.first_seed() for row in span]
            numbers = torch.tensor([positions, seeds, drawn, offsets])
            self._counters[:4, :count] = kv.to_device(numbers, self._tokens.device)
        key = count, params, any(row.options.confidence for row in rows), any(offsets)
        if self.replay is None or self.replay[0] is not kv_cache or self.replay[1] != key:
            self.replay = kv_cache, key, self.bind(kv_cache, *key)
        self.replay[2]()
        notes = Notes(self._logprobs[:, :count][:, own].clone()) if key[2] else None
        ids = self._counters[4, :count][own].clone()
        chosen = Chosen(rows, self._tokens[:count], ids, notes=notes).send()
        self._counted = [(row, place + 1, row.launched) for row, place in zip(span, positions)]
        return chosen

    def bind(
        self, kv_cache: KVCache, count: int, params: SamplingParams, confident: bool, placed: bool
    ) -> Callable[[], None]:
        """A function that decodes and chooses for the first `count` slots, as operations on the device alone;
        `placed` where rotary places are not the slots."""
        tokens, logprobs = self._tokens[:count], self._logprobs[:, :count]
        counters = self._counters[:, :count]
        positions, seeds, drawn, offsets, ids = counters

        def choose_in_place(logits: Tensor) -> None:
            token = sample(logits, params, None if params.greedy else uniforms(seeds, drawn))
            tokens.copy_(token)
            if confident:
                logprobs.copy_(chosen_logprobs(logits, token))
            ids.copy_(token[:, 0].masked_fill(~logits.amax(-1).isfinite(), BAD))
            counters[0:3:2] += 1

        state, key = [self._tokens, self._counters, self._logprobs], (params, confident)
        return self._step.bind(
            tokens, kv_cache, positions, choose_in_place, state, key, offsets if placed else None
        )


def recorded(
    step: Any, rows: Sequence[Row], chosen: Chosen, kv_cache: KVCache, at: Sequence[tuple[int, int, int]]
) -> Iterator[Chosen]:
    """The tokens of rows that are `alike`, from their first ones on, without end; `at` has the number of each
    row, where its first token goes, and its offset."""
    yield chosen
    _, starts, offsets = zip(*at)
    recorder, view, capacity = Recorder(step, chosen.token.clone()), kv_cache, kv.geometry(kv_cache).capacity
    for number in itertools.count():
        positions = [start + number for start in starts]
        length = min(kv.round_up(max(positions) + 1, VIEW_STEP), capacity)
        if kv.geometry(view).capacity != length:
            view = kv.view(kv_cache, length)
        yield recorder(rows, rows, positions, offsets, view)
