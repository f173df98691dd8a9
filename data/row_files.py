"""Rows where they lie, read as they are needed: JSON lines, samples of WebDataset, row groups of Parquet, and
streams of the `datasets` library. Nothing is written to the disk, and no image is decoded."""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np

from data.errors import ADDRESS, DatasetError
from messages import one_line

_PARTS = 1024  # of a JSON-lines file, so that this many shards read hardly more than their share
_AT_ONCE = 16  # rows of a row group that are in memory together
_MEMBER = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")  # of a tar: a sample's name, and which part of it


def library():
    import datasets  # takes two seconds, and JSON lines do without it

    return datasets


def fsspec_module():
    import fsspec  # takes a tenth of a second

    return fsspec


@contextmanager
def reading(failed: str) -> Iterator[None]:
    """Files, networks and libraries may raise anything: all of it becomes a DatasetError."""
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError(f"{failed} ({type(error).__name__}: {one_line(error, 300)})") from error


@runtime_checkable
class Stream(Protocol):
    """Rows that can only be read one after another, in `num_files` files."""

    num_files: int
    lengths: Sequence[int]  # rows of each file, all of which are one part; () where that is not known
    sizes: Sequence[int]  # bytes of each file, likewise

    def parts(self, file: int) -> int:
        """Number of parts of a file that can be read without the others; always the same."""

    def open(self, file: int, part: int, start: int) -> Iterator[tuple[int, Any]]:
        """The rows of a part of a file, from the part's row number `start` on, each with a number that no
        other row of its file has."""

    def place(self, file: int, number: int) -> str:
        """Where somebody finds the row of that number."""

    def sizes_of_files(self) -> list[Any]:
        """What tells whether the files are still the same, as far as that is known without reading them."""


@dataclass(frozen=True)
class RowsFile:
    """A file here or at an address, and its name in messages; an address is read in ranges of bytes."""

    place: str
    name: str

    @classmethod
    def here(cls, path: Path) -> RowsFile:
        return cls(str(path), path.name)

    def open(self) -> IO[bytes]:
        if not ADDRESS.match(self.place):
            return open(self.place, "rb")
        return fsspec_module().open(self.place, "rb").open()

    def size(self) -> int:
        with self.open() as file:
            return file.seek(0, os.SEEK_END)


class JsonLines(Sequence):
    """The objects of JSON-lines files, each read when it is indexed; `starts` (n, 2) int64 are the file and
    the byte at which each begins.

    A line that is not JSON is a string that says so; the loader counts it with the other bad rows.
    """

    def __init__(self, files: Sequence[RowsFile], starts: np.ndarray | None = None):
        self.files = files
        if starts is None:
            pairs = [(number, at) for number, file in enumerate(files) for at in self._starts(file)]
            starts = np.array(pairs, np.int64).reshape(-1, 2)
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice | np.ndarray):
            return type(self)(self.files, self.starts[index])
        number, start = self.starts[index].tolist()
        with self.files[number].open() as opened:
            opened.seek(start)
            return self._row(opened, self.files[number])

    def _starts(self, file: RowsFile) -> Iterator[int]:
        """Where its lines begin, blank ones left out."""
        offset = 0
        with file.open() as lines:
            for line in lines:
                if line.strip():
                    yield offset
                offset += len(line)

    def _row(self, opened: IO[bytes], file: RowsFile) -> Any:
        return _parsed(opened.readline(), file)


class TarSamples(JsonLines):
    """The samples of WebDataset's tars, likewise: files that follow one another and differ in their endings
    alone, as {ending: what it holds}."""

    def _starts(self, file: RowsFile) -> Iterator[int]:
        with file.open() as opened:
            yield from (begin for begin, _ in _samples(opened, file, read=False))

    def _row(self, opened: IO[bytes], file: RowsFile) -> Any:
        return next(_samples(opened, file))[1]


