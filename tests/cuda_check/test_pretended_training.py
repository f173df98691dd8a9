"""What a step of training waits for and copies: on a pretended device, in bfloat16, as a recipe trains."""

from __future__ import annotations

import json

import pytest

import train
from data import packing
from eval.tasks import DEFAULT_MODEL
from tests.cuda_check.pretend import pretended
from tests.runs import SETTINGS, flags, named, write_rows


@pytest.fixture(autouse=True)
def without(monkeypatch):
    # flex_attention has no kernel here: the same mask, dense.
    monkeypatch.setattr(packing, "block_mask", packing.dense_mask)


@pytest.mark.parametrize("more", [{"muon": "all", "ema": 0.9}, {"lora_rank": 2}], ids=str)
def test_a_step_waits_for_the_end_of_the_one_before_and_for_nothing_else(more, tmp_path):
    """Of two micro-batches. What the last one logs, evaluates and saves is left out."""
    rows, seen = named(write_rows(tmp_path / "rows.jsonl")), []
    settings = SETTINGS | {"device": "cuda", "micro_batch_size": 4, "log_every": 100, "sequence_length": 256}
    for steps in (2, 5):
        output = tmp_path / str(steps)
        settings |= {"init_from": str(DEFAULT_MODEL), "data": rows, "steps": steps, "output": str(output)}
        with pretended() as device:
            train.main(flags(**settings | more))
        assert json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])["loss"] > 0
        seen.append(device)
    few, many = seen
    assert not many.syncs - few.syncs and not many.pageable - few.pageable
    assert many.waits.total() - few.waits.total() == 3
