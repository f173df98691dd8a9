"""JSON lines that stay where they lie, each found by the byte at which it begins; and streams of the
`datasets` library. No image is decoded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from data.errors import DatasetError
from messages import one_line

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


class LinesRows(Sequence):
    """The rows of JSON-lines files, each read when it is indexed. files: paths, and names in messages; starts
    (n, 2) int64: of each row its file, and the byte at which it begins. Blank lines are none."""

    def __init__(self, files: Sequence[tuple[str, str]], starts: np.ndarray | None = None):
        self.files = files
        if starts is None:
            found = [(at, begin) for at, (path, _) in enumerate(files) for begin in _starts(path)]
            starts = np.array(found, np.int64).reshape(-1, 2)
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts)

    def select(self, numbers: np.ndarray) -> LinesRows:
        return LinesRows(self.files, self.starts[numbers])

    def __getitem__(self, index: Any) -> Any:
        """In place of a line that cannot be read stands a text that says why: the loader counts it with the
        other bad rows."""
        at, begin = self.starts[index].tolist()
        path, name = self.files[at]
        with open(path, "rb") as lines:
            lines.seek(begin)
            try:
                return json.loads(lines.readline())
            except (ValueError, RecursionError) as error:
                return f"{name}: a line that is not JSON ({error})"


def _starts(path: str) -> Iterator[int]:
    begin = 0
    with open(path, "rb") as lines:
        for line in lines:
            if line.strip():
                yield begin
            begin += len(line)


class Stream:
    """The rows of an `IterableDataset` of the library, in sections that can be read without the others: its
    shards, which are files, or row groups of few Parquet files. Iterating gives all rows.

    `features` are the library's, where they are known.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset.reshard() if dataset.num_shards < _FILES else dataset
        self.num_sections: int = self.dataset.num_shards
        self.features = dataset.features

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
