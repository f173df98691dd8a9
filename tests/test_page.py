"""The web page without a browser: the thread of the models, the desk, and the server as a client sees it."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import threading
import time
import weakref

import httpx
import pytest
from gradio_client import Client, handle_file
from PIL import Image

import app
from inference.checkpoint import RequestError
from tests.pages import EMBEDDED, make_desk, never_stopping, served, wait_for
from web.asking import Asked
from web.model_thread import ModelThread
from web.models import Models
from web.visitors import Visitor, Visitors

ASSETS = app.ROOT / "assets"
EXAMPLE, CUP, THREE, WOLF = (str(ASSETS / f"{name}.png") for name in ("example", "cup", "three", "wolf"))
STAR = Asked((EXAMPLE,), "What colour is the star?", EMBEDDED)
# Who asks at the same time, and what each must be told.
CROWD = (
    (EXAMPLE, "What colour is the star?", "blue"),
    (EXAMPLE, "What word do you see?", "tree"),
    (CUP, "What is the printed word?", "cup"),
    (WOLF, "What is the printed word?", "wolf"),
)


@pytest.fixture(scope="module")
def desk():
    desk = make_desk()
    yield desk
    desk.thread.close()


@pytest.fixture(scope="module")
def slow_desk(tmp_path_factory):
    desk = make_desk(never_stopping(tmp_path_factory.mktemp("babbling") / "model"), slow=True)
    yield desk
    desk.thread.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    desk, folder = make_desk(any_model=True), tmp_path_factory.mktemp("uploads")
    with pytest.MonkeyPatch.context() as patch, served(desk, folder, patch) as page:
        yield page
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
    assert all(task.wait(10) for task in (first, *tasks))
    assert [task.result() for task in tasks] == list("abc") and tasks[0].take() == [0, 1, 2]
    places = {name: [order.index((name, step)) for step in range(3)] for name in "abc"}
    assert places["c"][0] > min(places["a"][2], places["b"][2])  # two at once
    assert all(steps == sorted(steps) for steps in places.values())
    thread.close()


def iter_then(gate: threading.Event):
    gate.wait(10)
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
    assert task.wait(10) and closed.is_set() and task.result() is None
    assert waiting.wait(10) and waiting.take() == [1]
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


def test_a_second_question_reuses_the_picture_and_another_picture_does_not(desk):
    visitor = Visitor()
    views(desk, STAR, visitor)
    word = views(desk, changed(STAR, question="What word do you see?"), visitor)[-1]
    assert word.log[1].answers == ["tree"] and word.log[1].pictures == ()
    assert word.made["reused_tokens"] > word.made["image_tokens"]
    assert len(visitor.conversation.turns) == 1  # the first question is not in the second one's prompt
    cup = views(desk, changed(STAR, pictures=(CUP,), question="What is the printed word?"), visitor)[-1]
    assert cup.log[2].answers == ["cup"] and cup.log[2].pictures == (CUP,)
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
    assert views(desk, again, visitor)[-1].log[0].answers == ["blue"]  # with its picture again
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
        ({"pictures": (str(ASSETS / "decode.svg"),)}, "'decode.svg': expected a picture"),
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


def test_a_picture_is_refused_by_its_header(desk, tmp_path):
    huge = tmp_path / "huge.png"
    Image.new("1", (6000, 6000)).save(huge)
    assert "at most 24,000,000 pixels" in views(desk, changed(STAR, pictures=(str(huge),)))[-1].notice


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


def test_who_asks_while_being_answered_is_told_and_undo_interrupts(slow_desk):
    asked = changed(STAR, model=slow_desk.models.default, max_new_tokens=1000)

    async def both(visitor):
        first = slow_desk.ask(visitor, asked)
        await anext(first)
        refused = [view async for view in slow_desk.ask(visitor, asked)]
        task = visitor.task
        rest = asyncio.create_task(drain(first))
        undone = await slow_desk.undo(visitor)
        await rest
        return refused, undone, task

    async def drain(stream):
        async for _ in stream:
            pass

    refused, undone, task = asyncio.run(both(Visitor()))
    assert len(refused) == 1 and "stop it" in refused[0].notice
    assert task.ended and undone.log == []


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


def test_models_may_be_chosen_from_the_list_only(tmp_path):
    models = Models([EMBEDDED])
    for name in ("no/such", str(tmp_path), "/etc", "../x", "", "checkpoints/ocelli-shapes"):
        with pytest.raises(RequestError, match="expected one of"):
            models.open(name)
    for name in (str(tmp_path), "../x", "a/b/c", "tests/fixtures", "a b/c"):
        with pytest.raises(RequestError, match="expected an id on the Hub"):
            Models([EMBEDDED], any_model=True).open(name)


# ----------------------------------------------------------------------------------------------- server
def ask(client: Client, picture: str, question: str) -> tuple:
    """What the page shows after a question: (texts of the chat, notice)."""
    pictures = [{"image": handle_file(picture), "caption": None}] if picture else []
    chat, _, notice, *_ = client.predict(pictures, question, EMBEDDED, seed=None, api_name="/ask")
    return [part["text"] for message in chat for part in message["content"] if "text" in part], notice


def test_a_crowd_is_answered_each_its_own(page):
    clients = [Client(page.url, verbose=False) for _ in CROWD]
    answers: dict[int, list] = {}

    def one(number):
        picture, question, _ = CROWD[number]
        answers[number] = [ask(clients[number], picture, question)[0] for _ in range(3)]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(CROWD))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (_, question, right) in enumerate(CROWD):
        for times, texts in enumerate(answers[number], 1):
            assert texts == [question, right] * times


def test_stop_undo_and_clear_over_the_wire(page):
    client = Client(page.url, verbose=False)
    ask(client, EXAMPLE, "What colour is the star?")
    assert ask(client, EXAMPLE, "What word do you see?")[0][-1] == "tree"
    client.predict(api_name="/stop")
    (
        chat,
        *_,
    ) = client.predict(api_name="/undo")
    assert len(chat) == 3  # picture, question, answer
    assert client.predict(api_name="/clear")[0] == []


def test_what_the_server_refuses(page, tmp_path):
    """Too large an upload, too large a body, URLs and server paths as pictures; and the page goes on."""
    url = page.url + "gradio_api/"
    upload = httpx.post(
        url + "upload", files={"files": ("big.png", io.BytesIO(bytes(60 * 2**20)))}, timeout=60
    )
    assert upload.status_code == 413 and "maximum allowed size" in upload.text
    flood = httpx.post(
        url + "upload", files={"files": ("all.png", io.BytesIO(bytes(90 * 2**20)))}, timeout=60
    )
    assert flood.status_code == 413 and "expected at most" in flood.json()["detail"]
    body = httpx.post(url + "queue/join", content=b"[" * 2**21)
    assert body.status_code == 413
    for path in ("http://example.org/x.png", "HTTPS://example.org/x.png", "file:///etc/passwd"):
        data = [[{"image": {"path": path, "meta": {"_type": "gradio.FileData"}}, "caption": None}], "Hm?"]
        answer = httpx.post(url + "queue/join", json={"data": data, "fn_index": 0, "session_hash": "s"})
        assert answer.status_code == 400 and "switched off" in answer.json()["detail"]
    secret = tmp_path / "secret.png"
    Image.new("RGB", (9, 9)).save(secret)
    client = Client(page.url, verbose=False)
    stolen = {"image": {"path": str(secret)}, "caption": None}
    chat, _, notice, *_ = client.predict([stolen], "What is it?", EMBEDDED, seed=None, api_name="/ask")
    assert "expected uploads" in notice and chat == {"__type__": "update"}
    marked = {"image": {"path": str(secret), "meta": {"_type": "gradio.FileData"}}, "caption": None}
    with pytest.raises(Exception, match="not uploaded by a user"):
        client.submit([marked], "What is it?", EMBEDDED, seed=None, api_name="/ask").result()
    assert ask(client, EXAMPLE, "What colour is the star?")[0][-1] == "blue"


def test_a_model_that_does_not_exist_is_told(page, monkeypatch):
    client = Client(page.url, verbose=False)
    chat, _, notice, *_ = client.predict([], "Hello?", "nobody/nothing-here", seed=None, api_name="/ask")
    assert "nobody/nothing-here" in notice and 'role="alert"' in notice and chat == []
    assert ask(client, EXAMPLE, "What colour is the star?")[0][-1] == "blue"


def test_who_goes_away_stops_the_answer_and_leaves_no_memory(slow_desk, tmp_path, monkeypatch):
    """A client that breaks off in the middle of an answer, as a closed tab does."""
    with monkeypatch.context() as patch, served(slow_desk, tmp_path, patch) as page:
        name, session = slow_desk.models.default, "gone"
        url = page.url + "gradio_api/"
        data = [[], "What is it?", name, 1, 0, 1, 0, 0, 1000, None, False]
        alive = httpx.Client(timeout=60)
        with alive.stream("GET", url + f"heartbeat/{session}") as heartbeat:
            beats = heartbeat.iter_lines()
            next(beats)
            function = next(
                one["id"]
                for one in httpx.get(page.url + "config").json()["dependencies"]
                if one["api_name"] == "ask"
            )
            body = {"data": data, "fn_index": function, "session_hash": session}
            assert httpx.post(url + "queue/join", json=body).status_code == 200
            with httpx.stream("GET", url + f"queue/data?session_hash={session}", timeout=60) as stream:
                for line in stream.iter_lines():
                    if "process_generating" in line and len(json.loads(line[5:])["output"]["data"]) > 0:
                        visitor = slow_desk.visitors.get(session)
                        task = visitor.task
                        if task is not None and visitor.log and visitor.log[-1].answers[0]:
                            break
        alive.close()
        assert task is not None and wait_for(lambda: task.ended)
        assert wait_for(lambda: slow_desk.visitors.kept_bytes == 0 and len(slow_desk.visitors) == 0)


# ------------------------------------------------------------------------------------------ command line
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "70000"], "--port: expected 1 to 65535, got 70000"),
        (["--host", "203.0.113.9", "--port", "7999"], "cannot listen on 203.0.113.9"),
        (["--model", "no/such/folder"], "there is no folder no/such/folder"),
        (["--device", "tpu"], "device: expected auto"),
    ],
)
def test_a_start_that_fails_is_one_sentence(capsys, monkeypatch, arguments, expected):
    monkeypatch.delenv("GRADIO_SERVER_PORT", raising=False)
    assert app.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("app.py: error: ") and expected in said and said.count("\n") == 1


def test_a_port_in_use_is_told_and_another_one_found(page, capsys):
    port = int(page.url.rstrip("/").rsplit(":", 1)[1])
    assert app.main(["--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"app.py: error: port {port} is in use on 127.0.0.1: give another --port\n"
    )
    assert app.free_port("127.0.0.1", None) != port
