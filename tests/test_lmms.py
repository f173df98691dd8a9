"""lmms-eval's tasks, prompts and scorers over our engine: the answers and scores that we get directly.

    torchrun --nproc-per-node 2 -m tests.test_lmms drawn.parquet FOLDER    # the drawn task on some ranks

No benchmark's data can be fetched here: the official tasks run, definition and scorer unchanged, on drawn
images in the benchmark's columns.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Image

from eval.lmms_tasks import (
    MAX_NEW_TOKENS,
    LmmsError,
    check_known,
    cut,
    read_settings,
    task_result,
    write_result,
)
from eval.metrics import find_metric
from eval.results import official_table
from eval.tasks import DEFAULT_MODEL, TRIED
from generation.options import GenerationOptions
from inference.answer import ask
from inference.checkpoint import RequestError, open_checkpoint, pick_device
from shapes import heldout_questions, render
from tests import lfm2_checkpoints, qwen_checkpoints
from tests.clips import noise, write_clip
from tests.evaluations import results_of, samples_of
from tests.evaluations import run as evaluation
from training.distributed import Ranks

HERE = importlib.util.find_spec("lmms_eval") is not None
lmms: Any = importlib.import_module("eval.lmms") if HERE else None

ROOT = Path(__file__).resolve().parent.parent
TASK_FILES = ROOT / "tests" / "fixtures" / "lmms"
NEEDS_LMMS_EVAL = pytest.mark.skipif(not HERE, reason="needs lmms-eval (requirements-eval.txt)")
DRAWN = 13
# Prompts are written out as they are to reach a model: they have been worth more than a model's size.
LETTER = "\nAnswer with the option's letter from the given choices directly"
SHORT = "\nAnswer the question using a single word or phrase."
ASKED = "What colour is the sky?"
CHOICES = ["red", "blue"]
LISTED = "\nA. red\nB. blue"


class Benchmark(NamedTuple):
    """One document of a task, its prompt, and the figure that it is known by."""

    split: str
    row: dict[str, Any]
    prompt: str
    figure: str


def benchmarks(image) -> dict[str, Benchmark]:
    """By lmms-eval's names."""
    asked = {"image": image, "question": ASKED}
    read = {**asked, "answers": ["blue"] * 10, "questionId": "7", "question_id": 7, "ocr_tokens": ["x"]}
    yes_no = {"image": image, "question_id": "7", "question": "Is it red?", "answer": "Yes"}
    return {
        "mmstar": Benchmark(
            "val",
            {**asked, "index": 0, "answer": "B", "category": "math", "l2_category": "geometry"},
            ASKED + LETTER,
            "average",
        ),
        "mmmu_val": Benchmark(
            "validation",
            {"id": "validation_Art_1", "question": "<image 1> What is it?", "options": "['red', 'blue']"}
            | {"answer": "B", "question_type": "multiple-choice", "image_1": image},
            f"What is it?{LISTED}\n{LETTER}.",
            "mmmu_acc",
        ),
        "ai2d": Benchmark(
            "test",
            {**asked, "options": CHOICES, "answer": "1"},
            f"{ASKED}{LISTED}{LETTER}.",
            "exact_match,flexible-extract",
        ),
        "scienceqa_img": Benchmark(
            "test",
            {**asked, "hint": "Look up.", "choices": CHOICES, "answer": 1},
            f"Context: Look up.\n{ASKED}{LISTED}{LETTER}.",
            "exact_match",
        ),
        "textvqa_val": Benchmark("validation", read, ASKED + SHORT, "exact_match"),
        "docvqa_val": Benchmark("validation", read, ASKED + SHORT, "anls"),
        "infovqa_val": Benchmark("validation", read, ASKED + SHORT, "anls"),
        "chartqa": Benchmark(
            "test",
            {**asked, "answer": "12", "type": "human_test"},
            f"{ASKED}\nAnswer the question with a single word.",
            "relaxed_overall",
        ),
        "ocrbench": Benchmark(
            "test",
            {**asked, "dataset": "x", "question_type": "Doc-oriented VQA", "answer": ["blue"]},
            ASKED,
            "ocrbench_accuracy",
        ),
        "mme": Benchmark(
            "test", {**yes_no, "category": "color"}, f"Is it red?{SHORT}", "mme_perception_score"
        ),
        "pope": Benchmark("test", yes_no, f"Is it red?{SHORT}", "pope_accuracy"),
    }


def embedded_model():
    return open_checkpoint(DEFAULT_MODEL, device="cpu", dtype="float32")


