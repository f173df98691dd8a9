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
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from data.errors import DatasetError, one_line
from data.files import check_rows_path
from data.row_schemas import RowSchema, check_ratings, find_images, find_schema, no_images

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


# ---------------------------------------------------------------------------------------- kinds of rows
class Rows(Protocol):
    """Rows that can be read in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Stream(Protocol):
    """Rows that can only be read one after another, in `num_files` files."""

    num_files: int

    def open(self, file: int, start: int) -> Iterator[Any]:
        """The rows of a file from number `start` on."""


@runtime_checkable
class _HasColumns(Protocol):
    column_names: list[str] | None


class JsonLines:
    """The objects of JSON-lines files, each read when it is indexed.

    A line that is not JSON is a string that says so; the loader counts it with the other bad rows.
    """

    def __init__(self, paths: Sequence[Path]):
        starts = [np.fromiter(_line_starts(path), np.int64) for path in paths]
        self.paths = list(paths)
        self._files = np.repeat(np.arange(len(starts)), [len(of_file) for of_file in starts])
        self._starts = np.concatenate(starts)  # of each line, in its file

    def keep(self, part: slice) -> None:
        self._files, self._starts = self._files[part], self._starts[part]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        path = self.paths[self._files[index]]
        with path.open("rb") as file:
            file.seek(int(self._starts[index]))
            return _parsed(file.readline(), path)


class JsonLinesStream:
    """JSON-lines files read from front to back, without looking up their lines first."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = list(paths)
        self.num_files = len(self.paths)

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


def first_rows(rows: Rows | Stream) -> Iterator[Any]:
    """Some rows that show what all are like."""
    if isinstance(rows, Stream):
        all_files = (row for file in range(rows.num_files) for row in rows.open(file, 0))
        return islice(all_files, _LOOKED_AT)
    return (rows[i] for i in range(min(len(rows), _LOOKED_AT)))


def columns_of(rows: Rows | Stream, name: str) -> list[str]:
    """Names of the columns; [] if there is no row."""
    if isinstance(rows, _HasColumns) and rows.column_names:
        return list(rows.column_names)
    columns: dict[str, None] = {}
    unread = ""
    for row in first_rows(rows):
        columns |= dict.fromkeys(row if isinstance(row, Mapping) else ())
        unread = unread or (row if isinstance(row, str) else "")
    if unread and not columns:
        raise DatasetError(f"{name}: no row can be read: {unread}")
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
        (rows, folder): a `Rows` or a `Stream`, and the folder that relative image paths start from, None for
        a dataset on the Hub.
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
    local, name = Path(path).expanduser(), _name_of(split) or TRAIN
    files: Sequence[Any] = _local_files(path) if name == TRAIN else ()
    if local.is_dir() and not _is_saved(local) and any(local.rglob("*.parquet")):
        with _opening(path):
            builder = _library().load_dataset_builder(str(local), subset)
            _check_data_files(builder, path)
            files = (builder.config.data_files or {}).get(name) or () if builder.name == "parquet" else ()
    elif not local.is_dir() and not _local_files(path):
        return None
    if not files or not all(str(file).endswith(".parquet") for file in files):
        return len(open_rows(path, subset, split, streaming=False)[0])
    from pyarrow.parquet import read_metadata

    with _opening(path):
        rows = sum(read_metadata(str(file)).num_rows for file in files)
    return len(range(rows)[_part(split, rows, path)])


def _local_files(path: str) -> list[Path]:
    local = Path(path).expanduser()
    return [local] if local.is_file() else sorted(map(Path, glob.glob(str(local), recursive=True)))


def _open_folder(folder: Path, subset: str | None, split: str, streaming: bool) -> tuple[Any, Path]:
    if _is_saved(folder):
        return _open_saved(folder, split or TRAIN, streaming), folder
    with _opening(str(folder)):
        by_split = _json_lines_by_split(folder, _name_of(split))
    files = sorted({file for of_split in by_split.values() for file in of_split})
    is_image_folder = any(file.name == _METADATA for file in files)
    if not files or (not is_image_folder and any(folder.rglob("*.parquet"))):
        return _load(str(folder), str(folder), subset, split, streaming), folder
    if split or len({file.parent for file in files}) > 1:
        wanted = _name_of(split) or TRAIN
        known = next((name for name, words in _SPLIT_WORDS.items() if wanted in words), wanted)
        if not (files := by_split.get(wanted) or by_split.get(known) or []):
            raise DatasetError(f"{folder}: no split {wanted!r}; it has {', '.join(by_split)}")
    return _json_lines(files, str(folder), split, streaming), _image_root(files, folder)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _SAVED)


