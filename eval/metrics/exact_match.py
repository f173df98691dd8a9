"""Exact match of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.metrics.base import Metric, checked_targets, mean_score


def exact_match(
    answer: str, targets: Sequence[str], fields: Mapping[str, Any], *, ignore_case: bool = True
) -> float:
    """1 where the answer, without space at its ends, is one of the targets."""

    def plain(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    return float(plain(answer) in {plain(target) for target in checked_targets(targets)})


def exact_match_metric(ignore_case: bool = True) -> Metric:
    case = "ignored" if ignore_case else "kept"
    return Metric(
        "exact_match",
        f"Exact match: 1 where the answer equals one of the targets, space at the ends removed, case {case}.",
        lambda answer, targets, fields: exact_match(answer, targets, fields, ignore_case=ignore_case),
        mean_score,
    )
