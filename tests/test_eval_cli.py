"""python -m eval: the image world with its controls, what it prints and writes, and mistakes."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import ModelCard

from eval import compare, lmms, tasks
from eval.metrics import find_metric
from eval.metrics import Metric, MetricError, mean_score
from eval.results import figures
from eval.statistics import score_interval
from eval.tasks import Scored, TaskError, shapes_task
from shapes import heldout_questions, majority_answers
from shapes import score as shapes_score
from tests.evaluations import answered, exits_of_ranks, results_of, run, samples_of, save_rows

ROWS = [{"question": "How many?", "answer": "3"}, {"question": "What colour?", "answer": "red"}]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """The folder of a run on the image world with controls."""
    output = tmp_path_factory.mktemp("eval") / "shapes"
    assert run("--tasks", "shapes", "--limit", 40, "--controls", "--output", output) == 0
    return output


def test_the_shapes_world_with_its_controls(shapes):
    results, pairs, found = results_of(shapes), heldout_questions(40), answered(shapes)
    scores = [shapes_score(qa, qa.answer, found[str(n)][0]) for n, (_, qa) in enumerate(pairs)]
    assert [found[str(n)][1] for n in range(40)] == scores
    assert results["score"] == pytest.approx(sum(scores) / 40) and results["n"] == 40
    assert results["score"] > 0.8  # the embedded model knows this world ...
    assert results["controls"]["blind"]["score"] < 0.5  # ... by looking at it
    common = majority_answers([qa for _, qa in pairs])
    majority = [shapes_score(qa, qa.answer, common[qa.family]) for _, qa in pairs]
    assert results["controls"]["majority"]["score"] == pytest.approx(sum(majority) / 40)
    assert results["majority_answers"] == common
    assert [row["name"] for row in results["families"]] == [
        *dict.fromkeys(qa.family for _, qa in pairs),
        "overall",
    ]
    assert sum(row["n"] for row in results["answer_lengths"]) == 40
    assert results["interval"] == list(score_interval(scores))


def test_results_tell_what_they_depend_on(shapes):
    results = results_of(shapes)
    assert results["task"]["prompt"] == "{question}" and results["task"]["scoring"]
    assert results["model"]["name"] == "ocelli-shapes" and results["model"]["revision"].startswith("sha256:")
    assert {"torch", "transformers", "python"} <= results["versions"].keys()
    assert results["seconds"] > 0 and results["samples_per_second"] == 40 / results["seconds"]
    record = samples_of(shapes)[0]
    assert {"id", "question", "prompt", "targets", "answer", "score", "family"} <= record.keys()


def test_prompt_metric_and_table_are_printed(tmp_path, capsys):
    rows = save_rows(tmp_path / "rows.jsonl", ROWS)
    arguments = ("--data", rows, "--prompt", "{question}\\nBriefly.", "--output", tmp_path / "out")
    assert (
        run(
            *arguments, "--allow-text-only", "--metric", "exact_match", "--metric-option", "ignore_case=false"
        )
        == 0
    )
    out = capsys.readouterr().out
    assert r"'{question}\nBriefly.'" in out and "| **overall** |" in out
    assert find_metric("exact_match", ignore_case=False).description in out
    assert "2 slots of" in out
    assert "samples/s" in out and samples_of(tmp_path / "out")[0]["prompt"].endswith("\nBriefly.")


def test_another_model_is_another_revision(shapes, model_folder, tmp_path):
    assert run("--tasks", "shapes", "--limit", 2, "--model", model_folder, "--output", tmp_path / "out") == 0
    assert results_of(tmp_path / "out")["model"]["revision"] != results_of(shapes)["model"]["revision"]


# --------------------------------------------------------------------------------------------- figures
def test_figures_of_a_metric_that_is_no_mean():
    metric = Metric(
        "share", "", lambda *_: 0.0, lambda s: {"score": float(any(x.score for x in s)), "hits": 1.0}
    )
    told = figures(metric, [Scored("", ("a",), score) for score in (1.0, 0.0, 0.0)])
    assert told["score"] == 1.0 and told["hits"] == 1.0 and told["interval"][0] == 0.0 < told["interval"][1]


def test_samples_that_cannot_be_scored_are_found_before_any_work():
    def score(answer, targets, fields):
        raise MetricError("needs a column choices")

    task = shapes_task(3)
    object.__setattr__(task, "metric", Metric("picky", "", score, mean_score))
    with pytest.raises(TaskError, match="question 0: needs a column choices"):
        task.check()


def test_figures_of_official_tasks_go_into_the_card_too(tmp_path):
    figures = {"accuracy": 0.5, "f1": 0.25}
    task = {"name": "pope", "harness": "lmms-eval 0.7.3"}
    results = {"task": task, "figures": figures, "intervals": {"accuracy": [0.4, 0.6]}, "n": 100}
    results["errors"] = {"count": 0, "samples": []}
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n\n# mine\n")
    assert run("card", tmp_path, tmp_path / "results.json") == 0
    card = ModelCard.load(tmp_path / "README.md")
    assert {one.metric_type: one.metric_value for one in card.data.eval_results} == figures
    assert lmms.table_text(results) in card.text


# --------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--tasks", "shape"), "unknown task 'shape'; expected shapes"),
        (("--tasks", "shapes,docvqa"), "unknown task 'docvqa'; expected docvqa_val"),
        (("--tasks", "mmstar,pope"), "mmstar, pope: needs lmms-eval, which is not installed: pip install -r"),
        (("--tasks", "shapes", "--model", "./nowhere"), "there is no folder ./nowhere"),
        (("--tasks", "shapes", "--device", "toaster"), "device: expected auto, cpu, cuda, mps"),
        (("--tasks", "shapes", "--limit", "0"), "--limit: expected at least 1, got 0"),
        (("--tasks", "shapes", "--metric", "anls"), "--metric: belong to --data"),
        (
            ("--tasks", "shapes", "--prompt", "x", "--system", "y", "--max-new-tokens", "32", "--allow-urls"),
            "--prompt, --system, --max-new-tokens, --allow-urls: belong to --data",
        ),
        (
            ("--tasks", "shapes", "--subset", "a", "--split", "b", "--data-revision", "c"),
            "--subset, --split, --data-revision: belong to --data",
        ),
        (("--data", "x", "--seed", "0"), "--seed: belongs to --tasks shapes"),
        (("--tasks", ","), "--tasks: expected names, got ','"),
        (
            ("--data", "x", "--metric", "relaxed_accuracy", "--metric-option", "years_exact=False"),
            "relaxed_accuracy: expected years_exact as true or false, got 'False'",
        ),
        ((), "expected either --tasks or --data"),
        (
            ("--data", "rows.jsonl", "--metric", "exact_mach"),
            "unknown metric 'exact_mach'; expected exact_match",
        ),
        (("--data", "./none.jsonl"), "no such file or folder"),
        (("--data", "x", "--columns", "question"), "--columns: expected OURS=THEIRS"),
        (("--data", "x", "--metric-option", "years"), "--metric-option: expected NAME=VALUE, got 'years'"),
        (("compare", "here", "there"), "here: expected the output folder of a run"),
        (("card", "here", "there"), "there: expected a results.json, found none"),
    ],
)
def test_mistakes_end_in_one_sentence(capsys, monkeypatch, arguments, sentence):
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)  # lmms-eval may be installed here
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert sentence in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--tasks", "shapes,mmstar", "--controls"), "--controls: tasks of lmms-eval have none"),
        (("--tasks", "mmstar", "--seed", "1"), "--seed: belongs to --tasks shapes"),
    ],
)
def test_official_tasks_refuse_what_has_no_effect_on_them(capsys, monkeypatch, arguments, sentence):
    monkeypatch.setattr(tasks, "find_spec", lambda name: True)  # no more of lmms-eval than that it is here
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert sentence in err and err.count("\n") == 1 and not out


def test_the_rank_that_fails_says_why(tmp_path, capfd):
    rank = ("--tasks", "shapes", "--limit", 4, "--compile", "off", "--output", tmp_path / "out")
    assert exits_of_ranks([rank, (*rank, "--model", "./nowhere")]) == [2, 2]
    err = capfd.readouterr().err
    assert "rank 1 of 2: there is no folder ./nowhere" in err and "Traceback" not in err
    assert "rank 0 of 2: another rank has left" in err


def test_the_same_task_twice_is_one(tmp_path):
    assert run("--tasks", "shapes,shapes", "--limit", 2, "--compile", "off", "--output", tmp_path) == 0
    assert results_of(tmp_path)["n"] == 2


def test_help_names_every_command(capsys):
    assert run("--help") == 0
    said = capsys.readouterr().out
    assert "compare" in said and "--controls" in said and "card" in said


# ------------------------------------------------------------------------------------------ compare, card
def test_compare_pairs_the_questions(shapes, model_folder, tmp_path, capsys):
    other = tmp_path / "other"
    assert run("--tasks", "shapes", "--limit", 40, "--model", model_folder, "--output", other) == 0
    capsys.readouterr()
    assert run("compare", other, shapes, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    row = result["rows"][-1]
    a, b = answered(other), answered(shapes)
    assert row["difference"] == pytest.approx(sum(b[n][1] - a[n][1] for n in a) / 40)
    assert row["better"] == sum(b[n][1] > a[n][1] for n in a) and row["p_value"] < 0.01 < row["interval"][0]
    assert run("compare", shapes, shapes) == 0
    assert "the difference may be chance" in capsys.readouterr().out


def test_one_question_more_is_no_evidence():
    """Nor are five; six are."""
    for gained, better in ((1, False), (5, False), (6, True)):
        row = compare.compared([0.0] * gained, [1.0] * gained)
        models = [{"name": name, "revision": "r", "dtype": "float32"} for name in "ab"]
        said = compare.text(
            {"models": models, "metric": "m", "differs": [], "rows": [{"name": "overall", **row}]}
        )
        assert ("B is better than A" in said) is better and ("may be chance" in said) is not better


def test_compare_refuses_other_questions_and_runs_not_at_their_end(shapes, tmp_path, capsys):
    assert run("--tasks", "shapes", "--limit", 3, "--output", tmp_path / "few") == 0
    assert run("compare", shapes, tmp_path / "few") == 2
    assert "expected two runs on the same questions, but of 40" in capsys.readouterr().err
    rows = save_rows(tmp_path / "rows.jsonl", ROWS)
    assert run("--data", rows, "--allow-text-only", "--output", tmp_path / "rows") == 0
    assert run("compare", shapes, tmp_path / "rows") == 2
    assert "expected two runs scored alike, got metric 'shapes' and 'exact_match'" in capsys.readouterr().err
    lines = (tmp_path / "few" / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few" / "samples.jsonl").write_text("".join(lines[:2]))
    assert run("compare", tmp_path / "few", shapes) == 2
    assert "expected 3 answered questions, got 2: finish the run first" in capsys.readouterr().err


def test_results_go_into_a_card_and_its_metadata(shapes, tmp_path):
    text = "---\nlicense: mit\n---\n\n# mine\n\n## Evaluation\n\nNone yet.\n\n## Use\n\nAsk it.\n"
    (tmp_path / "README.md").write_text(text)
    for _ in range(2):  # the second time changes nothing
        assert run("card", tmp_path, shapes) == 0
        card = ModelCard.load(tmp_path / "README.md")
        (index,) = card.data.eval_results
        results = results_of(shapes)
        assert index.metric_value == pytest.approx(results["score"]) and index.dataset_type == "shapes"
        assert index.metric_args["blind"] == pytest.approx(results["controls"]["blind"]["score"])
        assert card.data.license == "mit" and "None yet." not in card.text
        assert card.text.count("| **overall** |") == 1 and card.text.rstrip().endswith("Ask it.")
        assert (
            card.text.index("## Evaluation") < card.text.index("| **overall** |") < card.text.index("## Use")
        )
