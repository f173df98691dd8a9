"""python -m eval: answers do not depend on how they are got, none is lost or given twice, figures add up."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from data.images import load_image
from data.sources import DatasetConfig
from eval import compare, tasks
from eval.answers import BLANK, answers, by_image, share
from eval.metrics import find_metric
from eval.results import describe_model, official_table
from eval.rows import Asking, data_task
from eval.run import evaluate
from eval.statistics import calibration, score_interval
from eval.tasks import DEFAULT_MODEL, TaskError, shapes_task
from generation.options import GenerationOptions
from generation.requests import Stats
from inference.answer import ask
from inference.checkpoint import open_checkpoint
from inference.conversation import Conversation
from inference.grammar import choice_grammar
from shapes import heldout_questions
from shapes import score as shapes_score
from tests.evaluations import (
    answered,
    exits_of_ranks,
    results_of,
    run,
    samples_of,
    save_rows,
    write_rows,
)

EAGER = ("--compile", "off")
TEXT_ROWS = [{"question": "How many?", "answer": "3"}, {"question": "What colour?", "answer": "red"}]


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(DEFAULT_MODEL, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def alone(checkpoint, tmp_path_factory):
    """(folder with rows, id -> the answer that `model.generate` gives each question alone)."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [json.loads(line) for line in write_rows(folder).read_text().splitlines()]
    options = GenerationOptions(max_new_tokens=32)
    expected = {
        row["id"]: ask(checkpoint, [folder / row["image"]], row["question"], options).finish()["answers"][0]
        for row in rows
    }
    assert len(set(expected.values())) > 6  # they differ: mixing them up would show
    return folder, expected


@pytest.fixture(scope="module")
def task(alone):
    return data_task(DatasetConfig(str(alone[0] / "rows.jsonl")), find_metric("exact_match"))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """The folder of a run on plain drawings with controls."""
    output = tmp_path_factory.mktemp("eval") / "shapes"
    assert run("--tasks", "shapes,shapes", "--limit", 20, "--controls", "--output", output) == 0
    return output


def texts(folder) -> dict[str, str]:
    return {name: answer for name, (answer, _) in answered(folder).items()}


# --------------------------------------------------------------------------- the answers of each one alone
@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [None, 1], ids=["eager", "compiled and shuffled"])
def test_answers_are_those_of_each_question_alone(alone, tmp_path, shuffle):
    more = EAGER if shuffle is None else ()
    rows = write_rows(tmp_path, shuffle=shuffle)
    assert run("--data", rows, "--batch-size", 7, "--output", tmp_path / "out", *more) == 0
    assert texts(tmp_path / "out") == alone[1]


@pytest.mark.slow
def test_two_ranks_change_nothing(alone, tmp_path):
    folder, expected = alone
    arguments = ("--data", folder / "rows.jsonl", "--output", tmp_path, *EAGER, "--controls")
    assert exits_of_ranks([arguments] * 2) == [0, 0]
    results = results_of(tmp_path)
    assert texts(tmp_path) == expected and results["ranks"] == 2
    assert results["answered"] == len(expected) == len(samples_of(tmp_path, "samples-blind.jsonl"))
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
def test_a_follow_up_is_asked_as_in_a_conversation(checkpoint, task):
    """With the image before its first question; the confidence shows any other prompt."""
    earlier, options = [], GenerationOptions(max_new_tokens=32, confidence=True)
    conversation = Conversation(checkpoint, "Be brief.")
    for number, question in enumerate(("What colour is the star?", "Describe the picture.", "How many?")):
        images = [] if number else list(task.samples[0].images())
        result = conversation.send(question, images, options).finish()
        asked = replace(task.samples[0], prompt=question, earlier=tuple(earlier), system="Be brief.")
        ((_, together),) = answers(checkpoint, [asked])
        assert together.text == result["answers"][0]
        assert together.confidence == pytest.approx(result["confidences"][0], abs=1e-5)
        ((_, alone),) = answers(checkpoint, [replace(asked, earlier=())])
        assert number == 0 or abs(alone.confidence - together.confidence) > 1e-4
        earlier.append((question, together.text))


