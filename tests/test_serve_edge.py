"""What stands between serve.py and the web: pages of other sites, proxies, balancers, clients that wait."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import httpx
import openai
import pytest

import serve
from data.errors import ImageError
from tests.pages import never_stopping, slow
from tests.servers import (
    CHAT,
    EXAMPLE,
    FOLDER,
    MESSAGES,
    NAME,
    RESPONSES,
    STAR,
    Running,
    Several,
    body,
    embedded,
    refused,
    running,
    several,
)  # fmt: skip
from tests.test_serve import connect, heard
from tests.test_serve_protocols import asked, denied, told
from tests.tool_checkpoints import save as save_caller
from tests.waiting import PATIENCE, wait_for
from web import media, streams
from web.engine import QueueFull
from web.media import Media

UI, OTHER = "https://ui.example", "https://other.example"
ALLOWED = "access-control-allow-origin"
BODIES = {CHAT: lambda **more: body(STAR, EXAMPLE, **more), RESPONSES: lambda **more: asked(**more),
          MESSAGES: lambda **more: told(**more)}  # fmt: skip
PROTOCOLS = pytest.mark.parametrize("path", BODIES)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Iterator[Several]:
    caller = save_caller(tmp_path_factory.mktemp("edge") / "hermes", "hermes")
    with several(FOLDER, caller, max_body=2**20) as served:
        yield served


@pytest.fixture
def pinging(monkeypatch) -> None:
    monkeypatch.setattr(streams, "PING_SECONDS", 0.1)


# ------------------------------------------------------------------------------------- pages of other sites
@pytest.fixture(scope="module")
def allowing() -> Iterator[Running]:
    with running(api_key="secret", origins=[UI, "http://localhost:5173"], max_body=2**20) as served:
        yield served


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_page_may_ask_before_it_sends_a_key(allowing, method):
    wants = {"access-control-request-method": method}
    wants["access-control-request-headers"] = "authorization,content-type,x-stainless-lang"
    for origin in (UI, "http://localhost:5173"):
        answer = allowing.send("OPTIONS", headers=wants | {"origin": origin})
        assert answer.status_code == 200 and answer.headers[ALLOWED] == origin
        assert method in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]
    for origin in (OTHER, "https://ui.example.other", "http://ui.example", "null"):
        answer = allowing.send("OPTIONS", headers=wants | {"origin": origin})
        assert refused(answer, 403) and ALLOWED not in answer.headers


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("status", "method", "path", "more"),
    [
        (200, "GET", "v1/models", {}),
        (200, "HEAD", "health", {}),
        (200, "POST", CHAT, {"json": body(stream=True)}),
        (200, "POST", MESSAGES, {"json": told(stream=True)}),
        (400, "POST", CHAT, {"json": body(n=0)}),
        (401, "POST", CHAT, {"json": body(), "key": "other"}),
        (404, "POST", RESPONSES, {"json": asked(model="none")}),
        (413, "POST", CHAT, {"json": body("x" * 2**20)}),
    ],
)
def test_a_page_reads_every_answer_errors_too(allowing, status, method, path, more):
    key = {"authorization": f"Bearer {more.pop('key', 'secret')}"}
    answer = allowing.send(method, path, headers=key | {"origin": UI}, **more)
    assert answer.status_code == status and answer.headers[ALLOWED] == UI
    assert "origin" in answer.headers["vary"].lower()
    answer = allowing.send(method, path, headers=key | {"origin": OTHER}, **more)
    assert answer.status_code == 403 and ALLOWED not in answer.headers
    own = allowing.send(method, path, headers=key, **more)
    assert own.status_code == status and ALLOWED not in own.headers


@pytest.mark.parametrize(("error", "status"), [(QueueFull(3), 429), (KeyError(), 500), (MemoryError(), 503)])
def test_a_page_reads_what_goes_wrong_inside(allowing, monkeypatch, error, status):
    monkeypatch.setattr(allowing.engine, "submit", Mock(side_effect=error))
    headers = {"origin": UI, "authorization": "Bearer secret"}
    answer = allowing.send("POST", json=body(), headers=headers)
    assert answer.status_code == status and answer.headers[ALLOWED] == UI
    assert "retry-after" in answer.headers["access-control-expose-headers"].lower()


def test_without_the_flag_no_page_of_another_site_may_ask_and_with_a_star_all_may(here):
    wants = {"access-control-request-method": "POST", "origin": UI}
    assert here.send("OPTIONS", headers=wants).status_code == 403
    assert (
        "--allowed-origin" in here.send("GET", "v1/models", headers={"origin": UI}).json()["error"]["message"]
    )
    with running(origins=["*"]) as served:
        for origin in (UI, "null"):
            answer = served.send("GET", "v1/models", headers={"origin": origin})
            assert answer.status_code == 200 and answer.headers[ALLOWED] == "*"
        assert served.send("OPTIONS", headers=wants).headers[ALLOWED] == "*"


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://UI.example/", UI),
        ("http://localhost:5173", "http://localhost:5173"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("app://obsidian.md", "app://obsidian.md"),
        *(
            (wrong, None)
            for wrong in ("ui.example", "https://ui.example/app", "https://a@ui.example", "", "//x")
        ),
        *((f"https://{wrong}", None) for wrong in ("*.example", "*", "ui%2eexample", "ui.example:655360")),
    ],
)
def test_an_origin_is_said_as_browsers_say_it(url, origin):
    if origin is None:
        with pytest.raises(ValueError, match="--allowed-origin"):
            serve.origin(url)
    else:
        assert serve.origin(url) == origin


# ------------------------------------------------------------------------------------------ streams that wait
@contextmanager
def held_up(monkeypatch, error: Exception | None = None) -> Iterator[threading.Event]:
    """Until this is set no image is read."""
    gate, read = threading.Event(), Media._read

    def held(self, url: str, name: str) -> bytes:
        assert gate.wait(PATIENCE)
        if error is not None:
            raise error
        return read(self, url, name)

    with monkeypatch.context() as patch:
        patch.setattr(Media, "_read", held)
        yield gate
        gate.set()


def streaming(served: Running, path: str, **more):
    asking = BODIES[path](stream=True, **more)
    return httpx.stream("POST", served.url + path, json=asking, timeout=PATIENCE, trust_env=False)


def said(stream: str) -> str:
    """Without what is by chance."""
    return re.sub(r'"(\w*_?id|\w*created\w*|\w*completed_at|obfuscation)":\s*("[^"]*"|[0-9.]+)', "", stream)


@pytest.mark.slow(but=1)
@PROTOCOLS
def test_a_stream_is_never_silent_from_its_first_moment_on(here, monkeypatch, pinging, path):
    # The second time, so that as much of the prompt is kept as for the third.
    for _ in range(2):
        expected = here.send("POST", path, json=BODIES[path](stream=True)).text.replace(": ping\n\n", "")
    with held_up(monkeypatch) as gate, streaming(here, path) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        pieces, text = answer.iter_text(), ""
        while text.count(": ping\n\n") < 3:
            text += next(pieces)
        assert "data: {" not in text or path == RESPONSES  # its first events say nothing of an answer
        gate.set()
        text += "".join(pieces)
    got = text.replace(": ping\n\n", "")
    assert got.count("data: ") == expected.count("data: ") and said(got) == said(expected)


@PROTOCOLS
def test_what_goes_wrong_after_a_ping_is_the_last_event(here, monkeypatch, pinging, path):
    error = ImageError("image 1: it is none")
    with held_up(monkeypatch, error) as gate, streaming(here, path) as answer:
        pieces = answer.iter_text()
        assert answer.status_code == 200 and next(pieces)
        gate.set()
        last = json.loads("".join(pieces).rpartition("data: ")[2])
    told = last["response"]["error"] if path == RESPONSES else last["error"]
    assert "it is none" in told["message"]
    if path == CHAT:
        with held_up(monkeypatch, error) as gate:
            stream = here.client().chat.completions.create(**BODIES[path](stream=True))
            gate.set()
            with pytest.raises(openai.APIError, match="it is none"):
                list(stream)
    with held_up(monkeypatch, error) as gate:
        monkeypatch.setattr(streams, "PING_SECONDS", 15)
        gate.set()  # at once: it has a status
        assert here.send("POST", path, json=BODIES[path](stream=True)).status_code == 400


@pytest.mark.slow(but=1)
@PROTOCOLS
@pytest.mark.parametrize("waits", ["in the queue", "for its image"])
def test_who_leaves_a_stream_that_pings_takes_the_request_along(tmp_path, monkeypatch, pinging, path, waits):
    folder = never_stopping(tmp_path / "model")
    with running(slow(folder), slots=1) as served, held_up(monkeypatch) as gate:
        more = {"model": "model", "max_output_tokens" if path == RESPONSES else "max_tokens": 99}
        if waits == "in the queue":
            gate.set()
        with streaming(served, path, **more) as first:
            one = first.iter_text()
            assert next(one)
            if waits == "in the queue":
                with streaming(served, path, **more) as second:
                    other = second.iter_text()
                    assert any(": ping" in piece for piece in other)
                    assert served.engine.stats.waiting == served.engine.stats.running == 1
                assert wait_for(lambda: served.engine.stats.waiting == 0)
                assert served.engine.stats.running == 1
        gate.set()
        assert wait_for(
            lambda: sum(served.server.metrics.responses.values()) == 1 + (waits == "in the queue")
        )
        assert wait_for(lambda: served.engine.stats.running == served.engine.stats.waiting == 0)


@pytest.mark.slow
def test_openais_client_reads_on_over_pings(tmp_path, pinging):
    with running(slow(FOLDER)) as served:  # a step takes longer than a ping
        whole = served.ask().json()["choices"][0]["message"]["content"]
        chunks = served.client().chat.completions.create(**body(stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
        with served.client().responses.stream(**asked()) as stream:
            assert stream.get_final_response().output_text == whole


# ------------------------------------------------------------------------------------ Anthropic's and others'
@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    "more", [{}, {"system": "Be short."}, {"tools": True}, {"thinking": {"type": "disabled"}}]
)
def test_tokens_are_counted_as_an_answer_counts_them(here, more):
    if more.get("tools"):
        tool = {"name": "look", "description": "looks", "input_schema": {"type": "object"}}
        more = {"tools": [tool], "model": "hermes"}
    counted = here.send("POST", f"{MESSAGES}/count_tokens", json={**told(**more), "max_tokens": None})
    usage = here.send("POST", MESSAGES, json=told(**more, max_tokens=1)).json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert wait_for(lambda: here.engine.stats.running == here.engine.stats.waiting == 0)


def test_what_cannot_be_counted_is_refused_as_a_message_is(here):
    path = f"{MESSAGES}/count_tokens"
    denied(here.send("POST", path, json=told(model="none")), 404, "not_found_error")
    assert denied(here.send("POST", path, json=told(messages=[])), 400, "invalid_request_error")["param"]
    long = told("word " * 3000)  # more than the model takes: that is what people count for
    assert here.send("POST", path, json=long).json()["input_tokens"] > 3000


def test_a_message_begins_with_the_number_of_its_tokens(here):
    stream = here.send("POST", MESSAGES, json=told(stream=True)).text
    found = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    (start,) = [one["message"]["usage"] for one in found if one["type"] == "message_start"]
    (end,) = [one["usage"] for one in found if one["type"] == "message_delta"]
    assert found[0]["type"] == "message_start"
    for name in ("input_tokens", "cache_read_input_tokens"):
        assert start[name] == end[name]
    assert start["input_tokens"] + start["cache_read_input_tokens"] > 0


def test_usage_may_come_with_each_chunk(here):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(here.client().chat.completions.create(**body(stream=True, stream_options=options)))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert (
        counts == sorted(counts) and counts[-1] > 0 and len({one.usage.prompt_tokens for one in chunks}) == 1
    )


@pytest.mark.parametrize("path", ["", "metrics", f"v1/models/{NAME}"])
def test_head_is_get_without_the_body(here, path):
    got, head = here.send("GET", path), here.send("HEAD", path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    if path != "metrics":
        assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.content))


def test_head_of_what_is_not_there(here):
    assert here.send("HEAD", "v1/models/none").status_code == 404
    assert here.send("HEAD", CHAT).status_code == 405
    with connect(here) as connection:  # the connection goes on where the next answer begins
        head = b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n"
        connection.sendall(head + b"\r\n" + head.replace(b"HEAD", b"GET") + b"Connection: close\r\n\r\n")
        answers = heard(connection).split(b"\r\n\r\n")
    assert len(answers) == 3 and answers[-1] == b'{"status":"ok"}'


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"regex": r"[0-9]{3}-(red|blue)"}, r"[0-9]{3}-(red|blue)"),
        ({"grammar": 'start: "it is " COLOUR\nCOLOUR: /red|blue/'}, "it is (red|blue)"),
        ({"json": {"enum": ["red", "blue"]}}, '"(red|blue)"'),
    ],
)
@PROTOCOLS
def test_an_answer_has_the_form_that_vllms_clients_ask_for(here, form, expected, path):
    answer = here.send("POST", path, json=BODIES[path](structured_outputs=form)).json()
    if path == CHAT:
        text = answer["choices"][0]["message"]["content"]
    else:
        text = (answer["content"] if path == MESSAGES else answer["output"][0]["content"])[0]["text"]
    assert re.fullmatch(expected, text)


@pytest.mark.parametrize("text", ["start: <end_of_utterance>", 'start: "a" <end_of_utterance> "b"'])
def test_a_grammar_that_no_answer_ends_with_is_refused(here, text):
    refused(here.ask(structured_outputs={"grammar": text}), 400)


# ---------------------------------------------------------------------------------------------------- proxies
@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("203.0.113.7:4711", "203.0.113.7"),
        ("[2001:db8::7]:4711", "2001:db8::7"),
        ("fe80::1%x 200", "fe80::1"),
        ("9.9.9.9 POST /v1/forged 200 0.001s model=x", "'9.9.9.9 POST /v1/forged 200 0.001s model=x'"),
    ],
)
def test_a_client_in_the_log_is_an_address_or_quoted(caplog, said, shown):
    with caplog.at_level(logging.INFO, "ocelli.server"), running(proxies=["127.0.0.1"]) as served:
        path = "v1/x%20200%200.001s%20model=forged"
        assert served.send("GET", path, headers={"x-forwarded-for": said}).status_code == 404
        assert wait_for(lambda: caplog.messages)
    (line,) = caplog.messages
    assert line.startswith(f"{shown} GET /v1/x%20200%200.001s%20model") and " 404 " in line


@pytest.mark.parametrize(
    ("method", "path"), [("POST", CHAT), ("GET", "health"), ("POST", MESSAGES), ("OPTIONS", CHAT)]
)
def test_a_request_of_two_lengths_is_refused_and_nothing_follows_it(here, allowing, method, path):
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    lengths = f"Content-Length: {len(hidden) + 5}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode()
    more = f"Origin: {UI}\r\nAccess-Control-Request-Method: POST\r\n" if method == "OPTIONS" else ""
    with connect(allowing if more else here) as connection:
        head = f"{method} /{path} HTTP/1.1\r\nHost: localhost\r\n{more}Content-Type: application/json\r\n"
        connection.sendall(head.encode() + lengths + hidden)
        got = heard(connection)
    assert got.count(b"HTTP/1.1 ") == 1 and b" 400 " in got.splitlines()[0] and b"connection: close" in got


# ----------------------------------------------------------------------------------------------------- videos
@pytest.mark.slow(but=1)
@PROTOCOLS
def test_a_model_without_videos_opens_none(monkeypatch, path):
    """A stranger's video may take seconds to open, let alone to decode."""
    monkeypatch.setattr(media, "open_apart", Mock(side_effect=AssertionError("opened")))
    url = "data:video/mp4;base64,AAAAIGZ0eXBpc29tAAACAGlzb21pc28yYXZjMW1wNDE="
    source = {"type": "base64", "media_type": "video/mp4", "data": url.partition(",")[2]}
    part = {
        CHAT: {"type": "video_url", "video_url": {"url": url}},
        RESPONSES: {"type": "input_video", "video_url": url},
        MESSAGES: {"type": "video", "source": source},
    }[path]
    monkeypatch.setattr(embedded().processor, "few_images", True)
    with running() as served:
        talk = {"input" if path == RESPONSES else "messages": [{"role": "user", "content": [part]}]}
        answer = served.send("POST", path, json=BODIES[path]() | talk)
        assert answer.status_code == 400 and "video" in answer.json()["error"]["message"]
