"""One token for each of several rows that want different things: `sample` once for each kind of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from generation.prompt import seen_tokens
from generation.requests import Row
from generation.sampling import make_seeds, sample, uniforms


def sample_rows(rows: Sequence[Row], logits: Tensor) -> Tensor:
    """Logits (k, V) to tokens (k, 1), nothing read back from the device.

    Each row draws with the seed that `model.generate` gives it alone, and its own tokens count for its
    repetition penalty.
    """
    kinds: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        kinds.setdefault(id(row.params), []).append(index)
    if len(kinds) == 1:
        return _sample_alike(rows, logits)
    token = torch.empty(len(rows), 1, dtype=torch.int64, device=logits.device)
    for members in kinds.values():
        token[members] = _sample_alike([rows[index] for index in members], logits[members])
    return token


def _sample_alike(rows: Sequence[Row], logits: Tensor) -> Tensor:
    """`sample` for rows that share their parameters."""
    params, uniform, seen = rows[0].params, None, None
    if not params.greedy:
        drawn = torch.tensor([len(row.tokens) for row in rows])
        uniform = uniforms(torch.tensor([_seed(row) for row in rows]), drawn).to(logits.device)
    if params.repetition_penalty != 1:
        seen = torch.stack([_seen(row, logits) for row in rows])  # (k, V)
    token = sample(logits, params, uniform, seen)
    if seen is not None:
        for row, own in zip(rows, token, strict=True):
            row.seen.scatter_(0, own, True)
    return token


def _seed(row: Row) -> int:
    if row.seed is None:
        (row.seed,) = make_seeds(row.options.seed, 1, 1)
    return row.seed


def _seen(row: Row, logits: Tensor) -> Tensor:
    """(V,) bool: the tokens of the row so far."""
    if row.seen is None:
        (row.seen,) = seen_tokens(row.input_ids[None].to(logits.device), None, logits.shape[1], 1)
    return row.seen