@pytest.mark.slow
def test_of_listed_choices_the_likeliest_is_the_answer(checkpoint, alone, tmp_path):
    """What `--choices` gives each question alone; where a prompt lists none, the model's own words count."""
    folder, _ = alone
    asked = [("What colour is it?", ["red", "blue", "green"], 1), ("How many?", ["1", "2"], "2")]
    rows = [
        {"image": str(folder / f"image-{image}.png"), "question": question, "choices": choices, "answer": own}
        for image in range(3)
        for question, choices, own in asked
    ]
    path = str(save_rows(tmp_path / "rows.jsonl", rows))
    config, metric = DatasetConfig(path, allow_outside=True), find_metric("multiple_choice")
    task = data_task(config, metric)
    evaluate(checkpoint, task, tmp_path / "out", batch_size=4)
    records = {record["id"]: record for record in samples_of(tmp_path / "out")}
    for number, (row, sample) in enumerate(zip(rows, task.samples, strict=True), 1):
        form = checkpoint.forms.constraint(choice_grammar(["A", "B", "C"][: len(row["choices"])]))
        expected = ask(checkpoint, [row["image"]], sample.prompt, GenerationOptions(constraint=form)).finish()
        record = records[str(number)]
        assert record["probabilities"] == pytest.approx(expected["probabilities"][0], abs=1e-5)
        assert [record["answer"]] == expected["answers"]
        assert record["score"] == (record["answer"] == "B")
        assert record["confidence"] == pytest.approx(max(record["probabilities"].values()), abs=1e-6)
    task = data_task(config, metric, Asking(prompt="{question}", limit=2))
    for number, answer in answers(checkpoint, task.samples):
        plain = ask(checkpoint, [rows[number]["image"]], rows[number]["question"], GenerationOptions())
        assert [answer.text] == plain.finish()["answers"] and answer.probabilities is None


def test_a_compiled_model_has_all_its_parameters():
    """Its weights are packed, and are no parameters of a module then."""
    opened = open_checkpoint(DEFAULT_MODEL, device="cpu", dtype="float32")
    plain = sum(parameter.numel() for parameter in opened.model.parameters())
    assert plain == describe_model(opened.compiled())["parameters"]


@pytest.mark.slow
def test_an_image_is_encoded_and_prefilled_once_for_all_its_questions(checkpoint, task):
    checkpoint.features.clear()
    stats, opened = Stats(), []
    samples = [
        replace(one, images=lambda one=one: opened.append(one.group) or one.images()) for one in task.samples
    ]
    assert len(list(answers(checkpoint, samples, 7, stats=stats))) == 16
    first = {one.group: one for one in task.samples}.values()
    tiles = [
        checkpoint.processor.images.cut(Image.open(one.images()[0]).convert("RGB")).parts for one in first
    ]
    assert len(opened) == len(tiles) == 4 and stats.tiles_encoded == sum(map(len, tiles))
    assert stats.reused > 12 * checkpoint.processor.images.tile_positions  # 12 of 16 have it for nothing


@pytest.mark.slow
def test_blanked_images_have_the_size_of_the_others(checkpoint, alone, task):
    checkpoint.features.clear()
    stats = Stats()
    blind = dict(answers(checkpoint, task.samples, 7, blank=True, stats=stats))
    assert stats.tiles_encoded == 1  # one grey tile is like another
    assert {answer.text for answer in blind.values()} != set(alone[1].values())
    for number in (0, 15):
        sample = task.samples[number]
        grey = Image.new("RGB", load_image(sample.images()[0]).size, BLANK)
        reply = ask(checkpoint, [grey], sample.question, GenerationOptions(max_new_tokens=32)).finish()
        assert blind[number].text == reply["answers"][0]


