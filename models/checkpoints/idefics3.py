"""The transformers Idefics3 / SmolVLM / SmolVLM2 layout: the one we also write.

Config keys and tensor names are those of transformers 5.23 and of the older checkpoints on the Hub; absent
keys take the defaults of transformers' Idefics3Config and LlamaConfig (the two model types share all of
them). What reads single sections of a config.json serves the other families, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from models.checkpoints.hub import CheckpointError
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, rename
from models.config import RopeScaling, TextConfig, VisionConfig, VLMConfig

T = TypeVar("T")

FAMILY = "transformers Idefics3 / SmolVLM / SmolVLM2"
# Our tensor names -> theirs, the longer prefix first.
NAMES = {
    "vision_model.layers.": "model.vision_model.encoder.layers.",
    "vision_model.post_layernorm.": "model.vision_model.post_layernorm.",
    "vision_model.": "model.vision_model.embeddings.",
    "projector.": "model.connector.modality_projection.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.text_model.",
}
# Buffers that old transformers versions stored follow from the config, and a tied head is the embedding.
_IGNORABLE = re.compile(r".*(rotary_emb\.inv_freq|embeddings\.position_ids)|lm_head\.weight")
# The fields of a TextConfig that a Llama config has. A field that is added for another family is neither
# written to this layout, nor may a model that is saved in it use it.
LLAMA_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "rope_scaling", "hidden_act", "attention_bias", "mlp_bias",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------- reading
def recognises(config: Mapping) -> bool:
    return config.get("model_type") in ("idefics3", "smolvlm")


def read_config(config: Mapping, generation: Mapping) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig.

    Only the top-level tie_word_embeddings counts, as in transformers. Stop tokens are every id that either
    file names; `models.checkpoints.load` adds the tokenizer's own.
    """
    text = section(config, "text_config")
    kind = text.get("model_type", "llama")
    if kind != "llama":
        raise CheckpointError(f"config.json: text_config.model_type must be llama, got {kind!r}")
    # In transformers rms_norm_eps is 1e-5 where there is no text_config at all, and LlamaConfig's 1e-6
    # otherwise.
    decoder = text_config(text, {} if config.get("text_config") is not None else {"rms_norm_eps": 1e-5})

    def first(name: str, *sections: Mapping) -> int | None:
        return first_id(*(section.get(name) for section in sections), vocab_size=decoder.vocab_size)

    stops = [section.get("eos_token_id") for section in (generation, config, text)]
    return build(
        VLMConfig,
        vision=vision_config(section(config, "vision_config"), {}),
        text=decoder,
        scale_factor=config.get("scale_factor", 2),
        image_token_id=config.get("image_token_id", 128_257),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=first("bos_token_id", generation, config, text, {"bos_token_id": 1}),
        eos_token_ids=token_ids(*stops, vocab_size=decoder.vocab_size),
        pad_token_id=first("pad_token_id", generation, text, config),
    )


def config_from_tensors(config: VLMConfig, entries: Mapping[str, Entry]) -> VLMConfig:
    """Nothing in this layout's tensors changes its config."""
    return config


def stored_name(name: str) -> str:
    """Our tensor name -> the layout's."""
    return rename(name, NAMES)


def tensor_map(stored_names: Collection[str]) -> StoredTensorOf:
    """Where each of our tensors lies; some old checkpoints leave the leading `model.` out."""
    prefix = "" if any(name.startswith("model.") for name in stored_names) else "model."
    return lambda name: StoredTensor(stored_name(name).removeprefix(prefix))


def is_ignorable(name: str) -> bool:
    return _IGNORABLE.fullmatch(name) is not None


# ------------------------------------------------------------------------------------------------- writing
def check_expressible(config: VLMConfig) -> None:
    """Refuse a model that this layout cannot hold. A trainer calls it before the first step, not after the
    last."""
    text = config.text
    problem = None
    if config.image_placement != "placeholder":
        problem = "image features in front of the text (nanoVLM v0.1) have no place in it"
    elif config.projector_bias:
        problem = "its projector has no bias: build the model with projector_bias=False"
    elif used := beyond_llama(text):
        problem = f"its text model is a Llama, which has no {used}"
    elif text.hidden_size % text.num_attention_heads:
        problem = (
            f"transformers wants hidden_size ({text.hidden_size}) to be a multiple of num_attention_heads "
            f"({text.num_attention_heads})"
        )
    if problem:
        raise CheckpointError(f"the model cannot be saved in the transformers Idefics3 layout: {problem}")


def beyond_llama(text: TextConfig) -> str | None:
    """The name of a field that a Llama config does not have, and this one uses."""
    others = [f for f in fields(TextConfig) if f.name not in LLAMA_FIELDS]
    return next((f.name for f in others if getattr(text, f.name) != f.default), None)


