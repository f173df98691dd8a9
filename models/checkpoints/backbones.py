"""Starting a new model from a bare vision tower and a bare language model: SigLIP; Llama, Qwen2 and Qwen3.

A `Backbone` is what we know of a family: how its config.json is read, and what its tensors are called. A
family that is like one of these is one more entry in VISION or TEXT. `from_backbones` joins the two: new
vocabulary rows for the image tokens start as the mean of the rows that exist (head included, where it is its
own), the projector at random.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from families import NEW
from families.keys import first_id, section, token_ids
from families.sections import TEXT_FAMILIES, text_config, vision_config
from models.checkpoints.files import CheckpointError, naming
from models.checkpoints.load import (
    EMBEDDING,
    HEAD,
    empty_model,
    entries_of,
    fill,
    parameter_shapes,
    resolve_device,
    resolve_dtype,
    resolve_tying,
)
from models.checkpoints.sources import open_files
from models.checkpoints.weights import StoredTensor, StoredTensorOf, check_shapes, rename, shapes_of
from models.config import VLMConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Backbone:
    """A family of bare towers."""

    family: str  # its name for people
    read_config: Callable[[Mapping], Any]  # config.json -> our VisionConfig or TextConfig
    names: Mapping[str, str]  # prefixes of our tensor names -> theirs, the longer ones first
    ignorable: re.Pattern  # stored tensors that may be left out
    optional_prefix: str = ""  # what all stored names may lack together

    def tensor_map(self, stored_names: Collection[str]) -> StoredTensorOf:
        """The place of each of our tensors."""
        whole = any(name.startswith(self.optional_prefix) for name in stored_names)
        prefix = "" if whole else self.optional_prefix
        return lambda name: StoredTensor(rename(name, self.names).removeprefix(prefix))


# Where transformers' SiglipVisionConfig differs from VisionConfig. The tower of new models is SigLIP's.
_SIGLIP_DEFAULTS = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}
_SIGLIP = partial(
    Backbone,
    "SigLIP vision backbone",
    names={ours: name.removeprefix("model.") for ours, name in NEW.NAMES.items() if "vision" in ours},
    # The other tower of a SigLIP pair, its pooling head, and buffers that follow from the config.
    ignorable=re.compile(r"(text_model\..*|(vision_model\.)?head\..*|logit_(scale|bias)|.*\.position_ids)"),
    optional_prefix="vision_model.",
)
_TEXT_NAMES = {"language_model.lm_head.": "lm_head.", "language_model.": "model."}
# By the model_type of config.json. Fixed-resolution SigLIP2 checkpoints are SigLIP's.
VISION: dict[str, Backbone] = {
    "siglip": _SIGLIP(lambda config: vision_config(section(config, "vision_config"), _SIGLIP_DEFAULTS)),
    "siglip_vision_model": _SIGLIP(lambda config: vision_config(config, _SIGLIP_DEFAULTS)),
}
TEXT: dict[str, Backbone] = {
    kind: Backbone(
        f"{kind.capitalize()} backbone", partial(text_config, defaults={}), _TEXT_NAMES, NEW.IGNORABLE
    )
    for kind in TEXT_FAMILIES
}


def choose_backbone(config: Mapping, known: Mapping[str, Backbone]) -> Backbone:
    """The one of VISION or TEXT that a config.json describes."""
    if (kind := str(config.get("model_type"))) not in known:
        what = "vision" if known is VISION else "text"
        raise CheckpointError(f"model_type of a {what} backbone: expected {' or '.join(known)}, got {kind}")
    return known[kind]


class _Tower:
    """A checkpoint of a backbone: `config` is ours, `stored` its config.json. `id@revision` names a
    revision."""

    def __init__(self, source: str | Path, known: Mapping[str, Backbone]):
        revision = None
        if isinstance(source, str) and "@" in source and not Path(source).expanduser().is_dir():
            source, revision = source.rsplit("@", 1)
        self.opened = open_files(source, revision)
        self.stored = self.opened.config
        with naming(self.opened.source):
            self.backbone = choose_backbone(self.stored, known)
            self.config = self.backbone.read_config(self.stored)
        self.entries = entries_of(self.opened)
        self.tensor_map = self.backbone.tensor_map(self.entries)


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
        text: the same for a Llama, Qwen2 or Qwen3 checkpoint.
        scale_factor: pixel shuffle: patches folded along each side into one token.
        extra_tokens: rows added to the vocabulary for image tokens; each is the mean of the existing rows.
        image_token_id: id of the image placeholder; None is the first added row.
        dtype: dtype of all weights; "stored" is the language model's own.
        device: where the weights go.
        generator: for the projector's random weights.
    """
    towers = {"vision_model.": _Tower(vision, VISION), "language_model.": _Tower(text, TEXT)}
    seeing, speaking = towers.values()
    stored, rows = speaking.stored, speaking.config.vocab_size
    image = rows if image_token_id is None else image_token_id
    if extra_tokens < 0 or image >= rows + extra_tokens:
        raise CheckpointError(f"extra_tokens: expected rows for image_token_id {image}, got {extra_tokens}")
    tied = bool(stored.get("tie_word_embeddings", False))
    tied = resolve_tying(tied, speaking.tensor_map, speaking.entries, speaking.opened.source)
    stops = (speaking.opened.generation_config.get("eos_token_id"), stored.get("eos_token_id"))
    with naming(f"{vision} and {text}"):
        config = VLMConfig(
            vision=seeing.config,
            text=replace(speaking.config, vocab_size=rows + extra_tokens),
            scale_factor=scale_factor,
            image_token_id=image,
            tie_word_embeddings=tied,
            bos_token_id=first_id(stored.get("bos_token_id"), vocab_size=rows),
            eos_token_ids=token_ids(*stops, vocab_size=rows),
            pad_token_id=first_id(stored.get("pad_token_id"), vocab_size=rows),
        )
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, stored, device)
    model: Any = empty_model(cls, config)
    expected = parameter_shapes(model)
    expected |= {name: (rows, *expected[name][1:]) for name in (HEAD, EMBEDDING) if name in expected}
    for prefix, tower in towers.items():
        shapes = {name: shape for name, shape in expected.items() if name.startswith(prefix)}
        stored_shapes, ignorable = shapes_of(tower.entries), tower.backbone.ignorable
        check_shapes(shapes, tower.tensor_map, stored_shapes, ignorable, tower.opened.source)
        fill(model, shapes, tower.tensor_map, tower.entries, dtype, device)
    table, head = model.language_model.embed_tokens, model.language_model.lm_head
    table.weight = with_mean_rows(table.weight, extra_tokens)
    head.weight = table.weight if tied else with_mean_rows(head.weight, extra_tokens)
    # Drawn where the generator is and in float32: a seed gives the same projector on any device.
    model.projector.to_empty(device="cpu" if generator is None else generator.device)
    model.init_weights(generator, prefix="projector.")
    model.projector.to(device, dtype)
    return model


def with_mean_rows(weight: Tensor, rows: int, summed_in: torch.dtype = torch.float32) -> nn.Parameter:
    """A weight with more rows, each the mean of those that exist."""
    mean = weight.detach().to(summed_in).mean(0, keepdim=True).to(weight.dtype)
    return nn.Parameter(torch.cat((weight.detach(), mean.expand(rows, -1))))