def test_shares_of_ranks_are_everything_once():
    groups = by_image(shapes_task(30).samples)
    for sizes in (groups, [list(range(25)), [25], [26, 27, 28], [29]]):
        parts = [share(sizes, rank, 4) for rank in range(4)]
        counts = [sum(map(len, part)) for part in parts]
        assert sorted(n for part in parts for group in part for n in group) == list(range(30))
        assert max(counts) - min(counts) <= 3


# ------------------------------------------------------------------------------------ killed, and resumed
@pytest.mark.slow
def test_a_killed_run_resumes_and_a_finished_run_keeps_its_speed(alone, tmp_path):
    """Killed in the middle of a line, with two ranks."""
    folder, expected = alone
    arguments = ("--data", folder / "rows.jsonl", "--output", tmp_path, *EAGER)
    assert run(*arguments) == 0
    lines = (tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_bytes(b"".join(lines[:9]) + lines[9][:30])
    (tmp_path / "samples.1.part").write_bytes(b"".join(lines[7:13]) + lines[13][:1])
    (tmp_path / "results.json").unlink()
    assert run(*arguments) == 0
    first, kept = results_of(tmp_path), (tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert texts(tmp_path) == expected and kept[:13] == lines[:13] and not list(tmp_path.glob("*.part"))
    assert first["answered"] == 3
    assert run(*arguments, "--controls") == 0
    second = results_of(tmp_path)
    assert first["samples_per_second"] == second["samples_per_second"]
    assert first["calibration"] == second["calibration"]
    assert not first["controls"] and set(second["controls"]) == {"blind", "majority"}


@pytest.mark.slow
def test_folders_of_another_run_and_other_files_are_left_alone(alone, tmp_path, capsys):
    rows = ("--data", alone[0] / "rows.jsonl", *EAGER, "--output", tmp_path / "out", "--limit", "2")
    assert run(*rows) == 0
    path = tmp_path / "out" / "samples.jsonl"
    before = path.read_bytes()
    for change in (("--prompt", "{question}!"), ("--limit", "3"), ("--dtype", "bf16")):
        assert run(*rows, *change) == 2 and path.read_bytes() == before
        assert change[0].strip("-") in capsys.readouterr().err.replace("samples", "limit")
    (tmp_path / "out" / "results.json").write_text('{"seconds":')  # cut off: written anew
    assert run(*rows) == 0 and results_of(tmp_path / "out")["n"] == 2 and path.read_bytes() == before
    path.write_text("precious\n")
    assert run(*rows) == 2
    for broken in ('{"task":', "[]"):
        (tmp_path / "out" / "run.json").write_text(broken)
        assert run(*rows) == 2 and "run.json" in capsys.readouterr().err
    (tmp_path / "out" / "run.json").unlink()
    assert run(*rows) == 2 and path.read_text() == "precious\n"


# ---------------------------------------------------------------------------------------- why answers ended
@pytest.mark.slow
def test_answers_that_were_cut_off_are_counted(checkpoint, alone, tmp_path, capsys):
    """In the table, the report, the card and the results."""
    folder, expected = alone
    (tmp_path / "README.md").write_text("# mine\n")
    limit, output = 2, tmp_path / "out"
    arguments = ("--data", folder / "rows.jsonl", "--max-new-tokens", limit, "--output", output, *EAGER)
    assert run(*arguments) == 0
    reasons = {one["id"]: one["stop_reason"] for one in samples_of(output)}
    for row in map(json.loads, (folder / "rows.jsonl").read_text().splitlines()):
        options = GenerationOptions(max_new_tokens=limit)
        alone_ = ask(checkpoint, [folder / row["image"]], row["question"], options).finish()
        assert [reasons[row["id"]]] == alone_["stop_reasons"]
    counts, out = results_of(output)["stop_reasons"], capsys.readouterr().out
    cut = list(reasons.values()).count("length")
    assert counts == dict(Counter(reasons.values())) and f"cut off: {cut} of {len(expected)}" in out
    assert cut > 0
    assert f"{cut} of {len(expected)}" in (output / "report.html").read_text()
    assert run("card", tmp_path, output) == 0
    card = ModelCard.load(tmp_path / "README.md")
    assert f"cut off: {cut} of {len(expected)}" in card.text
    assert card.data.eval_results[0].metric_args["cut_off"] == cut


@pytest.mark.slow
def test_each_of_several_answers_says_why_it_ended(alone, tmp_path):
    several = ("--samples", 3, "--temperature", 1.0, "--max-new-tokens", 2, "--limit", 4)
    assert run("--data", alone[0] / "rows.jsonl", "--output", tmp_path, *several, *EAGER) == 0
    reasons = [one["stop_reason"] for one in samples_of(tmp_path)]
    assert all(len(each) == 3 and {*each} <= {"stop", "length"} for each in reasons)
    assert sum(results_of(tmp_path)["stop_reasons"].values()) == 12


# ----------------------------------------------------------------------------------- what cannot be answered
@pytest.mark.slow
def test_images_that_do_not_open_score_0_are_listed_and_tried_again(alone, tmp_path, capsys):
    expected = alone[1]
    rows = [json.loads(line) for line in write_rows(tmp_path).read_text().splitlines()]
    rows[0]["image"] = "bad.png"
    (tmp_path / "bad.png").write_bytes(b"no image")
    (tmp_path / "image-1.png").rename(tmp_path / "away.png")
    path, output = save_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    arguments = ("--data", path, "--output", output, *EAGER)
    assert run(*arguments, "--controls") == 0
    found, results = answered(output), results_of(output)
    wrong = {"0-0", *(name for name in expected if name.startswith("1-"))}
    assert {name for name in expected if found[name] == ("", 0.0)} == wrong
    assert all(found[name][0] == expected[name] for name in expected.keys() - wrong)
    assert results["errors"]["count"] == len(wrong) == 5 and results["n"] == 16
    assert {one["id"] for one in results["errors"]["samples"]} == wrong
    assert "bad.png" in capsys.readouterr().out
    (tmp_path / "away.png").rename(tmp_path / "image-1.png")
    assert run(*arguments) == 0
    assert results_of(output)["errors"]["count"] == 1 and results_of(output)["answered"] == 5
    assert answered(output)["1-2"][0] == expected["1-2"]


@pytest.mark.slow
def test_a_prompt_too_long_for_the_context_scores_0(checkpoint, tmp_path):
    task = shapes_task(2)
    task = replace(task, samples=[replace(task.samples[0], prompt="circle " * 3000), task.samples[1]])
    (error,) = evaluate(checkpoint, task, tmp_path / "out")["errors"]["samples"]
    assert error["id"] == "0" and "context" in error["error"]


def test_too_many_answers_at_a_time_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("generation.memory.available_bytes", lambda device: 10)
    assert run("--tasks", "shapes", "--limit", "2", "--output", tmp_path / "out", *EAGER) == 2
    assert "--batch-size" in capsys.readouterr().err


def test_what_draws_the_drawings_may_not_be_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "recipes.world.heldout", None)
    monkeypatch.delitem(sys.modules, "recipes.world.evaluation", raising=False)
    assert run("--tasks", "drawings", "--limit", "2", "--output", tmp_path / "out", *EAGER) == 2
    assert "recipes/world/requirements.txt" in capsys.readouterr().err


def test_samples_that_cannot_be_scored_are_found_before_any_work():
    with pytest.raises(TaskError, match="question 0"):
        replace(shapes_task(3), metric=find_metric("multiple_choice")).check()


# ----------------------------------------------------------------------------------------------- figures
@pytest.mark.slow
def test_the_shapes_world_with_its_controls(shapes):
    results, pairs, found = results_of(shapes), heldout_questions(20), answered(shapes)
    scores = [shapes_score(qa, qa.answer, found[str(n)][0]) for n, (_, qa) in enumerate(pairs)]
    assert [found[str(n)][1] for n in range(20)] == scores
    kinds = {qa.family for _, qa in pairs}
    common = {kind: statistics.mode(qa.answer for _, qa in pairs if qa.family == kind) for kind in kinds}
    majority = [shapes_score(qa, qa.answer, common[qa.family]) for _, qa in pairs]
    assert results["majority_answers"] == common
    families = [qa.family for _, qa in pairs]
    assert [row["name"] for row in results["families"]] == [*dict.fromkeys(families), "overall"]
    for row in results["families"]:
        own = [n for n in range(20) if row["name"] in (families[n], "overall")]
        assert row["n"] == len(own) and row["score"] == pytest.approx(sum(scores[n] for n in own) / len(own))
        assert row["interval"] == list(score_interval([scores[n] for n in own]))
        assert row["majority"] == pytest.approx(sum(majority[n] for n in own) / len(own))
    assert all(results[key] == row[key] for key in ("n", "score", "interval"))
    assert {name: one["score"] for name, one in results["controls"].items()} == {
        name: row[name] for name in ("majority", "blind")
    }
    # The embedded model knows this world by looking at it.
    assert row["score"] > 0.8 and row["blind"] < 0.5
    assert results["model"]["revision"].startswith("sha256:") and results["task"]["scoring"]
    assert {"torch", "transformers", "python"} <= results["versions"].keys()
    assert results["samples_per_second"] == 20 / results["seconds"]
    given = samples_of(shapes)
    sure, scored = ([one[key] for one in given] for key in ("confidence", "score"))
    assert results["calibration"]["ece"] == pytest.approx(calibration(sure, scored)["ece"])


def test_a_run_prints_its_prompt_its_metric_and_a_table(tmp_path, capsys):
    rows = save_rows(tmp_path / "rows.jsonl", TEXT_ROWS)
    options = ("--allow-text-only", "--prompt", "{question}\\nBriefly.", "--metric-option", "strip=false")
    assert run("--data", rows, "--output", tmp_path / "out", *options, *EAGER) == 0
    out = capsys.readouterr().out
    assert r"'{question}\nBriefly.'" in out and "| **overall** |" in out
    assert find_metric("exact_match", strip=False).description in out
    assert samples_of(tmp_path / "out")[0]["prompt"].endswith("\nBriefly.")


# ---------------------------------------------------------------------------------------------- mistakes
DATA = ("--data", "x")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--tasks", "shapes,docvqa"), "docvqa_val"),
        (("--tasks", "mmstar,pope"), "requirements-eval.txt"),
        (("--tasks", "shapes", "--prompt", "x", "--allow-urls"), "--prompt, --allow-urls"),
        ((), "--tasks or --data"),
        ((*DATA, "--seed", "0"), "--seed"),
        ((*DATA, "--columns", "question"), "--columns"),
        ((*DATA, "--metric-option", "years"), "--metric-option"),
        ((*DATA, "--metric", "relaxed_accuracy", "--metric-option", "years_exact=False"), "years_exact"),
        (("--tasks", "shapes,mmstar", "--controls"), "--controls"),
        (("--tasks", "mmstar", "--seed", "1"), "--seed"),
    ],
)
def test_mistakes_end_in_one_sentence(capsys, monkeypatch, arguments, named):
    here = named == "--controls"  # and no more of lmms-eval than that it is here
    monkeypatch.setattr(tasks, "find_spec", lambda name: here or None)
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert named in err and err.count("\n") == 1 and not out


