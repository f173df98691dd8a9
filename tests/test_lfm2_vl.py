"""LFM2-VL: of a checkpoint Ocelli computes what transformers does."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
)

from data.errors import ProcessorError
from data.processor import Processor
from data.tiles import Parts
from families import lfm2_vl
from families.lfm2_images import Lfm2Images
from generation.fast.network import DECODER, PACKED_TOWER
from inference.checkpoint import open_checkpoint
from models import VisionLanguageModel
from models.checkpoints.load import empty_model, meta_init, parameter_shapes
from tests.lfm2_checkpoints import SETTINGS, save_hf, tokenizer, transformers_inputs
from tests.maps import attention_maps
from tests.processors import draw_image, seen, user

BATCH = [
    user(seen((100, 60)), "how many red squares"),  # 2 x 1 tiles or more, and the image
    user("are there two"),
    user(seen((30, 20)), "and", seen((24, 24), 1), "circles are there"),
]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_logits_and_answers_are_those_of_transformers(seed, tmp_path):
    theirs = save_hf(tmp_path, seed)
    ours = VisionLanguageModel.from_pretrained(tmp_path)
    processor = Processor.from_pretrained(tmp_path, ours.config)
    # Padding has inputs there, where the convolution's projection has a bias: no row is then padded.
    inputs = processor.prepare(BATCH[2:] if ours.config.text.conv_bias else BATCH)
    given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    images = inputs["pixel_values"].to("cpu", torch.float32)
    given |= transformers_inputs(images, ours.config.vision.patch_size)
    real = inputs["attention_mask"].bool()
    expected = theirs(**given).logits[real]
    assert (ours(**inputs).logits[real] - expected).abs().max() <= 1e-4
    length = given["input_ids"].shape[1]
    answers = theirs.generate(**given, max_new_tokens=10, do_sample=False, eos_token_id=None)[:, length:]
    for how in ({}, {"use_cache": False}, {"prefill_chunk": 7}):
        assert torch.equal(ours.generate(**inputs, max_new_tokens=10, stop_token_ids=[], **how), answers), how
    if seed < 2:
        ours.save_pretrained(tmp_path / "saved", processor)
        again = Lfm2VlForConditionalGeneration.from_pretrained(tmp_path / "saved")
        assert torch.equal(again(**given).logits[real], expected)
        opened = VisionLanguageModel.from_pretrained(tmp_path / "saved")
        same = Processor.from_pretrained(tmp_path / "saved", opened.config)
        assert opened.config == ours.config and same.images.settings == processor.images.settings


@torch.no_grad()
def test_attention_is_transformers_and_lies_where_the_parts_do(tmp_path):
    """Tiles, and all of the image in its own shape; layers of convolutions have no attention to show."""
    theirs, answer = save_hf(tmp_path, seed=0), [7, 9, 20]
    checkpoint = open_checkpoint(tmp_path, device="cpu")
    theirs.set_attn_implementation("eager")
    for size in ((100, 60), (30, 20)):  # cut, and not
        image = draw_image(*size)
        (got,) = attention_maps(checkpoint, [image], "how many", answer).maps
        inputs = checkpoint.processor.ask(image, "how many")
        prompt, pixels = inputs["input_ids"].shape[1], inputs["pixel_values"].to("cpu", torch.float32)
        ids = torch.cat((inputs["input_ids"], torch.tensor([answer])), 1)
        given = transformers_inputs(pixels, checkpoint.model.config.vision.patch_size)
        layers = [one for one in theirs(ids, **given, output_attentions=True).attentions if one is not None]
        rows = torch.stack(layers)[:, 0, :, prompt - 1 : -1].mean((0, 1))
        rows = rows[:, ids[0] == checkpoint.model.config.image_token_id]
        visual = checkpoint.processor.cut(image)
        grids = [tuple(side // 8 for side in part.pixels.shape[1:]) for part in visual.parts]
        *tiles, whole = map(torch.Tensor.unflatten, rows.split([*map(math.prod, grids)], 1), [1] * 9, grids)
        high, wide = got.shape[1:]
        fine = whole.repeat_interleave(high, 1).repeat_interleave(wide, 2) / (high * wide)
        expected = fine.unflatten(2, (wide, -1)).unflatten(1, (high, -1)).sum((2, 4))
        if tiles:
            assert len(set(grids)) == 2
            assert visual.grid[0] == 1
            expected += torch.cat(tiles, 2)
        np.testing.assert_allclose(got, expected.numpy(), atol=1e-5)


def test_every_tensor_of_the_published_shapes_has_its_place():
    """LFM2-VL-450M's sizes."""
    kinds = [2, 5, 8, 10, 12, 14]
    text = {"model_type": "lfm2", "hidden_size": 1024, "intermediate_size": 6656, "num_hidden_layers": 16}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 8, "full_attn_idxs": kinds}
    described = Lfm2VlConfig(text_config=text, vision_config={"model_type": "siglip2_vision_model"})
    config = lfm2_vl.read_config(described.to_dict(), {}, {})
    shapes = parameter_shapes(empty_model(VisionLanguageModel, config))
    assert shapes["language_model.layers.2.self_attn.q_norm.weight"] == (64,)
    assert shapes["language_model.layers.3.conv.weight"] == (1024, 1, 3)
    assert shapes["language_model.layers.15.mlp.up_proj.weight"] == (4608, 1024)
    with meta_init():
        empty = VisionLanguageModel(config)
    assert PACKED_TOWER.unknown(empty.vision_model) is DECODER.unknown(empty.language_model) is None
    with torch.device("meta"):
        stored = Lfm2VlForConditionalGeneration(described).state_dict()
    place = lfm2_vl.tensor_map(list(stored))
    left = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    for name, shape in shapes.items():
        assert left.pop(place(name).name) == shape or name.endswith("lm_head.weight")
    assert all(lfm2_vl.IGNORABLE.fullmatch(name) for name in left)


