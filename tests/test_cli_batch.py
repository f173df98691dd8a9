"""generate.py --batch: every line answered as alone, bad lines reported, a second run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from generation import scheduler
from generation.row_sampling import sample_rows
from models.language_model import LanguageModel
from models.vision_language_model import VisionLanguageModel
from tests.processors import draw_image

ALONE = ("answers", "token_ids", "stop_reasons", "prompt_tokens", "image_tokens")


@pytest.fixture
def questions(tmp_path) -> list[dict]:
    """Uneven lines: no image, one, two; short and long questions; limits of their own."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, size in (("wide", (90, 30)), ("small", (20, 20)), ("tall", (30, 70))):
        draw_image(*size, seed=len(name)).save(folder / f"{name}.png")
    return [
        {"image": "pictures/wide.png", "question": "how many circles are there?", "id": "a"},
        {"question": "what is it?"},
        {
            "images": ["pictures/small.png", "pictures/tall.png"],
            "question": "what differs?",
            "max_new_tokens": 3,
        },
        {"image": str(folder / "tall.png"), "question": "what colour is the big triangle on the left? " * 3},
        {"image": "pictures/small.png", "question": "how many?", "system": "be short", "max_new_tokens": 14},
    ]


def write(path: Path, lines: list) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> list[dict]:
    """The results in the order of their lines."""
    text = path.read_text()
    assert text.endswith("\n")
    return sorted((json.loads(line) for line in text.splitlines()), key=lambda record: record["line"])


@pytest.fixture
def batch(cli, tmp_path):
    """Run a batch over tmp_path/questions.jsonl into tmp_path/out.jsonl: stderr."""

    def run(*arguments, status=0, **options) -> str:
        paths = ("--batch", tmp_path / "questions.jsonl", "--out", tmp_path / "out.jsonl")
        got, out, err = cli(*paths, "--max-new-tokens", 9, *arguments, **options)
        assert (got, out) == (status, ""), err
        return err

    return run


@pytest.mark.parametrize("sampling", [(), ("--temperature", 1.3, "--seed", 4, "--num-answers", 2)])
def test_every_line_as_alone(batch, as_json, questions, tmp_path, sampling):
    write(tmp_path / "questions.jsonl", questions)
    assert "5 answered, 0 failed, 0 skipped" in batch("--dtype", "float32", *sampling)
    results = read(tmp_path / "out.jsonl")
    assert [record["line"] for record in results] == [1, 2, 3, 4, 5]
    assert results[0]["id"] == "a" and "id" not in results[1]
    for line, record in zip(questions, results, strict=True):
        images = line.get("images", [line["image"]] if "image" in line else [])
        alone = [
            "-q",
            line["question"],
            "--max-new-tokens",
            line.get("max_new_tokens", 9),
            "--dtype",
            "float32",
        ]
        alone += [tmp_path / image for image in images] or ["--no-image"]
        alone += ["--system", line["system"]] if "system" in line else []
        (made,) = as_json(*alone, *sampling)
        assert {key: record[key] for key in ALONE} == {key: made[key] for key in ALONE}
        assert record["images"] == images and record["question"] == line["question"]


def test_bad_lines_are_reported_and_the_others_answered(batch, questions, tmp_path):
    bad = {
        2: ('{"question": "half', "not valid JSON"),
        3: ('["a", "list"]', "JSON object"),
        4: ({"image": "pictures/absent.png", "question": "what?", "id": 7}, "absent.png"),
        5: ({"image": "pictures/wide.png"}, "question"),
        6: ({"image": "pictures/wide.png", "question": " "}, "question"),
        7: ({"image": 3, "question": "what?"}, "image"),
        8: ({"image": "a.png", "images": ["b.png"], "question": "what?"}, "both"),
        9: ({"question": "what?", "max_new_tokens": "many"}, "max_new_tokens"),
        10: ({"question": "what?", "max_new_tokens": 5000}, "context"),
        11: ({"image": "~nobody-of-this-name/a.png", "question": "what?"}, "cannot be read"),
        12: ({"question": "half a pair: \ud800", "id": "\ud800"}, "Unicode"),
    }
    write(tmp_path / "questions.jsonl", [questions[0], *(line for line, _ in bad.values()), questions[1]])
    assert "2 answered, 11 failed, 0 skipped" in batch(status=1)
    results = {record["line"]: record for record in read(tmp_path / "out.jsonl")}
    assert results[1]["answers"] and results[13]["answers"]
    for number, (_, expected) in bad.items():
        assert expected in results[number]["error"] and "\n" not in results[number]["error"]
    assert results[4]["id"] == 7


