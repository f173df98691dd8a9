"""The runner: answers do not depend on how they are got, and none is lost or given twice."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
import torch

from data.images import load_image
from eval import answering, records
from eval.__main__ import main
from eval.answering import answers, by_image, share
from eval.metrics import find_metric
from eval.rows import DataConfig, data_task
from eval.run import evaluate
from eval.tasks import DEFAULT_MODEL, shapes_task
from generation.decoding import GenerationOptions
from generation.scheduler import Stats
from inference.answer import ask
from inference.checkpoint import open_checkpoint
from tests.evaluations import FORK, answered, results_of, run, run_ranks, samples_of, save_rows, write_rows
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(DEFAULT_MODEL, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def alone(checkpoint, tmp_path_factory):
    """(folder with rows, id -> the answer that `model.generate` gives each question alone)."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [json.loads(line) for line in write_rows(folder).read_text().splitlines()]
    options, told = GenerationOptions(max_new_tokens=32), {}
    for row in rows:
        reply = ask(checkpoint, [folder / row["image"]], row["question"], options).finish()
        told[row["id"]] = reply["answers"][0]
    assert len(set(told.values())) > 8  # they differ: mixing them up would show
    return folder, told


@pytest.mark.parametrize("batch_size", [1, 7, 32])
def test_answers_are_those_of_each_question_alone(alone, tmp_path, batch_size):
    folder, told = alone
    arguments = ("--data", folder / "rows.jsonl", "--batch-size", batch_size, "--output", tmp_path / "out")
    assert run(*arguments, "--compile", "off") == 0
    found = answered(tmp_path / "out")
    assert {name: answer for name, (answer, _) in found.items()} == told
    assert results_of(tmp_path / "out")["score"] == sum(score for _, score in found.values()) / len(told)


def test_the_compiled_step_and_shuffled_rows_change_nothing(alone, tmp_path):
    _, told = alone
    rows = write_rows(tmp_path, shuffle=1)
    assert run("--data", rows, "--output", tmp_path / "out") == 0
    assert {name: answer for name, (answer, _) in answered(tmp_path / "out").items()} == told


def test_two_ranks_change_nothing(alone, tmp_path):
    folder, told = alone
    output = tmp_path / "out"
    run_ranks(2, "--data", folder / "rows.jsonl", "--output", output, "--compile", "off", "--controls")
    assert {name: answer for name, (answer, _) in answered(output).items()} == told
    results = results_of(output)
    assert results["ranks"] == 2 and results["answered"] == len(told) == len(
        samples_of(output, "samples-blind.jsonl")
    )
    assert not list(output.glob("*.part"))


def test_a_image_is_encoded_and_prefilled_once_for_all_its_questions(checkpoint, alone, monkeypatch):
    folder, _ = alone
    task, opened = data_task(DataConfig(str(folder / "rows.jsonl")), find_metric("exact_match")), []
    tile = type(checkpoint.processor).tile

    def counting(self, source):
        if not isinstance(source, answering.TiledImage):
            opened.append(source)
        return tile(self, source)

    monkeypatch.setattr(type(checkpoint.processor), "tile", counting)
    stats = Stats()
    assert len(list(answers(checkpoint, task.samples, 7, stats=stats))) == 24
    assert stats.tiles_encoded == len(opened) == 4
    assert stats.reused > 20 * checkpoint.model.config.tokens_per_tile  # 20 of 24 have it for nothing


def test_shares_of_ranks_are_everything_once():
    groups = by_image(shapes_task(30).samples)
    assert sorted(number for group in groups for number in group) == list(range(30))
    for sizes in (groups, [list(range(25)), [25], [26, 27, 28], [29]]):
        parts = [share(sizes, rank, 4) for rank in range(4)]
        counts = [sum(map(len, part)) for part in parts]
        assert sorted(n for part in parts for group in part for n in group) == list(range(30))
        assert max(counts) - min(counts) <= 3


# ------------------------------------------------------------------------------------- killed, and again
def test_killed_half_way_every_question_is_answered_exactly_once(alone, tmp_path):
    folder, told = alone
    output = tmp_path / "out"
    arguments = ["--data", str(folder / "rows.jsonl"), "--output", str(output), "--compile", "off"]
    path, write = output / "samples.jsonl", records._write

    def last(file, line):  # it ends itself: it could be done before anybody has looked
        write(file, line)
        if path.read_bytes().count(b"\n") == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_write", last)
        process = FORK.Process(target=main, args=([*arguments, "--batch-size", "2"],))
        process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    before = samples_of(output)
    assert len(before) == 7 and not (output / "results.json").exists()
    with path.open("ab") as file:  # the line that it was writing
        file.write(b'{"id": "0-1", "question": "Wh')
    assert main(arguments) == 0
    assert {name: answer for name, (answer, _) in answered(output).items()} == told
    assert samples_of(output)[: len(before)] == before
    assert results_of(output)["answered"] == 24 - len(before)


