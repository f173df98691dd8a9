"""How far a score can be trusted: intervals of scores, and two models compared on the same questions.

Shares of right answers have exact intervals (Clopper and Pearson, 1934). A bootstrap interval has no width
where all answers are right, and near 100% it holds the true share far less often than it claims. The same is
true of other scores near 0 or 1, whose means get the interval of an equally large share. Other means are
resampled (BCa: Efron, "Better Bootstrap Confidence Intervals", 1987), in an order that does not depend on
the samples'. Two models are compared by the questions on which they differ: with an exact sign test
(McNemar's) where scores are right or wrong, otherwise with permutations. The interval of a difference of
paired shares is Bonett and Price's ("Adjusted Wald Confidence Interval for a Difference of Binomial
Proportions Based on Paired Data", 2012); SciPy has all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # which imports scipy.stats, half a second, when it is first used

RESAMPLES = 9_999
_FEW = 5  # right or wrong answers: resampling fewer says little about those that were not drawn
_NUMBERS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class PairedResult:
    """Two models on the same questions.

    difference: mean score of the second model minus that of the first.
    low, high: its interval.
    p_value: two-sided; how often chance alone would show a difference this large.
    """

    difference: float
    low: float
    high: float
    p_value: float


def score_interval(
    scores: Sequence[float], confidence: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Interval of the mean of scores from 0 to 1. It is exact where all of them are 0 or 1, and that of an
    equally large share, which is no narrower, where their sum is within 5 of 0 or of their number."""
    values = np.asarray(scores, np.float64)
    right, count = float(values.sum()), len(values)
    exact = _exact(right, count, confidence)
    near_an_end = ((values >= 0) & (values <= 1)).all() and min(right, count - right) < _FEW
    if _is_share(values) or near_an_end:
        return exact
    return _resampled(values, confidence, resamples) or exact


def figure_interval(
    samples: Sequence[Any],
    statistic: Callable[[list[Any]], float],
    confidence: float = 0.95,
    resamples: int = 1_000,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a figure from 0 to 1 that is no mean, such as F1.

    Args:
        statistic: samples -> the figure. Called once for each resample.
    """
    numbers = np.arange(len(samples))

    def figure(drawn: np.ndarray) -> float:
        return statistic([samples[i] for i in drawn])

    if len(samples) > 1:
        found = scipy.stats.bootstrap(
            (numbers,), figure, n_resamples=resamples, confidence_level=confidence, method="percentile",
            vectorized=False, rng=0,
        ).confidence_interval  # fmt: skip
        if found.low < found.high:
            return float(found.low), float(found.high)
    # Every resample gave the same figure, which says nothing about how far off it may be.
    return _exact(figure(numbers) * len(samples), len(samples), confidence)


def compare_paired(
    scores_a: Sequence[float],
    scores_b: Sequence[float],
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> PairedResult:
    """Compare two models by their scores on the same questions, in the same order."""
    a, b = np.asarray(scores_a, np.float64), np.asarray(scores_b, np.float64)
    gains = b - a
    if _is_share(a) and _is_share(b):
        interval = _paired_shares(gains, confidence)
    else:
        # Gains lie from -1 to 1: where they are all the same, (gain + 1) / 2 is a score.
        low, high = _exact(float((gains + 1).sum() / 2), len(gains), confidence)
        interval = _resampled(gains, confidence, resamples) or (2 * low - 1, 2 * high - 1)
    return PairedResult(float(gains.mean()), *interval, _p_value(gains[gains != 0], resamples))


def _p_value(gains: np.ndarray, resamples: int) -> float:
    """Of the questions on which the models differ: could each as well have been the other way round?"""
    if len(gains) < 2:
        return 1.0
    if (np.abs(gains) == 1).all():
        return float(scipy.stats.binomtest(int((gains > 0).sum()), len(gains)).pvalue)
    return float(
        scipy.stats.permutation_test(
            (np.sort(gains), np.zeros(len(gains))),
            lambda x, y, axis: np.sum(x - y, axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=resamples,  # all there are, where they are fewer: up to 13 questions
            batch=max(1, _NUMBERS_AT_ONCE // len(gains)),
            rng=0,
        ).pvalue
    )


def _paired_shares(gains: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval of a difference of two models' shares, from gains of -1, 0 and 1."""
    count = len(gains) + 2
    better, worse = ((gains > 0).sum() + 1) / count, ((gains < 0).sum() + 1) / count
    middle = better - worse
    reach = scipy.stats.norm.ppf((1 + confidence) / 2) * ((better + worse - middle**2) / count) ** 0.5
    return float(max(-1.0, middle - reach)), float(min(1.0, middle + reach))


def _exact(right: float, count: int, confidence: float) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share; `right` need not be whole: a mean score is at most as
    uncertain as the share of right answers that it equals."""
    tail = (1 - confidence) / 2
    right = min(max(right, 0.0), float(count))
    low = 0.0 if right == 0 else float(scipy.stats.beta.ppf(tail, right, count - right + 1))
    high = 1.0 if right == count else float(scipy.stats.beta.isf(tail, right + 1, count - right))
    return low, high


def _resampled(values: np.ndarray, confidence: float, resamples: int) -> tuple[float, float] | None:
    """BCa interval of a mean; None where all values are the same, which says nothing of others."""
    if np.ptp(values) == 0:
        return None
    found = scipy.stats.bootstrap(
        (np.sort(values),), np.mean, n_resamples=resamples, confidence_level=confidence, method="BCa",
        batch=max(1, _NUMBERS_AT_ONCE // len(values)), rng=0,
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def _is_share(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0, 1)).all())
