"""`Scheduler`: the tokens of `generate` alone, at less work; failures and memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from generation.kv_cache import bytes_per_position
from generation.options import CacheMemoryError, GenerationOptions
from generation.requests import LazyRequest, Request
from generation.scheduler import Scheduler
from generation.steps import Step
from tests.invariants import run_all as run
from tests.prompts import (
    NO_STOP,
    PER_TILE,
    ImageBlock,
    count_reads,
    inputs_of,
    record,
    tiny_vlm,
    words,
)
from tests.tiny import VOCAB

STOPS = tuple(range(20, 40))  # so many that answers end at all lengths
SYSTEM = words(900, 40)  # a beginning that prompts may share without an image


def request(prompt: list[int], key, **options) -> Request:
    inputs = inputs_of(prompt)
    return Request(
        inputs["input_ids"][0],
        inputs.get("pixel_values"),
        options=GenerationOptions(**{"max_new_tokens": 12, "stop_token_ids": STOPS} | options),
        key=key,
    )


def uneven() -> list[Request]:
    """Prompts of 1 to 60 positions, limits of 1 to 30; no image, one, two; some share an image or more."""
    prompts = [
        words(1, 3),
        [*words(2, 2), ImageBlock(1), *words(3, 9)],
        [*words(2, 2), ImageBlock(1), *words(4, 2)],
        words(5, 1),
        [ImageBlock(2), ImageBlock(3), *words(6, 5)],
        [ImageBlock(2), ImageBlock(4), *words(6, 5)],
        [*SYSTEM, *words(7, 20)],
        [*words(2, 2), ImageBlock(1), *words(3, 9)],  # the second one again
        [*words(2, 2), ImageBlock(5), *words(3, 9)],  # the same ids, another image
        [*SYSTEM, ImageBlock(1), *words(8, 4)],
        [*SYSTEM, *words(9, 4)],
        [ImageBlock(2), ImageBlock(3), *words(6, 5), ImageBlock(2), *words(10, 2)],
    ]
    limits = [9, 1, 30, 5, 12, 3, 2, 17, 8, 25, 6, 4]
    return [
        request(prompt, key, max_new_tokens=limit)
        for key, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


def assert_as_alone(model, requests: list[Request], results: dict) -> None:
    """Each output is what `generate` gives its request alone."""
    assert sorted(results) == sorted(one.key for one in requests)
    for one in requests:
        done = results[one.key]
        alone = model.generate_detailed(one.input_ids[None], one.pixel_values, options=one.options)
        assert done.error is None
        assert (done.token_ids, done.stop_reason) == (alone.rows()[0], alone.stop_reasons[0]), one.key


# ------------------------------------------------------------------------------------------ the same tokens


def test_a_longer_request_grows_the_cache():
    """Past one step of 1,024 positions, with rows in the middle of their answers; views are outlived, too."""
    model = tiny_vlm(max_position_embeddings=1500, num_hidden_layers=1)
    requests = [
        request(words(key, 100), key, max_new_tokens=new, **NO_STOP) for key, new in enumerate((60, 2))
    ]
    requests += [request(words(7, 1000), 2, max_new_tokens=80, **NO_STOP), request(words(8, 5), 3)]
    scheduler = Scheduler(model, 2)
    sizes, results = [], {}
    for done in scheduler.run(requests):
        sizes.append(scheduler.kv_cache_bytes // bytes_per_position(model.language_model))
        results[done.key] = done
    assert_as_alone(model, requests, results)
    assert sizes[0] == 2 * 1024 and sizes[-1] == 2 * 1500


def test_a_long_request_s_memory_is_given_back():
    """When whoever runs the scheduler has nothing to do; answers stay right."""
    model = tiny_vlm(max_position_embeddings=3000, num_hidden_layers=1)
    long = [request(words(1, 2500), "long", max_new_tokens=2)]
    scheduler = Scheduler(model, 2)
    base = 2 * 1024 * bytes_per_position(model.language_model)
    assert_as_alone(model, long, {output.key: output for output in scheduler.run(long)})
    assert scheduler.kv_cache_bytes > 2 * base
    scheduler.give_back()
    short = [request(words(key, 5 + key), key, max_new_tokens=4 + key) for key in range(20)]
    assert_as_alone(model, short, {output.key: output for output in scheduler.run(short)})
    assert scheduler.kv_cache_bytes == base


# ------------------------------------------------------------------------------------------------ less work


def test_a_slot_is_used_again_at_once_and_the_tail_runs_narrow(vlm):
    """Most answers short, a few long, as in the benchmark: a static batch waits for its longest row."""
    limits = [4, 5, 40, 3, 6, 4, 30, 5, 3, 4, 50, 6]
    requests = [
        request(words(key, 5 + key), key, max_new_tokens=limit, **NO_STOP) for key, limit in enumerate(limits)
    ]
    widths, step = [], Step(vlm.language_model)
    chunk = step.chunk
    step.chunk = lambda ids, *a: widths.append(len(ids)) or chunk(ids, *a)
    results, scheduler = run(vlm, requests, 4, decode_step=step)
    assert_as_alone(vlm, requests, results)
    static = sum(max(limits[first : first + 4]) - 1 for first in range(0, len(limits), 4))
    assert len(widths) < 0.6 * static
    assert sum(widths) == sum(limits) - len(limits)  # no row is computed for nothing
    assert widths == sorted(widths, reverse=True) and widths[0] == 4 and widths[-1] == 1
    assert scheduler.stats.new_tokens == sum(limits)


@pytest.mark.parametrize("slots", [1, 3])
def test_questions_about_one_image_encode_and_prefill_it_once(vlm, monkeypatch, slots):
    head = [*words(1, 3), ImageBlock(1), ImageBlock(2)]
    requests = [request([*head, *words(10 + key, 2 + key % 3)], key) for key in range(9)]
    passes, images = record(monkeypatch, vlm)
    results, scheduler = run(vlm, requests, slots)
    monkeypatch.undo()
    assert sum(images) == 2 == scheduler.stats.tiles_encoded
    questions = [2 + key % 3 for key in range(9)]
    shared = len(words(1, 3)) + 2 * PER_TILE
    # Random questions may share a first word, too.
    assert shared + sum(questions) - 9 <= scheduler.stats.prefilled <= shared + sum(questions)
    assert scheduler.stats.prefilled + scheduler.stats.reused == 9 * shared + sum(questions)
    assert sum(width for width in passes if width >= shared) == shared + questions[0]
    assert results[0].reused_tokens == 0 and all(results[key].reused_tokens >= shared for key in range(1, 9))
    assert_as_alone(vlm, requests, results)


def test_slots_that_are_free_at_the_same_step_share_nothing_they_do_not_hold(vlm):
    """The second pair begins alike, but in slots that still count the first pair's positions."""
    prompts = [words(1, 60), words(2, 60), [*words(3, 50), *words(4, 4)], [*words(3, 50), *words(5, 4)]]
    requests = [request(prompt, key, max_new_tokens=6, **NO_STOP) for key, prompt in enumerate(prompts)]
    results, _ = run(vlm, requests, 2)
    assert results[3].reused_tokens >= 50
    assert_as_alone(vlm, requests, results)


