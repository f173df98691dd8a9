"""config.json of backbones and checkpoints as the Hub publishes them, so that a plan needs no download.

    config_of("HuggingFaceTB/SmolLM2-135M")          # from the table
    config_of("my/folder")                           # its config.json

What the published files leave to transformers' defaults is left out here as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoints.hub import CheckpointError, read_json

_SIGLIP_TAIL = {"model_type": "siglip_vision_model"}  # the rest are SiglipVisionConfig's defaults: base/16
_SO400M = _SIGLIP_TAIL | {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
}
_SMOLLM2 = {
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
_SMOLLM2_135M = _SMOLLM2 | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
_SMOLLM2_360M = _SMOLLM2 | {
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
}
_SMOLLM2_1_7B = _SMOLLM2 | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rope_theta": 130_000,
}
_SMOLVLM_VISION = {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16}
_SMOLVLM = {
    "model_type": "idefics3",
    "image_token_id": 49190,
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "vision_config": _SMOLVLM_VISION,
}
_SMOLVLM_256M = _SMOLVLM | {"text_config": _SMOLLM2_135M | {"vocab_size": 49280}}
_SMOLVLM_500M = _SMOLVLM | {"text_config": _SMOLLM2_360M | {"vocab_size": 49280}}
_SMOLVLM_2_2B = {
    "model_type": "smolvlm",
    "image_token_id": 49153,
    "scale_factor": 3,
    "text_config": _SMOLLM2_1_7B
    | {"max_position_embeddings": 16384, "rope_theta": 273_768.0, "vocab_size": 49155},
    "vision_config": _SO400M | {"image_size": 384, "patch_size": 14},
}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    **{
        f"google/{name}-base-patch16-{size}": _SIGLIP_TAIL | {"image_size": size}
        for name in ("siglip", "siglip2")
        for size in (224, 256, 384, 512)
    },
    "google/siglip-so400m-patch14-384": _SO400M | {"image_size": 384, "patch_size": 14},
    "google/siglip2-so400m-patch14-384": _SO400M | {"image_size": 384, "patch_size": 14},
    "google/siglip2-so400m-patch16-512": _SO400M | {"image_size": 512, "patch_size": 16},
    "HuggingFaceTB/SmolLM2-135M": _SMOLLM2_135M,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "HuggingFaceTB/SmolLM2-360M": _SMOLLM2_360M,
    "HuggingFaceTB/SmolLM2-360M-Instruct": _SMOLLM2_360M,
    "HuggingFaceTB/SmolLM2-1.7B": _SMOLLM2_1_7B,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _SMOLLM2_1_7B,
    "HuggingFaceTB/SmolVLM-256M-Base": _SMOLVLM_256M,
    "HuggingFaceTB/SmolVLM-256M-Instruct": _SMOLVLM_256M,
    "HuggingFaceTB/SmolVLM-500M-Base": _SMOLVLM_500M,
    "HuggingFaceTB/SmolVLM-500M-Instruct": _SMOLVLM_500M,
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": _SMOLVLM_2_2B,
}
# Pixels that these checkpoints' processors resize an image's longer side to before they cut it.
LONGEST_EDGE = {name: 2048 for name in PUBLISHED if "/SmolVLM-" in name}
# Of `data.tokenizer.SPECIAL_TOKENS`, those that SmolLM2's tokenizers have.
SMOLLM2_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def folder_of(source: str) -> Path | None:
    """The folder that a source names, None where it is a repository."""
    path = Path(source).expanduser()
    return path if path.is_dir() else None


def config_of(source: str) -> dict[str, Any]:
    """The config.json of a folder, or of a repository in the table (`id@revision` too).

    Raises:
        CheckpointError: the folder has none, or the repository is not in the table.
    """
    folder = folder_of(source)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{source}: a plan needs its config.json, the folder has none")
        return read_json(folder / "config.json")
    published = PUBLISHED.get(source.rsplit("@", 1)[0])
    if published is None:
        raise CheckpointError(
            f"{source}: a plan downloads nothing and knows the shapes of a few repositories only (SigLIP, "
            "SmolLM2, SmolVLM): name a local folder with its config.json"
        )
    return dict(published)
