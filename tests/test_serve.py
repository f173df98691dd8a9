"""serve.py over the wire: answers as generate.py's in OpenAI's form, and what strangers may not do."""

from __future__ import annotations

import asyncio
import enum
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import BaseModel

import serve
from data.errors import ImageError
from inference.boxes import located
from inference.checkpoint import open_checkpoint
from inference.conversation import Conversation
from tests.documents import ROOT, blocks
from tests.pages import never_stopping, slow
from tests.servers import (
    CHAT,
    CUP,
    EXAMPLE,
    FOLDER,
    NAME,
    SHAPES,
    STAR,
    Running,
    body,
    events,
    message,
    refused,
    running,
)  # fmt: skip
from tests.soak.load import is_sound, run
from tests.waiting import PATIENCE, free_port, wait_for
from web import guard, server
from web.errors import Refused
from web.guard import ApiLimits
from web.media import Media
from web.protocol import REFUSED, ChatRequest, check_request, read_object


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    small = replace(ApiLimits().image, max_pixels=1_000_000)
    with running(max_body=2**20, image=small, max_images=3, max_new_tokens=300) as served:
        yield served


@pytest.fixture(scope="module")
def babbling(tmp_path_factory) -> Iterator[Running]:
    """A server whose answers take for ever: no stop token is likeliest, and each step takes its time."""
    folder = never_stopping(tmp_path_factory.mktemp("babbling") / "model")
    with running(slow(folder), slots=1, queue=4) as served:
        yield served


# ---------------------------------------------------------------------------------------------------- answers
@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("question", "images", "system", "options"),
    [
        (SHAPES, [ROOT / "assets/three.png", EXAMPLE], "Be short.", {}),
        (
            SHAPES,
            [CUP],
            None,
            {"temperature": 1.5, "top_p": 0.95, "top_k": 9, "min_p": 0.01, "seed": 7, "n": 3},
        ),
        ("Describe the picture.", [CUP], None, {"max_tokens": 5, "frequency_penalty": 1.5}),
    ],
)
def test_tokens_are_those_of_generate_py(here, as_json, question, images, system, options, stream):
    asked = body(question, *images, **options)
    if system:
        asked["messages"].insert(0, {"role": "developer", "content": system})
    flags = {
        "n": "--num-answers",
        "max_completion_tokens": "--max-new-tokens",
        "max_tokens": "--max-new-tokens",
    }
    words = [str(word) for name, value in options.items()
             for word in (flags.get(name, f"--{name.replace('_', '-')}"), value)]  # fmt: skip
    words += ["--system", system] if system else []
    (made,) = as_json(*images, "-q", question, *words, "--dtype", "float32", "--device", "cpu", model=FOLDER)
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = here.send("POST", json=asked)
    texts, reasons, usage = read_stream(events(answer)) if stream else read_whole(answer.json())
    assert [text.rstrip() for text in texts] == made["answers"]
    assert reasons == made["stop_reasons"]
    assert usage["completion_tokens"] == sum(map(len, made["token_ids"]))
    assert usage["prompt_tokens"] == made["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def read_whole(answer: dict) -> tuple[list[str], list[str], dict]:
    assert answer["object"] == "chat.completion" and answer["model"] == NAME
    assert [choice["index"] for choice in answer["choices"]] == [*range(len(answer["choices"]))]
    assert all(choice["message"]["role"] == "assistant" for choice in answer["choices"])
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    return texts, [choice["finish_reason"] for choice in answer["choices"]], answer["usage"]


def read_stream(chunks: list[dict]) -> tuple[list[str], list[str], dict]:
    """Each answer begins with its role, and ends once; the usage comes last, alone."""
    *chunks, last = chunks
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in [*chunks, last]}) == 1
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index, delta = choice["index"], choice["delta"]
        assert index not in reasons and (index in texts) != ("role" in delta)
        texts[index] = texts.get(index, "") + delta.get("content", "")
        if choice["finish_reason"]:
            reasons[index] = choice["finish_reason"]
    assert sorted(texts) == sorted(reasons) == [*range(len(texts))]
    return [texts[n] for n in sorted(texts)], [reasons[n] for n in sorted(reasons)], last["usage"]


