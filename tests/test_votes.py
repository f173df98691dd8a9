"""Several answers to one question: the same as one at a time, the one that is picked, and what they score."""

from __future__ import annotations

import json
import statistics
from itertools import combinations

import pytest

from data.sources import DatasetConfig
from eval.answers import answers as eval_answers
from eval.card import eval_results, evaluation_text, read_results
from eval.metrics import find_metric
from eval.rows import data_task
from eval.statistics import best_of, score_interval
from eval.tasks import DEFAULT_MODEL, Draws
from generation.options import GenerationOptions
from generation.requests import Stats
from inference.answer import ask
from inference.checkpoint import open_checkpoint
from inference.votes import pick
from messages import for_terminal
from tests.evaluations import results_of, run, samples_of, write_rows

SAMPLED = ("--num-answers", 6, "--temperature", 1.5, "--seed", 1, "--max-new-tokens", 2)


def test_a_vote_counts_answers_that_differ_in_form_alone_as_one():
    said = ["Red.", "two words", "red", "Two  words", "blue", " RED"]
    votes = pick(said, [0.5] * 6)["votes"]
    assert [(one["count"], one["numbers"]) for one in votes] == [(3, [0, 2, 5]), (2, [1, 3]), (1, [4])]
    voted = pick(said, [0.1, 0.2, 0.4, 0.3, 0.9, 0.2])
    assert (voted["number"], voted["answer"]) == (2, "red")  # the surest of those that won
    assert voted["votes"][0]["confidence"] == pytest.approx(0.7 / 3)
    assert pick(said, [0.1, 0.2, 0.4, 0.3, 0.9, 0.2], "confidence")["answer"] == "blue"


def test_of_equally_many_votes_the_higher_mean_confidence_wins():
    said = ["one", "two", "one", "two", "three"]
    assert pick(said, [0.9, 0.7, 0.1, 0.6, 1.0])["answer"] == "two"
    assert pick(said, [0.5] * 5)["number"] == 0  # the first of equals


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
    assert cli("batch", questions, "--out", out, *ask)[0] == 0
    line = json.loads(out.read_text())
    assert line["picked"]["number"] == made["picked"]["number"]
    assert line["picked"]["answer"] == line["answers"][made["picked"]["number"]]
    # What was picked otherwise is another run.
    assert cli("batch", questions, "--out", out, *ask[:-1], "confidence")[0] == 2


# ------------------------------------------------------------------------------------------ evaluations
def test_the_best_of_k_is_its_mean_over_all_choices_of_k():
    for scores in ([0.0, 1.0, 1.0, 0.0, 0.0, 1.0], [0.25, 1.0, 0.5, 0.5, 0.0], [0.0] * 4, [1.0] * 70):
        for k in {1, 2, len(scores) - 1, len(scores)}:
            every = [max(some) for some in combinations(scores, k)]
            assert best_of(scores, k) == pytest.approx(statistics.mean(every))
    assert best_of([1.0] * 70, 33) == 1


def test_answers_are_one_in_a_vote_where_a_metric_cannot_tell_them_apart():
    fields = {"choices": ["cat", "dog"]}
    for metric, one, same, other in (
        ("exact_match", "Red ", "red", "red."),
        ("vqa_accuracy", "the Two", "2", "three"),
        ("anls", "A  b", "a b", "ab"),
        ("relaxed_accuracy", "50%", "0.5", "50"),
        ("multiple_choice", "(B)", "The answer is B.", "A"),
        ("pope", "Yes", " yes ", "yes, it is"),
    ):
        key = find_metric(metric).same
        assert key(one, fields) == key(same, fields) != key(other, fields), metric


@pytest.mark.slow
def test_an_evaluation_of_several_answers_has_those_of_separate_calls_and_resumes(tmp_path):
    rows, out = write_rows(tmp_path, images=2, each=2), tmp_path / "out"
    arguments = ("--data", rows, "--samples", 4, "--temperature", 1.5, "--sample-seed", 3)
    assert run(*arguments, "--batch-size", 3, "--compile", "off", "--output", out) == 0
    checkpoint = open_checkpoint(DEFAULT_MODEL, device="cpu", dtype="float32").compiled()
    task, draws = data_task(DatasetConfig(str(rows)), find_metric("exact_match")), Draws(4, 1.5, 3)
    records = {one["id"]: one for one in samples_of(out)}
    for sample in task.samples:
        record = records[sample.id]
        for number, text in enumerate(record["answers"]):
            options = GenerationOptions(
                max_new_tokens=32, temperature=1.5, seed=draws.seed_of(sample) + number, confidence=True
            )
            alone = ask(checkpoint, sample.images(), sample.question, options).finish()
            assert text == alone["answers"][0]
            assert record["confidences"][number] == pytest.approx(alone["confidences"][0], abs=1e-4)
            assert record["scores"][number] == task.metric.score(text, sample.targets, {})
        assert record["answer"] == pick(record["answers"], record["confidences"])["answer"]
        assert record["score"] == statistics.mean(record["scores"])
    assert len({text for one in records.values() for text in one["answers"]}) > len(records)  # they vary

    before, lines = results_of(out), (out / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (out / "samples.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:40])
    (out / "results.json").unlink()
    assert run(*arguments, "--output", out) == 0  # another batch size, and the C step
    after = results_of(out)
    assert {one["id"]: one["answers"] for one in samples_of(out)} == {
        name: one["answers"] for name, one in records.items()
    }
    assert (after["answered"], after["at_k"]) == (2, before["at_k"])
    assert run(*arguments[:-1], 4, "--output", out) == 2  # other answers are another run

    scores = [records[sample.id]["scores"] for sample in task.samples]
    by_k = {row["k"]: row for row in after["at_k"]}
    assert sorted(by_k) == [1, 2, 4]
    assert by_k[1]["best"] == by_k[1]["majority"]
    assert by_k[1]["best"]["score"] == after["score"] == statistics.mean(map(statistics.mean, scores))
    some_right = [float(max(own)) for own in scores]
    assert by_k[4]["best"] == {
        "score": statistics.mean(some_right),
        "interval": list(score_interval(some_right)),
    }
    won = [own["scores"][own["answers"].index(own["answer"])] for own in records.values()]
    assert by_k[4]["majority"]["score"] == statistics.mean(won)
    results = read_results(out)
    assert "| 4 |" in evaluation_text([results]) and "pass@4" in (out / "report.html").read_text()
    assert eval_results([results])[0].metric_args["majority@4"] == by_k[4]["majority"]["score"]

    stats = Stats()
    checkpoint.features.clear()
    assert len(list(eval_answers(checkpoint, task.samples, 8, draws=draws, stats=stats))) == 16
    assert stats.reused > 3 * stats.prefilled  # one prefill for four answers, and images shared


def test_samples_need_a_temperature_and_the_other_way_round(tmp_path):
    for wrong in (["--samples", 4], ["--temperature", 1], ["--samples", 1, "--temperature", 1]):
        assert run("--tasks", "shapes", "--output", tmp_path, *wrong) == 2
    assert run("--tasks", "shapes", "--samples", 4, "--temperature", 0) == 2
