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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from generation.kv_cache import to_device
from generation.options import adjusted_scores


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities that the model itself gives, before temperature and filters; with
    `logprobs_mode="sampler"` after them.

    logprob: of the token; None for one that a constraint forced, about which the model was not asked.
    top: (token id, logarithm) of the likeliest tokens, the likeliest first.
    """

    logprob: float | None
    top: list[tuple[int, float]]


@dataclass
class Report:
    """What is said of the probabilities of one answer's tokens.

    sums: of `chosen_logprobs`, over the tokens that count for its confidence.
    tokens: of each token, where the options ask for log-probabilities.
    """

    sums: tuple[float, float] = (0.0, 0.0)
    tokens: list[TokenLogprobs] = field(default_factory=list)

    def add(self, chosen: Sequence[float] | None, logprobs: TokenLogprobs | None, stops: bool) -> None:
        """Note a token, with its `chosen_logprobs` where it may count for the confidence."""
        if chosen is not None and not (stops and self.sums[1]):
            self.sums = self.sums[0] + chosen[0], self.sums[1] + chosen[1]
        if logprobs is not None:
            self.tokens.append(logprobs)

    @property
    def confidence(self) -> float:
        """The geometric mean of the probabilities of the tokens that count."""
        return math.exp(min(0.0, self.sums[0] / max(1.0, self.sums[1])))


class Reports:
    """The log-probabilities that rows report of one step's tokens: made from the logits (k, V) before masks
    change them, and completed with the tokens `of` the step.

    forced: the numbers of rows that report a token which a constraint forces.
    """

    def __init__(self, rows: Sequence[Any], logits: Tensor):
        asked = [n for n, row in enumerate(rows) if row.options.logprobs is not None and not row.stop_reason]
        held = [n for n in asked if rows[n].tokens and rows[n].constraint is not None]
        self.forced = [n for n in held if rows[n].constraint.forced()]
        asked = [n for n in asked if n not in self.forced]
        self._rows, self._own = rows, [n for n in asked if rows[n].options.logprobs_mode == "model"]
        self._sampled = [n for n in asked if rows[n].options.logprobs_mode == "sampler"]
        self._logprobs = rows_of(logits, self._own).float().log_softmax(-1) if self._own else logits

    def of(self, logits: Tensor, token: Tensor) -> list[tuple[list[int], Tensor, Tensor]]:
        """Numbers of rows, with the `likeliest` of their masked logits (k, V) and tokens (k, 1)."""
        rows, reports = self._rows, []
        for count, members in alike(self._own, lambda number: rows[number].options.logprobs).items():
            own = rows_of(self._logprobs, [self._own.index(number) for number in members])
            reports.append((members, *likeliest(own, rows_of(token, members), count)))
        kinds = alike(self._sampled, lambda number: (rows[number].params, rows[number].options.logprobs))
        for (params, count), members in kinds.items():
            logprobs = adjusted_scores(rows_of(logits, members), params).log_softmax(-1)
            reports.append((members, *likeliest(logprobs, rows_of(token, members), count)))
        return reports


def alike(numbers: Iterable[int], kind: Callable[[int], Any]) -> dict[Any, list[int]]:
    """Numbers of rows by what they have in common."""
    groups: dict[Any, list[int]] = {}
    for number in numbers:
        groups.setdefault(kind(number), []).append(number)
    return groups


def rows_of(x: Tensor, numbers: list[int]) -> Tensor:
    """These rows of x, without a copy where they are all."""
    return x if numbers == list(range(len(x))) else x[to_device(torch.tensor(numbers), x.device)]


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