class JsonLinesStream:
    """JSON-lines files read from front to back, without looking up their lines first. A part is a range of
    bytes, and holds the lines that begin there."""

    lengths: Sequence[int] = ()

    def __init__(self, files: Sequence[RowsFile]):
        self.files, self.num_files = files, len(files)
        self.sizes = [file.size() for file in files]

    def parts(self, file: int) -> int:
        return min(_PARTS, self.sizes[file])

    def open(self, file: int, part: int, start: int) -> Iterator[tuple[int, Any]]:
        """Their numbers are the bytes at which they begin."""
        yield from islice(self._rows(file, part), start, None)

    def place(self, file: int, number: int) -> str:
        return f"{self.files[file].name}, what begins at byte {number}"

    def sizes_of_files(self) -> list[Any]:
        return [[file.name, size] for file, size in zip(self.files, self.sizes, strict=True)]

    def _rows(self, file: int, part: int) -> Iterator[tuple[int, Any]]:
        yield from ((begin, _parsed(line, self.files[file])) for begin, line in self._lines(file, part))

    def _lines(self, file: int, part: int) -> Iterator[tuple[int, bytes]]:
        """The byte at which each line of a part begins, and the line."""
        begin, end = (self.sizes[file] * number // self.parts(file) for number in (part, part + 1))
        with self.files[file].open() as lines:
            if begin:  # the rest of a line that begins before
                lines.seek(begin - 1)
                begin += len(lines.readline(end - begin + 1)) - 1
            # Files in fsspec's memory share one position: each line is looked up.
            while begin < end and lines.seek(begin) == begin and (line := lines.readline()):
                if line.strip():
                    yield begin, line
                begin += len(line)


class TarStream(JsonLinesStream):
    """Likewise, of the samples of tars, each of which is one part."""

    def parts(self, file: int) -> int:
        return 1

    def _rows(self, file: int, part: int) -> Iterator[tuple[int, Any]]:
        with self.files[file].open() as opened:
            yield from _samples(opened, self.files[file])


def _samples(opened: IO[bytes], file: RowsFile, read: bool = True) -> Iterator[tuple[int, Any]]:
    """Samples of a tar, from where it is open, each with the byte at which it begins; empty ones unless
    `read`. What cannot be decoded makes a string of its sample."""
    begin, key, sample = 0, "", dict[str, Any]()
    with closing(tarfile.open(fileobj=opened, mode="r:")) as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # it keeps them: a million take a gigabyte
            name = _MEMBER.fullmatch(member.name)
            if name is None or not member.isfile():
                continue
            if sample and name[1] != key:
                yield begin, sample.pop("", sample)
                sample = {}
            if not sample:
                begin, key, sample = member.offset, name[1], {"__key__": name[1]}
            held = tar.extractfile(member) if read else None
            try:
                sample[name[2]] = _decoded(held.read(), name[2]) if held is not None else None
            except (ValueError, RecursionError) as error:
                sample[""] = f"{file.name}: {member.name} cannot be read ({error})"
    if sample:
        yield begin, sample.pop("", sample)


def _decoded(held: bytes, ending: str) -> Any:
    """What a file of a sample holds: images stay bytes."""
    kind = ending.lower().rpartition(".")[2]
    if kind == "json":
        return json.loads(held)
    return held.decode() if kind in ("txt", "text") else int(held) if kind in ("cls", "id", "index") else held


class ParquetGroups:
    """The rows of Parquet files here, of which the row groups are the files of a stream of known length.

    groups: (n, 4) int64, the file of each, its number there, and which of its rows count, from and to.
    """

    def __init__(self, files: Sequence[str], features: Any = None):
        self.files, parquet = files, resolve_name("pyarrow.parquet")
        known = [parquet.read_metadata(file) for file in files]
        self._open, schema = parquet.ParquetFile, known[0].schema.to_arrow_schema()
        self.column_names: list[str] = schema.names
        self.features = library().Features.from_arrow_schema(schema) if features is None else features
        groups = [
            (f, g, 0, m.row_group(g).num_rows) for f, m in enumerate(known) for g in range(m.num_row_groups)
        ]
        self._hold(np.array(groups, np.int64).reshape(-1, 4))

    def _hold(self, groups: np.ndarray) -> None:
        """Those of these groups that have rows."""
        self.groups = groups[groups[:, 2] < groups[:, 3]]
        self.num_files, self.sizes = len(self.groups), ()
        self.lengths: Sequence[int] = (self.groups[:, 3] - self.groups[:, 2]).tolist()
        self._ends = np.cumsum(self.lengths, dtype=np.int64)
        self._ahead: tuple[int, Iterator[tuple[int, Any]]] = (-1, iter(()))

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.num_files else 0

    def __getitem__(self, index: Any) -> Any:
        """Quick where rows are asked for one after another."""
        if isinstance(index, slice):
            first, last = self.groups[:, 2], self.groups[:, 3]
            begins, own = self._ends - (last - first), copy(self)
            cut = (np.clip(first + end - begins, first, last) for end in index.indices(len(self))[:2])
            own._hold(np.column_stack([self.groups[:, :2], *cut]))
            return own
        if not 0 <= index < len(self):
            raise IndexError(index)
        at, rows = self._ahead
        if at != index or (following := next(rows, None)) is None:
            group = int(np.searchsorted(self._ends, index, side="right"))
            rows = self.open(group, 0, index - int(self._ends[group - 1]) if group else index)
            following = next(rows)
        self._ahead = index + 1, rows
        return following[1]

    def parts(self, file: int) -> int:
        return 1

    def open(self, file: int, part: int, start: int) -> Iterator[tuple[int, Any]]:
        name, group, first, last = self.groups[file].tolist()
        with self._open(self.files[name], buffer_size=1 << 20) as opened:
            number = 0
            for batch in opened.iter_batches(_AT_ONCE, row_groups=[group], use_threads=False):
                here = range(max(number, first + start), min(number + len(batch), last))
                if here:
                    rows = batch.slice(here.start - number, len(here)).to_pylist()
                    yield from zip((n - first for n in here), rows, strict=True)
                number += len(batch)

    def place(self, file: int, number: int) -> str:
        name, group, first, _ = self.groups[file].tolist()
        return f"{os.path.basename(self.files[name])}, row group {group + 1}, row {first + number}"

    def sizes_of_files(self) -> list[Any]:
        files, sizes = self.groups[:, 0], self.groups[:, 3] - self.groups[:, 2]
        return [
            [os.path.basename(name), int((files == at).sum()), int(sizes[files == at].sum())]
            for at, name in enumerate(self.files)
        ]


def _parsed(line: bytes, file: RowsFile) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"{file.name}: a line that is not JSON ({error})"


class LibraryStream:
    """A streaming dataset of the `datasets` library, file by file. The row groups of Parquet are parts; any
    other file is one part."""

    lengths = sizes = ()

    def __init__(self, dataset: Any):
        self.dataset, self.num_files = dataset, dataset.num_shards
        self.column_names: list[str] | None = dataset.column_names
        self._split: dict[int, Any] = {}  # files in parts; finding out the parts of one may take a download

    def parts(self, file: int) -> int:
        return self._in_parts(file).num_shards

    def open(self, file: int, part: int, start: int) -> Iterator[tuple[int, Any]]:
        one = self._in_parts(file)
        parts = one.num_shards
        if parts > 1:
            one = one.shard(num_shards=parts, index=part)
        for number, row in enumerate(one.skip(start) if start else one, start):
            yield number * parts + part, row

    def place(self, file: int, number: int) -> str:
        row, part = divmod(number, parts := self.parts(file))
        of_file = f"file {file + 1} of {self.num_files}, " if self.num_files > 1 else ""
        return of_file + (f"row group {part + 1} of {parts}, " if parts > 1 else "") + f"row {row}"

    def sizes_of_files(self) -> list[Any]:
        return [self.num_files]

    def _in_parts(self, file: int) -> Any:
        if file not in self._split:
            one = self.dataset
            if self.num_files > 1:
                one = one.shard(num_shards=self.num_files, index=file)
            if len(self._split) >= _PARTS:
                self._split.clear()
            self._split[file] = one.reshard()
        return self._split[file]
