"""Several answers to one question: the same as one at a time, and the one that is picked."""

from __future__ import annotations

import json

import pytest

from inference.votes import pick, tally
from models.checkpoints.hub import for_terminal
from tests import invariants
from tests.invariants import answers, fast_step
from tests.prompts import NO_STOP

SAMPLED = ("--num-answers", 6, "--temperature", 1.5, "--seed", 1, "--max-new-tokens", 2)


@pytest.mark.parametrize("kind", [None, invariants.NativeStep])
def test_eight_answers_are_those_of_eight_calls_with_their_seeds(kind):
    vlm, rows, *_ = invariants.case("placeholder", "greedy")
    options = {"temperature": 1.2, "max_new_tokens": 10, "confidence": True, **NO_STOP}
    options["decode_step"] = None if kind is None else fast_step(vlm, kind)
    for row in rows:
        together = vlm.generate_detailed(**row, **options, seed=5, num_return_sequences=8)
        alone = [vlm.generate_detailed(**row, **options, seed=5 + number) for number in range(8)]
        assert together.rows() == [one.rows()[0] for one in alone]
        assert together.confidences == pytest.approx([one.confidences[0] for one in alone], rel=1e-4)
        assert len(set(map(tuple, together.rows()))) == 8
    way = "native slots" if kind else "slots"
    made = {"temperature": 1.2, "max_new_tokens": 10, "seed": 5, "num_return_sequences": 8, **NO_STOP}
    assert answers(vlm, way, rows[-1:], **made) == together.rows()


def test_a_vote_counts_answers_that_differ_in_form_alone_as_one():
    said = ["Red.", "two words", "red", "Two  words", "blue", " RED"]
    assert [(group.count, group.numbers) for group in tally(said, [0.5] * 6)] == [
        (3, [0, 2, 5]),
        (2, [1, 3]),
        (1, [4]),
    ]
    voted = pick(said, [0.1, 0.2, 0.4, 0.3, 0.9, 0.2])
    assert (voted["number"], voted["answer"]) == (2, "red")  # the surest of those that won
    assert voted["votes"][0]["confidence"] == pytest.approx(0.7 / 3)
    assert pick(said, [0.1, 0.2, 0.4, 0.3, 0.9, 0.2], "confidence")["answer"] == "blue"


def test_of_equally_many_votes_the_higher_mean_confidence_wins():
    said = ["one", "two", "one", "two", "three"]
    assert pick(said, [0.9, 0.7, 0.1, 0.6, 1.0])["answer"] == "two"
    assert pick(said, [0.5] * 5)["number"] == 0  # the first of equals
    for wrong in (([], []), (["one"], [])):
        with pytest.raises(ValueError):
            pick(*wrong)
    with pytest.raises(ValueError):
        pick(["one"], [0.5], "length")


def test_the_command_prints_the_one_that_is_picked(cli, as_json, photo, complaint):
    for by in ("vote", "confidence"):
        (made,) = as_json(photo, "how many?", *SAMPLED, "--pick", by)
        assert made["picked"] == pick(made["answers"], made["confidences"], by)
        status, out, err = cli(photo, "how many?", *SAMPLED, "--pick", by)
        assert status == 0 and out == for_terminal(made["picked"]["answer"]) + "\n"
        assert "6 answers" in err
    assert "--num-answers" in complaint(photo, "how many?", "--pick", "vote")


def test_a_batch_picks_as_the_command_does(cli, as_json, photo, tmp_path):
    ask = ("--dtype", "float32", *SAMPLED, "--pick", "vote")
    (made,) = as_json(photo, "how many?", *ask)
    questions, out = tmp_path / "questions.jsonl", tmp_path / "out.jsonl"
    questions.write_text(json.dumps({"image": str(photo), "question": "how many?"}) + "\n")
    assert cli("--batch", questions, "--out", out, *ask)[0] == 0
    line = json.loads(out.read_text())
    assert line["picked"]["number"] == made["picked"]["number"]
    assert line["picked"]["answer"] == line["answers"][made["picked"]["number"]]
    # What was picked otherwise is another run.
    assert cli("--batch", questions, "--out", out, *ask[:-1], "confidence")[0] == 2
