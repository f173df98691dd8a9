"""Rows of datasets in every layout, with columns of other kinds, through layout, encoder and tiles; and whole
JSON-lines files with damaged lines, as a run opens them.

What is taken must have as many labels as ids, as many placeholders as features, and no label in the padding.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from data.errors import BadRow, DatasetError
from data.order import ShardReader
from data.row_schemas import COLUMNS
from data.samples import SampleEncoder
from data.sources import DatasetConfig, open_datasets, open_source
from tests.processors import processor
from tests.robustness.judging import Wrong
from tests.robustness.mutations import deep_json, generators, mutate_bytes, mutate_json
from tests.robustness.values import ODD_SOURCES, anything, encoded_images, image_bytes, mostly, texts

REFUSALS = (BadRow, DatasetError)
KINDS = ("embedded", "nanovlm-current", "nanovlm-v0.1")
FILE_ROWS: tuple[dict[str, Any], ...] = (
    {"question": "how many?", "answer": 3, "image": "a.png", "relevance": 4},
    {"texts": [{"user": "who?", "assistant": "two"}], "images": ["a.png"], "ratings": [3]},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}],
     "images": ["a.png"]},
    {"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "y"}]},
)  # fmt: skip


def images() -> st.SearchStrategy[Any]:
    data = encoded_images()
    held = st.builds(lambda data, key: {"bytes": data, "path": key}, data, st.none() | st.just("a.png"))
    return mostly(st.one_of(data, held, held, st.just("a.png"), st.sampled_from(ODD_SOURCES)))


def turns() -> st.SearchStrategy[Any]:
    return mostly(st.fixed_dictionaries({"user": mostly(texts()), "assistant": mostly(texts())}))


def messages() -> st.SearchStrategy[Any]:
    text = st.fixed_dictionaries({"type": st.just("text"), "text": mostly(texts())})
    image = st.fixed_dictionaries(
        {"type": st.sampled_from(("image", "image_url"))}, optional={"image": images(), "url": images()}
    )
    content = st.one_of(texts(), st.lists(mostly(st.one_of(text, image)), max_size=3))
    roles = st.sampled_from(("user", "assistant", "system"))
    return mostly(st.fixed_dictionaries({"role": mostly(roles), "content": mostly(content)}))


def rows() -> st.SearchStrategy[Any]:
    optional = {
        "image": images(),
        "images": mostly(st.lists(images(), max_size=3)),
        "rating": mostly(st.integers(0, 5)),
        "ratings": mostly(st.lists(mostly(st.integers(0, 5)), max_size=3)),
    }
    said = mostly(st.lists(messages(), max_size=3))
    needed = (
        {"messages": said},
        {"prompt": said, "completion": said},
        {"texts": mostly(st.lists(turns(), max_size=3))},
        {"question": mostly(texts()), "answer": mostly(texts())},
    )
    return mostly(st.one_of(*(st.fixed_dictionaries(one, optional=optional) for one in needed)))


def inputs() -> st.SearchStrategy[dict]:
    renamings = st.dictionaries(st.sampled_from((*COLUMNS, "x")), st.sampled_from(COLUMNS), max_size=2)
    one = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "row": rows(),
            "ratings": st.sampled_from(
                ({}, {}, {"rating": 2}, {"ratings": 3}, {"rating": 2, "ratings": 1.5})
            ),
            "columns": mostly(st.just({}), renamings),
        }
    )
    entry = st.dictionaries(
        st.sampled_from((*DatasetConfig.__dataclass_fields__, "x")), anything(), max_size=3
    ).map(lambda entry: {"entry": entry})
    files = generators().map(make_file)
    return st.integers(0, 19).flatmap(lambda n: entry if n == 0 else files if n < 3 else one)


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
