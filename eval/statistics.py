"""How far a score can be trusted: bootstrap intervals, and two models compared on the same questions.

Resampling n scores with replacement and asking how often each distinct score was drawn is one multinomial
draw, so intervals of means cost little, and do not depend on the order of the samples. Percentile intervals:
Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13; the paired test: Berg-Kirkpatrick
et al., "An Empirical Investigation of Statistical Significance in NLP" (2012), here two-sided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_NUMBERS_AT_ONCE = 4_000_000
MULTINOMIAL_COST = 20  # drawing how often one value comes, in draws of one sample


@dataclass(frozen=True)
class PairedResult:
    """Two models on the same questions: what the second one gains over the first.

    difference: mean of scores_b minus mean of scores_a.
    low, high: its bootstrap interval.
    p_value: two-sided; how often chance alone would show a difference this large.
    """

    difference: float
    low: float
    high: float
    p_value: float


def bootstrap_interval(
    scores: Sequence[Any],
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    statistic: Callable[[list[Any]], float] | None = None,
) -> tuple[float, float]:
    """Percentile bootstrap interval (low, high).

    Args:
        scores: one number for each sample; or anything, where there is a `statistic`.
        statistic: a list of samples as long as `scores` -> the figure; the mean where it is None. Called once
            for each resample, which takes time: lower `resamples` for large sets.

    Raises:
        ValueError: no scores, or arguments outside what they can be.
    """
    _check(len(scores), resamples, confidence)
    if statistic is None:
        figures = _resampled_means(np.asarray(scores, dtype=np.float64), resamples, seed)
    else:
        draws, count = np.random.default_rng(seed), len(scores)
        figures = np.array(
            [statistic([scores[i] for i in draws.integers(count, size=count)]) for _ in range(resamples)]
        )
    return _interval(figures, confidence)


def paired_bootstrap(
    scores_a: Sequence[float],
    scores_b: Sequence[float],
    resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> PairedResult:
    """Compare two models by their scores on the same questions, in the same order.

    Raises:
        ValueError: not one score of each model for each question, or arguments outside what they can be.
    """
    if len(scores_a) != len(scores_b):
        raise ValueError(
            f"expected two models' scores on the same questions, got {len(scores_a)} and {len(scores_b)}"
        )
    _check(len(scores_a), resamples, confidence)
    gains = np.asarray(scores_b, dtype=np.float64) - np.asarray(scores_a, dtype=np.float64)
    means = _resampled_means(gains, resamples, seed)
    low, high = _interval(means, confidence)
    # The observed sample counts as one more resample: a finite number of them never proves p = 0.
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p_value = min(1.0, 2 * (tail + 1) / (resamples + 1))
    return PairedResult(float(gains.mean()), low, high, p_value)


def _check(count: int, resamples: int, confidence: float) -> None:
    if count < 1:
        raise ValueError("expected at least one score, got none")
    if resamples < 1:
        raise ValueError(f"resamples: expected at least 1, got {resamples}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected above 0 and below 1, got {confidence}")


def _resampled_means(scores: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means (resamples,) of resamples of scores (n,)."""
    if not np.isfinite(scores).all():
        raise ValueError("scores: expected finite numbers, got NaN or infinity")
    values, counts = np.unique(scores, return_counts=True)  # (k,) both
    draws, shares = np.random.default_rng(seed), counts / counts.sum()
    sums = []
    if len(values) * MULTINOMIAL_COST < len(scores):
        at_once = max(1, _NUMBERS_AT_ONCE // len(values))
        for begin in range(0, resamples, at_once):
            drawn = draws.multinomial(len(scores), shares, size=min(at_once, resamples - begin))
            sums.append(drawn @ values)
    else:
        ordered, at_once = np.sort(scores), max(1, _NUMBERS_AT_ONCE // len(scores))
        for begin in range(0, resamples, at_once):
            drawn = draws.integers(len(scores), size=(min(at_once, resamples - begin), len(scores)))
            sums.append(ordered[drawn].sum(1))
    return np.concatenate(sums) / len(scores)


def _interval(figures: np.ndarray, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(figures, ((1 - confidence) / 2, (1 + confidence) / 2))
    return float(low), float(high)
