"""Rows of datasets in every layout, with columns of other kinds, through row schema, encoder and tiles; and
whole JSON-lines files with damaged lines, as a run opens them.

What is taken must have as many labels as ids, as many placeholders as features, and no label in the padding.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from data.errors import BadRow, DatasetError
from data.order import ShardReader
from data.packing import SampleEncoder
from data.row_schemas import COLUMNS
from data.sources import DatasetConfig, open_datasets, open_source
from tests.processors import processor
from tests.soak.changes import (
    ODD_SOURCES,
    anything,
    deep_json,
    encoded_image,
    image_bytes,
    mostly,
    mutate_bytes,
    mutate_json,
    text,
)
from tests.soak.fuzz import Wrong

REFUSALS = (BadRow, DatasetError)
KINDS = ("embedded", "nanovlm-current", "nanovlm-v0.1")
FILE_ROWS: tuple[dict[str, Any], ...] = (
    {"question": "how many?", "answer": 3, "image": "a.png", "relevance": 4},
    {"texts": [{"user": "who?", "assistant": "two"}], "images": ["a.png"], "ratings": [3]},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}],
     "images": ["a.png"]},
    {"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "y"}]},
)  # fmt: skip


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


def make(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(20)
    if kind == 0:
        fields = (*DatasetConfig.__dataclass_fields__, "x")
        return {"entry": {rng.choice(fields): anything(rng) for _ in range(rng.randrange(4))}}
    if kind < 3:
        return make_file(rng)
    return {
        "kind": rng.choice(KINDS),
        "row": row(rng),
        "ratings": rng.choice(({}, {}, {"rating": 2}, {"ratings": 3}, {"rating": 2, "ratings": 1.5})),
        "columns": mostly(rng, {}, {rng.choice((*COLUMNS, "x")): rng.choice(COLUMNS)}),
    }


def make_file(rng: random.Random) -> dict:
    lines = [rng.choice(FILE_ROWS) for _ in range(rng.choice((0, 1, 2, 4)))]
    changed = [mutate_json(rng, line) if rng.random() < 0.5 else line for line in lines]
    ascii_only = rng.random() < 0.5
    as_list, data = rng.random() < 0.2, b""
    if as_list:
        data = json.dumps(changed, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    else:
        for line in changed:
            data += json.dumps(line, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass") + b"\n"
    if rng.random() < 0.4:
        data = mutate_bytes(rng, data)
    if rng.random() < 0.03:
        data = deep_json(rng.choice((900, 20_000))) + b"\n" + data
    split = rng.choice(
        ("train", "train", "train", "train[:1]", "train[-1:]", "train[", "x[:50%]", "train[1:0]", "")
    )
    return {
        "file": data,
        "suffix": ".json" if as_list else ".jsonl",
        "split": split,
        "streaming": rng.random() < 0.3,
    }


def opened(folder: Path):
    (folder / "a.png").write_bytes(image_bytes(40, 30))

    def run(value: dict) -> str:
        if "entry" in value:
            DatasetConfig.from_dict(value["entry"])
            return "entry"
        if "file" in value:
            return whole_file(folder, value)
        config = DatasetConfig(path="rows", columns=value["columns"], min_ratings=value["ratings"])
        source = open_source([value["row"]], config)
        return f"{value['kind']} {encoded(processor(value['kind']), source.schema, value['row'])}"

    return run


def whole_file(folder: Path, value: dict) -> str:
    path = folder / f"rows{value['suffix']}"
    path.write_bytes(value["file"])
    entry = {"path": str(path), "split": value["split"], "streaming": value["streaming"]}
    entry["allow_text_only"] = True
    mixture = open_datasets([entry])
    lane, (source,), taken = ShardReader(mixture, 0, 1, seed=0, epochs=1), mixture.sources, 0
    while (mixed := lane.next()) is not None:
        try:
            taken += encoded(processor("embedded"), source.schema, mixed.row) == "row"
        except BadRow:
            continue
    return "file" if taken else "file without rows"


def encoded(own, layout, row: Any) -> str:
    """A row as a sample with its tiles, checked; what came of it."""
    conversation = layout.conversation(row)
    if conversation is None:
        return "filtered"
    encoder = SampleEncoder(own, 4096, 16)
    sample = encoder.encode(conversation, ("rows", 0))
    tiles = encoder.tiles(sample)
    if len(sample.labels) != len(sample.input_ids) or (tiles is None) != (not sample.tiles):
        raise Wrong(f"{len(sample.labels)} labels of {len(sample.input_ids)} ids, {sample.tiles} tiles")
    if own.image_token_id is not None:
        places = sample.input_ids.count(own.image_token_id)
        if places != sample.tiles * own.images.tokens_per_tile or own.image_token_id in sample.labels:
            raise Wrong(f"{places} placeholders for {sample.tiles} tiles, or labels on them")
    return "row"
