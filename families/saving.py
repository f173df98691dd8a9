"""What several families save alike: sections of config.json, by the tables of `sections.py`, and processors
that transformers opens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from data.transformers_tokenizer import read_object
from families.sections import SCALINGS, TEXT_FAMILIES, TEXT_KEYS, VISION_KEYS
from models.checkpoints.files import CheckpointError
from models.config import TextConfig, VisionConfig, VLMConfig


def write_config(
    config: VLMConfig,
    dtype: str,
    architecture: str,
    kind: str,
    text: Mapping[str, Any],
    vision: Mapping[str, Any],
    markers: Iterable[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """config.json of a class of transformers: the keys that all of them have, its two sections, the ids that
    `markers` name (see `text.vlm_config`), and `more`."""
    ids = zip(markers, config.marker_token_ids)
    return {
        "architectures": [architecture],
        "model_type": kind,
        **both_dtypes(dtype),
        "image_token_id": config.image_token_id,
        **{name: id for name, id in ids if id is not None},
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": text,
        "vision_config": {**vision, **both_dtypes(dtype)},
        **more,
    }


def write_text(config: VLMConfig, dtype: str) -> dict:
    """A text_config that transformers 4.57 and 5 read alike: what changed its name is written under both.

    v5 reads rope_parameters and dtype, 4.57 reads rope_theta, rope_scaling and torch_dtype. Every field is
    written out, since a reader's defaults are not ours to rely on. A CheckpointError says that no text model
    of transformers has all parts of this one.
    """
    text, scaling = config.text, None
    if (kind := text_family(text)) is None:
        raise CheckpointError(
            "the model cannot be saved in a layout of transformers: no text model there has all of its "
            f"parts; known are {', '.join(TEXT_FAMILIES)}"
        )
    if text.rope_scaling is not None:
        names = ("rope_type", *SCALINGS[text.rope_scaling.rope_type])
        scaling = {name: getattr(text.rope_scaling, name) for name in names}
    theta = {"rope_theta": text.rope_theta}
    return {
        "model_type": kind,
        "architectures": [TEXT_FAMILIES[kind].architecture],
        **{name: getattr(text, name) for name in TEXT_KEYS},
        "attention_dropout": 0.0,
        **write_ids(config),
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": True,
        "rope_parameters": (scaling or {"rope_type": "default"}) | theta,
        "rope_scaling": scaling,
        **both_dtypes(dtype),
    }


def text_family(text: TextConfig) -> str | None:
    """The model_type of the family that has all parts of this text model, or None."""
    for kind, family in TEXT_FAMILIES.items():
        if all(getattr(text, name) == value for name, value in family.fixed.items()):
            return kind
    return None


def write_vision(vision: VisionConfig) -> dict:
    """A SigLIP-shaped section. A CheckpointError says what the tower has that SigLIP has not."""
    others = [f.name for f in fields(VisionConfig) if f.name not in VISION_KEYS]
    if strange := [name for name in others if getattr(vision, name) != getattr(VisionConfig, name)]:
        raise CheckpointError(
            f"the model cannot be saved with SigLIP's vision tower: its {', '.join(strange)} are not SigLIP's"
        )
    return {name: getattr(vision, name) for name in VISION_KEYS}


def both_dtypes(dtype: str) -> dict[str, str]:
    return {"dtype": dtype, "torch_dtype": dtype}


def write_ids(config: VLMConfig) -> dict:
    """The ids that a text_config and generation_config.json have keys for."""
    first, *more = config.eos_token_ids or (None,)
    stops = {"eos_token_id": [first, *more] if more else first}
    return {"bos_token_id": config.bos_token_id, **stops, "pad_token_id": config.pad_token_id}


@dataclass
class SavedProcessor:
    """A processor that is saved as one of transformers whose class needs torchvision, for videos.

    image_seq_len: positions of a tile; None where images have sizes of their own.
    roles: names that this class has for special tokens of the tokenizer.
    settings: of processor_config.json, those of images as "image_processor", of videos as "video_processor".
    """

    tokenizer: Any
    chat_template: str
    image_token: str
    settings: Mapping[str, Any]
    image_seq_len: int | None = None
    roles: Mapping[str, str] = field(default_factory=dict)

    @property
    def image_token_id(self) -> int:
        return self.tokenizer.convert_tokens_to_ids(self.image_token)

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
        for name, more in (("tokenizer_config.json", self.roles), ("processor_config.json", self.settings)):
            written = read_object(folder / name) | {**more}
            (folder / name).write_text(json.dumps(written), encoding="utf-8")
