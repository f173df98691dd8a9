"""Datasets as a recipe names them → rows in a lane's order, mixed by weight.

    mixture = open_datasets([
        {"path": "HuggingFaceM4/the_cauldron", "subset": "ai2d", "weight": 2},
        {"path": "my/rows.jsonl", "columns": {"question": "query"}},
    ])

See `data/row_schemas.py` for the columns that are understood and `data/loader.py` for what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any

from data.errors import DatasetError
from data.order import MapReader, Place, StreamReader, key_of
from data.row_schemas import Layout, check_ratings, find_images, find_layout, no_images
from data.sources import columns_of, first_rows, is_empty, open_rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _maps_to(kind: type | UnionType, value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and isinstance(held, kind) for key, held in value.items()
    )


# What the fields of a DatasetConfig may be: in words, and as a test. A recipe's YAML may hold anything.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("path", "name", "split"), ("text", lambda value: isinstance(value, str))),
    **dict.fromkeys(("subset", "revision"), ("text", lambda value: value is None or isinstance(value, str))),
    **dict.fromkeys(
        ("streaming", "allow_urls", "allow_outside", "allow_text_only"),
        ("true or false", lambda value: isinstance(value, bool)),
    ),
    "weight": ("a positive number", lambda value: value is None or _is_number(value)),
    "columns": ("our column names and the dataset's", lambda value: _maps_to(str, value)),
    "min_ratings": ("rating columns and numbers", lambda value: _maps_to(int | float, value)),
}


@dataclass(frozen=True)
class DatasetConfig:
    """One dataset of a recipe.

    Args:
        path: Hub id, folder, file or pattern; see `data.sources.open_rows`.
        name: what sample ids and messages call it; path and subset by default.
        subset: a Hub dataset's configuration.
        split: as in `datasets`.
        weight: its share of the rows that are read, relative to the other datasets'; the number of its rows
            by default, so that every row is read equally often.
        streaming: read it from front to back, with nothing downloaded before.
        columns: our column names → its own, e.g. {"question": "query"}.
        min_ratings: rating column → the least that is trained on.
        allow_urls: rows may name images by URL, to be fetched while training.
        allow_outside: rows may name images outside of the dataset's folder.
        allow_text_only: there need not be an image among the first rows.
        revision: branch, tag or commit on the Hub.
    """

    path: str
    name: str = ""
    subset: str | None = None
    split: str = "train"
    weight: float | None = None
    streaming: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    min_ratings: Mapping[str, float] = field(default_factory=dict)
    allow_urls: bool = False
    allow_outside: bool = False
    allow_text_only: bool = False
    revision: str | None = None

    def __post_init__(self):
        if not self.path:
            raise DatasetError("dataset: expected a path or Hub id, got none")
        for name, (expected, fits) in _KINDS.items():
            if not fits(getattr(self, name)):
                raise DatasetError(f"dataset: {name}: expected {expected}, got {getattr(self, name)!r}")
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise DatasetError(f"{self.path}: weight: expected a positive number, got {self.weight}")
        if not self.name:
            label = f"{self.path}/{self.subset}" if self.subset else self.path
            object.__setattr__(self, "name", label)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> DatasetConfig:
        """A recipe's entry.

        Raises:
            DatasetError: an unknown key, or no path.
        """
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(entry) - set(known))
        if unknown or "path" not in entry:
            what = f"unknown key {', '.join(unknown)}" if unknown else "no path"
            raise DatasetError(f"dataset: {what}; its keys are {', '.join(known)}")
        return cls(**entry)


@dataclass(frozen=True)
class Source:
    """An open dataset: `rows` is a sequence (map-style) or a `data.order.Stream`."""

    name: str
    rows: Any
    layout: Layout
    weight: float

    @property
    def streaming(self) -> bool:
        return hasattr(self.rows, "open")

    @property
    def num_rows(self) -> int | None:
        """None where it streams."""
        return None if self.streaming else len(self.rows)

    def reader(
        self, key: int, lane: int, lanes: int, epochs: int | None, block: int
    ) -> MapReader | StreamReader:
        if self.streaming:
            return StreamReader(self.rows, key, lane, lanes, epochs, block, self.name)
        return MapReader(self.rows, key, lane, lanes, epochs)


class Mixture:
    """Open datasets and the share of each; `shares` add up to one."""

    def __init__(self, sources: Sequence[Source]):
        if not sources:
            raise DatasetError("datasets: expected at least one, got none")
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DatasetError(f"datasets: {', '.join(twice)} is named twice; give each its own name")
        self.sources = tuple(sources)
        total = sum(source.weight for source in sources)
        self.shares = [source.weight / total for source in sources]

    @property
    def num_rows(self) -> int | None:
        """Of all datasets together; None where one streams."""
        counts = [source.num_rows for source in self.sources]
        return None if None in counts else sum(count or 0 for count in counts)

    def lane(self, lane: int, lanes: int, seed: int, epochs: int | None = None, block: int = 256):
        """A `LaneReader`; see `data/order.py`."""
        return LaneReader(self, lane, lanes, seed, epochs, block)


def open_datasets(entries: Sequence[DatasetConfig | Mapping[str, Any]]) -> Mixture:
    """Open every dataset of a recipe and find out how its rows are laid out.

    Raises:
        DatasetError: an unknown key, nothing at the path, no row, columns that are not understood (it names
            those there are), no images where text alone is not allowed, a stream without a weight beside
            other datasets.
    """
    configs = [e if isinstance(e, DatasetConfig) else DatasetConfig.from_dict(e) for e in entries]
    sources = []
    for config in configs:
        rows, folder = open_rows(config.path, config.subset, config.split, config.streaming, config.revision)
        sources.append(_source(config, rows, folder, alone=len(configs) == 1))
    mixture = Mixture(sources)
    _check_images(configs, sources)
    return mixture


def source_of(rows: Any, config: DatasetConfig) -> Source:
    """A source of rows that are already at hand: a list of dicts, or any `data.order.Stream`; `config.path`
    is only its name."""
    return _source(config, rows, None, alone=True)


def _source(config: DatasetConfig, rows: Any, folder, alone: bool) -> Source:
    if is_empty(rows):
        raise DatasetError(f"{config.name}: split {config.split!r} has no rows")
    columns, renamed = columns_of(rows, config.name), dict(config.columns)
    if "file_name" in columns and not {"image", "images"} & ({*columns, *renamed}):
        renamed["image"] = "file_name"  # an image folder's metadata
    layout = Layout(
        kind=find_layout(columns, renamed, config.name),
        columns=renamed,
        min_ratings=dict(config.min_ratings),
        folder=folder,
        allow_urls=config.allow_urls,
        allow_outside=config.allow_outside,
    )
    check_ratings(columns, config.min_ratings, config.name)
    weight = config.weight
    if weight is None:
        if not hasattr(rows, "open"):
            weight = float(len(rows))
        elif alone:
            weight = 1.0
        else:
            raise DatasetError(f"{config.name}: a stream among other datasets needs a weight")
    return Source(config.name, rows, layout, weight)


def _check_images(configs: Sequence[DatasetConfig], sources: Sequence[Source]) -> None:
    """Raises DatasetError where no dataset has an image in its first rows, or one has them in a column that
    is not read; those that may be text only are not looked at."""
    how = "columns: {image: COLUMN} in the dataset's entry, or allow_text_only: true for text alone"
    found = [
        config.allow_text_only
        or find_images(first_rows(source.rows), source.layout.images, source.layout, source.name, how)
        for config, source in zip(configs, sources, strict=True)
    ]
    if not any(found):
        raise no_images(sources[0].name, columns_of(sources[0].rows, sources[0].name), how)


@dataclass(frozen=True)
class MixedRow:
    """A row, its dataset (an index into `Mixture.sources`), and the place to find it again at."""

    source: int
    place: Place
    number: int
    row: Any


class LaneReader:
    """One lane's rows out of all datasets, in an order that the seed decides.

    Each row is taken from the dataset that is furthest behind its share, from a start that differs from lane
    to lane: shares hold exactly, after any number of rows.
    """

    def __init__(self, mixture: Mixture, lane: int, lanes: int, seed: int, epochs: int | None, block: int):
        self.shares = mixture.shares
        self.readers = [
            source.reader(key_of(seed, source.name), lane, lanes, epochs, block) for source in mixture.sources
        ]
        self._lead = [key_of(seed, lane, source.name) / 2**64 for source in mixture.sources]
        self.counts = [0] * len(self.readers)
        self._ended = [False] * len(self.readers)

    def next(self) -> MixedRow | None:
        """The next row; None once every dataset is at its end."""
        while not all(self._ended):
            total = sum(self.counts) + 1
            behind = [
                float("-inf") if ended else lead + share * total - count
                for ended, lead, share, count in zip(self._ended, self._lead, self.shares, self.counts)
            ]
            chosen = behind.index(max(behind))
            read = self.readers[chosen].next()
            if read is not None:
                self.counts[chosen] += 1
                return MixedRow(chosen, read.place, read.number, read.row)
            self._ended[chosen] = True
        return None

    def again(self, places: Sequence[tuple[int, Place]]) -> list[MixedRow]:
        """Rows that were read before, by (source, place), in the order asked for."""
        found: dict[tuple, MixedRow] = {}
        for source, reader in enumerate(self.readers):
            for read in reader.again([place for which, place in places if which == source]):
                found[source, *read.place] = MixedRow(source, read.place, read.number, read.row)
        return [found[source, *place] for source, place in places]

    def state(self) -> dict[str, list]:
        return {"counts": list(self.counts), "readers": [reader.state() for reader in self.readers]}

    def restore(self, state: Mapping[str, list]) -> None:
        self.counts = list(state["counts"])
        self._ended = [False] * len(self.readers)
        for reader, of_reader in zip(self.readers, state["readers"], strict=True):
            reader.restore(of_reader)
