"""Behind the web page: the queue of the models' thread, questions from check to answer, what is kept."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from contextlib import aclosing
from dataclasses import replace

import pytest
from PIL import Image

from inference.checkpoint import RequestError, open_checkpoint
from tests.pages import CUP, EMBEDDED, EXAMPLE, full, make_service, never_stopping
from tests.waiting import PATIENCE
from web import service as service_module
from web.models import Models
from web.service import AskRequest, Service, ServiceLimits, Visitor

STAR = AskRequest((EXAMPLE,), "What colour is the star?", EMBEDDED)
WORD = replace(STAR, images=(CUP,), question="What is the printed word?")


@pytest.fixture(scope="module")
def service():
    service = make_service()
    yield service
    service.close()


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    service = make_service(never_stopping(tmp_path_factory.mktemp("babbling") / "model"), slow=True)
    service.models.open(service.models.default)
    yield service
    service.close()


def long_request(slow: Service) -> AskRequest:
    return replace(STAR, model=slow.models.default, max_new_tokens=1000)


def views(service, request: AskRequest, visitor: Visitor | None = None) -> list:
    """Every view of one question."""

    async def collect():
        return [view async for view in service.ask(visitor or Visitor(), request)]

    return asyncio.run(collect())


async def last_of(stream):
    return ([view async for view in stream] or [None])[-1]


# ---------------------------------------------------------------------------------------------- the queue
def test_generators_take_turns_and_the_others_wait_in_order(service, monkeypatch):
    monkeypatch.setattr(service_module, "BURST", 0.0)
    order = []

    def counting(name):
        for step in range(3):
            order.append((name, step))
            yield step

    async def collect(name):
        places, pieces = [], []
        async for got, place in service.run(Visitor(), counting(name)):
            pieces += got
            places.append(place)
        return pieces, places

    async def all_of_them():
        with full(service):
            tasks = [asyncio.create_task(collect(name)) for name in "ab"]
            await asyncio.sleep(0.1)
            gives_up = service.run(Visitor(), counting("gives up"))
            assert (await anext(gives_up)) == ([], 1)
            leaving = asyncio.create_task(gives_up.aclose())
            await asyncio.sleep(0)
            tasks += [asyncio.create_task(collect(name)) for name in "cd"]
            await asyncio.sleep(0.2)
        await leaving
        return await asyncio.gather(*tasks)

    monkeypatch.setattr(service, "_slots", asyncio.Semaphore(2))
    results = asyncio.run(all_of_them())
    assert [pieces for pieces, _ in results] == [[0, 1, 2]] * 4
    assert [max(places) for _, places in results] == [0, 0, 1, 2]
    when = {name: [order.index((name, step)) for step in range(3)] for name in "abcd"}
    assert when["b"][0] < when["a"][2]  # a and b in turns
    assert when["c"][0] > min(when["a"][2], when["b"][2])  # two at once


def test_cancelled_work_is_closed_and_let_go_and_an_error_is_its_own(service):
    closed = []

    class Heavy:
        pass

    def endless(held):
        try:
            while True:
                time.sleep(0.001)
                yield held is not None
        finally:
            closed.append(threading.current_thread().name)

    def broken():
        yield 1
        raise ValueError("mine")

    async def cancel_in_the_middle():
        visitor, heavy = Visitor(), Heavy()
        gone = weakref.ref(heavy)
        stream = service.run(visitor, endless(heavy))
        del heavy
        async for pieces, _ in stream:
            if pieces:
                visitor.cancel()
        async with aclosing(service.run(Visitor(), endless(None))) as other:  # broken off from outside
            while not (await anext(other))[0]:
                pass
        with pytest.raises(ValueError, match="mine"):
            await last_of(service.run(Visitor(), broken()))
        del stream
        gc.collect()
        return gone() is None

    assert asyncio.run(cancel_in_the_middle())
    assert len(closed) == 2 and all(name.startswith("models") for name in closed)


# ----------------------------------------------------------------------------------------------- answers
def test_a_question_is_answered_and_measured(service):
    seen = views(service, STAR)
    last = seen[-1]
    assert [exchange.answers for exchange in last.log] == [["blue"]]
    assert last.log[0].stop_reasons == ["stop"]
    assert not last.busy and last.notice == "" and all(view.busy for view in seen[:-1])
    stats = last.log[0].stats
    assert stats["first_words"] > 0 and stats["kv_cache_bytes"] > 0
    assert stats["prompt_tokens"] > stats["reused_tokens"] == 0


def test_a_second_question_reuses_the_image_and_another_image_does_not(service):
    visitor = Visitor()
    views(service, STAR, visitor)
    word = views(service, replace(STAR, question="What word do you see?"), visitor)[-1]
    assert word.log[1].answers == ["tree"] and word.log[1].images == ()
    assert word.log[1].stats["reused_tokens"] > word.log[1].stats["image_tokens"]
    assert len(visitor.conversation.turns) == 1  # the first question is not in the second one's prompt
    cup = views(service, WORD, visitor)[-1]
    assert cup.log[2].answers == ["cup"] and cup.log[2].images == (CUP,)
    assert cup.log[2].stats["reused_tokens"] < cup.log[2].stats["image_tokens"]
    asyncio.run(service.undo(visitor))
    assert views(service, WORD, visitor)[-1].log[2].images == (CUP,)  # new again, so shown again


def test_the_next_question_about_an_image_opens_it_no_more(service, monkeypatch):
    visitor, opened, load = Visitor(), [], service.load
    monkeypatch.setattr(service, "load", lambda path: opened.append(path) or load(path))
    for request, times in ((STAR, [1, 0]), (WORD, [1, 0])):
        for expected in times:
            answer = views(service, request, visitor)[-1].log[-1].answers
            assert len(opened) == expected and answer == views(service, request)[-1].log[-1].answers
            opened.clear()


def test_a_remembered_conversation_grows_and_is_undone(service):
    visitor, again = Visitor(), replace(STAR, remember=True)
    views(service, again, visitor)
    second = views(service, again, visitor)[-1]
    assert len(visitor.conversation.turns) == 2
    stats = second.log[1].stats
    assert stats["prefilled_tokens"] < stats["prompt_tokens"] / 2
    view = asyncio.run(service.undo(visitor))
    assert len(view.log) == len(visitor.conversation.turns) == 1
    asyncio.run(service.undo(visitor))
    assert asyncio.run(service.undo(visitor)).failed
    assert views(service, again, visitor)[-1].log[0].answers == ["blue"]  # with its image again
    assert asyncio.run(service.clear(visitor)).log == [] and visitor.kept_bytes == 0


def test_several_answers_and_their_seed(service):
    request = replace(STAR, question="Describe the picture.", answers=3, temperature=1.5, seed=7)
    first, second = views(service, request)[-1], views(service, request)[-1]
    assert first.log[0].answers == second.log[0].answers and len(set(first.log[0].answers)) > 1
    assert first.log[0].stats["seed"] == 7 and first.log[0].stop_reasons == ["stop"] * 3


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"question": " \n"}, "question"),
        ({"question": "a" * 5000}, "question"),
        ({"question": "\ud800"}, "surrogate"),
        ({"images": (EXAMPLE,) * 9}, "images"),
        ({"images": ()}, "image"),
        ({"images": (__file__,)}, "test_service.py"),
        ({"images": ("/nowhere/gone.png",)}, "gone.png"),
        ({"model": "no/such-model"}, "model"),
        ({"answers": 9}, "answers"),
        ({"answers": None}, "answers"),
        ({"max_new_tokens": 10**9}, "max_new_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": "x"}, "top_p"),
        ({"seed": -1}, "seed"),
    ],
)
def test_an_error_is_one_sentence_and_leaves_nothing(service, changes, field):
    visitor, request = Visitor(), replace(STAR, **changes)
    last = views(service, request, visitor)[-1]
    assert last.failed and field in last.notice and "\n" not in last.notice and last.returned is request
    assert last.log == [] and not visitor.busy.locked()


def test_an_image_is_refused_by_its_header(service, tmp_path):
    huge = tmp_path / "huge.png"
    Image.new("1", (6000, 6000)).save(huge)
    notice = views(service, replace(STAR, images=(str(huge),)))[-1].notice
    assert "pixels" in notice and "ImageLimits" not in notice


def test_a_stopped_answer_stays_as_far_as_it_went(slow):
    async def stop_in_the_middle(visitor):
        last = None
        async for view in slow.ask(visitor, long_request(slow)):
            if view.log and view.log[-1].answers[0].count(" ") > 3:
                visitor.cancel()
            last = view
        return last

    visitor = Visitor()
    last = asyncio.run(stop_in_the_middle(visitor))
    assert not last.busy and last.log[0].stop_reasons == ["stopped"] and last.log[0].answers[0]
    assert len(last.log[0].stats["token_ids"][0]) < 500 and not visitor.busy.locked()


def test_another_question_and_undo_interrupt_the_answer(slow):
    async def both(visitor):
        first = slow.ask(visitor, long_request(slow))
        await anext(first)
        rest = asyncio.create_task(last_of(first))
        second = slow.ask(visitor, replace(long_request(slow), question="And now?"))
        await anext(second)
        ended = rest.done()
        end = asyncio.create_task(last_of(second))
        undone = await slow.undo(visitor)
        return ended, undone, await end

    visitor = Visitor()
    ended, undone, _ = asyncio.run(both(visitor))
    assert ended and not visitor.busy.locked() and undone.returned.question == "And now?"
    assert "And now?" not in [exchange.request.question for exchange in undone.log]


def test_undo_before_the_first_word_leaves_the_answer_before(service):
    visitor = Visitor()
    views(service, STAR, visitor)
    conversation, (kept,) = visitor.conversation, visitor.log
    request = replace(WORD, remember=True)

    async def undo_at_once():
        stream = asyncio.create_task(last_of(service.ask(visitor, request)))
        await asyncio.sleep(0.1)
        undoing = asyncio.create_task(service.undo(visitor))
        await asyncio.sleep(0.1)
        return stream, undoing

    async def both():
        with full(service):
            stream, undoing = await undo_at_once()
        return await stream, await undoing

    last, undone = asyncio.run(both())
    assert undone.log == [kept] == visitor.log and undone.returned is request
    assert visitor.conversation is conversation and len(conversation.turns) == 1
    assert last.returned is request and not last.busy and visitor.images == (EXAMPLE,)
    assert asyncio.run(service.undo(visitor)).returned is STAR and visitor.images == ()


# ----------------------------------------------------------------------------------------- what is kept
class GatedModels(Models):
    """Models of which "far" takes until `gate` is set to open."""

    def __init__(self, *names, **more):
        super().__init__(*names, **more)
        self.opened, self.gate = threading.Event(), threading.Event()
        self.checkpoint = open_checkpoint(EMBEDDED, device="cpu")

    def _load(self, name):
        if name == "far":
            self.opened.set()
            assert self.gate.wait(PATIENCE)
        self._drop_guest()
        return replace(self.checkpoint)


def test_a_model_that_is_dropped_while_it_answers_is_let_go():
    service = Service(GatedModels([EMBEDDED], any_model=True))
    models, visitor = service.models, service.visitor("a")

    async def dropped_in_the_middle():
        async for view in service.ask(visitor, replace(STAR, model="some/one")):
            if view.log and models.held("some/one") is not None:
                models.open("some/other")

    asyncio.run(dropped_in_the_middle())
    assert [exchange.answers for exchange in visitor.log] == [["blue"]]
    assert models.held("some/one") is None and visitor.conversation is None and not service._features
    service.close()


def test_an_open_model_answers_while_another_one_is_being_opened():
    models = GatedModels(["near", "far"])
    near = models.open("near")
    far = threading.Thread(target=models.open, args=("far",))
    far.start()
    try:
        assert models.opened.wait(PATIENCE) and models.held("far") is None
        assert models.open("near") is near
    finally:
        models.gate.set()
        far.join()
    assert models.held("far") is models.open("far") and models.holds(models.held("far"))


def test_caches_visitors_and_open_pages_stay_within_their_bounds(service, monkeypatch):
    limits = ServiceLimits(max_visitors=3, max_kept_bytes=5 * 2**20, max_open=2)
    monkeypatch.setattr(service, "limits", limits)
    for name in "abcdef":
        views(service, STAR, service.visitor(name))
        assert service.kept_bytes <= 5 * 2**20 and len(service._visitors) <= 3
    kept = service.visitor("f")
    with service.connected("f"):
        assert kept.kept_bytes > 0 and service.visitor("a").log == []
    assert kept.kept_bytes == 0  # the page is closed
    with service.connected("a"), service.connected("b"):
        with pytest.raises(RequestError), service.connected("c"):
            pass
        for number in range(9):  # anybody can invent sessions: open pages stay
            service.visitor(f"invented {number}")
        assert "a" in service._visitors
