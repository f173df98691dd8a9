"""Where rows come from: the Hub, `save_to_disk` folders, Parquet, JSON lines, image folders; nothing decoded.

The `datasets` library opens everything but JSON lines: it would guess types there, and turn an answer that
looks like a date into one. Images stay as the bytes or paths they are, for `load_image` to open.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.features import Image, LargeList, List
from pyarrow.parquet import read_metadata

from data.errors import DatasetError, one_line
from data.files import check_rows_path
from data.lines import TOO_LONG, is_too_long, line_at, lines_of, parse_line
from data.order import Rows
from data.splits import METADATA, TRAIN, check_only_train, chosen, files_by_split, name_of

_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
_MAX_LIST = 512 * 2**20  # bytes of a file that is one list of rows, which is read as a whole
_LOOKED_AT = 100  # rows that all are taken to be like: whose keys are the columns, say


class JsonLines:
    """The objects of JSON-lines files, each read when it is asked for.

    A line that is too long or no JSON comes as a string that says so, to be counted with the other bad rows.
    """

    def __init__(self, paths: Sequence[Path]):
        self.paths = list(paths)
        self._places: list[np.ndarray] = []  # of each file, the first byte of every line that is not blank
        for path in self.paths:
            with path.open("rb") as file:
                starts = [place for place, line in lines_of(file) if line.strip()]
            self._places.append(np.array(starts, dtype=np.int64))
        self._ends = np.cumsum([len(starts) for starts in self._places])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = int(np.searchsorted(self._ends, index, side="right"))
        within = index - (int(self._ends[which - 1]) if which else 0)
        with self.paths[which].open("rb") as file:
            return _parsed(line_at(file, int(self._places[which][within])), self.paths[which])


class Selected:
    """Rows `start` to `end` of others."""

    def __init__(self, rows: Rows, start: int, end: int):
        self.rows, self.start, self.length = rows, start, max(0, end - start)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.rows[self.start + index]


class JsonLinesStream:
    """The same files, read from their beginning on with nothing looked up first."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = list(paths)
        self.num_files = len(self.paths)

    def open(self, file: int, start: int) -> Iterator[Any]:
        path = self.paths[file]
        with path.open("rb") as lines:
            for line in islice((line for _, line in lines_of(lines) if line.strip()), start, None):
                yield _parsed(line, path)


class HubStream:
    """A streaming dataset of the `datasets` library, file by file."""

    def __init__(self, dataset: datasets.IterableDataset):
        self.dataset = dataset
        self.num_files = dataset.num_shards

    def open(self, file: int, start: int) -> Iterator[Any]:
        one = (
            self.dataset.shard(num_shards=self.num_files, index=file) if self.num_files > 1 else self.dataset
        )
        return iter(one.skip(start) if start else one)


def _parsed(line: bytes, path: Path) -> Any:
    if is_too_long(line):
        return f"{path.name}: a line {TOO_LONG}"
    try:
        return parse_line(line)
    except ValueError as error:
        return f"{path.name}: a line that is no JSON ({error})"


