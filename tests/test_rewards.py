"""Rewards by name and by a function: what they give, and what is refused before a run begins."""

import pytest

from training.rewards import Rewards

ROW = {"target": "Three.", "level": 2}


def longer(answers, row, **more):
    return [len(answer) * row["level"] for answer in answers]


def broken(answers, row, **more):
    return [float("nan")] * len(answers)


def test_answers_get_the_weighted_sum_of_their_rewards():
    rewards = Rewards({"exact": 1.0, f"{__name__}:longer": 0.1})
    given = rewards(["three", "four", " THREE. "], ROW)
    assert given == {"exact": [1, 0, 1], f"{__name__}:longer": [10, 8, 16]}
    assert rewards.totals(given) == pytest.approx([2, 0.8, 2.6])


@pytest.mark.parametrize("name", ["exakt", "no_such_module:reward", f"{__name__}:absent", f"{__name__}:ROW"])
def test_a_reward_that_there_is_not_is_refused(name):
    with pytest.raises(ValueError, match=name.split(":")[-1]):
        Rewards({name: 1.0})


def test_a_reward_that_gives_no_numbers_stops_the_run():
    with pytest.raises(ValueError, match="broken"):
        Rewards({f"{__name__}:broken": 1.0})(["a"], ROW)
