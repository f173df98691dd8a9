"""Loaders: the same samples whatever the ranks and workers, exact resumes, bad rows counted, no hang."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import islice

import pytest
import torch

from data import loader as loader_module
from data.errors import DatasetError
from data.loader import LoaderConfig, merge_states, steps_per_run
from data.packing import PADDING
from data.samples import IGNORE_INDEX
from data.sources import Mixture
from tests.processors import embedded, processor
from tests.rows import ListStream, flat, loader, mixture, png, rows, source

DATA = rows(40)


def stream() -> ListStream:
    return ListStream(DATA[:17], DATA[17:])


def both() -> Mixture:
    """A sequence and a stream, mixed."""
    return Mixture([source(DATA, "map", weight=2.0), source(stream(), "stream", weight=1.0)])


def steps(loaders, count: int) -> list[list]:
    """The sample ids of each step: of its rows, over all ranks in order."""
    made = []
    for per_rank in islice(zip(*(iterate_steps(one) for one in loaders)), count):
        made.append([row for rank in per_rank for row in rank])
    return made


def iterate_steps(one):
    row_ids = []
    for batch in one:
        row_ids += batch.sample_ids
        if len(row_ids) == one.rows_per_step:
            yield row_ids
            row_ids = []


def ranks(data, world_size: int, state=None, **config) -> list:
    made = [loader(data, rank, world_size, **config) for rank in range(world_size)]
    for one in made:
        if state is not None:
            one.load_state_dict(json.loads(json.dumps(state)))
    return made


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
            pixels += [] if whole.tiles is None else [whole.tiles]
        if pixels:
            assert torch.equal(batch.to("cpu")["pixel_values"], torch.cat(pixels))


def test_padding_gives_each_sample_a_row():
    batches = list(loader(DATA, epochs=1, packing=False, micro_batch_size=2))
    assert sorted(flat(batches)) == [("toy", i) for i in range(40)]
    for batch in batches:
        assert all(len(row) <= 1 for row in batch.sample_ids)
        assert (batch["segment_ids"] != PADDING).sum(1).max() == batch["segment_ids"].shape[
            1
        ] < 128 or batch.packing_efficiency == 0
    assert (
        len(batches) % 2 == 0 and sum(batch.packing_efficiency == 0 for batch in batches) < 2
    )  # whole steps


def test_ranks_micro_batches_and_workers_do_not_change_a_step():
    expected = steps(ranks(both(), 1), 8)
    assert len({row for step in expected for row in step}) > 20
    assert steps(ranks(both(), 1, micro_batch_size=4), 8) == expected
    assert steps(ranks(both(), 2, micro_batch_size=2), 8) == expected
    assert steps(ranks(both(), 4), 8) == expected
    assert steps(ranks(both(), 1, workers=3), 8) == expected
    assert steps(ranks(both(), 1, seed=1), 8) != expected


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    "before, after", [((2, {}), (1, {})), ((1, {}), (4, {})), ((1, {"workers": 2}), (2, {}))]
)
def test_a_run_goes_on_where_it_stopped_on_any_number_of_ranks(before, after, packing):
    make = {"packing": packing, "shuffle_buffer": 3}
    uninterrupted = steps(ranks(both(), 1, **make), 12)
    for stop in (1, 6):
        first = ranks(both(), before[0], **make, **before[1])
        done = steps(first, stop)
        state = merge_states([one.state_dict() for one in first])
        rest = steps(ranks(both(), after[0], state, **make, **after[1]), 12 - stop)
        assert done + rest == uninterrupted, stop


def test_a_resumed_epoch_ends_with_none_lost_or_doubled():
    for data in (mixture(DATA), mixture(stream())):
        first = ranks(data, 2, epochs=2, shuffle_buffer=3)
        done = steps(first, 4)
        state = merge_states([one.state_dict() for one in first])
        (second,) = ranks(data, 1, state, epochs=2, shuffle_buffer=3)
        seen = [sample for step in done for row in step for sample in row] + flat(second)
        assert len(seen) == 80 and set(Counter(seen).values()) == {2}
        assert second.state.drops.read == 80
        assert list(second) == []


@pytest.mark.parametrize(
    "config", [{"batch_size": 1}, {"batch_size": 2}, {"batch_size": 2, "packing": False}]
)
def test_an_epoch_may_be_left_behind_any_step(config):
    """Towards its end, too, where shards have ended and whole batches are padding."""
    data = mixture(rows(45))
    whole = steps(ranks(data, 1, epochs=1, **config), 100)
    assert len(whole) >= 10 and any(not any(step) for step in whole) == config.get("packing", True)
    for stop in range(1, len(whole)):
        first = ranks(data, 1, epochs=1, **config)
        done = steps(first, stop)
        rest = steps(ranks(data, 1, first[0].state_dict(), epochs=1, **config), 100)
        assert done + rest == whole, stop


def test_a_state_may_be_returned_to():
    (one,) = ranks(mixture(rows(45)), 1, epochs=1)
    whole, states = [], [one.state]
    for batch in one:
        whole.append(batch.sample_ids)
        states.append(one.state)
    for number, state in enumerate(states):
        one.state = state
        assert [batch.sample_ids for batch in one] == whole[number:], number


def test_states_that_do_not_fit():
    one, other = ranks(mixture(DATA), 2, micro_batch_size=1)
    batches = iter(one)
    next(batches)
    with pytest.raises(RuntimeError, match="between steps, of 2 rows on this rank; got 1"):
        one.state_dict()
    next(batches)
    with pytest.raises(DatasetError, match="merge the states"):
        loader(DATA).load_state_dict(one.state_dict())
    with pytest.raises(DatasetError, match=r"states of several steps"):
        merge_states([one.state_dict(), other.state_dict()])
    for change in ({"seed": 1}, {"packing_buffer_size": 9}, {"batch_size": 20}):
        with pytest.raises(DatasetError, match=r"the saved run's .* this one's is .*: keep it"):
            loader(DATA, **change).load_state_dict(one.state_dict())
    with pytest.raises(DatasetError, match=r"datasets .* was \[\['toy', 40"):
        loader(DATA[1:]).load_state_dict(one.state_dict())


def test_a_row_that_went_bad_between_save_and_resume_is_named():
    (one,) = ranks(mixture(DATA), 1)
    steps([one], 1)
    changed = [row | {"answer": ""} for row in DATA]
    (second,) = ranks(mixture(changed), 1, one.state_dict())
    with pytest.raises(DatasetError, match=r"toy, row \d+: was good when the run was saved, but now: answer"):
        next(iter(second))


@pytest.mark.parametrize(
    "config, message",
    [
        ({"world_size": 3}, "batch_size 4: expected a multiple of ranks x micro_batch_size, 3 x 1"),
        ({"micro_batch_size": 3}, "1 x 3"),
        ({"processor": processor("nanovlm-v0.1")}, "turn packing off"),
    ],
)
def test_settings_that_do_not_fit(config, message):
    with pytest.raises(DatasetError, match=message):
        loader(DATA, **config)


def test_there_are_shards_enough_for_workers_whatever_the_batch():
    assert [LoaderConfig(batch_size=n).num_shards for n in (1, 3, 16, 20)] == [16, 18, 16, 20]


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
    data = [*[GOOD] * 60, *BAD.values()]
    one = loader(data, epochs=2, max_tiles=4, workers=workers)
    assert sorted(flat(one)) == sorted([("toy", i) for i in range(60)] * 2)
    expected = Counter(reason.strip() for reason in BAD)
    assert one.state.drops.dropped == Counter({reason: 2 * count for reason, count in expected.items()})
    assert one.state.drops.read == 132
    assert "toy, row 62 left out, empty text" in caplog.text


def test_too_many_bad_rows_stop_the_run():
    data = [BAD["empty text"] if i % 10 == 0 else GOOD for i in range(100)]
    one = loader(data)
    with pytest.raises(
        DatasetError, match=r"of \d\d+ rows cannot be used \(\d+ empty text\), more than 5.0%.*toy, row \d+0"
    ):
        for _ in range(1000):
            list(islice(one, 1))
    assert flat(loader(data, max_drop_rate=0.2, epochs=1))


@pytest.mark.parametrize("workers", [0, 1])
def test_no_good_row_at_all_is_no_endless_search(workers):
    with pytest.raises(DatasetError, match="rows cannot be used"):
        next(iter(loader([BAD["empty text"]] * 3, max_drop_rate=1.0, workers=workers)))
    with pytest.raises(DatasetError, match="no row can be trained on: 3 empty text"):
        next(iter(loader([BAD["empty text"]] * 3, epochs=1, workers=workers)))
    few = mixture([GOOD | {"score": 1}] * 60 + [BAD["empty text"] | {"score": 3}], min_ratings={"score": 2})
    with pytest.raises(DatasetError, match=r"trained on: 60 below min_ratings, 1 empty text$"):
        next(iter(loader(few, epochs=1, workers=workers)))
    unrated = mixture([GOOD | {"score": 1}] * 3, min_ratings={"score": 2})
    with pytest.raises(DatasetError, match=r"toy: 4 rows in succession are below min_ratings {'score': 2}"):
        next(iter(loader(unrated, workers=workers)))


@pytest.mark.parametrize("packing", [True, False])
def test_a_stream_of_fewer_rows_than_shards_is_trained_on(packing):
    """Whole steps without end, and to be gone on with; with a number of epochs, each row so often."""
    few, config = (
        ListStream(DATA[:6], DATA[6:10]),
        {"packing": packing, "packing_buffer_size": 2},
    )
    uninterrupted = steps(ranks(few, 1, **config), 30)
    assert all(row for step in uninterrupted for row in step)  # none is padding
    assert {i for step in uninterrupted for row in step for _, i in row} == {
        *range(0, 12, 2),
        *range(1, 8, 2),
    }
    for before in (1, 3, 7, 18):
        half = ranks(few, 2, **config)
        assert steps(half, before) == uninterrupted[:before]
        state = merge_states([one.state_dict() for one in half])
        assert steps(ranks(few, 1, state, **config), 30 - before) == uninterrupted[before:]
    once = Counter(flat(loader(few, epochs=2, **config)))
    assert set(once.values()) == {2} and len(once) == 10


def test_rows_below_the_ratings_are_no_bad_rows():
    data = [GOOD | {"score": i % 2} for i in range(40)]
    one = loader(mixture(data, min_ratings={"score": 1}), epochs=1)
    assert sorted(i for _, i in flat(one)) == list(range(1, 40, 2))
    assert (one.state.drops.filtered, one.state.drops.dropped.total()) == (20, 0)


class Breaks(list):
    """Rows of which, once armed, one raises what nobody expected, or takes its process with it."""

    armed = deadly = False

    def __getitem__(self, index):
        if index == 30 and self.armed:
            if self.deadly:
                os._exit(7)
            raise ZeroDivisionError("row 30 is not there")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_that_fails_raises_here(workers):
    data = Breaks(DATA)
    one = loader(data, workers=workers)
    data.armed = True
    with pytest.raises(DatasetError, match="reading the data failed: ZeroDivisionError: row 30 is not there"):
        list(islice(one, 100))


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # torch's, cleaning up after it
def test_a_worker_that_dies_raises_here():
    data = Breaks(DATA)
    one = loader(data, workers=1)
    data.armed = data.deadly = True
    with pytest.raises(DatasetError, match=r"worker.* exited unexpectedly.*shared memory"):
        list(islice(one, 100))


@pytest.mark.parametrize("config", [{}, {"packing": False}, {"epochs": 3, "sequence_length": 60}])
def test_steps_per_run(config):
    """As many as the loader gives: no row of the last pass is left out, and no step is too many."""
    made = loader(rows(37), **({"epochs": 1} | config))
    steps = steps_per_run(made.mixture, made.processor, made.config)
    assert steps == sum(1 for _ in made) * made.config.micro_batch_size // made.config.batch_size > 1


def test_steps_per_run_of_much_data(monkeypatch):
    """From some rows: close to what all of them make, packed as badly as they pack."""
    made = loader(rows(300, every=1, longest=2), epochs=1, sequence_length=40)
    exact = steps_per_run(made.mixture, made.processor, made.config)
    monkeypatch.setattr(loader_module, "_COUNTED", 0)
    assert abs(steps_per_run(made.mixture, made.processor, made.config) - exact) <= 0.05 * exact
