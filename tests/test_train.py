"""train.py from end to end: rows and shapes, freezing, adapters, what is refused, and what ends a run."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import train
from tests.runs import curve, flags, metrics, prepared, refused, settings_in
from training.config import parse_config
from training.distributed import is_out_of_memory
from training.state import FOLDER, states

# Three steps of each stage on shapes.
SMALL = {
    "device": "cpu",
    "threads": 1,
    "workers": 0,
    "pictures": 18,
    "vision_pictures": 12,
    "vision_batch_size": 4,
    "batch_size": 2,
    "log_every": 1,
    "eval_every": 3,
    "eval_pictures": 2,
    "eval_questions": 10,
    "save_every": 4,
    "vision_layers": 1,
    "text_layers": 2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("train"), rows=12)


def settings(base, output: str, **more) -> list[str]:
    return flags(**(settings_in(base, output, batch_size=4, steps=3) | more))


def test_bad_data_and_models(base, capsys):
    (base / "columns.jsonl").write_text('{"prompt": "a", "reply": "b"}\n')
    (base / "empty.jsonl").write_text("")
    (base / "other").mkdir()
    (base / "other" / "config.json").write_text('{"model_type": "bert"}')
    for change, named in (
        ({"data": str(base / "columns.jsonl")}, "reply"),
        ({"data": str(base / "empty.jsonl")}, "no rows"),
        ({"data": str(base / "nowhere.jsonl")}, "nowhere.jsonl"),
        ({"output": "rows.jsonl/run"}, "rows.jsonl"),
        ({"sequence_length": 4096}, "--sequence-length"),
        ({"tracker": "trackio"}, "not installed"),
        ({"init_from": str(base / "other")}, "bert"),
        ({"eval_metric": "exact_mach", "eval_data": str(base / "rows.jsonl")}, "exact_match"),
    ):
        assert named in refused(capsys, settings(base, **({"output": "bad"} | change))), change
    short = flags(**(SMALL | {"sequence_length": 64, "output": str(base / "short")}))
    assert "--sequence-length: expected more than the 70" in refused(capsys, short)


# ------------------------------------------------------------------------------------ what ends a run
def test_a_gradient_that_is_not_finite(base, capsys, monkeypatch):
    def broken(self, step, *rest):
        found = backward(self, step, *rest)
        if step == 1:
            next(p for p in self.task.module.parameters() if p.grad is not None).grad.fill_(float("nan"))
        return found

    backward = train.Run.backward
    monkeypatch.setattr(train.Run, "backward", broken)
    said = refused(capsys, settings(base, "nan"))
    assert "step 1" in said and "nan" in said and "rows " in said
    train.main(settings(base, "skipped", max_skipped=1))
    assert len(curve(base / "skipped")) == 3
    weights = load_file(base / "skipped" / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
        RuntimeError("unable to mmap 8 bytes from file <x>: Cannot allocate memory (12)"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_what_counts_as_too_little_memory(error):
    assert is_out_of_memory(error) and not is_out_of_memory(RuntimeError("expected a matrix"))


def test_too_little_memory(base, capsys, monkeypatch):
    """Said with what to lower; an error of ours is not taken for it."""
    monkeypatch.setattr(train.Run, "backward", lambda *_: torch.empty(2**60, dtype=torch.uint8))
    said = refused(capsys, settings(base, "full"))
    assert "out of memory" in said and "--micro-batch-size" in said
    monkeypatch.setattr(train.Run, "backward", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        train.main(settings(base, "full"))


# ------------------------------------------------------------------------------------------------- rows
def test_rate_0_freezes(base):
    more = {"vision_lr": 0.0, "projector_lr": 0.0, "activation_checkpointing": True}
    train.main(settings(base, "frozen", max_tiles=3, **more))
    before, after = (load_file(base / name / "model.safetensors") for name in ("tiny", "frozen"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("text_model" in name or "lm_head" in name for name in changed)
    config = parse_config([str(base / "frozen" / "run.yaml")])  # the resolved settings are a recipe
    assert config.max_tiles == 3 and config.init_from == str(base / "tiny")


def test_data_that_end_early_are_evaluated_too(base):
    """After the last step of a run with fewer than asked for: its line, scores, and a card that has them."""
    more = {"steps": 1000, "epochs": 1, "save_every": 1, "log_every": 100, "eval_every": 100}
    more |= {"packing": False, "eval_metric": "exact_match", "eval_questions": 6}
    train.main(settings(base, "early", eval_data=str(base / "rows.jsonl"), **more))
    logged, scores = metrics(base / "early")
    assert (
        logged["step"] == scores["step"] > 1
        and logged["loss"] > 0
        and scores["eval_loss"] > 0 <= scores["eval_accuracy"]
    )
    assert f"{scores['eval_loss']:.3f}" in (base / "early" / "README.md").read_text()
    assert states(base / "early" / FOLDER)[-1].name == f"step-{logged['step']:08d}"


def test_a_run_shorter_than_log_every_shows_its_loss(base, capsys):
    train.main(settings(base, "short", steps=3, log_every=20, eval_every=1))
    (row,) = metrics(base / "short")
    assert row["step"] == 3 and row["loss"] > 0
    said = capsys.readouterr().out
    assert "could not be written" not in said and (base / "short" / "plot.svg").exists()
    assert "--eval-data" in said and "best/" in said  # without scores no model is the best


def test_adapters(base):
    """Saved as a standard adapter that opens on the transformers model, and merged beside it."""
    train.main(settings(base, "lora", lora_rank=4, lora_alpha=8.0, lr=1e-2, steps=4))
    start = AutoModelForImageTextToText.from_pretrained(base / "tiny").eval()
    merged = AutoModelForImageTextToText.from_pretrained(base / "lora").eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        plain, expected = start(input_ids=ids).logits, merged(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(start, base / "lora" / "adapter").eval()
        torch.testing.assert_close(adapted(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert (plain - expected).abs().max() > 1e-3


# ----------------------------------------------------------------------------------------------- shapes
def test_shapes_end_to_end_and_evaluations_change_nothing(tmp_path, capsys):
    """Two stages. The weights are the same to the bit, however often the model was evaluated."""
    often, never = tmp_path / "often", tmp_path / "never"
    train.main(flags(**SMALL | {"eval_every": 1}, output=str(often)))
    rows = metrics(often)
    steps = [row for row in rows if "dense_loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert ["loss" in row for row in steps] == [False] * 3 + [True] * 3
    assert [row["pictures"] for row in steps] == [4, 8, 12, 14, 16, 18]
    scores = [row["eval_accuracy"] for row in rows if "eval_accuracy" in row]
    assert len(scores) == 3 and all(0 <= score <= 1 for score in scores)  # of the second stage
    AutoModelForImageTextToText.from_pretrained(often)
    assert (often / "best").exists() and "best/" not in capsys.readouterr().out

    none = {"eval_questions": 0, "eval_pictures": 0, "eval_every": 1000, "eval_samples": 3}
    train.main(flags(**SMALL | none, output=str(never)))
    said = capsys.readouterr().out
    assert "--eval-questions 0" in said and "best/" in said and not (never / "best").exists()
    (kept,) = (never / "samples").iterdir()
    answers = [json.loads(line) for line in (kept / "answers.jsonl").read_text().splitlines()]
    assert kept.name == "step-00000006" and [row["pictures"] for row in answers] == [
        ["00.png"],
        ["01.png"],
        ["02.png"],
    ]
    assert all((kept / row["pictures"][0]).exists() and row["question"] and row["target"] for row in answers)
    weights = [load_file(folder / "model.safetensors") for folder in (often, never)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
