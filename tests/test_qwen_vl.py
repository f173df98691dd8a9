"""Qwen2.5-VL and Qwen3-VL are transformers' own: towers, texts, places and pixels."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from families import qwen_vl
from models.checkpoints.weights import export_tensors
from models.packed_vision_transformer import patches_of

IMAGE = 299


def reference(kind: str, seed: int):
    """A small random model of transformers, with its config."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    head_dim = draw.choice([16, 32])
    of_axis = head_dim // 6
    rope = {"rope_type": "default", "rope_theta": 1e4}
    text = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 64 // head_dim,
        "num_key_value_heads": draw.choice([1, 2]),
        "max_position_embeddings": 512,
        "rope_parameters": rope | {"mrope_section": [head_dim // 2 - 2 * of_axis, of_axis, of_axis]},
    }
    vision = {"depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
    ids = {
        "image_token_id": IMAGE,
        "video_token_id": 296,
        "vision_start_token_id": 297,
        "vision_end_token_id": 298,
    }
    if kind == "qwen3_vl":
        text |= {"head_dim": head_dim}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
        config = Qwen3VLConfig(
            text_config=text, vision_config=vision, tie_word_embeddings=seed % 4 < 2, **ids
        )
        model = Qwen3VLForConditionalGeneration(config)
    else:
        vision |= {"fullatt_block_indexes": [1, 3], "window_size": 56}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
        model = Qwen2_5_VLForConditionalGeneration(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 0.5)
    return model.eval(), json.loads(config.to_json_string())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", qwen_vl.KINDS)
def test_logits_and_places_are_those_of_transformers(kind, seed):
    model, described = reference(kind, seed)
    assert qwen_vl.recognises(described)
    config = qwen_vl.read_config(described, {}, {})
    names = ("vision_model", "projector", "language_model")
    ours = nn.ModuleDict(dict(zip(names, qwen_vl.build(config), strict=True))).eval()
    stored = model.state_dict()
    place = qwen_vl.tensor_map(list(stored))
    wanted = {name: place(name) for name in ours.state_dict()}
    assert stored.keys() - {one.name for one in wanted.values()} <= {"lm_head.weight"}
    ours.load_state_dict({n: stored[one.name].chunk(one.parts)[one.part] for n, one in wanted.items()})
    written = export_tensors(ours.state_dict(), place)
    assert all(torch.equal(written[name], stored[name]) for name in written)

    draw = random.Random(seed)
    grids = [(draw.randint(1, 5), draw.randint(1, 6)) for _ in range(draw.randint(1, 3))]
    side, merge = config.vision.patch_size, config.vision.merge_size
    images = [torch.randn(3, merge * side * rows, merge * side * columns) for rows, columns in grids]
    ids = []
    for rows, columns in grids:
        ids += [
            *(draw.randrange(290) for _ in range(draw.randint(1, 9))),
            297,
            *[IMAGE] * (rows * columns),
            298,
        ]
    ids = torch.tensor([[*ids, 1, 2, 3]])
    pixels = torch.cat([patches_of(image, config.vision) for image in images])
    pixels = pixels.view(-1, 3, 1, side**2).expand(-1, -1, 2, -1).flatten(1)
    grid = torch.tensor([[1, merge * rows, merge * columns] for rows, columns in grids])
    kinds = (ids == IMAGE).int()
    with torch.no_grad():
        expected = model(
            input_ids=ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=kinds
        ).logits
        sizes = iter([tuple(image.shape[1:]) for image in images])
        position_ids, offset = qwen_vl.places(config, ids[0].tolist(), sizes)
        of_transformers, delta = model.model.get_rope_index(ids, kinds, grid)
        assert torch.equal(position_ids, of_transformers[:, 0])
        assert offset == delta.item()
        features = ours["projector"](ours["vision_model"](images))
        x = ours["language_model"].embed_tokens(ids)
        x = nn.functional.pad(x, (0, features.shape[1] - x.shape[2]))
        x[ids == IMAGE] = features
        hidden, _ = ours["language_model"](x, position_ids=position_ids[:, None])
        got = ours["language_model"].logits(hidden)
        alone = torch.cat([ours["projector"](ours["vision_model"]([image])) for image in images])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(alone, features, atol=1e-5, rtol=1e-4)


def test_pixels_are_those_of_transformers():
    draw = random.Random(0)
    for index in range(60):
        patch, least = draw.choice([14, 16]), draw.choice([56 * 56, 65_536])
        most = max(least, draw.choice([50_000, 200_000, 1_003_520]))
        width, height = draw.randint(5, 900), draw.randint(5, 900)
        pixels = np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        settings = {"patch_size": patch, "size": {"shortest_edge": least, "longest_edge": most}}
        if patch == 16:
            settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        expected = Qwen2VLImageProcessorPil(**settings)(image, return_tensors="pt")
        images = qwen_vl.QwenImages(settings)
        visual = images.cut(image)
        assert visual.grid == images.plan(width, height).grid
        assert visual.parts.shape == images.plan(width, height).parts.shape
        tower = qwen_vl.PackedVisionConfig(patch_size=patch)
        patches = patches_of(visual.parts.to("cpu")[0], tower).view(-1, 3, 1, patch**2)
        assert torch.equal(patches.expand(-1, -1, 2, -1).flatten(1), expected["pixel_values"])
        assert expected["image_grid_thw"].tolist() == [[1, 2 * visual.grid[0], 2 * visual.grid[1]]]
