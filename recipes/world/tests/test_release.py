"""A release of the embedded model: small weights, and a card with their measured scores."""

from __future__ import annotations

import json

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from data.processor import Processor
from eval.card import read_results
from eval.tasks import DEFAULT_MODEL
from models import VisionLanguageModel
from recipes.world import release

NORM = "model.text_model.norm.weight"


@pytest.mark.slow
def test_release_writes_small_weights_and_their_table(tmp_path, capsys):
    folder = tmp_path / "small"
    scaled = ["--questions", "10", "--temperature", "2"]
    assert release.main([str(DEFAULT_MODEL), str(folder), *scaled]) == 0
    before, after = (load_file(where / "model.safetensors") for where in (DEFAULT_MODEL, folder))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {NORM}
    assert torch.equal(2 * after[NORM], before[NORM])
    config, results = json.loads((folder / "config.json").read_text()), read_results(folder)
    card = ModelCard.load(folder / "README.md")
    assert config["dtype"] == "bfloat16" and "| **overall** |" in card.text
    (index,) = card.data.eval_results
    assert index.metric_value == round(results["score"], 6) and index.metric_args["n"] == results["n"] == 10
    assert f"{results['score']:.1%}" in card.text and card.data.model_name == "small"
    assert release.training_data(folder) == release.training_data(DEFAULT_MODEL) != "Not stated."
    assert release.main([str(tmp_path / "none"), str(tmp_path / "other")]) == 2
    assert "release: error: " in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_mixed_in_has_its_share(tmp_path, capsys):
    """Of two states of one model; what is the same in both stays, byte for byte."""
    model = VisionLanguageModel.from_pretrained(DEFAULT_MODEL, dtype="stored")
    weight = model.language_model.lm_head.weight
    weight.data.add_(1.0)
    model.save_pretrained(tmp_path / "other", Processor.from_pretrained(DEFAULT_MODEL, config=model.config))
    folders = [str(DEFAULT_MODEL), str(tmp_path / "mean"), "--questions", "10"]
    assert release.main([*folders, "--mix-in", f"0.25:{tmp_path / 'other'}"]) == 0
    before, after = (load_file(where / "model.safetensors") for where in (DEFAULT_MODEL, tmp_path / "mean"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"lm_head.weight"}
    moved = (after["lm_head.weight"].float() - before["lm_head.weight"].float()).mean()
    assert moved.item() == pytest.approx(0.25, abs=0.01)
    assert release.main([*folders, "--mix-in", f"1.5:{tmp_path / 'other'}"]) == 2
    assert "--mix-in" in capsys.readouterr().err
