"""A tiny model, and prompts with images by their seeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from data.tiles import Part, Parts
from generation.kv_cache import Kept
from models.config import TextConfig, VisionConfig, VLMConfig
from models.gemma4_text import Gemma4TextConfig
from models.gemma4_vision import Gemma4VisionConfig
from models.language_model import ZeroCenteredRMSNorm
from models.packed_vision_transformer import PackedVisionConfig
from models.vision_language_model import VisionLanguageModel
from tests.tiny import IMAGE_ID, PAD_ID, VOCAB, randomize

PER_TILE, SIDE = 4, 16
TILE_BYTES = PER_TILE * 48 * 4  # of one tile's features
NO_STOP = {"stop_token_ids": ()}


def tiny_vlm(image_token_id: int = IMAGE_ID, family: str = "idefics3", **text) -> VisionLanguageModel:
    """Its placeholder may follow the vocabulary, as nanoVLM v0.1's does."""
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    if family.startswith("qwen"):
        kind = {"taps": (0,)} if text.get("qk_norm") else {"norm": "rms", "gated_mlp": True, "window": 4}
        kind = {} if family == "qwen3_5" else kind
        vision = PackedVisionConfig(**tower, patch_size=4, table_side=3 if text.get("qk_norm") else 0, **kind)
    elif family == "gemma4":
        vision = Gemma4VisionConfig(**tower, patch_size=4, merge_size=2, table_side=64)
    else:
        parts = {"class_token": True, "layer_scale": True, "last_norm": False}
        parts = parts if family == "internvl" else {}
        vision = VisionConfig(**tower, image_size=SIDE, patch_size=4, **parts)
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 400,
    }
    config = VLMConfig(
        vision=vision,
        text=(Gemma4TextConfig if family == "gemma4" else TextConfig)(**fields | text),
        family=family,
        image_token_id=image_token_id,
        eos_token_ids=(5,),
        pad_token_id=PAD_ID,
    )
    model = VisionLanguageModel(config).eval()
    randomize(model, seed=0)
    for module in model.modules():
        if isinstance(module, ZeroCenteredRMSNorm):
            module.weight.data -= 1
    with torch.no_grad():  # an answer must hold no placeholder: as history, it could not be asked about
        model.language_model.lm_head.weight[IMAGE_ID] = 0
    return model


def loss_of(model: VisionLanguageModel, labels: torch.Tensor, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(summed loss, number of labels) from the arguments of `forward`."""
    return model.summed_loss(model.hidden_states(**inputs)[0], labels)


def tile(seed: int) -> torch.Tensor:
    """(3, SIDE, SIDE) pixels."""
    return torch.randn(3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def words(seed: int, count: int) -> list[int]:
    return torch.randint(IMAGE_ID, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class ImageBlock(int):
    """A tile in a prompt, by its seed."""


def inputs_of(prompt: list[int]) -> dict:
    """Model inputs of a prompt: token ids, with an `ImageBlock` wherever a tile stands."""
    ids, seeds = [], [part for part in prompt if isinstance(part, ImageBlock)]
    for part in prompt:
        if not isinstance(part, ImageBlock):
            ids.append(part)
        else:
            ids += [IMAGE_ID] * PER_TILE
    inputs = {"input_ids": torch.tensor([ids])}
    if seeds:
        inputs["pixel_values"] = torch.stack([tile(seed) for seed in seeds])[None]
    return inputs


def packed(inputs: dict) -> dict:
    """The same with images of shapes of their own, of 4, 6 and 8 positions, in place of tiles."""
    ids, images, at = inputs["input_ids"][0].tolist(), list[Part](), 0
    for tile in inputs.get("pixel_values", torch.zeros(0, 0)).flatten(0, 1):
        height, width = ((16, 16), (24, 16), (16, 32))[int(1000 * abs(tile.flatten()[1])) % 3]
        images.append(Part(tile.repeat(1, 2, 2)[:, :height, :width], None))
        at, count = ids.index(IMAGE_ID, at), height * width // 64
        ids[at : at + PER_TILE] = [IMAGE_ID] * count
        at += count
    pixels = {"pixel_values": Parts(tuple(images))} if images else {}
    return inputs | {"input_ids": torch.tensor([ids])} | pixels


def keys(layers: int, heads: int, width: int) -> list[dict[str, Kept]]:
    """The layout of a cache of attention alone."""
    return [dict.fromkeys(("key", "value"), Kept(heads, width))] * layers


def length_of(prompt: list[int]) -> int:
    """Positions of a prompt."""
    return sum(PER_TILE if isinstance(part, ImageBlock) else 1 for part in prompt)


def some_rows(count: int) -> list[dict]:
    """Inputs of prompts of several lengths, some with an image."""
    prompts = [
        [*words(1, 5), ImageBlock(1), *words(2, 3)],
        words(3, 14),
        [ImageBlock(2), 7],
        [*words(4, 2), ImageBlock(1), ImageBlock(3), *words(5, 30)],
    ]
    return [inputs_of(prompt) for prompt in prompts[:count]]


def record(monkeypatch, model) -> tuple[list, list]:
    """What passes from now on: positions of each decoder pass, and tiles of each encoding."""
    passes, images = [], []
    forward, encode = model.language_model.forward, model.encode_images
    monkeypatch.setattr(
        model.language_model, "forward", lambda x, **k: passes.append(x.shape[1]) or forward(x, **k)
    )
    monkeypatch.setattr(
        model, "encode_images", lambda *a: images.append(a[0].numel() // (3 * SIDE**2)) or encode(*a)
    )
    return passes, images


@contextmanager
def count_reads() -> Iterator[list]:
    """What is read from the device inside, one entry for each time; `clear` it between counts."""
    reads: list = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__int__"):
            original = getattr(torch.Tensor, name)
            patch.setattr(
                torch.Tensor, name, lambda tensor, original=original: reads.append(1) or original(tensor)
            )
        yield reads
