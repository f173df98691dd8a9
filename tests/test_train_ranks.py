"""The same loss curve whatever the micro-batches and ranks; shards open on any number of ranks."""

from __future__ import annotations

import json
import os
import time

import pytest
import torch

import train
from eval.tasks import DEFAULT_MODEL
from shapes import heldout_questions, render
from tests.runs import SETTINGS, curve, flags, named, run, start, tiny_checkpoint, write_rows
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    settings = {
        "init_from": str(tiny_checkpoint(folder / "tiny")),
        "data": named(write_rows(folder / "r.jsonl")),
    }
    train.main(flags(**(SETTINGS | settings | {"output": str(folder / "whole")})))
    return folder, settings, curve(folder / "whole")


def same(one, other):
    assert [(step, samples) for step, _, samples in one] == [(step, samples) for step, _, samples in other]
    assert max(abs(a - b) for (_, a, _), (_, b, _) in zip(one, other, strict=True)) < 1e-5


@pytest.mark.parametrize("micro", [4, 1])
def test_micro_batches(base, micro):
    folder, settings, expected = base
    assert len(expected) == 20 and expected[-1][1] < expected[0][1]
    output = folder / f"micro{micro}"
    train.main(flags(**(SETTINGS | settings | {"output": str(output), "micro_batch_size": micro})))
    same(expected, curve(output))


@pytest.mark.parametrize("parallel, micro", [("ddp", 4), ("ddp", 1), ("fsdp", 2)])
def test_two_ranks(base, parallel, micro):
    folder, settings, expected = base
    output = folder / f"{parallel}{micro}"
    run(2, **settings, output=str(output), parallel=parallel, micro_batch_size=micro)
    same(expected, curve(output))


def test_two_ranks_then_one(base):
    """A sharded state opens on another number of ranks: same samples, none lost or doubled."""
    folder, settings, _ = base
    settings = settings | {"output": str(folder / "fewer"), "save_every": 7}
    run(2, **settings, parallel="fsdp", steps=7, schedule="wsd", decay_fraction=1e-9)
    train.main(flags(**(SETTINGS | settings | {"steps": 12, "decay_fraction": 1e-9})))
    train.main(
        flags(**(SETTINGS | settings | {"output": str(folder / "one"), "steps": 12, "decay_fraction": 1e-9}))
    )
    same(curve(folder / "one"), curve(folder / "fewer"))


def test_ranks_whose_data_end_leave_together(base):
    folder, settings, _ = base
    output = folder / "epoch"
    run(2, **settings, output=str(output), steps=1000, epochs=1, micro_batch_size=1)
    seen = [tuple(sample) for _, _, rows in curve(output) for row in rows for sample in row]
    assert sorted(number for _, number in seen) == list(range(60))


def test_a_rank_without_held_out_rows_takes_part(base):
    """Three rows are the first rank's: the second scores padding, and the loss is that of one rank."""
    folder, settings, _ = base
    held_out = write_rows(folder / "three.jsonl", count=3)
    settings = settings | {"eval_data": named(held_out), "steps": 2, "eval_every": 1, "batch_size": 16}
    losses = []
    for ranks in (1, 2):
        run(ranks, **settings, output=str(folder / f"three{ranks}"))
        lines = (folder / f"three{ranks}" / "metrics.jsonl").read_text().splitlines()
        losses.append([row["eval_loss"] for row in map(json.loads, lines) if "eval_loss" in row])
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_fewer_rows_than_ranks_have_room_for(base, capfd):
    """A rank without a row trains along; no row on any rank is said."""
    folder, settings, _ = base
    few = settings | {"data": named(write_rows(folder / "few.jsonl", count=3)), "epochs": 1, "batch_size": 16}
    run(2, **few, output=str(folder / "few"))
    assert [tuple(sample) for _, _, rows in curve(folder / "few") for row in rows for sample in row]
    (folder / "empty.jsonl").write_text('{"question": "what", "answer": ""}\n' * 3)
    processes = start(2, **(few | {"data": str(folder / "empty.jsonl")}), output=str(folder / "none"))
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [2, 2]
    assert "no row can be trained on, on any of 2 ranks" in capfd.readouterr().err


