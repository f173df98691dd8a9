"""Idefics3, SmolVLM and SmolVLM2 as transformers has them: the checkpoint layout that we also write.

Config keys and tensor names are those of transformers 5.23 and of the older checkpoints on the Hub; absent
keys take the defaults of transformers' Idefics3Config (the two model types share all of them).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from data.tokenizer import IMAGE
from families import keys
from families.idefics3_images import IdeficsImages, image_rule, new_images, open_images, positions
from families.saving import text_family, write_config, write_text, write_vision
from families.sections import TEXT_FAMILIES, text_config, vision_config, vlm_config
from models.checkpoints import gguf_config
from models.checkpoints.files import CheckpointError
from models.checkpoints.gguf_config import SIGLIP
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, rename
from models.config import VLMConfig
from models.language_model import LanguageModel
from models.vision_transformer import ModalityProjector, VisionTransformer

__all__ = ["IdeficsImages", "image_rule", "new_images", "open_images", "positions"]

NAME = "idefics3"
TITLE = "transformers Idefics3 / SmolVLM / SmolVLM2"
BOX_FORMS: dict[str, str] = {}
MODEL_TYPES = ("idefics3", "smolvlm")
MLX = {"language_model.lm_head.": "lm_head.", "language_model.": "model.text_model.", "": "model."}
PROCESSORS = {NAME: ("Idefics3Processor", "Idefics3ImageProcessor")}
# Buffers that old transformers versions stored follow from the config, and a tied head is the embedding.
IGNORABLE = re.compile(r".*(rotary_emb\.inv_freq|embeddings\.position_ids)|lm_head\.weight")
# Our tensor names -> theirs, the longer prefix first.
NAMES = {
    "vision_model.layers.": "model.vision_model.encoder.layers.",
    "vision_model.post_layernorm.": "model.vision_model.post_layernorm.",
    "vision_model.": "model.vision_model.embeddings.",
    "projector.": "model.connector.modality_projection.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.text_model.",
}


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing.

    Only the top-level tie_word_embeddings counts, as in transformers.
    """
    text = keys.section(config, "text_config")
    # transformers' rms_norm_eps is 1e-5 where there is no text_config at all, LlamaConfig's 1e-6 otherwise.
    defaults = {} if config.get("text_config") is not None else {"rms_norm_eps": 1e-5}
    decoder = text_config(text, defaults)
    vision = vision_config(keys.section(config, "vision_config"), {})
    scale = config.get("scale_factor", 2)
    return vlm_config(
        config, generation, 128_257, False, decoder, family=NAME, vision=vision, scale_factor=scale
    )


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> StoredTensorOf:
    """The place of each of our tensors; some old checkpoints leave the leading `model.` out."""
    bare = any(name.startswith(("text_model.", "vision_model.")) for name in stored_names)
    return lambda name: StoredTensor(rename(name, NAMES).removeprefix("model." if bare else ""))


def build(config: VLMConfig) -> tuple[nn.Module, nn.Module, LanguageModel]:
    """Tower, projector and text."""
    text = LanguageModel(config.text, config.tie_word_embeddings)
    return VisionTransformer(config.vision), ModalityProjector(config), text


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json, in which nothing is left to a reader's defaults. A CheckpointError says why this layout
    cannot hold the model."""
    text, problem = config.text, ""
    if config.image_token_id >= text.vocab_size:
        problem = "its image placeholder is beyond the vocabulary (nanoVLM v0.1): `tools convert` mends it"
    elif config.projector_bias:
        problem = "its projector has no bias: build the model with projector_bias=False"
    elif text_family(text) == "llama" and text.hidden_size % text.num_attention_heads:
        problem = f"its hidden_size must be a multiple of num_attention_heads ({text.num_attention_heads})"
    if problem:
        raise CheckpointError(f"the model cannot be saved in the transformers Idefics3 layout: {problem}")
    vision = {"model_type": "idefics3_vision", **write_vision(config.vision), "attention_dropout": 0.0}
    described = write_config(
        config, dtype, "Idefics3ForConditionalGeneration", NAME, write_text(config, dtype), vision
    )
    more = {"pad_token_id": config.pad_token_id, "scale_factor": config.scale_factor, "use_cache": True}
    return described | more


def _read_gguf(tower: gguf_config.Tower) -> tuple[dict[str, Any], dict[str, Any]]:
    vision, scale = tower.section(SIGLIP), tower.said["projector.scale_factor"]
    side, patch = vision["image_size"], vision["patch_size"]
    vision["hidden_act"] = "gelu_pytorch_tanh" if tower.said.get("clip.use_gelu") else "quick_gelu"
    config = {"image_token_id": tower.id(IMAGE), "scale_factor": scale, "vision_config": vision}
    return config, {
        "image_seq_len": (side // patch // scale) ** 2,
        "max_image_size": {"longest_edge": side},
        "size": {"longest_edge": tower.said.get("preproc_image_size", 4 * side)},
        "image_processor_type": "Idefics3ImageProcessor",
    }


GGUF = {
    NAME: gguf_config.Layout(
        NAME, {kind: kind for kind in TEXT_FAMILIES}, _read_gguf,
        fronts=lambda config: {"projector.proj.": "mm.model.fc."},
    )
}  # fmt: skip


def their_inputs(ids: Tensor, pixels: Tensor, config: VLMConfig) -> dict[str, Tensor]:
    """transformers' arguments beside ids, of one image of pixels (1, 3, H, W) from -1 to 1."""
    return {"pixel_values": pixels[None]}  # (B, n, 3, M, M)
