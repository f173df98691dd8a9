"""Behind the web page: the thread in which models work, and the desk where questions are asked."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest
from PIL import Image

import app
from inference.checkpoint import open_checkpoint
from tests.pages import EMBEDDED, full, make_desk, never_stopping
from tests.waiting import PATIENCE, wait_for
from web.asking import Desk
from web.limits import PageLimits
from web.model_thread import ModelThread
from web.models import Models
from web.visitors import Asked, Visitor, Visitors

ASSETS = app.ROOT / "assets"
EXAMPLE, CUP, THREE, WOLF = (str(ASSETS / f"{name}.png") for name in ("example", "cup", "three", "wolf"))
STAR = Asked((EXAMPLE,), "What colour is the star?", EMBEDDED)


@pytest.fixture(scope="module")
def desk():
    desk = make_desk()
    yield desk
    desk.thread.close()


@pytest.fixture(scope="module")
def slow_desk(tmp_path_factory):
    desk = make_desk(never_stopping(tmp_path_factory.mktemp("babbling") / "model"), slow=True)
    desk.models.open(desk.models.default)
    yield desk
    desk.thread.close()


def views(desk, asked: Asked, visitor: Visitor | None = None) -> list:
    """Every view of one question."""

    async def collect():
        return [view async for view in desk.ask(visitor or Visitor(), asked)]

    return asyncio.run(collect())


def changed(asked: Asked, **changes) -> Asked:
    return Asked(**vars(asked) | changes)


# ------------------------------------------------------------------------------------------ model thread
def test_answers_take_turns_and_the_next_waits():
    thread, order = ModelThread(at_once=2), []

    def counting(name):
        for step in range(3):
            order.append((name, step))
            yield step
        return name

    gate = threading.Event()
    first = thread.begin(lambda: iter_then(gate))
    tasks = [thread.begin(lambda name=name: counting(name)) for name in "abc"]
    gate.set()
    assert all(task.wait(PATIENCE) for task in (first, *tasks))
    assert [task.result() for task in tasks] == list("abc") and tasks[0].take() == [0, 1, 2]
    places = {name: [order.index((name, step)) for step in range(3)] for name in "abc"}
    assert places["c"][0] > min(places["a"][2], places["b"][2])  # two at once
    assert all(steps == sorted(steps) for steps in places.values())
    thread.close()


def iter_then(gate: threading.Event):
    gate.wait(PATIENCE)
    yield


def test_a_cancelled_task_is_closed_and_let_go_and_an_error_is_its_own():
    thread, closed = ModelThread(at_once=1), threading.Event()

    class Heavy:
        pass

    heavy = Heavy()
    gone = weakref.ref(heavy)

    def endless(held):
        try:
            while True:
                time.sleep(0.001)
                yield held is not None
        finally:
            closed.set()

    def broken():
        yield 1
        raise ValueError("mine")

    task = thread.begin(lambda held=heavy: endless(held))
    waiting = thread.begin(broken)
    del heavy
    assert wait_for(task.take) and waiting.before == 1
    never = thread.begin(broken)
    never.cancel()
    assert never.ended and never.result() is None
    task.cancel()
    assert task.wait(PATIENCE) and closed.is_set() and task.result() is None
    assert waiting.wait(PATIENCE) and waiting.take() == [1]
    with pytest.raises(ValueError, match="mine"):
        waiting.result()
    assert wait_for(lambda: gc.collect() is not None and gone() is None)
    thread.close()


# ------------------------------------------------------------------------------------------------- desk
def test_a_question_is_answered_and_measured(desk):
    seen = views(desk, STAR)
    last = seen[-1]
    assert [exchange.answers for exchange in last.log] == [["blue"]] and last.log[0].ended == ["stop"]
    assert not last.busy and last.notice == "" and all(view.busy for view in seen[:-1])
    assert last.made["first_words"] > 0 and last.made["kv_cache_bytes"] > 0
    assert last.made["prompt_tokens"] > last.made["reused_tokens"] == 0


def test_a_second_question_reuses_the_image_and_another_image_does_not(desk):
    visitor = Visitor()
    views(desk, STAR, visitor)
    word = views(desk, changed(STAR, question="What word do you see?"), visitor)[-1]
    assert word.log[1].answers == ["tree"] and word.log[1].images == ()
    assert word.made["reused_tokens"] > word.made["image_tokens"]
    assert len(visitor.conversation.turns) == 1  # the first question is not in the second one's prompt
    cup = views(desk, changed(STAR, images=(CUP,), question="What is the printed word?"), visitor)[-1]
    assert cup.log[2].answers == ["cup"] and cup.log[2].images == (CUP,)
    assert cup.made["reused_tokens"] < cup.made["image_tokens"]


def test_a_remembered_conversation_grows_and_is_taken_back(desk):
    visitor, again = Visitor(), changed(STAR, remember=True)
    views(desk, again, visitor)
    second = views(desk, again, visitor)[-1]
    assert len(visitor.conversation.turns) == 2
    assert second.made["prefilled_tokens"] < second.made["prompt_tokens"] / 2
    view = asyncio.run(desk.undo(visitor))
    assert len(view.log) == len(visitor.conversation.turns) == 1
    asyncio.run(desk.undo(visitor))
    assert asyncio.run(desk.undo(visitor)).notice
    assert views(desk, again, visitor)[-1].log[0].answers == ["blue"]  # with its image again
    assert asyncio.run(desk.clear(visitor)).log == [] and visitor.kept_bytes == 0


def test_several_answers_and_their_seed(desk):
    asked = changed(STAR, question="Describe the picture.", answers=3, temperature=1.5, seed=7)
    first, second = views(desk, asked)[-1], views(desk, asked)[-1]
    assert first.log[0].answers == second.log[0].answers and len(set(first.log[0].answers)) > 1
    assert first.made["seed"] == 7 and first.log[0].ended == ["stop"] * 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"question": " \n"}, "Type a question"),
        ({"question": "a" * 5000}, "at most 4,000 characters, got 5,000"),
        ({"pictures": (EXAMPLE,) * 9}, "at most 8 at once, got 9"),
        ({"pictures": ()}, "at least one image, got none"),
        ({"pictures": (str(ASSETS / "decode.svg"),)}, "'decode.svg': expected an image"),
        ({"pictures": ("/nowhere/gone.png",)}, "'gone.png' is not kept here any more"),
        ({"model": "no/such-model"}, "expected one of"),
        ({"answers": 9}, "answers: expected 1 to 8, got 9"),
        ({"answers": None}, "answers: expected 1 to 8, got None"),
        ({"max_new_tokens": 10**9}, "max new tokens: expected 1 to 1024"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": "x"}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"question": "\ud800"}, "surrogate"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(desk, changes, expected):
    visitor = Visitor()
    last = views(desk, changed(STAR, **changes), visitor)[-1]
    assert last.failed and expected in last.notice and "\n" not in last.notice
    assert last.log == [] and not visitor.busy.locked()
    assert views(desk, STAR, visitor)[-1].log[0].answers == ["blue"]


def test_a_image_is_refused_by_its_header(desk, tmp_path):
    huge = tmp_path / "huge.png"
    Image.new("1", (6000, 6000)).save(huge)
    said = views(desk, changed(STAR, images=(str(huge),)))[-1].notice
    assert "at most 24,000,000 pixels" in said and said.endswith("shrink the image")


def test_an_answer_that_is_stopped_stays_as_far_as_it_went(slow_desk):
    asked = changed(STAR, model=slow_desk.models.default, max_new_tokens=1000)

    async def stop_in_the_middle(visitor):
        last = None
        async for view in slow_desk.ask(visitor, asked):
            if view.log and view.log[-1].answers[0].count(" ") > 3:
                visitor.cancel()
            last = view
        return last

    visitor = Visitor()
    last = asyncio.run(stop_in_the_middle(visitor))
    assert not last.busy and last.log[0].ended == ["stopped"] and last.log[0].answers[0]
    assert len(last.made["token_ids"][0]) < 500 and not visitor.busy.locked()


def test_another_question_and_undo_interrupt_the_answer(slow_desk):
    asked = changed(STAR, model=slow_desk.models.default, max_new_tokens=1000)

    async def drain(stream):
        return [view async for view in stream][-1]

    async def both(visitor):
        first = slow_desk.ask(visitor, asked)
        await anext(first)
        task, rest = visitor.task, asyncio.create_task(drain(first))
        second = slow_desk.ask(visitor, changed(asked, question="And now?"))
        await anext(second)
        ended, other = task.ended, visitor.task
        end = asyncio.create_task(drain(second))
        undone = await slow_desk.undo(visitor)
        return ended, other.ended, undone, await rest, await end

    visitor = Visitor()
    ended, other_ended, undone, *_ = asyncio.run(both(visitor))
    assert ended and other_ended and not visitor.busy.locked()
    assert "And now?" not in [exchange.question for exchange in undone.log]


async def first_and_last(desk, visitor, asked, meanwhile):
    """The last view of a question during whose first view something was done, and what that gave."""
    stream = desk.ask(visitor, asked)
    await anext(stream)
    did = asyncio.create_task(meanwhile())
    await asyncio.sleep(0)  # it has cancelled, and waits
    last = [view async for view in stream][-1]
    return last, await did


def test_undo_before_the_first_word_leaves_the_answer_before(desk):
    visitor = Visitor()
    views(desk, STAR, visitor)
    held, (kept,) = visitor.conversation, visitor.log
    asked = changed(STAR, question="And now?", images=(CUP,), remember=True)
    with full(desk.thread):
        last, undone = asyncio.run(first_and_last(desk, visitor, asked, lambda: desk.undo(visitor)))
    assert undone.log == [kept] == visitor.log and undone.question == "And now?"
    assert len(held.turns) == 1 and visitor.images == (EXAMPLE,)
    assert (last.notice, last.question, last.busy) == ("Stopped before the first word.", "And now?", False)
    undone = asyncio.run(desk.undo(visitor))
    assert undone.log == [] and undone.question == STAR.question and visitor.images == ()


def test_undo_goes_back_to_the_images_before(desk):
    visitor, cup = Visitor(), changed(STAR, images=(CUP,), question="What is the printed word?")
    views(desk, STAR, visitor)
    views(desk, cup, visitor)
    asyncio.run(desk.undo(visitor))
    assert views(desk, cup, visitor)[-1].log[1].images == (CUP,)  # shown again, as it is new again


def test_a_model_that_was_dropped_while_it_answered_is_let_go():
    people = Visitors()
    models = GatedModels([EMBEDDED], any_model=True, closed=people.close_model)
    models.gate.set()
    desk = Desk(models, ModelThread(), people, PageLimits())
    visitor = people.get("a")

    async def dropped_in_the_middle():
        async for _ in desk.ask(visitor, changed(STAR, model="some/one")):
            if visitor.task is not None and models.held("some/one") is not None:
                models.open("some/other")

    asyncio.run(dropped_in_the_middle())
    assert [exchange.answers for exchange in visitor.log] == [["blue"]]
    assert models.held("some/one") is None and visitor.conversation is None and not people._features
    desk.thread.close()


def test_caches_stay_within_their_bytes_and_visitors_within_their_number(desk):
    visitors = Visitors(most=3, kept_bytes=5 * 2**20)
    desk.visitors, before = visitors, desk.visitors
    for name in "abcdef":
        views(desk, STAR, visitors.get(name))
        assert visitors.kept_bytes <= 5 * 2**20 and len(visitors) <= 3
    held = visitors.get("f")
    assert held.kept_bytes > 0 and visitors.get("a").log == []
    visitors.remove("f")
    assert held.kept_bytes == 0
    desk.visitors = before


class GatedModels(Models):
    """Models of which one takes until `gate` is set to open."""

    def __init__(self, *names, **more):
        super().__init__(*names, **more)
        self.opened, self.gate = threading.Event(), threading.Event()
        self.checkpoint = open_checkpoint(EMBEDDED, device="cpu")

    def _load(self, name):
        if name == "far":
            self.opened.set()
            assert self.gate.wait(PATIENCE)
        return replace(self.checkpoint)


def test_an_open_model_answers_while_another_one_is_being_opened():
    models = GatedModels(["near", "far"])
    near = models.open("near")
    far = threading.Thread(target=models.open, args=("far",))
    far.start()
    try:
        assert models.opened.wait(PATIENCE) and models.held("far") is None
        got = []
        asking = threading.Thread(target=lambda: got.append(models.open("near")), daemon=True)
        asking.start()
        asking.join(PATIENCE)
        assert got and got[0] is near and models.held("near") is near
    finally:
        models.gate.set()
        far.join()
    assert models.held("far") is models.open("far") and models.holds(models.held("far"))
