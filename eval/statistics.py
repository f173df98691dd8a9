"""How far a score can be trusted: intervals of scores, and two models compared on the same questions.

Shares of right answers have exact intervals (Clopper and Pearson, 1934): a bootstrap interval has no width
where all answers are right. Means near 0 or 1 of other scores get the interval of an equally large share.
Other means are resampled (BCa: Efron, "Better Bootstrap Confidence Intervals", 1987), sorted, so that their
order does not matter. Two models are compared by the questions on which they differ: with an exact sign test
(McNemar's) where scores are right or wrong, otherwise with permutations. The interval of a difference of
paired shares is Bonett and Price's ("Adjusted Wald Confidence Interval for a Difference of Binomial
Proportions Based on Paired Data", 2012). Confidences are compared with scores in bins of equally many answers
(Nixon and others, "Measuring Calibration in Deep Learning", 2019), as most of them are nearly 1. pass@k is
that of Chen and others ("Evaluating Large Language Models Trained on Code", 2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy  # which imports scipy.stats, half a second, when it is first used

CONFIDENCE = 0.95
RESAMPLES = 9_999
BINS = 15
_FEW = 5  # right or wrong answers: resampling fewer says little about those that were not drawn
_NUMBERS_AT_ONCE = 4_000_000

Interval = tuple[float, float]


def best_of(scores: Sequence[float], k: int) -> float:
    """The expected best score of k of these answers to a question, drawn without replacement. Where scores
    are 0 or 1 it is the unbiased pass@k, 1 - C(n - c, k) / C(n, k) of c right ones among n."""
    # Integers where they can be, so that a question that is always right has exactly 1.
    whole = (int(score) if score in (0, 1) else score for score in sorted(scores))
    best = sum(math.comb(place, k - 1) * score for place, score in enumerate(whole))
    return best / math.comb(len(scores), k)


def score_interval(scores: Sequence[float]) -> Interval:
    """Interval of the mean of scores. It is exact where all of them are 0 or 1, and that of an equally large
    share, which is no narrower, where their sum is within 5 of 0 or of their number."""
    values = np.asarray(scores, np.float64)
    right, count = float(values.sum()), len(values)
    near_an_end = ((values >= 0) & (values <= 1)).all() and min(right, count - right) < _FEW
    if _is_share(values) or near_an_end or np.ptp(values) == 0:
        return _exact(right, count)
    return _resampled(values)


def compare_paired(scores_a: Sequence[float], scores_b: Sequence[float]) -> tuple[float, Interval, float]:
    """Scores of two models on the same questions, in the same order -> how much higher the second model's
    mean is, the interval of that, and its two-sided p-value: how often chance alone shows as much."""
    a, b = np.asarray(scores_a, np.float64), np.asarray(scores_b, np.float64)
    gains = b - a
    if _is_share(a) and _is_share(b):
        interval = _paired_shares(gains)
    elif np.ptp(gains) > 0:
        interval = _resampled(gains)
    else:  # Gains lie from -1 to 1, so (gain + 1) / 2 is a score.
        low, high = _exact(float((gains + 1).sum() / 2), len(gains))
        interval = 2 * low - 1, 2 * high - 1
    return float(gains.mean()), interval, _p_value(gains[gains != 0])


def calibration(confidences: Sequence[float], scores: Sequence[float]) -> dict[str, Any]:
    """{"ece": the expected calibration error, "bins": [{"confidence", "score", "interval", "n"}]}, from the
    least confidence to the greatest, each bin with its means; equal confidences share one.

    The error is the mean distance of the bins' confidence from their score, by their numbers of answers.
    """
    sure, right = np.asarray(confidences, np.float64), np.asarray(scores, np.float64)
    edges = np.quantile(sure, np.linspace(0, 1, BINS + 1))
    which = np.searchsorted(edges[1:-1], sure)
    bins: list[dict[str, Any]] = []
    for number in np.unique(which):
        own = right[which == number]
        mean = {"confidence": float(sure[which == number].mean()), "score": float(own.mean())}
        bins.append(mean | {"interval": list(score_interval(own.tolist())), "n": len(own)})
    ece = sum(abs(one["confidence"] - one["score"]) * one["n"] for one in bins) / len(sure)
    return {"ece": ece, "bins": bins}


def _p_value(gains: np.ndarray) -> float:
    """Of the questions on which the models differ: could each as well have been the other way round?"""
    if len(gains) < 2:
        return 1.0
    if (np.abs(gains) == 1).all():
        return float(scipy.stats.binomtest(int((gains > 0).sum()), len(gains)).pvalue)
    batch = max(1, _NUMBERS_AT_ONCE // len(gains))
    found = scipy.stats.permutation_test(  # all permutations, where they are fewer: up to 13 questions
        (np.sort(gains), np.zeros(len(gains))), lambda x, y, axis: np.sum(x - y, axis=axis), vectorized=True,
        permutation_type="samples", n_resamples=RESAMPLES, batch=batch, rng=0,
    )  # fmt: skip
    return float(found.pvalue)


def _paired_shares(gains: np.ndarray) -> Interval:
    """Interval of a difference of two models' shares, from gains of -1, 0 and 1."""
    count = len(gains) + 2
    better, worse = ((gains > 0).sum() + 1) / count, ((gains < 0).sum() + 1) / count
    middle = better - worse
    reach = scipy.stats.norm.ppf((1 + CONFIDENCE) / 2) * ((better + worse - middle**2) / count) ** 0.5
    return float(max(-1.0, middle - reach)), float(min(1.0, middle + reach))


def _exact(right: float, count: int) -> Interval:
    """Clopper and Pearson's interval of a share. `right` need not be whole: a mean score is at most as
    uncertain as the share of right answers that it equals."""
    tail = (1 - CONFIDENCE) / 2
    right = min(max(right, 0.0), float(count))
    low = 0.0 if right == 0 else float(scipy.stats.beta.ppf(tail, right, count - right + 1))
    high = 1.0 if right == count else float(scipy.stats.beta.isf(tail, right + 1, count - right))
    return low, high


def _resampled(values: np.ndarray) -> Interval:
    found = scipy.stats.bootstrap(
        (np.sort(values),), np.mean, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="BCa",
        batch=max(1, _NUMBERS_AT_ONCE // len(values)), rng=0,
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def _is_share(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0, 1)).all())
