"""Datasets as a recipe names them: opened, their columns understood, mixed by weight. No image is decoded.

    mixture = open_datasets([
        {"path": "HuggingFaceM4/the_cauldron", "subset": "ai2d", "weight": 2},
        {"path": "my/rows.jsonl", "columns": {"question": "query"}},
    ])

The `datasets` library opens the Hub, `save_to_disk` folders, Parquet, CSV and image folders. JSON lines and
tars are read where they lie (`data.row_files`), files as COCO has them once (`data.coco`): the library turns
texts that look like dates into dates, wants one type in a column, and cannot open a file with one broken
line. Images stay bytes or paths.
"""

from __future__ import annotations

import glob
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints
from urllib.parse import urlsplit

import numpy as np

from data.box_rows import CATEGORIES, NAMES, BoxRows
from data.boxes import COORDINATES
from data.coco import coco_rows
from data.errors import ADDRESS, DatasetError, check_rows_path
from data.row_files import (
    FileRows,
    FileStream,
    RowsFile,
    Stream,
    fsspec_module,
    library,
    reading,
)
from data.row_schemas import (
    COLUMNS,
    OF_BOXES,
    SHOWN,
    RowSchema,
    find_images,
    find_pairs,
    find_schema,
    looks_like_image,
    no_images,
)
from messages import one_line
from models.checkpoints.hub import client

logger = logging.getLogger(__name__)
TRAIN = "train"
_METADATA = "metadata.jsonl"  # of an image folder; no other file beside it counts
_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")  # in a `save_to_disk` folder
_BUILDERS = {".parquet": "parquet", ".csv": "csv"}  # by the files' ending
_PARQUET = "datasets.packaged_modules.parquet.parquet:Parquet"
_SPLITS = {TRAIN: TRAIN, "training": TRAIN}  # words in names, as the `datasets` library knows them
_SPLITS |= dict.fromkeys(("validation", "valid", "dev", "val"), "validation")
_SPLITS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
Share = Callable[
    [Any, str], Any
]  # rows, and the path they are from -> some of them: `data.held_out.Share.of`
_SECTIONS = 1024  # of a folder of `save_to_disk` that is streamed
_LOOKED_AT = 100  # rows that show what all rows are like


def all_rows(rows: Stream) -> Iterator[Any]:
    """The rows of a stream, one section after another."""
    for section in range(rows.num_sections):
        yield from (row for _, row in rows.read(section))


def first_rows(rows: Sequence[Any] | Stream) -> Iterator[Any]:
    """Some rows that show what all are like."""
    if isinstance(rows, Stream):
        return islice(all_rows(rows), _LOOKED_AT)
    return (rows[i] for i in range(min(len(rows), _LOOKED_AT)))


def columns_of(rows: Sequence[Any] | Stream, name: str, first: Sequence[Any] | None = None) -> list[str]:
    """Names of the columns; [] if there is no row. `first`: what `first_rows` gives, where it is known."""
    if known := getattr(rows, "features", None):
        return list(known)
    first = list(first_rows(rows)) if first is None else first
    columns = {column: None for row in first if isinstance(row, Mapping) for column in row}
    if first and not columns and isinstance(first[0], str):
        raise DatasetError(f"{name}: no row can be read: {first[0]}")
    return list(columns)


def known_columns(
    first: Sequence[Any],
    columns: Sequence[str],
    given: Mapping[str, str],
    constants: Iterable[str] = (),
    ours: Iterable[str] = COLUMNS,
) -> tuple[list[str], dict[str, str], bool]:
    """Of rows with these columns, of which `first` are some: the columns, and those within, such as
    json.question; our names -> theirs, those `given` and those that follow, for what is not constant; and
    whether a row's image is in whichever column is named as an image file ends."""
    held = (item for row in first if isinstance(row, Mapping) for item in row.items())
    inside = {f"{name}.{key}": None for name, one in held if isinstance(one, Mapping) for key in one}
    # An image folder's metadata, or a sample of WebDataset, whose json may say where its image came from.
    sample = "__key__" in columns
    ends = (one for one in columns if one == "file_name" or (sample and looks_like_image(f"x.{one}")))
    image = next(ends, None)
    own = [one for one in ours if f"json.{one}" in inside and not (image and one in SHOWN)]
    renamed = {one: f"json.{one}" for one in own if one not in (*columns, *given, *constants)} | {**given}
    shown = bool({*SHOWN} & {*columns, *renamed})
    renamed |= {"image": image} if image and not shown else {}
    return [*columns, *inside], renamed, sample and not shown


