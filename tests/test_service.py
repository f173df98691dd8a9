"""Behind the web page: places in the queue, questions from check to answer, what is kept of visitors."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import replace

import pytest
from PIL import Image

from data.errors import ImageError
from data.images import load_image
from generation.options import GenerationOptions
from inference.checkpoint import RequestError, open_checkpoint
from inference.conversation import Conversation
from tests.pages import CUP, EMBEDDED, EXAMPLE, full, make_service, never_stopping
from tests.waiting import wait_for
from web import service as service_module
from web.engine import Engine, EngineLimits
from web.models import Models
from web.service import AskRequest, Service, ServiceLimits, Visitor, queue_notice

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
def test_visitors_wait_in_order_and_see_their_places(monkeypatch):
    monkeypatch.setattr(service_module, "ALIVE", 0.05)
    service = Service(Engine(Models([EMBEDDED], device="cpu"), EngineLimits(slots=1)))
    service.models.open(EMBEDDED)

    async def ask() -> list[str]:
        seen = [view async for view in service.ask(Visitor(), STAR)]
        assert seen[-1].log[0].answers == ["blue"]
        return [view.notice for view in seen]

    async def all_of_them() -> list[list[str]]:
        with full(service):
            tasks = []
            for _ in range(5):
                tasks.append(asyncio.create_task(ask()))
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)
        return await asyncio.gather(*tasks)

    notices = asyncio.run(all_of_them())
    service.close()
    # The images of the first two are being opened: they wait for no place.
    assert [queue_notice(place) in own for place, own in zip((1, 2, 3), notices[2:])] == [True] * 3


# ----------------------------------------------------------------------------------------------- answers
def test_a_question_is_answered_and_measured(service):
    seen = views(service, STAR)
    last = seen[-1]
    assert [exchange.answers for exchange in last.log] == [["blue"]]
    assert last.log[0].stop_reasons == ["stop"]
    assert not last.busy and last.notice == "" and all(view.busy for view in seen[:-1])
    stats = last.log[0].stats
    assert stats["first_words"] > 0 and stats["kv_cache_bytes"] > 0 and stats["decode_tokens_per_second"] > 0
    assert 0 <= stats["reused_tokens"] < stats["prompt_tokens"]
    another = views(service, STAR)[-1].log[0].stats  # another visitor, about the same image
    assert another["reused_tokens"] > another["image_tokens"]


def test_a_second_question_reuses_the_image(service):
    visitor = Visitor()
    views(service, STAR, visitor)
    word = views(service, replace(STAR, question="What word do you see?"), visitor)[-1]
    assert word.log[1].answers == ["tree"] and word.log[1].images == ()
    assert word.log[1].stats["reused_tokens"] > word.log[1].stats["image_tokens"]
    assert word.log[1].turn.alone  # the first question is not in the second one's prompt
    cup = views(service, WORD, visitor)[-1]
    assert cup.log[2].answers == ["cup"] and cup.log[2].images == (CUP,)
    asyncio.run(service.undo(visitor))
    assert views(service, WORD, visitor)[-1].log[2].images == (CUP,)  # new again, so shown again


@pytest.mark.parametrize("most_bytes, times", [(2**28, [1, 0, 1, 0]), (0, [1, 1, 1, 1])])
def test_images_used_last_are_opened_once(monkeypatch, most_bytes, times):
    service, visitor, opened = make_service(max_tiled_bytes=most_bytes), Visitor(), []
    load = service.load
    monkeypatch.setattr(service, "load", lambda path: opened.append(path) or load(path))
    for request, expected in zip((STAR, STAR, WORD, WORD), times):
        views(service, request, visitor)
        assert len(opened) == expected
        opened.clear()
    service.close()
    assert [exchange.answers for exchange in visitor.log] == [["blue"], ["blue"], ["cup"], ["cup"]]


def test_a_remembered_conversation_is_that_of_the_chat_and_is_undone(service):
    checkpoint, visitor = service.models.open(EMBEDDED), Visitor()
    chat, asked = Conversation(checkpoint), ("What colour is the star?", "Describe the picture.", "Why?")
    for number, question in enumerate(asked):
        last = views(service, replace(STAR, question=question, remember=True), visitor)[-1].log[-1]
        options = GenerationOptions(max_new_tokens=last.request.max_new_tokens)
        expected = chat.send(question, () if number else (EXAMPLE,), options).finish()
        same = ("token_ids", "prompt_tokens", "image_tokens", "stop_reasons")
        assert [last.stats[name] for name in same] == [expected[name] for name in same]
        assert last.turn.alone == (number == 0)
    assert last.stats["reused_tokens"] > last.stats["prompt_tokens"] / 2
    for left in (2, 1, 0):
        assert len(asyncio.run(service.undo(visitor)).log) == left
    assert asyncio.run(service.undo(visitor)).failed
    again = views(service, replace(STAR, remember=True), visitor)[-1].log[0]
    assert again.answers == ["blue"] and again.turn.alone  # with its image again
    assert asyncio.run(service.clear(visitor)).log == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"question": " \n"}, "question"),
        ({"question": "a" * 5000}, "question"),
        ({"question": "\ud800"}, "surrogate"),
        ({"images": (EXAMPLE,) * 9}, "images"),
        ({"images": ("/nowhere/gone.png",)}, "gone.png"),
        ({"model": "no/such-model"}, "model"),
        ({"answers": 9}, "answers"),
        ({"max_new_tokens": 10**9}, "max_new_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": "x"}, "top_p"),
    ],
)
def test_an_error_is_one_sentence_and_leaves_nothing(service, changes, field):
    visitor, request = Visitor(), replace(STAR, **changes)
    last = views(service, request, visitor)[-1]
    assert last.failed and field in last.notice and "\n" not in last.notice and last.returned is request
    assert last.log == [] and not visitor.busy.locked()


def test_an_image_may_be_as_large_as_on_the_command_line(service, tmp_path):
    """It is refused by its header."""
    large, huge = tmp_path / "large.png", tmp_path / "huge.png"
    Image.new("1", (8000, 5000)).save(large)
    Image.new("1", (9000, 9000)).save(huge)
    assert service.load(str(large)).size == load_image(large).size == (8000, 5000)
    notice = views(service, replace(STAR, images=(str(huge),)))[-1].notice
    assert "pixels" in notice and "ImageLimits" not in notice
    for load in (load_image, service.load):
        with pytest.raises(ImageError):
            load(str(huge))


def test_what_a_model_makes_of_several_images_is_said_to_whom_shows_them(service, model_folder):
    other = make_service(model_folder)
    other.models.open(str(model_folder))
    assert service.about_images("", 1) == other.about_images("", 1) == "" and "3" in other.about_images("", 3)
    many = service.models.open(EMBEDDED).model.generation_config["most_images"] + 1
    assert "at a time" in service.about_images(EMBEDDED, many) != other.about_images("", many) != ""
    other.close()


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


def test_an_answer_that_is_undone_is_shown_no_more(slow):
    """A page may show the answer's last view after what undo returns."""

    async def later_views(visitor):
        stream, shown = slow.ask(visitor, long_request(slow)), []
        async for view in stream:
            if view.log[-1].answers[0].count(" ") > 3:
                break
        undoing = asyncio.create_task(slow.undo(visitor))
        await asyncio.sleep(0)
        async for view in stream:
            shown.append(len(view.log))
        return shown, await undoing

    visitor = Visitor()
    shown, undone = asyncio.run(later_views(visitor))
    assert shown and set(shown) == {0}
    assert undone.log == visitor.log == [] and undone.returned == long_request(slow)


