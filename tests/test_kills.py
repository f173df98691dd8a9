"""Killed a few times, as `python -m tests.soak.kills` does it a hundred times (training has its own
test, `tests/test_train_resume.py`)."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest

from tests.soak import kills
from tests.soak.kills import (
    forked,
    kill_again_and_again,
    kill_batch,
    kill_evaluation,
    kill_rounds,
    kill_saving,
    lines,
)


@pytest.mark.parametrize(
    "part",
    [partial(kill_evaluation, images=6), partial(kill_batch, images=6), kill_saving],
    ids=["evaluation", "batch", "saving"],
)
def test_nothing_is_lost_and_nothing_twice(part, tmp_path):
    outcome = part(tmp_path, kills=3)
    assert outcome.killed == 3 and outcome.as_never_killed, outcome


def test_work_that_ends_before_its_kills_are_used_up_is_begun_anew(tmp_path):
    def work(output) -> None:
        while lines(output) < 25:
            with output.open("a") as file:
                file.write("one\n")
            time.sleep(0.01)

    outputs, reached = kill_rounds(
        tmp_path / "out", lambda output: forked(partial(work, output)), lines, 12, "0"
    )
    assert len(reached) == 12 and len(outputs) > 1
    assert [lines(output) for output in outputs] == [25] * len(outputs)


def test_work_that_fails_or_stands_still_is_an_error(monkeypatch):
    with pytest.raises(RuntimeError, match="7"):
        kill_again_and_again(forked(lambda: 7), lambda: 0, 3, random.Random(0))
    monkeypatch.setattr(kills, "PATIENCE", 0.1)
    with pytest.raises(RuntimeError, match="too slow"):
        kill_again_and_again(forked(lambda: time.sleep(600)), lambda: 0, 3, random.Random(0))
