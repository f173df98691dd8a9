"""Tiny random transformers Idefics3 / SmolVLM models, and inputs for them: what ours are held to.

    hf_model, inputs = build("smolvlm-17-tiles")
    folder = save(hf_model, tmp_path)                 # as transformers writes it

Every weight is random, norms and biases too, so that a tensor put in the wrong place shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from data.new_processor import make_processor
from recipes.shapes.tokenizer import build_tokenizer

CLASSES = {"idefics3": Idefics3ForConditionalGeneration, "smolvlm": SmolVLMForConditionalGeneration}
VOCAB, IMAGE_ID, PAD_ID = 160, 150, 0
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    """A tiny model and a prompt: `rows` lists, for each row, the tiles of each of its images."""

    family: str = "idefics3"
    rows: tuple[tuple[int, ...], ...] = ((1,),)
    scale: int = 2
    tied: bool = False
    image_size: int = 32
    text: dict = field(default_factory=dict)


CASES = {
    "idefics3-1-tile": Case(),
    "smolvlm-1-tile": Case("smolvlm"),
    "idefics3-2-tiles-tied": Case(rows=((2,),), tied=True),
    "smolvlm-2-tiles": Case("smolvlm", rows=((2,),)),
    "idefics3-17-tiles": Case(rows=((17,),)),
    "smolvlm-17-tiles": Case("smolvlm", rows=((17,),)),
    "idefics3-2-images": Case(rows=((1, 2),)),
    "smolvlm-2-images-tied": Case("smolvlm", rows=((2, 1),), tied=True),
    "idefics3-no-image": Case(rows=((),)),
    "smolvlm-no-image-tied": Case("smolvlm", rows=((),), tied=True),
    "idefics3-llama3-rope": Case(rows=((3,),), text={"rope_parameters": LLAMA3}),
    "smolvlm-linear-rope": Case(
        "smolvlm", text={"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}
    ),
    "idefics3-own-head-dim": Case(text={"head_dim": 16}),
    "smolvlm-one-kv-head": Case("smolvlm", text={"num_key_value_heads": 1}),
    "idefics3-scale-3": Case(scale=3, image_size=48),
    "smolvlm-scale-4": Case("smolvlm", scale=4, image_size=64),
    "idefics3-biases": Case(text={"attention_bias": True, "mlp_bias": True}),
}


def config_for(case: Case) -> Idefics3Config | SmolVLMConfig:
    text = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD_ID,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": case.image_size,
        "patch_size": 8,
    }
    kind = {"idefics3": Idefics3Config, "smolvlm": SmolVLMConfig}[case.family]
    return kind(
        text_config=text | case.text,
        vision_config=vision,
        scale_factor=case.scale,
        image_token_id=IMAGE_ID,
        tie_word_embeddings=case.tied,
        pad_token_id=PAD_ID,
    )


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Random weights of a size that keeps activations near one; norms and biases are random as well."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.15 * noise)
            elif name.endswith("A_log"):  # from states that forget at once to such that hardly do
                parameter.copy_(2 * noise - 2)
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.25 * noise)
            elif "embed" in name and "patch" not in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.2 / parameter[0].numel() ** 0.5)


def hf_model(name: str, seed: int = 0) -> torch.nn.Module:
    """The transformers model of a case, float32, in eval mode."""
    case = CASES[name]
    model = CLASSES[case.family](config_for(case))
    randomize(model, seed)
    return model.eval()


def make_inputs(case: Case, rows: tuple[tuple[int, ...], ...] | None = None, seed: int = 1) -> dict:
    """input_ids, attention_mask (left-padded) and, where a row has an image, pixel_values with their mask.

    Args:
        case: the model the inputs are for.
        rows: tiles of each image of each row; None is the case's own.
        seed: of text and pixels.
    """
    rows = case.rows if rows is None else rows
    generator = torch.Generator().manual_seed(seed)
    per_tile = (case.image_size // 8 // case.scale) ** 2
    prompts = []
    for index, images in enumerate(rows):
        ids = torch.randint(3, IMAGE_ID, (4 + index,), generator=generator).tolist()
        for tiles in images:
            ids += [IMAGE_ID] * (tiles * per_tile)
            ids += torch.randint(3, IMAGE_ID, (3,), generator=generator).tolist()
        prompts.append(ids)
    longest = max(len(ids) for ids in prompts)
    input_ids = torch.full((len(rows), longest), PAD_ID)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(prompts):
        input_ids[row, longest - len(ids) :] = torch.tensor(ids)
        attention_mask[row, longest - len(ids) :] = 1
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    most = max(sum(images) for images in rows)
    if most:
        size = case.image_size
        pixels = torch.zeros(len(rows), most, 3, size, size)
        for row, images in enumerate(rows):
            count = sum(images)
            pixels[row, :count] = torch.randn(count, 3, size, size, generator=generator)
        inputs["pixel_values"] = pixels
        inputs["pixel_attention_mask"] = (pixels != 0).any(2).long()
    return inputs


def build(name: str) -> tuple[torch.nn.Module, dict]:
    """The transformers model of a case and its inputs."""
    return hf_model(name), make_inputs(CASES[name])


def model_with_processor(name: str | Case) -> tuple:
    """(our Processor, transformers model) of a case, with the vocabulary of the processor's tokenizer."""
    case = CASES[name] if isinstance(name, str) else name
    tokenizer = build_tokenizer(["how many circles are there?", "two", "what is in the picture?"], 400)
    side = case.image_size // 8 // case.scale
    processor = make_processor(tokenizer, image_size=case.image_size, image_seq_len=side * side, split=True)
    config = config_for(case)
    config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    config.text_config.vocab_size = len(tokenizer)
    config.text_config.eos_token_id = tokenizer.eos_token_id
    config.text_config.pad_token_id = tokenizer.pad_token_id
    model = CLASSES[case.family](config)
    randomize(model, 0)
    return processor, model.eval()


def same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def save(model: torch.nn.Module, folder: Path) -> Path:
    """The checkpoint that transformers itself writes."""
    model.save_pretrained(folder)
    return folder
