"""lmms-eval's tasks, prompts and scorers over our engine: the answers and scores that we get directly.

No benchmark's data can be fetched here: the official tasks run, definition and scorer unchanged, on drawn
images in the benchmark's columns.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Image

from eval.lmms_results import MAX_NEW_TOKENS, LmmsError, check_known, cut, read_settings
from eval.metrics import find_metric
from eval.results import official_table
from eval.tasks import TRIED
from generation.decoding import GenerationOptions
from inference.answer import ask
from inference.checkpoint import RequestError, open_checkpoint
from shapes import heldout_questions, render
from tests.evaluations import run as evaluation
from tests.lmms_documents import benchmarks

HERE = importlib.util.find_spec("lmms_eval") is not None
lmms: Any = importlib.import_module("eval.lmms") if HERE else None

ROOT = Path(__file__).resolve().parent.parent
TASK_FILES = ROOT / "tests" / "fixtures" / "lmms"
NEEDS_LMMS_EVAL = pytest.mark.skipif(not HERE, reason="needs lmms-eval (requirements-eval.txt)")
DRAWN = 13


@pytest.fixture(scope="module")
def embedded():
    return open_checkpoint(ROOT / "checkpoints" / "ocelli-shapes", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def drawn() -> list[dict]:
    """Questions about drawn images, with short answers."""
    pairs = [pair for pair in heldout_questions(60, 5) if pair[1].family != "describe"][:DRAWN]
    return [
        {"image": render(scene, 256), "question": qa.question, "answer": qa.answer} for scene, qa in pairs
    ]


def stored(rows: list[dict], path: Path, split: str = "test") -> dict:
    """The rows as Parquet, and the settings of a task that takes them from there."""
    data = Dataset.from_list(rows)
    for name, value in rows[0].items():
        if hasattr(value, "size"):
            data = data.cast_column(name, Image())
    data.to_parquet(path)
    files = {split: str(path)}
    return {"dataset_path": "parquet", "dataset_name": None, "dataset_kwargs": {"data_files": files}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("lmms")


@pytest.fixture(scope="module")
def run(embedded, drawn, folder):
    """The drawn task through lmms-eval: its result, and its samples."""
    task = {"task": "ocelli_drawn"} | stored(drawn, folder / "drawn.parquet")
    results = lmms.run_lmms(
        [task], embedded, batch_size=5, output=folder, include_path=TASK_FILES, progress=False
    )
    lines = (folder / "ocelli_drawn" / "samples.jsonl").read_text().splitlines()
    assert json.loads((folder / "ocelli_drawn" / "results.json").read_text()) == results[0]
    return results[0], [json.loads(line) for line in lines]


@NEEDS_LMMS_EVAL
def test_answers_and_score_are_those_of_our_engine(run, embedded, drawn):
    result, samples = run
    options = GenerationOptions(max_new_tokens=16)
    alone = [ask(embedded, [row["image"]], row["question"], options).finish()["answers"][0] for row in drawn]
    assert [sample["answer"] for sample in samples] == [[answer] for answer in alone]
    score = find_metric("exact_match").score
    scores = [score(answer, [row["answer"]], {}) for answer, row in zip(alone, drawn, strict=True)]
    assert result["figures"] == {"exact_match": pytest.approx(sum(scores) / len(scores))}
    assert sum(scores) > 0 and result["n"] == DRAWN
    low, high = result["intervals"]["exact_match"]
    assert low <= result["figures"]["exact_match"] <= high
    assert result["task"]["generation"]["max_new_tokens"] == 16
    assert result["errors"] == {"count": 0, "samples": []} and result["samples_per_second"] > 0
    assert samples[0]["prompt"] == samples[0]["doc"]["question"]
    assert result["model"]["revision"].startswith("sha256:") and "lmms_eval" in result["versions"]


@NEEDS_LMMS_EVAL
def test_two_ranks_give_the_same(run, folder, tmp_path):
    """Of an odd number of documents, lmms-eval has one rank answer one twice; it counts once."""
    result, samples = run
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.lmms_ranks", str(folder / "drawn.parquet"), str(tmp_path)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    both = json.loads((tmp_path / "ocelli_drawn" / "results.json").read_text())
    lines = (tmp_path / "ocelli_drawn" / "samples.jsonl").read_text().splitlines()
    answers = {one["id"]: one["answer"] for one in map(json.loads, lines)}
    assert both["ranks"] == 2 and len(lines) == DRAWN
    assert answers == {sample["id"]: sample["answer"] for sample in samples}
    assert both["figures"] == {"exact_match": pytest.approx(result["figures"]["exact_match"])}
    assert both["intervals"] == result["intervals"]


@pytest.fixture(scope="module")
def official(embedded, drawn, tmp_path_factory):
    """Two documents of each official task, asked and scored: its results, and what reached the model."""
    folder, seen = tmp_path_factory.mktemp("official"), []
    tasks = [
        {"task": name} | stored([one.row, one.row], folder / f"{name}.parquet", one.split)
        for name, one in benchmarks(drawn[0]["image"]).items()
    ]
    ask_model = lmms.Ocelli._request

    def recorded(self, request, options):
        made = ask_model(self, request, options)
        seen.append((request.args[4], made))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmms.Ocelli, "_request", recorded)
        results = lmms.run_lmms(tasks, embedded, batch_size=4, output=folder, progress=False)
    return {result["task"]["name"]: result for result in results}, seen


@NEEDS_LMMS_EVAL
@pytest.mark.parametrize("name", TRIED)
def test_official_prompts_reach_the_model_unchanged_and_are_scored(official, embedded, drawn, name):
    results, seen = official
    benchmark = benchmarks(drawn[0]["image"])[name]
    requests = [request for task, request in seen if task == name]
    assert len(requests) == results[name]["n"] == 2
    for request in requests:
        text = embedded.processor.tokenizer.decode(request.input_ids, skip_special_tokens=False)
        assert benchmark.prompt in text and request.pixel_values is not None and request.options.greedy
        limit = results[name]["task"]["generation"].get("max_new_tokens", MAX_NEW_TOKENS)
        assert request.options.max_new_tokens == limit
    assert benchmark.figure in results[name]["figures"] and not results[name]["errors"]["count"]


@NEEDS_LMMS_EVAL
def test_limit_and_an_unreadable_image(embedded, drawn, tmp_path):
    """An image that does not open is an empty answer, counted and listed; the others are answered."""
    rows = [{**row} for row in drawn[:4]]
    settings = stored(rows, tmp_path / "drawn.parquet")
    table = pq.read_table(tmp_path / "drawn.parquet")
    images, column = table.column("image").to_pylist(), table.schema.field("image")
    images[1]["bytes"] = b"no picture"
    place = table.schema.get_field_index("image")
    table = table.set_column(place, column, [pa.array(images, column.type)])
    pq.write_table(table, tmp_path / "drawn.parquet")
    result = lmms.run_lmms(
        [{"task": "ocelli_drawn"} | settings],
        embedded,
        limit=3,
        output=tmp_path,
        include_path=TASK_FILES,
        progress=False,
    )[0]
    assert result["n"] == 3 and result["errors"]["count"] == 1
    error = result["errors"]["samples"][0]
    assert error["id"] == 1 and "cannot identify image" in error["error"]
    assert "1 of 3 could not be answered" in official_table(result)


@NEEDS_LMMS_EVAL
def test_a_task_without_data_is_one_sentence(embedded, tmp_path):
    task = {"task": "mmstar", "dataset_path": str(tmp_path / "nowhere")}
    with pytest.raises(LmmsError, match=r"task mmstar.*nowhere"):
        lmms.run_lmms([task], embedded, output=tmp_path)


@NEEDS_LMMS_EVAL
def test_a_slip_is_found_before_our_own_task_is_answered(tmp_path, capsys):
    arguments = ("--tasks", "shapes,mmstarr", "--limit", 2, "--output", tmp_path / "out")
    assert evaluation(*arguments) == 2
    assert "mmstarr" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "near"), [("mmstarr", "mmstar"), ("qqqq", "one such as")])
def test_unknown_tasks_have_neighbours(name, near):
    check_known(["mmstar", {"task": "pope"}], ["mmstar", "pope"])
    with pytest.raises(LmmsError, match=f"{name}.*{near}"):
        check_known([name], ["mmstar"])


@pytest.mark.parametrize(
    ("settings", "options", "until"),
    [
        ({}, {"max_new_tokens": MAX_NEW_TOKENS}, ()),
        ({"max_new_tokens": 8, "until": ["\n\n"]}, {"max_new_tokens": 8}, ("\n\n",)),
        ({"until": "END", "do_sample": False, "temperature": 0.7}, {"temperature": 0.0}, ("END",)),
        ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}, ()),
        ({"do_sample": True, "top_k": 5}, {"temperature": 1.0, "top_k": 5}, ()),
        ({"do_sample": False, "temperature": 0, "top_p": None, "num_beams": 1}, {"temperature": 0.0}, ()),
    ],
)
def test_settings_of_tasks(settings, options, until):
    got, ends = read_settings("x", settings)
    expected = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0.0} | options
    assert {name: getattr(got, name) for name in expected} == expected and ends == until


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_beams": 5}, "num_beams"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"do_sample": True, "temperature": 0}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_settings_that_are_not_supported_are_refused(settings, named):
    with pytest.raises(RequestError, match=f"task x.*{named}"):
        read_settings("x", settings)


def test_an_answer_ends_before_the_first_of_its_ends():
    assert cut("one \n\ntwo. ASSISTANT: three", ("ASSISTANT:", "\n\n")) == "one"
    assert cut("one two", ("\n\n",)) == "one two"
    assert cut("END", ("END",)) == ""