@torch.no_grad()
def test_what_a_mask_hides_changes_nothing(tmp_path):
    theirs = save_hf(tmp_path, 0)
    model = VisionLanguageModel.from_pretrained(tmp_path)
    ids, mask = (
        torch.randint(250, (1, 12), generator=torch.Generator().manual_seed(0)),
        torch.ones(1, 12, dtype=torch.int64),
    )
    mask[0, 5:7] = 0
    other = ids.masked_fill(mask == 0, 7)
    real = mask.bool()
    expected = theirs(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1)).logits[real]
    for given in (ids, other):
        assert (model(given, attention_mask=mask).logits[real] - expected).abs().max() <= 1e-4
    with pytest.raises(ValueError, match="position_ids"):
        model(ids, attention_mask=torch.ones(1, 12, 12, dtype=torch.bool).tril())


PUBLISHED = {
    "downsample_factor": 2, "do_image_splitting": True, "encoder_patch_size": 16, "tile_size": 512,
    "min_tiles": 2, "max_tiles": 10, "min_image_tokens": 64, "max_image_tokens": 256, "max_num_patches": 1024,
    "max_pixels_tolerance": 2.0, "use_thumbnail": True, "do_resize": True, "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "resample": 2, "image_processor_type": "Lfm2VlImageProcessorFast",
}  # fmt: skip


def test_published_image_settings(tmp_path):
    save_hf(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PUBLISHED))
    images = Processor.from_pretrained(tmp_path).images
    planned = images.plan(4000, 3000)
    assert planned.grid == (2, 3) and len(planned.parts) == 7
    assert planned.positions == 6 * 16 * 16 + 18 * 13 and images.longest_side == 5120


def test_a_folder_of_2025_has_its_tiles_at_the_top_of_processor_config(tmp_path):
    """And an image processor of SigLIP2, which knows nothing of them."""
    save_hf(tmp_path)
    of_tiles = {"do_image_splitting", "downsample_factor", "encoder_patch_size", "max_image_tokens"}
    of_tiles |= {"max_pixels_tolerance", "max_tiles", "min_image_tokens", "min_tiles", "tile_size"}
    of_tiles |= {"use_thumbnail"}
    settings = PUBLISHED | SETTINGS | {"min_tiles": 3, "use_thumbnail": False}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    today = Processor.from_pretrained(tmp_path)
    older = {name: value for name, value in settings.items() if name not in of_tiles}
    older |= {"image_processor_type": "Siglip2ImageProcessor", "patch_size": 16, "max_num_patches": 256}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(older))
    at_the_top = {name: settings[name] for name in of_tiles if name in settings}
    at_the_top |= {"processor_class": "Lfm2VlProcessor", "image_token": "<image>"}
    (tmp_path / "processor_config.json").write_text(json.dumps(at_the_top))
    of_2025 = Processor.from_pretrained(tmp_path)
    assert of_2025.images.settings == today.images.settings
    assert of_2025.images.plan(90, 70).grid == today.images.plan(90, 70).grid != today.images.uncut


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"min_image_tokens": 32},
        {"use_thumbnail": False},
        {"do_image_splitting": False},
        {"max_tiles": 4, "tile_size": 256, "min_image_tokens": 16, "max_image_tokens": 64},
        {"min_tiles": 1, "resample": 3},
    ],
    ids=str,
)
def test_images_are_those_of_transformers_processor(changed):
    """Tiles, their pixels, and what stands in a prompt: tiny, huge, odd and very long images."""
    pytest.importorskip("torchvision")
    settings, draw = PUBLISHED | changed, random.Random(str(changed))
    ours, theirs = Lfm2Images(settings), Lfm2VlImageProcessor(**settings)
    processor = Lfm2VlProcessor(theirs, tokenizer(), chat_template="")
    sides = [range(1, 40), range(1, 40), range(30, 1800), range(30, 1800), range(500, 4000)]
    sizes = [tuple(map(draw.choice, draw.sample(sides, 2))) for _ in range(40)]
    for width, height in [(1024, 512), (513, 1023), (5000, 4001), *sizes]:
        image = Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8))
        expected, visual = theirs(image, return_tensors="pt", return_row_col_info=True), ours.cut(image)
        text = processor.replace_image_token(expected, 0, use_image_special_tokens=True, **settings)
        assert ours.prompt(visual, 0, 1) == text, (width, height)
        own = transformers_inputs([part for one in visual.parts for part in Parts((one,)).to("cpu")], 16)
        assert torch.equal(own["spatial_shapes"], expected["spatial_shapes"]), (width, height)
        given = expected["pixel_values"][:, : own["pixel_values"].shape[1]]  # without their padding
        apart = (own["pixel_values"] - given).abs().max()
        assert apart < 1e-6, (width, height)  # a level is 8e-3; they normalise in other steps


def test_older_spelling_and_missing_parts(tmp_path):
    save_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = VisionLanguageModel.from_pretrained(tmp_path).config
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "lfm2-vl"}))
    assert VisionLanguageModel.from_pretrained(tmp_path).config == expected
    assert Processor.from_pretrained(tmp_path, expected).images.image_token == "<image>"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace('"<image>"', '"<picture>"'))
    with pytest.raises(ProcessorError, match="<image>"):
        Processor.from_pretrained(tmp_path)
