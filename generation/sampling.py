"""Logits to tokens: one function, an explicit generator.

The order is transformers': repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen.

    temperature: 0 is greedy, the exact argmax; the filters then have nothing to choose among.
    top_k: keep the k likeliest (ties with the k-th stay); 0 is off.
    top_p: keep the likeliest tokens up to and including the one that reaches this mass; 1 is off.
    min_p: keep tokens at least this fraction as likely as the likeliest; 0 is off.
    repetition_penalty: divides positive and multiplies negative logits of tokens already seen; 1 is off.
    seed: answer j of every prompt draws from a generator seeded with seed + j, so that a row gets in a batch
        what it gets alone; None takes seeds from torch's global generator.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self):
        check_number("temperature", self.temperature, lambda value: value >= 0, "0 or more")
        check_integer("top_k", self.top_k, low=0)
        check_number("top_p", self.top_p, lambda value: 0 < value <= 1, "over 0 and at most 1")
        check_number("min_p", self.min_p, lambda value: 0 <= value <= 1, "from 0 to 1")
        check_number("repetition_penalty", self.repetition_penalty, lambda value: value > 0, "over 0")
        if self.seed is not None:
            check_integer("seed", self.seed, low=0, high=MAX_SEED)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def check_number(name: str, value, good: Callable[[float], bool], wanted: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not good(value):
        raise ValueError(f"{name}: expected a number {wanted}, got {value!r}")


def check_integer(name: str, value, low: int, high: int | None = None) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        bound = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: expected an integer {bound}, got {value!r}")


def make_generators(seed: int | None, prompts: int, answers: int, device) -> list[torch.Generator]:
    """One generator for each of prompts · answers rows, the answers to a prompt side by side."""
    if seed is None:
        seeds = torch.randint(MAX_SEED, (prompts * answers,)).tolist()
    else:
        seeds = [seed + answer for answer in range(answers)] * prompts
    return [torch.Generator(device).manual_seed(value % MAX_SEED) for value in seeds]


def sample(
    logits: Tensor,
    params: SamplingParams,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Choose one token a row, without reading anything back from the device.

    Args:
        logits: (B, V). Must hold no NaN: `Chooser` in decoding.py checks that together with the stop flags.
        params: see `SamplingParams`.
        generator: one for the whole batch, or one for each row; not needed where greedy.
        seen: (B, V) bool, True for tokens of the row so far; needed with a repetition penalty.

    Returns:
        (B, 1) int64.

    Raises:
        ValueError: a missing generator or `seen`, or as many generators as there are not rows.
    """
    scores = adjusted_scores(logits, params, seen)
    if params.greedy:
        return scores.argmax(dim=-1, keepdim=True)
    if generator is None:
        raise ValueError("sampling with a temperature needs a torch.Generator")
    # argmax(score + Gumbel noise) is a draw from softmax(score), and -log(Exponential(1)) is Gumbel noise:
    # unlike torch.multinomial this neither normalises nor asks the device whether the sum is positive.
    noise = exponential_noise(scores, generator).clamp_(min=torch.finfo(torch.float32).tiny).log_()
    return (scores - noise).argmax(dim=-1, keepdim=True)


def exponential_noise(like: Tensor, generator: torch.Generator | Sequence[torch.Generator]) -> Tensor:
    """Exponential(1) draws in the shape of `like`, (B, V)."""
    noise = torch.empty_like(like)
    if isinstance(generator, torch.Generator):
        return noise.exponential_(generator=generator)
    if len(generator) != like.shape[0]:
        raise ValueError(f"expected one generator for each of {like.shape[0]} rows, got {len(generator)}")
    for row, own in zip(noise, generator):
        row.exponential_(generator=own)
    return noise


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
    drop = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    drop[:, -1] = False  # the likeliest stays, whatever rounding says
    return scores.masked_fill(torch.empty_like(drop).scatter_(1, order, drop), -math.inf)
