"""generate.py batch: every line answered as alone, bad lines reported, a second run resumes."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from data.images import load_image
from generation import sampling
from generation.sampling import draw
from models.vision_language_model import VisionLanguageModel
from tests.processors import draw_image

ALONE = ("answers", "token_ids", "stop_reasons", "prompt_tokens", "image_tokens")


@pytest.fixture
def questions(tmp_path) -> list[dict]:
    """Uneven lines: no image, one, two; short and long questions; limits of their own."""
    folder = tmp_path / "images"
    folder.mkdir()
    for name, size in (("wide", (90, 30)), ("small", (20, 20)), ("tall", (30, 70))):
        draw_image(*size, seed=len(name)).save(folder / f"{name}.png")
    return [
        {"image": "images/wide.png", "question": "how many circles are there?", "id": "a"},
        {"question": "what is it?", "expected": "two"},
        {"images": ["images/small.png", "images/tall.png"], "question": "what differs?", "max_new_tokens": 3},
        {"image": str(folder / "tall.png"), "question": "what colour is the big triangle on the left? " * 3},
        {"image": "images/small.png", "question": "how many?", "system": "be short", "max_new_tokens": 14},
    ]


def write(path: Path, lines: list) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def batch(cli, tmp_path):
    """Run a batch over tmp_path/questions.jsonl into tmp_path/out.jsonl: stderr."""

    def run(*arguments, status=0, **options) -> str:
        paths = ("batch", tmp_path / "questions.jsonl", "--out", tmp_path / "out.jsonl")
        got, out, err = cli(*paths, "--max-new-tokens", 9, *arguments, **options)
        assert (got, out) == (status, ""), err
        return err

    return run


@pytest.mark.parametrize("sampling", [(), ("--temperature", 1.3, "--seed", 4, "--num-answers", 2)])
def test_every_line_as_alone(batch, as_json, questions, tmp_path, sampling):
    write(tmp_path / "questions.jsonl", questions)
    err = batch("--dtype", "float32", "--batch-size", 3, *sampling)
    assert "5 answered, 0 failed, 0 skipped" in err and "3 slots" in err
    results = read(tmp_path / "out.jsonl")
    assert [record["line"] for record in results] == [1, 2, 3, 4, 5]
    assert results[0]["id"] == "a" and "id" not in results[1] and results[1]["other"] == {"expected": "two"}
    for line, record in zip(questions, results, strict=True):
        images = line.get("images", [line["image"]] if "image" in line else [])
        alone = ["-q", line["question"], "--max-new-tokens", line.get("max_new_tokens", 9)]
        alone += [tmp_path / image for image in images] or ["--no-image"]
        alone += ["--system", line["system"]] if "system" in line else []
        (single,) = as_json(*alone, "--dtype", "float32", *sampling)
        assert {key: record[key] for key in ALONE} == {key: single[key] for key in ALONE}
        assert record["images"] == images and record["question"] == line["question"]


def test_bad_lines_are_reported_and_the_others_answered(batch, questions, tmp_path):
    bad = {
        2: ('{"question": "half', "JSON"),
        3: ('["a", "list"]', "JSON object"),
        4: ({"image": "images/absent.png", "question": "what?", "id": 7}, "absent.png"),
        5: ({"image": "images/wide.png"}, "question"),
        6: ({"image": "images/wide.png", "question": " "}, "question"),
        7: ({"image": 3, "question": "what?"}, "image"),
        8: ({"image": "a.png", "images": ["b.png"], "question": "what?"}, "both"),
        9: ({"question": "what?", "max_new_tokens": "many"}, "max_new_tokens"),
        10: ({"question": "what?", "max_new_tokens": 5000}, "context"),
        11: ({"image": "~nobody-of-this-name/a.png", "question": "what?"}, "nobody"),
        12: ({"question": "half a pair: \ud800", "id": "\ud800"}, "Unicode"),
    }
    write(tmp_path / "questions.jsonl", [questions[0], *(line for line, _ in bad.values()), questions[1]])
    assert "2 answered, 11 failed, 0 skipped" in batch(status=1)
    results = read(tmp_path / "out.jsonl")
    assert [record["line"] for record in results] == list(range(1, 14))
    assert results[0]["answers"] and results[12]["answers"] and results[3]["id"] == 7
    for number, (_, field) in bad.items():
        assert field in results[number - 1]["error"] and "\n" not in results[number - 1]["error"]
    # A line that is mended is answered by the next run.
    draw_image(30, 30).save(tmp_path / "images" / "absent.png")
    assert "1 answered, 10 failed, 2 skipped" in batch(status=1)
    assert read(tmp_path / "out.jsonl")[3]["answers"]


def test_a_second_run_resumes(batch, questions, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    write(tmp_path / "questions.jsonl", questions)
    batch("--batch-size", 2)
    whole = out.read_text().splitlines(keepends=True)
    half, reordered = "".join(whole[:2]) + whole[2][:40], "".join(reversed(whole[:3])) + '{"line": 4, "err'
    for left, answered in ((half, 2), ("".join(whole[:3])[:-1], 3), (reordered, 3)):
        out.write_text(left)
        assert f"{5 - answered} answered, 0 failed, {answered} skipped" in batch("--batch-size", 2)
        assert out.read_text().splitlines(keepends=True) == whole
    # With nothing left to do, no model is loaded.
    monkeypatch.setattr(VisionLanguageModel, "from_pretrained", None)
    assert "0 answered, 0 failed, 5 skipped" in batch()


def test_an_interrupted_run_keeps_what_it_has(batch, questions, tmp_path, monkeypatch):
    write(tmp_path / "questions.jsonl", questions)
    calls = []

    def interrupted(rows, logits):
        calls.append(1)
        if len(calls) == 15:
            raise KeyboardInterrupt
        return draw(rows, logits)

    monkeypatch.setattr(sampling, "draw", interrupted)
    assert "interrupted" in batch("--batch-size", 2, status=130)
    done = len(read(tmp_path / "out.jsonl"))
    assert 1 <= done <= 4
    assert f"{5 - done} answered, 0 failed, {done} skipped" in batch("--batch-size", 2)


def test_an_image_is_opened_and_encoded_once_wherever_lines_stand(batch, questions, tmp_path, monkeypatch):
    images = ["images/wide.png", "images/tall.png", None] * 3
    lines = [
        {"question": f"how many {'big ' * place}circles?"} | ({"image": image} if image else {})
        for place, image in enumerate(images)
    ]
    tiles, encode, opened = [], VisionLanguageModel.encode_images, []

    def noted(source, *limits):
        opened.append(source)
        return load_image(source, *limits)

    monkeypatch.setattr("data.visuals.load_image", noted)

    def counted(self, pixels):
        tiles.append(len(pixels))
        return encode(self, pixels)

    monkeypatch.setattr(VisionLanguageModel, "encode_images", counted)
    counts = []
    for number, size in ((2, 8), (9, 1), (9, 3)):
        write(tmp_path / "questions.jsonl", lines[:number])
        assert f"{number} answered" in batch("--batch-size", size)
        (tmp_path / "out.jsonl").unlink()
        counts.append(sum(tiles))
        assert len(opened) == len(set(opened)) == 2
        tiles.clear()
        opened.clear()
    assert counts[0] == counts[1] == counts[2] > 0


def test_one_answer_that_fails_fails_its_line_alone(batch, questions, tmp_path, monkeypatch):
    def poisoned(rows, logits):
        for row, own in zip(rows, logits):
            if len(row.tokens) == 2 and row.options.max_new_tokens == 14 and row.options.seed == 5:
                own.fill_(float("nan"))
        return draw(rows, logits)

    monkeypatch.setattr(sampling, "draw", poisoned)
    write(tmp_path / "questions.jsonl", questions)
    assert "4 answered, 1 failed" in batch("--temperature", 1.0, "--seed", 4, "--num-answers", 2, status=1)
    results = read(tmp_path / "out.jsonl")
    assert "not finite" in results[4]["error"] and all(len(one["answers"]) == 2 for one in results[:4])


def test_odd_files(batch, complaint, tmp_path):
    """A byte order mark, blank lines, and lines that only fit the context apart from one another."""
    long = {"question": "how many circles are there " * 30, "max_new_tokens": 2}
    text = "\n" + json.dumps(long) + "\n\n" + json.dumps({"question": "how many?", "max_new_tokens": 400})
    (tmp_path / "questions.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert "2 answered" in batch()
    assert [record["line"] for record in read(tmp_path / "out.jsonl")] == [2, 4]
    paths = ("batch", tmp_path / "questions.jsonl", "--out", tmp_path / "other.jsonl")
    assert "bytes of cache" in complaint(*paths, "--batch-size", 10**12)
    assert "--no-cache" in complaint(*paths, "--no-cache")


def test_bad_files(complaint, tmp_path):
    questions, out = write(tmp_path / "questions.jsonl", [{"question": "what?"}]), tmp_path / "out.jsonl"
    absent = tmp_path / "absent" / "x.jsonl"
    for bad in ((questions, absent), (absent, out), (questions, tmp_path), (questions, questions)):
        assert str(bad[0] if bad[0] == absent else bad[1]) in complaint("batch", bad[0], "--out", bad[1])
    assert "/dev/null" in complaint("batch", "/dev/null", "--out", out)
    assert not out.exists() and questions.read_text() == '{"question": "what?"}\n'
    with socket.socket(socket.AF_UNIX) as device:  # /dev/null would be replaced by a file of results
        device.bind(str(out))
        assert "expected a file" in complaint("batch", questions, "--out", out) and out.is_socket()


def test_results_of_something_else_are_left_alone(batch, questions, tmp_path, single_folder):
    """Other questions, another model, other options, or no results at all."""
    out, whole = tmp_path / "out.jsonl", ("--temperature", 1, "--seed", 4)
    write(tmp_path / "questions.jsonl", questions)
    batch(*whole)
    results = read(out)
    assert results[0]["options"]["seed"] == 4 and results[0]["options"]["max_new_tokens"] == 9
    assert results[2]["options"]["max_new_tokens"] == 3 and results[4]["options"]["system"] == "be short"
    kept = out.read_text()
    for changed in (("--temperature", 1, "--seed", 5), (*whole, "--top-p", 0.5), (*whole, "--system", 2)):
        assert "other options" in batch(*changed, status=2)
    assert "another model" in batch(*whole, status=2, model=single_folder)
    assert "0 answered, 0 failed, 5 skipped" in batch(*whole)
    for other in (questions[0] | {"question": "why?"}, questions[0] | {"max_new_tokens": 15}):
        write(tmp_path / "questions.jsonl", [other, *questions[1:]])
        assert "line 1" in batch(*whole, status=2)
    assert out.read_text() == kept
    out.write_text("shopping list")
    assert "earlier run" in batch(status=2) and out.read_text() == "shopping list"
