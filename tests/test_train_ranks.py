"""The same losses and weights whatever the ranks and micro-batches; a state opens on any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import train
from tests.runs import (
    curve,
    ended,
    flags,
    metrics,
    named,
    prepared,
    run,
    settings_in,
    start,
    write_rows,
)
from tests.waiting import free_port
from training.distributed import LostRankError, Ranks


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of one rank, at a rate that does not depend on its length: its settings and its curve."""
    folder = prepared(tmp_path_factory.mktemp("ranks"))
    settings = settings_in(folder, "whole", steps=10, decay_fraction=1e-9)
    train.main(flags(**settings))
    return folder, settings, curve(folder / "whole")


def same(one, other):
    assert [(step, samples) for step, _, samples in one] == [(step, samples) for step, _, samples in other]
    assert max(abs(a - b) for (_, a, _), (_, b, _) in zip(one, other, strict=True)) < 1e-5


@pytest.mark.slow
def test_micro_batches(base):
    folder, settings, expected = base
    assert len(expected) == 10 and expected[-1][1] < expected[0][1]
    train.main(flags(**(settings | {"output": str(folder / "micro"), "micro_batch_size": 1})))
    same(expected, curve(folder / "micro"))


@pytest.mark.slow
def test_two_ranks(base):
    folder, settings, expected = base
    output = folder / "ddp"
    run(2, **(settings | {"output": str(output), "parallel": "ddp", "micro_batch_size": 1}))
    same(expected, curve(output))


@pytest.mark.slow
def test_ranks_drop_out_other_inputs(base):
    """With the same masks on every rank, dropout would be weaker than it is asked to be."""
    folder, settings, _ = base
    output = folder / "dropped"
    more = {"lora_rank": 2, "lora_dropout": 0.5, "steps": 1, "save_every": 1, "output": str(output)}
    run(2, **(settings | more))
    saved = torch.load(output / "state" / "step-00000001" / "run.pt", weights_only=True)
    one, other = (of_rank["torch"] for of_rank in saved["random"])
    assert not torch.equal(one, other)


@pytest.mark.slow
def test_two_ranks_then_one(base):
    """A sharded state opens on another number of ranks: same samples, none lost or doubled."""
    folder, settings, expected = base
    settings = settings | {"output": str(folder / "fewer"), "micro_batch_size": 2}
    run(2, **(settings | {"parallel": "fsdp", "steps": 4}))
    train.main(flags(**settings))
    same(expected, curve(folder / "fewer"))


@pytest.mark.slow
def test_ranks_whose_data_end_leave_together(base):
    folder, settings, _ = base
    output = folder / "epoch"
    run(2, **(settings | {"output": str(output), "steps": 1000, "epochs": 1, "micro_batch_size": 1}))
    seen = [tuple(sample) for _, _, rows in curve(output) for row in rows for sample in row]
    assert sorted(number for _, number in seen) == list(range(60))


@pytest.mark.slow
def test_two_ranks_are_evaluated_as_one_is(base):
    """The same losses, scores, answers and best model, whether a rank has the weights or a shard. Three
    held-out rows are the first rank's: the second scores padding."""
    folder, settings, _ = base
    settings = settings | {
        "eval_data": named(write_rows(folder / "three.jsonl", 3, every=1)),
        "eval_every": 2,
    }
    settings |= {"steps": 4, "eval_samples": 3, "batch_size": 16, "ema": 0.9, "eval_metric": "anls"}
    train.main(flags(**(settings | {"output": str(folder / "seen")})))
    for parallel in ("ddp", "fsdp"):
        output = folder / f"seen-{parallel}"
        run(2, **(settings | {"output": str(output), "parallel": parallel}))
        same(curve(folder / "seen"), curve(output))  # evaluating an average leaves the weights alone
        for name in ("eval_loss", "eval_accuracy"):
            one, two = ([row[name] for row in metrics(run, name)] for run in (folder / "seen", output))
            assert one == pytest.approx(two, abs=1e-5) and len(one) == 2, name
        for name in ("step-00000002", "step-00000004"):
            path = Path("samples") / name / "answers.jsonl"
            assert (output / path).read_text() == (folder / "seen" / path).read_text()
        one, two = (json.loads((run / "best/best.json").read_text()) for run in (folder / "seen", output))
        assert one["step"] == two["step"] and one["value"] == pytest.approx(two["value"], abs=1e-5)
        AutoModelForImageTextToText.from_pretrained(output / "best")


