"""Starting a new model from a bare SigLIP vision tower and a bare Llama-family language model.

Readers of the two layouts, and `from_backbones`, which joins them: new vocabulary rows for the image tokens
start as the mean of the rows that exist (head included, where it is its own), the projector at random.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from models.checkpoints.errors import CheckpointError
from models.checkpoints.fields import build, first_id, section, text_config, token_ids, vision_config
from models.checkpoints.load import (
    EMBEDDING,
    HEAD,
    expected_shapes,
    fill,
    resolve_device,
    resolve_dtype,
    resolve_tying,
    stored_entries,
)
from models.checkpoints.locate import CheckpointFiles, locate
from models.checkpoints.safetensors_io import Entry
from models.checkpoints.tensor_map import StoredTensor, StoredTensorOf, check_shapes, rename
from models.config import TextConfig, VisionConfig, VLMConfig
from models.skeleton import without_weights
from models.vision_language_model import VisionLanguageModel

# Defaults of transformers' SiglipVisionConfig.
_SIGLIP_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
_VISION_PREFIXES = {
    "vision_model.layers.": "vision_model.encoder.layers.",
    "vision_model.post_layernorm.": "vision_model.post_layernorm.",
    "vision_model.": "vision_model.embeddings.",
}
_TEXT_PREFIXES = {"language_model.lm_head.": "lm_head.", "language_model.": "model."}
# The other tower of a SigLIP pair, its pooling head, and buffers that follow from the config.
_VISION_HARMLESS = re.compile(
    r"(text_model\..*|(vision_model\.)?head\..*|logit_(scale|bias)|.*\.position_ids)"
)
_TEXT_HARMLESS = re.compile(r".*rotary_emb\.inv_freq")


def read_vision_config(config: Mapping) -> VisionConfig:
    """config.json of a SigLIP or fixed-resolution SigLIP2 checkpoint, whole or vision tower alone.

    Raises:
        CheckpointError: for another architecture, the NaFlex variant of SigLIP2 among them.
    """
    kind = config.get("model_type")
    if kind == "siglip":
        return vision_config(section(config, "vision_config"), _SIGLIP_DEFAULTS)
    if kind == "siglip_vision_model":
        return vision_config(config, _SIGLIP_DEFAULTS)
    raise CheckpointError(
        f"unsupported vision backbone (model_type {kind!r}): expected siglip or siglip_vision_model, "
        f"which the "
        f"fixed-resolution SigLIP2 checkpoints are too"
    )


def read_text_config(config: Mapping) -> TextConfig:
    """config.json of a LlamaForCausalLM checkpoint, SmolLM2 for instance.

    Raises:
        CheckpointError: for another architecture.
    """
    if config.get("model_type") != "llama":
        raise CheckpointError(
            f"unsupported text backbone (model_type {config.get('model_type')!r}): expected llama"
        )
    return text_config(config, {})


def vision_tensor_map(stored_names: Collection[str]) -> StoredTensorOf:
    """Where our vision tensors lie; a vision tower stored alone may leave `vision_model.` out."""
    bare = not any(name.startswith("vision_model.") for name in stored_names)

    def stored_tensor(name: str) -> StoredTensor:
        theirs = rename(name, _VISION_PREFIXES)
        return StoredTensor(theirs.removeprefix("vision_model.") if bare else theirs)

    return stored_tensor


def text_tensor_map(stored_names: Collection[str]) -> StoredTensorOf:
    """Where our text tensors lie."""
    return lambda name: StoredTensor(rename(name, _TEXT_PREFIXES))


def from_backbones(
    vision: str | Path,
    text: str | Path,
    scale_factor: int = 4,
    extra_tokens: int = 1,
    image_token_id: int | None = None,
    dtype: torch.dtype | str | None = "float32",
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> VisionLanguageModel:
    """A new model, in training mode, from a vision tower and a language model.

    Args:
        vision: repository id (`id@revision` for a revision) or folder of a SigLIP checkpoint.
        text: the same for a Llama-family checkpoint.
        scale_factor: pixel shuffle: patches folded along each side into one token.
        extra_tokens: rows added to the vocabulary for image tokens; each is the mean of the existing rows.
        image_token_id: id of the image placeholder; None is the first added row.
        dtype: dtype of all weights; "stored" is the language model's own.
        device: where the weights go.
        generator: for the projector's random weights.

    Raises:
        CheckpointError: for a backbone that cannot be read, or numbers that do not fit each other.
    """
    vision_files, text_files = locate(*_with_revision(vision)), locate(*_with_revision(text))
    vision_part, text_part = _named(vision_files, read_vision_config), _named(text_files, read_text_config)
    vision_entries, text_entries = stored_entries(vision_files), stored_entries(text_files)
    text_map = text_tensor_map(text_entries)
    claimed = bool(text_files.config.get("tie_word_embeddings", False))
    rows = text_part.vocab_size
    if extra_tokens < 0 or (extra_tokens == 0 and image_token_id is None):
        raise CheckpointError(
            f"extra_tokens must be at least 1 without an image_token_id, got {extra_tokens}"
        )
    config = build(
        VLMConfig,
        vision=vision_part,
        text=read_text_config({**text_files.config, "vocab_size": rows + extra_tokens}),
        scale_factor=scale_factor,
        image_token_id=rows if image_token_id is None else image_token_id,
        tie_word_embeddings=resolve_tying(claimed, text_map, text_entries, text_files.source),
        bos_token_id=first_id(text_files.config.get("bos_token_id"), vocab_size=rows),
        eos_token_ids=token_ids(
            text_files.generation_config.get("eos_token_id"),
            text_files.config.get("eos_token_id"),
            vocab_size=rows,
        ),
        pad_token_id=first_id(text_files.config.get("pad_token_id"), vocab_size=rows),
    )
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, text_files.config, device)
    vision_map = vision_tensor_map(vision_entries)
    vision_shapes = _checked(config, "vision_model.", vision_map, vision_entries, vision_files)
    text_shapes = _checked(config, "language_model.", text_map, text_entries, text_files, rows)
    with without_weights():
        model = VisionLanguageModel(config)
    fill(model, vision_shapes, vision_map, vision_entries, dtype, device)
    fill(model, text_shapes, text_map, text_entries, dtype, device)
    _extend_vocabulary(model, rows)
    # Drawn where the generator is and in float32: a seed gives the same projector on any device.
    model.projector.to_empty(device="cpu" if generator is None else generator.device)
    model.init_weights(generator, prefix="projector.")
    model.projector.to(device, dtype)
    return model


def _with_revision(source: str | Path) -> tuple[str | Path, str | None]:
    if isinstance(source, Path) or Path(source).expanduser().is_dir() or "@" not in source:
        return source, None
    repo, revision = source.rsplit("@", 1)
    return repo, revision


def _named(files: CheckpointFiles, read):
    """A config read with the checkpoint named in what goes wrong."""
    try:
        return read(files.config)
    except CheckpointError as error:
        raise CheckpointError(f"{files.source}: {error}") from None


def _checked(
    config: VLMConfig,
    prefix: str,
    stored_tensor: StoredTensorOf,
    entries: Mapping[str, Entry],
    files: CheckpointFiles,
    rows: int | None = None,
) -> dict[str, tuple[int, ...]]:
    """The parameters under `prefix` and their shapes, once the file has them all; the vocabulary's have
    `rows` rows there."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in expected_shapes(config).items():
        if name.startswith(prefix):
            expected[name] = (rows, *shape[1:]) if rows is not None and name in (HEAD, EMBEDDING) else shape
    harmless = _VISION_HARMLESS if prefix == "vision_model." else _TEXT_HARMLESS
    tied = prefix == "language_model." and config.tie_word_embeddings
    shapes = {name: entry.shape for name, entry in entries.items()}
    check_shapes(
        expected,
        stored_tensor,
        shapes,
        lambda name: (tied and name == "lm_head.weight") or harmless.fullmatch(name) is not None,
        files.source,
    )
    return expected


def _extend_vocabulary(model: VisionLanguageModel, rows: int) -> None:
    """Grow embedding and head from `rows` to the config's vocabulary with rows that are the mean of the
    old ones.
    """
    language_model, vocab_size = model.language_model, model.config.text.vocab_size

    def extended(weight: Tensor) -> nn.Parameter:
        mean = weight.detach().float().mean(0, keepdim=True).to(weight.dtype)
        return nn.Parameter(torch.cat((weight.detach(), mean.expand(vocab_size - rows, -1))))

    language_model.embed_tokens.weight = extended(language_model.embed_tokens.weight)
    if model.config.tie_word_embeddings:
        language_model.lm_head.weight = language_model.embed_tokens.weight
    else:
        language_model.lm_head.weight = extended(language_model.lm_head.weight)