def test_the_text_may_stand_before_the_image(here):
    """As in OpenAI's own examples. What the server keeps of an image serves both orders."""
    for question in (STAR, "What is in the picture?", "Is there a red circle?"):
        asked = body(question, CUP, temperature=0)
        first = here.send("POST", json=asked).json()
        asked["messages"][0]["content"].reverse()
        second = here.send("POST", json=asked).json()
        assert read_whole(second)[:2] == read_whole(first)[:2]
        assert "only know" not in read_whole(second)[0][0]  # as the model refuses what it was not trained on
        assert second["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 16  # the image, and the question


def test_earlier_turns_count(here):
    """As clients keep them, with what they were sent besides the text, and LiteLLM's own field."""
    first = here.client().chat.completions.create(**body(STAR))
    record = first.choices[0].message.model_dump() | {"provider_specific_fields": {"refusal": None}}
    messages = [*body(STAR)["messages"], record, message(SHAPES, CUP)]
    both = here.client().chat.completions.create(model=NAME, messages=messages)
    alone = here.client().chat.completions.create(**body(SHAPES, CUP))
    assert both.usage.prompt_tokens > first.usage.prompt_tokens + alone.usage.prompt_tokens - 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", [1, 14])
def test_logprobs_and_usage_end_where_the_text_ends_at_a_stop_string(here, stream, place):
    asked = {"logprobs": True, "stream": stream, "stream_options": {"include_usage": True}}
    whole = here.ask("Describe the picture.", logprobs=True).json()["choices"][0]
    tokens = [entry["token"] for entry in whole["logprobs"]["content"]]
    stop = whole["message"]["content"][place : place + 12]  # which spans several tokens
    answer = here.ask("Describe the picture.", stop=["no such text", stop], **asked)
    if stream:
        *chunks, last = events(answer)
        usage, choices = last["usage"], [chunk["choices"][0] for chunk in chunks]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
    else:
        usage, choices = answer.json()["usage"], answer.json()["choices"]
        text = choices[0]["message"]["content"]
    assert text == whole["message"]["content"].partition(stop)[0] and choices[-1]["finish_reason"] == "stop"
    got = [entry["token"] for one in choices if one["logprobs"] for entry in one["logprobs"]["content"]]
    assert got == tokens[: len(got)] and usage["completion_tokens"] == len(got)
    said = "".join(got).strip()
    assert said.startswith(text.strip()) and len("".join(got[:-1]).strip()) < max(1, len(text))


@pytest.mark.parametrize("stream", [False, True])
def test_boxes_are_pixels_and_the_models_own_numbers_stand_beside(here, tmp_path, stream):
    wide = tmp_path / "wide.png"
    Image.open(EXAMPLE).resize((1200, 400)).save(wide)
    answer = here.ask("Where is the star?", wide, stream=stream)
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in events(answer)]
        text = "".join(delta.get("content", "") for delta in deltas)
        (box,) = next(delta["boxes"] for delta in deltas if delta.get("boxes"))
    else:
        said = answer.json()["choices"][0]["message"]
        text, (box,) = said["content"], said["boxes"]
        assert said["points"] == [] == said["malformed"]
    (written,) = json.loads(text)
    assert box["form"] == "qwen3-vl" and box["label"] == written["label"] == "star"
    for at, (pixels, raw) in enumerate(zip(box["box"], box["raw"], strict=True)):
        assert pixels == pytest.approx(raw * (400 if at % 2 else 1200) / 1000)
        assert written["bbox_2d"][at] == round(pixels)


def test_boxes_of_a_text_in_a_form_are_pixels_and_those_of_an_unknown_image_none(here, tmp_path):
    wide = tmp_path / "wide.png"
    Image.open(EXAMPLE).resize((1200, 400)).save(wide)
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4}
    named = {"bbox_2d": numbers, "label": {"type": "string"}}
    thing = {"type": "object", "properties": named, "required": [*named]}
    schema = {"type": "array", "items": thing, "maxItems": 1}
    form = {"type": "json_schema", "json_schema": {"name": "where", "schema": schema}}
    said = here.ask("Where is the star?", wide, response_format=form).json()["choices"][0]["message"]
    (written,), (box,) = json.loads(said["content"]), said["boxes"]
    assert written["bbox_2d"] == [round(one) for one in box["box"]] != box["raw"]
    said = here.ask("Where is the star?", wide, EXAMPLE).json()["choices"][0]["message"]
    (box,) = said["boxes"]
    assert box["box"] is None and box["raw"] == json.loads(said["content"])[0]["bbox_2d"]


