"""The order of rows: a permutation without a table, dealt to shards, mixed by weight, resumable anywhere."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter

import pytest

from data.errors import DatasetError
from data.order import MapReader, ShardReader, StreamReader, shuffled, size_of
from data.sources import Mixture
from tests.rows import ListStream, source


def drain(reader) -> list:
    return list(iter(reader.next, None))


def test_a_shuffle_is_a_permutation_that_leaves_no_order_behind():
    for length in (1, 2, 3, 7, 64, 1000):
        one = [shuffled(i, length, 1) for i in range(length)]
        assert sorted(one) == list(range(length))
        assert length < 7 or one not in ([shuffled(i, length, 2) for i in range(length)], list(range(length)))
    places = [shuffled(i, 4096, 3) for i in range(4096)]
    follows = sum(b == a + 1 for a, b in itertools.pairwise(places))
    assert follows < 12  # one is expected
    quarters = Counter((i // 1024, place // 1024) for i, place in enumerate(places))
    assert all(abs(count - 256) < 70 for count in quarters.values())


def test_shards_share_the_rows_of_each_epoch():
    rows = list(range(23))
    shards = [[read.number for read in drain(MapReader(rows, 5, shard, 4, epochs=2))] for shard in range(4)]
    assert Counter(n for shard in shards for n in shard) == dict.fromkeys(rows, 2)
    interleaved = [shards[i % 4][i // 4] for i in range(46)]
    assert sorted(interleaved[:23]) == rows and interleaved[:23] != interleaved[23:]


@pytest.mark.slow(but=9)
@pytest.mark.parametrize(("parts", "block"), [(1, 8), (3, 1), (3, 3), (20, 3)])
@pytest.mark.parametrize("files", [(23,), (5, 9, 2), (4, 4, 4, 4), (1,), (3, 7), (2, 0, 3)])
def test_streams_share_their_rows_and_go_on_anywhere(files, parts, block):
    """With epochs each row is read equally often; without, a shard may have rows in other epochs only."""
    stream = ListStream(*[[(f, i) for i in range(count)] for f, count in enumerate(files)], parts=parts)
    every = {(f, i) for f, count in enumerate(files) for i in range(count)}
    for shards, epochs in ((4, 2), (16, 3), (16, math.inf)):
        seen, numbers = Counter(), {}
        for shard in range(shards):
            reader, whole = StreamReader(stream, 5, shard, shards, epochs, block), []
            while len(whole) < 20 if epochs == math.inf else True:
                again = StreamReader(stream, 5, shard, shards, epochs, block)
                again.restore(reader.state())
                read = reader.next()
                assert read == again.next()
                if read is None:
                    break
                whole.append(read)
            assert reader.reread([read.position for read in whole]) == whole
            seen.update(read.row for read in whole)
            for read in whole:  # a row has the same number in each epoch, and no other row has it
                assert numbers.setdefault(read.number, read.row) == read.row
        assert set(seen) == every == set(numbers.values()) and len(numbers) == len(every)
        assert epochs == math.inf or set(seen.values()) == {epochs}


@pytest.mark.parametrize("parts", [1, 50])
def test_how_often_a_stream_is_read_is_bounded(parts):
    """P parts by S shards once if there are as many parts, else S / P times. And shards have like shares."""
    for files, shards in ((1, 16), (3, 16), (7, 16), (16, 16), (33, 16), (40, 32)):
        stream = ListStream(*[range(100)] * files, parts=parts)
        given = []
        for shard in range(shards):
            reader = StreamReader(stream, 5, shard, shards, epochs=1, block=16)
            given.append(len(drain(reader)))
        pieces = files * parts
        assert sum(given) == 100 * files and stream.rows_read <= sum(given) * max(1, shards / pieces)
        assert max(given) - min(given) <= -(-100 * files // min(pieces, shards)), (files, shards)


def test_a_block_is_bounded_in_bytes():
    """Rows with images are large, and every shard of a rank holds a block of them."""
    stream = ListStream([{"image": bytes(1000), "answer": ["x" * 500, 3]} for _ in range(40)])
    reader, held = StreamReader(stream, 5, 0, 1, 1, block=256, block_bytes=6000), 0
    for number in range(40):
        row = reader.next().row
        held = max(held, stream.rows_read - number)
    assert held == 4 and size_of(row) == 1508
    assert reader.next() is None


class Large(dict):
    """A row that can be watched."""

    __hash__ = object.__hash__


class LargeStream(ListStream):
    """Makes its rows when they are read; `most` is how many of them lived at once."""

    def __init__(self, *counts: int):
        super().__init__(*(range(count) for count in counts))
        self.living, self.most = weakref.WeakSet(), 0

    def read(self, part: int, start: int = 0):
        for number, _ in super().read(part, start):
            row = Large(question="a", answer="b", image=bytes(1 << 16), number=number)
            self.living.add(row)
            self.most = max(self.most, len(self.living))
            yield number, row
            del row


def test_a_row_that_was_given_is_held_no_longer():
    """Else a block lives on while the next is read, and a rank needs twice the memory that it may take."""
    stream = LargeStream(40)
    reader = StreamReader(stream, 5, 0, 1, epochs=2, block=8)
    for _ in range(80):
        reader.next()
    assert stream.most <= 8 + 2  # one that is on its way in, one on its way out
    stream = LargeStream(40)
    again = StreamReader(stream, 5, 0, 1, epochs=2, block=8)
    again.restore([0, 0, 0, 6])
    again.next()
    assert len(stream.living) <= 2


def test_streams_share_the_memory_of_a_shard(monkeypatch):
    """A recipe of ten streams needs no more than one of one."""
    monkeypatch.setattr("data.order.most_bytes", lambda sharing: (24 << 16) // sharing)
    streams = [LargeStream(100) for _ in range(4)]
    mixed = Mixture([source(stream, f"{number}") for number, stream in enumerate(streams)])
    reader = ShardReader(mixed, 0, 1, seed=0)
    for stream in streams:
        stream.most = 0  # of looking at the first rows
    for _ in range(100):
        reader.next()
    assert sum(stream.most for stream in streams) <= 24 + 2 * 4


def test_a_stream_whose_files_are_empty_says_so():
    empty = ListStream([], [])
    reader = StreamReader(empty, 0, 3, 4, epochs=math.inf, block=2, name="mine")
    with pytest.raises(DatasetError, match="mine"):
        reader.next()
    assert drain(StreamReader(empty, 0, 3, 4, epochs=2, block=2)) == []
    some = StreamReader(ListStream([7], []), 0, 3, 4, epochs=math.inf, block=2)
    assert {some.next().row for _ in range(5)} == {7}


def test_mixing_keeps_to_the_weights():
    data = [
        source([{"question": "a", "answer": "b"}] * n, name, weight=w)
        for n, name, w in ((5, "a", 3.0), (50, "b", 1.0))
    ]
    reader = ShardReader(Mixture(data), 1, 4, seed=0)
    drawn = [reader.next().source for _ in range(100)]
    for taken in range(1, 100):
        assert abs(drawn[:taken].count(0) - 0.75 * taken) <= 1.5, taken
    by_size = Mixture([source([{"question": "a", "answer": "b"}] * n, str(n)) for n in (10, 30)])
    assert by_size.shares == [0.25, 0.75] and by_size.num_rows == 40
    ends = ShardReader(by_size, 0, 2, seed=0, epochs=1)
    assert Counter(read.source for read in drain(ends)) == {0: 5, 1: 15}