def test_results_are_in_the_order_of_the_questions(batch, questions, tmp_path, monkeypatch):
    """Whichever is ready first, and after a run that was killed before it could put them in order."""
    write(tmp_path / "questions.jsonl", [questions[0], {"image": "absent.png", "question": "?"}, *questions])
    batch("--batch-size", 3, status=1)
    out = tmp_path / "out.jsonl"
    lines = out.read_text().splitlines(keepends=True)
    assert [json.loads(line)["line"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    (mended := tmp_path / "absent.png").write_bytes((tmp_path / "pictures/wide.png").read_bytes())
    out.write_text("".join(reversed(lines)) + '{"line": 2, "err')
    batch("--batch-size", 3)
    again = out.read_text().splitlines(keepends=True)
    assert [*again[:1], *again[2:]] == [*lines[:1], *lines[2:]] and "answers" in again[1] and mended.exists()


def test_a_second_run_goes_on(batch, questions, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    write(tmp_path / "questions.jsonl", questions)
    batch("--batch-size", 2)
    whole = out.read_text().splitlines(keepends=True)
    for left in ("".join(whole[:2]), "".join(whole[:2]) + whole[2][:40], "".join(whole[:3])[:-1]):
        out.write_text(left)
        answered = 3 if left.endswith("}") else 2
        assert f"{5 - answered} answered, 0 failed, {answered} skipped" in batch("--batch-size", 2)
        assert sorted(out.read_text().splitlines(keepends=True)) == sorted(whole)
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
        return sample_rows(rows, logits)

    monkeypatch.setattr(scheduler, "sample_rows", interrupted)
    assert "interrupted" in batch("--batch-size", 2, status=130)
    done = len(read(tmp_path / "out.jsonl"))
    assert 1 <= done <= 4
    assert f"{5 - done} answered, 0 failed, {done} skipped" in batch("--batch-size", 2)
    assert [record["line"] for record in read(tmp_path / "out.jsonl")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [1, 3])
def test_a_image_is_encoded_once_wherever_its_lines_stand(batch, questions, tmp_path, monkeypatch, size):
    images = ["pictures/wide.png", "pictures/tall.png", None] * 3
    lines = [
        {"question": f"how many {'big ' * place}circles?"} | ({"image": image} if image else {})
        for place, image in enumerate(images)
    ]
    write(tmp_path / "questions.jsonl", lines)
    tiles, encode = [], VisionLanguageModel.encode_images

    def counted(self, pixels, mask=None):
        tiles.append(len(pixels))
        return encode(self, pixels, mask)

    monkeypatch.setattr(VisionLanguageModel, "encode_images", counted)
    assert "9 answered" in batch("--batch-size", size)
    together = sum(tiles)
    tiles.clear()
    write(tmp_path / "questions.jsonl", lines[:2])
    (tmp_path / "out.jsonl").unlink()
    assert "2 answered" in batch()
    assert sum(tiles) == together


def test_one_answer_that_fails_fails_its_line_alone(batch, questions, tmp_path, monkeypatch):
    def poisoned(rows, logits):
        for row, own in zip(rows, logits):
            if len(row.tokens) == 2 and row.options.max_new_tokens == 14 and row.options.seed == 5:
                own.fill_(float("nan"))
        return sample_rows(rows, logits)

    monkeypatch.setattr(scheduler, "sample_rows", poisoned)
    write(tmp_path / "questions.jsonl", questions)
    sampling = ("--temperature", 1.0, "--seed", 4, "--num-answers", 2)
    assert "4 answered, 1 failed" in batch(*sampling, status=1)
    results = read(tmp_path / "out.jsonl")
    assert "not finite" in results[4]["error"] and all(len(one["answers"]) == 2 for one in results[:4])


def test_memory_is_told_or_refused_before_any_work(batch, complaint, questions, tmp_path):
    write(tmp_path / "questions.jsonl", questions)
    assert "3 slots of 512 positions" in batch("--batch-size", 3)
    paths = ("--batch", tmp_path / "questions.jsonl", "--out", tmp_path / "other.jsonl")
    assert "bytes of cache" in complaint(*paths, "--batch-size", 10**12)
    assert "--no-cache" in complaint(*paths, "--no-cache")


def test_a_mended_line_is_tried_again(batch, questions, tmp_path):
    late = tmp_path / "late.png"
    lines = [questions[0], {"image": "late.png", "question": "what?"}]
    write(tmp_path / "questions.jsonl", lines)
    assert "1 answered, 1 failed" in batch(status=1)
    assert "0 answered, 1 failed, 1 skipped" in batch(status=1)
    assert [("error" in record) for record in read(tmp_path / "out.jsonl")] == [False, True]
    draw_image(30, 30).save(late)
    assert "1 answered, 0 failed, 1 skipped" in batch()
    assert not any("error" in record for record in read(tmp_path / "out.jsonl"))


def test_blank_lines_and_a_byte_order_mark(batch, questions, tmp_path):
    text = "\n" + json.dumps(questions[0]) + "\n\n" + json.dumps(questions[1])
    (tmp_path / "questions.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert "2 answered" in batch()
    assert [record["line"] for record in read(tmp_path / "out.jsonl")] == [2, 4]


def test_other_keys_are_kept_and_named(batch, tmp_path):
    write(tmp_path / "questions.jsonl", [{"question": "what?", "expected": "two"}])
    assert "kept under 'other': expected" in batch()
    assert read(tmp_path / "out.jsonl")[0]["other"] == {"expected": "two"}


def test_rows_that_only_fit_the_context_apart(batch, tmp_path):
    long = {"question": "how many circles are there " * 30, "max_new_tokens": 2}
    lines = [long, {"question": "how many?", "max_new_tokens": 400}]
    write(tmp_path / "questions.jsonl", lines)
    assert "2 answered, 0 failed" in batch()


def test_results_of_something_else_are_left_alone(batch, questions, tmp_path, photo, single_folder):
    out = tmp_path / "out.jsonl"
    write(tmp_path / "questions.jsonl", questions)
    batch()
    kept = out.read_text()
    write(tmp_path / "questions.jsonl", [questions[0] | {"question": "why?"}, *questions[1:]])
    assert "another question" in batch(status=2)
    write(tmp_path / "questions.jsonl", questions)
    assert "another model" in batch(status=2, model=single_folder)
    assert out.read_text() == kept
    odd = '{"line": 1, "model": "m", "images": 5, "question": "what?"}\n'
    for foreign in ("shopping list\nmilk\n", "one line", '{"a": 1}', '{"line": "one"}\n{}\n', odd):
        out.write_text(foreign)
        assert "expected the results of an earlier run" in batch(status=2)
        assert out.read_text() == foreign


def test_bad_files(complaint, tmp_path, photo):
    questions = write(tmp_path / "questions.jsonl", [{"question": "what?"}])
    absent = tmp_path / "absent" / "x.jsonl"
    assert "absent" in complaint("--batch", questions, "--out", absent)
    assert "absent" in complaint("--batch", absent, "--out", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    assert "something else" in complaint("--batch", questions, "--out", tmp_path)
    assert "another file" in complaint("--batch", questions, "--out", questions)
    assert "a pipe or a device" in complaint("--batch", "/dev/null", "--out", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
    assert questions.read_text() == '{"question": "what?"}\n'


def test_results_with_other_options_are_left_alone(batch, questions, tmp_path):
    """What they would be mixed with would not be the same kind of answers."""
    out, whole = tmp_path / "out.jsonl", ("--temperature", 1, "--seed", 4)
    write(tmp_path / "questions.jsonl", questions)
    batch(*whole)
    results = read(out)
    assert results[0]["options"]["seed"] == 4 and results[0]["options"]["max_new_tokens"] == 9
    assert results[2]["options"]["max_new_tokens"] == 3 and results[4]["options"]["system"] == "be short"
    kept = out.read_text()
    for changed in (
        ("--temperature", 2, "--seed", 4),
        ("--temperature", 1, "--seed", 5),
        (*whole, "--top-k", 5),
        (*whole, "--top-p", 0.5),
        (*whole, "--min-p", 0.5),
        (*whole, "--repetition-penalty", 1.5),
        (*whole, "--num-answers", 2),
        (*whole, "--max-new-tokens", 8),
        (*whole, "--system", "be brief"),
    ):
        assert "with other options" in batch(*changed, status=2)
    assert out.read_text() == kept
    assert "0 answered, 0 failed, 5 skipped" in batch(*whole)
    write(tmp_path / "questions.jsonl", [*questions[:4], questions[4] | {"max_new_tokens": 15}])
    assert "with other options" in batch(*whole, status=2)


def test_logits_that_are_not_finite_fail_their_line_alone(batch, questions, tmp_path, monkeypatch):
    logits = LanguageModel.logits

    def some_broken(self, hidden):
        made = logits(self, hidden)
        broken = (
            torch.arange(len(made)) == 0 if some_broken.calls == 0 else torch.zeros(len(made), dtype=bool)
        )
        some_broken.calls += 1
        return made.masked_fill(broken.view(-1, *[1] * (made.dim() - 1)), float("nan"))

    some_broken.calls = 0
    write(tmp_path / "questions.jsonl", questions)
    monkeypatch.setattr(LanguageModel, "logits", some_broken)
    assert "4 answered, 1 failed" in batch(status=1)
    (failed,) = (record for record in read(tmp_path / "out.jsonl") if "error" in record)
    assert "not finite" in failed["error"]
