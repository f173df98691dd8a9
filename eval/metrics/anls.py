"""Average normalised Levenshtein similarity: answers read from images, off by a letter or two.

Biten et al., "Scene Text Visual Question Answering" (2019), equation 1, with the threshold of 0.5 and the
lower case and single spaces of the Robust Reading Competition's scorer (DocVQA, InfographicVQA).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.metrics.base import Metric, MetricError, checked_targets, mean_score


def edit_distance(one: str, other: str) -> int:
    """Insertions, deletions and replacements of a letter that turn one text into the other (Levenshtein)."""
    if len(one) < len(other):
        one, other = other, one
    above = list(range(len(other) + 1))  # distances of one[:i] to every beginning of `other`
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (letter != wanted)))
        above = row
    return above[-1]


def anls(answer: str, targets: Sequence[str], fields: Mapping[str, Any], *, threshold: float = 0.5) -> float:
    """1 - the smallest normalised distance to a target; 0 where that is below the threshold."""

    def plain(text: str) -> str:
        return " ".join(text.lower().split())

    distances = []
    for target in checked_targets(targets):
        # Spaces are squeezed before they are compared, but count in the length: the scorer's way.
        length = max(len(target.upper()), len(answer.upper()))
        distances.append(edit_distance(plain(target), plain(answer)) / length if length else 0.0)
    similarity = 1 - min(distances)
    return float(similarity) if similarity >= threshold else 0.0


def anls_metric(threshold: float = 0.5) -> Metric:
    if not 0 <= threshold <= 1:
        raise MetricError(f"anls: expected a threshold from 0 to 1, got {threshold}")
    return Metric(
        "anls",
        "ANLS: 1 - edit distance / length of the longer text, to the nearest target, in lower case with "
        f"single spaces; 0 below {threshold}; Biten et al. 2019, as scored by DocVQA.",
        lambda answer, targets, fields: anls(answer, targets, fields, threshold=threshold),
        mean_score,
    )