@pytest.mark.slow
def test_the_rank_that_fails_says_why(tmp_path, capfd):
    rank = ("--tasks", "shapes", "--limit", 4, *EAGER, "--output", tmp_path / "out")
    assert exits_of_ranks([rank, (*rank, "--model", "./nowhere")]) == [2, 2]
    err = capfd.readouterr().err
    assert "rank 1 of 2" in err and "./nowhere" in err and "rank 0 of 2" in err and "Traceback" not in err


# -------------------------------------------------------------------------------------- compare and card
@pytest.mark.slow
def test_compare_pairs_the_questions(shapes, model_folder, tmp_path, capsys):
    other, few = tmp_path / "other", tmp_path / "few"
    for output, limit in ((other, 20), (few, 3)):
        assert (
            run("--tasks", "shapes", "--limit", limit, "--model", model_folder, "--output", output, *EAGER)
            == 0
        )
    assert results_of(other)["model"]["revision"] != results_of(shapes)["model"]["revision"]
    capsys.readouterr()
    assert run("compare", other, shapes, "--json") == 0
    row = json.loads(capsys.readouterr().out)["rows"][-1]
    a, b = answered(other), answered(shapes)
    assert row["difference"] == pytest.approx(sum(b[n][1] - a[n][1] for n in a) / 20)
    assert row["better"] == sum(b[n][1] > a[n][1] for n in a) and row["p_value"] < 0.01 < row["interval"][0]
    assert run("compare", few, shapes) == 2 and "the same questions" in capsys.readouterr().err
    (few / "samples.jsonl").write_text("")
    assert run("compare", few, shapes) == 2 and "finish the run" in capsys.readouterr().err