def test_prompts_are_not_padded_past_the_end_of_the_cache(vlm):
    """The second prompt's rest begins near the end; the third's, beside it, is longer than what is left."""
    long = words(1, 385)
    prompts = [[*long, *words(2, 3)], [*long, *words(3, 3)], words(4, 30)]
    requests = [request(prompt, key, max_new_tokens=5) for key, prompt in enumerate(prompts)]
    results, _ = run(vlm, requests, 3)
    assert results[1].reused_tokens >= 385
    assert_as_alone(vlm, requests, results)


def test_one_read_from_the_device_for_a_step(vlm):
    """New tokens and the largest logits, which say whether all are finite, are waited for together; nothing
    else is read."""
    counts = []
    with count_reads() as reads:
        for new in (5, 15):
            reads.clear()
            requests = [
                request(words(key, 3 + key), key, max_new_tokens=new, temperature=key / 2, seed=1, **NO_STOP)
                for key in range(3)
            ]
            list(Scheduler(vlm, 3).run(requests))
            counts.append(len(reads))
    assert counts[1] - counts[0] == 2 * 10


# ------------------------------------------------------------------------------------------------- failures


def bad_requests(vlm) -> dict[str, Request | LazyRequest]:
    good = request([ImageBlock(1), *words(1, 3)], None)

    def unreadable():
        raise OSError("photo.jpg: cannot be read")

    def wrong():
        raise ValueError("a bad question")

    def bad(**fields):
        return replace(good, **fields)

    options = good.options
    return {
        "cannot be read": LazyRequest("cannot be read", unreadable),
        "a bad question": LazyRequest("a bad question", wrong),
        "image placeholders": bad(pixel_values=None),
        "images give": bad(pixel_values=good.pixel_values.repeat(1, 2, 1, 1, 1)),
        "expected tiles of": bad(pixel_values=good.pixel_values[..., :8]),
        "pixel_attention_mask": bad(pixel_attention_mask=torch.ones(1, 1, 3, 3)),
        "expected ids": bad(input_ids=torch.tensor([VOCAB])),
        "at least one token": bad(input_ids=torch.tensor([], dtype=torch.int64), pixel_values=None),
        "context holds 400": bad(options=replace(options, max_new_tokens=394)),
        "num_return_sequences": bad(options=replace(options, num_return_sequences=2)),
        "use_cache": bad(options=replace(options, use_cache=False)),
    }


