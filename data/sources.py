"""Datasets as a recipe names them: opened, their columns understood, mixed by weight. No image is decoded.

    mixture = open_datasets([
        {"path": "HuggingFaceM4/the_cauldron", "subset": "ai2d", "weight": 2},
        {"path": "my/rows.jsonl", "columns": {"question": "query"}},
    ])

The `datasets` library opens the Hub, `save_to_disk` folders, Parquet, CSV, tars of WebDataset and image
folders. JSON lines are read where they lie (`data.row_files`), files as COCO has them once (`data.coco`): the
library turns texts that look like dates into dates, wants one type in a column, and cannot open a file with
one broken line. Images stay bytes or paths.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, fields, replace
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, Strict, ValidationError
from pydantic.dataclasses import dataclass

from data.box_rows import CATEGORIES, NAMES, BoxRows
from data.boxes import COORDINATES
from data.coco import coco_rows, without_polygons
from data.errors import ADDRESS, DatasetError, check_rows_path
from data.row_files import LinesRows, Stream, fsspec_module, library, reading
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

logger = logging.getLogger(__name__)
TRAIN = "train"
_METADATA = "metadata.jsonl"  # of an image folder; no other file beside it counts
_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")  # in a `save_to_disk` folder
_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".tar": "webdataset"}  # by the files' ending
_SPLITS = {TRAIN: TRAIN, "training": TRAIN}  # words in names, as the `datasets` library knows them
_SPLITS |= dict.fromkeys(("validation", "valid", "dev", "val"), "validation")
_SPLITS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
_SECTIONS = 1024  # of a folder of `save_to_disk` that is streamed
_AT_ONCE = 16  # rows of a row group that are in memory together: each shard has one open
_LOOKED_AT = 100  # rows that show what all rows are like


def first_rows(rows: Sequence[Any] | Stream) -> Iterator[Any]:
    """Some rows that show what all are like."""
    return islice(iter(rows), _LOOKED_AT)


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
) -> tuple[list[str], dict[str, str]]:
    """The columns of rows, of which `first` are some, with those within them, such as json.question; and our
    names -> theirs, those `given` and those that follow, for what is not constant."""
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
    return [*columns, *inside], renamed


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
    return _class_names(getattr(feature, "feature", None))  # of a list


# ------------------------------------------------------------------------------------------ opening rows
def open_rows(
    path: str, subset: str | None, split: str, streaming: bool, revision: str | None = None
) -> tuple[Any, Path | None]:
    """Open a local path or a dataset on the Hub.

    Args:
        path: a folder (of `save_to_disk`, images with metadata.jsonl, JSON lines, or anything else that the
            `datasets` library knows), a file, a pattern like "rows/*.parquet", the same at an address that
            fsspec reads (s3://, gs://, hf://, https://), where an ending says what it is, or a Hub id.
        subset: a Hub dataset's configuration.
        split: as in `datasets`, with slices such as "train[:90%]" unless streaming. Files that are named
            themselves are all train. "" is all JSON lines of a folder; if they lie in several folders, and
            for anything else, it is train.

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
    local, wanted = Path(os.path.expanduser(path)), split or TRAIN
    if ADDRESS.match(path):
        check_rows_path(path)
        return _open_files({Path(urlsplit(path).path).suffix}, [path], path, wanted, streaming), None
    if any((local / name).is_file() for name in _SAVED):
        return _open_saved(path, wanted, streaming), local
    if local.is_dir():
        by_split = _files_by_split(local)
        files = sorted(file for of_split in by_split.values() for file in of_split)
        is_image_folder = any(file.name == _METADATA for file in files)
        if not files or (not is_image_folder and any(local.rglob("*.parquet"))):
            return _load(str(local), path, subset, wanted, streaming), local
        if split or len({file.parent for file in files}) > 1:
            files = by_split.get(_SPLITS.get(wanted, wanted), [])
        if not files:
            raise _no_split(path, wanted, by_split)
    elif not (files := _local_files(path)):
        check_rows_path(path)
        return _load(path, path, subset, wanted, streaming, revision=revision), None
    elif wanted != TRAIN and files[0].suffix not in _BUILDERS:
        raise _no_split(path, wanted, [f"{TRAIN}, as all files that are named themselves"])
    folder, endings = files[0].parent, {file.suffix for file in files}
    if any(file.parent != folder for file in files) and not endings <= {*_BUILDERS}:
        raise DatasetError(f"{path}: expected files of one folder; name each folder as a dataset of its own")
    return _open_files(endings, [str(file) for file in files], path, wanted, streaming), folder


def count_rows(path: str, subset: str | None, split: str) -> int | None:
    """Number of rows of a local dataset; None for one on the Hub."""
    return len(open_rows(path, subset, split, streaming=False)[0]) if _local_files(path) else None


def _local_files(path: str) -> list[Path]:
    return sorted(map(Path, glob.glob(os.path.expanduser(path), recursive=True)))


def _files_by_split(folder: Path) -> dict[str, list[Path]]:
    """Split -> JSON-lines files of a folder and of the folders in it.

    rows/train/metadata.jsonl  rows/validation/metadata.jsonl      by the names of folders
    rows/train.jsonl           rows/my-dev-1.jsonl                 and words in names of files
    rows/a.jsonl               rows/b.jsonl                        all train, if nothing else is
    """
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*/*.jsonl")])
    found: dict[str, list[Path]] = {}
    for file in files:
        if file.name != _METADATA and file.with_name(_METADATA) in files:
            continue
        name = file.name if file.parent == folder else file.parent.name
        words = re.split(r"[-._ 0-9]+", name.lower())
        known = next((_SPLITS[word] for word in words if word in _SPLITS), None)
        found.setdefault(known or ("" if file.parent == folder else name), []).append(file)
    if unnamed := found.pop("", []):
        found.setdefault(TRAIN, unnamed)
    for split, several in found.items():  # a folder of just that name comes before files with it in theirs
        exact = [
            file
            for file in several
            if _SPLITS.get(file.parent.name.lower()) == split and file.parent != folder
        ]
        found[split] = exact or several
    return found


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


def _open_files(endings: set[str], files: list[str], path: str, split: str, streaming: bool) -> Any:
    """The rows of files with these endings, or of an address or a pattern of them."""
    if not endings <= {".jsonl", ".json"}:
        builder = _BUILDERS.get(*endings) if len(endings) == 1 else None
        if builder is None:
            known, got = ", ".join([".jsonl", *_BUILDERS]), ", ".join(sorted(endings))
            raise DatasetError(f"{path}: expected files that end in one of {known}, got {got or 'none'}")
        return _load(builder, path, None, split, streaming, data_files=files)
    with reading(f"{path}: cannot be opened"):
        lines = _files_at(path) if ADDRESS.match(path) else [(one, Path(one).name) for one in files]
        if endings == {".json"} and len(lines) == 1 and (rows := _whole(*lines[0])) is not None:
            return rows
        return LinesRows(lines)


def _whole(path: str, name: str) -> Any:
    """The rows of a file that is one list, or one object as COCO has it; None for JSON lines."""
    with open(path, "rb") as opened:
        first = next((line.lstrip() for line in opened if line.strip()), b"")
        is_list = first[:1] == b"["
        with suppress(ValueError, TypeError):
            if not is_list and not {"images", "annotations"} <= {*json.loads(first)}:
                return None
        opened.seek(0)
        try:
            whole = json.load(opened, object_hook=None if is_list else without_polygons)
        except (ValueError, RecursionError):
            if is_list:
                raise
            return None  # which lines are broken, whoever reads them says
    return whole if isinstance(whole, list) else coco_rows(whole, name)


def _files_at(path: str) -> list[tuple[str, str]]:
    """The files at an address or a pattern of addresses, downloaded, and their names."""
    if not (found := fsspec_module().open_files(path)):
        raise DatasetError(f"{path}: no such file")
    names = [Path(urlsplit(file.path).path).name for file in found]
    return [*zip(library().DownloadManager().download([file.full_name for file in found]), names)]


def _load(builder: str, path: str, subset: str | None, split: str, streaming: bool, **options) -> Any:
    """Open what the library knows: a builder by its name, a folder, or a dataset on the Hub."""
    with reading(f"{path}: cannot be opened"):
        found = library().load_dataset_builder(builder, subset, **options)
        if found.name == "parquet":
            found.config.batch_size = _AT_ONCE if streaming else None
            files = [str(file) for of_split in found.config.data_files.values() for file in of_split]
            if not streaming or all("://" not in file for file in files):
                found.info.features = found.info.features or _features(files)
        # As `load_dataset` goes on, which would ask the Hub for all of this once more.
        if streaming:
            rows = found.as_streaming_dataset(split=split)
        else:
            found.download_and_prepare()
            rows = found.as_dataset(split=split)
        leave_undecoded(rows.info.features)
        return Stream(rows) if streaming else rows


def _features(files: list[str]) -> Any:
    """The columns of Parquet files together: in the first one alone a column may hold nothing but null."""
    schemas = map(resolve_name("pyarrow.parquet").read_schema, library().DownloadManager().download(files))
    schema = resolve_name("pyarrow").unify_schemas([*schemas], promote_options="permissive")
    return library().Features.from_arrow_schema(schema)


def leave_undecoded(feature: Any) -> None:
    """Have the library give images and videos as bytes or paths."""
    if isinstance(feature, library().Image | library().Video):
        feature.decode = False
    for inner in feature.values() if isinstance(feature, dict) else [getattr(feature, "feature", None)]:
        if inner is not None:
            leave_undecoded(inner)


# ---------------------------------------------------------------------------------------------- mixtures
def _numbered(names: Any) -> Any:
    return dict(enumerate(names)) if isinstance(names, list) else names


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class DatasetConfig:
    """One dataset of a recipe.

    Args:
        path: Hub id, folder, file, pattern or address; see `open_rows`.
        name: what sample ids and messages call it; path and subset by default.
        subset: a Hub dataset's configuration.
        split: as in `datasets`.
        weight: its share of the rows that are read, relative to the other datasets'. By default its number of
            rows, so that every row is read equally often.
        streaming: read it from front to back, without downloading it first. JSON lines never are.
        columns: our column names -> the dataset's, e.g. {"question": "query", "answer": "json.answer"}.
        constants: our column names -> what every row has there, e.g. {"question": "Describe the image."}.
        names: what numbers mean, as categories of boxes or as answers: a list from 0, or a mapping.
        image_folder: where paths of images start that are not absolute; by default beside the rows.
        allow_urls: rows may name images by URL, which are fetched during training.
        allow_outside: rows may name images outside of the dataset's folder.
        allow_text_only: the first rows need not have an image.
        revision: branch, tag or commit on the Hub.
        language: codes such as "de, fr", for the model card.
        boxes: how rows with boxes are read, e.g. {form: qwen3-vl, corners: true}: `data.box_rows.BoxRows`.
    """

    path: str = Field(min_length=1)
    name: str = ""
    subset: str | None = None
    split: str = TRAIN
    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    streaming: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    names: Annotated[Mapping[Annotated[int, Strict(False)], str], BeforeValidator(_numbered)] = field(
        default_factory=dict
    )
    image_folder: str = ""
    allow_urls: bool = False
    allow_outside: bool = False
    allow_text_only: bool = False
    revision: str | None = None
    language: str = ""
    boxes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        kinds = {"form": str, "detect": str, "point": str, "corners": bool, "points": bool}
        if not all(key in kinds and isinstance(value, kinds[key]) for key, value in self.boxes.items()):
            raise ValueError(f"boxes: expected {', '.join(kinds)}")
        if (form := self.boxes.get("form", "")) not in ("", *COORDINATES):
            raise ValueError(f"boxes: form: expected {', '.join(COORDINATES)}, got {form!r}")
        if not self.name:
            object.__setattr__(self, "name", f"{self.path}/{self.subset}" if self.subset else self.path)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> DatasetConfig:
        """A recipe's entry."""
        try:
            return cls(**entry)
        except ValidationError as error:
            wrong = error.errors()[0]
            key = ".".join(map(str, wrong["loc"]))
            known = [item.name for item in fields(cls)]
            keys = f"; its keys are {', '.join(known)}" if {*entry} - {*known} else ""
            got = "" if wrong["type"] == "missing" else f", got {wrong['input']!r:.80}"
            said = f"{key}: {wrong['msg']}{got}" if key else wrong["ctx"]["error"]
            raise DatasetError(f"dataset: {said}{keys}") from None


@plain_dataclass(frozen=True)
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
        """The place of the row of a number, for a person: "NAME, row 3", or "NAME, section 2 of 8, row 3"."""
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
        """The number of rows of all datasets together; None if that of one is not known."""
        counts = [source.num_rows for source in self.sources]
        return None if None in counts else sum(count or 0 for count in counts)


_ROWS_A_CLASS = 5  # on average, or more: else answers are no classes


class Share(NamedTuple):
    """The `share` of a dataset's rows that is held out, if `held_out`, or the others. They are the same ones
    each time, shuffled, and that share of each class: of a `ClassLabel`, else of the answers where these are
    few, as in a CSV of photographs with labels."""

    share: float
    held_out: bool

    def of(self, rows: Any, path: str, answer: str = "answer") -> Any:
        """The rows of this share; `answer` is the column of answers. DatasetError: they cannot be divided."""
        if isinstance(rows, Stream):
            raise DatasetError(f"{path}: --holdout: expected rows that are not streamed; use --eval-data")
        features = getattr(rows, "features", None) or {}
        column = next((key for key, one in features.items() if isinstance(one, library().ClassLabel)), None)
        if column is None and getattr(features.get(answer), "dtype", "") in ("string", "large_string"):
            # One row of each, at least, is held out: of more answers that would be more than the share.
            most = min(1 / _ROWS_A_CLASS, self.share) * len(rows)
            column = answer if len({*rows[answer][:]}) <= most else None
        known = rows[column][:] if column else [""] * len(rows)
        _, classes = np.unique([*map(str, known)], return_inverse=True)
        order = np.random.RandomState(0).permutation(len(rows))  # whose numbers never change
        chosen = np.zeros(len(rows), bool)
        by_class = order[np.argsort(classes[order], kind="stable")]
        for own in np.split(by_class, np.cumsum(np.bincount(classes))[:-1]):
            # At least one row of it, and not all: something of it is learnt.
            chosen[own[: min(max(1, round(self.share * len(own))), len(own) - 1)]] = True
        if not chosen.any():
            got = f"{len(rows)}{', each of a class of its own' * (len(rows) > 1)}"
            raise DatasetError(f"{path}: --holdout: expected at least 2 rows of a class, got {got}")
        return select(rows, order[chosen[order] == self.held_out])


Entry = DatasetConfig | Mapping[str, Any]


def open_datasets(entries: Sequence[Entry], preferences: bool = False, share: Share | None = None) -> Mixture:
    """Open every dataset of a recipe, of `preferences` or not, or a share of the rows of each, and find out
    which columns hold what."""
    configs = [e if isinstance(e, DatasetConfig) else DatasetConfig.from_dict(e) for e in entries]
    sources = []
    for config in configs:
        rows, folder = open_rows(config.path, config.subset, config.split, config.streaming, config.revision)
        rows = rows if share is None else share.of(rows, config.path, config.columns.get("answer", "answer"))
        folder = Path(os.path.expanduser(config.image_folder)) if config.image_folder else folder
        if config.weight is None and not isinstance(rows, Sized) and len(configs) > 1:
            raise DatasetError(f"{config.name}: a stream among other datasets needs a weight")
        sources.append(open_source(rows, config, folder, preferences))
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


def open_both(
    learnt: Sequence[Entry], held_out: Sequence[Entry], holdout: float, preferences: bool = False
) -> tuple[Mixture, Mixture | None]:
    """The rows to train on, and those to evaluate on, if any: datasets of their own, or the share `holdout`
    of the first. See `open_datasets`."""
    if holdout:
        divided = [open_datasets(learnt, preferences, Share(holdout, one)) for one in (False, True)]
        return divided[0], divided[1]
    return open_datasets(learnt, preferences), open_datasets(held_out, preferences) if held_out else None


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
    known, renamed = known_columns(first, columns, config.columns, config.constants)
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
            *(name, " and ".join(sorted(boxes)), " and ".join(text_columns)),
        )
    schema = RowSchema(
        text_columns,
        columns=renamed,
        constants=dict(config.constants),
        folder=folder,
        allow_urls=config.allow_urls,
        allow_outside=config.allow_outside,
        boxes=BoxRows(**config.boxes, names=names),
    )
    weight = config.weight or (len(rows) if isinstance(rows, Sized) else 1)
    other = None if rejected is None else replace(schema, columns=rejected)
    return Source(name, rows, schema, float(weight), other)
