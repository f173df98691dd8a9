"""Qwen3.5 as transformers has it: three gated delta rules (arXiv:2412.06464) to one layer of attention with
an output gate, norms around 1, and Qwen3-VL's tower without features for further text layers. Or the text
model alone (`qwen3_5_text`), whose config has a tower without layers.

Config keys and tensor names are those of transformers 5.23. `mtp.*`, which predicts further tokens, is left
out (of GGUF files, layers after the others).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from data.chat import chat_template
from data.errors import ImageError
from data.tiles import Visual
from data.tokenizer import AnyTokenizer, open_with
from families import keys, qwen_images, qwen_vl
from families.qwen_gguf import GGUF_3_5 as GGUF
from families.qwen_images import image_rule
from families.qwen_vl import grid, places, positions, their_inputs
from families.saving import write_config, write_text
from families.sections import text_config, vlm_config
from models.checkpoints.files import Opened
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf
from models.config import TextConfig, VLMConfig
from models.language_model import LanguageModel

__all__ = ["GGUF", "grid", "image_rule", "places", "positions", "their_inputs"]

NAME, ALONE = "qwen3_5", "qwen3_5_text"
TITLE = "transformers Qwen3.5"
BOX_FORMS = {NAME: "qwen3-vl"}
MODEL_TYPES = (NAME, ALONE)
PROCESSORS = dict.fromkeys(MODEL_TYPES, ("Qwen3VLProcessor", "Qwen2VLImageProcessor"))
MLX = qwen_vl.MLX | {"+1": r"model\.language_model\.(?!.*linear_attn).*norm\.weight"}
IGNORABLE = re.compile(qwen_vl.IGNORABLE.pattern + r"|(model\.)?mtp\..*|blk\..*")
_MARKERS = {"video_token_id": 248_057, "vision_start_token_id": 248_053, "vision_end_token_id": 248_054}
# Defaults are those of transformers' Qwen3_5TextConfig and Qwen3NextConfig.
_TEXT: dict[str, Any] = {
    "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32_768,
}  # fmt: skip
_DELTA = {
    "conv_kernel": keys.Key("linear_conv_kernel_dim", 4),
    "delta_key_dim": keys.Key("linear_key_head_dim", 128),
    "delta_value_dim": keys.Key("linear_value_head_dim", 128),
    "delta_key_heads": keys.Key("linear_num_key_heads", 16),
    "delta_value_heads": keys.Key("linear_num_value_heads", 32),
}
# Keys of which other values (mixtures of experts, attention without its gate) need code that is not here.
_PLAIN = {"model_type": ALONE, "attn_output_gate": True, "num_experts": 0}
_KINDS = {"full_attention": "attention", "linear_attention": "delta"}


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing."""
    alone = config["model_type"] == ALONE
    given = config if alone else keys.section(config, "text_config")
    decoder = read_text(given)
    vision = qwen_vl.vision_config(keys.section(config, "vision_config"), NAME)
    parts: dict[str, Any] = {"vision": vision, "scale_factor": 1}
    if alone:
        parts["vision"] = replace(vision, num_hidden_layers=0)
        config = {**config, "image_token_id": decoder.vocab_size}  # which no prompt has
    return vlm_config(config, generation, 248_056, False, decoder, _MARKERS, family=NAME, **parts)


def read_text(given: Mapping, places: bool = True) -> TextConfig:
    """The text section; without `places` a token of an image turns by its position, as one of the text."""
    keys.expect(given, _PLAIN)
    text = _TEXT | keys.present(given)
    rope = keys.section(text, "rope_scaling") or keys.section(text, "rope_parameters")
    beside = {"rope_theta": 1e4, "partial_rotary_factor": 0.25} | text
    rope = {name: beside[name] for name in ("rope_theta", "partial_rotary_factor")} | rope
    plain, sections = qwen_vl.multimodal_rope(rope, [11, 11, 10])
    share = plain.pop("partial_rotary_factor")
    own = {"model_type": "qwen3", "rope_scaling": None, "rope_parameters": plain}
    return text_config(
        text | own | dict.fromkeys(("layer_types", "partial_rotary_factor")),
        {},
        rope_sections=sections if places else (),
        rope_interleaved=places,
        partial_rotary_factor=share,
        attention_gate=True,
        zero_centered_norms=True,
        layer_types=_layer_types(text),
        **keys.read(text, _DELTA),
    )


