"""`Scheduler` against `generate` alone: the same tokens whatever shares the slots, at less work."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from generation import kv_cache as kv
from generation.decoding import eager_step
from generation.fast.choose_step import set_precision
from generation.prefix import FeatureCache
from generation.scheduler import LazyRequest, Scheduler
from tests.batches import SYSTEM, alone, assert_as_alone, request, run, uneven
from tests.prompts import NO_STOP, PER_TILE, TILE_BYTES, ImageBlock, inputs_of, record, tiny_vlm, words


@pytest.fixture(scope="module")
def vlm():
    return tiny_vlm()


# ------------------------------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize("slots, shuffle", [(1, None), (1, 1), (3, None), (3, 1), (3, 2), (8, 3), (20, None)])
def test_every_request_as_alone(vlm, slots, shuffle):
    requests = uneven()
    if shuffle is not None:
        random.Random(shuffle).shuffle(requests)
    results, _ = run(vlm, requests, slots)
    assert_as_alone(vlm, requests, results)
    assert {done.stop_reason for done in results.values()} == {"stop", "length"}
    lengths = {one.key: len(one.input_ids) for one in requests}
    assert {key: done.prompt_tokens for key, done in results.items()} == lengths


SAMPLING = (
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3, "top_p": 0.9, "seed": 4},
    {},
    {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 5},
    {"repetition_penalty": 1.5},
)


@pytest.mark.parametrize("slots", [1, 4])
def test_sampled_rows_as_alone_whatever_their_neighbours_want(vlm, slots):
    requests = [
        replace(one, options=replace(one.options, **SAMPLING[one.key % len(SAMPLING)])) for one in uneven()
    ]
    assert_as_alone(vlm, requests, run(vlm, requests, slots)[0])
    reseeded = [replace(one, options=replace(one.options, seed=99)) for one in requests]
    changed = run(vlm, reseeded, slots)[0]
    assert any(changed[one.key].token_ids != alone(vlm, one)[0] for one in requests)


def test_without_a_seed_rows_draw_from_torchs_generator(vlm):
    requests = [request(words(1, 4), key, temperature=1.0, **NO_STOP) for key in range(3)]
    torch.manual_seed(1)
    first = run(vlm, requests)[0]
    assert len({tuple(done.token_ids) for done in first.values()}) > 1
    torch.manual_seed(1)
    assert run(vlm, requests)[0] == first


@pytest.mark.parametrize("slots", [1, 3])
def test_with_the_image_in_front(slots):
    model = tiny_vlm("prefix")
    prompts = [
        [ImageBlock(1), *words(1, 4)],
        words(2, 6),
        [ImageBlock(1), *words(3, 2)],
        [ImageBlock(2), *words(1, 4)],
    ]
    requests = [request(prompt, key, in_front=True) for key, prompt in enumerate(prompts)]
    results, scheduler = run(model, requests, slots)
    assert_as_alone(model, requests, results)
    assert scheduler.stats.tiles_encoded == 3 - (slots == 3)  # one slot has forgotten image 1 by then
    assert results[0].prompt_tokens == PER_TILE + 4


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
        sizes.append(scheduler.kv_cache_bytes // scheduler.budget.bytes_per_position)
        results[done.key] = done
    assert_as_alone(model, requests, results)
    assert sizes[0] == 2 * 1024 and sizes[-1] == 2 * 1500


def test_another_decode_step_is_used(vlm):
    widths, eager = [], eager_step(vlm.language_model)

    def step(token_ids, kv_cache, start_pos):
        assert token_ids.shape == (kv.rows(kv_cache), 1)
        widths.append(len(token_ids))
        return eager(token_ids, kv_cache, start_pos)

    requests = uneven()
    results, scheduler = run(vlm, requests, 4, decode_step=step)
    assert_as_alone(vlm, requests, results)
    assert len(widths) == scheduler.stats.decode_steps and sum(widths) == scheduler.stats.decoded_rows


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_a_cache_in_fewer_bits_than_the_activations(precision):
    model = tiny_vlm()
    set_precision(model, precision)
    requests = [request(words(key, 3 + 5 * key), key, **NO_STOP) for key in range(5)]
    results, scheduler = run(model, requests, 3)
    assert results == run(model, requests, 1)[0] and not any(done.error for done in results.values())
    text = model.config.text
    per_position = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 2
    assert scheduler.kv_cache_bytes == scheduler.budget.needed == 3 * 400 * per_position


# ------------------------------------------------------------------------------------------------ less work


def test_a_slot_is_used_again_at_once_and_the_tail_runs_narrow(vlm):
    """Most answers short, a few long, as in the benchmark: a static batch waits for its longest row."""
    limits = [4, 5, 40, 3, 6, 4, 30, 5, 3, 4, 50, 6]
    requests = [
        request(words(key, 5 + key), key, max_new_tokens=limit, **NO_STOP) for key, limit in enumerate(limits)
    ]
    widths, eager = [], eager_step(vlm.language_model)
    step = lambda ids, cache, start: widths.append(len(ids)) or eager(ids, cache, start)
    results, scheduler = run(vlm, requests, 4, decode_step=step)
    assert_as_alone(vlm, requests, results)
    static = sum(max(limits[first : first + 4]) - 1 for first in range(0, len(limits), 4))
    assert len(widths) < 0.6 * static
    assert sum(widths) == sum(limits) - len(limits)  # no row is computed for nothing
    assert widths == sorted(widths, reverse=True) and widths[0] == 4 and widths[-1] == 1
    assert scheduler.stats.new_tokens == sum(limits) and scheduler.stats.completed == len(limits)


def test_requests_are_taken_when_there_is_a_slot(vlm):
    taken = []

    def endless():
        for key in range(1_000_000):
            taken.append(key)
            yield LazyRequest(key, lambda key=key: request(words(key, 4), None, max_new_tokens=3, **NO_STOP))

    results = Scheduler(vlm, 2).run(endless())
    first = [next(results) for _ in range(5)]
    assert [done.key for done in first] == [0, 1, 2, 3, 4] and len(taken) <= 6


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_questions_about_one_image_encode_and_prefill_it_once(vlm, monkeypatch, slots):
    head = [*words(1, 3), ImageBlock(1), ImageBlock(2)]
    requests = [request([*head, *words(10 + key, 2 + key % 3)], key) for key in range(9)]
    passes, images, _ = record(monkeypatch, vlm)
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


def test_a_image_is_known_by_its_pixels_and_its_mask(vlm):
    """Same ids throughout: only the first and the last request have an image in common."""
    one = request([ImageBlock(1), *words(1, 3)], 0)
    other = request([ImageBlock(2), *words(1, 3)], 1)
    mask = torch.ones(1, 1, *one.pixel_values.shape[-2:], dtype=torch.int64)
    whole = replace(one, pixel_attention_mask=mask, key=3)
    mask = mask.clone()
    mask[..., 8:] = 0
    masked = replace(one, pixel_attention_mask=mask, key=2)
    results, scheduler = run(vlm, [one, other, masked, whole], 4)
    assert [results[key].reused_tokens for key in range(4)] == [0, 0, 0, PER_TILE + 2]
    assert scheduler.stats.tiles_encoded == 3
    own = results.pop(2).token_ids
    assert_as_alone(vlm, [one, other, whole], results)
    expected = vlm.generate_detailed(
        masked.input_ids[None], masked.pixel_values, mask, **vars(masked.options)
    )
    assert own == expected.rows()[0] != results[0].token_ids


def test_several_answers_to_one_prompt_prefill_it_once(vlm):
    prompt = [*SYSTEM, ImageBlock(1), *words(1, 6)]
    requests = [request(prompt, key, temperature=1.0, seed=7 + key, **NO_STOP) for key in range(6)]
    results, scheduler = run(vlm, requests, 4)
    forked = vlm.generate(
        **inputs_of(prompt), temperature=1.0, seed=7, num_return_sequences=6, max_new_tokens=12, **NO_STOP
    )
    assert [results[key].token_ids for key in range(6)] == forked.tolist()
    assert scheduler.stats.prefilled == len(requests[0].input_ids) + 5


def test_prompts_of_similar_length_are_prefilled_together(vlm, monkeypatch):
    calls, forward = [], vlm.language_model.forward
    monkeypatch.setattr(
        vlm.language_model, "forward", lambda x, **k: calls.append(tuple(x.shape[:2])) or forward(x, **k)
    )
    lengths = (70, 75, 80, 20, 10)
    requests = [request(words(key, length), key, max_new_tokens=1) for key, length in enumerate(lengths)]
    results, _ = run(vlm, requests, 5)
    assert calls == [(3, 80), (2, 20)]
    monkeypatch.undo()
    assert_as_alone(vlm, requests, results)


def test_a_slot_forgets_what_its_next_request_has_overwritten(vlm):
    long = words(1, 100)
    prompts = [long, long[:40], long]  # the second one's answer stands where the first one's prompt did
    requests = [request(prompt, key, **NO_STOP) for key, prompt in enumerate(prompts)]
    results, _ = run(vlm, requests, 1)
    assert [results[key].reused_tokens for key in range(3)] == [0, 39, 40]
    assert_as_alone(vlm, requests, results)


def test_prompts_are_not_padded_past_the_end_of_the_cache(vlm):
    """The second prompt's rest begins near the end; the third's, beside it, is longer than what is left."""
    long = words(1, 385)
    prompts = [[*long, *words(2, 3)], [*long, *words(3, 3)], words(4, 30)]
    requests = [request(prompt, key, max_new_tokens=5) for key, prompt in enumerate(prompts)]
    results, _ = run(vlm, requests, 3)
    assert results[1].reused_tokens >= 385
    assert_as_alone(vlm, requests, results)


def test_a_feature_cache_outlives_the_slots(vlm):
    images = [1, 2, 3, 1]
    requests = [request([ImageBlock(seed), *words(1, 3)], key) for key, seed in enumerate(images)]
    kept = FeatureCache(vlm, 3 * TILE_BYTES)
    assert run(vlm, requests, 1)[1].stats.tiles_encoded == 4
    results, scheduler = run(vlm, requests, 1, feature_cache=kept)
    assert scheduler.stats.tiles_encoded == 3
    assert_as_alone(vlm, requests, results)


def test_one_read_back_a_step(vlm, monkeypatch):
    """New tokens and whether logits are finite come together; nothing else waits for the device."""
    reads, counts = [], []
    for name in ("item", "tolist", "__bool__", "__int__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, original=original: reads.append(1) or original(t))
    for new in (5, 15):
        reads.clear()
        requests = [
            request(words(key, 3 + key), key, max_new_tokens=new, temperature=key / 2, seed=1, **NO_STOP)
            for key in range(3)
        ]
        list(Scheduler(vlm, 3).run(requests))
        counts.append(len(reads))
    monkeypatch.undo()
    assert counts[1] - counts[0] == 10
