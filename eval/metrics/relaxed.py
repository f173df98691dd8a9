"""Relaxed accuracy: numbers read from charts may be off by 5 %.

Masry et al., "ChartQA" (2022), section 5.1, after Methani et al., "PlotQA" (2020): a number is right within
5 % of the target's, other answers must be equal. Its trap: 5 % of a year is a century, so that 1950 is
a right answer to 2020. The official scorer has it, and so has the default here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from eval.metrics.base import Metric, MetricError, checked_targets, mean_score

_YEAR = re.compile(r"\s*(1\d|20)\d\d\s*", re.ASCII)  # 1000 to 2099, written as a whole number


def as_number(text: str) -> float | None:
    """The number that a text is, a percentage as a fraction; None where it is none."""
    percent = text.endswith("%")
    try:
        return float(text.rstrip("%")) / 100 if percent else float(text)
    except ValueError:
        return None


def is_relaxed_match(answer: str, target: str, tolerance: float, years_exact: bool) -> bool:
    got, wanted = as_number(answer), as_number(target)
    if got is None or not wanted:  # there is no share of 0: a target of 0 is compared as text
        return answer.lower() == target.lower()
    if years_exact and _YEAR.fullmatch(target):
        return got == wanted
    return abs(got - wanted) / abs(wanted) <= tolerance


def relaxed_accuracy(
    answer: str,
    targets: Sequence[str],
    fields: Mapping[str, Any],
    *,
    tolerance: float = 0.05,
    years_exact: bool = False,
) -> float:
    """1 where the answer is one of the targets, or a number near one of them."""
    return float(
        any(is_relaxed_match(answer, target, tolerance, years_exact) for target in checked_targets(targets))
    )


def relaxed_metric(tolerance: float = 0.05, years_exact: bool = False) -> Metric:
    """`relaxed_accuracy`; `years_exact` asks for the very number where the target is a year, 1000 to 2099."""
    if not tolerance >= 0:
        raise MetricError(f"relaxed_accuracy: expected a tolerance of 0 or more, got {tolerance}")
    years = "exact for years" if years_exact else "for years, too, as in the official scorer"
    return Metric(
        "relaxed_accuracy",
        f"Relaxed accuracy: numbers within {tolerance:.2%} of the target ({years}; a percentage is a "
        "fraction), other answers equal but for case; Masry et al. 2022, after Methani et al. 2020.",
        lambda answer, targets, fields: relaxed_accuracy(
            answer, targets, fields, tolerance=tolerance, years_exact=years_exact
        ),
        mean_score,
    )
