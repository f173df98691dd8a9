"""Gemma 4's small models (E2B, E4B) as transformers has them: pictures and text, without the audio tower.

Config keys and tensor names are those of transformers 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from families import keys
from families.gemma4_images import open_images
from families.qwen_vl import positions
from families.saving import both_dtypes, write_config, write_ids
from families.sections import vlm_config
from models.checkpoints.gguf_config import COLOURS_LAST, SIGLIP, Join, Layout, Tower
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, rename
from models.config import VLMConfig
from models.gemma4_text import Gemma4LanguageModel, Gemma4TextConfig
from models.gemma4_vision import Gemma4Projector, Gemma4VisionConfig, Gemma4VisionTransformer
from models.packed_vision_transformer import block_order, patches_of

__all__ = ["open_images", "positions"]

NAME = "gemma4"
TITLE = "transformers Gemma 4 (E2B, E4B)"
BOX_FORMS: dict[str, str] = {}
MODEL_TYPES = (NAME,)
PROCESSORS = {NAME: ("Gemma4Processor", "Gemma4ImageProcessor")}
MLX = {"language_model.model.": "model.language_model.", "": "model."}
# The audio tower, and keys of layers that read those of others.
IGNORABLE = re.compile(
    r"model\.(audio_tower|embed_audio)\..*|lm_head\.weight"
    r"|model\.language_model\.layers\.\d+\.self_attn\.(k|v)_(proj|norm)\..*"
    r"|(mm\.)?a\..*|blk\..*|rope_freqs\.weight"  # in GGUF files
)
_KINDS = {"sliding_attention": "sliding", "full_attention": "full"}
# Defaults are those of transformers' Gemma4TextConfig and Gemma4VisionConfig.
_TEXT = keys.same(
    vocab_size=262_144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30, num_attention_heads=8,
    num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6, max_position_embeddings=131_072,
    sliding_window=512,
) | {
    "hidden_act": keys.Key("hidden_activation", "gelu_pytorch_tanh"),
    "shared_mlp_factor": keys.Key("use_double_wide_mlp", False, lambda is_so: 1 + is_so, lambda by: by == 2),
    "per_layer_width": keys.Key("hidden_size_per_layer_input", 256),
    "per_layer_vocab": keys.Key("vocab_size_per_layer_input", 262_144),
    "logit_cap": keys.Key("final_logit_softcapping"),
    "placeholder_id": keys.Key("pad_token_id", 0),
}  # fmt: skip
_NEAR = {"rope_theta": keys.Key("rope_theta", 1e4)}  # in the rope_parameters of sliding_attention
_FAR = {  # in those of full_attention
    "full_rope_theta": keys.Key("rope_theta", 1e6),
    "full_rotary_factor": keys.Key("partial_rotary_factor", 0.25),
}
_VISION = keys.same(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=16, num_attention_heads=12, patch_size=16
) | {
    "norm_eps": keys.Key("rms_norm_eps", 1e-6),
    "merge_size": keys.Key("pooling_kernel_size", 3),
    "table_side": keys.Key("position_embedding_size", 10_240),
    "clips": keys.Key("use_clipped_linears", False),
    "standardizes": keys.Key("standardize", False),
}
_TURNS = {"rope_theta": keys.Key("rope_theta", 100.0)}  # in the tower's rope_parameters
_MARKERS = {"video_token_id": 258_884, "audio_token_id": 258_881}  # where a config.json has none
# Keys of which other values need code that is not here.
_PLAIN_VISION = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_PLAIN_TEXT = {"attention_k_eq_v": False, "enable_moe_block": False, "attention_bias": False}


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing."""
    text, vision = keys.section(config, "text_config"), keys.section(config, "vision_config")
    if not vision:
        raise ValueError("expected a vision_config, got none: the model does not see")
    keys.expect(vision, _PLAIN_VISION)
    values = keys.read(vision, _VISION) | keys.read(keys.section(vision, "rope_parameters"), _TURNS)
    tower = Gemma4VisionConfig(**values)
    heads, width = tower.num_attention_heads, tower.hidden_size
    keys.expect(vision, {"head_dim": width // heads, "num_key_value_heads": heads})
    parts: dict[str, Any] = {"family": NAME, "vision": tower, "scale_factor": 1}
    return vlm_config(config, generation, 258_880, True, _read_text(text), _MARKERS, **parts)


def _read_text(stored: Mapping) -> Gemma4TextConfig:
    keys.expect(stored, {**_PLAIN_TEXT, "use_bidirectional_attention": None})  # as of E2B and E4B
    known, values = keys.present(stored), keys.read(stored, _TEXT)
    layers, shared = values["num_hidden_layers"], known.get("num_kv_shared_layers", 0)
    default = ["full_attention" if (at + 1) % 6 == 0 else "sliding_attention" for at in range(layers)]
    kinds = keys.layer_kinds(known, _KINDS, default)
    kinds[-1] = "full"  # as transformers has it
    own = len(kinds) - shared
    if not {*kinds[own:]} <= {*kinds[:own]}:
        raise ValueError("num_kv_shared_layers: those layers have no keys to read")
    kinds[own:] = [f"{kind} shared" for kind in kinds[own:]]
    ropes = keys.section(known, "rope_parameters")
    near, far = keys.section(ropes, "sliding_attention"), keys.section(ropes, "full_attention")
    keys.expect(near, {"rope_type": "default"})
    keys.expect(far, {"rope_type": "proportional"})
    values |= keys.read(near, _NEAR) | keys.read(far, _FAR)
    return Gemma4TextConfig(
        **values,
        layer_types=tuple(kinds),
        full_head_dim=_full_head_dim(known, kinds, values["head_dim"]),
        per_layer_count=layers,
        qk_norm=True,
    )


def _full_head_dim(known: dict, kinds: list[str], head_dim: int) -> int:
    """The width of heads with full attention: published checkpoints have it once, transformers 5.23 writes
    it for each layer that differs."""
    if "per_layer_config" not in known:
        return known.get("global_head_dim", 512)
    of_layers = keys.section(known, "per_layer_config")
    full = [keys.section(of_layers, str(at)) for at, kind in enumerate(kinds) if "full" in kind]
    return next((layer["head_dim"] for layer in full if layer.get("head_dim") is not None), head_dim)


_NAMES = {
    "vision_model.patch_embedding.": "model.vision_tower.patch_embedder.input_proj.",
    "vision_model.position_embedding_table": "model.vision_tower.patch_embedder.position_embedding_table",
    "vision_model.layers.": "model.vision_tower.encoder.layers.",
    "vision_model.": "model.vision_tower.",
    "projector.": "model.embed_vision.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.language_model.",
}
_IN_TOWER = {f".{name}.": f".self_attn.{name}." for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
_IN_TOWER |= {f".{name}.": f".self_attn.{name}." for name in ("q_norm", "k_norm")}
_IN_TOWER |= {f".{name}_proj.": f".mlp.{name}_proj." for name in ("gate", "up", "down")}


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> StoredTensorOf:
    """The place of each of our tensors."""
    return lambda name: StoredTensor(
        rename(name, _NAMES, _IN_TOWER if name.startswith("vision_model.") else {})
    )


def build(config: VLMConfig) -> tuple[nn.Module, nn.Module, Gemma4LanguageModel]:
    """Tower, projector and text."""
    text, vision = config.text, config.vision
    assert isinstance(text, Gemma4TextConfig) and isinstance(vision, Gemma4VisionConfig)
    soft_ids = [id for id in (config.image_token_id, *config.marker_token_ids) if id is not None]
    decoder = Gemma4LanguageModel(text, config.tie_word_embeddings, soft_ids)
    return Gemma4VisionTransformer(vision), Gemma4Projector(vision, text.hidden_size), decoder


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json of transformers' Gemma4ForConditionalGeneration, without its audio part."""
    text, vision = config.text, config.vision
    assert isinstance(text, Gemma4TextConfig) and isinstance(vision, Gemma4VisionConfig)
    names = {ours: theirs for theirs, ours in _KINDS.items()}
    described = {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "global_head_dim": text.full_head_dim,
        "layer_types": [names[kind.split()[0]] for kind in text.layer_types],
        "num_kv_shared_layers": sum("shared" in kind for kind in text.layer_types),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", **keys.write(text, _NEAR)},
            "full_attention": {"rope_type": "proportional", **keys.write(text, _FAR)},
        },
        **_PLAIN_TEXT,
        **write_ids(config),
        **keys.write(text, _TEXT),
        "tie_word_embeddings": config.tie_word_embeddings,
        **both_dtypes(dtype),
    }
    seen = {
        "model_type": "gemma4_vision",
        "head_dim": vision.hidden_size // vision.num_attention_heads,
        "num_key_value_heads": vision.num_attention_heads,
        "rope_parameters": {"rope_type": "axial", **keys.write(vision, _TURNS)},
        **_PLAIN_VISION,
        **keys.write(vision, _VISION),
    }
    architecture, without = "Gemma4ForConditionalGeneration", {"audio_config": None}
    return write_config(config, dtype, architecture, NAME, described, seen, _MARKERS, **without)


# --------------------------------------------------------------------------------------------------- GGUF
def _read_gguf(tower: Tower) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = tower.section(SIGLIP)
    sizes = {"pooling_kernel_size": tower.said.get("projector.scale_factor", 3)}
    vision |= sizes | {
        "rms_norm_eps": vision["layer_norm_eps"],
        "position_embedding_size": tower.tensors["v.position_embd.weight"].shape[1],
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in tower.tensors,
        "standardize": "v.std_bias" in tower.tensors,
    }
    config = {"image_token_id": tower.id("<|image|>"), "vision_config": vision}
    return config, sizes | {"patch_size": vision["patch_size"]}


_GGUF_TEXT = {
    "attention.key_length": "global_head_dim", "attention.key_length_swa": "head_dim",
    "attention.sliding_window": "sliding_window", "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip


def _read_gguf_text(config: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    inner = config["intermediate_size"]  # of each layer, where they differ
    widths = inner if isinstance(inner, list) else [inner]
    factors = said["rope_freqs"]  # those of what is not rotated are huge
    share = factors.count(1) / len(factors) if 1 in factors else 0.25
    kinds = ["full_attention", "sliding_attention"]
    near = {"rope_theta": said.get("rope.freq_base_swa", 1e4)}
    far = {"rope_theta": config["rope_theta"], "partial_rotary_factor": share}
    return {
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "layer_types": [kinds[one] for one in said["attention.sliding_window_pattern"]],
        "vocab_size_per_layer_input": config["vocab_size"],
        "rope_parameters": {"sliding_attention": near, "full_attention": far},
    }


GGUF = {
    "gemma4v": Layout(
        NAME, {"gemma4": "gemma4_text"}, _read_gguf, _read_gguf_text, keys=_GGUF_TEXT,
        ends=("<eos>", "<turn|>", "<|tool_response>"),
        fronts=lambda config: {
            "vision_model.std": "v.std",
            "vision_model.position_embedding_table": "v.position_embd.weight",
            "projector.embedding_projection.": "mm.input_projection.",
            "language_model.embed_tokens_per_layer.": "per_layer_token_embd.",
            "language_model.per_layer_model_projection.": "per_layer_model_proj.",
            "language_model.per_layer_projection_norm.": "per_layer_proj_norm.",
        },
        inside={
            "vision_model": {
                ".linear.": ".", ".input_layernorm.": ".ln1.", ".pre_feedforward_layernorm.": ".ln2.",
                ".post_attention_layernorm.": ".attn_post_norm.",
                ".post_feedforward_layernorm.": ".ffn_post_norm.",
                **_IN_TOWER, ".self_attn.o_proj.": ".attn_out.",
            },
            "language_model": {
                ".post_attention_layernorm.": ".post_attention_norm.",
                ".pre_feedforward_layernorm.": ".ffn_norm.",
                ".post_feedforward_layernorm.": ".post_ffw_norm.",
                ".layer_scalar": ".layer_output_scale.weight", ".per_layer_input_gate.": ".inp_gate.",
                ".per_layer_projection.": ".proj.", ".post_per_layer_input_norm.": ".post_norm.",
            },
        },
        joins=lambda config: {
            "vision_model.patch_embedding.weight": COLOURS_LAST,
            **dict.fromkeys(("put_min", "put_max"), Join(lambda bound: bound.reshape(()))),
        },
    )
}  # fmt: skip


def their_inputs(ids: Tensor, pixels: Tensor, config: VLMConfig) -> dict[str, Tensor]:
    """transformers' arguments beside ids, of one image of pixels (1, 3, H, W) from -1 to 1."""
    vision = config.vision
    grid = [side // vision.patch_size for side in pixels.shape[2:]]
    return {
        "pixel_values": patches_of(pixels[0], vision)[None],
        "image_position_ids": block_order((grid[0], grid[1]), vision.merge_size).flip(1)[None],
        "mm_token_type_ids": torch.eq(ids, config.image_token_id).int(),
    }
