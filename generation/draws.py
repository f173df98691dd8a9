"""Random tokens: what temperature, filters and penalties do to logits, and random numbers to draw with.

    scores = adjusted_scores(logits, params)           # (B, V), -inf where a token is filtered out
    token = sample(logits, params, uniforms(seeds, drawn))

A new filter is a field of `SamplingParams`, and what it does in `adjusted_scores`. The order is vLLM's, and
transformers': penalties, temperature, top-k, top-p, min-p.

A row's random numbers are a hash of its seed and of how many it has drawn: the same on every device, alone or
in any batch, without a generator's state, and all rows in one call. So row and seed decide an answer, not the
batch that it is made in.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from generation.options import MAX_SEED, SamplingParams

BAD = -1  # in place of a token id, where logits are not finite
_SCAN = 256  # probabilities summed in one piece
_TINY = 2.0**-126  # the smallest normal number of float32
# 2**64 over the golden ratio, and two odd factors, as in SplitMix64 (Steele, Lea and Flood, 2014); here
# as signed numbers.
_GOLDEN = -7046029254386353131
_FACTORS = -4658895280553007687, -7723592293110705685


def make_seeds(seed: int | None, prompts: int, answers: int) -> list[int]:
    """The seed of each of prompts · answers rows, the answers to a prompt side by side."""
    if seed is None:
        return torch.randint(MAX_SEED, (prompts * answers,)).tolist()
    return [(seed + answer) % MAX_SEED for answer in range(answers)] * prompts


def uniforms(seeds: Tensor, drawn: Tensor) -> Tensor:
    """The next random number of rows with `seeds` (B,), of which each has drawn `drawn`, () or (B,).

    (B,) float32 in [0, 1), of 24 bits.
    """
    bits = _hash(_hash(seeds) + (drawn + 1) * _GOLDEN)
    return _shift(bits, 40).float() * 2.0**-24


def _shift(x: Tensor, by: int) -> Tensor:
    """A shift to the right that brings in zeros; that of signed numbers repeats the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _hash(x: Tensor) -> Tensor:
    """Every bit of int64 `x` moves about half of the result's; products wrap around."""
    x = (x ^ _shift(x, 30)) * _FACTORS[0]
    x = (x ^ _shift(x, 27)) * _FACTORS[1]
    return x ^ _shift(x, 31)


def sample(
    logits: Tensor, params: SamplingParams, uniform: Tensor | None = None, seen: Tensor | None = None
) -> Tensor:
    """Logits (B, V) to token ids (B, 1), without reading anything back from the device.

    Args:
        logits: must be finite; `choose` checks that.
        uniform: (B,) random numbers from `uniforms`; not needed when greedy.
        seen: see `adjusted_scores`; needed for penalties.
    """
    scores = adjusted_scores(logits, params, seen)
    if params.greedy:
        return scores.argmax(dim=-1, keepdim=True)
    if uniform is None or uniform.shape != scores.shape[:1]:
        raise ValueError(f"sampling with a temperature needs a random number for each of {len(scores)} rows")
    # The first token at which the summed probability exceeds the random share of the total. Unlike
    # torch.multinomial this does not ask the device whether the sum is positive. Sums at tokens that were
    # filtered out are zeroed, because rounding may let a sum rise where nothing was added.
    summed = running_sum(scores.softmax(-1)).masked_fill(scores == -math.inf, 0)
    wanted = uniform[:, None] * summed.amax(-1, keepdim=True)
    # argmax returns the first of equal maxima, and takes no bool.
    return (summed > wanted).to(torch.uint8).argmax(-1, keepdim=True)


def adjusted_scores(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Logits (B, V) after penalties, temperature and filters, float32; what is filtered out is -inf.

    seen: (B, V), how often the answer of each row has each token, -1 where only the prompt has it; needed for
        penalties.
    """
    scores = logits.float()
    if params.penalizes:
        if seen is None:
            raise ValueError("a penalty needs `seen`, the tokens of each row so far")
        penalty, counts = params.repetition_penalty, seen * (seen > 0)
        scores = scores.where(seen == 0, (scores * penalty).where(scores < 0, scores / penalty))
        scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.greedy:
        return scores
    if params.temperature != 1:
        # The maximum goes to 0 first, so that a tiny temperature sends the others to -inf and none to inf.
        scores = (scores - scores.amax(-1, keepdim=True)) / max(params.temperature, _TINY)
    if params.top_k:
        kth = scores.topk(min(params.top_k, scores.shape[-1]), dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -math.inf)
    if params.top_p < 1:
        scores = _keep_top_p(scores, params.top_p)
    if params.min_p > 0:
        # p >= min_p · p_max, without the softmax.
        least = scores.amax(-1, keepdim=True) + math.log(params.min_p)
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    ordered, order = scores.sort(dim=-1)  # ascending, so that small masses are summed first
    drop = running_sum(ordered.softmax(-1)) <= 1 - top_p
    drop[:, -1] = False  # the likeliest stays, whatever rounding says
    return scores.masked_fill(drop.new_empty(drop.shape).scatter_(1, order, drop), -math.inf)


def running_sum(x: Tensor) -> Tensor:
    """Cumulative sum of (B, V) along V, in pieces.

    Rounding stays that of short sums, and CUDA, which scans a long row in an order that varies from run to
    run, gives the same sums every time.
    """
    batch, length = x.shape
    padded = x.new_zeros(batch, length + -length % _SCAN)
    padded[:, :length] = x
    pieces = padded.view(batch, -1, _SCAN).cumsum(-1)
    totals = pieces[..., -1]
    return (pieces + (totals.cumsum(-1) - totals)[..., None]).flatten(1)[:, :length]


def chosen_logprobs(logits: Tensor, token: Tensor) -> Tensor:
    """Logits (B, V) and the tokens (B, 1) chosen from them -> (2, B) float32: the logarithms of the tokens'
    probabilities, and ones; both 0 where no other token was possible. Nothing is read from the device."""
    scores = logits.float()
    logprobs = scores.gather(1, token)[:, 0] - scores.logsumexp(-1)
    chosen = torch.stack((logprobs, torch.ones_like(logprobs)))
    return torch.where((scores > -math.inf).sum(-1) > 1, chosen, 0)
