"""Datasets as a recipe names them: opened, their columns understood, mixed by weight. No image is decoded.

    mixture = open_datasets([
        {"path": "HuggingFaceM4/the_cauldron", "subset": "ai2d", "weight": 2},
        {"path": "my/rows.jsonl", "columns": {"question": "query"}},
    ])

The `datasets` library opens the Hub, `save_to_disk` folders, Parquet, CSV, WebDataset and image folders. JSON
lines are read here: the library turns answers that look like dates into dates, cannot open a file with one
broken line, and first writes a copy of everything. Images stay bytes or paths, for `load_image` to open.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from data.errors import DatasetError, one_line
from data.files import check_rows_path
from data.row_schemas import RowSchema, find_images, find_schema, no_images

TRAIN = "train"
_METADATA = "metadata.jsonl"  # of an image folder; no other file beside it counts
_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")  # in a `save_to_disk` folder
_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".tar": "webdataset"}  # by the files' ending
_SPLIT_WORDS = {  # those of the `datasets` library
    TRAIN: {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_LOOKED_AT = 100  # rows that show what all rows are like


def _library():
    import datasets  # takes two seconds, and JSON lines do without it

    return datasets


@contextmanager
def reading(failed: str) -> Iterator[None]:
    """Files, networks and libraries may raise anything: all of it becomes a DatasetError."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError(f"{failed} ({type(error).__name__}: {one_line(error, 300)})") from error


# ---------------------------------------------------------------------------------------- kinds of rows
@runtime_checkable
class Stream(Protocol):
    """Rows that can only be read one after another, in `num_files` files."""

    num_files: int

    def open(self, file: int, start: int) -> Iterator[Any]:
        """The rows of a file from number `start` on."""


class JsonLines(Sequence):
    """The objects of JSON-lines files, each read when it is indexed.

    A line that is not JSON is a string that says so; the loader counts it with the other bad rows.
    """

    def __init__(self, paths: Sequence[Path]):
        starts = [np.fromiter(_line_starts(path), np.int64) for path in paths]
        self.paths = paths
        self._files = np.repeat(np.arange(len(starts)), [len(of_file) for of_file in starts])
        self._starts = np.concatenate(starts)  # of each line, in its file

    def keep(self, part: slice) -> None:
        self._files, self._starts = self._files[part], self._starts[part]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        path = self.paths[self._files[index]]
        with path.open("rb") as file:
            file.seek(int(self._starts[index]))
            return _parsed(file.readline(), path)


class JsonLinesStream:
    """JSON-lines files read from front to back, without looking up their lines first."""

    def __init__(self, paths: Sequence[Path]):
        self.paths, self.num_files = paths, len(paths)

    def open(self, file: int, start: int) -> Iterator[Any]:
        path = self.paths[file]
        with path.open("rb") as lines:
            for line in islice(filter(bytes.strip, lines), start, None):
                yield _parsed(line, path)


def _line_starts(path: Path) -> Iterator[int]:
    """Where the lines of a file begin, blank ones left out."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield offset
            offset += len(line)


def _parsed(line: bytes, path: Path) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"{path.name}: a line that is not JSON ({error})"


class LibraryStream:
    """A streaming dataset of the `datasets` library, file by file."""

    def __init__(self, dataset: Any):
        self.dataset, self.num_files = dataset, dataset.num_shards
        self.column_names: list[str] | None = dataset.column_names

    def open(self, file: int, start: int) -> Iterator[Any]:
        several = self.num_files > 1
        one = self.dataset.shard(num_shards=self.num_files, index=file) if several else self.dataset
        return iter(one.skip(start) if start else one)


def first_rows(rows: Sequence[Any] | Stream) -> Iterator[Any]:
    """Some rows that show what all are like."""
    if isinstance(rows, Stream):
        all_files = (row for file in range(rows.num_files) for row in rows.open(file, 0))
        return islice(all_files, _LOOKED_AT)
    return (rows[i] for i in range(min(len(rows), _LOOKED_AT)))


def columns_of(rows: Sequence[Any] | Stream, name: str) -> list[str]:
    """Names of the columns; [] if there is no row."""
    if known := getattr(rows, "column_names", None):
        return list(known)
    first = list(first_rows(rows))
    columns = {column: None for row in first if isinstance(row, Mapping) for column in row}
    if first and not columns and isinstance(first[0], str):
        raise DatasetError(f"{name}: no row can be read: {first[0]}")
    return list(columns)


# ------------------------------------------------------------------------------------------ opening rows
def open_rows(
    path: str, subset: str | None, split: str, streaming: bool, revision: str | None = None
) -> tuple[Any, Path | None]:
    """Open a local path or a dataset on the Hub.

    Args:
        path: a folder (of `save_to_disk`, images with metadata.jsonl, JSON lines, or anything else that the
            `datasets` library knows), a file, a pattern like "rows/*.parquet", or a Hub id.
        subset: a Hub dataset's configuration.
        split: as in `datasets`, with slices such as "train[:90%]" unless streaming. Files that are named
            themselves are all train. "" is all JSON lines of a folder; if they lie in several folders, and
            for anything else, it is train.

    Returns:
        (rows, folder): a sequence or a `Stream`, and the folder that relative image paths start from, None
        for a dataset on the Hub.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return _open_folder(local, subset, split, streaming)
    if files := _local_files(path):
        return _open_files(files, path, split, streaming), _common_folder(files, path)
    check_rows_path(path)
    return _load(path, path, subset, split, streaming, revision=revision), None


