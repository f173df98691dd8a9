"""Killed a few times, as `python -m tests.soak.kills` does it a hundred times (training has its own
test, `tests/test_train_resume.py`)."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from pathlib import Path

import pytest

from tests.evaluations import FORK
from tests.soak import kills
from tests.soak.kills import (
    SHARES,
    Changes,
    Outcome,
    apportioned,
    kill_again_and_again,
    kill_batch,
    kill_evaluation,
    kill_rounds,
    kill_saving,
    lines,
)


@pytest.mark.parametrize(
    "part",
    [partial(kill_evaluation, images=8), partial(kill_batch, images=8), kill_saving],
    ids=["evaluation", "batch", "saving"],
)
def test_nothing_is_lost_and_nothing_twice(part, tmp_path):
    outcome = part(tmp_path, kills=3)
    assert outcome.killed == 3 and outcome.as_never_killed, outcome


def test_work_that_ends_before_its_kills_are_used_up_is_begun_anew(tmp_path):
    def start(output: Path):
        def work() -> None:
            while lines(output) < 25:
                with output.open("a") as file:
                    file.write("one\n")
                time.sleep(0.01)

        return work

    outputs, reached = kill_rounds(tmp_path / "out", start, lines, kills=12, seed=0)
    assert len(reached) == 12 and len(outputs) > 1
    assert [lines(output) for output in outputs] == [25] * len(outputs)


def test_work_that_fails_or_stands_still_is_said(monkeypatch):
    with pytest.raises(RuntimeError, match="ends with status 0, got 7"):
        kill_again_and_again(lambda: 7, lambda: 0, 3, random.Random(0))
    monkeypatch.setattr(kills, "PATIENCE", 0.1)
    with pytest.raises(RuntimeError, match=r"steps of progress in 0\.1 seconds"):
        kill_again_and_again(lambda: time.sleep(600), lambda: 0, 3, random.Random(0))


@pytest.mark.parametrize("lacking, whole, status", [(0, True, 0), (1, True, 1), (0, False, 1)])
def test_fewer_kills_than_asked_are_a_failure(monkeypatch, lacking, whole, status):
    def part(folder, number: int, seed: int) -> Outcome:
        return Outcome("batch", number - lacking, [], whole)

    monkeypatch.setitem(kills.PARTS, "batch", part)
    process = FORK.Process(target=lambda: os._exit(kills.main(["--parts", "batch", "--kills", "9"])))
    process.start()
    process.join(600)
    assert process.exitcode == status


@pytest.mark.parametrize("number", [1, 7, 10, 99, 100])
def test_parts_sum_to_what_was_asked(number):
    assert sum(apportioned(number, SHARES).values()) == number


def test_a_file_in_the_place_of_another_is_a_change(tmp_path):
    """Also where it has its number, as ext4 gives it."""
    path, times = tmp_path / "file", iter(range(1, 100))
    changes = Changes(path)
    assert changes() == changes() == 0
    for expected in (1, 2, 3):
        path.write_text("same")
        os.utime(path, ns=(0, next(times)))
        assert changes() == changes() == expected