def test_a_question_that_waited_for_its_turn_is_ended_by_the_next_one(slow):
    async def three(visitor):
        questions = "One?", "Two?", "Three?"
        tasks = []
        for question in questions:
            request = replace(long_request(slow), question=question, max_new_tokens=5)
            tasks.append(asyncio.create_task(last_of(slow.ask(visitor, request))))
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    visitor = Visitor()
    _, second, _ = asyncio.run(three(visitor))
    assert second.returned.question == "Two?"
    assert [exchange.request.question for exchange in visitor.log] == ["Three?"]


def test_undo_before_the_first_word_leaves_the_answer_before(service):
    visitor = Visitor()
    views(service, STAR, visitor)
    (kept,) = visitor.log
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
    assert last.returned is request and not last.busy and visitor.images == (EXAMPLE,)
    assert asyncio.run(service.undo(visitor)).returned is STAR and visitor.images == ()


# ----------------------------------------------------------------------------------------- what is kept
class Guests(Models):
    """Models of which others may be named, which need no Hub."""

    def _load(self, name):
        self._drop_guest()
        return replace(open_checkpoint(EMBEDDED, device="cpu"), name=name)


@pytest.mark.slow
def test_a_model_that_is_dropped_while_it_answers_is_let_go():
    service = Service(Engine(Guests([EMBEDDED], any_model=True)))
    models, visitor = service.models, service.visitor("a")
    old = weakref.ref(models.open("some/one").model)

    async def dropped_in_the_middle():
        async for view in service.ask(visitor, replace(STAR, model="some/one")):
            if view.log and models.held("some/one") is not None:
                models.open("some/other")

    asyncio.run(dropped_in_the_middle())
    assert [exchange.answers for exchange in visitor.log] == [["blue"]]
    assert models.held("some/one") is None and wait_for(lambda: old() is None)
    idle = weakref.ref(models.held("some/other").model)
    views(service, replace(STAR, model="some/other"), visitor)
    models.open("some/third")
    assert wait_for(lambda: idle() is None)
    service.close()


