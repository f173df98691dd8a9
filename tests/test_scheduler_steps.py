"""`Scheduler.add`, `step` and `cancel`: requests that come and go at any time, prompts in chunks, tokens read
late, constraints and probabilities."""

from __future__ import annotations

import random

import pytest
import torch

from generation.fast.cuda.graph import GraphStep
from generation.fast.native.step import NativeStep
from generation.keyed_prompts import SHARE_FROM
from generation.options import NotFiniteError
from generation.requests import NewTokens, Request, RequestOutput
from generation.scheduler import Scheduler
from tests.invariants import fast_step
from tests.prompts import NO_STOP, PER_TILE, ImageBlock, tiny_vlm, words
from tests.test_batching import assert_as_alone, request, uneven
from tests.tiny import VOCAB


def serve(scheduler: Scheduler, requests: list[Request], arrivals: list[int] | None = None) -> dict:
    """Outputs by key; request number n comes before step `arrivals[n]` (None: 0) or when a slot is free. What
    steps report together is what the outputs hold."""
    queue = sorted(zip(arrivals or [0] * len(requests), range(len(requests))))
    tokens: dict = {one.key: [] for one in requests}
    outputs: dict = {}
    number = 0
    while queue or not scheduler.idle:
        while queue and queue[0][0] <= number and scheduler.free:
            scheduler.add(requests[queue.pop(0)[1]])
        for event in scheduler.step():
            if isinstance(event, NewTokens):
                assert event.key not in outputs
                tokens[event.key] += event.token_ids
            else:
                outputs[event.key] = event
        number += 1
        assert number < 3000, "it never ends"
    assert {key: output.token_ids for key, output in outputs.items()} == tokens
    return outputs


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", [None, NativeStep, GraphStep])
@pytest.mark.parametrize(("chunk", "lag"), [(None, 0), (7, 1)])
def test_every_request_as_alone_whenever_it_comes(vlm, chunk, lag, kind):
    step = None if kind is None else fast_step(vlm, kind)
    rng = random.Random(f"arrivals:{chunk}")  # None would be another run each time
    for sampled in (False, True):
        requests = uneven()
        if sampled:
            more = {"temperature": 1.1, "top_p": 0.9}
            requests = [
                Request(
                    one.input_ids,
                    one.pixel_values,
                    options=type(one.options)(**vars(one.options) | more | {"seed": number}),
                    key=one.key,
                )
                for number, one in enumerate(requests)
            ]
        scheduler = Scheduler(vlm, 3, decode_step=step, prefill_chunk=chunk)
        scheduler.lag = lag
        outputs = serve(scheduler, requests, [rng.randrange(20) for _ in requests])
        assert_as_alone(vlm, requests, outputs)
        assert scheduler.stats.reused > 0


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_a_long_prompt_holds_nobody_up(vlm, chunk):
    """Between two tokens of a row at most one tile is encoded or one chunk computed, whoever comes."""
    scheduler = Scheduler(vlm, 3, prefill_chunk=chunk)
    scheduler.add(request(words(1, 3), "first", max_new_tokens=60, **NO_STOP))
    while not scheduler.step():
        pass
    long = [ImageBlock(1), ImageBlock(2), *words(2, 150), ImageBlock(3)]
    scheduler.add(request(long, "long", max_new_tokens=3))
    scheduler.add(request(words(3, 40), "other", max_new_tokens=3))
    before = scheduler.stats.prefilled, scheduler.stats.tiles_encoded
    steps = 0
    while not scheduler.idle:
        events = scheduler.step()
        now = scheduler.stats.prefilled, scheduler.stats.tiles_encoded
        positions, tiles = now[0] - before[0], now[1] - before[1]
        assert (positions <= chunk and not tiles) or (tiles == 1 and not positions)
        if steps < 50:
            assert [event for event in events if event.key == "first"]
        before, steps = now, steps + 1


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one(vlm):
    scheduler = Scheduler(vlm, 2, prefill_chunk=10)
    scheduler.add(request(words(1, 300), "long", max_new_tokens=2))
    scheduler.add(request(words(2, 5), "short", max_new_tokens=2))
    order = []
    while not scheduler.idle:
        order += [event.key for event in scheduler.step() if isinstance(event, RequestOutput)]
    assert order == ["short", "long"]


