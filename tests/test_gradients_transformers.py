"""Gradients of the training loss against those that transformers' own model and loss give."""

from __future__ import annotations

import pytest
import torch

from models import VisionLanguageModel
from models.checkpoints.save import written
from models.whole_rows import IGNORE_INDEX
from tests import tiny
from tests.prompts import loss_of

BAR = 1e-4  # of the largest number in each parameter's gradient
ROWS = ((2, 1), (), (3,))  # tiles of each image of each row; the second row is text alone
# A constant added to all keys of a query changes no softmax: what both compute here is rounding around zero.
ZERO = "vision_model.layers.{}.self_attn.k_proj.bias"


def batch_for(case: tiny.Case) -> dict[str, torch.Tensor]:
    """A padded batch with labels on every other text token, as a conversation has them."""
    inputs = tiny.make_inputs(case, rows=ROWS)
    ids = inputs["input_ids"]
    hidden = (ids == tiny.IMAGE_ID) | (inputs["attention_mask"] == 0) | (torch.arange(ids.shape[1]) % 2 == 0)
    first_real = inputs["attention_mask"].cumsum(1) == 1  # padding in front must not be asked to predict it
    return inputs | {"labels": ids.masked_fill(hidden | first_real, IGNORE_INDEX)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["idefics3-2-tiles-tied", "smolvlm-2-tiles", "idefics3-biases"])
def test_every_gradient_is_theirs(name, tmp_path):
    theirs = tiny.hf_model(name)
    ours = VisionLanguageModel.from_pretrained(tiny.save(theirs, tmp_path))
    batch = batch_for(tiny.CASES[name])
    for model in (theirs, ours):
        model.train()
        model.requires_grad_(True)

    expected_loss = theirs(**batch).loss
    expected_loss.backward()
    total, count = loss_of(ours, **batch)
    loss = total / count
    loss.backward()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)

    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    compared = 0
    _, places = written(ours.config)
    for name, parameter in ours.named_parameters():
        other = expected[places(name).name]
        scale = other.abs().max()
        if name in [ZERO.format(layer) for layer in range(2)]:
            scale = expected[places(name.replace("k_proj", "q_proj")).name].abs().max()
        assert scale > 0, name
        assert (parameter.grad - other).abs().max() <= BAR * scale, name
        compared += 1
    assert compared == len(expected)
