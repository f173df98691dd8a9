"""Tokens of steps that are recorded with their choice: one launch each, and nothing is asked of the host.

    recorder = Recorder(step, tokens)                  # (slots, 1): what is fed next
    if step.records and alike(rows):
        chosen = recorder(rows, rows, positions, offsets, kv_cache)

`model.generate` and sessions decode so where a step records (`generation.fast.cuda.graph`), with the tokens
that `choose` would give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.confidence import Notes
from generation.draws import recordable
from generation.kv_cache import KVCache
from generation.sampling import Chosen, Row
from generation.steps import Step

VIEW_STEP = 128  # rows of different lengths read the cache up to the longest, rounded up to this


def alike(rows: Sequence[Row]) -> bool:
    """Whether one recording can choose for all of them."""
    return all(row.params == rows[0].params and row.plain for row in rows)


class Recorder:
    """Decodes rows that are `alike`, in the first of some slots.

    Args:
        step: one that records.
        tokens: (slots, 1) int64, on the device: of each slot the token to be fed, which is replaced.
    """

    def __init__(self, step: Step, tokens: Tensor):
        self._step, self._tokens = step, tokens
        # Of each slot its position, the row's seed, how many numbers it has drawn, the offset of its rotary
        # places, the token that was chosen, or BAD; and its `chosen_logprobs`. An even number of slots, so
        # that all begin at 16 bytes: Triton compiles for that, and would once more for others.
        self._counters = tokens.new_zeros(5, kv.round_up(len(tokens), 2))
        self._logprobs = torch.zeros(2, len(tokens), device=tokens.device)
        self.forget()

    def forget(self) -> None:
        """The cache gets other buffers, beside which a recording would keep the old ones."""
        self._replay: tuple[KVCache, tuple, Callable[[], None]] | None = None
        self.passed()

    def passed(self) -> None:
        """Rows have moved on by other means."""
        self._counted: list[tuple[Row, int]] = []  # rows and positions that the counters stand at

    def __call__(
        self,
        rows: Sequence[Row],
        span: Sequence[Row],
        positions: Sequence[int],
        offsets: Sequence[int],
        kv_cache: KVCache,
        own: slice | Tensor = slice(None),
    ) -> Chosen:
        """The next tokens of `rows`, on their way to the host.

        Args:
            span: the rows of the first slots, of which `rows` decode and stand at `own`.
            positions, offsets: of each of these, where its token goes, and its rotary place less that.
            kv_cache: of as many rows; a view of it holds the positions.
        """
        count, params = len(span), rows[0].params
        tokens, counters, logprobs = (
            self._tokens[:count],
            self._counters[:, :count],
            self._logprobs[:, :count],
        )
        # The device counts on by itself while rows stay.
        if self._counted != list(zip(span, positions)):
            seeds = [0 if row.params.greedy else row.first_seed() for row in span]
            numbers = torch.tensor([positions, seeds, [row.launched for row in span], offsets])
            counters[:4] = kv.to_device(numbers, tokens.device)
        self._counted = [(row, position + 1) for row, position in zip(span, positions)]
        confident, placed = any(row.options.confidence for row in rows), any(offsets)
        key = count, params, confident, placed
        if self._replay is None or self._replay[0] is not kv_cache or self._replay[1] != key:
            choice = recordable(tokens, counters, params, logprobs if confident else None)
            state = [self._tokens, self._counters, self._logprobs]
            offset = counters[3] if placed else None
            replay = self._step.bind(tokens, kv_cache, counters[0], choice, state, key, offset)
            self._replay = kv_cache, key, replay
        self._replay[2]()
        notes = Notes(logprobs[:, own].clone()) if confident else None
        return Chosen(rows, tokens, counters[4, own].clone(), notes=notes).send()


def decode_recorded(
    step: Step, rows: Sequence[Row], chosen: Chosen, kv_cache: KVCache, at: Sequence[tuple[int, int, int]]
) -> Iterator[list[int]]:
    """`generation.decoding.decode_n` for rows that are `alike`, from their first tokens on; `at` has the
    number of each, where that token goes, and its offset."""
    _, positions, offsets = zip(*at)
    recorder, view = Recorder(step, chosen.token.clone()), kv_cache
    while True:
        ids = chosen.read()
        for row in rows:
            if row.error is not None:
                raise row.error
        yield ids
        if all(row.stop_reason for row in rows):
            return
        capacity = kv.geometry(kv_cache).capacity
        length = min(kv.round_up(max(positions) + 1, VIEW_STEP), capacity)
        if kv.geometry(view).capacity != length:
            view = kv.view(kv_cache, length)
        chosen = recorder(rows, rows, positions, offsets, view)
        positions = tuple(position + 1 for position in positions)
