"""Two ranks in the ways that train.py offers: the curve and the weights of one rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import train
from tests.runs import SETTINGS, curve, flags, named, run, tiny_checkpoint, write_rows
from tests.test_train import SMALL
from tests.test_train_ranks import same
from tests.waiting import free_port
from training.distributed import LostRankError, Ranks

PARTS = {"dense_loss", "patch_kind", "patch_count", "loss", "noun_loss", "pair_loss", "grad_norm"}
WAYS = {"lora": {"lora_rank": 2, "lr": 1e-2}, "muon": {"muon": "language", "ema": 0.9}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Only each twelfth row has an image, so that most micro-batches of a rank have none; the rate is the
    same however long the run is."""
    folder = tmp_path_factory.mktemp("ways")
    tiny = tiny_checkpoint(folder / "tiny")
    rows = write_rows(folder / "rows.jsonl", every=12)
    return {"init_from": str(tiny), "data": named(rows), "micro_batch_size": 1, "decay_fraction": 1e-9}


@pytest.fixture(scope="module", params=WAYS)
def alone(request, base, tmp_path_factory):
    """Six steps of one rank: the settings, and the run's folder."""
    settings, output = base | WAYS[request.param] | {"steps": 6}, tmp_path_factory.mktemp(request.param)
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
    rows = [
        [json.loads(line) for line in (tmp_path / ranks / "metrics.jsonl").read_text().splitlines()]
        for ranks in "12"
    ]
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