def class_names(rows: Sequence[Any] | Stream, columns: Iterable[str]) -> dict[int, str]:
    """Names of numbers in the first of these columns that has a `ClassLabel`, or in COCO's rows; else {}."""
    if known := getattr(rows, "names", None):
        return known
    features = getattr(rows, "features", None) or {}
    names = next(filter(None, (_class_names(features.get(column)) for column in columns)), ())
    return dict(enumerate(names))


def _class_names(feature: Any) -> tuple[str, ...]:
    if isinstance(feature, dict):
        feature = next((feature[key] for key in NAMES if key in feature), None)
    if feature is None or isinstance(feature, library().ClassLabel):
        return () if feature is None else tuple(feature.names)
    several = isinstance(feature, library().List | library().LargeList)
    return _class_names(feature.feature) if several else ()


# ------------------------------------------------------------------------------------------ opening rows
def open_rows(
    path: str, subset: str | None, split: str, streaming: bool, revision: str | None = None
) -> tuple[Any, Path | None]:
    """Open a local path or a dataset on the Hub.

    Args:
        path: a folder (of `save_to_disk`, images with metadata.jsonl, JSON lines, tars, or anything else that
            the `datasets` library knows), a file, a pattern like "rows/*.parquet", the same at an address
            that fsspec reads (s3://, gs://, hf://, https://), where an ending says what it is, or a Hub id.
        subset: a Hub dataset's configuration.
        split: as in `datasets`, with slices such as "train[:90%]" unless streaming. Files that are named
            themselves are all train. "" is all JSON lines or tars of a folder; if they lie in several
            folders, and for anything else, it is train.

    Returns:
        (rows, folder): a sequence or a `Stream`, and the folder that relative image paths start from, None
        for a dataset on the Hub or at an address.
    """
    name, is_sliced, _ = split.partition("[")
    rows, folder = _open(path, subset, name, streaming, revision)
    if not is_sliced:
        return rows, folder
    if isinstance(rows, Stream):
        raise DatasetError(f"{path}: split {split!r}: a stream has no known length; leave the slice out")
    try:
        wanted, *others = library().ReadInstruction.from_spec(split).to_absolute({name: len(rows)})
    except (ValueError, AssertionError) as error:
        raise DatasetError(f"{path}: split {split!r}: {one_line(error, 300)}") from error
    if others:
        raise DatasetError(f"{path}: split {split!r}: expected one slice; name each as a dataset of its own")
    return select(rows, np.arange(len(rows))[wanted.from_ : wanted.to]), folder


def select(rows: Any, numbers: np.ndarray) -> Any:
    """Some of the rows of a sequence."""
    return [rows[number] for number in numbers] if isinstance(rows, list) else rows.select(numbers)


def _open(
    path: str, subset: str | None, split: str, streaming: bool, revision: str | None
) -> tuple[Any, Path | None]:
    """`open_rows` of a whole split."""
    local = Path(os.path.expanduser(path))
    if ADDRESS.match(path):
        check_rows_path(path)
        endings = {Path(urlsplit(path).path).suffix}
        return _open_files(endings, partial(_files_at, path, streaming), [path], path, split, streaming), None
    if any((local / name).is_file() for name in _SAVED):
        return _open_saved(path, split or TRAIN, streaming), local
    if local.is_dir():
        by_split = _files_by_split(local)
        files = sorted(file for of_split in by_split.values() for file in of_split)
        is_image_folder = any(file.name == _METADATA for file in files)
        if not files or (not is_image_folder and any(local.rglob("*.parquet"))):
            return _load(str(local), path, subset, split, streaming), local
        if split or len({file.parent for file in files}) > 1:
            wanted = split or TRAIN
            if not (files := by_split.get(_SPLITS.get(wanted, wanted), [])):
                raise _no_split(path, wanted, by_split)
    elif not (files := _local_files(path)):
        check_rows_path(path)
        return _load(path, path, subset, split, streaming, revision=revision), None
    elif split not in ("", TRAIN) and files[0].suffix not in _BUILDERS:
        raise _no_split(path, split, [f"{TRAIN}, as all files that are named themselves"])
    folder, is_parquet = files[0].parent, files[0].suffix == ".parquet"
    if any(file.parent != folder for file in files) and not is_parquet:
        raise DatasetError(f"{path}: expected files of one folder; name each folder as a dataset of its own")
    endings, here = {file.suffix for file in files}, [str(file) for file in files]
    opened = partial(map, RowsFile.here, files)
    return _open_files(endings, opened, here, path, split, streaming), folder