def run_drawn(
    parquet: Path, checkpoint, folder: Path, limit: int | None = None, name: str = "ocelli_drawn"
) -> list[dict]:
    """A task of ours through lmms-eval: its results, on the first rank."""
    task = {"task": name} | source(parquet, "test")
    return lmms.run_lmms([task], checkpoint, limit, 5, folder, TASK_FILES)


def source(parquet: Path, split: str) -> dict:
    """The settings of a task that takes its documents from a file."""
    files = {split: str(parquet)}
    return {"dataset_path": "parquet", "dataset_name": None, "dataset_kwargs": {"data_files": files}}


def store(rows: list[dict], path: Path) -> Path:
    data = Dataset.from_list(rows)
    for name, value in rows[0].items():
        if hasattr(value, "size"):
            data = data.cast_column(name, Image())
    data.to_parquet(path)
    return path


@pytest.fixture(scope="module")
def embedded():
    return embedded_model()


@pytest.fixture(scope="module")
def drawn() -> list[dict]:
    """Questions about drawn images, with short answers."""
    pairs = [pair for pair in heldout_questions(60, 5) if pair[1].family != "describe"][:DRAWN]
    return [
        {"image": render(scene, 256), "question": qa.question, "answer": qa.answer} for scene, qa in pairs
    ]


@pytest.fixture(scope="module")
def run(embedded, drawn, tmp_path_factory):
    """The drawn task through lmms-eval: its data, its result and its samples."""
    folder = tmp_path_factory.mktemp("lmms")
    parquet = store(drawn, folder / "drawn.parquet")
    (result,) = run_drawn(parquet, embedded, folder)
    assert results_of(folder / "ocelli_drawn") == result
    return parquet, result, samples_of(folder / "ocelli_drawn")


@NEEDS_LMMS_EVAL
def test_answers_and_score_are_those_of_our_engine(run, embedded, drawn):
    _, result, samples = run
    options = GenerationOptions(max_new_tokens=16)
    alone = [ask(embedded, [row["image"]], row["question"], options).finish()["answers"][0] for row in drawn]
    assert [sample["answer"] for sample in samples] == [[answer] for answer in alone]
    score = find_metric("exact_match").score
    scores = [score(answer, [row["answer"]], {}) for answer, row in zip(alone, drawn, strict=True)]
    assert result["figures"] == {"exact_match": pytest.approx(sum(scores) / len(scores))}
    assert sum(scores) > 0 and result["n"] == DRAWN
    assert sum(result["stop_reasons"].values()) == result["n"] and not result["thinking_stop_reasons"]
    low, high = result["intervals"]["exact_match"]
    assert low <= result["figures"]["exact_match"] <= high
    assert result["task"]["generation"]["max_new_tokens"] == 16
    assert result["errors"] == {"count": 0, "samples": []} and result["samples_per_second"] > 0
    assert samples[0]["prompt"] == samples[0]["doc"]["question"]
    assert result["model"]["revision"].startswith("sha256:") and "lmms_eval" in result["versions"]


@NEEDS_LMMS_EVAL
def test_two_ranks_give_the_same(run, tmp_path):
    """Of an odd number of documents, lmms-eval has one rank answer one twice; it counts once."""
    parquet, result, samples = run
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.test_lmms", str(parquet), str(tmp_path)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    both, lines = results_of(tmp_path / "ocelli_drawn"), samples_of(tmp_path / "ocelli_drawn")
    assert both["ranks"] == 2 and len(lines) == DRAWN
    assert {one["id"]: one["answer"] for one in lines} == {one["id"]: one["answer"] for one in samples}
    assert both["figures"] == {"exact_match": pytest.approx(result["figures"]["exact_match"])}
    assert both["intervals"] == result["intervals"]


@pytest.fixture(scope="module")
def official(embedded, drawn, tmp_path_factory):
    """Two documents of each official task, asked and scored: its results, and what reached the model."""
    folder, seen = tmp_path_factory.mktemp("official"), []
    tasks = [
        {"task": name} | source(store([one.row, one.row], folder / f"{name}.parquet"), one.split)
        for name, one in benchmarks(drawn[0]["image"]).items()
    ]
    ask_model = lmms.Ocelli._request

    def recorded(self, request, options):
        made = ask_model(self, request, options)
        seen.append((request.args[4], made))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmms.Ocelli, "_request", recorded)
        results = lmms.run_lmms(tasks, embedded, None, 4, folder)
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
    path = store(drawn[:4], tmp_path / "drawn.parquet")
    table = pq.read_table(path)
    place = table.schema.get_field_index("image")
    images, field = table.column("image").to_pylist(), table.schema.field("image")
    images[1]["bytes"] = b"no picture"
    pq.write_table(table.set_column(place, field, [pa.array(images, field.type)]), path)
    (result,) = run_drawn(path, embedded, tmp_path, limit=3)
    assert result["n"] == 3 and result["errors"]["count"] == 1
    error = result["errors"]["samples"][0]
    assert error["id"] == 1 and "cannot identify image" in error["error"]
    assert "1 of 3 could not be answered" in official_table(result)