def test_what_is_still_computed_is_waited_for_and_shared(vlm):
    head = [ImageBlock(1), ImageBlock(2), *words(1, 60)]
    requests = [request([*head, *words(2 + key, 3)], key) for key in range(3)]
    scheduler = Scheduler(vlm, 3, prefill_chunk=8)
    outputs = serve(scheduler, requests)
    assert scheduler.stats.tiles_encoded == 2
    worth = 2 * PER_TILE + 60 - SHARE_FROM  # nobody waits for less
    assert [outputs[key].reused_tokens > worth for key in range(3)] == [False, True, True]
    assert_as_alone(vlm, requests, outputs)


@pytest.mark.parametrize("lag", [0, 1])
def test_logits_that_are_not_finite_fail_alone(lag):
    model, poison = tiny_vlm(), 77
    with torch.no_grad():
        model.language_model.embed_tokens.weight[poison] = float("nan")
        model.language_model.lm_head.weight[poison] = 0  # no answer holds it
    good = [request([word % poison for word in words(key, 4 + key)], key) for key in range(6)]
    bad = request([1, 2, poison, *range(3, 40)], "bad", max_new_tokens=50)
    scheduler = Scheduler(model, 3, prefill_chunk=9)
    scheduler.lag = lag
    outputs = {}
    queue = [good[0], bad, *good[1:]]
    while queue or not scheduler.idle:
        while queue and scheduler.free:
            scheduler.add(queue.pop(0))
        outputs |= {event.key: event for event in scheduler.step() if isinstance(event, RequestOutput)}
    assert isinstance(outputs.pop("bad").error, NotFiniteError)
    assert_as_alone(model, good, outputs)


def test_more_than_there_are_slots_for_is_refused(vlm):
    scheduler = Scheduler(vlm, 2)
    scheduler.add(request(words(1, 3), 0))
    scheduler.add(request(words(2, 3), 1))
    assert scheduler.free == 0
    with pytest.raises(ValueError):
        scheduler.add(request(words(3, 3), 2))
    with pytest.raises(ValueError):
        next(scheduler.run([]))
    scheduler.reset()
    assert scheduler.idle and scheduler.free == 2 and scheduler.step() == []


# --------------------------------------------------------------------------------- probabilities, constraints


class Pattern:
    """Even and odd ids by turns; after every fifth token, three that are forced."""

    FORCED = (8, 9, 10)
    thinking = full = False
    choice = None

    def __init__(self) -> None:
        self.taken: list[int] = []

    def close(self, scores: torch.Tensor) -> None:
        pass

    def allows(self, token_id: int) -> bool:
        forced = self.forced()
        return token_id == forced[0] if forced else token_id % 2 == len(self.taken) % 2

    def mask(self, scores: torch.Tensor) -> None:
        if forced := self.forced():
            scores[torch.arange(len(scores)) != forced[0]] = -torch.inf
        else:
            scores[(len(self.taken) + 1) % 2 :: 2] = -torch.inf

    def accept(self, token_id: int) -> None:
        self.taken.append(token_id)

    def forced(self) -> list[int]:
        return list(self.FORCED[max(0, len(self.taken) % 8 - 5) :]) if len(self.taken) % 8 >= 5 else []


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("kind", [None, NativeStep, GraphStep])
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_constraint_holds_for_its_own_row(vlm, chunk, kind):
    step = None if kind is None else fast_step(vlm, kind)
    free = [request(words(key, 5 + key), key, max_new_tokens=20, **NO_STOP) for key in range(3)]
    bound = request(words(9, 7), "bound", max_new_tokens=21, constraint=Pattern, **NO_STOP)
    scheduler = Scheduler(vlm, 3, decode_step=step, prefill_chunk=chunk)
    outputs = serve(scheduler, [free[0], bound, *free[1:]])
    ids = outputs.pop("bound").token_ids
    assert_as_alone(vlm, free, outputs)
    assert len(ids) == 21
    whole = bound.input_ids.tolist()
    for number, token_id in enumerate(ids):  # what the uncached model takes among what is allowed
        if number % 8 >= 5:
            expected = Pattern.FORCED[number % 8 - 5]
        else:
            with torch.no_grad():
                hidden, _ = vlm.language_model(vlm.language_model.embed_tokens(torch.tensor([whole])))
                scores = vlm.language_model.logits(hidden)[0, -1]
            pattern = Pattern()
            pattern.taken = ids[:number]
            pattern.mask(scores)
            expected = int(scores.argmax())
        assert token_id == expected < VOCAB, number
        whole.append(token_id)
