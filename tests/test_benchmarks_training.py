"""benchmarks/training.py end to end on the tiny shape, in this process."""

from __future__ import annotations

import pytest

from benchmarks import training, training_steps

TRAINING = (
    "--documents",
    "4",
    "--row",
    "128",
    "--rounds",
    "2",
    "--steps",
    "1",
    "--workers",
    "0",
    "--batches",
    "2",
)


def test_training(run):
    result = run(training, *TRAINING)
    rows = {row["system"]: row for row in result["rows"]}
    assert rows.keys() == {"ours-packed", "ours-padded", "transformers", "loader"}
    trained = [rows[name] for name in training.TRAINERS]
    for row in trained:
        for name in ("labelled_tokens", "tokens", "tiles"):  # the same documents
            assert row[name] == rows["transformers"][name] and len(row[name]) == 2
        assert 0 < row["supervised_tokens_per_second"] < row["tokens_per_second"]
        assert row["mfu"] > 0 and row["peak_bytes"] > row["before_model_bytes"] * 0.5
        assert row["seconds_per_step"] > 0 and row["loader_workers_needed"] > 0
    assert rows["ours-packed"]["fill"] > rows["ours-padded"]["fill"] == rows["transformers"]["fill"]
    assert rows["ours-packed"]["speed_over"] > 0 and rows["ours-packed"]["memory_over"] > 0
    assert "speed_over" not in rows["transformers"]
    # Packed or padded, the same weights see the same documents.
    assert rows["ours-packed"]["loss"] == pytest.approx(rows["ours-padded"]["loss"], rel=1e-3)
    assert rows["loader"]["samples_per_second"] > 0
    assert result["hardware"]["peak_is"] == "measured" and result["hardware"]["peak_flops"] > 0


def test_training_in_bfloat16_with_a_peak_that_is_given(run):
    result = run(
        training,
        *TRAINING,
        "--quick",
        "--precision",
        "bfloat16",
        "--systems",
        "ours-packed",
        "--peak-flops",
        "1e12",
    )
    (row,) = result["rows"]
    assert row["precision"] == "bfloat16" and row["mfu"] == pytest.approx(row["flops_per_second"] / 1e12)
    assert result["hardware"]["peak_is"] == "given"


def test_training_documents_are_uneven_and_the_same_for_a_seed():
    made = training_steps.documents("tiny", 40, [1, 0], 512, seed=3)
    assert made == training_steps.documents("tiny", 40, [1, 0], 512, seed=3)
    lengths = sorted(sample.tokens for sample in made)
    assert lengths[0] < 60 and lengths[-1] > 300 and lengths[-1] <= 512
    assert [sample.tiles for sample in made] == [1, 0] * 20
    amounts = training_steps.amounts_of(made)
    assert amounts.positions == sum(lengths) and amounts.tiles == 20
    assert 0.2 < amounts.labelled / amounts.positions < 0.9
    packed = training_steps.packed_batches("tiny", made, 2, 512, 512)
    assert sum(batch.num_labels for batch in packed) == amounts.labelled
    assert sum((batch["segment_ids"] != -1).sum().item() for batch in packed) == amounts.positions