def count_rows(path: str, subset: str | None, split: str) -> int | None:
    """Number of rows of a local dataset; None for one on the Hub."""
    return len(open_rows(path, subset, split, streaming=False)[0]) if _local_files(path) else None


def _local_files(path: str) -> list[Path]:
    return sorted(map(Path, glob.glob(os.path.expanduser(path), recursive=True)))


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    """Split -> JSON-lines files of a folder and of the folders in it, or tars if there are none, nor CSV.

    rows/train/metadata.jsonl  rows/validation/metadata.jsonl      names of folders come first
    rows/train.jsonl           rows/my-dev-1.jsonl                 then words in names of files
    rows/a.jsonl               rows/b.jsonl                        all train, if nothing else is
    """
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")])
    if not files and not any(folder.glob("*.csv")):
        files = sorted([*folder.glob("*.tar"), *folder.glob("*/*.tar")])
    found: dict[str, dict[int, list[Path]]] = {}  # by split and by how plainly a name says so
    for file in files:
        if file.name != _METADATA and file.with_name(_METADATA) in files:
            continue
        inside = file.parent != folder
        name = file.parent.name if inside else file.name
        words = re.split(r"[-._ 0-9]+", name.lower())
        known = next((_SPLITS[word] for word in words if word in _SPLITS), None)
        doubt = (2 * (name.lower() not in _SPLITS)) if inside else 3 if known else 4
        split = known or (name if inside else TRAIN)
        found.setdefault(split, {}).setdefault(doubt, []).append(file)
    if files == [folder / _METADATA]:
        with os.scandir(folder) as entries:  # unlike Path.iterdir, no look at each of a million images
            names = sorted(
                entry.name for entry in entries if entry.is_dir() and entry.name.lower() in _SPLITS
            )
        if len(names) > 1:
            raise DatasetError(
                f"{folder}: {_METADATA} does not say which of its images are {' and which '.join(names)}; "
                "put one such file into each of their folders"
            )
    return {split: by_doubt[min(by_doubt)] for split, by_doubt in found.items()}


def _no_split(path: str, split: str, splits: Iterable[str]) -> DatasetError:
    return DatasetError(f"{path}: no split {split!r}; it has {', '.join(splits)}")


def _open_saved(path: str, split: str, streaming: bool) -> Any:
    with reading(f"{path}: cannot be opened"):
        rows = library().load_from_disk(os.path.expanduser(path))
    if isinstance(rows, library().DatasetDict):
        if split not in rows:
            raise _no_split(path, split, rows)
        rows = rows[split]
    leave_undecoded(rows.info.features)
    sections = max(1, min(_SECTIONS, len(rows)))
    return Stream(rows.to_iterable_dataset(num_shards=sections)) if streaming else rows


def _open_files(
    endings: set[str],
    files: Callable[[], Iterable[RowsFile]],
    data_files: list[str],
    path: str,
    split: str,
    streaming: bool,
) -> Any:
    """The rows of files with these endings; `data_files` are what the library calls them."""
    if not (endings <= {".jsonl", ".json"} or endings == {".tar"}):
        builder = _BUILDERS.get(*endings) if len(endings) == 1 else None
        if builder is None:
            known, got = ", ".join([".jsonl", ".tar", *_BUILDERS]), ", ".join(sorted(endings))
            raise DatasetError(f"{path}: expected files that end in one of {known}, got {got or 'none'}")
        return _load(builder, path, None, split, streaming, data_files=data_files)
    with reading(f"{path}: cannot be opened"):
        ours = [*files()]
        if len(ours) == 1 and (rows := _json_whole(ours[0])) is not None:
            return rows
        return FileStream(ours) if streaming else FileRows(ours)


