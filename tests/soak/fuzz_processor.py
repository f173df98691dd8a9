"""Conversations with images of any size and texts of any kind, through processors of every sort.

What is taken must have a placeholder for each feature, no special token that somebody typed, masks that fit,
and must decode.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from PIL import Image

from data.errors import ImageError, PromptError
from data.processor import ModelInputs, Processor
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
    return mostly(
        rng, {"type": "image", rng.choice(("image", "image", "url", "path", "base64")): source(rng)}
    )


def message(rng: random.Random) -> Any:
    content = text(rng) if rng.randrange(2) else [part(rng) for _ in range(rng.randrange(4))]
    role = rng.choice(("user", "user", "assistant", "system"))
    return mostly(rng, {"role": mostly(rng, role), "content": mostly(rng, content)})


def conversation(rng: random.Random) -> Any:
    return mostly(rng, [message(rng) for _ in range(rng.randrange(5))])


def make(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(KINDS)
    if rng.randrange(2):
        images = rng.choice((None, source(rng), [source(rng) for _ in range(rng.randrange(4))]))
        system = rng.choice((None, text(rng)))
        return {
            "kind": kind,
            "images": images,
            "question": mostly(rng, text(rng), scalar(rng)),
            "system": system,
        }
    several = [conversation(rng) for _ in range(rng.randrange(3))] if rng.randrange(2) else conversation(rng)
    side = rng.choice(("left", "right"))
    return {
        "kind": kind,
        "conversations": mostly(rng, several),
        "generation": rng.random() < 0.5,
        "side": side,
    }


def opened(folder: Path):
    def run(value: dict[str, Any]) -> str:
        own = processor(value["kind"])
        if "question" in value:
            inputs = own.ask(value["images"], value["question"], value["system"])
        else:
            inputs = own.prepare(
                value["conversations"], value["generation"], value["side"], return_assistant_mask=True
            )
        check(own, inputs)
        return value["kind"]

    return run


def check(own: Processor, inputs: ModelInputs) -> None:
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if ids.shape != mask.shape or not mask.any(1).all():
        raise Wrong(f"ids {tuple(ids.shape)}, mask {tuple(mask.shape)} with an empty row")
    said = inputs.get("assistant_mask")
    if said is not None and (said & ~mask.bool()).any():
        raise Wrong("the assistant speaks in the padding")
    if own.image_token_id is not None:
        places = ((ids == own.image_token_id) & mask.bool()).sum(1).tolist()
        if places != inputs.image_tokens:
            raise Wrong(f"{places} placeholders for {inputs.image_tokens} features")
    pixels = inputs.get("pixel_values")
    if pixels is not None and not pixels.isfinite().all():
        raise Wrong("pixels that are not finite")
    own.decode(ids[0])