KEY, OTHER_KEY = "0123456789abcdef" * 2, "f" * 32


def test_a_page_that_is_loaded_anew_has_its_conversation_and_no_other_page_has(service, monkeypatch):
    async def opened(session: str, key: str, *requests: AskRequest) -> list[str]:
        """The answers that a page shows when it is opened, before it asks for more."""
        with service.connected(session):
            visitor = await service.restore(session, "", key)
            answers = [exchange.answers[0] for exchange in visitor.log]
            for request in requests:
                await last_of(service.ask(service.visitor(session), request))
        return answers

    async def visits() -> None:
        assert await opened("one", KEY, STAR, WORD) == []
        for number, key in enumerate(("", OTHER_KEY, KEY[:-1], KEY.upper(), "é" * 32)):
            assert await opened(f"stranger {number}", key) == []
        assert await opened("two", KEY) == ["blue", "cup"]
        assert await opened("three", KEY, replace(WORD, images=(EXAMPLE,))) == ["blue", "cup"]
        assert await opened("four", KEY) == ["blue", "cup", "tree"]
        with service.connected("five"):
            await service.clear(await service.restore("five", "", KEY))
        assert await opened("six", KEY, STAR) == []
        monkeypatch.setattr(service, "limits", ServiceLimits(kept_seconds=0))
        assert await opened("seven", KEY) == []  # too late

    asyncio.run(visits())


def test_an_answer_that_a_reload_cut_off_is_shown_as_far_as_it_went(slow):
    async def visits():
        with slow.connected("one"):
            asking = slow.ask(await slow.restore("one", "", KEY), long_request(slow))
            async for view in asking:
                if view.log and view.log[-1].answers[0].count(" ") > 3:
                    break
        rest = asyncio.create_task(last_of(asking))
        visitor = await slow.restore("two", "", KEY)
        await rest
        return visitor.log

    (exchange,) = asyncio.run(visits())
    assert exchange.stop_reasons == ["stopped"] and exchange.answers[0].count(" ") > 3


def test_visitors_and_open_pages_stay_within_their_bounds(service, monkeypatch):
    monkeypatch.setattr(service, "limits", ServiceLimits(max_visitors=3, max_open=2))
    for name in "abcdef":
        views(service, STAR, service.visitor(name))
        assert len(service._visitors) <= 3
    with service.connected("f"):
        assert service.visitor("f").log and service.visitor("a").log == []
    assert "f" not in service._visitors  # the page is closed
    with service.connected("a"), service.connected("b"):
        with pytest.raises(RequestError), service.connected("c"):
            pass
        for number in range(9):  # anybody can invent sessions: open pages stay
            service.visitor(f"invented {number}")
        assert "a" in service._visitors
