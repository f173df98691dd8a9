"""Configs of the checkpoints that the shipped recipes name, as the Hub has them: a plan needs no network."""

from __future__ import annotations

from typing import Any


def _smollm2(width: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int = 49_152):
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000,
        "tie_word_embeddings": True,
    }


_SIGLIP = {"model_type": "siglip_vision_model"}  # the rest is as transformers has it by default: base/16
PUBLISHED: dict[str, dict[str, Any]] = {
    "google/siglip-base-patch16-224": _SIGLIP | {"image_size": 224},
    "google/siglip2-base-patch16-512": _SIGLIP | {"image_size": 512},
    "HuggingFaceTB/SmolLM2-135M": _smollm2(576, 1536, 30, 9, 3),
    "HuggingFaceTB/SmolLM2-360M-Instruct": _smollm2(960, 2560, 32, 15, 5),
    "HuggingFaceTB/SmolVLM-256M-Instruct": {
        "model_type": "idefics3",
        "image_token_id": 49_190,
        "scale_factor": 4,
        "tie_word_embeddings": False,
        "text_config": _smollm2(576, 1536, 30, 9, 3, 49_280),
        "vision_config": {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16},
    },
}
LONGEST_EDGE = 2048  # pixels that SmolVLM's processor resizes an image's longer side to
SMOLLM2_TOKENS = 3  # of SmolVLM's special tokens, those that SmolLM2's tokenizers have