def write_config(config: VLMConfig, dtype: str) -> dict:
    """config.json that transformers 4.57 and 5 read alike: what changed its name is written under both.

    v5 reads rope_parameters and dtype, 4.57 reads rope_theta, rope_scaling and torch_dtype. Every field is
    written out, since a reader's defaults are not ours to rely on.
    """
    check_expressible(config)
    llama = {name: value for name, value in asdict(config.text).items() if name in LLAMA_FIELDS}
    vision = {"model_type": "idefics3_vision", **asdict(config.vision), "attention_dropout": 0.0}
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **llama}
    text |= {
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        **_write_rope(config.text),
    }
    both_dtypes = {"dtype": dtype, "torch_dtype": dtype}
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        **both_dtypes,
        "image_token_id": config.image_token_id,
        "pad_token_id": config.pad_token_id,
        "scale_factor": config.scale_factor,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "text_config": text | both_dtypes,
        "vision_config": vision | both_dtypes,
    }


def write_generation_config(config: VLMConfig, kept: Mapping) -> dict:
    """generation_config.json: every stop token, and greedy unless `kept`, which a loaded one said besides,
    says otherwise."""
    return {
        "do_sample": False,
        **kept,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _write_rope(text: TextConfig) -> dict:
    theta, scaling = float(text.rope_theta), text.rope_scaling
    values = None if scaling is None else asdict(scaling)
    if scaling is not None and scaling.rope_type == "linear":
        values = {"rope_type": "linear", "factor": scaling.factor}
    parameters = {**(values or {"rope_type": "default"}), "rope_theta": theta}
    return {"rope_parameters": parameters, "rope_theta": theta, "rope_scaling": values}


# ------------------------------------------------------------------------- sections that families share
def build(make: Callable[..., T], **values) -> T:
    """`make(**values)`; what it refuses is a fault of config.json."""
    try:
        return make(**values)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"config.json: {error}") from None


def section(config: Mapping, name: str) -> dict:
    """A nested object of a config, empty where it is absent or null."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config.json: {name} must be an object, got {type(value).__name__}")
    return value


def vision_config(stored: Mapping, defaults: Mapping[str, Any]) -> VisionConfig:
    """A SigLIP-shaped vision section: our field names are the Hub's."""
    values = dict(defaults)
    values |= {f.name: stored[f.name] for f in fields(VisionConfig) if stored.get(f.name) is not None}
    for name in ("image_size", "patch_size"):
        size = values.get(name)
        if isinstance(size, list) and size and size.count(size[0]) == len(size):
            values[name] = size[0]  # [s, s] is a square
    return build(VisionConfig, **values)


def text_config(stored: Mapping, defaults: Mapping[str, Any]) -> TextConfig:
    """A Llama-shaped text section."""
    plain = {f.name for f in fields(TextConfig)} - {"rope_theta", "rope_scaling"}
    values = dict(defaults)
    values |= {name: stored[name] for name in plain if stored.get(name) is not None}
    rope = _read_rope(stored, values.get("max_position_embeddings", TextConfig.max_position_embeddings))
    return build(TextConfig, **values, **rope)


def _read_rope(stored: Mapping, max_positions: int) -> dict[str, Any]:
    """rope_theta and rope_scaling, by transformers' rules (`convert_rope_params_to_dict` of v5).

    A rope_scaling that is not null replaces rope_parameters; the theta inside whichever of them stands wins
    over the one beside it. Llama-3 scaling without an original length takes the maximum length.
    """
    rope = section(stored, "rope_scaling") or section(stored, "rope_parameters")
    theta = rope.get("rope_theta")
    if theta is None:
        theta = stored.get("rope_theta")
    theta = TextConfig.rope_theta if theta is None else theta
    rotary_share = rope.get("partial_rotary_factor", stored.get("partial_rotary_factor"))
    if rotary_share not in (None, 1, 1.0):
        raise CheckpointError(f"config.json: partial_rotary_factor must be 1, got {rotary_share!r}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    names = ["factor"]
    if kind == "llama3":
        names += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    elif kind != "linear":
        raise CheckpointError(
            f"config.json: rotary scaling {kind!r} is not supported, expected default, linear or llama3"
        )
    values = {name: rope.get(name) for name in names}
    if kind == "llama3" and values["original_max_position_embeddings"] is None:
        values["original_max_position_embeddings"] = max_positions
    missing = [name for name in names if values[name] is None]
    if missing:
        raise CheckpointError(f"config.json: {kind} rotary scaling lacks {', '.join(missing)}")
    return {"rope_theta": theta, "rope_scaling": build(RopeScaling, rope_type=kind, **values)}


def token_ids(*values: Any, vocab_size: int) -> tuple[int, ...]:
    """The union of ids given as an int, a list of ints or None, in ascending order.

    An id below 0 or beyond the vocabulary is as good as absent: -1 is how some configs say so, and others
    name ids of the tokenizer that they were made for.
    """
    found: set[int] = set()
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if isinstance(item, bool) or not isinstance(item, int):
                raise CheckpointError(f"config.json: a token id must be a whole number, got {item!r}")
            if 0 <= item < vocab_size:
                found.add(item)
    return tuple(sorted(found))


def first_id(*values: Any, vocab_size: int) -> int | None:
    """The first id that is given at all, and is in the vocabulary."""
    return next((ids[0] for value in values if (ids := token_ids(value, vocab_size=vocab_size))), None)
