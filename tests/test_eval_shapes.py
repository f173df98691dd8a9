"""eval/shapes.py as a command: a device, and one sentence for what is missing."""

from __future__ import annotations

import pytest

from eval import shapes


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
