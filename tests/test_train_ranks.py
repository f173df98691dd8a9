"""The same losses and weights whatever the ranks and micro-batches; a state opens on any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import train
from eval.tasks import DEFAULT_MODEL
from shapes import heldout_questions, render
from tests.runs import SETTINGS, curve, ended, flags, metrics, named, run, start, tiny_checkpoint, write_rows
from tests.test_train import SMALL
from tests.waiting import free_port
from training.distributed import LostRankError, Ranks


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
        losses.append([row["eval_loss"] for row in metrics(folder / f"three{ranks}", "eval_loss")])
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_fewer_rows_than_ranks_have_room_for(base, capfd):
    """A rank without a row trains along; no row on any rank is said."""
    folder, settings, _ = base
    few = settings | {"data": named(write_rows(folder / "few.jsonl", count=3)), "epochs": 1, "batch_size": 16}
    run(2, **few, output=str(folder / "few"))
    assert [tuple(sample) for _, _, rows in curve(folder / "few") for row in rows for sample in row]
    (folder / "empty.jsonl").write_text('{"question": "what", "answer": ""}\n' * 3)
    processes = start(2, **(few | {"data": str(folder / "empty.jsonl")}), output=str(folder / "none"))
    assert ended(processes) == [2, 2]
    assert "no row can be trained on, on any of 2 ranks" in capfd.readouterr().err


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
    run(2, **settings)
    said = capfd.readouterr().err
    assert said.count("step-00000004 cannot be read and is skipped: OSError: [Errno 5]") == 1
    same(expected, curve(folder / "unread"))


def test_ranks_share_the_questions_of_an_evaluation(tmp_path):
    """Means over all of them: the embedded model, at hardly any rate, scores alike on one rank and on two."""
    rates = {"lr": 1e-9, "matrix_lr": 1e-9, "weight_decay": 0.0}
    drawn = {"pictures": 2, "vision_pictures": 0, "batch_size": 2, "steps": 1, "sequence_length": 256}
    scores = []
    for ranks in (1, 2):
        settings = {"init_from": str(DEFAULT_MODEL), "eval_questions": 25, "eval_pictures": 2} | drawn | rates
        run(ranks, **settings, output=str(tmp_path / f"asked{ranks}"))
        (row,) = metrics(tmp_path / f"asked{ranks}", "eval_accuracy")
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
        scores.append([row["eval_accuracy"] for row in metrics(output, "eval_accuracy")])
    assert scores[0] == scores[1] and len(scores[0]) == 2 and scores[0][0] > 0.5
    same(curve(tmp_path / "ddp"), curve(tmp_path / "fsdp"))


# ------------------------------------------------------------------------ in the ways that train.py offers
PARTS = {"dense_loss", "patch_kind", "patch_count", "loss", "noun_loss", "pair_loss", "grad_norm"}
WAYS = {"lora": {"lora_rank": 2, "lr": 1e-2}, "muon": {"muon": "language", "ema": 0.9}}


@pytest.fixture(scope="module")
def few_images(tmp_path_factory):
    """Only each twelfth row has an image, so that most micro-batches of a rank have none; the rate is the
    same however long the run is."""
    folder = tmp_path_factory.mktemp("ways")
    tiny = tiny_checkpoint(folder / "tiny")
    rows = write_rows(folder / "rows.jsonl", every=12)
    return {"init_from": str(tiny), "data": named(rows), "micro_batch_size": 1, "decay_fraction": 1e-9}


@pytest.fixture(scope="module", params=WAYS)
def alone(request, few_images, tmp_path_factory):
    """Six steps of one rank: the settings, and the run's folder."""
    settings, output = few_images | WAYS[request.param] | {"steps": 6}, tmp_path_factory.mktemp(request.param)
    train.main(flags(**(SETTINGS | settings | {"output": str(output)})))
    assert len(curve(output)) == 6 and (output / "model.safetensors").exists()
    return settings, output


def close(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # One vector added to all keys changes no attention: such a bias has a gradient of rounding alone, and
        # AdamW makes whole steps of it.
        atol = 1e-3 if name.endswith("k_proj.bias") else 1e-5
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_are_as_one(alone, parallel, tmp_path):
    """Gone on with from what was saved while the run went on: what the next steps did is not in it."""
    settings, expected = alone
    settings = settings | {"output": str(tmp_path / "two"), "parallel": parallel}
    run(2, **(settings | {"steps": 5, "save_every": 3, "keep": 2, "async_save": True}))
    states = sorted((tmp_path / "two" / "state").iterdir())
    assert [state.name for state in states] == ["step-00000003", "step-00000005"]
    shutil.rmtree(states[1])
    run(2, **settings)
    same(curve(expected), curve(tmp_path / "two"))
    close(expected, tmp_path / "two")


def test_the_shapes_world(tmp_path):
    """Each part of the loss is divided by what all ranks have of it."""
    settings = SMALL | {"batch_size": 4, "pictures": 24, "eval_every": 1000, "steps": 0}
    settings |= {"sequence_length": 256, "lr": 1e-3, "matrix_lr": 1e-3, "vision_matrix_lr": 1e-3}
    for ranks in (1, 2):
        run(ranks, **(settings | {"output": str(tmp_path / str(ranks))}))
    rows = [metrics(tmp_path / ranks) for ranks in "12"]
    for one, two in zip(*rows, strict=True):
        assert one["step"] == two["step"] and one.keys() == two.keys()
        for name in one.keys() & PARTS:
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=2e-5), (one["step"], name)
    assert len(rows[0]) == 7 and rows[0][5].keys() > PARTS


def test_why_a_rank_leaves(tmp_path, monkeypatch):
    """What torchrun's summary reads, and what this rank says."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ranks = Ranks(torch.device("cpu"))
    try:
        assert ranks.reason(ValueError("no such column")) == "rank 0 of 1: no such column"
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
        assert failure.message == "rank 0 of 1: no such column"
        with pytest.raises(LostRankError, match="another rank has left"), ranks.watching():
            raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
        with pytest.raises(RuntimeError, match="shapes"), ranks.watching():
            raise RuntimeError("shapes cannot be multiplied")
    finally:
        ranks.close()


def test_a_rank_that_leaves_before_all_have_met(monkeypatch):
    """The one that is slower here says the same as later on; of what else goes wrong nobody has left."""
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    environment |= {"MASTER_ADDR": "here", "MASTER_PORT": "7"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    left, apart = "another rank has left", "the ranks cannot meet at here:7 (gloo)"
    said = {
        "Failed to recv, got 0 bytes. Connection was likely closed.": (LostRankError, left),
        "[gloo/transport/tcp/pair.cc:534] Connection reset by peer": (LostRankError, left),
        "The server socket has failed to listen": (ConnectionError, apart),
        "[gloo/transport/tcp/device.cc:84] ifa != nullptr": (ConnectionError, apart),
        "Distributed package doesn't have NCCL built in": (ConnectionError, apart),
        "Timed out waiting for clients. 1/2 clients joined.": (ConnectionError, apart),
    }
    for text, (kind, sentence) in said.items():

        def fails(backend, text=text):
            raise torch.distributed.DistNetworkError(f"{text}\nException raised from socket.cpp")

        monkeypatch.setattr(torch.distributed, "init_process_group", fails)
        with pytest.raises(ConnectionError) as told:
            Ranks(torch.device("cpu"))
        assert type(told.value) is kind
        assert str(told.value).startswith(f"rank 1 of 2: {sentence}")
        assert str(told.value).endswith(f": {text}")
