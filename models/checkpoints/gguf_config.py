"""Metadata of GGUF files as the Hub's files: config.json, and the settings of images.

A model that sees is two files: its text part, and its tower with the projector (`mmproj`). The families have
the layouts of their own (`Layout`). Mistakes are ValueErrors; what a config.json may hold is checked where
one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from models.checkpoints import gguf_tokenizer
from models.checkpoints.gguf import Header, Place, stored_numbers

# llama.cpp's key of a text part, after its architecture -> that of a text_config.
_TEXT = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}  # fmt: skip
# Its key of a tower like SigLIP's -> that of a vision_config.
SIGLIP = {
    "image_size": "image_size", "patch_size": "patch_size", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.layer_norm_epsilon": "layer_norm_eps",
}  # fmt: skip
_CLIP = "clip.vision."


class Tower(NamedTuple):
    """The file of a tower, without the front of its keys, and the ids of the tokenizer's added tokens."""

    said: Mapping[str, Any]
    tensors: Mapping[str, Place]
    ids: Mapping[str, int]

    def id(self, token: str) -> int:
        if token not in self.ids:
            raise ValueError(f"the tokenizer has no special token {token}")
        return self.ids[token]

    def section(self, keys: Mapping[str, str]) -> dict[str, Any]:
        return {name: self.said[key] for key, name in keys.items() if key in self.said}


class Join(NamedTuple):
    """The function that makes a tensor of llama.cpp's, and ends of further tensors that it takes. run: where
    it only puts numbers in another order, the columns that it leaves side by side, 0 for whole rows."""

    make: Callable[..., Any]
    others: tuple[str, ...] = ()
    run: int | None = None


COLOURS_LAST = Join(lambda kernel: kernel.permute(0, 2, 3, 1).flatten(1))  # (D, C, P, P) -> (D, P · P · C)


@dataclass(frozen=True)
class Layout:
    """A family's models in GGUF files."""

    model_type: str  # of their config.json
    texts: Mapping[str, str]  # architecture of a text part -> the model_type of a text_config
    # Makes the rest of config.json, with its vision_config, and the settings of images.
    read: Callable[[Tower], tuple[dict[str, Any], dict[str, Any]]]
    # Makes keys of a text_config of those read so far and of the text part's.
    read_text: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] = lambda config, said: {}
    keys: Mapping[str, str] = field(default_factory=dict)  # of a text part, as in `_TEXT`
    # For a config, beginnings of our tensors' names -> theirs, where `gguf_weights` has others.
    fronts: Callable[[Any], Mapping[str, str]] = lambda config: {}
    # For the tower or the text part, what then stands in our names -> in theirs.
    inside: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # For a config, ends of our names -> how such tensors are made.
    joins: Callable[[Any], Mapping[str, Join]] = lambda config: {}
    ends: tuple[str, ...] = ()  # tokens that end an answer, whatever a file says
    alone: str = ""  # the model_type of a text part without a tower


def hub_files(text: Header, vision: Header | None, layouts: Iterable[tuple[str, Layout]]) -> dict[str, Any]:
    """The files of a checkpoint folder by name, JSON or text, but for its weights. `layouts` are those of all
    families, each after the projector that its models have."""
    stored = {} if vision is None else vision.metadata
    said = {name.removeprefix(_CLIP): value for name, value in stored.items()}
    kind = said.get("clip.projector_type") or said.get("projector_type")
    if not (fitting := [one for name, one in layouts if (name == kind if vision else one.alone)]):
        expected = f"expected {', '.join(dict(layouts))}, got {kind!r}"
        raise ValueError(f"{vision and vision.path}: the projector is not supported: {expected}")
    architecture = str(text.metadata.get("general.architecture"))
    known = {name: one for one in fitting for name in one.texts}
    if (layout := known.get(architecture)) is None:
        of = f"a tower of {fitting[0].model_type} ({vision.path})" if vision else "no tower (mmproj-….gguf)"
        raise ValueError(f"expected a text part of {' or '.join(known)}, got one of {architecture} and {of}")
    files, ids = gguf_tokenizer.read(text.metadata)
    own = _read_text(text, architecture, layout)
    config: dict[str, Any] = own | {"model_type": layout.alone}
    images: dict[str, Any] = {}
    if vision is not None:
        config, images = layout.read(Tower(said, vision.tensors, ids))
        config |= {"model_type": layout.model_type, "text_config": own}
    config["tie_word_embeddings"] = config["tie_embedding"] = "output.weight" not in text.tensors
    pixels = {name: said.get(name, [0.5] * 3) for name in ("image_mean", "image_std")}
    seen = {"image_seq_len": images.pop("image_seq_len", None), "image_processor": images | pixels}
    bos, eos, eot, pad = (
        text.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")
    )
    stops = {"eos_token_id": [one for one in (eos, eot) if one is not None]}
    files["generation_config.json"] = stops | {"bos_token_id": bos, "pad_token_id": pad}
    return files | {"config.json": config, "processor_config.json": seen}


def rows(tensors: Mapping[str, Place], name: str) -> int:
    if name not in tensors:
        raise ValueError(f"the tensor {name} is missing")
    return tensors[name].shape[0]


def _read_text(text: Header, architecture: str, layout: Layout) -> dict[str, Any]:
    front, tensors = f"{architecture}.", text.tensors
    said = {name.removeprefix(front): value for name, value in text.metadata.items()}
    if said.get("split.count", 1) not in (0, 1):
        raise ValueError(f"{text.path} is one of several parts: expected one file (llama-gguf-split --merge)")
    config = {name: said[key] for key, name in (_TEXT | {**layout.keys}).items() if key in said}
    config["num_hidden_layers"] -= said.get("nextn_predict_layers", 0)  # which draft further tokens
    config |= {"model_type": layout.texts[architecture], "vocab_size": rows(tensors, "token_embd.weight")}
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_dim", config["hidden_size"] // heads)
    config |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    if (scaling := said.get("rope.scaling.type", "none")) not in ("none", "linear"):
        raise ValueError(f"{text.path}: its rotary scaling is not supported, expected none or linear")
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling == "linear":
        rope = {"rope_type": "linear", "factor": said.get("rope.scaling.factor")}
    rope["partial_rotary_factor"] = said.get("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    if isinstance(sections := said.get("rope.dimension_sections"), list):
        rope["mrope_section"] = sections[:3]
    config["rope_parameters"] = rope | {"rope_theta": config.get("rope_theta", 10_000.0)}
    said["rope_freqs"] = stored_numbers(text, "rope_freqs.weight")
    config["eos_token_id"] = [at for at, one in enumerate(said[gguf_tokenizer.TOKENS]) if one in layout.ends]
    return config | layout.read_text(config, said)
