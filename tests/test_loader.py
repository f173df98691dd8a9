"""Loaders: the same samples whatever the ranks and workers, exact resumes, bad rows counted, no hang."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from itertools import islice

import pytest
import torch

from data import loader as loader_module
from data.errors import DatasetError
from data.loader import (
    DropCount,
    Dropped,
    LoaderConfig,
    Shard,
    counts_exactly,
    merge_states,
    steps_per_run,
)
from data.order import ShardReader
from data.packing import IGNORE_INDEX, PADDING
from data.sources import Mixture
from data.tiles import Parts
from tests.processors import embedded
from tests.rows import ListStream, flat, loader, mixture, png, rows, source
from training.rows import grouped

DATA = rows(40)


def stream() -> ListStream:
    return ListStream(DATA[:17], DATA[17:])


def both() -> Mixture:
    """A sequence and a stream, mixed."""
    return Mixture([source(DATA, "map", weight=2.0), source(stream(), "stream", weight=1.0)])


def steps(loaders, count: int) -> list[list]:
    """The sample ids of each step: of its rows, over all ranks in order."""
    per_rank = zip(*(map(ids_of_step, grouped(one)) for one in loaders))
    return [[row for rank in step for row in rank] for step in islice(per_rank, count)]


def ids_of_step(batches) -> list:
    return [row for batch in batches for row in batch.sample_ids]


def ranks(data, world_size: int, state=None, **config) -> list:
    made = [loader(data, rank, world_size, **config) for rank in range(world_size)]
    for one in made:
        if state is not None:
            one.load_state_dict(json.loads(json.dumps(state)))
    return made


def saved(loaders) -> dict:
    return merge_states([one.state_dict() for one in loaders])


def test_an_epoch_holds_every_sample_once_and_whole():
    batches = list(loader(DATA, epochs=1))
    assert sorted(flat(batches)) == [("toy", i) for i in range(40)]
    p = embedded()
    for batch in batches:
        assert batch["input_ids"].shape == batch["segment_ids"].shape == (1, 128)
        assert ("pixel_values" in batch) == any(i % 5 == 0 for _, i in flat([batch]))
        pixels = []
        for number, (_, i) in enumerate(flat([batch]), 1):
            here = batch["segment_ids"] == number
            row = DATA[i]
            inputs = p.conversation(row["image"], row["question"])
            whole = p.encode_conversation([*inputs, {"role": "assistant", "content": row["answer"]}])
            assert batch["input_ids"][here].tolist() == whole.input_ids
            assert batch["position_ids"][here].tolist() == list(range(len(whole.input_ids)))
            labels = batch["labels"][here]
            said = p.decode(labels[labels != IGNORE_INDEX], skip_special_tokens=False)
            assert said.strip() == f"row {i}<end_of_utterance>"
            pixels += [] if whole.parts is None else [whole.parts]
        if pixels:
            assert torch.equal(batch.to("cpu")["pixel_values"], Parts.cat(pixels).to("cpu"))


def test_padding_gives_each_sample_a_row():
    batches = list(loader(DATA, epochs=1, packing=False, micro_batch_size=2))
    assert sorted(flat(batches)) == [("toy", i) for i in range(40)]
    for batch in batches:
        assert all(len(row) <= 1 for row in batch.sample_ids)
        longest = (batch["segment_ids"] != PADDING).sum(1).max()
        assert longest in (0, batch["segment_ids"].shape[1]) and longest < 128
    assert len(batches) % 2 == 0  # whole steps


def test_ranks_micro_batches_and_workers_do_not_change_a_step():
    expected = steps(ranks(both(), 1), 8)
    assert len({row for step in expected for row in step}) > 20
    assert steps(ranks(both(), 1, micro_batch_size=4), 8) == expected
    assert steps(ranks(both(), 4), 8) == expected
    assert steps(ranks(both(), 1, workers=3), 8) == expected
    assert steps(ranks(both(), 1, seed=1), 8) != expected


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    "before, workers, after, more",
    [
        (1, 0, 4, {}),
        (1, 2, 2, {"packing": False}),
        (2, 0, 1, {"workers": 2}),  # more shards than rows of a step: a worker begins in the middle of them
    ],
)
def test_a_run_resumes_where_it_stopped_on_any_number_of_ranks(before, workers, after, more):
    packing = {"packing": more.get("packing", True), "shuffle_buffer": 3}
    uninterrupted = steps(ranks(both(), 1, **packing), 8)
    for stop in (1, 6):
        first = ranks(both(), before, **packing, workers=workers)
        done = steps(first, stop)
        rest = steps(ranks(both(), after, saved(first), **(packing | more)), 8 - stop)
        assert done + rest == uninterrupted, stop


def test_a_resumed_epoch_ends_with_none_lost_or_doubled():
    for data in (mixture(DATA), mixture(stream())):
        first = ranks(data, 2, epochs=2, shuffle_buffer=3)
        done = steps(first, 4)
        (second,) = ranks(data, 1, saved(first), epochs=2, shuffle_buffer=3)
        seen = [sample for step in done for row in step for sample in row] + flat(second)
        assert len(seen) == 80 and set(Counter(seen).values()) == {2}
        assert second.state.drops.read == 80
        assert list(second) == []


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_may_be_resumed_after_any_step(packing):
    """Towards its end, too, where shards have ended and whole batches are padding."""
    config = {"batch_size": 2, "packing": packing, "epochs": 1}
    data = mixture(rows(45))
    whole = steps(ranks(data, 1, **config), 100)
    assert len(whole) >= 5 and any(not all(step) for step in whole)
    for stop in (1, *range(len(whole) - 6 + len(whole) % 2, len(whole), 2), len(whole) - 1):
        first = ranks(data, 1, **config)
        done = steps(first, stop)
        assert done + steps(ranks(data, 1, saved(first), **config), 100) == whole, stop


def test_a_state_may_be_returned_to():
    (one,) = ranks(mixture(rows(45)), 1, epochs=1)
    whole, states = [], [one.state]
    for batch in one:
        whole.append(batch.sample_ids)
        states.append(one.state)
    for number, state in [*enumerate(states)][::5]:
        one.state = state
        assert [batch.sample_ids for batch in one] == whole[number:], number


@pytest.mark.parametrize(
    "data, change, field",
    [
        (DATA, {"seed": 1}, "seed"),
        (DATA, {"packing_buffer_size": 9}, "packing"),
        (DATA, {"batch_size": 20}, "batch_size: .*16.* 20"),
        (DATA, {"batch_size": 8}, "batch_size"),
        (DATA[1:], {}, "datasets"),
        ([row | {"answer": ""} for row in DATA], {}, r"toy, row \d+"),
    ],
)
def test_another_order_or_other_data_cannot_resume(data, change, field):
    (one,) = ranks(mixture(DATA), 1)
    steps([one], 1)
    second = loader(data, **change)
    with pytest.raises(DatasetError, match=field):
        second.load_state_dict(one.state_dict())
        next(iter(second))


def test_a_stream_that_was_read_in_the_order_of_before_is_not_resumed():
    """Its rows could not be found again. A run of rows that can be indexed is resumed as ever."""
    for data, refused in ((stream(), True), (DATA, False)):
        (one,) = ranks(data, 1)
        uninterrupted = steps(ranks(data, 1), 3)
        steps([one], 1)
        state = one.state_dict()
        read = state["order"].pop("streams (sections)")
        state["order"] |= {"streams (files, cut by their sizes)": [*read.items()]}
        second = loader(data)
        if refused:
            with pytest.raises(DatasetError, match="no-resume"):
                second.load_state_dict(state)
        else:
            second.load_state_dict(state)
            assert steps([second], 2) == uninterrupted[1:]


@pytest.mark.parametrize(
    "config, field",
    [
        ({"world_size": 3}, "batch_size 4"),
        ({"micro_batch_size": 3}, "micro_batch_size"),
    ],
)
def test_settings_that_do_not_fit(config, field):
    with pytest.raises(DatasetError, match=field):
        loader(DATA, **config)


# --------------------------------------------------------------------------------------------- bad rows
GOOD = {"question": "how many?", "answer": "two"}
BAD = {
    "broken image": GOOD | {"image": b"no picture"},
    "broken image ": GOOD | {"image": png(30, 30)[:-2000]},  # its header is whole
    "empty text": GOOD | {"answer": " "},
    "too many tiles": GOOD | {"image": [png()] * 5},
    "too long": GOOD | {"question": "circles " * 200},
    "bad conversation": "no row",
}


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_rows_are_left_out_counted_and_logged(workers, caplog):
    one = loader(mixture([*[GOOD] * 60, *BAD.values()]), epochs=2, max_tiles=4, workers=workers)
    assert sorted(flat(one)) == sorted([("toy", i) for i in range(60)] * 2)
    expected = Counter(reason.strip() for reason in BAD)
    assert one.state.drops.dropped == Counter({reason: 2 * count for reason, count in expected.items()})
    assert one.state.drops.read == 132
    assert "toy, row 62 left out, empty text" in caplog.text


def test_an_image_of_the_network_is_fetched_once_an_epoch(monkeypatch):
    """Its size is needed when its sample is made, its pixels when the sample is packed."""
    fetched = Counter()

    def fetch(url: str, most: int) -> bytes:
        fetched[url] += 1
        return png() if url.endswith(("0", "1", "2")) else b"no picture"

    monkeypatch.setattr("data.fetch.fetch", fetch)
    data = [GOOD | {"image": f"https://example.org/{i}"} for i in range(4)]
    one = loader(mixture(data, allow_urls=True), epochs=1, max_drop_rate=0.5)
    assert sorted(flat(one)) == [("toy", 0), ("toy", 1), ("toy", 2)]
    assert set(fetched.values()) == {1} and one.state.drops.dropped == {"broken image": 1}


@pytest.mark.parametrize("streaming", [False, True])
def test_what_waits_to_be_packed_is_bounded_in_bytes(monkeypatch, streaming):
    """Rows with their images in them may wait by the hundred, in each shard; a sample always fits."""
    data = rows(60, every=1, longest=2)
    most = 4 * len(data[0]["image"])
    monkeypatch.setattr("data.loader.most_bytes", lambda shards: most)
    monkeypatch.setattr("data.order.most_bytes", lambda shards: most)
    data = mixture(ListStream(data)) if streaming else mixture(data)
    shard = Shard(0, data, embedded(), LoaderConfig(sequence_length=300, batch_size=1, epochs=1))
    shard.reader = ShardReader(data, 0, 1, seed=0, epochs=1)
    held, taken = 0, 0
    while shard._take():
        taken += 1
        if not shard._has_room():
            held = max(held, len(shard._buffer))
            shard._next_samples()
    assert taken == 60 and 4 <= held <= 5


def test_too_many_bad_rows_stop_the_run():
    data = [BAD["empty text"] if i % 10 == 0 else GOOD for i in range(100)]
    with pytest.raises(DatasetError, match=r"\d+ empty text.*toy, row \d+0"):
        list(islice(loader(data), 1000))
    assert flat(loader(data, max_drop_rate=0.2, epochs=1))


GONE = (Dropped("rows, row 7", "broken image", "no such file"),)


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.05])
def test_a_few_bad_rows_at_the_beginning_are_chance(rate):
    counts = DropCount(max_rate=rate)
    counts.add(20, GONE * 3)
    assert "3 of 20" in counts.exceeded()  # if these are all
    with pytest.raises(DatasetError, match="13 of the latest 40"):
        counts.add(20, GONE * 10)


def test_images_that_disappear_late_stop_the_run():
    """Long before they are the twentieth part of all rows of a long run."""
    counts = DropCount(max_rate=0.05)
    for _ in range(2000):
        counts.add(50, ())
    with pytest.raises(DatasetError, match=r"5\.0%"):
        for _ in range(10):
            counts.add(50, GONE * 50)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
def test_as_many_bad_rows_as_are_allowed_do_not_stop_it(rate):
    """By chance, there are more of them in some places than in others."""
    rng, counts = random.Random(0), DropCount(max_rate=rate)
    counts.add(20_000, ())  # so that the rate of all stays below
    for _ in range(2000):
        counts.add(50, GONE * sum(rng.random() < rate for _ in range(50)))


@pytest.mark.parametrize(
    "rows, config, expected",
    [
        ([BAD["empty text"]] * 3, {"max_drop_rate": 1.0}, "cannot be used"),
        ([BAD["empty text"]] * 3, {"epochs": 1}, "3 empty text"),
    ],
)
def test_no_good_row_at_all_is_no_endless_search(rows, config, expected):
    data = mixture(rows)
    for workers in (0, 1):
        with pytest.raises(DatasetError, match=expected):
            next(iter(loader(data, workers=workers, **config)))


@pytest.mark.parametrize("packing", [True, False])
def test_a_stream_of_fewer_rows_than_shards_is_trained_on(packing):
    """Whole steps without end, which can be resumed; with a number of epochs, each row so often."""
    few, config = ListStream(DATA[:6], DATA[6:10]), {"packing": packing}
    uninterrupted = steps(ranks(few, 1, **config), 8)
    assert all(row for step in uninterrupted for row in step)  # none is padding
    numbers = {i for step in uninterrupted for row in step for _, i in row}
    assert numbers == {*range(0, 12, 2), *range(1, 8, 2)}
    half = ranks(few, 2, **config)
    assert steps(half, 5) == uninterrupted[:5]
    assert steps(ranks(few, 1, saved(half), **config), 3) == uninterrupted[5:]
    once = Counter(flat(loader(few, epochs=2, **config)))
    assert set(once.values()) == {2} and len(once) == 10


class Breaks(list):
    """Rows of which, once armed, one raises what nobody expected, or takes its process with it."""

    armed = deadly = False

    def __getitem__(self, index):
        if index == 30 and self.armed:
            if self.deadly:
                os._exit(7)
            raise ZeroDivisionError("row 30 is not there")
        return super().__getitem__(index)


@pytest.mark.filterwarnings(  # torch's, cleaning up after a worker that has died
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(
    "workers, deadly, said", [(0, False, "row 30 is not"), (2, False, "row 30 is not"), (1, True, "worker")]
)
def test_a_read_that_fails_or_takes_its_process_with_it_raises_here(workers, deadly, said):
    data = Breaks(DATA)
    one = loader(data, workers=workers)
    data.armed, data.deadly = True, deadly
    with pytest.raises(DatasetError, match=said):
        list(islice(one, 100))


@pytest.mark.parametrize("config", [{}, {"packing": False}, {"epochs": 2, "sequence_length": 60}])
def test_steps_per_run(config):
    """As many as the loader gives: no row of the last pass is left out, and no step is too many."""
    made = loader(rows(37), **({"epochs": 1} | config))
    steps = steps_per_run(made.mixture, made.processor, made.config)
    assert steps == sum(1 for _ in made) * made.config.micro_batch_size // made.config.batch_size > 1


def test_steps_per_run_of_much_data(monkeypatch):
    """From some rows: close to what all of them make, packed as badly as they pack."""
    made = loader(rows(300, every=10, longest=2), epochs=1, sequence_length=40)
    exact = steps_per_run(made.mixture, made.processor, made.config)
    assert counts_exactly(made.mixture, made.config)
    monkeypatch.setattr(loader_module, "_COUNTED", 0)
    assert not counts_exactly(made.mixture, made.config)
    assert abs(steps_per_run(made.mixture, made.processor, made.config) - exact) <= 0.05 * exact
    monkeypatch.setattr(loader_module, "_ESTIMATED_FROM", 60)
    assert abs(steps_per_run(made.mixture, made.processor, made.config) - exact) <= 0.1 * exact


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_leave_the_random_numbers_of_a_run_alone(workers):
    """An evaluation in between would change what is dropped out after it."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    next(iter(loader(DATA, workers=workers)))
    assert torch.equal(torch.get_rng_state(), before)