def count_rows(path: str, subset: str | None, split: str) -> int | None:
    """Number of rows of a local dataset, read from the footers for Parquet; None for one on the Hub."""
    local, files = Path(path).expanduser(), list(map(str, _local_files(path)))
    if local.is_dir() and not _is_saved(local) and any(local.rglob("*.parquet")):
        with reading(f"{path}: cannot be opened"):
            builder = _builder(str(local), subset)
        if builder.name == "parquet":
            files = list(map(str, builder.config.data_files.get(_name_of(split)) or ()))
    elif not files and not local.is_dir():
        return None
    if not files or not all(file.endswith(".parquet") for file in files):
        return len(open_rows(path, subset, split, streaming=False)[0])
    from pyarrow.parquet import read_metadata

    with reading(f"{path}: cannot be opened"):
        rows = sum(read_metadata(file).num_rows for file in files)
    return len(range(rows)[_part(split, rows, path)])


def _local_files(path: str) -> list[Path]:
    local = Path(path).expanduser()
    return [local] if local.is_file() else sorted(map(Path, glob.glob(str(local), recursive=True)))


def _open_folder(folder: Path, subset: str | None, split: str, streaming: bool) -> tuple[Any, Path]:
    name = str(folder)
    if _is_saved(folder):
        return _open_saved(name, split or TRAIN, streaming), folder
    wanted = _name_of(split)
    with reading(f"{folder}: cannot be opened"):
        by_split = _json_lines_by_split(folder, wanted)
    files = sorted({file for of_split in by_split.values() for file in of_split})
    is_image_folder = any(file.name == _METADATA for file in files)
    if not files or (not is_image_folder and any(folder.rglob("*.parquet"))):
        return _load(name, name, subset, split, streaming), folder
    if split or len({file.parent for file in files}) > 1:
        wanted = wanted or TRAIN
        known = next((name for name, words in _SPLIT_WORDS.items() if wanted in words), wanted)
        if not (files := by_split.get(wanted) or by_split.get(known) or []):
            raise _no_split(name, wanted, by_split)
    return _json_lines(files, name, split, streaming), _image_root(files, folder)


def _no_split(path: str, split: str, splits: Iterable[str]) -> DatasetError:
    return DatasetError(f"{path}: no split {split!r}; it has {', '.join(splits)}")


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _SAVED)


def _open_saved(path: str, split: str, streaming: bool) -> Any:
    name = _name_of(split)
    with reading(f"{path}: cannot be opened"):
        rows = _library().load_from_disk(path)
    if isinstance(rows, _library().DatasetDict):
        if name not in rows:
            raise _no_split(path, name, rows)
        rows = rows[name]
    if name != split:
        rows = rows.select(range(len(rows))[_part(split, len(rows), path)])
    _leave_undecoded(rows.info.features)
    return LibraryStream(rows.to_iterable_dataset()) if streaming else rows


