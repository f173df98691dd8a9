"""One lane of a loader: rows read, made into samples, packed; its bad rows told, its state kept.

A lane's state is where its readers stand and the places of the samples that wait: on resume those rows are
read once more. Pixels are never part of it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from data.datasets import LaneReader, MixedRow, Mixture
from data.errors import BadRow, DatasetError
from data.packing import PackedRow, choose, pack_row
from data.samples import Sample, SampleEncoder

logger = logging.getLogger(__name__)
_PATIENCE = 50  # bad or filtered rows after which a lane tells of them although it has no row to give
_ALL_FILTERED = 100_000  # rows in succession below the minimum ratings, after which a lane gives up


@dataclass(frozen=True)
class Dropped:
    """A row that was left out: where it is, what it is counted under, and what was wrong."""

    dataset: str
    number: int
    reason: str
    message: str


@dataclass(frozen=True)
class Produced:
    """What a lane gives: a row; or None, to tell of rows left out and, with `ended`, that it has no more."""

    row: PackedRow | None
    state: dict[str, Any]
    read: int  # rows read since the last one
    filtered: int  # of these, below the minimum ratings
    dropped: tuple[Dropped, ...]
    ended: bool = False


@contextmanager
def _reading() -> Iterator[None]:
    """Inside, files, networks and libraries may raise anything."""
    try:
        yield
    except DatasetError:
        raise
    except OSError as error:
        raise DatasetError(f"the data can be read no longer: {error}") from error
    except Exception as error:
        raise DatasetError(f"the data can be read no longer: {type(error).__name__}: {error}") from error


class Lane:
    """Iterate for `Produced`, up to and including one that has `ended`.

    Args:
        waiting: samples to choose from when a row is packed; 0 gives each sample a row of its own.
        state: where to go on; a dictionary of integers as `Produced.state`.
    """

    def __init__(
        self,
        reader: LaneReader,
        mixture: Mixture,
        encoder: SampleEncoder,
        waiting: int,
        state: Mapping[str, Any] | None = None,
    ):
        self.reader, self.mixture, self.encoder = reader, mixture, encoder
        self.waiting = waiting
        self._buffer: list[tuple[MixedRow, Sample]] = []
        self._read, self._filtered = 0, 0
        self._in_succession = [0] * len(mixture.sources)  # filtered rows, since one was good
        self._dropped: list[Dropped] = []
        if state is not None:
            reader.restore(state["reader"])
            places = [(source, place) for source, *place in state["waiting"]]
            with _reading():
                again = reader.again(places)
            for mixed in again:
                self._wait(mixed, self._sample_again(mixed))

    def __iter__(self) -> Iterator[Produced]:
        ended = False
        while not ended or self._buffer:
            while not ended and len(self._buffer) < max(self.waiting, 1):
                ended = not self._take()
                if len(self._dropped) + self._filtered >= _PATIENCE:
                    yield self._produced(None)
            if self._buffer:
                row = self._pack()
                if row is not None:
                    yield self._produced(row)
        yield self._produced(None, ended=True)

    def _take(self) -> bool:
        """Read one row into the buffer, or drop it; False at the end."""
        with _reading():
            mixed = self.reader.next()
        if mixed is None:
            return False
        self._read += 1
        try:
            sample = self._sample(mixed)
        except BadRow as error:
            self._drop(self.mixture.sources[mixed.source].name, mixed.number, error)
            return True
        if sample is None:
            self._filtered += 1
            self._check_filtered(mixed.source)
            return True
        self._in_succession[mixed.source] = 0
        self._wait(mixed, sample)
        return True

    def _wait(self, mixed: MixedRow, sample: Sample) -> None:
        # Of the row itself, the sample holds what is still needed.
        self._buffer.append((replace(mixed, row=None), sample))

    def _sample(self, mixed: MixedRow) -> Sample | None:
        source = self.mixture.sources[mixed.source]
        conversation = source.layout.conversation(mixed.row)
        return (
            None if conversation is None else self.encoder.encode(conversation, (source.name, mixed.number))
        )

    def _sample_again(self, mixed: MixedRow) -> Sample:
        """The sample of a row that made one before."""
        name, why = self.mixture.sources[mixed.source].name, "its ratings are below the minimum"
        try:
            sample = self._sample(mixed)
        except BadRow as error:
            sample, why = None, str(error)
        if sample is None:
            raise DatasetError(f"{name}, row {mixed.number}: was good when the run was saved, and now: {why}")
        return sample

    def _pack(self) -> PackedRow | None:
        """Take samples off the buffer and decode their images; None where none of them is whole."""
        chosen = [0]
        if self.waiting:
            samples = [sample for _, sample in self._buffer]
            chosen = choose(
                [sample.tokens for sample in samples],
                [sample.tiles for sample in samples],
                self.encoder.max_tokens,
                self.encoder.max_tiles,
            )
        packed, tiles = [], []
        for index in chosen:
            sample = self._buffer[index][1]
            try:
                tiles.append(self.encoder.tiles(sample))
                packed.append(sample)
            except BadRow as error:
                self._drop(*sample.sample_id, error)
        for index in reversed(chosen):
            del self._buffer[index]
        return pack_row(packed, tiles) if packed else None

    def _drop(self, dataset: str, number: int, error: BadRow) -> None:
        self._dropped.append(Dropped(dataset, number, error.reason, str(error)))

    def _check_filtered(self, which: int) -> None:
        source = self.mixture.sources[which]
        self._in_succession[which] += 1
        if self._in_succession[which] > min(source.num_rows or _ALL_FILTERED, _ALL_FILTERED):
            raise DatasetError(
                f"{source.name}: {self._in_succession[which]} rows in succession are below min_ratings "
                f"{source.layout.min_ratings}; lower them"
            )

    def _produced(self, row: PackedRow | None, ended: bool = False) -> Produced:
        state = {
            "reader": self.reader.state(),
            "waiting": [[mixed.source, *mixed.place] for mixed, _ in self._buffer],
        }
        produced = Produced(row, state, self._read, self._filtered, tuple(self._dropped), ended)
        self._read, self._filtered, self._dropped = 0, 0, []
        return produced


_LEAST = 20  # rows of which some may be too many


@dataclass
class DropCount:
    """Rows read and left out so far, and the rates at which that stops a run.

    Some rows in, there may by chance be more bad ones among them than among all: what stops a run before its
    end is `max_rate` and, beyond it, four standard deviations and three rows. Whether all rows there are keep
    to it, `exceeded` tells.

    Late in a long run, `max_rate` of all its rows may be more than there are in a dataset whose images have
    gone. So it also stops where fewer of the latest rows are good than a quarter of what should be.

    Args:
        max_rate: of all rows read.
        after: the least that are "the latest".
    """

    max_rate: float = 0.05
    after: int = 200
    read: int = 0
    filtered: int = 0
    dropped: Counter = field(default_factory=Counter)
    _latest: tuple[int, int] = (0, 0)  # rows used, and left out

    def add(self, produced: Produced) -> None:
        """Count and log what a lane tells.

        Raises:
            DatasetError: too many rows were bad.
        """
        self.read += produced.read
        self.filtered += produced.filtered
        for bad in produced.dropped:
            self.dropped[bad.reason] += 1
            # Each of the first of a kind, then ever fewer: a log is for reading.
            count = self.dropped[bad.reason]
            if count <= 5 or count & (count - 1) == 0:
                logger.warning(
                    "%s, row %d left out, %s (number %d): %s",
                    bad.dataset,
                    bad.number,
                    bad.reason,
                    count,
                    bad.message,
                )
        used = self.read - self.filtered
        total = self.dropped.total()
        spread = 4 * math.sqrt(self.max_rate * (1 - self.max_rate) * used)
        enough = used >= (_LEAST if self.max_rate else 1)
        none = used >= self.after and total == used
        if produced.dropped and (none or (enough and total > self.max_rate * used + spread + 3)):
            self._stop(f"{total} of {used}", self.max_rate, produced.dropped[-1])
        now = (produced.read - produced.filtered, len(produced.dropped))
        used, total = (was + more for was, more in zip(self._latest, now))
        most = 1 - (1 - self.max_rate) / 4
        window = self.after * (1 if self.max_rate <= 0.5 else 5)  # chance alone must not stop a run
        if produced.dropped and used >= window and total > most * used:
            self._stop(f"{total} of the latest {used}", most, produced.dropped[-1])
        self._latest = (used, total) if used < window else (used // 2, total // 2)

    def exceeded(self) -> str:
        """What is wrong with these numbers, if they are of all the rows there are; empty where nothing is."""
        used, dropped = self.read - self.filtered, self.dropped.total()
        if dropped <= self.max_rate * used:
            return ""
        return self._sentence(f"{dropped} of {used}", self.max_rate)

    def _stop(self, share: str, rate: float, last: Dropped) -> None:
        last_said = f"; the last is {last.dataset}, row {last.number}: {last.message}"
        raise DatasetError(self._sentence(share, rate, last_said))

    def _sentence(self, share: str, rate: float, more: str = "") -> str:
        return (
            f"{share} rows cannot be used ({self.summary()}), more than {rate:.1%}{more}; "
            "correct the data or raise max_drop_rate"
        )

    def summary(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))

    def left_out(self) -> str:
        """Why rows were read and not trained on, the bad ones and those that are none."""
        below = f"{self.filtered} below min_ratings" if self.filtered else ""
        return ", ".join(part for part in (below, self.summary()) if part)
