"""Intervals hold the true score as often as they say, also of few questions and near 100%."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from eval.metrics import Scored, find_metric
from eval.statistics import compare_paired, figure_interval, score_interval


def few_values(count: int) -> list[float]:
    return [float(n % 4 == 0) for n in range(count)]


def many_values(count: int) -> list[float]:
    return np.random.default_rng(3).random(count).tolist()


@pytest.mark.parametrize("scores", [few_values(400), many_values(400)], ids=["few values", "many values"])
def test_the_interval_is_the_one_of_theory(scores):
    """Of 400 independent scores the mean is close to normal."""
    low, high = score_interval(scores)
    error = np.std(scores) / len(scores) ** 0.5
    assert low == pytest.approx(np.mean(scores) - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(np.mean(scores) + 1.96 * error, abs=0.15 * error)
    narrow = score_interval(scores, confidence=0.5)
    assert low < narrow[0] < np.mean(scores) < narrow[1] < high
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


@pytest.mark.parametrize(
    ("values", "shares"),
    [((0.65, 1.0), (0.05, 0.95)), ((0, 0.95, 1), (0.03, 0.3, 0.67)), ((0, 0.05, 1), (0.93, 0.05, 0.02))],
)
@pytest.mark.parametrize("count", [10, 50])
def test_scores_in_between_are_covered_near_the_end_too(values, shares, count):
    """A wrong answer among nearly right ones: most samples have few of them or none, and so has whatever is
    resampled from these."""
    draws, held = np.random.default_rng(5), 0
    for _ in range(100):
        low, high = score_interval(draws.choice(values, count, p=shares), resamples=999)
        held += low <= np.dot(values, shares) <= high
    assert held > 91


def test_an_interval_of_something_that_is_no_mean():
    f1 = find_metric("pope").summarise
    samples = [Scored("yes" if n % 3 else "no", ("yes" if n % 2 else "no",), float(n % 3 > 0) == n % 2)
               for n in range(90)]  # fmt: skip
    low, high = figure_interval(samples, lambda drawn: f1(drawn)["f1"], resamples=300)
    assert low < f1(samples)["f1"] < high < low + 0.4
    right = [Scored("yes", ("yes",), 1.0)] * 20
    low, high = figure_interval(right, lambda drawn: f1(drawn)["f1"], resamples=300)
    assert low < 0.9 and high == 1.0


@pytest.mark.parametrize("scores", [[0.5], [0.5] * 9, [1] * 30, [0]])
def test_equal_scores_leave_doubt(scores):
    low, high = score_interval(scores)
    assert 0 <= low <= scores[0] <= high <= 1 and high - low > 0.1


# ------------------------------------------------------------------------------------------- two models
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (few_values(400), [min(1.0, score + (n % 8 == 1)) for n, score in enumerate(few_values(400))]),
        (many_values(300), [min(1.0, score + 0.05) for score in many_values(300)]),
    ],
    ids=["right or wrong", "in between"],
)
def test_a_difference_is_found_where_there_is_one(a, b):
    better, worse, gain = compare_paired(a, b), compare_paired(b, a), np.mean(np.subtract(b, a))
    assert better.difference == pytest.approx(gain) and 0 < better.low < gain < better.high < 2 * gain
    assert better.p_value < 0.001
    assert (worse.difference, worse.p_value) == (-better.difference, better.p_value)


def test_pairing_counts():
    """The same difference of means, question by question and between unrelated answers."""
    a = few_values(400)
    b = [1.0 if n in (1, 2, 3) else score for n, score in enumerate(a)]
    unrelated = [*b[1:], b[0]]
    paired, other = compare_paired(a, b), compare_paired(a, unrelated)
    assert paired.difference == pytest.approx(other.difference) == pytest.approx(3 / 400)
    assert paired.high - paired.low < (other.high - other.low) / 4


def test_no_difference_is_no_evidence():
    same = compare_paired(few_values(50), few_values(50))
    assert same.low < same.difference == 0 < same.high and same.p_value == 1
    swapped = compare_paired([0, 1] * 50, [1, 0] * 50)
    assert swapped.low < 0 < swapped.high and swapped.p_value == 1


@pytest.mark.parametrize("better, worse", [(1, 0), (5, 0), (8, 2), (300, 200)])
def test_the_p_value_of_right_and_wrong_is_that_of_a_sign_test(better, worse):
    a = [1.0] * worse + [0.0] * (better + 10)
    b = [0.0] * worse + [1.0] * better + [0.0] * 10
    result = compare_paired(a, b)
    assert result.p_value == pytest.approx(binomtest(better, better + worse).pvalue)
    assert result.low < (better - worse) / len(a) < result.high


@pytest.mark.parametrize("gains", [[0.25], [0.1, 0.2, 0.4, 0.05], [0.5, 0.5, -0.1, 0.3, 0.9, 0.2, 0.4]])
def test_few_questions_between_right_and_wrong_are_permuted_exactly(gains):
    result = compare_paired([0.0 if gain > 0 else -gain for gain in gains], [max(0.0, g) for g in gains])
    flipped = [
        sum(g * s for g, s in zip(gains, signs)) for signs in itertools.product((1, -1), repeat=len(gains))
    ]
    exact = np.mean(np.abs(flipped) >= abs(sum(gains)) - 1e-9)
    assert result.p_value == pytest.approx(exact)