def _json_whole(file: RowsFile) -> Any:
    """The rows of a file that is one list, or one object as COCO has it, None if it is neither."""
    if not file.name.endswith(".json"):
        return None
    with file.open() as opened:
        begins = opened.read(2**16).lstrip()[:1]
        opened.seek(0)
        return json.load(opened) if begins == b"[" else coco_rows(opened, file.name) if begins else None


def _files_at(path: str, streaming: bool) -> list[RowsFile]:
    """The files at an address or a pattern of addresses. Those that are not streamed are downloaded, and so
    are those of a server that gives no ranges of bytes."""
    if not (found := fsspec_module().open_files(path)):
        raise DatasetError(f"{path}: no such file")
    files = [RowsFile(file.full_name, Path(urlsplit(file.path).path).name) for file in found]
    if streaming and all(len(found.fs.cat_file(file.path, start=0, end=2)) <= 2 for file in found):
        return files
    downloaded = library().DownloadManager().download([file.address for file in files])
    return [replace(file, address=place) for file, place in zip(files, downloaded, strict=True)]


def _load(builder: str, path: str, subset: str | None, split: str, streaming: bool, **options) -> Any:
    """Open what the library knows: a builder by its name, a folder, or a dataset on the Hub."""
    with reading(f"{path}: cannot be opened"):
        found = (library().load_dataset_builder if "data_files" in options else _builder)(
            builder, subset, **options
        )
        files = _data_files(found)
        here = all("://" not in file for file in files)
        if files and isinstance(found, resolve_name(_PARQUET)) and (here or not streaming):
            places = files if here else library().DownloadManager().download(files)
            found.info.features = found.info.features or _features(places)
            if streaming:
                wanted = found.config.data_files.get(split or TRAIN, ())
                return FileStream([RowsFile.here(Path(file)) for file in wanted], found.info.features)
        # As `load_dataset` goes on, which would ask the Hub for all of this once more.
        if streaming:
            rows = found.as_streaming_dataset(split=split or TRAIN)
        else:
            found.download_and_prepare()
            rows = found.as_dataset(split=split or TRAIN)
        leave_undecoded(rows.info.features)
    return Stream(rows) if streaming else rows


def _data_files(builder: Any) -> list[str]:
    return [str(file) for of_split in (builder.config.data_files or {}).values() for file in of_split]


def _features(files: Sequence[str]) -> Any:
    """The columns of Parquet files together: in the first one alone a column may hold nothing but null."""
    schemas = [resolve_name("pyarrow.parquet").read_schema(file) for file in files]
    schema = resolve_name("pyarrow").unify_schemas(schemas, promote_options="permissive")
    return library().Features.from_arrow_schema(schema)


def _builder(path: str, subset: str | None, revision: str | None = None) -> Any:
    """The library's builder of a folder or of a dataset on the Hub: offline of what the library has copied
    before, or else of what the Hub's client has. A downloaded folder's README may name any file of this
    machine as the dataset's: that is refused."""
    place, hub = os.path.expanduser(path), client()
    try:
        builder = library().load_dataset_builder(place, subset, revision=revision)
    except OSError as error:
        if not hub.constants.HF_HUB_OFFLINE:
            raise
        with suppress(hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError):
            copy = hub.snapshot_download(path, repo_type="dataset", revision=revision, local_files_only=True)
            return _builder(copy, subset)
        raise error
    folder = os.path.abspath(place)
    for file in _data_files(builder):
        local = file.split("::")[-1].removeprefix("file://")  # the archive that a file lies in
        if "://" not in local and not Path(os.path.abspath(local)).is_relative_to(folder):
            raise DatasetError(f"{path}: its README names a data file outside of it, {local!r}")
    return builder


def leave_undecoded(feature: Any) -> None:
    """Have the library give images as bytes or paths."""
    if isinstance(feature, library().Image):
        feature.decode = False
    elif isinstance(feature, library().List | library().LargeList):
        leave_undecoded(feature.feature)
    for inner in feature.values() if isinstance(feature, dict) else ():
        leave_undecoded(inner)