@pytest.mark.slow
def test_fewer_rows_than_ranks_have_room_for(base, capfd):
    """A rank without a row trains along; no row on any rank is an error."""
    folder, settings, _ = base
    few = settings | {"data": named(write_rows(folder / "few.jsonl", count=3)), "epochs": 1, "batch_size": 16}
    run(2, **(few | {"output": str(folder / "few")}))
    assert [tuple(sample) for _, _, rows in curve(folder / "few") for row in rows for sample in row]
    (folder / "empty.jsonl").write_text('{"question": "what", "answer": ""}\n' * 3)
    few |= {"data": str(folder / "empty.jsonl"), "output": str(folder / "none")}
    assert ended(start(2, **few)) == [2, 2]
    assert "no row can be trained on" in capfd.readouterr().err


@pytest.mark.slow
def test_a_state_that_one_rank_cannot_read(base, monkeypatch, capfd):
    """All ranks pass it over together, and go on from the one before."""
    folder, settings, expected = base
    settings = settings | {"steps": 4, "save_every": 2, "keep": 2, "output": str(folder / "unread")}
    run(2, **settings)
    load = torch.load

    def broken(path, *arguments, **more):
        if os.environ.get("RANK") == "1" and "step-00000004" in str(path):
            raise OSError(5, "Input/output error")
        return load(path, *arguments, **more)

    monkeypatch.setattr(torch, "load", broken)
    run(2, **settings)
    assert capfd.readouterr().err.count("step-00000004 cannot be read and is skipped") == 1
    same(expected[:4], curve(folder / "unread"))


# ------------------------------------------------------------------------ in the ways that train.py offers
WAYS = {
    "lora": {"lora_rank": 2, "lr": 1e-2},
    "int4": {"lora_rank": 2, "lr": 1e-2, "weights": "int4"},
    "muon": {"muon": "language", "ema": 0.9},
}


def close(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # One vector added to all keys changes no attention: such a bias has a gradient of rounding alone, and
        # AdamW makes whole steps of it.
        atol = 1e-3 if name.endswith("k_proj.bias") else 1e-5
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "parallel"), [("lora", "fsdp"), ("int4", "fsdp"), ("int4", "ddp"), ("muon", "ddp")]
)
def test_two_ranks_are_as_one(base, way, parallel, tmp_path):
    """On rows of which most have no image, resumed from a state."""
    rows = named(write_rows(tmp_path / "rows.jsonl", every=12))
    settings = base[1] | WAYS[way] | {"data": rows, "micro_batch_size": 1, "steps": 5}
    train.main(flags(**(settings | {"output": str(tmp_path / "one")})))
    settings |= {"output": str(tmp_path / "two"), "parallel": parallel}
    run(2, **(settings | {"steps": 4, "save_every": 3, "keep": 2}))
    states = sorted((tmp_path / "two" / "state").iterdir())
    assert [state.name for state in states] == ["step-00000003", "step-00000004"]
    shutil.rmtree(states[1])
    run(2, **settings)
    same(curve(tmp_path / "one"), curve(tmp_path / "two"))
    close(tmp_path / "one", tmp_path / "two")


def test_why_a_rank_leaves(monkeypatch):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port())}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ranks = Ranks(torch.device("cpu"))
    try:
        assert ranks.reason(ValueError("no such column")) == "rank 0 of 1: no such column"
        with pytest.raises(LostRankError, match="another rank has left"), ranks.watching():
            raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
        with pytest.raises(RuntimeError, match="shapes"), ranks.watching():
            raise RuntimeError("shapes cannot be multiplied")
    finally:
        ranks.close()


@pytest.mark.slow
def test_two_ranks_share_the_questions_of_rows(base):
    """Which are scored by exact match, for want of a metric; of a model in shards the first answers alone."""
    folder, settings, _ = base
    settings = settings | {"eval_data": named(folder / "rows.jsonl"), "eval_questions": 9, "eval_samples": 2}
    settings |= {"eval_every": 2, "steps": 2, "eval_pictures": 16}
    train.main(flags(**(settings | {"output": str(folder / "asked")})))
    (one,) = metrics(folder / "asked", "eval_exact_match")
    assert one["eval_exact_match_n"] == one["eval_cut_off_n"] == 9
    output, path = folder / "asked-fsdp", Path("samples/step-00000002/answers.jsonl")
    run(2, **(settings | {"output": str(output), "parallel": "fsdp"}))
    (two,) = metrics(output, "eval_exact_match")
    assert (output / path).read_text() == (folder / "asked" / path).read_text()
    names = [name for name in one if name.startswith(("eval_exact", "eval_cut", "eval_loss_n"))]
    assert len(names) == 7 and [one[name] for name in names] == [two[name] for name in names]
