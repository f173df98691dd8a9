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
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from data.errors import DatasetError
from data.row_files import Stream
from data.sources import Mixture

_MASK = (1 << 64) - 1
# Row i of a part that is shared has turn i * _SPREAD, so that few rows go to all shards alike.
_TURNS, _SPREAD = 1 << 32, 0x9E3779B1
RowPosition = list[int]


def most_bytes(sharing: int) -> int:
    """Bytes of rows that each stream of each shard may hold to shuffle them, and of images that each shard
    may hold to pack them: together a gibibyte each, if one process reads them all, but enough for some large
    images."""
    return max(8 << 20, (1 << 30) // sharing)


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

    In each epoch the files are shuffled and laid end to end, and every shard gets an equal piece. Where the
    stream knows their `lengths`, that is a range of rows. Otherwise a file is as long as it has bytes, or as
    any other where that is not known, and a piece is whole files, and of the files at its two ends whole
    parts. Only a part that a border cuts is read by the shards on both sides of it, each of which keeps its
    share of the rows. So a stream of F equal parts is read by S shards at most (F + S) / F times.

    A block ends when it holds `block_bytes` bytes as well, and never crosses the end of an epoch. The state
    is where the block began and how many of its rows were taken: on resume the block is read once more.

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
        block_bytes: int | None = None,
    ):
        self.stream, self.key, self.shard, self.num_shards = stream, key, shard, num_shards
        self.epochs, self.block, self.name = epochs, block, name
        self.block_bytes = most_bytes(num_shards) if block_bytes is None else block_bytes
        self._borders: tuple[int, list[int]] = (-1, [])  # an epoch, and the row at which each file begins
        self.restore([0, 0, 0, 0, 0])

    def state(self) -> list[int]:
        return [*self.start, self.taken]

    def restore(self, state: Sequence[int]) -> None:
        """`start` is where the block begins: [epoch, index of the file in it, part of the file, row]."""
        *self.start, self.taken = state
        self._at: RowPosition = self.start  # where the next block begins
        self._rest: Iterator[RowRead] | None = None  # of the epoch, from there on
        self._rows: list[Any] | None = None  # of the block; None before it is read

    def next(self) -> RowRead | None:
        """The next row; None at the end."""
        while self._rows is None or self.taken >= len(self._rows):
            if (block := self._next_block()) is None:
                return None
            goes_on = self._rows is not None
            self.start, self._rows = block
            if goes_on:
                self.taken = 0
            for turn in range(min(self.taken, len(self._rows))):  # of a block that is read once more
                self._give(self._rows, turn)
        self.taken += 1
        return self._give(self._rows, self.taken - 1)

    def _give(self, rows: list[Any], turn: int) -> RowRead:
        """A row of the block, which nothing here holds any longer: rows are large."""
        index = shuffled(turn, len(rows), key_of(self.key, *self.start, self.shard))
        read, rows[index] = rows[index], None
        return read

    def _next_block(self) -> tuple[RowPosition, list[RowRead]] | None:
        """Where the next block begins, and its rows; None at the end."""
        while self.epochs is None or self._at[0] < self.epochs:
            if self._rest is None:
                self._rest = self._rest_of_epoch(*self._at)
            start = self._at
            if block := self._read_block(self._rest):
                *at, row = block[-1].position
                self._at = [*at, row + 1]
                return start, block
            self._at, self._rest = [start[0] + 1, 0, 0, 0], None
        return None

    def _read_block(self, rows: Iterator[RowRead]) -> list[RowRead]:
        block: list[RowRead] = []
        size = 0
        while len(block) < self.block and size < self.block_bytes and (read := next(rows, None)):
            block.append(read)
            size += size_of(read.row)
        return block

    def _rest_of_epoch(self, epoch: int, index: int, part: int, row: int) -> Iterator[RowRead]:
        own = self._rows_of(self.shard, epoch, index, part, row)
        first = next(own, None)
        if first is not None:
            yield first
            first = None
            yield from own
        elif self.epochs is None and not (index or part or row):
            for other in range(self.num_shards):
                theirs = self._rows_of((self.shard + epoch + other) % self.num_shards, epoch)
                if (borrowed := next(theirs, None)) is not None:
                    yield borrowed
                    return
            raise DatasetError(
                f"{self.name}: its {self.stream.num_files} files have no row; check them, or turn streaming "
                "off"
            )

    def _rows_of(
        self, shard: int, epoch: int, index: int = 0, part: int = 0, row: int = 0
    ) -> Iterator[RowRead]:
        """A shard's own rows of an epoch, from a position on."""
        for i, p, turns in self._pieces(shard, epoch, index, part):
            first = row if (i, p) == (index, part) else 0
            first = max(first, turns.start) if self.stream.lengths else first
            file = self._file(epoch, i)
            for number, (in_file, held) in enumerate(self.stream.open(file, p, first), first):
                turn = number if self.stream.lengths else number * _SPREAD % _TURNS
                if turn in turns:
                    yield self._read([epoch, i, p, number], file, in_file, held)
                elif self.stream.lengths:
                    break

    def _pieces(self, shard: int, epoch: int, index: int, part: int) -> Iterator[tuple[int, int, range]]:
        """(index of the file in this epoch, part of it, which of `_TURNS` rows in turn, or which of its rows
        if their number is known) of all that a shard reads, from a file and a part of it on."""
        stream, shards = self.stream, self.num_shards
        if self._borders[0] != epoch:  # without lengths, shards times as long, for borders that are whole
            sizes = stream.lengths or [size * shards for size in stream.sizes or [1] * stream.num_files]
            of_epoch = (sizes[self._file(epoch, i)] for i in range(stream.num_files))
            self._borders = epoch, list(accumulate(of_epoch, initial=0))
        at = self._borders[1]
        begin, end = (border * at[-1] // shards for border in (shard, shard + 1))
        for i in range(max(index, bisect_right(at, begin) - 1), bisect_left(at, end)):
            size, low, high = at[i + 1] - at[i], max(0, begin - at[i]), min(end, at[i + 1]) - at[i]
            if stream.lengths:
                yield i, 0, range(low, high)
                continue
            parts = stream.parts(self._file(epoch, i)) if size else 0
            for p in range(low * parts // size, -(-high * parts // size)) if parts else ():
                if (i, p) >= (index, part):
                    share = (min(max(0, cut * parts - p * size), size) for cut in (low, high))
                    yield i, p, range(*(cut * _TURNS // size for cut in share))

    def _file(self, epoch: int, index: int) -> int:
        return shuffled(index, self.stream.num_files, key_of(self.key, epoch))

    def _read(self, position: RowPosition, file: int, in_file: int, row: Any) -> RowRead:
        """Its number is unique in the stream; `Source.place` says where that is."""
        return RowRead(position, in_file * self.stream.num_files + file, row)

    def reread(self, positions: Sequence[RowPosition]) -> list[RowRead]:
        """Reads each of their parts once, from front to back."""
        wanted: dict[tuple[int, int, int], set[int]] = {}
        for epoch, index, part, number in positions:
            wanted.setdefault((epoch, index, part), set()).add(number)
        found: dict[tuple[int, ...], RowRead] = {}
        for (epoch, index, part), numbers in wanted.items():
            first = min(numbers)
            file = self._file(epoch, index)
            rows = self.stream.open(file, part, first)
            for number, (in_file, row) in zip(range(first, max(numbers) + 1), rows):
                if number in numbers:
                    at = [epoch, index, part, number]
                    found[*at] = self._read(at, file, in_file, row)
        if any(tuple(position) not in found for position in positions):
            raise DatasetError(f"{self.name}: rows that were read before are gone; start again: --no-resume")
        return [found[*position] for position in positions]


def size_of(row: Any) -> int:
    """Bytes of the texts and images in a row."""
    if isinstance(row, str | bytes):
        return len(row)
    if isinstance(row, Mapping):
        return sum(map(size_of, row.values()))
    return sum(map(size_of, row)) if isinstance(row, list | tuple) else 8


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
        block: int = 1024,
    ):
        self.shares = mixture.shares
        self.readers: list[MapReader | StreamReader] = []
        streams = sum(isinstance(source.rows, Stream) for source in mixture.sources)
        for source in mixture.sources:
            rows, key = source.rows, key_of(seed, source.name)
            if isinstance(rows, Stream):
                share = most_bytes(num_shards * streams)
                reader = StreamReader(rows, key, shard, num_shards, epochs, block, source.name, share)
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