# ---------------------------------------------------------------------------------------------- mixtures
@dataclass(frozen=True)
class DatasetConfig:
    """One dataset of a recipe.

    Args:
        path: Hub id, folder, file, pattern or address; see `open_rows`.
        name: what sample ids and messages call it; path and subset by default.
        subset: a Hub dataset's configuration.
        split: as in `datasets`.
        weight: its share of the rows that are read, relative to the other datasets'. By default its number of
            rows, so that every row is read equally often.
        streaming: read it from front to back, without downloading it first.
        columns: our column names -> the dataset's, e.g. {"question": "query", "answer": "json.answer"}.
        constants: our column names -> what every row has there, e.g. {"question": "Describe the image."}.
        names: what numbers mean, as categories of boxes or as answers: a list from 0, or a mapping.
        image_folder: where paths of images start that are not absolute; by default beside the rows.
        min_ratings: rating column -> the lowest rating that is trained on.
        allow_urls: rows may name images by URL, which are fetched during training.
        allow_outside: rows may name images outside of the dataset's folder.
        allow_text_only: the first rows need not have an image.
        revision: branch, tag or commit on the Hub.
        language: codes such as "de, fr", for the model card.
        boxes: how rows with boxes are read, e.g. {form: qwen3-vl, corners: true}: `data.box_rows.BoxRows`.
    """

    path: str
    name: str = ""
    subset: str | None = None
    split: str = TRAIN
    weight: float | int | None = None
    streaming: bool = False
    columns: Mapping = field(default_factory=dict)
    constants: Mapping = field(default_factory=dict)
    names: Mapping | list = field(default_factory=dict)
    min_ratings: Mapping = field(default_factory=dict)
    image_folder: str = ""
    allow_urls: bool = False
    allow_outside: bool = False
    allow_text_only: bool = False
    revision: str | None = None
    language: str = ""
    boxes: Mapping = field(default_factory=dict)

    def __post_init__(self):
        for key, kind in get_type_hints(type(self)).items():
            if not isinstance(value := getattr(self, key), kind):
                raise DatasetError(f"dataset: {key}: got {value!r}, which is of another kind than it takes")
        kinds: dict[str, type] = dict.fromkeys(("form", "detect", "point"), str)
        kinds |= dict.fromkeys(("corners", "points"), bool)
        if not all(key in kinds and isinstance(value, kinds[key]) for key, value in self.boxes.items()):
            raise DatasetError(f"dataset: boxes: expected {', '.join(kinds)}, got {dict(self.boxes)}")
        if (form := self.boxes.get("form", "")) not in ("", *COORDINATES):
            raise DatasetError(f"dataset: boxes: form: expected {', '.join(COORDINATES)}, got {form!r}")
        try:
            pairs = self.names.items() if isinstance(self.names, Mapping) else enumerate(self.names)
            object.__setattr__(self, "names", {int(number): str(name) for number, name in pairs})
        except ValueError as error:
            raise DatasetError(f"dataset: names: expected numbers and their names ({error})") from error
        if not self.path:
            raise DatasetError("dataset: expected a path or Hub id, got none")
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise DatasetError(f"dataset: weight: expected a positive number, got {self.weight}")
        if not self.name:
            object.__setattr__(self, "name", f"{self.path}/{self.subset}" if self.subset else self.path)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> DatasetConfig:
        """A recipe's entry."""
        known = [item.name for item in fields(cls)]
        if "path" not in entry or (wrong := sorted(set(entry) - set(known))):
            problem = f"unknown key {', '.join(wrong)}" if "path" in entry else "no path"
            raise DatasetError(f"dataset: {problem}; its keys are {', '.join(known)}")
        return cls(**entry)


