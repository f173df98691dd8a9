"""How sure a model was of each token (`TokenLogprobs`), and of an answer: the geometric mean of the
probabilities that it gave to its tokens.

    model.generate_detailed(**inputs, confidence=True).confidences      # [0.98], for each answer
    model.generate_detailed(**inputs, logprobs=3).logprobs              # of each token of each answer

Probabilities are the model's own, before temperature, filters and penalty, among the tokens that a constraint
allows, once `Constraint.close` has moved those of the stop tokens. A token that a constraint forced does not
count, nor does one of the thinking before an answer, nor a stop token, unless nothing before it does. The
mean over tokens is the length-normalised likelihood of Malinin and Gales ("Uncertainty Estimation in
Autoregressive Structured Prediction", 2021).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities that the model itself gives, before temperature and filters; with
    `logprobs_mode="sampler"` after them.

    logprob: of the token; None for one that a constraint forced, about which the model was not asked.
    top: (token id, logarithm) of the likeliest tokens, the likeliest first.
    """

    logprob: float | None
    top: list[tuple[int, float]]


def likeliest(logprobs: Tensor, token: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, V) and the tokens (B, 1) that were chosen -> their own and the `count` highest
    ones (B, 1 + count), and the ids of these (B, count). Nothing is read from the device."""
    top = logprobs.topk(min(count, logprobs.shape[-1]))
    return torch.cat((logprobs.gather(1, token), top.values), 1), top.indices


def token_logprobs(values: list[float], ids: list[int]) -> TokenLogprobs:
    """A row of `likeliest`, on the host."""
    return TokenLogprobs(values[0], list(zip(ids, values[1:])))


def chosen_logprobs(logits: Tensor, token: Tensor) -> Tensor:
    """Logits (B, V) and the tokens (B, 1) chosen from them -> (2, B) float32: the logarithms of the tokens'
    probabilities, and ones; both 0 where no other token was possible. Nothing is read from the device."""
    scores = logits.float()
    logprobs = scores.gather(1, token)[:, 0] - scores.logsumexp(-1)
    chosen = torch.stack((logprobs, torch.ones_like(logprobs)))
    return torch.where((scores > -math.inf).sum(-1) > 1, chosen, 0)


def confidence_of(logprobs: float, count: float) -> float:
    """The confidence of an answer with the sum of its tokens' log-probabilities and the number of these."""
    return math.exp(min(0.0, logprobs / max(1.0, count)))
