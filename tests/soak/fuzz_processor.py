"""Conversations with images of any size and texts of any kind, through processors of every sort.

What is taken must have a placeholder for each feature, masks that fit, finite pixels, and must decode.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from PIL import Image

from data.errors import ImageError, PromptError
from tests.processors import processor
from tests.soak.changes import ODD_SOURCES, encoded_image, mostly, scalar, size, text
from tests.soak.fuzz import Wrong

REFUSALS = (PromptError, ImageError)
KINDS = ("embedded", "llama", "merged", "nfkc", "unigram", "nanovlm-current", "nanovlm-v0.1")
MODES = ("RGB", "L", "RGBA", "P", "1", "LA", "CMYK", "I;16", "F")


def source(rng: random.Random) -> Any:
    kind = rng.randrange(4)
    if kind < 2:
        return Image.new(rng.choice(MODES), size(rng))
    return encoded_image(rng) if kind == 2 else mostly(rng, rng.choice(ODD_SOURCES), scalar(rng))


def part(rng: random.Random) -> Any:
    if rng.randrange(3):
        return mostly(rng, {"type": "text", "text": mostly(rng, text(rng))})
    key = rng.choice(("image", "image", "url", "path", "base64"))
    return mostly(rng, {"type": "image", key: source(rng)})


def message(rng: random.Random) -> Any:
    content = text(rng) if rng.randrange(2) else [part(rng) for _ in range(rng.randrange(4))]
    role = rng.choice(("user", "user", "assistant", "system"))
    return mostly(rng, {"role": mostly(rng, role), "content": mostly(rng, content)})


def conversation(rng: random.Random) -> Any:
    return mostly(rng, [message(rng) for _ in range(rng.randrange(5))])


def make(rng: random.Random) -> tuple[str, str, tuple]:
    """A kind of processor, one of its methods, and that one's arguments."""
    kind = rng.choice(KINDS)
    if rng.randrange(2):
        images = rng.choice((None, source(rng), [source(rng) for _ in range(rng.randrange(4))]))
        return kind, "ask", (images, mostly(rng, text(rng), scalar(rng)), rng.choice((None, text(rng))))
    several = [conversation(rng) for _ in range(rng.randrange(3))] if rng.randrange(2) else conversation(rng)
    return kind, "prepare", (mostly(rng, several), rng.random() < 0.5, rng.choice(("left", "right")), True)


def opened(folder: Path):
    return run


def run(value: tuple[str, str, tuple]) -> str:
    kind, method, arguments = value
    p = processor(kind)
    inputs = getattr(p, method)(*arguments)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if ids.shape != mask.shape or not mask.any(1).all():
        raise Wrong(f"ids {tuple(ids.shape)}, mask {tuple(mask.shape)} with an empty row")
    if p.image_token_id is not None:
        places = ((ids == p.image_token_id) & mask.bool()).sum(1).tolist()
        if places != inputs.image_tokens:
            raise Wrong(f"{places} placeholders for {inputs.image_tokens} features")
    if "pixel_values" in inputs and not inputs["pixel_values"].isfinite().all():
        raise Wrong("pixels that are not finite")
    p.decode(ids[0])
    return kind