@dataclass(frozen=True)
class Source:
    """An open dataset; `rows` is a sequence or a `Stream`."""

    name: str
    rows: Any
    schema: RowSchema
    weight: float
    rejected: RowSchema | None = None  # of rows of preferences, where `schema` reads what was chosen

    @property
    def schemas(self) -> tuple[RowSchema, ...]:
        """One for each conversation that a row holds."""
        return (self.schema,) if self.rejected is None else (self.schema, self.rejected)

    @property
    def num_rows(self) -> int | None:
        """None for a stream of unknown length."""
        return len(self.rows) if isinstance(self.rows, Sized) else None

    def where(self, number: int) -> str:
        """Where somebody finds the row of a number: "NAME, row 3", or "NAME, a.jsonl, row 3"."""
        where = self.rows.where(number) if isinstance(self.rows, Stream) else f"row {number}"
        return f"{self.name}, {where}"


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
        """Of all datasets together; None if that of one is not known."""
        counts = [source.num_rows for source in self.sources]
        return None if None in counts else sum(count or 0 for count in counts)


def open_datasets(
    entries: Sequence[DatasetConfig | Mapping[str, Any]],
    preferences: bool = False,
    share: Share | None = None,
) -> Mixture:
    """Open every dataset of a recipe, of `preferences` or not, or a share of the rows of each, and find out
    which columns hold what."""
    configs = [e if isinstance(e, DatasetConfig) else DatasetConfig.from_dict(e) for e in entries]
    sources = []
    for config in configs:
        rows, folder = open_rows(config.path, config.subset, config.split, config.streaming, config.revision)
        rows = rows if share is None else share(rows, config.path)
        folder = Path(os.path.expanduser(config.image_folder)) if config.image_folder else folder
        if config.weight is None and not isinstance(rows, Sized) and len(configs) > 1:
            raise DatasetError(f"{config.name}: a stream among other datasets needs a weight")
        sources.append(open_source(rows, config, folder, preferences))
    mixture = Mixture(sources)
    counted = [source.name for source, config in zip(sources, configs) if config.weight is None]
    if 0 < len(counted) < len(configs):
        said = "%s: no weight, so it is the number of rows, beside the weights of other datasets"
        logger.warning(said, ", ".join(counted))
    how = "columns: {image: COLUMN} in the dataset's entry, or allow_text_only: true for text alone"
    found = [  # of all datasets, so that each is looked at
        config.allow_text_only
        or find_images(first_rows(source.rows), source.schema.images, source.schema, source.name, how)
        for config, source in zip(configs, sources, strict=True)
    ]
    if not any(found):
        raise no_images(sources[0].name, columns_of(sources[0].rows, sources[0].name), how)
    return mixture


def open_source(
    rows: Any, config: DatasetConfig, folder: Path | None = None, preferences: bool = False
) -> Source:
    """A source of rows that are already open: a list of dicts, or any other sequence or `Stream`.

    Args:
        folder: where relative image paths start; None refuses paths.
    """
    if not (first := list(first_rows(rows))):
        raise DatasetError(f"{config.name}: split {config.split!r} has no rows")
    columns = columns_of(rows, config.name, first)
    known, renamed, by_ending = known_columns(first, columns, config.columns, config.constants)
    rejected, name = None, config.name
    if preferences:
        text_columns, renamed, rejected = find_pairs(known, renamed, first[0], name, config.constants)
    else:
        text_columns = find_schema(known, renamed, name, config.constants)
    numbered = ["answer"] if text_columns == ("question", "answer") else CATEGORIES
    names: Any = config.names or class_names(rows, [renamed.get(one, one) for one in numbered])
    if text_columns not in OF_BOXES and (boxes := {"bbox", "objects"} & {*columns}):
        logger.warning(
            "%s: its column %s is not read, as its text is in %s; columns: {ref: ...} asks for boxes",
            *(config.name, " and ".join(sorted(boxes)), " and ".join(text_columns)),
        )
    schema = RowSchema(
        text_columns,
        columns=renamed,
        by_ending=by_ending,
        constants=dict(config.constants),
        min_ratings=dict(config.min_ratings),
        folder=folder,
        allow_urls=config.allow_urls,
        allow_outside=config.allow_outside,
        boxes=BoxRows(**config.boxes, names=names),
    )
    if absent := sorted(set(config.min_ratings) - set(known)):
        has = ", ".join(columns)
        raise DatasetError(f"{config.name}: min_ratings: no column {', '.join(absent)}; it has {has}")
    weight = config.weight or (len(rows) if isinstance(rows, Sized) else 1)
    other = None if rejected is None else replace(schema, columns=rejected)
    return Source(config.name, rows, schema, float(weight), other)
