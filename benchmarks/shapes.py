"""Real shapes with random weights, and prompts for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from data.processor import Processor
from generation.fast.quantized import pack
from inference.checkpoint import Checkpoint, has_fast_bfloat16
from models.checkpoints.load import meta_init
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel, prepare_device

TEXT_TOKENS = 20  # of a prompt, besides its image: 84 tokens with one tile of 64, 1,108 with 17
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _vision(width: int, inner: int, layers: int, heads: int, image: int, patch: int) -> VisionConfig:
    return VisionConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        image_size=image,
        patch_size=patch,
    )


def _text(vocab: int, width: int, inner: int, layers: int, heads: int, kv_heads: int, **more) -> TextConfig:
    return TextConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **more,
    )


_BASE = _vision(768, 3072, 12, 12, 512, 16)
_LLAMA = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0}
_LARGE = {"max_position_embeddings": 16_384, "rms_norm_eps": 1e-5, "rope_theta": 273_768.0}
SHAPES = {
    "SmolVLM-256M": VLMConfig(_BASE, _text(49_280, 576, 1536, 30, 9, 3, **_LLAMA), 4, 49_190),
    "SmolVLM-500M": VLMConfig(_BASE, _text(49_280, 960, 2560, 32, 15, 5, **_LLAMA), 4, 49_190),
    "SmolVLM-2.2B": VLMConfig(
        _vision(1152, 4304, 27, 16, 384, 14), _text(49_155, 2048, 8192, 24, 32, 32, **_LARGE), 3, 49_153
    ),
    # What configs/nanovlm-*.yaml train.
    "nanoVLM-222M": VLMConfig(
        _vision(768, 3072, 12, 12, 224, 16),
        _text(49_152, 576, 1536, 30, 9, 3, **_LLAMA),
        scale_factor=2,
        image_token_id=49_151,
        tie_word_embeddings=True,
    ),
    "nanoVLM-460M": VLMConfig(
        _BASE,
        _text(49_152, 960, 2560, 32, 15, 5, **_LLAMA),
        scale_factor=4,
        image_token_id=49_151,
        tie_word_embeddings=True,
    ),
    # checkpoints/ocelli-shapes
    "ocelli-shapes": VLMConfig(
        _vision(160, 640, 6, 5, 128, 8), _text(1556, 224, 576, 6, 7, 1, max_position_embeddings=2048), 2, 5
    ),
    "tiny": VLMConfig(
        _vision(32, 64, 1, 2, 32, 8), _text(320, 64, 96, 2, 4, 2, max_position_embeddings=512), 2, 319
    ),
}


@torch.no_grad()
def fill(tensor: Tensor, std: float, start: int = 0) -> Tensor:
    """Overwrite with one long stretch of noise, repeated: as fast as a copy.

    Its length is a prime number, so that no two rows of a matrix become equal.
    """
    noise = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    noise = noise.to(tensor.device, tensor.dtype) * std
    flat, done, place = tensor.view(-1), 0, start % len(noise)
    while done < flat.numel():
        count = min(flat.numel() - done, len(noise) - place)
        flat[done : done + count] = noise[place : place + count]
        done, place = done + count, 0
    return tensor


def fill_weights(model: nn.Module, names: Sequence[str] | None = None) -> None:
    """Random matrices that keep activations near one, norms at one, biases at zero; the same every time.

    `names` are those of its parameters in the order in which ours has them; None for our own model.
    """
    parameters = dict(model.named_parameters())
    for index, name in enumerate(names or parameters):
        parameter = parameters[name]
        if parameter.dim() == 1:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
        else:
            fill(parameter.data, parameter[0].numel() ** -0.5, start=7919 * index)


def build_ours(shape: str, dtype: torch.dtype, device: str) -> VisionLanguageModel:
    """Our model of a shape, in eval mode, allocated once and in place."""
    prepare_device(device)
    with meta_init():
        model = VisionLanguageModel(SHAPES[shape])
    for name, parameter in list(model.named_parameters()):  # `to_empty` would import sympy: 35 MB
        owner, leaf = name.rsplit(".", 1)
        weight = torch.empty(parameter.shape, dtype=dtype, device=device)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(weight))
    if model.config.tie_word_embeddings:
        model.language_model.lm_head.weight = model.language_model.embed_tokens.weight
    fill_weights(model)
    return model.eval()


def build_precision(setup: dict, packed: bool) -> VisionLanguageModel:
    """Our model in the setup's shape and precision, on its device.

    Args:
        packed: on a CPU without fast arithmetic in bfloat16, keep the weights in it and compute in float32.
    """
    precision, device = setup["precision"], setup["device"]
    plain = device == "cuda" or not packed or has_fast_bfloat16()
    if precision == "float32" or (precision == "bfloat16" and plain):
        return build_ours(setup["shape"], DTYPES[precision], device)
    model = build_ours(setup["shape"], torch.float32, device)
    pack(model, precision)
    return model


def build_checkpoint(setup: dict, fast: bool) -> Checkpoint:
    """What a user gets who opens a checkpoint of this shape and precision, without the processor.

    Args:
        fast: with the fastest steps of this machine, as `generate.py` chooses them; else the eager ones.
            `load_seconds` is what compiling them took.
    """
    model = build_precision(setup, packed=fast)
    checkpoint = Checkpoint(setup["shape"], model, cast(Processor, None), 0.0, setup["precision"])
    return checkpoint.compiled() if fast else checkpoint


def parameters(shape: str) -> int:
    """How many weights a shape has."""
    with meta_init():
        return sum(parameter.numel() for parameter in VisionLanguageModel(SHAPES[shape]).parameters())


def words(shape: str, seed: int, count: int) -> Tensor:
    """(count,) random token ids, none of them a placeholder."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SHAPES[shape].text.vocab_size - 200, (count,), generator=generator)


def image_tokens(shape: str, tiles: int) -> Tensor:
    config = SHAPES[shape]
    assert config.image_token_id is not None
    return torch.full((tiles * config.tokens_per_tile,), config.image_token_id)


def tile_pixels(shape: str, tiles: int, image: int = 0) -> Tensor:
    """(1, tiles, 3, M, M) pixels, all tiles and all images different."""
    vision = SHAPES[shape].vision
    pixels = torch.empty(1, tiles, vision.num_channels, vision.image_size, vision.image_size)
    return fill(pixels, std=1.0, start=104_729 * image)


def prompt(
    shape: str, tiles: int, question: int = 0, device: str = "cpu", image: int = 0
) -> dict[str, Tensor]:
    """Model inputs: half of the text, an image of `tiles` tiles, the other half (as `question` seeds it)."""
    half = TEXT_TOKENS // 2
    ids = torch.cat(
        (words(shape, 1, half), image_tokens(shape, tiles), words(shape, 100 + question, TEXT_TOKENS - half))
    )
    inputs = {"input_ids": ids[None].to(device)}
    if tiles:
        inputs["pixel_values"] = tile_pixels(shape, tiles, image).to(device)
    return inputs


def prompt_tokens(shape: str, tiles: int) -> int:
    return tiles * SHAPES[shape].tokens_per_tile + TEXT_TOKENS