def _open_files(files: list[Path], path: str, split: str, streaming: bool) -> Any:
    endings = {file.suffix for file in files}
    if endings <= {".jsonl", ".json"}:
        if _name_of(split) not in ("", TRAIN):
            raise _no_split(path, _name_of(split), [f"{TRAIN}, as all files that are named themselves"])
        if endings == {".json"} and len(files) == 1 and (rows := _json_list(files[0], path)) is not None:
            return rows[_part(split, len(rows), path)]
        return _json_lines(files, path, split, streaming)
    if len(endings) > 1 or not (builder := _BUILDERS.get(files[0].suffix)):
        known, got = ", ".join([".jsonl", *_BUILDERS]), ", ".join(sorted(endings))
        raise DatasetError(f"{path}: expected files that end in one of {known}, got {got}")
    return _load(builder, path, None, split, streaming, data_files=[str(file) for file in files])


def _json_list(path: Path, name: str) -> list[Any] | None:
    """The rows of a file that is one list, None if it is not."""
    with path.open("rb") as file, reading(f"{name}: cannot be opened"):
        if file.read(2**16).lstrip()[:1] != b"[":
            return None
        file.seek(0)
        return json.load(file)


def _json_lines(files: list[Path], path: str, split: str, streaming: bool) -> Sequence[Any] | Stream:
    if streaming and "[" in split:
        raise DatasetError(f"{path}: split {split!r}: a stream has no known length; leave the slice out")
    if streaming:
        return JsonLinesStream(files)
    rows = JsonLines(files)
    rows.keep(_part(split, len(rows), path))
    return rows


def _load(builder: str, path: str, subset: str | None, split: str, streaming: bool, **options) -> Any:
    """Open what the library knows: a builder by its name, a folder, or a dataset on the Hub."""
    with reading(f"{path}: cannot be opened"):
        if "data_files" not in options:
            _builder(builder, subset, **options)
        rows = _library().load_dataset(builder, subset, split=split or TRAIN, streaming=streaming, **options)
        _leave_undecoded(rows.info.features)
    return LibraryStream(rows) if streaming else rows


def _builder(path: str, subset: str | None, **options) -> Any:
    """The library's builder of a folder or of a dataset on the Hub. A downloaded folder's README may name any
    file of this machine as the dataset's: that is refused."""
    builder, folder = _library().load_dataset_builder(path, subset, **options), os.path.abspath(path)
    for file in (str(file) for files in (builder.config.data_files or {}).values() for file in files):
        local = file.split("::")[-1].removeprefix("file://")  # the archive that a file lies in
        if "://" not in local and not Path(os.path.abspath(local)).is_relative_to(folder):
            raise DatasetError(
                f"{path}: its README names a data file outside of it, {local!r}: copy the file into the "
                "folder, or name it as a dataset of its own"
            )
    return builder


def _leave_undecoded(feature: Any) -> None:
    """Have the library give images as bytes or paths."""
    if isinstance(feature, _library().Image):
        feature.decode = False
    elif isinstance(feature, _library().List | _library().LargeList):
        _leave_undecoded(feature.feature)
    for inner in feature.values() if isinstance(feature, dict) else ():
        _leave_undecoded(inner)


# ------------------------------------------------------------------------------------------------ splits
def _json_lines_by_split(folder: Path, wanted: str) -> dict[str, list[Path]]:
    """Split -> JSON-lines files of a folder, by the words that the `datasets` library goes by.

        rows/train/metadata.jsonl  rows/validation/metadata.jsonl      names of folders come first
        rows/train.jsonl           rows/my-dev-1.jsonl
        rows/a.jsonl               rows/b.jsonl                        all train, if nothing else is

    Files whose names say nothing belong to no split if another file is train: they may be held out. A folder
    whose very name is wanted for is that split.
    """
    by_name: dict[str, list[Path]] = {}
    by_folder: dict[str, list[Path]] = {}
    for path in _lines_in(folder):
        for split in _splits_of(path.name) or [""]:
            by_name.setdefault(split, []).append(path)
    with os.scandir(folder) as entries:  # unlike Path.iterdir, no look at each of a million images
        folders = sorted(Path(entry) for entry in entries if entry.is_dir())
    for path in folders:
        for split in _splits_of(path.name):
            by_folder.setdefault(split, []).extend(_lines_in(path))
    if wanted and (files := _lines_in(folder / wanted)):
        by_folder[wanted] = files
    unnamed = by_name.pop("", [])
    if (folder / _METADATA) in unnamed and len(by_folder) > 1 and not any(by_folder.values()):
        raise DatasetError(
            f"{folder}: {_METADATA} does not say which of its images are {' and which '.join(by_folder)}; "
            "put one such file into each of their folders"
        )
    found = by_name | {split: files for split, files in by_folder.items() if files}
    return {TRAIN: unnamed} | found if unnamed else found


