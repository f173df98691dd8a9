"""Intervals hold the true score as often as they say, also of few questions and near 100%."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import binom, binomtest
from sklearn.calibration import calibration_curve

from eval.statistics import BINS, calibration, compare_paired, score_interval

FEW = [float(n % 4 == 0) for n in range(400)]
MANY = np.random.default_rng(3).random(300).tolist()


@pytest.mark.parametrize("scores", [FEW, MANY], ids=["right or wrong", "in between"])
def test_the_interval_is_the_one_of_theory(scores):
    """Of so many independent scores the mean is close to normal."""
    low, high = score_interval(scores)
    error = np.std(scores) / len(scores) ** 0.5
    assert low == pytest.approx(np.mean(scores) - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(np.mean(scores) + 1.96 * error, abs=0.15 * error)
    assert score_interval(scores[::-1]) == (low, high)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("count", [1, 20, 60])
def test_an_interval_of_right_answers_holds_the_share_as_often_as_it_says(share, count):
    held = 0.0
    for right in range(count + 1):
        if (chance := binom.pmf(right, count, share)) > 1e-9:
            low, high = score_interval([1] * right + [0] * (count - right))
            held += chance * (low <= share <= high)
    assert held > 0.9499


@pytest.mark.parametrize("values", [(0, 0.95, 1), (0, 0.05, 1)])
def test_scores_in_between_are_covered_near_the_end_too(values, monkeypatch):
    """A wrong answer among nearly right ones: most samples have few of them or none, and so has whatever is
    resampled from these."""
    monkeypatch.setattr("eval.statistics.RESAMPLES", 999)
    shares = (0.03, 0.3, 0.67) if values[1] > 0.5 else (0.93, 0.05, 0.02)
    draws, held = np.random.default_rng(5), 0
    for _ in range(100):
        low, high = score_interval(draws.choice(values, 20, p=shares).tolist())
        held += low <= np.dot(values, shares) <= high
    assert held > 91


@pytest.mark.parametrize("scores", [[0.5], [0.5] * 9, [1] * 30, [0]])
def test_equal_scores_leave_doubt(scores):
    low, high = score_interval(scores)
    assert 0 <= low <= scores[0] <= high <= 1 and high - low > 0.1


# ------------------------------------------------------------------------------------------ calibration
@pytest.mark.parametrize("spread", [1.0, 5.0], ids=["even", "mostly sure"])
@pytest.mark.parametrize("count", [3, 38, 2000])
def test_calibration_is_scikit_learn_s(count, spread):
    # Of such counts no answer lies on an edge of bins, from which rounding could send it to either side.
    draws = np.random.default_rng(count)
    sure = draws.random(count) ** (1 / spread)
    sure[: count // 4] = 1.0  # equal ones stand in one bin
    right = (draws.random(count) < sure**2).astype(float)
    found = calibration(sure.tolist(), right.tolist())
    scores, confidences = calibration_curve(right, sure, n_bins=BINS, strategy="quantile")
    assert [one["score"] for one in found["bins"]] == pytest.approx(scores.tolist())
    assert [one["confidence"] for one in found["bins"]] == pytest.approx(confidences.tolist())
    sizes = np.array([one["n"] for one in found["bins"]])
    assert found["ece"] == pytest.approx(np.abs(scores - confidences) @ sizes / count)
    order = draws.permutation(count)
    assert calibration(sure[order].tolist(), right[order].tolist())["ece"] == pytest.approx(found["ece"])


def test_calibration_by_hand():
    """30 answers in 15 bins of two: always right at 0.5 to 0.78; always wrong; one of two."""
    sure = [0.5 + 0.02 * (n // 2) for n in range(30)]
    gap = sum(1 - one for one in sure) / 30
    assert calibration(sure, [1.0] * 30)["ece"] == pytest.approx(gap)
    assert calibration(sure, [0.0] * 30)["ece"] == pytest.approx(1 - gap)
    assert calibration(sure, [n % 2 for n in range(30)])["ece"] == pytest.approx(0.5 - gap, abs=1e-9)
    assert calibration([1.0] * 4, [1.0] * 4) == {
        "ece": 0.0,
        "bins": [{"confidence": 1.0, "score": 1.0, "interval": list(score_interval([1.0] * 4)), "n": 4}],
    }


# ------------------------------------------------------------------------------------------- two models
@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (FEW, [min(1.0, score + (n % 8 == 1)) for n, score in enumerate(FEW)]),
        (MANY, [min(1.0, score + 0.05) for score in MANY]),
    ],
    ids=["right or wrong", "in between"],
)
def test_a_difference_is_found_where_there_is_one(a, b):
    difference, (low, high), p_value = compare_paired(a, b)
    gain = np.mean(np.subtract(b, a))
    assert difference == pytest.approx(gain) and 0 < low < gain < high < 2 * gain and p_value < 0.001
    assert compare_paired(b, a)[::2] == (-difference, p_value)


def test_pairing_counts():
    """The same difference of means, question by question and between unrelated answers."""
    b = [1.0 if n in (1, 2, 3) else score for n, score in enumerate(FEW)]
    paired, other = compare_paired(FEW, b), compare_paired(FEW, [*b[1:], b[0]])
    assert paired[0] == pytest.approx(other[0]) == pytest.approx(3 / 400)
    assert np.ptp(paired[1]) < np.ptp(other[1]) / 4


@pytest.mark.parametrize(("a", "b"), [(FEW, FEW), ([0, 1] * 50, [1, 0] * 50)], ids=["same", "swapped"])
def test_no_difference_is_no_evidence(a, b):
    difference, (low, high), p_value = compare_paired(a, b)
    assert low < difference == 0 < high and p_value == 1


@pytest.mark.parametrize("better, worse", [(1, 0), (5, 0), (8, 2), (300, 200)])
def test_the_p_value_of_right_and_wrong_is_that_of_a_sign_test(better, worse):
    a = [1.0] * worse + [0.0] * (better + 10)
    b = [0.0] * worse + [1.0] * better + [0.0] * 10
    _, (low, high), p_value = compare_paired(a, b)
    assert p_value == pytest.approx(binomtest(better, better + worse).pvalue)
    assert low < (better - worse) / len(a) < high


@pytest.mark.parametrize("gains", [[0.25], [0.1, 0.2, 0.4, 0.05], [0.5, 0.5, -0.1, 0.3, 0.9, 0.2, 0.4]])
def test_few_questions_between_right_and_wrong_are_permuted_exactly(gains):
    *_, p_value = compare_paired([max(0.0, -gain) for gain in gains], [max(0.0, gain) for gain in gains])
    flipped = [np.dot(gains, signs) for signs in itertools.product((1, -1), repeat=len(gains))]
    assert p_value == pytest.approx(np.mean(np.abs(flipped) >= abs(sum(gains)) - 1e-9))
