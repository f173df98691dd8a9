"""In which order the rows of a mixture are read: shuffled, dealt to shards, mixed by weight, resumable.

    reader = ShardReader(open_datasets([{"path": "rows.jsonl"}]), shard=0, num_shards=16, seed=0)
    while (read := reader.next()) is not None: ...

A run deals its rows to a fixed number of *shards*. What a shard reads depends on the seed and on the number
of shards, never on how many processes share them: a run that resumes with another number of ranks or workers
reads the same rows. A reader's state is a few integers, and a row's position, some integers as well, finds
the row again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import Any

from data.errors import DatasetError
from data.sources import Mixture, Stream

_MASK = (1 << 64) - 1
RowPosition = list[int]


def key_of(*parts: Any) -> int:
    """A 64-bit hash of the parts that is the same in every process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def shuffled(index: int, length: int, key: int) -> int:
    """Where `index` goes in the permutation of `range(length)` that `key` names.

    A Feistel network on the next even number of bits, repeated until it lands inside `length`: it needs no
    table, and is the same on every machine and version.
    """
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for step in range(6):
            left, right = right, left ^ (_mix(right + key + step * 0x9E3779B97F4A7C15) & low)
        index = left << half | right
        if index < length:
            return index


def _mix(x: int) -> int:
    """splitmix64's finisher (Steele, Lea, Flood 2014): every bit of x reaches every bit of the result."""
    x &= _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class RowRead:
    """A row, its number in its dataset, the position that finds it again, and the index of its dataset."""

    position: RowPosition
    number: int
    row: Any
    source: int = 0


class MapReader:
    """A shard's rows of a dataset that can be indexed; all its rows are shuffled anew in each epoch.

    `epochs` None never ends.
    """

    def __init__(self, rows: Sequence[Any], key: int, shard: int, num_shards: int, epochs: int | None):
        self.rows, self.key, self.shard, self.num_shards = rows, key, shard, num_shards
        self.end = math.inf if epochs is None else epochs * len(rows)
        self.taken = 0

    def next(self) -> RowRead | None:
        """The next row; None at the end."""
        position = self.taken * self.num_shards + self.shard
        if position >= self.end:
            return None
        self.taken += 1
        return self._read(position)

    def reread(self, positions: Sequence[RowPosition]) -> list[RowRead]:
        return [self._read(position) for (position,) in positions]

    def _read(self, position: int) -> RowRead:
        epoch, index = divmod(position, len(self.rows))
        number = shuffled(index, len(self.rows), key_of(self.key, epoch))
        return RowRead([position], number, self.rows[number])

    def state(self) -> list[int]:
        return [self.taken]

    def restore(self, state: Sequence[int]) -> None:
        (self.taken,) = state


