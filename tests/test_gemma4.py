"""Gemma 4: of a checkpoint Ocelli computes what transformers does."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Gemma4ForConditionalGeneration
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from data.processor import Processor
from families.gemma4_images import _TOKENS, Gemma4Images
from generation.fast.native.step import NativeStep
from models import VisionLanguageModel
from models.checkpoints.files import CheckpointError
from models.checkpoints.load import read_config
from tests.gemma4_checkpoints import hf_config, image_settings, save_hf, transformers_inputs
from tests.processors import seen, user

BATCH = [
    user(seen((100, 60)), "how many red squares"),
    user("are there two"),
    user(seen((90, 200)), "and", seen((64, 64), 1), "circles are there"),
]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("seed", range(5))
def test_logits_and_answers_are_those_of_transformers(seed, tmp_path):
    """Windows shorter than the prompts, layers that read the keys of others, numbers for each layer."""
    theirs = save_hf(tmp_path, seed)
    ours = VisionLanguageModel.from_pretrained(tmp_path)
    processor = Processor.from_pretrained(tmp_path, ours.config)
    inputs = processor.prepare(BATCH)
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    given = {"input_ids": ids, "attention_mask": inputs["attention_mask"]}
    given["mm_token_type_ids"] = (ids == ours.config.image_token_id).int()
    given |= transformers_inputs(inputs["pixel_values"].to("cpu", torch.float32), ours.config.vision)
    expected = theirs(**given).logits[real]
    assert (ours(**inputs).logits[real] - expected).abs().max() <= 1e-4 * expected.std()
    answers = theirs.generate(**given, max_new_tokens=10, do_sample=False, eos_token_id=None)
    ways = ({}, {"use_cache": False}, {"prefill_chunk": 7})
    step = NativeStep(ours.language_model) if shutil.which("gcc") else None  # then saved from where it reads
    for how in (*ways, {"decode_step": step}, {"decode_step": step, "prefill_chunk": 7}):
        got = ours.generate(**inputs, max_new_tokens=10, stop_token_ids=[], **how)
        assert torch.equal(got, answers[:, ids.shape[1] :]), how
    if seed < 2:
        ours.save_pretrained(tmp_path / "saved", processor)
        again = Gemma4ForConditionalGeneration.from_pretrained(tmp_path / "saved")
        assert torch.equal(again(**given).logits[real], expected)
        opened = VisionLanguageModel.from_pretrained(tmp_path / "saved")
        same = Processor.from_pretrained(tmp_path / "saved", opened.config)
        assert opened.config == ours.config and same.images.budget == processor.images.budget


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [70, 280])
def test_images_are_those_of_transformers_processor(tokens):
    settings = image_settings(tokens)
    ours, theirs = Gemma4Images(settings, _TOKENS), Gemma4ImageProcessorPil(**settings)
    draw = np.random.default_rng(tokens)
    sizes = [(1, 1), (3, 700), (900, 4), (12, 12), *draw.integers(5, 900, (60, 2)).tolist()]
    for width, height in sizes:
        image = Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))
        expected, visual = theirs(image, return_tensors="pt"), ours.cut(image)
        (pixels,) = visual.parts.to("cpu", torch.float32)
        assert visual.positions == expected["num_soft_tokens_per_image"][0]
        size = settings["patch_size"]
        rows, columns = (side // size for side in pixels.shape[1:])
        cut = pixels.unflatten(2, (columns, size)).unflatten(1, (rows, size)).permute(1, 3, 2, 4, 0)
        theirs_of_it = expected["pixel_values"][0, : rows * columns].float()
        assert torch.equal(cut.reshape(rows * columns, -1), theirs_of_it), (width, height)
        assert ours.prompt(visual, 0, 1).count("<|image|>") == visual.positions


@pytest.mark.parametrize(
    "changed",
    [
        {"use_bidirectional_attention": "vision"},
        {"enable_moe_block": True},
        {"attention_k_eq_v": True},
        {"num_kv_shared_layers": 4},
        {"layer_types": ["chunked_attention"]},
        {"layer_types": 7},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 5}}},
        {"sliding_window": 0},
    ],
    ids=str,
)
def test_what_is_not_here_is_refused(changed):
    config = json.loads(hf_config(0).to_json_string())
    config["text_config"] |= changed
    with pytest.raises(CheckpointError):
        read_config(config, "here")


@pytest.mark.slow
def test_what_no_training_changes_begins_as_in_transformers(tmp_path):
    """Bounds, and what scales and shifts: of a new model, and of one that is made anew from a checkpoint."""
    theirs = type(save_hf(tmp_path / "stored"))(hf_config())
    known = {
        name: value
        for name, value in theirs.state_dict().items()
        if name.endswith(("std_bias", "std_scale", "layer_scalar", "_min", "_max"))
    }
    assert len({name.rpartition(".")[2] for name in known}) == 7
    opened = VisionLanguageModel.from_pretrained(tmp_path / "stored")
    for model in (VisionLanguageModel(opened.config), opened):
        model.init_weights(torch.Generator().manual_seed(0))
        model.save_pretrained(tmp_path / "new")
        saved = type(theirs).from_pretrained(tmp_path / "new").state_dict()
        assert all(torch.equal(saved[name], value) for name, value in known.items())
