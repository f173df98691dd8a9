"""A run on plain drawings: its settings, its two stages, its plan, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import train
from data.new_processor import SPECIAL_TOKENS
from models.checkpoints.files import WEIGHTS
from recipes.shapes import training as recipe
from recipes.shapes.settings import ShapesConfig
from recipes.shapes.training import ShapesTask
from tests.runs import SMALL_SHAPES, flags, metrics, refused, run, shapes_processor
from training.config import parse_arguments, write_run

RECIPE = str(Path(__file__).resolve().parent.parent / "shapes.yaml")
PARTS = {"dense_loss", "patch_kind", "patch_count", "loss", "noun_loss", "pair_loss", "grad_norm"}


def parse(arguments: str = "") -> Any:
    return parse_arguments([RECIPE, *arguments.split()])[0]


def test_the_recipe_holds_the_defaults_and_comes_back(tmp_path):
    assert parse() == ShapesConfig()
    write_run(parse("--seed 5"), tmp_path)
    assert parse_arguments([str(tmp_path / "run.yaml")])[0] == parse("--seed 5")


def test_numbers_at_their_bounds():
    config = parse("--vision-lr 0 --vision-pictures 0")
    assert config.vision_steps == 0 and config.rates["vision_model"] == 0
    assert parse(f"--vocab-size {len(SPECIAL_TOKENS) + 256}").vocab_size == 299
    assert parse("--pictures 0 --steps 7").total_steps == 7
    ShapesConfig(init_from="x", scale_factor=3)  # a checkpoint brings its own sizes


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--image-size 10", "--patch-size 8"),
        ("--image-size 512 --patch-size 4", "--patch-size"),
        ("--scale-factor 3", "--scale-factor"),
        ("--text-heads 7", "--text-kv-heads 2"),
        ("--text-width 18", "--text-heads"),
        ("--vision-lr 0", "--vision-pictures 0"),
        ("--parallel fsdp", "--parallel"),
        ("--eval-questions 100000", "--eval-questions"),
        ("--eval-metric exact_match", "--eval-metric"),
        ("--task rewards", "--task"),
        # Flags without an effect:
        *(
            ("--init-from x --scale-factor 1", "--scale-factor"),
            ("--init-from x --vocab-size 999", "--vocab"),
        ),
        *(("--muon none --vision-matrix-lr 1", "--vision-matrix-lr"), ("--packing-buffer 9", "--packing-b")),
        ("--vision-pictures 0 --vision-batch-size 64", "--vision-batch-size"),
    ],
)
def test_what_is_refused(arguments, named, capsys):
    assert named in refused(capsys, [RECIPE, *arguments.split()], parse_arguments)


@pytest.mark.parametrize("decay", [1.0, 0.35])
def test_each_stage_warms_up(decay):
    """And the decay is that of the whole run."""

    def rates(steps: int, first: int) -> list[tuple[float, float]]:
        task, found = object.__new__(ShapesTask), []
        task.config = ShapesConfig(warmup_steps=10, decay_fraction=decay, vision_matrix_lr=5.0)
        task.steps, task.answers_after = steps, first
        plain = torch.optim.SGD([{"params": [torch.zeros(1)], "peak": 1.0}])
        muon = recipe.Muon([{"params": [torch.zeros(1, 1)], "peak": 2.0}], 2.0)
        for step in range(steps):
            task.set_rates([plain, muon], step)
            found.append((plain.param_groups[0]["lr"], muon.param_groups[0]["lr"]))
        return found

    found = rates(100, 40)
    assert found[9] == found[39] == (1.0, 5.0) and found[49] == (1.0, 2.0) and found[40] == (0.1, 0.2)
    falls = next(step for step in range(50, 100) if found[step][0] < 1)
    assert falls == (66 if decay < 1 else 51) and found[-1][0] < 0.01
    short = rates(12, 8)
    assert short[3][0] == short[9][0] == 1.0


@pytest.mark.slow
def test_end_to_end_and_evaluations_change_nothing(tmp_path, monkeypatch):
    """Two stages. The weights are the same to the bit, however often the model was evaluated."""
    monkeypatch.setattr(recipe, "build_processor", shapes_processor)
    often, never = tmp_path / "often", tmp_path / "never"
    train.main([RECIPE, *flags(**SMALL_SHAPES | {"eval_every": 1}, output=str(often))])
    rows = metrics(often)
    steps = [row for row in rows if "dense_loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert ["loss" in row for row in steps] == [False] * 3 + [True] * 3
    scores = [row["eval_accuracy"] for row in rows if "eval_accuracy" in row]
    assert len(scores) == 3 and all(0 <= score <= 1 for score in scores)  # of the second stage
    AutoModelForImageTextToText.from_pretrained(often)
    assert (often / "best").exists()

    none = {"eval_questions": 0, "eval_pictures": 0, "eval_every": 1000, "eval_samples": 3}
    train.main([RECIPE, *flags(**SMALL_SHAPES | none, output=str(never))])
    assert not (never / "best").exists()
    (kept,) = (never / "samples").iterdir()
    answers = [json.loads(line) for line in (kept / "answers.jsonl").read_text().splitlines()]
    assert kept.name == "step-00000006"
    assert [row["pictures"] for row in answers] == [["00.png"], ["01.png"], ["02.png"]]
    weights = [load_file(folder / WEIGHTS) for folder in (often, never)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.slow
def test_two_ranks(tmp_path, monkeypatch):
    """Each part of the loss is divided by what all ranks have of it."""
    monkeypatch.setattr(recipe, "build_processor", shapes_processor)
    settings = SMALL_SHAPES | {"batch_size": 4, "pictures": 24, "eval_every": 1000, "steps": 0}
    settings |= {"sequence_length": 256, "lr": 1e-3}
    for ranks in (1, 2):
        run(ranks, RECIPE, **(settings | {"output": str(tmp_path / str(ranks))}))
    rows = [metrics(tmp_path / ranks) for ranks in "12"]
    for one, two in zip(*rows, strict=True):
        assert one["step"] == two["step"] and one.keys() == two.keys()
        for name in one.keys() & PARTS:
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=2e-5), (one["step"], name)
    assert len(rows[0]) == 7 and rows[0][5].keys() > PARTS


@pytest.mark.slow
def test_its_plan():
    config, options = parse_arguments([RECIPE, "--plan", "--plan-tflops", "0.1"])
    lines = ShapesTask.describe_plan(config, options).splitlines()
    alone = config.vision_steps
    for name, number in (("all", 3_075_392), ("steps", alone), ("steps", config.total_steps - alone)):
        assert f"  {name:<22}{number:>16,}" in lines
    assert any("0.33 GiB" in line for line in lines) and "0.33 GiB" in Path(RECIPE).read_text()