@pytest.mark.parametrize(("gained", "better"), [(5, False), (6, True)])
def test_few_questions_more_are_no_evidence(gained, better):
    models = [{"name": name, "revision": "r", "dtype": "float32"} for name in "ab"]
    row = {"name": "overall", **compare.paired_row([0.0] * gained, [1.0] * gained)}
    text = compare.text({"models": models, "metric": "m", "differs": [], "rows": [row]})
    assert ("B is better than A" in text) is better and ("may be chance" in text) is not better


@pytest.mark.slow
def test_results_go_into_a_card_and_its_metadata(shapes, tmp_path):
    text = "---\nlicense: mit\n---\n\n# mine\n\n## Evaluation\n\nNone yet.\n\n## Use\n\nAsk it.\n"
    (tmp_path / "README.md").write_text(text)
    results = results_of(shapes)
    for _ in range(2):  # the second time changes nothing
        assert run("card", tmp_path, shapes) == 0
        card = ModelCard.load(tmp_path / "README.md")
        (index,) = card.data.eval_results
        assert index.metric_value == pytest.approx(results["score"]) and index.dataset_type == "shapes"
        assert index.metric_args["calibration_error"] == pytest.approx(
            results["calibration"]["ece"], abs=1e-6
        )
        assert f"{results['calibration']['ece']:.1%}" in card.text
        assert index.metric_args["blind"] == pytest.approx(results["controls"]["blind"]["score"])
        assert card.data.license == "mit" and "None yet." not in card.text
        assert card.text.count("| **overall** |") == 1 and card.text.rstrip().endswith("Ask it.")
        places = [card.text.index(part) for part in ("## Evaluation", "| **overall** |", "## Use")]
        assert places == sorted(places)


def test_figures_of_official_tasks_go_into_the_card_too(tmp_path):
    values = {"accuracy": 0.5, "f1": 0.25}
    results = {"task": {"name": "pope", "harness": "lmms-eval 0.7.3"}, "figures": values, "n": 100}
    results |= {"intervals": {"accuracy": [0.4, 0.6]}, "errors": {"count": 0, "samples": []}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n\n# mine\n")
    assert run("card", tmp_path, tmp_path / "results.json") == 0
    card = ModelCard.load(tmp_path / "README.md")
    assert {one.metric_type: one.metric_value for one in card.data.eval_results} == values
    assert official_table(results) in card.text
