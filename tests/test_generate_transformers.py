"""Greedy tokens against transformers' `generate`, on every config of tests/tiny.py, alone and batched."""

import functools
import tempfile

import pytest
import torch

from models.vision_language_model import VisionLanguageModel
from tests import tiny

ROWS = ((1,), (), (2, 1), (1, 1))  # tiles of each image of each row of the ragged batch
NEW = 32


@functools.cache
def models(name: str):
    """(transformers' model, ours from the checkpoint it writes)."""
    theirs = tiny.hf_model(name)
    with tempfile.TemporaryDirectory() as folder:
        ours = VisionLanguageModel.from_pretrained(tiny.save(theirs, folder), dtype="float32")
    return theirs, ours


@torch.no_grad()
def transformers_tokens(model, inputs: dict, **options) -> torch.Tensor:
    new = model.generate(**inputs, do_sample=False, max_new_tokens=NEW, pad_token_id=tiny.PAD_ID, **options)
    return new[:, inputs["input_ids"].shape[1] :]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", tiny.CASES)
def test_one_prompt(name):
    theirs, ours = models(name)
    inputs = tiny.make_inputs(tiny.CASES[name])
    penalty = {"repetition_penalty": 1.5}  # tied random models repeat themselves without one
    expected = transformers_tokens(theirs, inputs, eos_token_id=None, **penalty)
    got = ours.generate(**inputs, max_new_tokens=NEW, stop_token_ids=(), **penalty)
    assert expected.shape == (1, NEW) and torch.equal(got, expected) and len(expected.unique()) > 12


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.CASES)
def test_ragged_batch_of_four(name):
    theirs, ours = models(name)
    inputs = tiny.make_inputs(tiny.CASES[name], ROWS)
    expected = transformers_tokens(theirs, inputs, eos_token_id=None)
    got = ours.generate(**inputs, max_new_tokens=NEW, stop_token_ids=())
    assert torch.equal(got, expected)
    stops = got[:, 10].tolist()  # each row's 11th token stops whichever row says it first
    expected = transformers_tokens(theirs, inputs, eos_token_id=stops)
    assert torch.equal(ours.generate(**inputs, max_new_tokens=NEW, stop_token_ids=stops), expected)
