"""Rows of files that stay where they lie: JSON lines and samples of WebDataset, each found by the byte at
which it begins; and streams, of such files and of the `datasets` library. No image is decoded."""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any

import numpy as np

from data.errors import ADDRESS, DatasetError
from messages import one_line

_SECTIONS = 1024  # of a JSON-lines file: many for each shard, so that all shards have equally many lines
_FILES = 64  # of a library's stream, below which their row groups are its sections
_AT_ONCE = 16  # rows of a row group that are in memory together
_PARQUET = "pyarrow.parquet:ParquetFile"
_MEMBER = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")  # of a tar: a sample's name, and which file of it


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
    except Exception as caught:
        # The library's says no more than that it was generating a dataset.
        error = caught.__cause__ if type(caught).__name__ == "DatasetGenerationError" else caught
        raise DatasetError(f"{failed} ({type(error).__name__}: {one_line(error, 300)})") from caught


@dataclass(frozen=True)
class RowsFile:
    """A file here or at an address, and its name in messages; an address is read in ranges of bytes."""

    address: str
    name: str

    @classmethod
    def here(cls, path: Path) -> RowsFile:
        return cls(str(path), path.name)

    def open(self) -> IO[bytes]:
        if not ADDRESS.match(self.address):
            return open(self.address, "rb")
        return fsspec_module().open(self.address, "rb").open()

    def size(self) -> int:
        with self.open() as file:
            return file.seek(0, os.SEEK_END)

    @property
    def ending(self) -> str:
        return os.path.splitext(self.name)[1]

    def rows(self, begin: int = 0, end: int = sys.maxsize, read: bool = True) -> Iterator[tuple[int, Any]]:
        """The byte at which each row begins, of those that begin in a range of bytes, and the row, or None
        unless `read`. In place of a row that cannot be read stands a text that says why: the loader counts it
        with the other bad rows. Of Parquet, begin is a row group's number, and rows are numbered."""
        if self.ending == ".parquet":
            yield from _row_group(self, begin)
        elif self.ending == ".tar":
            yield from _samples(self, begin, read)
        else:
            yield from _lines(self, begin, end, read)

    def sections(self) -> list[tuple[int, int]]:
        """Where the sections begin and end that can be read by themselves: ranges of bytes of JSON lines, row
        groups of Parquet, all of a tar."""
        if self.ending == ".parquet":
            with self.open() as opened, resolve_name(_PARQUET)(opened) as held:
                return [(group, group + 1) for group in range(held.num_row_groups)]
        size = self.size()
        sections = min(_SECTIONS, size) if self.ending != ".tar" else 1
        return [(size * section // sections, size * (section + 1) // sections) for section in range(sections)]


def _lines(file: RowsFile, begin: int, end: int, read: bool) -> Iterator[tuple[int, Any]]:
    """Objects of JSON, one in each line; blank lines are left out."""
    with file.open() as lines:
        if begin:  # the rest of a line that begins before
            lines.seek(begin - 1)
            begin += len(lines.readline(end - begin + 1)) - 1
        # Files in fsspec's memory share one position: each line is looked up.
        while begin < end and lines.seek(begin) == begin and (line := lines.readline()):
            if line.strip():
                yield begin, _parsed(line, file) if read else None
            begin += len(line)


def _parsed(line: bytes, file: RowsFile) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"{file.name}: a line that is not JSON ({error})"


def _row_group(file: RowsFile, group: int) -> Iterator[tuple[int, Any]]:
    """A few rows at a time: each shard has a row group open, and these may be large."""
    with file.open() as opened, resolve_name(_PARQUET)(opened, buffer_size=1 << 20) as held:
        number = sum(held.metadata.row_group(at).num_rows for at in range(group))
        for batch in held.iter_batches(_AT_ONCE, row_groups=[group], use_threads=False):
            yield from enumerate(batch.to_pylist(), number)
            number += len(batch)


def _samples(file: RowsFile, start: int, read: bool) -> Iterator[tuple[int, Any]]:
    """Samples of a tar, as {ending: what it holds}: files that follow one another and differ in their endings
    alone."""
    begin, key, sample = 0, "", dict[str, Any]()
    with file.open() as opened, closing(_tar(opened, start)) as tar:
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


def _tar(opened: IO[bytes], start: int) -> tarfile.TarFile:
    opened.seek(start)
    return tarfile.open(fileobj=opened, mode="r:")


def _decoded(held: bytes, ending: str) -> Any:
    """What a file of a sample holds: images stay bytes."""
    kind = ending.lower().rpartition(".")[2]
    if kind == "json":
        return json.loads(held)
    return held.decode() if kind in ("txt", "text") else int(held) if kind in ("cls", "id", "index") else held


class FileRows(Sequence):
    """The rows of files, each read when it is indexed; `starts` (n, 2) int64 are the file and the byte at
    which each begins."""

    def __init__(self, files: Sequence[RowsFile], starts: np.ndarray | None = None):
        self.files = files
        if starts is None:
            found = [(at, begin) for at, file in enumerate(files) for begin, _ in file.rows(read=False)]
            starts = np.array(found, np.int64).reshape(-1, 2)
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts)

    def select(self, numbers: np.ndarray) -> FileRows:
        return FileRows(self.files, self.starts[numbers])

    def __getitem__(self, index: Any) -> Any:
        number, begin = self.starts[index].tolist()
        with closing(self.files[number].rows(begin, begin + 1)) as rows:  # type: ignore[type-var]
            return next(rows)[1]


class Stream:
    """Rows that are read one after another, in sections that can be read without the others: those of a
    streaming dataset of the `datasets` library, whose sections are files, or row groups of few Parquet files.
    `features` are the library's, where they are known.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset.reshard() if dataset.num_shards < _FILES else dataset
        self.num_sections: int = self.dataset.num_shards
        self.features = dataset.features

    def read(self, section: int, start: int = 0) -> Iterator[tuple[int, Any]]:
        """The rows of a section from its row `start` on, each with a number that no other row has."""
        rows = self.dataset.shard(self.num_sections, section) if self.num_sections > 1 else self.dataset
        for at, row in enumerate(rows.skip(start) if start else rows, start):
            yield at * self.num_sections + section, row

    def where(self, number: int) -> str:
        """Where somebody finds the row of that number."""
        row, section = divmod(number, self.num_sections)
        return f"section {section + 1} of {self.num_sections}, row {row}"

    def identity(self) -> list[Any]:
        """A value that is another one for other files, as far as that is known without reading them."""
        return [self.num_sections]


class FileStream(Stream):
    """The rows of files likewise, without looking up first where they begin."""

    def __init__(self, files: Sequence[RowsFile], features: Any = None):
        self.files, self.features = files, features
        self.sections = [(at, *section) for at, file in enumerate(files) for section in file.sections()]
        self.num_sections = len(self.sections)
        self._sizes = [[file.name, file.size()] for file in files]  # asked once: a state is saved often

    def read(self, section: int, start: int = 0) -> Iterator[tuple[int, Any]]:
        """A row's number is where it begins in its file, times the number of files, and its file."""
        file, begin, end = self.sections[section]
        for at, row in islice(self.files[file].rows(begin, end), start, None):
            yield at * len(self.files) + file, row

    def where(self, number: int) -> str:
        begin, file = divmod(number, len(self.files))
        its = "row" if self.files[file].ending == ".parquet" else "what begins at byte"
        return f"{self.files[file].name}, {its} {begin}"

    def identity(self) -> list[Any]:
        return self._sizes
