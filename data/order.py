"""The order in which the rows of a mixture are read: shuffled, dealt to shards, mixed by weight, resumable.

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
from data.row_files import Stream
from data.sources import Mixture

_MASK = (1 << 64) - 1
RowPosition = list[int]


def most_bytes(sharing: int) -> int:
    """The bytes of rows that each stream of each shard may hold to shuffle them, and of images that each
    shard may hold to pack them: a gibibyte of each in a process that reads all of them, but room for some
    large images."""
    return max(8 << 20, (1 << 30) // sharing)


def key_of(*parts: Any) -> int:
    """A 64-bit hash of the parts that is the same in every process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def shuffled(index: int, length: int, key: int) -> int:
    """The place of `index` in the permutation of `range(length)` that `key` names.

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

    `epochs` may be infinite. The position of a row is its number among those of all shards and epochs.
    """

    def __init__(self, rows: Sequence[Any], key: int, shard: int, num_shards: int, epochs: float):
        self.rows, self.key, self.shard, self.num_shards = rows, key, shard, num_shards
        self.end = epochs * len(rows)
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
    """A shard's rows of a stream, read in blocks of at most `block` rows and about `block_bytes`, each
    shuffled in memory.

    In each epoch the sections of the stream are shuffled and dealt to the shards in turn. Where there are
    fewer sections than shards, several shards read the same one, and each keeps its share of the rows. So a
    shard may have no row in one epoch and some in the next.

    The position of a row is its epoch, the number of its section in that, and its number in the section. The
    state is the position of the block's first row in the stream, and the number of rows taken from the block:
    on resume the block is read once more. A stream without any row raises DatasetError if `epochs` is
    infinite.
    """

    def __init__(
        self,
        stream: Stream,
        key: int,
        shard: int,
        num_shards: int,
        epochs: float,
        block: int,
        block_bytes: float = math.inf,
        name: str = "a stream",
    ):
        self.stream, self.key, self.shard, self.num_shards = stream, key, shard, num_shards
        self.epochs, self.block, self.block_bytes, self.name = epochs, block, block_bytes, name
        self.restore([0, 0, 0, 0])

    def state(self) -> list[int]:
        return [*self._start, self._taken]

    def restore(self, state: Sequence[int]) -> None:
        *self._start, taken = state
        self._following, self._block, self._taken = self._rows(*self._start), list[Any](), 0
        for _ in range(taken):
            self.next()

    def next(self) -> RowRead | None:
        """The next row, which the block holds no longer, as rows are large; None at the end."""
        if self._taken == len(self._block) and not self._fill():
            return None
        index = shuffled(self._taken, len(self._block), key_of(self.key, *self._start, self.shard))
        self._taken += 1
        read, self._block[index] = self._block[index], None
        return read

    def _fill(self) -> bool:
        """Read the next block; False at the end."""
        block, size = list[Any](), 0
        while len(block) < self.block and size < self.block_bytes and (read := next(self._following, None)):
            block.append(read)
            size += size_of(read.row)
        if block:
            self._start, self._block, self._taken = block[0].position, block, 0
        return bool(block)

    def _rows(self, epoch: int, index: int, row: int) -> Iterator[RowRead]:
        """The shard's own rows from that row of a section on, epoch after epoch."""
        sections = self.stream.num_sections
        own, first = divmod(self.shard, max(1, sections))
        sharing = len(range(first, self.num_shards, max(1, sections)))  # shards that read the same section
        while epoch < self.epochs:
            is_empty = not (index or row)
            for i in range(first, sections, self.num_shards):
                for read in self._read(epoch, i, row if i == index else 0) if i >= index else ():
                    if (read.position[-1] + epoch) % sharing == own:
                        is_empty = False
                        yield read
            if is_empty and self.epochs == math.inf and next(iter(self.stream), self) is self:
                raise DatasetError(f"{self.name}: its files have no row; check them, or turn streaming off")
            epoch, index, row = epoch + 1, 0, 0

    def _read(self, epoch: int, index: int, row: int) -> Iterator[RowRead]:
        """All rows of a section, from one on."""
        section = shuffled(index, self.stream.num_sections, key_of(self.key, epoch))
        for at, (number, held) in enumerate(self.stream.read(section, row), row):
            yield RowRead([epoch, index, at], number, held)

    def reread(self, positions: Sequence[RowPosition]) -> list[RowRead]:
        """Reads each of their sections once, from front to back."""
        wanted, found = {(*position,) for position in positions}, dict[tuple[int, ...], RowRead]()
        for epoch, index in {position[:2] for position in wanted}:
            numbers = [row for *section, row in wanted if section == [epoch, index]]
            for read in islice(self._read(epoch, index, min(numbers)), max(numbers) - min(numbers) + 1):
                if (at := tuple(read.position)) in wanted:
                    found[at] = read
        if len(found) < len(wanted):
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
    of that cycle: the shares hold exactly, after any number of rows. `epochs` None never ends, and `block` is
    for `StreamReader`.
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
        most = most_bytes(num_shards * max(1, streams))
        for source in mixture.sources:
            where = (key_of(seed, source.name), shard, num_shards, math.inf if epochs is None else epochs)
            if isinstance(source.rows, Stream):
                self.readers.append(StreamReader(source.rows, *where, block, most, source.name))
            else:
                self.readers.append(MapReader(source.rows, *where))
        self._lead = [key_of(seed, shard, source.name) / 2**64 for source in mixture.sources]
        self.counts = [0] * len(self.readers)
        self._ended = set[int]()

    def next(self) -> RowRead | None:
        """The next row; None after the last row of every dataset."""
        while left := [at for at in range(len(self.readers)) if at not in self._ended]:
            total = sum(self.counts) + 1
            source = max(left, key=lambda at: self._lead[at] + self.shares[at] * total - self.counts[at])
            if (read := self.readers[source].next()) is not None:
                self.counts[source] += 1
                return replace(read, source=source)
            self._ended.add(source)
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
        self.counts, self._ended = list(state["counts"]), set()
        for reader, of_reader in zip(self.readers, state["readers"], strict=True):
            reader.restore(of_reader)
