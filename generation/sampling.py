"""Logits to tokens: `sample` is one choice for a batch, `Sampler` all choices of an answer.

The order is transformers': repetition penalty, temperature, top-k, top-p, min-p.

A row's random numbers are a hash of its seed and of how many it has drawn: the same on every device, alone or
in any batch, without a generator's state, and all rows in one call. So they can be drawn inside a CUDA graph.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from generation.confidence import Reports, add_chosen
from generation.kv_cache import to_device
from generation.options import MAX_SEED, GenerationOptions, NotFiniteError, SamplingParams

_SCAN = 256  # probabilities summed in one piece
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
        logits: must be finite; `Sampler` checks that together with the stop flags.
        uniform: (B,) random numbers from `uniforms`; not needed when greedy.
        seen: (B, V) bool, True for tokens that the row holds already; needed for a repetition penalty.
    """
    scores = adjusted_scores(logits, params, seen)
    if params.greedy:
        return scores.argmax(dim=-1, keepdim=True)
    if uniform is None or uniform.shape != scores.shape[:1]:
        raise ValueError(f"sampling with a temperature needs a random number for each of {len(scores)} rows")
    # The first token at which the summed probability exceeds the random share of the total. Unlike
    # torch.multinomial this does not ask the device whether the sum is positive. Sums at tokens that were
    # filtered out are zeroed, because rounding may let a sum rise where nothing was added.
    summed = _running_sum(scores.softmax(-1)).masked_fill(scores == -math.inf, 0)
    wanted = uniform[:, None] * summed.amax(-1, keepdim=True)
    # argmax returns the first of equal maxima, and takes no bool.
    return (summed > wanted).to(torch.uint8).argmax(-1, keepdim=True)


def _running_sum(x: Tensor) -> Tensor:
    """Cumulative sum of (B, V) along V, in pieces.

    Rounding stays that of short sums, and CUDA, which scans a long row in an order that varies from run to
    run, gives the same sums every time.
    """
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
        # The maximum goes to 0 first, so that a tiny temperature sends the others to -inf and none to inf.
        temperature = max(params.temperature, torch.finfo(torch.float32).tiny)
        scores = (scores - scores.amax(-1, keepdim=True)) / temperature
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
    drop = _running_sum(ordered.softmax(-1)) <= 1 - top_p
    drop[:, -1] = False  # the likeliest stays, whatever rounding says
    return scores.masked_fill(torch.empty_like(drop).scatter_(1, order, drop), -math.inf)


class Sampler:
    """Chooses a token for each of B · N rows, the N answers to a prompt side by side, and knows which rows
    have stopped: those get `pad_id`.

    All state is on the device, in tensors that are changed in place and never replaced, so that a CUDA graph
    can do what `sample` does. `seen` (B · N, V) bool are the prompts' tokens, for a repetition penalty;
    `sums` (2, B · N) is what confidences are made of.
    """

    def __init__(self, options: GenerationOptions, prompts: int, pad_id: int, device, seen: Tensor | None):
        self.options, self.pad_id, self.seen = options, pad_id, seen
        answers = options.num_return_sequences
        rows = prompts * answers
        seeds = [0] * rows if options.greedy else make_seeds(options.seed, prompts, answers)
        self.seeds = to_device(torch.tensor(seeds), device)
        self.num_drawn = torch.zeros((), dtype=torch.int64, device=device)
        self.stop_ids = to_device(torch.tensor(options.stop_token_ids, dtype=torch.int64), device)
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        self.num_finite = torch.zeros((), dtype=torch.int64, device=device)  # tokens before the first bad one
        self.sums = torch.zeros(2, rows, device=device) if options.confidence else None
        self.reports = None if options.logprobs is None else Reports(options.logprobs)

    @property
    def state(self) -> list[Tensor]:
        """All of its tensors, which `load` fills."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def load(self, other: Sampler) -> None:
        """Copy the state of a sampler with the same signature and number of rows."""
        for mine, theirs in zip(self.state, other.state, strict=True):
            mine.copy_(theirs)

    def sample(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> (B, 1) token ids, the pad id for rows that have stopped."""
        if self.reports is None:
            return self.choose(logits)
        return self.reports.note(logits.float().log_softmax(-1), self.choose(logits))

    def choose(self, logits: Tensor) -> Tensor:
        # The maximum is NaN or +inf if any logit is; -inf alone is a banned token.
        self.finite &= logits.amax(-1).isfinite().all()
        self.num_finite += self.finite
        uniform = None if self.options.greedy else uniforms(self.seeds, self.num_drawn)
        token = sample(logits, self.options, uniform, self.seen)
        token = token.masked_fill_(self.stopped[:, None], self.pad_id)
        self.num_drawn += 1
        self.lengths += ~self.stopped
        stops = (token == self.stop_ids).any(-1)
        if self.sums is not None:
            add_chosen(self.sums, logits, token, ~self.stopped & (~stops | (self.lengths == 1)))
        self.stopped |= stops
        if self.seen is not None:
            self.seen.scatter_(1, token, True)
        return token

    def finished(self) -> bool:
        """Whether every row has stopped: the loop's one read from the device. A NotFiniteError comes before
        anyone sees a token drawn from such logits.

        Without stop ids nothing is read, and the loop calls `check_finite` at its end instead.
        """
        if self.stop_ids.numel() == 0:
            return False
        if not (self.stopped.all() | ~self.finite).item():
            return False
        self.check_finite()
        return True

    def check_finite(self) -> None:
        """Raises NotFiniteError if any logits so far held NaN or infinity."""
        if not self.finite.item():
            raise NotFiniteError(int(self.num_finite) + 1)