def test_a_killed_rank_leaves_its_part_to_the_next_start(alone, tmp_path):
    folder, told = alone
    arguments = ("--data", folder / "rows.jsonl", "--output", tmp_path / "out", "--compile", "off")
    assert run(*arguments) == 0
    lines = (tmp_path / "out" / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out" / "samples.jsonl").write_bytes(b"".join(lines[:9]) + lines[9][:30])
    (tmp_path / "out" / "samples.1.part").write_bytes(b"".join(lines[7:15]) + lines[15][:1])
    assert run(*arguments) == 0
    assert {name: answer for name, (answer, _) in answered(tmp_path / "out").items()} == told
    assert results_of(tmp_path / "out")["answered"] == 9
    assert not list((tmp_path / "out").glob("*.part"))


def test_a_finished_run_keeps_its_speed_and_adds_controls(alone, tmp_path):
    folder, _ = alone
    arguments = ("--data", folder / "rows.jsonl", "--output", tmp_path / "out", "--compile", "off")
    assert run(*arguments) == 0
    first = results_of(tmp_path / "out")
    assert run(*arguments, "--controls") == 0
    second = results_of(tmp_path / "out")
    assert first["samples_per_second"] == second["samples_per_second"] and second["seconds"] > 0
    assert not first["controls"] and set(second["controls"]) == {"blind", "majority"}


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (("--prompt", "{question} Briefly."), "prompt"),
        (("--limit", "3"), "samples"),
        (("--dtype", "bfloat16"), "dtype"),
    ],
)
def test_a_folder_of_another_run_is_refused(alone, tmp_path, capsys, change, differs):
    folder, _ = alone
    arguments = ("--data", folder / "rows.jsonl", "--output", tmp_path / "out", "--compile", "off")
    assert run(*arguments, "--limit", "2") == 0
    before = (tmp_path / "out" / "samples.jsonl").read_bytes()
    assert run(*arguments, "--limit", "2", *change) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "choose another --output" in said and differs in said
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == before


def test_files_that_are_no_run_are_left_alone(alone, tmp_path, capsys):
    folder, _ = alone
    output = tmp_path / "out"
    output.mkdir()
    (output / "samples.jsonl").write_text("precious\n")
    assert run("--data", folder / "rows.jsonl", "--output", output) == 2
    assert (output / "samples.jsonl").read_text() == "precious\n"
    assert run("--data", folder / "rows.jsonl", "--output", tmp_path / "new", "--limit", "2") == 0
    (tmp_path / "new" / "samples.jsonl").write_text("precious\n")
    assert run("--data", folder / "rows.jsonl", "--output", tmp_path / "new", "--limit", "2") == 2
    assert "expected the samples of an earlier run" in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "new" / "samples.jsonl").read_text() == "precious\n"


# -------------------------------------------------------------------------------------------- images
def test_images_that_do_not_open_score_0_are_listed_and_tried_again(alone, tmp_path, capsys):
    folder, told = alone
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    for row in rows:
        absent = row["id"].startswith("1-") and tmp_path / "absent.png"
        row["image"] = str(bad if row["id"] == "0-0" else absent or folder / row["image"])
    arguments = (
        "--data",
        save_rows(tmp_path / "rows.jsonl", rows),
        "--output",
        tmp_path / "out",
        "--allow-outside",
    )
    assert run(*arguments, "--compile", "off", "--controls") == 0
    found, results = answered(tmp_path / "out"), results_of(tmp_path / "out")
    wrong = {"0-0", *(name for name in told if name.startswith("1-"))}
    assert {name for name in told if found[name] == ("", 0.0)} == wrong
    assert {name: found[name][0] for name in told.keys() - wrong} == {n: told[n] for n in told.keys() - wrong}
    assert results["errors"]["count"] == len(wrong) == 7 and results["n"] == 24
    assert {one["id"] for one in results["errors"]["samples"]} == wrong
    out = capsys.readouterr().out
    assert "7 could not be answered and score 0" in out and "bad.png" in out
    assert "does not open" in (tmp_path / "out" / "report.html").read_text()
    load_image(folder / "picture-1.png").save(tmp_path / "absent.png")
    assert run(*arguments, "--compile", "off") == 0
    again = results_of(tmp_path / "out")
    assert again["errors"]["count"] == 1 and again["answered"] == 7
    assert answered(tmp_path / "out")["1-2"][0] == told["1-2"]


def test_blanked_images_have_the_size_of_the_others(checkpoint, alone):
    """As answering about that grey image."""
    folder, told = alone
    task = data_task(DataConfig(str(folder / "rows.jsonl")), find_metric("exact_match"))
    stats = Stats()
    blind = dict(answers(checkpoint, task.samples, 7, blank=True, stats=stats))
    assert stats.tiles_encoded == 1  # one grey tile is like another
    assert {answer.text for answer in blind.values()} != set(told.values())
    from PIL import Image

    for number in (0, 7, 23):
        sample = task.samples[number]
        grey = Image.new("RGB", load_image(sample.images()[0]).size, answering.BLANK)
        options = GenerationOptions(max_new_tokens=32)
        reply = ask(checkpoint, [grey], sample.question, options).finish()
        assert blind[number].text == reply["answers"][0]


def test_a_prompt_too_long_for_the_context_scores_0(checkpoint, tmp_path):
    task = shapes_task(2)
    long = replace(task.samples[0], prompt="circle " * 3000)
    task = replace(task, samples=[long, task.samples[1]])
    results = evaluate(checkpoint, task, tmp_path / "out", progress=False)
    (error,) = results["errors"]["samples"]
    assert error["id"] == "0" and "context" in error["error"]


def test_too_many_answers_at_a_time_are_refused(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("generation.scheduler.available_bytes", lambda device: 10)
    assert run("--tasks", "shapes", "--limit", "2", "--output", tmp_path / "out") == 2
    assert "use fewer slots or a shorter context (--batch-size)" in capsys.readouterr().err


def test_digests_that_do_not_fit_the_tiles_are_refused(checkpoint):
    from generation.scheduler import Request, Scheduler

    size = checkpoint.model.config.vision.image_size
    ids = torch.full((64,), checkpoint.model.config.image_token_id)
    request = Request(ids, torch.zeros(1, 3, size, size), digests=[b"a", b"b"])
    (done,) = Scheduler(checkpoint.model, 1).run([request])
    assert "digests: expected one for each of 1 tiles, got 2" in str(done.error)