def _layer_types(text: dict) -> tuple[str, ...]:
    layers, every = text["num_hidden_layers"], text.get("full_attention_interval", 4)
    default = ["full_attention" if (at + 1) % every == 0 else "linear_attention" for at in range(layers)]
    kinds = keys.layer_kinds(text, _KINDS, default)
    if "attention" not in kinds:
        raise ValueError("layer_types: expected full_attention in at least one layer")
    return tuple(kinds)


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> StoredTensorOf:
    """The place of each of our tensors."""
    # transformers 5.5.0 to 5.5.3 saved the tower inside the text part, 5.5.0 and 5.5.1 the text part inside
    # itself as well.
    of_qwen_vl, nested = qwen_vl.tensor_map(stored_names), re.compile(r"model\.((language_model\.)*)(\w+)")
    inside = {found[3]: found[1] for found in map(nested.match, stored_names) if found}
    fronts = {"model.visual.": f"model.{inside.get('visual', '')}visual."}
    usual = "language_model." if config is None or config.vision.num_hidden_layers else ""
    fronts["model.language_model."] = f"model.{inside.get('embed_tokens', usual)}"

    def stored_tensor(name: str) -> StoredTensor:
        found = of_qwen_vl(name)
        theirs = found.name.replace(".linear_attn.conv_weight", ".linear_attn.conv1d.weight")
        front = next((front for front in fronts if theirs.startswith(front)), "")
        return replace(found, name=fronts.get(front, "") + theirs.removeprefix(front))

    return stored_tensor


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json of transformers' Qwen3_5ForConditionalGeneration, or of Qwen3_5ForCausalLM."""
    text, names = config.text, {ours: theirs for theirs, ours in _KINDS.items()}
    written = write_text(config, dtype)
    rope: dict[str, Any] = {"partial_rotary_factor": text.partial_rotary_factor}
    if text.rope_sections:
        rope |= {"mrope_section": list(text.rope_sections), "mrope_interleaved": True}
    written |= {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "rope_parameters": rope | written["rope_parameters"],
        "rope_scaling": None,
        "layer_types": [names[kind] for kind in text.layer_types],
        **keys.write(text, _DELTA),
    }
    if not config.vision.num_hidden_layers:
        return written
    architecture, tower = "Qwen3_5ForConditionalGeneration", qwen_vl.write_vision(config, NAME)
    return write_config(config, dtype, architecture, NAME, written, tower, _MARKERS)


# --------------------------------------------------------------------------------------- the text model alone
_BLIND = "this is a text model, which sees no images: ask without one"


class NoTower(nn.Module):
    """What stands in the place of tower and projector."""

    def __init__(self, config: VLMConfig):
        super().__init__()
        self.config, self.layers = config.vision, nn.ModuleList()

    def forward(self, pixels: Any) -> Tensor:
        raise ImageError(_BLIND)


class NoImages(qwen_images.QwenImages):
    """The rule by which each image is refused."""

    def plan(self, width: int, height: int) -> Visual:
        raise ImageError(_BLIND)


def build(config: VLMConfig) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Tower, projector and text."""
    if config.vision.num_hidden_layers:
        return qwen_vl.build(config)
    return NoTower(config), NoTower(config), LanguageModel(config.text, config.tie_word_embeddings)


def open_images(opened: Opened) -> tuple[qwen_images.QwenImages, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint."""
    if opened.config["model_type"] != ALONE:
        return qwen_images.open_images(opened)
    return NoImages({}), open_with(opened, (qwen_images.IMAGE,)), chat_template(opened)
