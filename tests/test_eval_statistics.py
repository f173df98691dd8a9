"""Bootstrap intervals cover what they should, and do not depend on the order of samples."""

from __future__ import annotations

import numpy as np
import pytest

from eval.metrics import Scored, find_metric
from eval.statistics import MULTINOMIAL_COST, bootstrap_interval, paired_bootstrap


def few_values(count: int) -> list[float]:
    return [float(n % 4 == 0) for n in range(count)]


def many_values(count: int) -> list[float]:
    return np.random.default_rng(3).random(count).tolist()


@pytest.mark.parametrize("scores", [few_values(400), many_values(400)], ids=["few values", "many values"])
def test_the_interval_is_the_one_of_theory(scores):
    """Of 400 independent scores the mean is close to normal."""
    low, high = bootstrap_interval(scores, resamples=20_000)
    error = np.std(scores) / len(scores) ** 0.5
    assert low == pytest.approx(np.mean(scores) - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(np.mean(scores) + 1.96 * error, abs=0.15 * error)
    narrow = bootstrap_interval(scores, confidence=0.5)
    assert low < narrow[0] < np.mean(scores) < narrow[1] < high


@pytest.mark.parametrize("scores", [few_values(200), many_values(200)], ids=["few values", "many values"])
def test_order_changes_nothing_and_the_seed_something(scores):
    assert bootstrap_interval(scores) == bootstrap_interval(scores[::-1])
    some = [bootstrap_interval(scores, resamples=50, seed=seed) for seed in range(4)]
    assert len(set(some)) > 1


def test_both_ways_to_resample_agree():
    """Drawn by value and drawn by sample: scores, and the same with noise that makes each unique."""
    scores = few_values(MULTINOMIAL_COST * 40)
    noise = 1e-9 * np.arange(len(scores))
    by_value = bootstrap_interval(scores, resamples=20_000)
    by_sample = bootstrap_interval(np.asarray(scores) + noise, resamples=20_000)
    assert by_value == pytest.approx(by_sample, abs=0.003)


def test_an_interval_of_something_that_is_no_mean():
    f1 = find_metric("pope").summarise
    samples = [Scored("yes" if n % 3 else "no", ("yes" if n % 2 else "no",), float(n % 3 > 0) == n % 2)
               for n in range(90)]  # fmt: skip
    low, high = bootstrap_interval(samples, resamples=300, statistic=lambda drawn: f1(drawn)["f1"])
    assert low < f1(samples)["f1"] < high < low + 0.4


def test_one_score_and_equal_scores_leave_no_doubt():
    assert bootstrap_interval([0.5]) == (0.5, 0.5)
    assert bootstrap_interval([1] * 30) == (1.0, 1.0)


def test_a_difference_is_found_where_there_is_one():
    a, b = few_values(400), [min(1.0, score + (n % 8 == 1)) for n, score in enumerate(few_values(400))]
    better = paired_bootstrap(a, b)
    assert better.difference == pytest.approx(0.125) and 0 < better.low < 0.125 < better.high
    assert better.p_value < 0.001
    worse = paired_bootstrap(b, a)
    assert (worse.difference, worse.p_value) == (-better.difference, better.p_value)


def test_pairing_counts():
    """The same difference of means, question by question and between unrelated answers."""
    a = few_values(400)
    b = [1.0 if n in (1, 2, 3) else score for n, score in enumerate(a)]
    unrelated = [*b[1:], b[0]]
    paired, other = paired_bootstrap(a, b), paired_bootstrap(a, unrelated)
    assert paired.difference == pytest.approx(other.difference) == pytest.approx(3 / 400)
    assert paired.high - paired.low < (other.high - other.low) / 4


def test_no_difference_is_no_evidence():
    same = paired_bootstrap(few_values(50), few_values(50))
    assert (same.difference, same.low, same.high, same.p_value) == (0, 0, 0, 1)
    swapped = paired_bootstrap([0, 1] * 50, [1, 0] * 50)
    assert swapped.low < 0 < swapped.high and swapped.p_value > 0.5


def test_the_p_value_is_that_of_a_sign_test():
    """8 questions gained, 2 lost of 200: about what an exact sign test says (0.109)."""
    a = [1.0] * 2 + [0.0] * 198
    b = [0.0] * 2 + [1.0] * 8 + [0.0] * 190
    assert paired_bootstrap(a, b, resamples=40_000).p_value == pytest.approx(0.08, abs=0.04)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "at least one score, got none"),
        (([1.0], 0), "resamples: expected at least 1, got 0"),
        (([1.0], 10, 1.0), "confidence: expected above 0 and below 1, got 1.0"),
        (([1.0, float("nan")],), "expected finite numbers, got NaN"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(*arguments)


def test_models_are_compared_on_the_same_questions():
    with pytest.raises(ValueError, match="on the same questions, got 2 and 1"):
        paired_bootstrap([1, 0], [1])
