"""Inputs of micro-batches: in order, whole, and with CUDA copied ahead in an order that GPUs keep to."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from training import feed as feeding
from training.feed import Feed


class Stream:
    """What is ordered before the next thing that it is given to do."""

    def __init__(self, *_):
        self.before: set = set()

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before

    def do(self, what) -> set:
        before = set(self.before)
        self.before.add(what)
        return before


@pytest.fixture
def streams(monkeypatch):
    """The stream that computes, and those in which copies have been made, by the number of their inputs."""
    computing, copied, entered = Stream(), {}, []

    @contextmanager
    def inside(stream):
        entered.append(stream)
        yield
        entered.pop()

    def copy(value, device):
        if isinstance(value, int):
            copied[value] = entered[-1].do(("copied", value))
        return value

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(feeding, "on_device", copy)
    return computing, copied


def test_copies_run_one_ahead_and_neither_early_nor_over_what_is_computed_with(streams):
    computing, copied = streams
    feed, numbers = Feed(torch.device("cuda")), iter(range(5))
    for step in ([0, 1, 2], [3], [], [4]):
        for inputs in feed({"number": next(numbers), "stage": "first"} for _ in step):
            number = inputs["number"]
            before = computing.do(("computed", number))
            assert inputs["stage"] == "first" and ("copied", number) in before
            following = {number + 1} & set(step)
            assert set(copied) == set(range(number + 1)) | following
            # Its copy is made while this is computed: neither waits for the other.
            for one in following:
                assert ("copied", one) not in before and ("computed", number) not in copied[one]
            # The memory of what came before may be its own.
            for one in copied:
                assert all(("computed", earlier) in copied[one] for earlier in range(one - 1))
    assert len(copied) == 5 and next(numbers, None) is None


def test_elsewhere_nothing_is_fetched_ahead():
    taken = []
    feed = Feed(torch.device("cpu"))
    for inputs in feed({"number": taken.append(n) or torch.tensor(n), "stage": None} for n in range(3)):
        assert inputs["number"].item() == len(taken) - 1 and inputs["stage"] is None
    assert len(taken) == 3
