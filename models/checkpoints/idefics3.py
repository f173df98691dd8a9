"""The transformers Idefics3 / SmolVLM / SmolVLM2 layout: the one we also write.

Config keys and tensor names are those of transformers 5.23 and of the older checkpoints on the Hub; absent
keys take the defaults of transformers' Idefics3Config and LlamaConfig (the two model types share all of
them).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict

from models.checkpoints.errors import CheckpointError
from models.checkpoints.fields import build, first_id, section, text_config, token_ids, vision_config
from models.checkpoints.tensor_map import StoredTensor, StoredTensorOf, rename
from models.config import TextConfig, VLMConfig

FAMILY = "transformers Idefics3 / SmolVLM / SmolVLM2"
MODEL_TYPES = ("idefics3", "smolvlm")

# Ours -> theirs, the longer prefix first.
_PREFIXES = {
    "vision_model.layers.": "model.vision_model.encoder.layers.",
    "vision_model.post_layernorm.": "model.vision_model.post_layernorm.",
    "vision_model.": "model.vision_model.embeddings.",
    "projector.": "model.connector.modality_projection.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.text_model.",
}
# Buffers that old transformers versions stored; they follow from the config.
_HARMLESS = re.compile(r".*(rotary_emb\.inv_freq|embeddings\.position_ids)$")


def recognises(config: Mapping) -> bool:
    return config.get("model_type") in MODEL_TYPES


def read_config(config: Mapping, generation: Mapping) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig.

    Only the top-level tie_word_embeddings counts, as in transformers. Stop tokens are every id that either
    file names; `models.checkpoints.load` adds the tokenizer's own.

    Raises:
        CheckpointError: for a text model that is not Llama-shaped, or any value out of range.
    """
    text = section(config, "text_config")
    kind = text.get("model_type", "llama")
    if kind != "llama":
        raise CheckpointError(f"config.json: text_config.model_type must be llama, got {kind!r}")
    # transformers: rms_norm_eps is 1e-5 where there is no text_config at all, and LlamaConfig's 1e-6
    # otherwise.
    text_defaults = {} if config.get("text_config") is not None else {"rms_norm_eps": 1e-5}
    decoder = text_config(text, text_defaults)
    vocab = decoder.vocab_size
    return build(
        VLMConfig,
        vision=vision_config(section(config, "vision_config"), {}),
        text=decoder,
        scale_factor=config.get("scale_factor", 2),
        image_token_id=config.get("image_token_id", 128_257),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=first_id(*_ids("bos_token_id", generation, config, text), 1, vocab_size=vocab),
        eos_token_ids=token_ids(*_ids("eos_token_id", generation, config, text), vocab_size=vocab),
        pad_token_id=first_id(*_ids("pad_token_id", generation, text, config), vocab_size=vocab),
    )


def _ids(name: str, *sections: Mapping) -> list:
    return [section.get(name) for section in sections]


def stored_name(name: str) -> str:
    """Our tensor name -> the layout's."""
    return rename(name, _PREFIXES)


def our_name(name: str) -> str:
    """The layout's tensor name -> ours."""
    return rename(name, {theirs: ours for ours, theirs in _PREFIXES.items()})


def tensor_map(stored_names: Collection[str]) -> StoredTensorOf:
    """Where each of our tensors lies; some old checkpoints leave the leading `model.` out."""
    bare = not any(name.startswith("model.") for name in stored_names)

    def stored_tensor(name: str) -> StoredTensor:
        theirs = stored_name(name)
        return StoredTensor(theirs.removeprefix("model.") if bare else theirs)

    return stored_tensor


def is_harmless(name: str) -> bool:
    """Whether a stored tensor may be left out."""
    return _HARMLESS.fullmatch(name) is not None


def refine(config: VLMConfig, read) -> VLMConfig:
    """Nothing in this layout's tensors changes its config."""
    return config


def check_expressible(config: VLMConfig) -> None:
    """Refuse a model that this layout cannot hold. A trainer calls it before the first step, not after the
    last.

    Raises:
        CheckpointError: naming the field.
    """
    text = config.text
    problem = None
    if config.image_placement != "placeholder":
        problem = "image features in front of the text (nanoVLM v0.1) have no place in it"
    elif config.projector_bias:
        problem = "its projector has no bias: build the model with projector_bias=False"
    elif text.hidden_size % text.num_attention_heads:
        problem = (
            f"transformers wants hidden_size ({text.hidden_size}) to be a multiple of num_attention_heads "
            f"({text.num_attention_heads})"
        )
    if problem:
        raise CheckpointError(f"the model cannot be saved in the transformers Idefics3 layout: {problem}")


def write_config(config: VLMConfig, dtype: str) -> dict:
    """config.json that transformers 4.57 and 5 read alike: what changed its name is written under both.

    v5 reads rope_parameters and dtype, 4.57 reads rope_theta, rope_scaling and torch_dtype. Every field is
    written out, since a reader's defaults are not ours to rely on.
    """
    check_expressible(config)
    vision = {"model_type": "idefics3_vision", **asdict(config.vision), "attention_dropout": 0.0}
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **asdict(config.text)}
    text |= {
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": one_or_list(config.eos_token_ids),
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
    """generation_config.json: every stop token, greedy unless `kept`, what a loaded one said besides, says
    otherwise.
    """
    return {
        "do_sample": False,
        **kept,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": one_or_list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }


def one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    """Token ids as configs hold them: an int where there is one."""
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _write_rope(text: TextConfig) -> dict:
    theta, scaling = float(text.rope_theta), text.rope_scaling
    if scaling is None:
        return {
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "rope_theta": theta,
            "rope_scaling": None,
        }
    values = asdict(scaling)
    if scaling.rope_type == "linear":
        values = {"rope_type": "linear", "factor": scaling.factor}
    return {"rope_parameters": {**values, "rope_theta": theta}, "rope_theta": theta, "rope_scaling": values}
