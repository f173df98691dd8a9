"""In which order rows are read: shuffled, split over lanes, mixed by weight, and resumable to the row.

The rows of a run are dealt to a fixed number of *lanes*. What a lane reads depends on the seed and on the
number of lanes, never on how many processes share the lanes: a run that goes on with another number of ranks
or workers reads the same rows. A reader's state is a few integers, and a `place`, some integers as well,
names a row so that it can be read again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, Protocol

from data.errors import DatasetError

_MASK = (1 << 64) - 1
Place = list[int]


def key_of(*parts: Any) -> int:
    """64 bits that any change of the parts changes, the same in every process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def shuffled(index: int, length: int, key: int) -> int:
    """Where `index` goes in the permutation of `length` things that `key` names.

    A Feistel network on the next even number of bits, walked until it lands inside: no table, whatever the
    length, and the same on every machine and version.
    """
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for step in range(6):
            left, right = right, left ^ (_mixed(right + key + step * 0x9E3779B97F4A7C15) & low)
        index = left << half | right
        if index < length:
            return index


def _mixed(x: int) -> int:
    """splitmix64's finisher (Steele, Lea, Flood 2014): every bit of x reaches every bit of the result."""
    x &= _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


class Rows(Protocol):
    """Rows that can be read in any order, indexed from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Stream(Protocol):
    """Rows that can only be read one after another, in `num_files` files."""

    num_files: int

    def open(self, file: int, start: int) -> Iterator[Any]:
        """The rows of a file from number `start` on."""


@dataclass(frozen=True)
class RowRead:
    """A row as it was read: `place` finds it again in its reader, `number` is its own in the dataset."""

    place: Place
    number: int
    row: Any


class MapReader:
    """A lane's share of rows that can be read in any order, all of them shuffled anew each epoch.

    Args:
        key: the seed's; see `key_of`.
        epochs: after how many to end; None goes on.
    """

    def __init__(self, rows: Rows, key: int, lane: int, lanes: int, epochs: int | None):
        self.rows, self.key, self.lane, self.lanes = rows, key, lane, lanes
        self.end = None if epochs is None else epochs * len(rows)
        self.taken = 0

    def next(self) -> RowRead | None:
        """The next row; None at the end."""
        place = self.taken * self.lanes + self.lane
        if self.end is not None and place >= self.end:
            return None
        self.taken += 1
        return self._read(place)

    def again(self, places: Sequence[Place]) -> list[RowRead]:
        """Rows that were read before."""
        return [self._read(place) for (place,) in places]

    def _read(self, place: int) -> RowRead:
        epoch, index = divmod(place, len(self.rows))
        number = shuffled(index, len(self.rows), key_of(self.key, epoch))
        return RowRead([place], number, self.rows[number])

    def state(self) -> list[int]:
        return [self.taken]

    def restore(self, state: Sequence[int]) -> None:
        (self.taken,) = state


class StreamReader:
    """A lane's share of a stream, read block by block, each block shuffled in memory.

    Files are dealt to the lanes as evenly as they go and read in an order shuffled anew each epoch; where
    there are more lanes than shares of files, several lanes read the same files and take turns by row. A
    block never reaches over the end of an epoch. Its state is where the block began and how many of its rows
    are taken: on resume the block is read once more.

    Where a stream has fewer rows than lanes, a lane without a row of its own reads another's, in each epoch
    another one; with `epochs` it has none, so that every row is read equally often.

    Args:
        block: rows that are shuffled together, all held in memory.
        name: what messages call the stream.
    """

    def __init__(
        self,
        stream: Stream,
        key: int,
        lane: int,
        lanes: int,
        epochs: int | None,
        block: int,
        name: str = "a stream",
    ):
        self.stream, self.key, self.epochs, self.block, self.name = stream, key, epochs, block, name
        shares = math.gcd(stream.num_files, lanes)
        self.share, self.stride, self.offset = lane % shares, lanes // shares, lane // shares
        self.files = range(self.share, stream.num_files, shares)
        self.lane = lane
        self._begin([0, 0, 0], 0)

    def _begin(self, start: Place, taken: int) -> None:
        """`start` is [epoch, how many files were read in it, row in the next]."""
        self.start, self.taken = list(start), taken
        self._rows = self._read_on(*start)
        self._held: list[RowRead] | None = None
        self._at_end = False

    def _order(self, epoch: int) -> list[int]:
        key = key_of(self.key, epoch, self.share)
        return [self.files[shuffled(i, len(self.files), key)] for i in range(len(self.files))]

    def _read_on(self, epoch: int, position: int, start: int) -> Iterator[RowRead | None]:
        """This lane's rows from a place on, None at each end of an epoch."""
        while self.epochs is None or epoch < self.epochs:
            # Behind a row that it had, a lane goes on with that row's turn, its own or a borrowed one.
            turn, found = (start - 1) % self.stride if start else self.offset, bool(start)
            for row in self._of_epoch(epoch, position, start, turn):
                found = True
                yield row
            if not found and self.epochs is None:
                yield from self._of_epoch(epoch, 0, 0, self._borrowed(epoch))
            yield None
            epoch, position, start = epoch + 1, 0, 0

    def _of_epoch(self, epoch: int, position: int, start: int, turn: int) -> Iterator[RowRead]:
        """One epoch's rows from a place on, those whose turn it is: every `stride`th of a file."""
        order = self._order(epoch)
        while position < len(order):
            file = order[position]
            first = start + (turn - start) % self.stride
            rows = islice(self.stream.open(file, first), 0, None, self.stride)
            for at, row in enumerate(rows):
                number = first + at * self.stride
                yield RowRead([epoch, position, number], number * self.stream.num_files + file, row)
            position, start = position + 1, 0

    def _borrowed(self, epoch: int) -> int:
        """The turn of a lane that no file has a row for.

        Raises:
            DatasetError: there is no row at all.
        """
        most = max(sum(1 for _ in islice(self.stream.open(file, 0), self.offset)) for file in self.files)
        if not most:
            raise DatasetError(
                f"{self.name}: no row for lane {self.lane}, all of whose {len(self.files)} files are empty; "
                "remove empty files or leave streaming off"
            )
        return (self.offset + epoch) % most

    def next(self) -> RowRead | None:
        """The next row; None at the end."""
        while self._held is None or self.taken == len(self._held):
            if self._held is not None:
                self._advance()
            if self.epochs is not None and self.start[0] >= self.epochs:
                return None
            self._fill()
        key = key_of(self.key, *self.start, self.offset)
        self.taken += 1
        return self._held[shuffled(self.taken - 1, len(self._held), key)]

    def _fill(self) -> None:
        """Read a block into memory: up to the end of its epoch at most, or nothing right there."""
        self._held, self._at_end = [], False
        for row in islice(self._rows, self.block):
            if row is None:
                self._at_end = True
                return
            self._held.append(row)

    def _advance(self) -> None:
        """Where the next block begins: behind the last row, or with the next epoch."""
        assert self._held is not None, "no block was read"
        if self._at_end:
            self.start, self.taken = [self.start[0] + 1, 0, 0], 0
        else:
            epoch, position, number = self._held[-1].place
            self.start, self.taken = [epoch, position, number + 1], 0

    def again(self, places: Sequence[Place]) -> list[RowRead]:
        """Rows that were read before; each of their files is read once, in order."""
        wanted: dict[tuple[int, int], list[int]] = {}
        for epoch, position, number in places:
            wanted.setdefault((epoch, position), []).append(number)
        found = {}
        for (epoch, position), numbers in wanted.items():
            file, first = self._order(epoch)[position], min(numbers)
            rows = islice(self.stream.open(file, first), max(numbers) - first + 1)
            for number, row in enumerate(rows, first):
                if number in numbers:
                    place = [epoch, position, number]
                    found[tuple(place)] = RowRead(place, number * self.stream.num_files + file, row)
        return [found[tuple(place)] for place in places]

    def state(self) -> list[int]:
        return [*self.start, self.taken]

    def restore(self, state: Sequence[int]) -> None:
        *start, taken = state
        self._begin(start, taken)
