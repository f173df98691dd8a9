"""A release of the embedded model: small weights, and a card with their measured scores."""

from __future__ import annotations

import json

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from eval.card import read_results
from eval.tasks import DEFAULT_MODEL
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