# ------------------------------------------------------------------------------------------------- opening
def open_rows(path: str, subset: str | None, split: str, streaming: bool, revision: str | None = None):
    """The rows behind a path, or behind a repository's name on the Hub.

    Args:
        path: a `save_to_disk` folder, an image folder, a folder of Parquet or JSON-lines files, one such file
            or a pattern like "rows/*.parquet", or a Hub id.
        subset: which of a Hub dataset's configurations.
        split: as in `datasets`, with slices such as "train[:90%]" where not streaming; see `data.splits` for
            which of a folder's files it is. Files that are named one by one are all train. "" is all JSON
            lines of one folder, and train of several folders or other files.

    Returns:
        (rows, folder): a sequence or a `Stream`, and the folder that relative image paths start from, None
        for what is on the Hub.

    Raises:
        DatasetError: nothing there, no such split, or not readable.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return _open_folder(local, subset, split, streaming)
    files = [local] if local.is_file() else sorted(map(Path, glob.glob(str(local), recursive=True)))
    if files:
        return _open_files(files, path, split, streaming), _common_folder(files, path)
    check_rows_path(path)
    return _load(path, path, subset, split, streaming, revision=revision), None


def count_rows(path: str, subset: str | None, split: str) -> int | None:
    """Rows of a dataset that lies here, Parquet's from its footers alone; None for what is on the Hub.

    Raises:
        DatasetError: as `open_rows`.
    """
    local = Path(path).expanduser()
    if not local.exists() and not glob.glob(str(local), recursive=True):
        return None
    if (files := _parquet_files(local, subset, name_of(split) or TRAIN)) is not None:
        try:
            rows = sum(read_metadata(file).num_rows for file in files)
        except Exception as error:  # damaged files end in many kinds
            raise DatasetError(f"{path}: cannot be read ({one_line(error, 300)})") from error
        start, end = _slice(split, rows, path) if "[" in split else (0, rows)
        return end - start
    return len(open_rows(path, subset, split, streaming=False)[0])


def _parquet_files(local: Path, subset: str | None, split: str) -> list[str] | None:
    """Those that a split of a folder, file or pattern consists of; None where it has other files."""
    if not local.is_dir():
        files = [str(local)] if local.exists() else sorted(glob.glob(str(local), recursive=True))
        return files if split == TRAIN and {Path(file).suffix for file in files} == {".parquet"} else None
    if any((local / name).is_file() for name in _SAVED) or not any(local.rglob("*.parquet")):
        return None
    try:
        builder = datasets.load_dataset_builder(str(local), subset)
        _check_data_files(builder, str(local))
    except Exception:  # `open_rows` says what is wrong
        return None
    found = builder.config.data_files or {}
    return [str(file) for file in found[split]] if builder.name == "parquet" and split in found else None


def columns_of(rows: Any, where: str) -> list[str]:
    """Names of the columns; [] where there is no row.

    Raises:
        DatasetError: the first lines of JSON lines are all no JSON, or too long.
    """
    if isinstance(rows, datasets.Dataset):
        return list(rows.column_names)
    if isinstance(rows, HubStream) and rows.dataset.column_names:
        return list(rows.dataset.column_names)
    names: dict[str, None] = {}
    unread = None
    for row in first_rows(rows):
        names |= dict.fromkeys(row if isinstance(row, Mapping) else ())
        unread = unread or (row if isinstance(row, str) else None)
    if unread and not names:
        raise DatasetError(f"{where}: no row can be read: {unread}")
    return list(names)


def first_rows(rows: Any) -> Iterator[Any]:
    """Some rows to learn from what all are like."""
    if hasattr(rows, "open"):
        all_files = (row for file in range(rows.num_files) for row in rows.open(file, 0))
        return islice(all_files, _LOOKED_AT)
    return (rows[i] for i in range(min(len(rows), _LOOKED_AT)))


def is_empty(rows: Any) -> bool:
    if not hasattr(rows, "open"):
        return len(rows) == 0
    return all(next(iter(rows.open(file, 0)), None) is None for file in range(rows.num_files))


def _open_folder(folder: Path, subset: str | None, split: str, streaming: bool):
    """(rows, the folder that relative image paths start from)."""
    if any((folder / name).is_file() for name in _SAVED):
        return _from_disk(folder, split or TRAIN, streaming), folder
    try:
        by_split = files_by_split(folder, name_of(split))
    except OSError as error:
        raise DatasetError(f"{folder}: cannot be read ({one_line(error, 300)})") from error
    is_image_folder = any(file.name == METADATA for files in by_split.values() for file in files)
    if not by_split or (not is_image_folder and any(folder.rglob("*.parquet"))):
        return _load(str(folder), str(folder), subset, split or TRAIN, streaming), folder
    files = chosen(by_split, name_of(split), str(folder))
    return _json_lines(files, str(folder), split, streaming), _start_of_paths(files, folder)


def _from_disk(folder: Path, split: str, streaming: bool):
    name, _, slice_ = split.partition("[")
    try:
        rows = datasets.load_from_disk(str(folder))
    except Exception as error:  # damaged Arrow files end in many kinds
        raise DatasetError(f"{folder}: cannot be read ({one_line(error, 300)})") from error
    if isinstance(rows, datasets.DatasetDict):
        if name not in rows:
            raise DatasetError(f"{folder}: no split {name!r}; it has {', '.join(rows)}")
        rows = rows[name]
    if slice_:
        rows = rows.select(range(*_slice(split, len(rows), str(folder))))
    rows = _undecoded(rows)
    return HubStream(rows.to_iterable_dataset()) if streaming else rows


def _open_files(files: list[Path], path: str, split: str, streaming: bool):
    kinds = {file.suffix for file in files}
    if kinds <= {".jsonl", ".json"}:
        check_only_train(split, path)
        if kinds == {".json"} and len(files) == 1 and _is_list(files[0]):
            return _json_list(files[0], path, split)
        return _json_lines(files, path, split, streaming)
    if kinds == {".parquet"}:
        return _load(
            "parquet", path, None, split or TRAIN, streaming, data_files=[str(file) for file in files]
        )
    raise DatasetError(
        f"{path}: expected Parquet or JSON-lines files, got {', '.join(sorted(kinds)) or 'no ending'}"
    )


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2**16).lstrip()[:1] == b"["


def _json_list(file: Path, path: str, split: str):
    """A file that is one list of rows."""
    if (size := file.stat().st_size) > _MAX_LIST:
        raise DatasetError(
            f"{path}: expected a list of rows of at most {_MAX_LIST >> 20} MiB, got {size >> 20}; write JSON "
            "lines, a row in each"
        )
    try:
        rows = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: cannot be read, it is no JSON ({error})") from error
    return rows[slice(*_slice(split, len(rows), path))] if "[" in split else rows


def _json_lines(files: list[Path], path: str, split: str, streaming: bool):
    if streaming and "[" in split:
        raise DatasetError(f"{path}: split {split!r}: a stream has no known length; leave the slice out")
    if streaming:
        return JsonLinesStream(files)
    rows = JsonLines(files)
    return Selected(rows, *_slice(split, len(rows), path)) if "[" in split else rows


def _slice(split: str, rows: int, where: str) -> tuple[int, int]:
    """First row and the one behind the last of a split such as "train[:90%]"."""
    name = name_of(split)
    try:
        (part,) = datasets.ReadInstruction.from_spec(split).to_absolute({name: rows})
    except (ValueError, AssertionError) as error:
        raise DatasetError(f"{where}: split {split!r}: {one_line(error, 300)}") from error
    start, end = part.from_ or 0, rows if part.to is None else part.to
    return start, end


def _load(builder: str, where: str, subset: str | None, split: str, streaming: bool, **options):
    try:
        if "data_files" not in options:
            _check_data_files(datasets.load_dataset_builder(builder, subset, **options), where)
        rows = datasets.load_dataset(builder, subset, split=split, streaming=streaming, **options)
    except DatasetError:
        raise
    except Exception as error:  # the library, the network and the files raise anything
        raise DatasetError(
            f"{where}: cannot be opened ({type(error).__name__}: {one_line(error, 300)})"
        ) from error
    rows = _undecoded(rows)
    return HubStream(rows) if streaming else rows


def _check_data_files(builder: datasets.DatasetBuilder, where: str) -> None:
    """Raises DatasetError where a dataset's README names files of this machine that are not its own."""
    folder = os.path.abspath(Path(where).expanduser())
    for files in (builder.config.data_files or {}).values():
        for file in map(str, files):
            place = file.split("::")[-1].removeprefix("file://")  # of the archive that a file lies in
            if "://" in place or Path(os.path.abspath(place)).is_relative_to(folder):
                continue
            raise DatasetError(
                f"{where}: its README names a data file outside of it, {place!r}: copy the file into its "
                "folder, or name it as a dataset of its own"
            )