@pytest.mark.parametrize("slots", [1, 3])
def test_a_bad_request_fails_alone(vlm, slots):
    bad = bad_requests(vlm)
    good = uneven()
    mixed = [replace(one, key=key) if isinstance(one, Request) else one for key, one in bad.items()] + good
    random.Random(slots).shuffle(mixed)
    results, _ = run(vlm, mixed, slots)
    for key in bad:
        done = results.pop(key)
        assert key in str(done.error) and (done.token_ids, done.stop_reason) == ([], "error")
    assert_as_alone(vlm, good, results)


def test_a_programming_error_is_not_hidden(vlm):
    def broken():
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        run(vlm, [*uneven(), LazyRequest("x", broken)])
    step = Step(vlm.language_model)
    step.chunk = lambda *a: (_ for _ in ()).throw(ValueError("a bug"))
    scheduler = Scheduler(vlm, 2, decode_step=step)
    with pytest.raises(ValueError):
        list(scheduler.run(uneven()))


def test_a_run_that_was_given_up_leaves_the_scheduler_usable(vlm):
    scheduler, requests = Scheduler(vlm, 3), uneven()
    results = scheduler.run(requests)
    next(results)
    with pytest.raises(ValueError):
        next(scheduler.run(uneven()))
    results.close()
    assert_as_alone(vlm, requests, {done.key: done for done in scheduler.run(requests)})
    assert torch.is_grad_enabled()


# --------------------------------------------------------------------------------------------------- memory


def test_memory_is_counted_and_more_than_there_is_refused_up_front(vlm, monkeypatch):
    text = vlm.config.text
    needed = 5 * 400 * 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
    monkeypatch.setattr("generation.memory.available_bytes", lambda device: needed)
    scheduler = Scheduler(vlm, 5)
    assert f"5 slots of 400 positions: {needed / 2**20:.1f} MiB" in str(scheduler.cache)
    assert scheduler.kv_cache_bytes == 0  # nothing is taken before there is a request
    list(scheduler.run([request(words(1, 3), 0)]))
    assert scheduler.kv_cache_bytes == needed
    with pytest.raises(CacheMemoryError):
        Scheduler(vlm, 6)
    for bad in (0, 2.5):
        with pytest.raises(ValueError):
            Scheduler(vlm, bad)


def test_a_request_that_needs_more_than_the_memory_fails_alone(monkeypatch):
    model = tiny_vlm(max_position_embeddings=1500, num_hidden_layers=1)
    each = bytes_per_position(model.language_model)
    requests = [request(words(1, 5), 0), request(words(2, 1100), 1), request(words(3, 5), 2)]
    scheduler = Scheduler(model, 2)
    left = lambda device: 2 * 1024 * each - scheduler.kv_cache_bytes
    monkeypatch.setattr("generation.memory.available_bytes", left)
    results = {output.key: output for output in scheduler.run(requests)}
    error = results.pop(1).error
    assert isinstance(error, CacheMemoryError) and f"{2 * 1500 * each} bytes" in str(error)
    assert_as_alone(model, [requests[0], requests[2]], results)
