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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from generation.draws import adjusted_scores, chosen_logprobs


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities that the model itself gives, before temperature and filters; with
    `logprobs_mode="sampler"` after them.

    logprob: of the token; None for one that a constraint forced, about which the model was not asked.
    top: (token id, logarithm) of the likeliest tokens, the likeliest first.
    """

    logprob: float | None
    top: list[tuple[int, float]]


# Of a row's token: its `chosen_logprobs`, if a row asks for a confidence, and what it reports.
Noted = tuple[Sequence[float] | None, TokenLogprobs | None]


@dataclass
class Notes:
    """The probabilities of one step's tokens, on the device until they are read.

    chosen: (2, k), the `chosen_logprobs` of the tokens; None where no row asks for its confidence.
    reports: by the numbers of the rows that report them, the log-probabilities of the token and of the
        likeliest ones (1 + n,), and the ids of these (n,); None of a token that a constraint forced.
    """

    chosen: Tensor | None
    reports: dict[int, tuple[Tensor, Tensor] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Any], own: Tensor, logits: Tensor, token: Tensor) -> Notes:
        """Of logits (k, V), `own` the model's and those that masks have left, and the tokens (k, 1)."""
        notes = cls(chosen_logprobs(logits, token) if any(row.options.confidence for row in rows) else None)
        for number, row in enumerate(rows):
            if row.options.logprobs is None or row.stop_reason:
                continue
            if row.tokens and row.constraint is not None and row.constraint.forced():
                notes.reports[number] = None
                continue
            scores = own[number].float()
            if row.options.logprobs_mode == "sampler":
                scores = adjusted_scores(logits[number : number + 1], row.params)[0]
            logprobs = scores.log_softmax(-1)
            top = logprobs.topk(min(row.options.logprobs, len(logprobs)))
            notes.reports[number] = torch.cat((logprobs[token[number]], top.values)), top.indices
        return notes

    def send(self, sent: Callable[[Tensor], Tensor]) -> None:
        """Begin to copy all to the host."""
        self.chosen = None if self.chosen is None else sent(self.chosen)
        self.reports = {number: one and (sent(one[0]), sent(one[1])) for number, one in self.reports.items()}

    def read(self, count: int) -> list[Noted]:
        """Of each of `count` rows, once the copies are there."""
        reports = dict[int, TokenLogprobs]()
        for number, one in self.reports.items():
            reports[number] = TokenLogprobs(None, [])
            if one is not None:
                own, *others = one[0].tolist()
                reports[number] = TokenLogprobs(own, list(zip(one[1].tolist(), others)))
        chosen = [None] * count if self.chosen is None else self.chosen.T.tolist()
        return [(one, reports.get(number)) for number, one in enumerate(chosen)]
