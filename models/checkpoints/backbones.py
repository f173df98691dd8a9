"""Starting a new model from a bare vision tower and a bare language model: SigLIP and Llama.

A `Backbone` is what we know of a family: how its config.json is read, and what its tensors are called. A
family that is like one of these is one more entry in VISION or TEXT. `from_backbones` joins the two: new
vocabulary rows for the image tokens start as the mean of the rows that exist (head included, where it is its
own), the projector at random.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from models.checkpoints.hub import CheckpointError, CheckpointFiles, locate
from models.checkpoints.idefics3 import build, first_id, section, text_config, token_ids, vision_config
from models.checkpoints.load import (
    EMBEDDING,
    HEAD,
    expected_shapes,
    fill,
    meta_init,
    resolve_device,
    resolve_dtype,
    resolve_tying,
)
from models.checkpoints.weights import (
    Entry,
    Shape,
    StoredTensor,
    StoredTensorOf,
    check_shapes,
    rename,
    stored_entries,
)
from models.config import TextConfig, VisionConfig, VLMConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Backbone:
    """A family of bare towers.

    family: its name for people.
    read_config: config.json -> our VisionConfig or TextConfig.
    names: prefixes of our tensor names -> theirs, the longer ones first.
    ignorable: stored tensors (a regular expression) that may be left out.
    optional_prefix: what all stored names may lack together.
    """

    family: str
    read_config: Callable[[Mapping], Any]
    names: Mapping[str, str]
    ignorable: str
    optional_prefix: str = ""

    def tensor_map(self, stored_names: Collection[str]) -> StoredTensorOf:
        """Where our tensors lie."""
        prefix = self.optional_prefix
        bare = prefix and not any(name.startswith(prefix) for name in stored_names)

        def stored_tensor(name: str) -> StoredTensor:
            theirs = rename(name, self.names)
            return StoredTensor(theirs.removeprefix(prefix) if bare else theirs)

        return stored_tensor


# Defaults of transformers' SiglipVisionConfig.
_SIGLIP_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}


def _siglip(of_section: Callable[[Mapping], Mapping]) -> Backbone:
    return Backbone(
        family="SigLIP vision backbone",
        read_config=lambda config: vision_config(of_section(config), _SIGLIP_DEFAULTS),
        names={
            "vision_model.layers.": "vision_model.encoder.layers.",
            "vision_model.post_layernorm.": "vision_model.post_layernorm.",
            "vision_model.": "vision_model.embeddings.",
        },
        # The other tower of a SigLIP pair, its pooling head, and buffers that follow from the config.
        ignorable=r"(text_model\..*|(vision_model\.)?head\..*|logit_(scale|bias)|.*\.position_ids)",
        optional_prefix="vision_model.",
    )


# By the model_type of config.json. Fixed-resolution SigLIP2 checkpoints are SigLIP's.
VISION = {
    "siglip": _siglip(lambda config: section(config, "vision_config")),
    "siglip_vision_model": _siglip(lambda config: config),
}
TEXT = {
    "llama": Backbone(
        family="Llama backbone",
        read_config=lambda config: text_config(config, {}),
        names={"language_model.lm_head.": "lm_head.", "language_model.": "model."},
        ignorable=r".*rotary_emb\.inv_freq",
    ),
}


def choose_backbone(config: Mapping, kind: str) -> Backbone:
    """The "vision" or "text" backbone that a config.json describes."""
    known = {"vision": VISION, "text": TEXT}[kind]
    model_type = config.get("model_type")
    if model_type not in known:
        raise CheckpointError(
            f"unsupported {kind} backbone (model_type {model_type!r}): expected {' or '.join(known)}"
        )
    return known[model_type]


def read_vision_config(config: Mapping) -> VisionConfig:
    return choose_backbone(config, "vision").read_config(config)


def read_text_config(config: Mapping) -> TextConfig:
    return choose_backbone(config, "text").read_config(config)


def from_backbones(
    cls: type[T],
    vision: str | Path,
    text: str | Path,
    scale_factor: int = 4,
    extra_tokens: int = 1,
    image_token_id: int | None = None,
    dtype: torch.dtype | str | None = "float32",
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> T:
    """A new model of class `cls`, in training mode, from a vision tower and a language model.

    Args:
        vision: repository id (`id@revision` for a revision) or folder of a SigLIP checkpoint.
        text: the same for a Llama-family checkpoint.
        scale_factor: pixel shuffle: patches folded along each side into one token.
        extra_tokens: rows added to the vocabulary for image tokens; each is the mean of the existing rows.
        image_token_id: id of the image placeholder; None is the first added row.
        dtype: dtype of all weights; "stored" is the language model's own.
        device: where the weights go.
        generator: for the projector's random weights.
    """
    vision_files, text_files = locate(*_with_revision(vision)), locate(*_with_revision(text))
    vision_backbone, vision_part = _read(vision_files, "vision")
    text_backbone, text_part = _read(text_files, "text")
    vision_entries, text_entries = stored_entries(vision_files), stored_entries(text_files)
    vision_map, text_map = vision_backbone.tensor_map(vision_entries), text_backbone.tensor_map(text_entries)
    rows = text_part.vocab_size
    if extra_tokens < 0 or (extra_tokens == 0 and image_token_id is None):
        raise CheckpointError(
            f"extra_tokens must be at least 1 without an image_token_id, got {extra_tokens}"
        )
    stored = text_files.config
    tied = resolve_tying(
        bool(stored.get("tie_word_embeddings", False)), text_map, text_entries, text_files.source
    )
    config = build(
        VLMConfig,
        vision=vision_part,
        text=text_backbone.read_config({**stored, "vocab_size": rows + extra_tokens}),
        scale_factor=scale_factor,
        image_token_id=rows if image_token_id is None else image_token_id,
        tie_word_embeddings=tied,
        bos_token_id=first_id(stored.get("bos_token_id"), vocab_size=rows),
        eos_token_ids=token_ids(
            text_files.generation_config.get("eos_token_id"), stored.get("eos_token_id"), vocab_size=rows
        ),
        pad_token_id=first_id(stored.get("pad_token_id"), vocab_size=rows),
    )
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, stored, device)
    expected = expected_shapes(cls, config)
    expected |= {name: (rows, *expected[name][1:]) for name in (HEAD, EMBEDDING) if name in expected}
    vision_shapes = {name: shape for name, shape in expected.items() if name.startswith("vision_model.")}
    text_shapes = {name: shape for name, shape in expected.items() if name.startswith("language_model.")}
    _check(vision_shapes, vision_backbone, vision_map, vision_entries, vision_files.source)
    _check(
        text_shapes,
        text_backbone,
        text_map,
        text_entries,
        text_files.source,
        text_map(HEAD).name if tied else "",
    )
    with meta_init():
        model: Any = cls(config)  # type: ignore[call-arg]
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


def _read(files: CheckpointFiles, kind: str) -> tuple[Backbone, Any]:
    try:
        backbone = choose_backbone(files.config, kind)
        return backbone, backbone.read_config(files.config)
    except CheckpointError as error:
        raise CheckpointError(f"{files.source}: {error}") from None


def _check(
    expected: Mapping[str, Shape],
    backbone: Backbone,
    stored_tensor: StoredTensorOf,
    entries: Mapping[str, Entry],
    source: str,
    head_copy: str = "",
) -> None:
    shapes = {name: entry.shape for name, entry in entries.items()}
    ignorable = re.compile(backbone.ignorable)
    check_shapes(
        expected,
        stored_tensor,
        shapes,
        lambda name: name == head_copy or ignorable.fullmatch(name) is not None,
        source,
    )


def _extend_vocabulary(model: Any, rows: int) -> None:
    """Grow embedding and head from `rows` to the config's vocabulary with rows that are the mean of the
    old ones."""
    language_model, vocab_size = model.language_model, model.config.text.vocab_size

    def extended(weight: Tensor) -> nn.Parameter:
        mean = weight.detach().float().mean(0, keepdim=True).to(weight.dtype)
        return nn.Parameter(torch.cat((weight.detach(), mean.expand(vocab_size - rows, -1))))

    language_model.embed_tokens.weight = extended(language_model.embed_tokens.weight)
    if model.config.tie_word_embeddings:
        language_model.lm_head.weight = language_model.embed_tokens.weight
    else:
        language_model.lm_head.weight = extended(language_model.lm_head.weight)