class StreamReader:
    """A shard's rows of a stream, read in blocks of at most `block` rows, each block shuffled in memory.

    Files are dealt to the shards as evenly as possible and read in an order shuffled anew in each epoch. If
    there are more shards than groups of files, several shards read the same files and take turns by row. A
    block never crosses the end of an epoch. The state is where the block began and how many of its rows were
    taken: on resume the block is read once more.

    A stream may have fewer rows than shards. A shard without a row of its own then borrows another shard's, a
    different one in each epoch. With `epochs` it reads nothing, so that every row is read equally often.
    """

    def __init__(
        self,
        stream: Stream,
        key: int,
        shard: int,
        num_shards: int,
        epochs: int | None,
        block: int,
        name: str = "a stream",
    ):
        self.stream, self.key, self.shard, self.epochs = stream, key, shard, epochs
        self.block, self.name = block, name
        groups = math.gcd(stream.num_files, num_shards)
        # This shard reads every `stride`th row, from row `turn` on, of the files of its group.
        self.group, self.stride, self.turn = shard % groups, num_shards // groups, shard // groups
        self.files = range(self.group, stream.num_files, groups)
        self.restore([0, 0, 0, 0])

    def state(self) -> list[int]:
        return [*self.start, self.taken]

    def restore(self, state: Sequence[int]) -> None:
        """`start` is where the block begins: [epoch, files read in it, row in the next file]."""
        *self.start, self.taken = state
        self._blocks = self._read_blocks(self.start)
        self._rows: list[RowRead] | None = None  # of the block; None before it is read

    def next(self) -> RowRead | None:
        """The next row; None at the end."""
        while self._rows is None or self.taken >= len(self._rows):
            if (block := next(self._blocks, None)) is None:
                return None
            if self._rows is not None:
                self.taken = 0
            self.start, self._rows = block
        key = key_of(self.key, *self.start, self.turn)
        self.taken += 1
        return self._rows[shuffled(self.taken - 1, len(self._rows), key)]

    def _read_blocks(self, start: RowPosition) -> Iterator[tuple[RowPosition, list[RowRead]]]:
        """Where each block begins, and its rows, from a position on."""
        while self.epochs is None or start[0] < self.epochs:
            rows = self._rest_of_epoch(*start)
            while block := list(islice(rows, self.block)):
                yield start, block
                epoch, file_index, row = block[-1].position
                start = [epoch, file_index, row + 1]
            start = [start[0] + 1, 0, 0]

    def _rest_of_epoch(self, epoch: int, file_index: int, row: int) -> Iterator[RowRead]:
        # After a row that it has read, a shard continues with the turn of that row, own or borrowed.
        turn, found = (row - 1) % self.stride if row else self.turn, row > 0
        for read in self._every_stride(epoch, file_index, row, turn):
            found = True
            yield read
        if not found and self.epochs is None:
            yield from self._every_stride(epoch, 0, 0, self._borrowed_turn(epoch))

    def _every_stride(self, epoch: int, file_index: int, row: int, turn: int) -> Iterator[RowRead]:
        for index, file in enumerate(self._file_order(epoch)[file_index:], file_index):
            first = row + (turn - row) % self.stride
            for steps, held in enumerate(islice(self.stream.open(file, first), 0, None, self.stride)):
                yield self._read([epoch, index, first + steps * self.stride], file, held)
            row = 0

    def _borrowed_turn(self, epoch: int) -> int:
        most = max(sum(1 for _ in islice(self.stream.open(file, 0), self.turn)) for file in self.files)
        if not most:
            raise DatasetError(
                f"{self.name}: shard {self.shard} has no row, because all of its {len(self.files)} files are "
                "empty; remove empty files or turn streaming off"
            )
        return (self.turn + epoch) % most

    def _file_order(self, epoch: int) -> list[int]:
        key = key_of(self.key, epoch, self.group)
        return [self.files[shuffled(i, len(self.files), key)] for i in range(len(self.files))]

    def _read(self, position: RowPosition, file: int, row: Any) -> RowRead:
        return RowRead(position, position[-1] * self.stream.num_files + file, row)

    def reread(self, positions: Sequence[RowPosition]) -> list[RowRead]:
        """Reads each of their files once, from front to back."""
        wanted: dict[tuple[int, int], set[int]] = {}
        for epoch, file_index, number in positions:
            wanted.setdefault((epoch, file_index), set()).add(number)
        found: dict[tuple[int, ...], RowRead] = {}
        for (epoch, file_index), numbers in wanted.items():
            file, first = self._file_order(epoch)[file_index], min(numbers)
            for number, row in zip(range(first, max(numbers) + 1), self.stream.open(file, first)):
                if number in numbers:
                    found[epoch, file_index, number] = self._read([epoch, file_index, number], file, row)
        return [found[*position] for position in positions]


class ShardReader:
    """One shard's rows of all datasets, in an order that the seed decides.

    Each row comes from the dataset that is furthest behind its share, and each shard starts at another point
    of that cycle: the shares hold exactly, after any number of rows. `block` is for `StreamReader`.
    """

    def __init__(
        self,
        mixture: Mixture,
        shard: int,
        num_shards: int,
        seed: int,
        epochs: int | None = None,
        block: int = 256,
    ):
        self.shares = mixture.shares
        self.readers: list[MapReader | StreamReader] = []
        for source in mixture.sources:
            rows, key = source.rows, key_of(seed, source.name)
            if isinstance(rows, Stream):
                reader = StreamReader(rows, key, shard, num_shards, epochs, block, source.name)
                self.readers.append(reader)
            else:
                self.readers.append(MapReader(rows, key, shard, num_shards, epochs))
        self._lead = [key_of(seed, shard, source.name) / 2**64 for source in mixture.sources]
        self.counts = [0] * len(self.readers)
        self._ended = [False] * len(self.readers)

    def next(self) -> RowRead | None:
        """The next row; None after the last row of every dataset."""
        while not all(self._ended):
            total = sum(self.counts) + 1
            behind = [
                -math.inf if ended else lead + share * total - count
                for ended, lead, share, count in zip(self._ended, self._lead, self.shares, self.counts)
            ]
            source = behind.index(max(behind))
            if (read := self.readers[source].next()) is not None:
                self.counts[source] += 1
                return replace(read, source=source)
            self._ended[source] = True
        return None

    def reread(self, positions: Sequence[RowPosition]) -> list[RowRead]:
        """Rows that were read before, by [source, *position], in the order of the arguments."""
        found: dict[tuple, RowRead] = {}
        for source, reader in enumerate(self.readers):
            for read in reader.reread([position for which, *position in positions if which == source]):
                found[source, *read.position] = replace(read, source=source)
        return [found[*position] for position in positions]

    def state(self) -> dict[str, list]:
        return {"counts": list(self.counts), "readers": [reader.state() for reader in self.readers]}

    def restore(self, state: Mapping[str, list]) -> None:
        self.counts = list(state["counts"])
        self._ended = [False] * len(self.readers)
        for reader, of_reader in zip(self.readers, state["readers"], strict=True):
            reader.restore(of_reader)
