"""ROUGE-L of captions, computed by Google's rouge-score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from eval.metrics.base import Metric, MetricError, checked_targets, mean_score


@cache
def _scorer(stem: bool):
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise MetricError(
            "rouge_l needs the rouge-score package: pip install -r requirements-eval.txt"
        ) from None
    return RougeScorer(["rougeL"], use_stemmer=stem)


def rouge_l(answer: str, targets: Sequence[str], fields: Mapping[str, Any], *, stem: bool = False) -> float:
    """F1 of the longest common subsequence of words, with the nearest target."""
    checked_targets(targets)
    return float(_scorer(stem).score_multi(targets, answer)["rougeL"].fmeasure)


def rouge_metric(stem: bool = False) -> Metric:
    """`rouge_l`; `stem` compares words by their stems (Porter)."""
    return Metric(
        "rouge_l",
        "ROUGE-L: F1 of the longest common subsequence of words (lower case, letters and digits"
        f"{', stemmed' if stem else ''}) with the nearest target; Lin 2004, by Google's rouge-score.",
        lambda answer, targets, fields: rouge_l(answer, targets, fields, stem=stem),
        mean_score,
    )
