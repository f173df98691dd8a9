"""Rows of a stranger's dataset in every schema, with columns of other kinds, as training encodes them.

What is taken must have as many labels as ids, as many placeholders as features, and no label on them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from data.errors import BadRow, DatasetError
from data.packing import SampleEncoder
from data.row_schemas import COLUMNS
from data.sources import DatasetConfig, open_source
from tests.processors import processor
from tests.soak.changes import ODD_SOURCES, encoded_image, image_bytes, mostly, text
from tests.soak.fuzz import Wrong

REFUSALS = (BadRow, DatasetError)
KINDS = ("embedded", "nanovlm-current", "nanovlm-v0.1")


def image(rng: random.Random) -> Any:
    data = encoded_image(rng)
    held = {"bytes": data, "path": rng.choice((None, "a.png"))}
    return mostly(rng, rng.choice((data, held, held, "a.png", rng.choice(ODD_SOURCES))))


def messages(rng: random.Random) -> Any:
    said = []
    for _ in range(rng.randrange(4)):
        parts = [{"type": "text", "text": mostly(rng, text(rng))}, {"type": "image", "image": image(rng)}]
        content = text(rng) if rng.randrange(2) else [mostly(rng, part) for part in parts[: rng.randrange(3)]]
        role = mostly(rng, rng.choice(("user", "assistant", "system")))
        said.append(mostly(rng, {"role": role, "content": mostly(rng, content)}))
    return mostly(rng, said)


def row(rng: random.Random) -> Any:
    turn = {"user": mostly(rng, text(rng)), "assistant": mostly(rng, text(rng))}
    made = rng.choice((
        {"messages": messages(rng)},
        {"prompt": messages(rng), "completion": messages(rng)},
        {"texts": mostly(rng, [mostly(rng, turn)] * rng.randrange(3))},
        {"question": mostly(rng, text(rng)), "answer": mostly(rng, text(rng))},
    ))  # fmt: skip
    optional = {
        "image": image(rng),
        "images": mostly(rng, [image(rng) for _ in range(rng.randrange(3))]),
        "rating": mostly(rng, rng.randrange(6)),
        "ratings": mostly(rng, [mostly(rng, rng.randrange(6)) for _ in range(rng.randrange(3))]),
    }
    return mostly(rng, made | {name: value for name, value in optional.items() if rng.randrange(2)})


def make(rng: random.Random) -> tuple[str, Any, dict, dict]:
    """A kind of processor, a row, ratings that it must have, and columns that are named."""
    ratings = rng.choice(({}, {}, {"rating": 2}, {"ratings": 3}, {"rating": 2, "ratings": 1.5}))
    columns = mostly(rng, {}, {rng.choice((*COLUMNS, "x")): rng.choice(COLUMNS)})
    return rng.choice(KINDS), row(rng), ratings, columns


def opened(folder: Path):
    (folder / "a.png").write_bytes(image_bytes(40, 30))
    return run


def run(value: tuple[str, Any, dict, dict]) -> str:
    kind, row, ratings, columns = value
    p = processor(kind)
    source = open_source([row], DatasetConfig(path="rows", columns=columns, min_ratings=ratings))
    conversation = source.schema.conversation(row)
    if conversation is None:
        return "filtered"
    encoder = SampleEncoder(p, 4096, 16)
    sample = encoder.encode(conversation, ("rows", 0))
    tiles = encoder.tiles(sample)
    if len(sample.labels) != len(sample.input_ids) or (tiles is None) != (not sample.tiles):
        raise Wrong(f"{len(sample.labels)} labels of {len(sample.input_ids)} ids, {sample.tiles} tiles")
    if p.image_token_id is not None:
        places = sample.input_ids.count(p.image_token_id)
        if places != sample.tiles * p.images.tokens_per_tile or p.image_token_id in sample.labels:
            raise Wrong(f"{places} placeholders for {sample.tiles} tiles, or labels on them")
    return kind
