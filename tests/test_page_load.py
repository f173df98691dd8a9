"""The page under a little load, for seconds: `python -m tests.soak.load` does it for minutes."""

from __future__ import annotations

from tests.soak.load import run


def test_nobody_gets_a_wrong_answer_and_the_page_stays_up():
    told = run(clients=3, seconds=6)
    assert told["page_is_up"] and not told["stuck_clients"]
    assert told["too large"] == 3 and told["asked"] > 3 and told["wrong"] == 0, told["wrong_examples"]
    assert told["errors"] == 0, told["error_examples"]
    assert told["exit_status"] == 0 and told["files_left"] == []  # no image of theirs