def test_an_answer_that_is_sent_back_is_read_in_the_models_own_numbers(here, tmp_path):
    """So the conversation goes on as if the model had been asked in Python, and from what is kept of it."""
    wide = tmp_path / "wide.png"
    Image.open(EXAMPLE).resize((1000, 1000)).save(wide)
    first = here.client().chat.completions.create(**body("Where is the star?", wide))
    turns = [message("Where is the star?", wide), first.choices[0].message.model_dump()]
    turns.append({"role": "user", "content": "Where is the square?"})
    second = here.client().chat.completions.create(model=NAME, messages=turns)
    talk = Conversation(open_checkpoint(FOLDER, device="cpu"))
    raw = talk.send("Where is the star?", [wide]).finish()
    talk.send("Where is the square?").finish()
    sizes = talk.checkpoint.processor.images.plan(1000, 1000).sizes
    assert second.choices[0].message.boxes == located("qwen3-vl", sizes, talk.turns[-1].answer)["boxes"]
    kept = first.usage.prompt_tokens + len(raw["token_ids"][0])
    assert second.usage.prompt_tokens_details.cached_tokens >= kept - 2


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_of_the_tokens_that_came(here, stream):
    answer = here.ask("Describe the picture.", logprobs=True, top_logprobs=4, max_tokens=9, stream=stream)
    choices = [chunk["choices"][0] for chunk in events(answer)] if stream else answer.json()["choices"]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    texts = [
        choice["delta"].get("content", "") if stream else choice["message"]["content"] for choice in choices
    ]
    assert len(entries) == 9
    assert "".join(entry["token"] for entry in entries).strip() == "".join(texts).strip()
    for entry in entries:
        top = [one["logprob"] for one in entry["top_logprobs"]]
        assert len(top) == 4 and top == sorted(top, reverse=True) and sum(map(math.exp, top)) <= 1 + 1e-4
        greedy = entry["top_logprobs"][0]
        assert (entry["token"], entry["logprob"]) == (greedy["token"], greedy["logprob"])
        assert bytes(entry["bytes"]).decode() == entry["token"]
    plain = here.ask("Describe the picture.", logprobs=True, max_tokens=2).json()["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in plain["content"]] == [[], []]


def test_the_models_are_listed(here):
    (model,) = here.client().models.list()
    assert model.id == NAME and here.client().models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        here.client().models.retrieve("another")
    assert here.send("GET", "health").json() == {"status": "ok"}


def test_metrics_count(here):
    def read() -> dict[str, float]:
        text = here.send("GET", "metrics").text
        for line in text.splitlines():
            assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{\w+="[^"]+"\})? [\d.e+-]+', line), line
        return {name: float(value) for name, _, value in
                (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")}  # fmt: skip

    before = read()
    usage = here.ask().json()["usage"]
    refused(here.ask(max_tokens=0), 400)
    after = read()

    def rise(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert rise("ocelli_requests_total") == 1 == rise("ocelli_request_seconds_count")
    assert rise('ocelli_responses_total{status="400"}') == 1
    assert rise("ocelli_new_tokens_total") == usage["completion_tokens"]
    assert rise("ocelli_prompt_tokens_total") == usage["prompt_tokens"]
    assert after["ocelli_running_requests"] == after["ocelli_queue_requests"] == 0
    assert 0 < after["ocelli_first_token_seconds_sum"] <= after["ocelli_request_seconds_sum"]


# -------------------------------------------------------------------------------------- what is asked wrongly


def bomb() -> bytes:
    """A PNG whose header promises more pixels than it may have."""
    Image.new("1", (4000, 4000)).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("stream", [False, True])
def test_choices_have_their_probabilities_beside_the_answer(here, as_json, stream):
    """As on the command line."""
    texts = ["red", "dark blue", "blue"]
    client = here.client().chat.completions
    asked = {"model": NAME, "messages": [message(STAR, EXAMPLE)]}
    form = {"structured_outputs": {"choice": texts}}
    made = client.create(**asked, extra_body=form, stream=stream, max_tokens=1)
    if stream:
        chunks = list(made)
        said = chunks[-1].choices[0].delta
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        said = made.choices[0].message
        text = said.content
    assert text == "blue"
    assert [*said.probabilities] == texts and sum(said.probabilities.values()) == pytest.approx(1)
    assert said.probabilities["blue"] > 0.99 and said.probability_mass > 0.99
    flags = ("--choices", json.dumps(texts), "--dtype", "float32", "--device", "cpu")
    (alone,) = as_json(EXAMPLE, "-q", STAR, *flags, model=FOLDER)
    assert said.probabilities == pytest.approx(alone["probabilities"][0], abs=1e-6)
    if not stream:  # as part of a conversation
        turns = [*asked["messages"], said.model_dump(), message("How many shapes are there?")]
        numbers = [str(number) for number in range(9)]
        more = client.create(
            model=NAME, messages=turns, extra_body={"structured_outputs": {"choice": numbers}}, n=2
        )
        for choice in more.choices:
            shares = choice.message.probabilities
            expected = sum(int(text) * share for text, share in shares.items())
            assert choice.message.expected_value == pytest.approx(expected)


def text_only(text: object) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.slow(but=11)
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"presence_penalty": 2.5}, 400, "presence_penalty"),
        ({"logit_bias": {"7": 5}}, 400, "logit_bias"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"seed": 2**64}, 400, "seed"),
        ({"n": 0}, 400, "n"),
        ({"n": 99}, 400, "n"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens"),
        ({"stop": ["a"] * 5}, 400, "stop"),
        ({"stop": ""}, 400, "stop[0]"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"response_format": {"type": "json_object", "schema": {"type": "array"}}}, 400, "response_format"),
        ({"guided_json": {"a": 1}}, 400, "guided_json"),  # vLLM's: else its clients get what they cannot read
        ({"structured_outputs": {"structural_tag": "{}"}}, 400, "structured_outputs"),
        ({"structured_outputs": "x"}, 400, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, 400, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, 400, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "circle"}}}, 400, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: no_rule"}}, 400, "structured_outputs"),
        ({"structured_outputs": {"choice": ["red", "red"]}}, 400, "structured_outputs"),
        ({"structured_outputs": {"choice": [str(n) for n in range(999)]}}, 400, "structured_outputs.choice"),
        (
            {"structured_outputs": {"choice": [f"{n} " * 50 for n in range(90)]}},
            400,
            "structured_outputs.choice",
        ),
        ({"structured_outputs": {"choice": ["red", "re" * 3000]}}, 400, None),  # longer than the context
        ({"format": "json"}, 400, "format"),  # Ollama's
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "messages[0].images"),
        ({"response_format": {"type": "xml"}}, 400, "response_format"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({"model": "gpt-4o"}, 404, "model"),
        ({"model": str(FOLDER)}, 404, "model"),
        ({"model": None}, 400, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "Hm?"}, 400, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0]"),
        (text_only([{"type": "audio"}]), 400, "messages[0].content[0].type"),
        (text_only([{"type": "text"}]), 400, "messages[0].content[0]"),
        (text_only("   "), 400, None),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, None),
        ({"messages": [message("x", EXAMPLE) | {"role": "system"}]}, 400, "messages[0]"),
        ({"messages": [message("Hm?", *[EXAMPLE] * 4)]}, 400, "messages"),  # too many
        ({"messages": [message("Hm?", "data:image/png;base64,?!")]}, 400, "messages"),
        ({"messages": [message("Hm?", "data:,")]}, 400, "messages"),
        ({"messages": [message("Hm?", b"no image")]}, 400, "messages"),
        ({"messages": [message("Hm?", EXAMPLE.read_bytes()[:900])]}, 400, "messages"),
        ({"messages": [message("Hm?", bomb())]}, 400, "messages"),
    ],
)
def test_what_is_wrong_is_named(here, fields, status, param):
    error = refused(here.ask(**{"stream": True} | fields), status)
    if param is not None:
        assert error["param"] == param
    assert here.engine.stats.running == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),  # seen as it is read,
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),  # when a grammar is tried,
        ({"messages": [message("Hm?", bomb())]}, "messages"),  # when an image is opened,
        ({"structured_outputs": {"choice": ["red", "re" * 3000]}}, None),  # and by the engine
    ],
)
def test_what_is_wrong_is_named_where_nothing_is_streamed_too(here, fields, param):
    error = refused(here.ask(**fields), 400)
    assert param is None or error["param"] == param


