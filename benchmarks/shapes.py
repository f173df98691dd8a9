"""Real shapes with random weights, ours and transformers', and prompts for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from generation.fast.choose_step import has_fast_bfloat16, set_precision
from models.checkpoints.load import meta_init
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel, prepare_device

TEXT_TOKENS = 20  # of a prompt, besides its image: 84 tokens with one tile of 64, 1,108 with 17
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_SIGLIP = VisionConfig(
    hidden_size=768,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=12,
    image_size=512,
    patch_size=16,
)
_SMOL = TextConfig(
    vocab_size=49_280,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
)
SHAPES = {
    "SmolVLM-256M": VLMConfig(vision=_SIGLIP, text=_SMOL, scale_factor=4, image_token_id=49_190),
    "SmolVLM-500M": VLMConfig(
        vision=_SIGLIP,
        text=replace(
            _SMOL,
            hidden_size=960,
            intermediate_size=2560,
            num_hidden_layers=32,
            num_attention_heads=15,
            num_key_value_heads=5,
        ),
        scale_factor=4,
        image_token_id=49_190,
    ),
    "SmolVLM-2.2B": VLMConfig(
        vision=VisionConfig(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=27,
            num_attention_heads=16,
            image_size=384,
            patch_size=14,
        ),
        text=TextConfig(
            vocab_size=49_155,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=24,
            num_attention_heads=32,
            num_key_value_heads=32,
            max_position_embeddings=16_384,
            rms_norm_eps=1e-5,
            rope_theta=273_768.0,
        ),
        scale_factor=3,
        image_token_id=49_153,
    ),
    "tiny": VLMConfig(
        vision=VisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
        ),
        text=TextConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        ),
        scale_factor=2,
        image_token_id=319,
    ),
}


@torch.no_grad()
def fill(tensor: Tensor, std: float, start: int = 0) -> Tensor:
    """Overwrite with one long stretch of noise, repeated: as fast as a copy.

    Its length is a prime number, so that no two rows of a matrix become equal.
    """
    noise = _noise(tensor.device).to(tensor.dtype) * std
    flat, done, place = tensor.view(-1), 0, start % len(noise)
    while done < flat.numel():
        count = min(flat.numel() - done, len(noise) - place)
        flat[done : done + count] = noise[place : place + count]
        done, place = done + count, 0
    return tensor


def _noise(device: torch.device) -> Tensor:
    return torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).to(device)


def fill_weights(model: nn.Module) -> nn.Module:
    """Random matrices that keep activations near one, norms at one, biases at zero; the same every time."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.dim() == 1:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
        else:
            fill(parameter.data, parameter[0].numel() ** -0.5, start=7919 * index)
    return model


def build_ours(shape: str | VLMConfig, dtype: torch.dtype, device: str) -> VisionLanguageModel:
    """Our model of a shape, in eval mode, allocated once and in place."""
    prepare_device(device)
    with meta_init():
        model = VisionLanguageModel(config_of(shape))
    for name, parameter in list(model.named_parameters()):  # `to_empty` would import sympy: 35 MB
        owner, leaf = name.rsplit(".", 1)
        weight = torch.empty(parameter.shape, dtype=dtype, device=device)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(weight))
    return fill_weights(model).eval()


def build_precision(setup: dict, packed: bool) -> VisionLanguageModel:
    """Our model in the setup's shape and precision, on its device.

    Args:
        packed: on a CPU without fast arithmetic in bfloat16, keep the weights in it and compute in float32.

    Raises:
        ValueError: int8 on CUDA.
    """
    precision, device = setup["precision"], setup["device"]
    plain = device == "cuda" or not packed or has_fast_bfloat16()
    if precision == "float32" or (precision == "bfloat16" and plain):
        return build_ours(setup["shape"], DTYPES[precision], device)
    model = build_ours(setup["shape"], torch.float32, device)
    set_precision(model, precision)
    return model


def parameters(shape: str) -> int:
    """How many weights a shape has."""
    with meta_init():
        return sum(parameter.numel() for parameter in VisionLanguageModel(SHAPES[shape]).parameters())


def config_of(shape: str | VLMConfig) -> VLMConfig:
    return SHAPES[shape] if isinstance(shape, str) else shape


def hf_config(shape: str | VLMConfig):
    """The transformers config of the same shape."""
    from transformers import Idefics3Config

    config = config_of(shape)
    text, vision = dict(vars(config.text)), dict(vars(config.vision))
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": text.pop("rope_theta")}
    del text["rope_scaling"]
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return Idefics3Config(
        text_config={"model_type": "llama", **text, **ids},
        vision_config=vision,
        scale_factor=config.scale_factor,
        image_token_id=config.image_token_id,
        tie_word_embeddings=config.tie_word_embeddings,
        pad_token_id=0,
    )


def build_transformers(shape: str | VLMConfig, dtype: torch.dtype, device: str):
    """transformers' model of a shape, with its sdpa attention, in eval mode."""
    from transformers import Idefics3ForConditionalGeneration
    from transformers.initialization import no_init_weights

    prepare_device(device)
    config = hf_config(shape)
    config._attn_implementation = "sdpa"
    with no_init_weights():
        model = Idefics3ForConditionalGeneration(config)
    model = fill_weights(model).to(device, dtype).eval()
    model.generation_config.eos_token_id = None  # answers are as long as they are asked to be
    return model


def words(shape: str, seed: int, count: int) -> Tensor:
    """(count,) random token ids, none of them a placeholder."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SHAPES[shape].text.vocab_size - 200, (count,), generator=generator)


def prompt(shape: str, tiles: int, question: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Model inputs: half of the text, an image of `tiles` tiles, the other half (as `question` seeds it)."""
    config = SHAPES[shape]
    image = torch.full((tiles * config.tokens_per_tile,), config.image_token_id)
    half = TEXT_TOKENS // 2
    ids = torch.cat((words(shape, 1, half), image, words(shape, 100 + question, TEXT_TOKENS - half)))
    inputs = {"input_ids": ids[None].to(device)}
    if tiles:
        side = config.vision.image_size
        pixels = torch.empty(1, tiles, config.vision.num_channels, side, side)
        inputs["pixel_values"] = fill(pixels, std=1.0).to(device)
    return inputs


def prompt_tokens(shape: str, tiles: int) -> int:
    return tiles * SHAPES[shape].tokens_per_tile + TEXT_TOKENS
