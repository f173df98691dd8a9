"""`Scheduler` at its limits: requests that fail, runs that are given up, memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from generation.decoding import NotFiniteError
from generation.kv_cache import CacheMemoryError, available_bytes, cgroup_available
from generation.scheduler import LazyRequest, Request, Scheduler
from tests.batches import assert_as_alone, request, run, uneven
from tests.prompts import ImageBlock, tiny_vlm, words
from tests.tiny import VOCAB


@pytest.fixture(scope="module")
def vlm():
    return tiny_vlm()


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
        "expected 0 to": bad(input_ids=torch.tensor([VOCAB])),
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
    results, scheduler = run(vlm, mixed, slots)
    for key in bad:
        done = results.pop(key)
        assert key in str(done.error) and (done.token_ids, done.stop_reason) == ([], "error")
    assert_as_alone(vlm, good, results)
    assert (scheduler.stats.failed, scheduler.stats.completed) == (len(bad), len(good))


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_logits_that_are_not_finite_fail_alone(slots):
    """Also behind them: a later request in the same slot must not meet NaN, not even masked."""
    model = tiny_vlm()
    poison = 77
    with torch.no_grad():
        model.language_model.embed_tokens.weight[poison] = float("nan")
        model.language_model.lm_head.weight[poison] = 0  # no answer holds it
    good = [request([word % poison for word in words(key, 4 + key)], key) for key in range(6)]
    bad = request([1, 2, poison, *range(3, 40)], "bad", max_new_tokens=50)
    results, _ = run(model, [good[0], bad, *good[1:]], slots)
    assert isinstance(results.pop("bad").error, NotFiniteError)
    assert_as_alone(model, good, results)


def test_a_programming_error_is_not_hidden(vlm):
    def broken():
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        run(vlm, [*uneven(), LazyRequest("x", broken)])
    scheduler = Scheduler(vlm, 2, decode_step=lambda *a: (_ for _ in ()).throw(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        list(scheduler.run(uneven()))


def test_a_run_that_was_given_up_leaves_the_scheduler_usable(vlm):
    scheduler = Scheduler(vlm, 3)
    results = scheduler.run(uneven())
    next(results)
    with pytest.raises(ValueError, match="running already"):
        next(scheduler.run(uneven()))
    results.close()
    requests = uneven()
    assert_as_alone(vlm, requests, {done.key: done for done in scheduler.run(requests)})
    assert torch.is_grad_enabled()


def test_nothing_to_do(vlm):
    assert list(Scheduler(vlm).run([])) == []
    only_bad = [bad_requests(vlm)["a bad question"]] * 3
    assert [str(done.error) for done in Scheduler(vlm, 2).run(only_bad)] == ["a bad question"] * 3


# --------------------------------------------------------------------------------------------------- memory


def test_the_plan_counts_bytes(vlm):
    scheduler = Scheduler(vlm, 5, max_bytes=10**9)
    plan, text = scheduler.budget, vlm.config.text
    per_position = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * 4
    assert (plan.needed, plan.available) == (5 * 400 * per_position, 10**9)
    assert scheduler.kv_cache_bytes == 0  # nothing is taken before there is a request
    list(scheduler.run([request(words(1, 3), 0)]))
    assert scheduler.kv_cache_bytes == plan.needed
    assert "5 slots of 400 positions" in str(plan) and "953.7 MiB" in str(plan)


def test_more_than_the_memory_is_refused_up_front(vlm, monkeypatch):
    needed = Scheduler(vlm, 5).budget.needed
    assert Scheduler(vlm, 5, max_bytes=needed)
    with pytest.raises(
        CacheMemoryError, match=f"5 slots of 400 positions need {needed} bytes.*{needed - 1} are available"
    ):
        Scheduler(vlm, 5, max_bytes=needed - 1)
    with pytest.raises(CacheMemoryError, match="available"):
        Scheduler(vlm, 10**12)
    assert Scheduler(vlm, 5, max_bytes=needed // 2, context=200)
    with pytest.raises(CacheMemoryError):
        Scheduler(vlm, 5, max_bytes=needed // 2, context=201)
    for bad in ({"slots": 0}, {"context": 401}, {"slots": 2.5}):
        with pytest.raises(ValueError, match="expected an integer"):
            Scheduler(vlm, **bad)


def test_a_request_that_needs_more_than_the_memory_fails_alone():
    model = tiny_vlm(max_position_embeddings=1500, num_hidden_layers=1)
    plan = Scheduler(model, 2).budget
    requests = [request(words(1, 5), 0), request(words(2, 1100), 1), request(words(3, 5), 2)]
    results, scheduler = run(model, requests, 2, max_bytes=plan.needed)
    error = results.pop(1).error
    assert isinstance(error, CacheMemoryError) and f"{2 * 1500 * plan.bytes_per_position} bytes" in str(error)
    assert_as_alone(model, [requests[0], requests[2]], results)
    assert scheduler.kv_cache_bytes == plan.needed


def test_control_groups_leave_what_their_limits_say(tmp_path):
    """Both versions, any depth, and a group that a container shows as the root."""

    def group(folder, names, limit, used, droppable):
        folder.mkdir(parents=True)
        for name, text in zip(names, (limit, used, f"anon 7\n{names[3]} {droppable}"), strict=False):
            (folder / name).write_text(f"{text}\n")

    def left(membership, root=tmp_path):
        (root / "proc/self").mkdir(parents=True, exist_ok=True)
        (root / "proc/self/cgroup").write_text(membership)
        return cgroup_available(root)

    second = ("memory.max", "memory.current", "memory.stat", "inactive_file")
    first = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file")
    mount = tmp_path / "sys/fs/cgroup"
    group(mount / "a", second, 1000, 700, 50)
    group(mount / "a/b", second, "max", 600, 0)
    group(mount / "memory/c", first, 900, 1000, 20)
    group(mount / "memory/c/d", first, 5000, 1000, 30)
    group(tmp_path / "container/sys/fs/cgroup", second, 1000, 700, 50)
    assert left("0::/a/b\n") == [350]
    assert left("5:cpu,memory:/c/d\n3:cpu:/a\n0::/\n") == [4030, 0]
    assert left("0::/docker/not/seen/here\n", tmp_path / "container") == [350]
    assert left("") == []
    (mount / "memory/c/d/memory.stat").unlink()
    assert left("5:memory:/c/d\n") == [4000, 0]  # nothing says which files could be dropped


def test_memory_that_is_free_here():
    free = available_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50