def _open_saved(folder: Path, split: str, streaming: bool) -> Any:
    name = _name_of(split)
    with _opening(str(folder)):
        rows = _library().load_from_disk(str(folder))
    if isinstance(rows, _library().DatasetDict):
        if name not in rows:
            raise DatasetError(f"{folder}: no split {name!r}; it has {', '.join(rows)}")
        rows = rows[name]
    if name != split:
        rows = rows.select(range(len(rows))[_part(split, len(rows), str(folder))])
    rows = _undecoded(rows)
    return LibraryStream(rows.to_iterable_dataset()) if streaming else rows


def _open_files(files: list[Path], path: str, split: str, streaming: bool) -> Any:
    endings = {file.suffix for file in files}
    if endings <= {".jsonl", ".json"}:
        if _name_of(split) not in ("", TRAIN):
            raise DatasetError(
                f"{path}: no split {_name_of(split)!r}; files that are named themselves are all train: name "
                "the file whose rows you want, or a folder with a file for each split"
            )
        if endings == {".json"} and len(files) == 1 and (rows := _json_list(files[0], path)) is not None:
            return rows[_part(split, len(rows), path)]
        return _json_lines(files, path, split, streaming)
    if len(endings) == 1 and (builder := _BUILDERS.get(files[0].suffix)):
        return _load(builder, path, None, split, streaming, data_files=[str(file) for file in files])
    known = f".jsonl, {', '.join(_BUILDERS)}"
    raise DatasetError(f"{path}: expected files that end in one of {known}, got {', '.join(sorted(endings))}")


def _json_list(path: Path, name: str) -> list[Any] | None:
    """The rows of a file that is one list, None if it is not."""
    with path.open("rb") as file, _opening(name):
        if file.read(2**16).lstrip()[:1] != b"[":
            return None
        file.seek(0)
        return json.load(file)


def _json_lines(files: list[Path], path: str, split: str, streaming: bool) -> Rows | Stream:
    if streaming and "[" in split:
        raise DatasetError(f"{path}: split {split!r}: a stream has no known length; leave the slice out")
    if streaming:
        return JsonLinesStream(files)
    rows = JsonLines(files)
    rows.keep(_part(split, len(rows), path))
    return rows


def _load(builder: str, path: str, subset: str | None, split: str, streaming: bool, **options) -> Any:
    """Open what the library knows: a builder by its name, a folder, or a dataset on the Hub."""
    with _opening(path):
        if "data_files" not in options:
            _check_data_files(_library().load_dataset_builder(builder, subset, **options), path)
        rows = _library().load_dataset(builder, subset, split=split or TRAIN, streaming=streaming, **options)
        rows = _undecoded(rows)
    return LibraryStream(rows) if streaming else rows


