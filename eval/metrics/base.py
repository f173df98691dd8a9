"""What a metric is: a score for one answer, and the figures over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class MetricError(ValueError):
    """A metric that does not exist, an option that it does not have, or a sample that it cannot score."""


@dataclass(frozen=True)
class Scored:
    """One answered question.

    targets: the accepted answers.
    score: what `Metric.score` gave, 0 to 1.
    fields: the sample's other fields, such as {"choices": [...], "question": ...}.
    """

    answer: str
    targets: tuple[str, ...]
    score: float
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """How answers are scored.

    description: normalisation and formula in one sentence, with their source; printed with every run.
    score: (answer, targets, the sample's other fields) -> the score of one sample, 0 to 1. Raises MetricError
        where there are no targets, or a field that the metric needs is missing.
    summarise: all samples -> figures; "score" is the one reported. Raises MetricError where there is none.
    targets_needed: with fewer targets than these, no answer to a sample scores 1.
    """

    name: str
    description: str
    score: Callable[[str, Sequence[str], Mapping[str, Any]], float]
    summarise: Callable[[Sequence[Scored]], dict[str, float]]
    targets_needed: int = 1


def mean_score(samples: Sequence[Scored]) -> dict[str, float]:
    """{"score": the mean of the samples' scores}, as exact as a float can be, in whatever order they come."""
    if not samples:
        raise MetricError("expected at least one scored answer, got none")
    return {"score": math.fsum(sample.score for sample in samples) / len(samples)}


def checked_targets(targets: Sequence[str]) -> Sequence[str]:
    """Raises MetricError where there is nothing to compare an answer with."""
    if isinstance(targets, str) or not all(isinstance(target, str) for target in targets):
        raise MetricError(f"expected targets as a list of texts, got {str(targets)[:80]!r}")
    if not targets:
        raise MetricError("expected at least one target answer, got none")
    return targets
