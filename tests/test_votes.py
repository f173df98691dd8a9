"""Several answers to one question: the same as one at a time, the one that wins, and what they score."""

from __future__ import annotations

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
from inference.votes import winner
from tests.evaluations import results_of, run, samples_of, write_rows


def test_the_surest_of_the_most_frequent_answers_wins_a_vote():
    said = ["Red.", "two words", "red", "Two  words", "blue", " RED"]  # forms of three answers
    assert winner(said, [0.1, 0.2, 0.4, 0.3, 0.9, 0.2]) == 2
    said = ["one", "two", "one", "two", "three"]
    assert winner(said, [0.9, 0.7, 0.1, 0.6, 1.0]) == 1  # by the mean confidence of equally frequent ones
    assert winner(said, [0.5] * 5) == 0  # the first of equals


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
        assert record["answer"] == record["answers"][winner(record["answers"], record["confidences"])]
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
        "n": len(some_right),
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
