"""JSON lines that stay where they lie, each found by the byte at which it begins; and streams, of such files
and of the `datasets` library. No image is decoded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any

import numpy as np

from data.errors import ADDRESS, DatasetError
from messages import one_line

_SECTIONS = 1024  # of a JSON-lines file: many for each shard, so that all shards have equally many lines
_FILES = 64  # of a stream, below which the row groups of Parquet are its sections


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
class LinesFile:
    """A file of JSON lines, here or at an address, and its name in messages; an address is read in ranges of
    bytes."""

    address: str
    name: str

    def open(self) -> IO[bytes]:
        if not ADDRESS.match(self.address):
            return open(self.address, "rb")
        return fsspec_module().open(self.address, "rb").open()

    def size(self) -> int:
        with self.open() as file:
            return file.seek(0, os.SEEK_END)

    def rows(self, begin: int = 0, end: int = sys.maxsize, read: bool = True) -> Iterator[tuple[int, Any]]:
        """The byte at which each line begins, of those that begin in a range of bytes, and its object, or
        None unless `read`. Blank lines are left out. In place of a line that cannot be read stands a text
        that says why: the loader counts it with the other bad rows."""
        with self.open() as lines:
            if begin:  # the rest of a line that begins before
                lines.seek(begin - 1)
                begin += len(lines.readline(end - begin + 1)) - 1
            # Files in fsspec's memory share one position: each line is looked up.
            while begin < end and lines.seek(begin) == begin and (line := lines.readline()):
                if line.strip():
                    yield begin, self._parsed(line) if read else None
                begin += len(line)

    def _parsed(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            return f"{self.name}: a line that is not JSON ({error})"


class LinesRows(Sequence):
    """The rows of JSON-lines files, each read when it is indexed; `starts` (n, 2) int64 are the file and the
    byte at which each begins."""

    def __init__(self, files: Sequence[LinesFile], starts: np.ndarray | None = None):
        self.files = files
        if starts is None:
            found = [(at, begin) for at, file in enumerate(files) for begin, _ in file.rows(read=False)]
            starts = np.array(found, np.int64).reshape(-1, 2)
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts)

    def select(self, numbers: np.ndarray) -> LinesRows:
        return LinesRows(self.files, self.starts[numbers])

    def __getitem__(self, index: Any) -> Any:
        number, begin = self.starts[index].tolist()
        with closing(self.files[number].rows(begin, begin + 1)) as rows:  # type: ignore[type-var]
            return next(rows)[1]


class Stream:
    """The rows of an `IterableDataset` of the library, in sections that can be read without the others: its
    shards, which are files, or row groups of few Parquet files. Iterating gives all rows.

    `features` are the library's, where they are known. `identity` is another value for other files, as far as
    that is known without reading them.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset.reshard() if dataset.num_shards < _FILES else dataset
        self.num_sections: int = self.dataset.num_shards
        self.features = dataset.features
        self.identity: list[Any] = [self.num_sections]

    def __iter__(self) -> Iterator[Any]:
        for section in range(self.num_sections):
            yield from (row for _, row in self.read(section))

    def read(self, section: int, start: int = 0) -> Iterator[tuple[int, Any]]:
        """The rows of a section from its row `start` on, each with a number that no other row has."""
        rows = self.dataset.shard(self.num_sections, section) if self.num_sections > 1 else self.dataset
        for at, row in enumerate(rows.skip(start) if start else rows, start):
            yield at * self.num_sections + section, row

    def where(self, number: int) -> str:
        """The place of the row of that number, for a person."""
        row, section = divmod(number, self.num_sections)
        return f"section {section + 1} of {self.num_sections}, row {row}"


class LinesStream(Stream):
    """The rows of JSON-lines files, whose sections are ranges of bytes. A row's number is where it begins in
    its file, times the number of files, and its file."""

    def __init__(self, files: Sequence[LinesFile]):
        self.files, self.features = files, None
        sizes = [file.size() for file in files]
        self.sections = [
            (at, size * section // count, size * (section + 1) // count)
            for at, size in enumerate(sizes)
            for count in [min(_SECTIONS, size)]
            for section in range(count)
        ]
        self.num_sections = len(self.sections)
        self.identity = [[file.name, size] for file, size in zip(files, sizes, strict=True)]

    def read(self, section: int, start: int = 0) -> Iterator[tuple[int, Any]]:
        at, begin, end = self.sections[section]
        for where, row in islice(self.files[at].rows(begin, end), start, None):
            yield where * len(self.files) + at, row

    def where(self, number: int) -> str:
        begin, file = divmod(number, len(self.files))
        return f"{self.files[file].name}, what begins at byte {begin}"
