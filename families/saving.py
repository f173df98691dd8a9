"""Files for transformers: the keys of config.json that all of its classes have, and processors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.transformers_tokenizer import read_object
from families.text import both_dtypes
from models.config import VLMConfig


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
    `markers` name (see `vlm_config`), and `more`."""
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


@dataclass
class SavedProcessor:
    """A processor that is saved as one of transformers whose class needs torchvision, for videos.

    image_seq_len: positions of a tile; None where images have sizes of their own.
    roles: names that this class has for special tokens of the tokenizer.
    settings: of processor_config.json, those of images as "image_processor", of videos as "video_processor".
    """

    tokenizer: Any
    chat_template: str
    image_token_id: int
    image_seq_len: int | None
    roles: Mapping[str, str]
    settings: Mapping[str, Any]

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
        for name, more in (("tokenizer_config.json", self.roles), ("processor_config.json", self.settings)):
            written = read_object(folder / name) | {**more}
            (folder / name).write_text(json.dumps(written), encoding="utf-8")
