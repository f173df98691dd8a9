"""eval/shapes.py as a command: a device, and one sentence for what is missing."""

from __future__ import annotations

import json

import pytest

from eval import release, shapes
from eval.shapes import DEFAULT_MODEL


def test_it_scores_a_model_on_a_device(model_folder, capsys):
    assert shapes.main(["--model", str(model_folder), "--questions", "10", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "| **overall** |" in out and "on cpu" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "./nowhere"), "there is no folder ./nowhere"),
        (("--device", "toaster"), "device: expected auto, cpu, cuda, mps"),
    ],
)
def test_mistakes_end_in_one_sentence(capsys, arguments, sentence):
    assert shapes.main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert sentence in err and err.count("\n") == 1 and not out


def test_release_writes_small_weights_and_their_table(tmp_path):
    folder = tmp_path / "small"
    assert release.main([str(DEFAULT_MODEL), str(folder), "--questions", "20"]) == 0
    config = json.loads((folder / "config.json").read_text())
    card = (folder / "README.md").read_text()
    assert config["dtype"] == "bfloat16" and "| **overall** |" in card
    assert release.training_data(folder) == release.training_data(DEFAULT_MODEL) != "Not stated."


def test_release_of_nothing_is_one_sentence(tmp_path, capsys):
    assert release.main([str(tmp_path / "none"), str(tmp_path / "small")]) == 2
    assert capsys.readouterr().err.startswith("eval.release: error: ")