def _splits_of(name: str) -> list[str]:
    words = set(re.split(r"[-._ 0-9]+", name.lower()))
    return [split for split, known in _SPLIT_WORDS.items() if words & known]


def _lines_in(folder: Path) -> list[Path]:
    metadata = folder / _METADATA
    return [metadata] if metadata.is_file() else sorted(folder.glob("*.jsonl"))


def _name_of(split: str) -> str:
    """The name in a split such as "train[:90%]"."""
    return split.partition("[")[0]


def _part(split: str, rows: int, path: str) -> slice:
    """The rows of a split such as "train[:90%]"."""
    if (name := _name_of(split)) == split:
        return slice(None)
    try:
        (part,) = _library().ReadInstruction.from_spec(split).to_absolute({name: rows})
    except (ValueError, AssertionError) as error:
        raise DatasetError(f"{path}: split {split!r}: {one_line(error, 300)}") from error
    return slice(part.from_ or 0, rows if part.to is None else part.to)


def _image_root(files: list[Path], folder: Path) -> Path:
    """Where relative image paths start: beside the files or, if an image of the first rows lies only there,
    in the folder that has the splits."""
    inside = _common_folder(files, str(folder))
    if inside != folder and files[0].name != _METADATA:
        texts = _texts(list(first_rows(JsonLinesStream(files[:1]))))
        if any(os.path.isfile(folder / text) and not os.path.isfile(inside / text) for text in texts):
            return folder
    return inside


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _common_folder(files: list[Path], path: str) -> Path:
    folders = {file.parent for file in files}
    if len(folders) > 1 and files[0].suffix != ".parquet":
        raise DatasetError(
            f"{path}: expected files of one folder, where image paths start, got {len(folders)}; list "
            "them as separate datasets"
        )
    return files[0].parent


# ---------------------------------------------------------------------------------------------- mixtures
_KINDS = {  # what a recipe's values are, by the annotations of a DatasetConfig
    "str": "text",
    "str | None": "text",
    "bool": "true or false",
    "float | None": "a positive number",
    "Mapping[str, str]": "our column names and the dataset's",
    "Mapping[str, float]": "rating columns and numbers",
}


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return kind.endswith("None")
    if kind.startswith("Mapping"):
        held = str if kind.endswith("str]") else int | float
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and isinstance(inner, held) for key, inner in value.items()
        )
    if kind.startswith("float"):
        return type(value) in (int, float) and 0 < value < math.inf
    return isinstance(value, bool if kind == "bool" else str)


@dataclass(frozen=True)
class DatasetConfig:
    """One dataset of a recipe.

    Args:
        path: Hub id, folder, file or pattern; see `open_rows`.
        name: what sample ids and messages call it; path and subset by default.
        subset: a Hub dataset's configuration.
        split: as in `datasets`.
        weight: its share of the rows that are read, relative to the other datasets'. By default its number of
            rows, so that every row is read equally often.
        streaming: read it from front to back, without downloading it first.
        columns: our column names -> the dataset's, e.g. {"question": "query"}.
        min_ratings: rating column -> the lowest rating that is trained on.
        allow_urls: rows may name images by URL, which are fetched during training.
        allow_outside: rows may name images outside of the dataset's folder.
        allow_text_only: the first rows need not have an image.
        revision: branch, tag or commit on the Hub.
    """

    path: str
    name: str = ""
    subset: str | None = None
    split: str = TRAIN
    weight: float | None = None
    streaming: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    min_ratings: Mapping[str, float] = field(default_factory=dict)
    allow_urls: bool = False
    allow_outside: bool = False
    allow_text_only: bool = False
    revision: str | None = None

    def __post_init__(self):
        for item in fields(self):
            if not _fits(value := getattr(self, item.name), str(item.type)):
                raise DatasetError(f"dataset: {item.name}: expected {_KINDS[str(item.type)]}, got {value!r}")
        if not self.path:
            raise DatasetError("dataset: expected a path or Hub id, got none")
        if not self.name:
            object.__setattr__(self, "name", f"{self.path}/{self.subset}" if self.subset else self.path)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> DatasetConfig:
        """A recipe's entry."""
        known = [item.name for item in fields(cls)]
        if "path" not in entry or not set(entry) <= set(known):
            wrong = ", ".join(sorted(set(entry) - set(known)))
            problem = f"unknown key {wrong}" if wrong else "no path"
            raise DatasetError(f"dataset: {problem}; its keys are {', '.join(known)}")
        return cls(**entry)