def _undecoded(rows):
    """The same rows with images left as bytes or paths."""
    for name, feature in (rows.features or {}).items():
        plain = _without_decoding(feature)
        if plain != feature:
            rows = rows.cast_column(name, plain)
    return rows


def _without_decoding(feature: Any) -> Any:
    if isinstance(feature, Image):
        return Image(decode=False)
    if isinstance(feature, List):
        return List(_without_decoding(feature.feature), length=feature.length)
    if isinstance(feature, LargeList):
        return LargeList(_without_decoding(feature.feature))
    if isinstance(feature, dict):
        return {name: _without_decoding(inner) for name, inner in feature.items()}
    return feature


def _start_of_paths(files: list[Path], folder: Path) -> Path:
    """Where relative image paths start: beside the files or, where an image of the first rows lies only
    there, in the folder that has the splits."""
    inside = _common_folder(files, str(folder))
    if inside == folder or files[0].name == METADATA:
        return inside
    for row in islice(JsonLinesStream(files).open(0, 0), _LOOKED_AT):
        for path in _texts(row):
            try:
                if not (inside / path).is_file() and (folder / path).is_file():
                    return folder
            except (OSError, ValueError):  # no path
                continue
    return inside


def _texts(value: Any, depth: int = 3) -> Iterator[str]:
    """Short texts in a row, which may be paths."""
    if isinstance(value, str) and 0 < len(value) < 1_000:
        yield value
    elif isinstance(value, list | dict) and depth:
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one, depth - 1)


def _common_folder(files: list[Path], path: str) -> Path:
    folders = {file.parent for file in files}
    if len(folders) > 1 and files[0].suffix != ".parquet":
        raise DatasetError(
            f"{path}: expected files of one folder, where image paths start, got {len(folders)} folders; "
            "list them as datasets of their own"
        )
    return files[0].parent
