"""Logits to tokens: one function, and explicit random numbers.

The order is transformers': repetition penalty, temperature, top-k, top-p, min-p.

A row's random numbers are a hash of its seed and of how many it has drawn: the same on every device, alone or
in any batch, without a generator's state, and all rows in one call. So they can be drawn inside a CUDA graph.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from generation.options import MAX_SEED
from generation.options import SamplingParams as SamplingParams

_SCAN = 256  # probabilities summed in one piece
# 2**64 over the golden ratio, and two odd factors, as in SplitMix64 (Steele, Lea and Flood, 2014); here
# as signed numbers.
_GOLDEN, _FIRST_FACTOR, _SECOND_FACTOR = (
    -7046029254386353131, -4658895280553007687, -7723592293110705685
)  # fmt: skip


def make_seeds(seed: int | None, prompts: int, answers: int) -> list[int]:
    """The seed of each of prompts · answers rows, the answers to a prompt side by side."""
    if seed is None:
        return torch.randint(MAX_SEED, (prompts * answers,)).tolist()
    return [(seed + answer) % MAX_SEED for answer in range(answers)] * prompts


def uniforms(seeds: Tensor, drawn: Tensor) -> Tensor:
    """Each row's random number after it has drawn `drawn` of them: (B,) float32 in [0, 1), 24 bits.

    Args:
        seeds: (B,) int64.
        drawn: () or (B,) int64.
    """
    bits = _hash(_hash(seeds) + (drawn + 1) * _GOLDEN)
    return _shift(bits, 40).float() * 2.0**-24


def _shift(x: Tensor, by: int) -> Tensor:
    """A shift to the right that brings in zeros; that of signed numbers repeats the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _hash(x: Tensor) -> Tensor:
    """Every bit of int64 `x` moves about half of the result's; products wrap around."""
    x = (x ^ _shift(x, 30)) * _FIRST_FACTOR
    x = (x ^ _shift(x, 27)) * _SECOND_FACTOR
    return x ^ _shift(x, 31)


def sample(
    logits: Tensor, params: SamplingParams, uniform: Tensor | None = None, seen: Tensor | None = None
) -> Tensor:
    """Choose one token a row, without reading anything back from the device.

    Args:
        logits: (B, V). What a row with NaN gets means nothing: `Chooser` in chooser.py checks that together
            with the stop flags.
        params: see `SamplingParams`.
        uniform: (B,) random numbers in [0, 1), see `uniforms`; not needed where greedy.
        seen: (B, V) bool, True for tokens of the row so far; needed with a repetition penalty.

    Returns:
        (B, 1) int64.

    Raises:
        ValueError: a missing `uniform` or `seen`, or as many random numbers as there are not rows.
    """
    scores = adjusted_scores(logits, params, seen)
    if params.greedy:
        return scores.argmax(dim=-1, keepdim=True)
    if uniform is None:
        raise ValueError("sampling with a temperature needs a random number for each row")
    if uniform.shape != scores.shape[:1]:
        raise ValueError(f"expected a random number for each of {len(scores)} rows, got {len(uniform)}")
    # The first token at which the summed probability exceeds the random share of the total: unlike
    # torch.multinomial this does not ask the device whether the sum is positive. Sums at what was filtered
    # out count as none, for rounding may let a sum rise where nothing was added.
    summed = _running_sum(scores.softmax(-1)).masked_fill(scores == -math.inf, 0)
    wanted = uniform[:, None] * summed.amax(-1, keepdim=True)
    # Of equal maxima the first; not of bool, which argmax does not take.
    return (summed > wanted).to(torch.uint8).argmax(-1, keepdim=True)


def _running_sum(x: Tensor) -> Tensor:
    """Cumulative sum of (B, V) along V, in pieces: rounding stays that of short sums, and a scan of one long
    row, which CUDA does in an order of its own each time, is none."""
    batch, length = x.shape
    pieces = F.pad(x, (0, -length % _SCAN)).view(batch, -1, _SCAN).cumsum(-1)
    totals = pieces[..., -1]
    return (pieces + (totals.cumsum(-1) - totals)[..., None]).flatten(1)[:, :length]


def adjusted_scores(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Logits (B, V) after penalty, temperature and filters, float32; what is filtered out is -inf."""
    scores = logits.float()
    if params.repetition_penalty != 1:
        if seen is None:
            raise ValueError("a repetition penalty needs `seen`, the tokens of each row so far")
        penalty = params.repetition_penalty
        scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    if params.greedy:
        return scores
    if params.temperature != 1:
        # The likeliest goes to 0 first, so that what a tiny temperature makes of the others is -inf at most.
        temperature = max(params.temperature, torch.finfo(torch.float32).tiny)
        scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    if params.top_k:
        kth = scores.topk(min(params.top_k, scores.shape[-1]), dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -math.inf)
    if params.top_p < 1:
        scores = _keep_top_p(scores, params.top_p)
    if params.min_p > 0:
        # p >= min_p · p_max, without the softmax.
        scores = scores.masked_fill(
            scores < scores.amax(-1, keepdim=True) + math.log(params.min_p), -math.inf
        )
    return scores


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    ordered, order = scores.sort(dim=-1)  # ascending, so that small masses are summed first
    drop = _running_sum(ordered.softmax(-1)) <= 1 - top_p
    drop[:, -1] = False  # the likeliest stays, whatever rounding says
    return scores.masked_fill(torch.empty_like(drop).scatter_(1, order, drop), -math.inf)
