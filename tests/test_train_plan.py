"""train.py --plan: recipes to plans with no download, against models that are really built."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train
from data.packing import Batch
from models.config import TextConfig, VLMConfig
from models.language_model import LanguageModel
from models.vision_language_model import VisionLanguageModel
from shapes.training import build_model, build_processor
from tests.runs import tiny_checkpoint
from training.config import TrainConfig
from training.devices import known_peak
from training.published import PUBLISHED
from training.recipe import parse_arguments
from training.run_plan import PlanOptions, network, plan_of
from training.throughput import amounts_of

CONFIGS = Path(__file__).parent.parent / "configs"
H100 = ["--plan", "--plan-device", "H100"]


def planned(*arguments: str):
    return plan_of(*parse_arguments(list(arguments)))


def built(shape: VLMConfig) -> int:
    """Parameters of the modules that train, counted."""
    with torch.device("meta"):
        return sum(p.numel() for p in VisionLanguageModel(shape).parameters())


# ------------------------------------------------------------------------------------------- the recipes
@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        # The towers as published, the projector, and a row for each added token.
        ("nanovlm-222m", 85_797_120 + 134_515_008 + 4 * 768 * 576 + 40 * 576),
        ("nanovlm-460m", 86_433_024 + 361_821_120 + 16 * 768 * 960 + 40 * 960),
        ("smolvlm-256m-finetune", 256_484_928),
        ("smolvlm-256m-lora", 256_484_928),
    ],
)
def test_recipes(recipe, parameters, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    train.main([str(CONFIGS / f"{recipe}.yaml"), *H100])
    text = capsys.readouterr().out
    config, options = parse_arguments([str(CONFIGS / f"{recipe}.yaml"), *H100])
    plan, _ = plan_of(config, options)
    assert text.startswith(plan.table()) and "assumed: a sample is" in text
    assert not (Path(config.output)).exists()
    adapters = plan.parameters.get("adapters", 0)
    assert sum(plan.parameters.values()) - adapters == built(network(config)[0]) == parameters
    assert plan.rows_per_step == config.batch_size
    if config.steps:
        assert plan.steps == config.steps and plan.hours > 0
    else:
        assert plan.steps is None and planned(str(CONFIGS / f"{recipe}.yaml"), "--plan-rows", "800")[0].steps


def test_the_shapes_world_is_the_model_that_is_built(capsys):
    config = parse_arguments([])[0]
    plan, (before, _) = planned("--plan-tflops", "0.1")
    model = build_model(config, build_processor(config).tokenizer)
    assert sum(plan.parameters.values()) == sum(p.numel() for p in model.parameters())
    assert model.generation_config == {"needs_image": True, "single_turn": True}
    assert plan.steps == config.shape_steps - config.vision_steps
    assert f"{config.vision_steps:,}" in before and "hours" in before
    # Rows of the image world are nearly full, and a question has a short answer.
    assert 0.9 < plan.tokens_per_step / plan.positions_per_step <= 1
    assert plan.workload.optimizer == "muon-all" and plan.workload.average
    matrices = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.dim() == 2 and (".layers." in name or "projector" in name)
    )
    assert plan.memory["optimizer state"] == 8 * sum(plan.parameters.values()) - 4 * matrices


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("SmolLM2-135M", 134_515_008), ("SmolLM2-360M", 361_821_120), ("SmolLM2-1.7B", 1_711_376_384)],
)
def test_published_backbones_have_their_published_sizes(name, parameters):
    stored = PUBLISHED[f"HuggingFaceTB/{name}"]
    known = {key: value for key, value in stored.items() if key in TextConfig.__dataclass_fields__}
    with torch.device("meta"):
        model = LanguageModel(TextConfig(**known), tie_word_embeddings=stored["tie_word_embeddings"])
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_the_page_shows_what_is_printed(capsys):
    page = (CONFIGS.parent / "docs/train.md").read_text(encoding="utf-8")
    plan, _ = planned(str(CONFIGS / "nanovlm-460m.yaml"), *H100, "--plan-ranks", "8")
    assert plan.table() in page


@pytest.mark.parametrize("recipe", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_say_what_they_need(recipe):
    """The memory in a recipe's comment is the plan's."""
    ranks = "8" if "460m" in recipe.stem else "1"
    plan, _ = planned(str(recipe), "--plan-tflops", "100", "--plan-ranks", ranks)
    size = plan.memory_bytes / 2**30
    assert f"{size:.2f} GiB" in recipe.read_text() or f"{size:.1f} GiB" in recipe.read_text(), size


# ------------------------------------------------------------------------------------------ local folders
def test_a_local_folder(tmp_path, capsys):
    tiny_checkpoint(tmp_path / "tiny")
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 30)
    rows = f"[{{path: {tmp_path}/rows.jsonl, allow_text_only: true}}]"
    source = ["--init-from", str(tmp_path / "tiny"), "--data", rows, "--epochs", "2"]
    arguments = [*source, "--sequence-length", "256", "--plan-text", "20", "--plan-device", "cpu"]
    model = VisionLanguageModel.from_pretrained(tmp_path / "tiny")
    plan, (note,) = planned(*arguments, "--plan-tflops", "1")
    assert sum(plan.parameters.values()) == sum(p.numel() for p in model.parameters())
    assert "1 tiles of 4 positions" in note
    assert plan.steps == -(-60 // plan.samples_per_step)  # two passes over 30 rows
    streamed = f"[{{path: '{tmp_path}/*.jsonl', streaming: true}}]"
    assert planned(*arguments, "--data", streamed, "--plan-tflops", "1")[0].steps == plan.steps
    # One sample a row without packing.
    assert planned(*arguments, "--no-packing", "--plan-tflops", "1")[0].samples_per_step == 16
    # Weights are not needed.
    (tmp_path / "tiny" / "model.safetensors").unlink()
    assert planned(*arguments, "--plan-tflops", "1")[0].parameters == plan.parameters


def test_tiles_follow_from_the_processor(tmp_path):
    tiny_checkpoint(tmp_path / "tiny")
    settings = json.loads((tmp_path / "tiny" / "preprocessor_config.json").read_text())
    settings |= {"do_image_splitting": True, "size": {"longest_edge": 128}}
    (tmp_path / "tiny" / "preprocessor_config.json").write_text(json.dumps(settings))
    config = TrainConfig(init_from=str(tmp_path / "tiny"), data="rows.jsonl", pictures=0, vision_pictures=0)
    _, (note,) = plan_of(config, PlanOptions(plan_text=9, plan_tflops=1))
    assert "a sample is 13 tiles" in note  # 4 x 3, and the whole image
    limited = plan_of(replace(config, max_tiles=13), PlanOptions(plan_text=9, plan_tflops=1))[0]
    assert limited.tiles_per_step == 13 * config.batch_size


# ---------------------------------------------------------------------------------------------- the flags
def test_ranks_adapters_and_frozen_parts():
    recipe = str(CONFIGS / "smolvlm-256m-lora.yaml")
    plan, _ = planned(recipe, *H100, "--plan-ranks", "4")
    work = plan.workload
    assert (work.world_size, work.distribution, work.micro_batch, work.accumulation) == (4, "ddp", 1, 2)
    assert work.peak_flops == known_peak("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989.4e12
    assert plan.trainable == {"adapters": plan.parameters["adapters"]}
    fewer, _ = planned(recipe, *H100, "--lora-targets", "q_proj,v_proj")
    assert fewer.parameters["adapters"] == 30 * 16 * (576 + 576 + 576 + 192)
    frozen, _ = planned(str(CONFIGS / "smolvlm-256m-finetune.yaml"), *H100, "--vision-lr", "0")
    assert "vision" not in frozen.trainable and "projector" in frozen.trainable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nanovlm-460m", "--text-from", "some/llm"], "knows the shapes of a few repositories only"),
        (["nanovlm-460m", "--text-from", "google/siglip-base-patch16-224"], "unsupported text backbone"),
        (["nanovlm-460m", "--plan-ranks", "3"], "expected a multiple of ranks x micro_batch_size"),
        (["nanovlm-460m", "--plan-device", "abacus"], "--plan-device: expected auto, cpu, A10"),
        (["nanovlm-460m", "--plan-mfu", "40"], "--plan-mfu: expected more than 0, at most 1, got 40"),
        (["nanovlm-222m", "--plan-text", "5000"], "a sample of 1 tiles and 5000 tokens of text takes"),
        (["smolvlm-256m-lora", "--lora-targets", "qkv"], "--lora-targets: expected q_proj"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        train.main([str(CONFIGS / f"{arguments[0]}.yaml"), *arguments[1:], "--plan"])
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1
    assert said.startswith("train.py: error: ") and message in said


def test_an_architecture_that_is_not_supported(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(SystemExit):
        train.main(["--init-from", str(tmp_path), "--data", "rows.jsonl", "--plan"])
    assert "unsupported architecture (model_type 'bert')" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- the amounts
def test_amounts_of_a_batch():
    """Two documents of 3 and 2 positions, and a prefix of 2 that two branches of 1 and 3 see."""
    documents = torch.tensor([[1, 1, 1, 2, 2, -1], [0, 0, 1, 2, 2, 2]])
    labels = torch.full_like(documents, -100)
    labels[0, 2] = labels[1, 4] = 7
    batch = Batch(segment_ids=documents, labels=labels, pixel_values=torch.zeros(3, 3, 2, 2))
    amounts = amounts_of(batch)
    assert (amounts.tiles, amounts.positions, amounts.labelled) == (3, 11, 2)
    assert amounts.pairs == (9 + 4) + (4 + 1 + 2 + 9 + 6)
    assert amounts_of(Batch(segment_ids=documents * 0 - 1, labels=labels)).positions == 0
