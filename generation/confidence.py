"""How sure a model was of an answer: the geometric mean of the probabilities that it gave to its tokens.

    model.generate_detailed(**inputs, confidence=True).confidences      # [0.98], for each answer

Probabilities are the model's own, before temperature, filters and penalty, among the tokens that a constraint
allows, once `Constraint.close` has moved those of the stop tokens. A token that a constraint forced does not
count, nor does a stop token, unless the answer is empty. The mean over tokens is the length-normalised
likelihood of Malinin and Gales ("Uncertainty Estimation in Autoregressive Structured Prediction", 2021).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chosen_logprobs(logits: Tensor, token: Tensor) -> Tensor:
    """Logits (B, V) and the tokens (B, 1) chosen from them -> (2, B) float32: the logarithms of the tokens'
    probabilities, and ones; both 0 where no other token was possible. Nothing is read from the device."""
    scores = logits.float()
    logprobs = scores.gather(1, token)[:, 0] - scores.logsumexp(-1)
    chosen = torch.stack((logprobs, torch.ones_like(logprobs)))
    return torch.where((scores > -math.inf).sum(-1) > 1, chosen, 0)


def add_chosen(sums: Tensor, logits: Tensor, token: Tensor, counts: Tensor) -> None:
    """Add to sums (2, B), in place, `chosen_logprobs` of the rows whose token `counts` (B,)."""
    sums += torch.where(counts, chosen_logprobs(logits, token), 0)


def confidences_of(sums: Tensor) -> list[float]:
    """Sums (2, B) over the tokens of each answer -> its confidence, 0 to 1."""
    return [confidence_of(*one) for one in sums.T.tolist()]


def confidence_of(logprobs: float, count: float) -> float:
    """The confidence of an answer with the sum of its tokens' log-probabilities and the number of these."""
    return math.exp(min(0.0, logprobs / max(1.0, count)))