@dataclass(frozen=True)
class Source:
    """An open dataset; `rows` is a sequence or a `Stream`."""

    name: str
    rows: Any
    schema: RowSchema
    weight: float

    @property
    def num_rows(self) -> int | None:
        """None for a stream."""
        return None if isinstance(self.rows, Stream) else len(self.rows)


class Mixture:
    """Open datasets and the share of each; `shares` add up to one."""

    def __init__(self, sources: Sequence[Source]):
        if not sources:
            raise DatasetError("datasets: expected at least one, got none")
        names = [source.name for source in sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DatasetError(f"datasets: {', '.join(twice)} is named twice; give each its own name")
        self.sources = tuple(sources)
        total = sum(source.weight for source in sources)
        self.shares = [source.weight / total for source in sources]

    @property
    def num_rows(self) -> int | None:
        """Of all datasets together; None if one of them is a stream."""
        counts = [source.num_rows for source in self.sources]
        return None if None in counts else sum(count or 0 for count in counts)


def open_datasets(entries: Sequence[DatasetConfig | Mapping[str, Any]]) -> Mixture:
    """Open every dataset of a recipe and find out which columns hold what."""
    configs = [e if isinstance(e, DatasetConfig) else DatasetConfig.from_dict(e) for e in entries]
    sources = []
    for config in configs:
        rows, folder = open_rows(config.path, config.subset, config.split, config.streaming, config.revision)
        sources.append(open_source(rows, config, folder, alone=len(configs) == 1))
    mixture = Mixture(sources)
    how = "columns: {image: COLUMN} in the dataset's entry, or allow_text_only: true for text alone"
    found = [  # of all datasets, so that each is looked at
        config.allow_text_only
        or find_images(first_rows(source.rows), source.schema.images, source.schema, source.name, how)
        for config, source in zip(configs, sources, strict=True)
    ]
    if not any(found):
        raise no_images(sources[0].name, columns_of(sources[0].rows, sources[0].name), how)
    return mixture


def open_source(rows: Any, config: DatasetConfig, folder: Path | None = None, alone: bool = True) -> Source:
    """A source of rows that are already open: a list of dicts, or any other sequence or `Stream`.

    Args:
        folder: where relative image paths start; None refuses paths.
        alone: there is no other dataset, so that a stream needs no weight.
    """
    if not any(True for _ in first_rows(rows)):
        raise DatasetError(f"{config.name}: split {config.split!r} has no rows")
    columns, renamed = columns_of(rows, config.name), dict(config.columns)
    if "file_name" in columns and not {"image", "images"} & {*columns, *renamed}:
        renamed["image"] = "file_name"  # an image folder's metadata
    schema = RowSchema(
        find_schema(columns, renamed, config.name),
        columns=renamed,
        min_ratings=dict(config.min_ratings),
        folder=folder,
        allow_urls=config.allow_urls,
        allow_outside=config.allow_outside,
    )
    if absent := sorted(set(config.min_ratings) - set(columns)):
        raise DatasetError(
            f"{config.name}: min_ratings: no column {', '.join(absent)}; it has {', '.join(columns)}"
        )
    weight = config.weight
    if weight is None and isinstance(rows, Stream) and not alone:
        raise DatasetError(f"{config.name}: a stream among other datasets needs a weight")
    if weight is None:
        weight = 1.0 if isinstance(rows, Stream) else float(len(rows))
    return Source(config.name, rows, schema, weight)