@NEEDS_LMMS_EVAL
def test_a_task_of_likelihoods_is_refused(embedded, drawn, tmp_path):
    parquet = store([{**drawn[0], "choices": CHOICES, "answer": 0}], tmp_path / "rows.parquet")
    with pytest.raises(LmmsError, match=r"ocelli_choices.*likelihoods"):
        run_drawn(parquet, embedded, tmp_path, name="ocelli_choices")


@NEEDS_LMMS_EVAL
@pytest.mark.parametrize("kind", ["qwen3_vl", "lfm2_vl"])
def test_videos_are_asked_about_as_everywhere(kind, tmp_path):
    """A family that takes videos, and one that is shown frames as images."""
    pytest.importorskip("av")
    save = qwen_checkpoints.save_hf if kind == "qwen3_vl" else lfm2_checkpoints.save_hf
    save(*((kind,) if kind == "qwen3_vl" else ()), tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model", device="cpu")
    paths = [str(write_clip(tmp_path / f"{one}.mp4", noise(9, 64, 48, one), 4)) for one in range(2)]
    rows = [{"clip": paths[one // 2], "question": f"how many {one}", "answer": "two"} for one in range(4)]
    rows.append(rows[0] | {"clip": str(tmp_path / "none.mp4")})
    (result,) = run_drawn(store(rows, tmp_path / "rows.parquet"), checkpoint, tmp_path)
    assert result["errors"]["count"] == 1 and result["n"] == 5
    options = GenerationOptions(max_new_tokens=16)
    for row, sample in zip(rows[:4], samples_of(tmp_path / "ocelli_drawn")):
        alone = ask(checkpoint, checkpoint.processor.visuals(row["clip"]), row["question"], options).finish()
        assert sample["answer"] == alone["answers"]
    part = {"type": "video", "url": paths[0], "start_time": 0.5}
    with pytest.raises(RequestError):  # a part of a video is not asked about as if it were the whole
        lmms.Ocelli(checkpoint, 1)._encoded([{"role": "user", "content": [part]}], "task", 0)


@NEEDS_LMMS_EVAL
def test_a_task_without_data_and_a_slip_are_one_sentence(embedded, tmp_path, capsys):
    task = {"task": "mmstar", "dataset_path": str(tmp_path / "nowhere")}
    with pytest.raises(LmmsError, match=r"mmstar.*nowhere"):
        lmms.run_lmms([task], embedded, None, 4, tmp_path)
    assert evaluation("--tasks", "shapes,mmstarr", "--limit", 2, "--output", tmp_path / "out") == 2
    assert "mmstarr" in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "it is found before our own task is answered"


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
        *(({"until": until}, {}, ()) for until in ("", [""], [], ["", None])),
        ({"until": ["", "END"]}, {}, ("END",)),
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


if __name__ == "__main__":
    ranks = Ranks(pick_device("cpu"))
    run_drawn(Path(sys.argv[1]), embedded_model(), Path(sys.argv[2]))
    ranks.close()


def test_results_say_why_answers_ended(embedded, tmp_path, monkeypatch):
    """Of several answers to a document the one that was cut off; of some nothing is known."""
    for module in ("lmms_tasks", "results"):
        monkeypatch.setattr(f"eval.{module}.version", str)
    sample = {"arguments": ["?"], "target": "x", "resps": ["x"], "filtered_resps": ["x"], "doc": {}}
    report = {"results": {"t": {}}, "versions": {}, "configs": {"t": {}}}
    ended = [("t", 0, "stop", ""), ("t", 0, "length", ""), ("t", 1, "stop", "length"), ("t", 2, "error", "")]
    ended += [("t", 3, "stop", "stop"), ("other", 1, "length", "length")]
    for known in (ended, []):
        samples = [sample | {"doc_id": number} for number in range(4)]
        result = task_result("t", report | {"samples": {"t": samples}}, [], embedded, known)
        write_result(tmp_path, result, samples)
        reasons = [one.get("stop_reason") for one in samples_of(tmp_path)]
        assert reasons == (["length", "stop", "error", "stop"] if known else [None] * 4)
        assert result["stop_reasons"] == ({"length": 1, "stop": 2, "error": 1} if known else {})
        assert result["thinking_stop_reasons"] == ({"length": 1, "stop": 1} if known else {})
        said = "cut off: 1 of 4; thinking ended by force: 1 of 2"
        assert (said in official_table(result)) == bool(known)