@contextmanager
def _opening(path: str) -> Iterator[None]:
    """The library, the network and damaged files may raise anything."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {one_line(error, 300)}"
        raise DatasetError(f"{path}: cannot be opened ({problem})") from error


def _check_data_files(builder: Any, path: str) -> None:
    """A downloaded folder's README may name any file of this machine as the dataset's: refuse that."""
    folder = os.path.abspath(Path(path).expanduser())
    for files in (builder.config.data_files or {}).values():
        for file in map(str, files):
            local = file.split("::")[-1].removeprefix("file://")  # the archive that a file lies in
            if "://" not in local and not Path(os.path.abspath(local)).is_relative_to(folder):
                raise DatasetError(
                    f"{path}: its README names a data file outside of it, {local!r}: copy the file into the "
                    "folder, or name it as a dataset of its own"
                )


def _undecoded(rows: Any) -> Any:
    """The same rows with images left as bytes or paths."""
    for name, feature in (rows.features or {}).items():
        plain = _without_decoding(feature)
        if plain != feature:
            rows = rows.cast_column(name, plain)
    return rows


def _without_decoding(feature: Any) -> Any:
    library = _library()
    if isinstance(feature, library.Image):
        return library.Image(decode=False)
    if isinstance(feature, library.List):
        return library.List(_without_decoding(feature.feature), length=feature.length)
    if isinstance(feature, library.LargeList):
        return library.LargeList(_without_decoding(feature.feature))
    if isinstance(feature, dict):
        return {name: _without_decoding(inner) for name, inner in feature.items()}
    return feature


# ------------------------------------------------------------------------------------------------ splits
def _json_lines_by_split(folder: Path, wanted: str) -> dict[str, list[Path]]:
    """Split -> JSON-lines files of a folder, by the words that the `datasets` library goes by.

        rows/train/metadata.jsonl  rows/validation/metadata.jsonl      names of folders come first
        rows/train.jsonl           rows/my-dev-1.jsonl
        rows/a.jsonl               rows/b.jsonl                        all train, if nothing else is

    Files whose names say nothing belong to no split if another file is train: they may be held out. A folder
    whose very name is wanted for is that split.
    """
    with os.scandir(folder) as entries:  # unlike Path.iterdir, no look at each of a million images
        folders = sorted(Path(entry) for entry in entries if entry.is_dir())
    by_folder = _grouped(((path.name, _lines_in(path)) for path in folders), wanted)
    by_folder.pop("", None)
    if wanted and (files := _lines_in(folder / wanted)):
        by_folder[wanted] = files
    by_name = _grouped((path.name, [path]) for path in _lines_in(folder))
    unnamed = by_name.pop("", [])
    has_metadata = bool(unnamed) and unnamed[0].name == _METADATA
    if has_metadata and len(by_folder) > 1 and not any(by_folder.values()):
        raise DatasetError(
            f"{folder}: {_METADATA} does not say which of its images are {' and which '.join(by_folder)}; "
            "put one such file into each of their folders"
        )
    found = by_name | {split: files for split, files in by_folder.items() if files}
    return {TRAIN: unnamed} | found if unnamed else found


def _grouped(named: Iterable[tuple[str, list[Path]]], wanted: str = "") -> dict[str, list[Path]]:
    """Split -> files, by the words in the names that they go by; "" -> those that name no split."""
    groups: dict[str, list[Path]] = {}
    for name, files in named:
        words = set(re.split(r"[-._ 0-9]+", name.lower()))
        splits = [split for split, known in _SPLIT_WORDS.items() if words & known]
        for split in [wanted] if name == wanted else splits or [""]:
            groups[split] = groups.get(split, []) + files
    return groups


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
        for text in _texts(list(first_rows(JsonLinesStream(files[:1])))):
            try:
                if not (inside / text).is_file() and (folder / text).is_file():
                    return folder
            except (OSError, ValueError):  # not a path
                continue
    return inside


def _texts(value: Any, depth: int = 4) -> Iterator[str]:
    """Texts in rows that are short enough to be paths."""
    if isinstance(value, str) and 0 < len(value) < 1_000:
        yield value
    elif isinstance(value, list | dict) and depth:
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one, depth - 1)


def _common_folder(files: list[Path], path: str) -> Path:
    folders = {file.parent for file in files}
    if len(folders) > 1 and files[0].suffix != ".parquet":
        raise DatasetError(
            f"{path}: expected files of one folder, where image paths start, got {len(folders)}; list "
            "them as separate datasets"
        )
    return files[0].parent


# ---------------------------------------------------------------------------------------------- mixtures
def _maps_to(kind: Any, value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and isinstance(held, kind) for key, held in value.items()
    )


# What a DatasetConfig's fields hold, by their annotation: in words, and as a test.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda value: isinstance(value, str)),
    "str | None": ("text", lambda value: isinstance(value, str | None)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "float | None": (
        "a positive number",
        lambda value: value is None or (type(value) in (int, float) and 0 < value < float("inf")),
    ),
    "Mapping[str, str]": ("our column names and the dataset's", partial(_maps_to, str)),
    "Mapping[str, float]": ("rating columns and numbers", partial(_maps_to, int | float)),
}


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
            expected, fits = _KINDS[str(item.type)]
            if not fits(value := getattr(self, item.name)):
                raise DatasetError(f"dataset: {item.name}: expected {expected}, got {value!r}")
        if not self.path:
            raise DatasetError("dataset: expected a path or Hub id, got none")
        if not self.name:
            object.__setattr__(self, "name", f"{self.path}/{self.subset}" if self.subset else self.path)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> DatasetConfig:
        """A recipe's entry."""
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(entry) - set(known))
        if unknown or "path" not in entry:
            problem = f"unknown key {', '.join(unknown)}" if unknown else "no path"
            raise DatasetError(f"dataset: {problem}; its keys are {', '.join(known)}")
        return cls(**entry)


@dataclass(frozen=True)
class Source:
    """An open dataset; `rows` is a `Rows` or a `Stream`."""

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
    """A source of rows that are already open: a list of dicts, or any `Rows` or `Stream`.

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
    check_ratings(columns, config.min_ratings, config.name)
    weight = config.weight
    if weight is None and isinstance(rows, Stream) and not alone:
        raise DatasetError(f"{config.name}: a stream among other datasets needs a weight")
    if weight is None:
        weight = 1.0 if isinstance(rows, Stream) else float(len(rows))
    return Source(config.name, rows, schema, weight)
