"""The order of rows: a permutation without a table, dealt to shards, mixed by weight, resumable anywhere."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from data.errors import DatasetError
from data.order import MapReader, ShardReader, StreamReader, shuffled
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


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("files", [(23,), (5, 9, 2), (4, 4, 4, 4), (1,), (3, 7), (2, 0, 3)])
def test_streams_share_their_rows_and_go_on_anywhere(files, block):
    """With epochs each row is read equally often; without, a shard that has no row of its own borrows one."""
    stream = ListStream(*[[(f, i) for i in range(count)] for f, count in enumerate(files)])
    every = {(i * len(files) + f, (f, i)) for f, count in enumerate(files) for i in range(count)}
    for shards, epochs in ((4, 2), (16, 3), (16, None)):
        seen = Counter()
        for shard in range(shards):
            reader, whole = StreamReader(stream, 5, shard, shards, epochs, block), []
            while len(whole) < 20:
                again = StreamReader(stream, 5, shard, shards, epochs, block)
                again.restore(reader.state())
                read = reader.next()
                assert read == again.next()
                if read is None:
                    break
                whole.append(read)
            assert reader.reread([read.position for read in whole]) == whole
            seen.update((read.number, read.row) for read in whole)
            if epochs == 2:
                first = [read.number for read in whole if not read.position[0]]
                assert sorted(first) == sorted(read.number for read in whole if read.position[0])
        assert set(seen) == every and (epochs is None or set(seen.values()) == {epochs})


def test_a_shard_whose_files_are_empty_says_so():
    empty = ListStream([{}], [])
    reader = StreamReader(empty, 0, 3, 4, epochs=None, block=2, name="mine")
    with pytest.raises(DatasetError, match="mine: shard 3"):
        reader.next()
    assert drain(StreamReader(empty, 0, 3, 4, epochs=2, block=2)) == []


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