def test_an_answer_gets_the_tokens_that_the_context_has_left(tmp_path):
    folder = never_stopping(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 512
    (folder / "config.json").write_text(json.dumps(config))
    with running(folder) as served:
        asked = {"model": "model", "max_tokens": ApiLimits().max_new_tokens}
        answer = served.ask(**asked).json()
        error = refused(served.ask("word " * 3000, **asked), 400)
        longest = refused(served.ask("\U0001f989" * 1_000_000, **asked), 400)
    assert answer["usage"]["total_tokens"] == served.engine.checkpoint.context == 512
    assert answer["choices"][0]["finish_reason"] == "length"
    assert error["code"] == longest["code"] == "context_length_exceeded"


@pytest.mark.parametrize("content", [
    b"", b"{", b"[1]", b"null", b"\xde\xad", b"[" * 99_999, b'{"a":' * 9_999, b'{"model": "\\ud800"}',
    b'{"model": NaN}', b'{"seed": 1' + b"0" * 9_999 + b"}", b'"' + b"x" * 9_999,
])  # fmt: skip
def test_a_body_that_is_no_json_object(here, content):
    refused(here.send("POST", content=content, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize(
    ("method", "path", "more", "status"),
    [
        ("GET", CHAT, {}, 405),
        ("DELETE", "v1/models", {}, 405),
        ("POST", "", {"json": {}}, 405),
        ("GET", "redoc", {}, 404),
        ("POST", "v1/embeddings", {"json": {}}, 404),
        ("GET", "v1/models/../../etc/passwd", {}, 404),
        ("POST", CHAT, {"content": b"{}"}, 415),
        ("POST", CHAT, {"content": b"{}", "headers": {"content-type": "application/jsonp"}}, 415),
        ("POST", CHAT, {"json": "x" * 2**21}, 413),
        ("GET", "health", {"headers": {"host": "evil.example"}}, 403),
        ("POST", CHAT, {"json": {}, "headers": {"origin": "http://evil.example"}}, 403),
        ("POST", CHAT, {"json": {}, "headers": {"origin": "null"}}, 403),
        ("POST", CHAT, {"json": {}, "headers": {"origin": "http://[::1"}}, 403),
    ],
)
def test_every_refusal_is_an_error_in_openais_form(here, method, path, more, status):
    refused(here.send(method, path, **more), status)
    assert here.send("GET", "health", headers={"host": "api.example"}).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)


@pytest.mark.slow
@given(st.sampled_from(sorted(ChatRequest.model_fields)) | st.text(max_size=9), JSON)
@settings(max_examples=100, deadline=None)
def test_any_value_of_any_field_is_taken_or_refused(name, value):
    with suppress(Refused):
        asked = check_request(read_object(json.dumps(body() | {name: value}).encode()))
        with suppress(Refused):
            assert asked.options(100, 4).max_new_tokens <= 100


def test_a_body_of_very_many_values_is_refused_before_they_are_looked_at():
    with pytest.raises(Refused):
        read_object(json.dumps(body(metadata=[0] * 60_000)).encode())
    assert read_object(json.dumps(body(metadata=[0] * 40_000)).encode())


# What other clients send besides, as their documentation or source says.
OF_OTHERS = {
    "keep_alive": "5m", "options": {"num_ctx": 4096}, "think": False,  # Ollama
    "chat_template_kwargs": {"enable_thinking": False}, "mm_processor_kwargs": {}, "priority": 0,  # vLLM
    "cache_salt": "x", "add_special_tokens": True, "skip_special_tokens": True, "top_k": -1,
    "cache_prompt": True, "id_slot": -1, "typical_p": 1, "top_a": 0,  # llama.cpp, KoboldCpp
    "extra_body": {}, "drop_params": True, "api_version": "1", "reasoning_effort": "none",  # LiteLLM
    "chat_id": "7", "session_id": "8", "features": {}, "model_item": {},  # Open WebUI
    "stream_options": {"include_usage": True}, "user": "me",
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_what_changes_no_answer_is_ignored(here, stream):
    plain = here.ask().json()["choices"][0]["message"]["content"]
    asked = body(**OF_OTHERS | {"stream": stream})
    (told,) = asked["messages"]
    told |= {"id": "1", "timestamp": 5}
    told["content"][1] |= {"cache_control": {"type": "ephemeral"}}
    told["content"][0]["image_url"]["format"] = "image/png"
    answer = here.send("POST", json=asked)
    text = read_stream(events(answer))[0][0] if stream else answer.json()["choices"][0]["message"]["content"]
    assert text == plain
    # And those that ask for nothing of what is refused.
    asked = body(**dict.fromkeys(REFUSED, 0), modalities=["text"])
    assert here.send("POST", json=asked).status_code == 200


@pytest.mark.parametrize("name", [*REFUSED, "modalities"])
def test_what_would_change_an_answer_is_refused(name):
    with pytest.raises(Refused) as caught:
        check_request(body(**{name: ["audio"]}))
    assert caught.value.status == 400 and caught.value.param.startswith(name)


def test_no_more_tokens_are_made_than_the_server_allows(here):
    assert here.ask(max_tokens=100_000).json()["choices"][0]["message"]["content"] == "blue"
    babble = here.ask("Describe the picture.", max_completion_tokens=10**9, temperature=2, seed=3).json()
    assert babble["usage"]["completion_tokens"] <= 300


def test_the_server_explains_itself_without_a_network(here):
    described = here.send("GET", "openapi.json").json()
    assert {"/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= described["paths"].keys()
    jsonschema.Draft202012Validator.check_schema(described["components"]["schemas"]["ChatRequest"])


# -------------------------------------------------------------------------------------------------- strangers
def test_the_server_looks_nothing_up_and_reads_nothing(here, tmp_path, monkeypatch):
    looked_up, look_up = [], socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: (looked_up.append(host), look_up(host, *rest, **more))[1],
    )
    own = tmp_path / "own.png"
    own.write_bytes(EXAMPLE.read_bytes())
    for url in ("http://example.org/x.png", "ftp://example.org/x", str(own), f"file://{own}", "x" * 9999):
        refused(here.send("POST", json=body("Hm?", url)), 400)
    assert set(looked_up) <= {"127.0.0.1"}


def test_a_model_that_needs_an_image_is_not_asked_without_one(single_folder):
    asked = {"model": single_folder.name, "messages": [{"role": "user", "content": "Hm?"}]}
    with running(single_folder) as served:
        assert "image" in refused(served.send("POST", json=asked), 400)["message"]


def test_addresses_are_fetched_if_allowed_but_never_private_ones(monkeypatch):
    """Nor those that a public one leads to: tests/test_fetch.py holds `data.fetch` to that."""
    with running(allow_urls=True) as served, socket.create_server(("127.0.0.1", 0)) as private:
        private.settimeout(0.2)
        for host in ("127.0.0.1", "localhost", "0.0.0.0", "[::1]"):
            url = f"http://{host}:{private.getsockname()[1]}/x.png"
            refused(served.send("POST", json=body("Hm?", url)), 400)
        with pytest.raises(TimeoutError):
            private.accept()


class Colour(enum.StrEnum):
    RED, GREEN, BLUE = "red", "green", "blue"


class Count(BaseModel):
    count: int


class Chosen(BaseModel):
    colour: Colour


def by_openai(served: Running, question: str, form: type[BaseModel]) -> BaseModel | None:
    asked = {"model": NAME, "messages": [message(question, EXAMPLE)], "response_format": form}
    return served.client().chat.completions.parse(**asked).choices[0].message.parsed


def by_langchain(served: Running, question: str, form: type[BaseModel]) -> BaseModel:
    library = pytest.importorskip("langchain_openai")
    model = library.ChatOpenAI(model=NAME, base_url=f"{served.url}v1", api_key="none", max_retries=0)
    return model.with_structured_output(form).invoke([message(question, EXAMPLE)])


def by_instructor(served: Running, question: str, form: type[BaseModel]) -> BaseModel:
    library = pytest.importorskip("instructor")
    client = library.from_openai(served.client(), mode=library.Mode.JSON_SCHEMA)
    messages = [message(question, EXAMPLE)]
    return client.chat.completions.create(model=NAME, response_model=form, messages=messages, max_retries=0)


def by_pydantic_ai(served: Running, question: str, form: type[BaseModel]) -> BaseModel:
    library = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{served.url}v1", api_key="none")
    agent = library.Agent(
        models.OpenAIChatModel(NAME, provider=provider), output_type=library.NativeOutput(form)
    )
    image = library.BinaryContent(EXAMPLE.read_bytes(), media_type="image/png")
    return agent.run_sync([question, image]).output


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("ask", [by_openai, by_langchain, by_instructor, by_pydantic_ai])
@pytest.mark.parametrize(
    ("question", "form", "value"),
    [
        (SHAPES, Count, int),
        (STAR, Chosen, Colour),
    ],
)
def test_the_classes_of_a_client_hold_the_plain_answers(here, ask, question, form, value):
    plain = here.ask(question).json()["choices"][0]["message"]["content"]
    (got,) = dict(ask(here, question, form)).values()
    assert got == value(plain)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_fit_a_schema(here, stream):
    """Beside others that are free, several answers to one question, whole and streamed."""
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "star", "schema": schema}}
    asked = body(response_format=form, n=3, temperature=1.0, seed=1, stream=stream)
    made = here.client().chat.completions.create(**asked)
    texts = [""] * 3
    if stream:
        for chunk in made:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = [choice.message.content for choice in made.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    assert here.ask().json()["choices"][0]["message"]["content"] == "blue"


@pytest.mark.parametrize(
    "schema", [{"type": "nothing"}, {"$ref": "#/nowhere"}, {"type": "string", "x": "a" * 10**6}]
)
def test_a_schema_that_cannot_be_used_is_refused(here, schema):
    form = {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}
    refused(here.ask(response_format=form), 400)


def test_only_who_has_the_key_asks():
    with running(api_key="sésame") as served:
        for sent in (None, b"Bearer", b"Bearer sesame", b"Basic s\xc3\xa9same", b"Bearer s\xc3\xa9same2"):
            headers = {} if sent is None else {"authorization": sent}
            for method, path in (("POST", CHAT), ("GET", "v1/models"), ("GET", "nothing")):
                answer = served.send(method, path, headers=headers)
                assert refused(answer, 401)["code"] == "invalid_api_key"
        assert served.send("GET", "health").status_code == 200  # for balancers
        for path in ("", "openapi.json"):  # for browsers
            headers = {"accept": "text/html"}
            answer = served.send("GET", path, headers=headers, follow_redirects=True)
            assert answer.status_code == 200 and "sésame" not in answer.text
        right = {"authorization": b"Bearer s\xc3\xa9same"}
        assert served.send("GET", "v1/models", headers=right).status_code == 200


def connect(served: Running) -> socket.socket:
    port = int(served.url.rstrip("/").rsplit(":", 1)[1])
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def heard(connection: socket.socket) -> bytes:
    """All that a server says until it closes the connection."""
    said = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(2**16):
            said += piece
    return said


def test_a_body_without_an_end_is_cut_off_at_the_limit(here):
    head = f"POST /{CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connect(here) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        piece, sent = b"10000\r\n" + b"[" * 2**16 + b"\r\n", 0
        with suppress(ConnectionError):
            while sent < 256 * 2**20:  # far more than the limit and all buffers in between
                connection.sendall(piece)
                sent += 2**16
        assert sent < 256 * 2**20
    with connect(here) as connection:  # a length that is a lie would be held; this one is refused at once
        connection.sendall(f"{head}Content-Length: 99999999999\r\n\r\n".encode())
        assert b" 413 " in connection.recv(2**16)


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a" * 99_999]
)
def test_what_is_no_http_is_refused(here, garbage):
    with connect(here) as connection:
        connection.sendall(garbage)
        assert b" 400 " in heard(connection).splitlines()[0]


def test_one_connection_too_many_is_answered_and_leaves_room(monkeypatch):
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    with running() as served, connect(served) as idle, connect(served) as other:
        assert served.send("GET", "health").status_code == 503
        idle.close()
        assert wait_for(lambda: served.send("GET", "health").status_code == 200)
        other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 200 " in heard(other).splitlines()[0]


def test_a_body_that_does_not_come_is_not_waited_for(here, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.1)
    head = (
        f"POST /{CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
    )
    with connect(here) as connection:
        connection.sendall(f"{head}\r\n{{".encode())
        assert b" 408 " in connection.recv(2**16)


def test_all_bodies_together_are_bounded():
    with running(max_held=2**14) as served:
        for _ in range(3):
            assert int(served.ask().headers["retry-after"]) >= 1  # the image alone is more
            refused(served.ask("Hm?", b"no image"), 400)  # and room is given back


def test_a_body_that_is_only_announced_takes_no_room_from_others():
    with running(max_held=2**20, max_body=2**20) as served, connect(served) as connection:
        connection.sendall(
            f"POST /{CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {2**20}\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        assert b" 100 " in connection.recv(2**16)  # it is being waited for
        assert served.ask().status_code == 200


def test_images_of_one_client_are_opened_in_turn_with_those_of_others(monkeypatch):
    media, gate, order = Media(ApiLimits()), threading.Event(), []
    monkeypatch.setattr(media, "_read", lambda url, name: (gate.wait(PATIENCE) and order.append(url)) or b"")

    async def read() -> None:
        asked = [("many", [f"data:{number}" for number in range(8)]), ("other", ["one"])]
        requests = [(client, check_request(body("Hm?", *urls))) for client, urls in asked]
        tasks = [asyncio.create_task(media.read(one, client, id)) for client, one in requests]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(read())
    assert len(order) == 9 and order.index("one") < 4


@pytest.fixture
def internet(tmp_path, monkeypatch) -> Path:
    """The folder whose files are those of http://a."""

    def fetched(url: str, *_) -> bytes:
        if not (path := tmp_path / url.removeprefix("http://a/")).exists():
            raise ImageError("no such file")
        return path.read_bytes()

    monkeypatch.setattr("web.media.read_bytes", fetched)
    return tmp_path


def test_what_a_request_has_fetched_takes_room_as_its_body_does(internet):
    shutil.copy(EXAMPLE, internet / "small.png")
    Image.effect_noise((300, 300), 99).save(internet / "large.png")
    with running(allow_urls=True, max_held=40_000) as served:
        for name, status in (("small", 200), ("large", 503), ("small", 200)):
            asked = {"model": NAME, "messages": [message(STAR, f"http://a/{name}.png")]}
            assert served.send("POST", json=asked).status_code == status


def test_an_image_that_is_read_after_another_was_refused_takes_no_room(internet, monkeypatch):
    """It was never given back, until there was none for anybody."""
    shutil.copy(EXAMPLE, internet / "slow.png")
    gate, read = threading.Event(), Media._read

    def held(self, url: str, name: str) -> bytes:
        assert "slow" not in url or gate.wait(PATIENCE)
        return read(self, url, name)

    monkeypatch.setattr(Media, "_read", held)
    size = EXAMPLE.stat().st_size
    with running(allow_urls=True, max_held=size + size // 2) as served:

        def ask(*names: str):
            urls = (f"http://a/{name}.png" for name in names)
            return served.send("POST", json={"model": NAME, "messages": [message(STAR, *urls)]})

        refused(ask("slow", "none"), 400)
        gate.set()
        assert ask("slow").status_code == 200


@pytest.mark.slow
def test_the_log_has_a_line_for_a_request_without_its_content(caplog):
    with (
        running() as here,
        caplog.at_level(logging.INFO, "ocelli.server"),
    ):  # those of earlier requests are over
        here.ask("Is the secret out?", user="secret")
        here.ask(**{"secret": 1})
        for fields in ({"n": "secret"}, text_only([{"type": "secret"}]), {"stop": [["secret"]]}):
            assert "secret" not in refused(here.ask(**fields), 400)["message"]
        here.send("GET", "nothing%0A?secret")
        assert wait_for(lambda: len(caplog.messages) == 6)
    assert "secret" not in caplog.text
    assert all(len(line.splitlines()) == 1 for line in caplog.messages)
    statuses = [re.search(r" (\d{3}) ", line)[1] for line in caplog.messages]
    assert sorted(statuses) == ["200", "200", "400", "400", "400", "404"]  # in any order


def test_a_fault_of_ours_says_nothing_and_the_server_goes_on(here, monkeypatch, caplog):
    words = "words of a visitor"  # not in the line that raises, which the log has

    def broken(*_):
        raise KeyError(words)

    with monkeypatch.context() as patch:
        patch.setattr(here.engine, "submit", broken)
        error = refused(here.ask(), 500)
    assert wait_for(lambda: "KeyError" in caplog.text)
    assert error["type"] == "server_error" and words not in error["message"] + caplog.text
    assert here.ask().status_code == 200


# ----------------------------------------------------------------------------- those that wait, leave and end
def test_who_leaves_takes_the_request_along(babbling):
    asked = body(model="model", max_tokens=1000, stream=True)
    stream = babbling.client().chat.completions.create(**asked)
    next(iter(stream))
    assert babbling.engine.stats.running == 1
    stream.close()
    assert wait_for(lambda: babbling.engine.stats.running == 0)
    with connect(babbling) as connection:  # before the first token, without a stream
        raw = json.dumps(body(model="model", max_tokens=1000)).encode()
        connection.sendall(f"POST /{CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)  # fmt: skip
        assert wait_for(lambda: babbling.engine.stats.running == 1)
    assert wait_for(lambda: babbling.engine.stats.running == 0)


def test_a_full_queue_says_when_to_come_again(babbling):
    clients = [babbling.client() for _ in range(3)]
    asked = {"model": "model", "messages": body()["messages"], "max_tokens": 1000}
    threads = [threading.Thread(target=give_up, args=(client, asked), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    assert wait_for(lambda: babbling.engine.stats.waiting == 2 and babbling.engine.stats.running == 1)
    answer = babbling.ask(model="model")
    assert refused(answer, 429)["type"] == "rate_limit_error" and int(answer.headers["retry-after"]) >= 1
    for client in clients:
        client.close()
    assert wait_for(lambda: babbling.engine.stats.running == babbling.engine.stats.waiting == 0)


def give_up(client: openai.OpenAI, asked: dict) -> None:
    with suppress(Exception):
        for _ in client.chat.completions.create(**asked, stream=True):
            pass


@pytest.mark.slow
def test_a_request_has_its_time(tmp_path):
    folder = never_stopping(tmp_path / "model")
    with running(slow(folder), seconds=1) as served:
        assert refused(served.ask(model="model", max_tokens=1000), 504)["code"] == "timeout"
        with connect(served) as connection:  # its body counts
            head = f"POST /{CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
            assert b" 504 " in connection.recv(2**16)
        with pytest.raises(openai.APIError, match="longer"):
            for _ in served.client().chat.completions.create(
                **body(model="model", max_tokens=1000, stream=True)
            ):
                pass
        assert wait_for(lambda: served.engine.stats.running == 0)


def test_what_a_proxy_says_of_a_client_reaches_the_log_printable_and_short(caplog):
    with caplog.at_level(logging.INFO, "ocelli.server"), running(proxies=["127.0.0.1"]) as served:
        said = [(b"x-forwarded-for", b"\x1b[2J\xc2\x85" + b"9" * 5000)]
        assert served.send("GET", "health", headers=said).status_code == 200
        assert wait_for(lambda: caplog.messages)
    (line,) = caplog.messages
    assert line.isprintable() and len(line) < 200


@pytest.fixture
def process(tmp_path):
    """Start serve.py as a user does: (the process, the address that it says)."""
    started = []

    def start(
        *words: str, command: list[str] | None = None, folder: Path = ROOT
    ) -> tuple[subprocess.Popen, str]:
        command = command or [sys.executable, "serve.py", "--port", str(free_port()), "--device", "cpu"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        piped = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        one = subprocess.Popen([*command, *words], cwd=folder, env=environment, **piped)
        started.append(one)
        said = next((line for line in one.stderr if "http://" in line or "error" in line), "nothing")
        assert "http://" in said, said
        return one, re.search(r"http://\S+", said)[0]

    yield start
    for one in started:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
        one.communicate()


@pytest.mark.slow
def test_after_sigterm_what_was_accepted_is_answered(process, tmp_path):
    folder = never_stopping(tmp_path / "model")
    server, url = process("--model", str(folder))
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    stream = iter(client.chat.completions.create(**body(model="model", max_tokens=200, stream=True)))
    next(stream)
    server.send_signal(signal.SIGTERM)
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    _, said = server.communicate(timeout=PATIENCE)
    assert server.returncode == 0 and "Traceback" not in said
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/models", trust_env=False)


@pytest.mark.slow
def test_the_drain_has_its_time(process, tmp_path):
    folder = never_stopping(tmp_path / "model")
    server, url = process("--model", str(folder), "--drain", "1", "--max-tokens", "100000")
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    # Sampled, so that no lookup speeds it up; 1,900 tokens fill the model's context.
    asked = body(model="model", max_tokens=1900, stream=True, n=8, temperature=2)
    stream = iter(client.chat.completions.create(**asked))
    next(stream)
    began = time.monotonic()
    server.send_signal(signal.SIGTERM)
    with suppress(openai.APIError, httpx.TransportError):
        list(stream)
    server.communicate(timeout=PATIENCE)
    assert server.returncode == 0 and time.monotonic() - began < PATIENCE / 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "70000"], "--port"),
        (["--host", "203.0.113.9"], "203.0.113.9"),
        (["--model", "no/such/folder"], "no/such/folder"),
        (["--api-key", ""], "--api-key"),
    ],
)
def test_a_start_that_fails_is_one_sentence(capsys, arguments, expected):
    port = [] if "--port" in arguments else ["--port", str(free_port())]
    assert serve.main([*arguments, *port]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("serve.py: error: ") and expected in printed and printed.count("\n") == 1


@pytest.mark.slow
def test_serve_py_under_a_little_load():
    """`python -m tests.soak.load` does it for minutes. No answer is wrong, and the server stays up."""
    found = run("server", clients=2, seconds=1)
    assert is_sound(found), found
    assert found["garbage"] >= 2 and found["asked"] >= 2 and found["exit_status"] == 0


# ---------------------------------------------------------------------------------------------- docs/serve.md
SERVE_PAGES = [ROOT / "docs/serve.md", ROOT / "docs/serve-reference.md"]
SERVE_BLOCKS = [block for page in SERVE_PAGES for block in blocks(page)]


@pytest.fixture(scope="module")
def as_documented() -> Iterator[Running]:
    with running() as served:
        yield served


def localised(text: str, served: Running) -> str:
    assert "http://localhost:8000" in text  # serve.py's default
    return text.replace("http://localhost:8000", served.url.rstrip("/"))


@pytest.mark.parametrize("block", [b for b in SERVE_BLOCKS if "curl " in b.text], ids=lambda b: b.text[:40])
def test_a_curl_command_of_the_page(as_documented, block):
    command = ["bash", "-ec", localised(block.text, as_documented)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert block.output is None or re.sub(r"\s+", "", done.stdout) == re.sub(r"\s+", "", block.output)
    assert '"error"' not in done.stdout


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    "block", [b for b in SERVE_BLOCKS if b.language == "python" and "localhost:8000" in b.text]
)
def test_a_client_of_the_page(as_documented, block, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(localised(block.text, as_documented), "a page", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == block.output


@pytest.mark.slow
def test_make_serve(process):
    server, url = process(command=["make", "--no-print-directory", "serve"])
    answer = httpx.post(f"{url}/chat/completions", json=body(), timeout=PATIENCE, trust_env=False)
    assert answer.json()["choices"][0]["message"]["content"] == "blue"
    for path in ("", "page/page.js", "page/example.png"):
        assert httpx.get(url.removesuffix("v1") + path, trust_env=False).status_code == 200
    os.killpg(server.pid, signal.SIGINT)
    _, rest = server.communicate(timeout=PATIENCE)
    assert server.returncode in (0, -signal.SIGINT) and "Traceback" not in rest


@pytest.mark.slow
def test_what_the_container_holds_is_all_that_the_server_needs(process, tmp_path):
    """Its files and its command. The image with its packages was built by hand: docs/deploy.md."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in kept:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    user, entry = (next(line for line in lines if line.startswith(word)) for word in ("USER ", "ENTRYPOINT "))
    assert user != "USER root" and lines.index(user) < lines.index(entry)
    command = [sys.executable, *json.loads(entry.removeprefix("ENTRYPOINT "))[1:], "--port", str(free_port())]
    _, url = process(command=command, folder=tmp_path)
    url = url.replace("0.0.0.0", "127.0.0.1")
    answer = httpx.post(f"{url}/chat/completions", json=body(), timeout=PATIENCE, trust_env=False)
    assert answer.json()["choices"][0]["message"]["content"] == "blue"
