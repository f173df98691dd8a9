"""eval/release.py: small weights, and a card with what they were measured to do."""

from __future__ import annotations

import json

from huggingface_hub import ModelCard

from eval import release
from eval.card import read_results
from eval.tasks import DEFAULT_MODEL


def test_release_writes_small_weights_and_their_table(tmp_path):
    folder = tmp_path / "small"
    assert release.main([str(DEFAULT_MODEL), str(folder), "--questions", "20"]) == 0
    config, results = json.loads((folder / "config.json").read_text()), read_results(folder)
    card = ModelCard.load(folder / "README.md")
    assert config["dtype"] == "bfloat16" and "| **overall** |" in card.text
    (index,) = card.data.eval_results
    assert index.metric_value == round(results["score"], 6) and index.metric_args["n"] == results["n"] == 20
    assert f"{results['score']:.1%}" in card.text and card.data.model_name == "small"
    assert release.training_data(folder) == release.training_data(DEFAULT_MODEL) != "Not stated."


def test_release_of_nothing_is_one_sentence(tmp_path, capsys):
    assert release.main([str(tmp_path / "none"), str(tmp_path / "small")]) == 2
    assert capsys.readouterr().err.startswith("eval.release: error: ")
