"""Tiny checkpoints on disk: ours, nanoVLM's, in shards, and bare backbones."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel
from tests.processors import GOLDEN, embedded
from tests.tiny import randomize


def tiny_model(processor) -> VisionLanguageModel:
    """A model of some thousand weights with a processor's vocabulary and tiles."""
    tokenizer = processor.tokenizer
    config = VLMConfig(
        vision=VisionConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=32,
            patch_size=8,
        ),
        text=TextConfig(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        ),
        scale_factor=2,
        image_token_id=processor.image_token_id,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = VisionLanguageModel(config).eval()
    randomize(model, seed=0)
    return model


def write_all(folder: Path) -> dict[str, Path]:
    """A folder of each kind of checkpoint, by kind."""
    processor = embedded(split=True)
    model = tiny_model(processor)
    folders = {
        "single": model.save_pretrained(folder / "single", processor=processor),
        "shards": model.save_pretrained(folder / "shards", processor=processor, max_shard_bytes=9_000),
        "nanovlm": Path(shutil.copytree(GOLDEN / "nanovlm-current", folder / "nanovlm")),
        "vision": folder / "vision",
        "text": folder / "text",
    }
    for name in ("expected.json", "expected.safetensors"):
        (folders["nanovlm"] / name).unlink()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=16, patch_size=8)).save_pretrained(
        folders["vision"]
    )
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, num_key_value_heads=1)).save_pretrained(
        folders["text"]
    )
    return folders
