"""Killed a few times, as `python -m tests.soak.kills` does it a hundred times (training has its own
test, `tests/test_train_resume.py`)."""

from __future__ import annotations

from functools import partial

import pytest

from tests.soak.kills import kill_answers, kill_saving


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [*(partial(kill_answers, command, images=3) for command in ("evaluation", "batch")), kill_saving],
    ids=["evaluation", "batch", "saving"],
)
def test_nothing_is_lost_and_nothing_twice(part, tmp_path):
    outcome = part(tmp_path, kills=2)
    assert outcome.killed == 2 and outcome.as_never_killed, outcome
