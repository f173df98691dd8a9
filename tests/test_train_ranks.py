"""The same loss curve whatever the micro-batches and ranks; shards open on any number of ranks."""

from __future__ import annotations

import json

import pytest

import train
from eval.tasks import DEFAULT_MODEL
from tests.runs import SETTINGS, curve, flags, run, tiny_checkpoint, write_rows


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    settings = {
        "init_from": str(tiny_checkpoint(folder / "tiny")),
        "data": str(write_rows(folder / "r.jsonl")),
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