def test_ranks_wait_for_what_the_first_writes(base, monkeypatch):
    folder, settings, _ = base
    write_run, steps, file = train.write_run, train.Run.steps, folder / "waits" / "run.yaml"

    def slow(*arguments):
        time.sleep(1)
        write_run(*arguments)

    def seen(self):
        assert file.exists()
        return steps(self)

    monkeypatch.setattr(train, "write_run", slow)
    monkeypatch.setattr(train.Run, "steps", seen)
    run(2, **settings | {"steps": 1}, output=str(file.parent))


def test_a_state_that_one_rank_cannot_read(base, monkeypatch, capfd):
    """All ranks pass it over together, and go on from the one before."""
    folder, settings, _ = base
    settings = settings | {"steps": 4, "save_every": 2, "keep": 2, "output": str(folder / "unread")}
    run(2, **settings)
    expected, load = curve(folder / "unread"), torch.load

    def broken(path, *arguments, **more):
        if os.environ.get("RANK") == "1" and "step-00000004" in str(path):
            raise OSError(5, "Input/output error")
        return load(path, *arguments, **more)

    monkeypatch.setattr(torch, "load", broken)
    processes = start(2, **settings)
    try:
        for process in processes:
            process.join(PATIENCE)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    said = capfd.readouterr().err
    assert said.count("step-00000004 cannot be read and is skipped: OSError: [Errno 5]") == 1
    same(expected, curve(folder / "unread"))


def test_ranks_share_the_questions_of_an_evaluation(tmp_path):
    """Means over all of them: the embedded model, at hardly any rate, scores alike on one rank and on two."""
    rates = {"lr": 1e-9, "matrix_lr": 1e-9, "weight_decay": 0.0}
    drawn = {"pictures": 2, "vision_pictures": 0, "batch_size": 2, "steps": 1, "sequence_length": 256}
    scores = []
    for ranks in (1, 2):
        settings = {
            "init_from": str(DEFAULT_MODEL),
            "eval_questions": 25,
            "eval_pictures": 2,
            **drawn,
            **rates,
        }
        run(ranks, **settings, output=str(tmp_path / f"asked{ranks}"))
        row = json.loads((tmp_path / f"asked{ranks}" / "metrics.jsonl").read_text().splitlines()[-1])
        scores.append({name: value for name, value in row.items() if name.startswith("eval_")})
    assert scores[0] == pytest.approx(scores[1]) and scores[0]["eval_accuracy"] > 0.8
    assert {"eval_count", "eval_describe"} <= scores[0].keys()


def test_ranks_with_shards_of_the_weights_answer_too(tmp_path):
    """Each puts a whole model together: held-out rows score as on one rank, and shards are trained on."""
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number, (scene, asked) in enumerate(heldout_questions(12)):
            image = str(tmp_path / f"{number}.png")
            render(scene, 128).save(image)
            file.write(
                json.dumps({"question": asked.question, "answer": asked.answer, "image": image}) + "\n"
            )
    rows = [{"path": str(tmp_path / "rows.jsonl"), "name": "drawn"}]
    settings = {"init_from": str(DEFAULT_MODEL), "data": rows, "eval_data": rows, "lr": 1e-9, "steps": 2}
    settings |= {"batch_size": 2, "sequence_length": 192, "eval_every": 1, "eval_metric": "exact_match"}
    scores = []
    for ranks, parallel in ((1, "ddp"), (2, "fsdp")):
        output = tmp_path / parallel
        run(ranks, **settings, eval_questions=12, eval_samples=3, parallel=parallel, output=str(output))
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        scores.append([row["eval_accuracy"] for row in lines if "eval_accuracy" in row])
    assert scores[0] == scores[1] and len(scores[0]) == 2 and scores[0][0] > 0.5
    same(curve(tmp_path / "ddp"), curve(tmp_path / "fsdp"))
