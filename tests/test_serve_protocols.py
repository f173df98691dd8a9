"""The other protocols of serve.py say what chat completions say, and their clients' types take every word."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import httpx
import jsonschema
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel, TypeAdapter

from tests.house import data_url
from tests.pages import never_stopping, slow
from tests.servers import (
    CHAT,
    CUP,
    EXAMPLE,
    FOLDER,
    MESSAGES,
    NAME,
    RESPONSES,
    SHAPES,
    STAR,
    Several,
    message,
    refused,
    running,
    several,
)  # fmt: skip
from tests.test_thinking import QUESTION, save
from tests.tool_checkpoints import save as save_caller
from web import anthropic, responses
from web.blocks import Delta
from web.engine import QueueFull
from web.errors import Refused
from web.protocol import check_request

EVENTS = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("protocols") / "qwen", "qwen", "open")


@pytest.fixture(scope="module")
def here(thinking, tmp_path_factory) -> Iterator[Several]:
    caller = save_caller(tmp_path_factory.mktemp("protocols") / "hermes", "hermes")
    with several(FOLDER, thinking, caller, max_new_tokens=300) as served:
        yield served


def asked(question: str = STAR, image: Path = EXAMPLE, **fields) -> dict:
    parts = [{"type": "input_image", "image_url": data_url(image), "detail": "auto"}]
    content = [*parts, {"type": "input_text", "text": question}]
    return {"model": NAME, "input": [{"role": "user", "content": content}]} | fields


def read_events(answer: httpx.Response) -> list[dict]:
    """Of a stream whose events have names."""
    assert answer.status_code == 200, answer.text
    made = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    return made


def read(answer: httpx.Response) -> Response:
    """A response, streamed or not. Its events come in their order, and say the same as its end."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.status_code == 200, answer.text
        return Response.model_validate(answer.json(), strict=True)
    events = read_events(answer)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    for event in events:
        EVENTS.validate_python(event, strict=True)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] in ("completed", "incomplete")
    whole, texts, open_items = events[-1]["response"], dict[str, str](), list[str]()
    for event, kind in zip(events[2:-1], kinds[2:-1]):
        name, _, what = kind.rpartition(".")
        index = event["output_index"]
        if kind == "output_item.added":
            assert index == len(texts) and not open_items
            open_items.append(event["item"]["id"])
            texts[event["item"]["id"]] = ""
        elif kind == "output_item.done":
            assert event["item"] == whole["output"][index] and event["item"]["id"] == open_items.pop()
        else:
            assert event["item_id"] == open_items[-1]
            if what == "delta":
                texts[event["item_id"]] += event["delta"]
            elif name != "content_part" and name != "reasoning_summary_part" and what == "done":
                assert event.get("text", event.get("arguments")) == texts[event["item_id"]]
    assert not open_items and len(texts) == len(whole["output"])
    return Response.model_validate(whole, strict=True)


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def respond(request, here):
    def respond(**body) -> Response:
        return read(here.send("POST", RESPONSES, json=body | {"stream": request.param}))

    return respond


# -------------------------------------------------------------------------------------------------- responses
def test_a_response_says_what_a_chat_completion_says(here, respond):
    made = respond(**asked("Describe the picture.", instructions="Be short.", top_logprobs=2,
                           include=["message.output_text.logprobs"], metadata={"a": "b"}))  # fmt: skip
    said = [{"role": "system", "content": "Be short."}, message("Describe the picture.", EXAMPLE)]
    chat = here.ask(logprobs=True, top_logprobs=2, messages=said)
    (choice,), usage = chat.json()["choices"], chat.json()["usage"]
    assert made.output_text == choice["message"]["content"] and made.status == "completed"
    assert made.usage.input_tokens == usage["prompt_tokens"]
    assert made.usage.output_tokens == usage["completion_tokens"]
    logged = made.output[0].content[0].logprobs
    assert [one.token for one in logged] == [one["token"] for one in choice["logprobs"]["content"]]
    assert (made.instructions, made.metadata) == ("Be short.", {"a": "b"})


def test_an_answer_that_is_cut_is_incomplete_and_boxes_stand_beside_the_text(respond):
    made = respond(**asked("Describe the picture.", max_output_tokens=3))
    assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
    assert made.usage.output_tokens == 3 and made.output[0].status == "incomplete"
    (part,) = respond(**asked("Where is the star?")).output[0].content
    assert part.boxes[0]["label"] == "star" and part.boxes[0]["box"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("summary", [None, "auto"])
def test_thinking_is_an_item_of_its_own(here, respond, thinking, summary):
    fields = {"model": "qwen", "input": QUESTION, "max_output_tokens": 6, "thinking_token_budget": 9}
    made = respond(**fields, reasoning={"effort": "low", "summary": summary})
    body = {"model": "qwen", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}
    chat = here.send("POST", json=body | {"reasoning_effort": "low", "thinking_token_budget": 9})
    said, (thought, spoken) = chat.json()["choices"][0]["message"], made.output
    (part,) = thought.summary if summary else thought.content
    assert (part.text, made.output_text) == (said["reasoning_content"], said["content"])
    assert made.usage.output_tokens_details.reasoning_tokens > 0 and spoken.type == "message"
    # As clients send it back.
    items = [{"role": "user", "content": QUESTION}, *(item.model_dump() for item in made.output)]
    again = respond(**fields | {"input": [*items, {"role": "user", "content": "why?"}]})
    talk = [*body["messages"], said, {"role": "user", "content": "why?"}]
    fields = {"reasoning_effort": "low", "thinking_token_budget": 9}
    follow = here.send("POST", json=body | fields | {"messages": talk}).json()
    assert again.usage.input_tokens == follow["usage"]["prompt_tokens"]
    assert again.output_text == follow["choices"][0]["message"]["content"]


class Count(BaseModel):
    count: int


def test_openais_client_reads_responses(here):
    client = here.client()
    assert client.responses.parse(**asked(SHAPES), text_format=Count).output_parsed.count > 0
    with client.responses.stream(**asked(SHAPES), text_format=Count) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed.count > 0
    assert "response.output_text.delta" in kinds
    schema = {"type": "object", "properties": {"a": {"enum": ["red", "blue"]}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    jsonschema.validate(json.loads(client.responses.create(**asked(text=form)).output_text), schema)
    assert client.responses.create(**asked(text={"format": {"type": "text"}})).output_text == "blue"


def user(**part) -> dict:
    return {"input": [{"role": "user", "content": [part]}]}


TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


@pytest.mark.slow(but=11)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (user(type="input_file", file_id="x"), "input[0].content[0]"),
        (user(type="input_image", file_id="x"), "input[0].content[0]"),
        (user(type="input_image", image_url=3), "input"),
        (user(type="input_image", image_url="http://a/b"), "input"),
        ({"input": "x" * 1_000_001}, "input"),
        ({"n": 2}, "n"),
        ({"stream": "false"}, "stream"),
        ({"model": "gpt-6"}, "model"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"text": "json"}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text.format"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_response_is_named_in_its_own_words(here, fields, param):
    answer = here.send("POST", RESPONSES, json=asked(stream=True) | fields)
    assert refused(answer, 404 if param == "model" else 400)["param"] == param


def test_what_changes_no_response_is_ignored(here):
    ignored = {"service_tier": "auto", "prompt_cache_key": "x"}
    unknown = {"truncation": "auto", "max_tool_calls": 3}
    answer = here.send("POST", RESPONSES, json=asked(**ignored, **unknown, include=[], user="me"))
    assert answer.json()["output"][0]["content"][0]["text"] == "blue"
    known = check_request(responses.chat_body(asked())).model_fields_set
    assert known <= {"model", "messages", "stream", "stream_options"}
    # Each field of OpenAI's client is taken, refused or ignored: none is an error of ours.
    for name in ResponseCreateParamsBase.__annotations__:
        for value in ("x", 1, [1], {"a": 1}, True):
            try:
                check_request(responses.chat_body(asked() | {name: value}))
            except Refused as error:
                assert error.status == 400, (name, value)


@pytest.mark.slow
def test_a_stream_whose_time_is_over_ends_with_a_response_that_failed(tmp_path):
    folder = never_stopping(tmp_path / "model")
    with running(slow(folder), seconds=1) as served:
        fields = {"model": "model", "input": "Hm?", "max_output_tokens": 1000, "stream": True}
        events = read_events(served.send("POST", RESPONSES, json=fields))
        failed = Response.model_validate(events[-1]["response"], strict=True)
        assert events[-1]["type"] == "response.failed" and failed.status == "failed"
        assert failed.error.code == "server_error" and failed.error.message
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        fields = {"model": "model", "max_tokens": 1000, "stream": True}
        fields |= {"messages": [{"role": "user", "content": "Hm?"}]}
        last = read_events(served.send("POST", MESSAGES, json=fields))[-1]
        assert last["type"] == "error" and last["error"]["message"]


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
USAGE |= {
    "prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 0},
}  # fmt: skip


def converted(made, cut: bool = False) -> list[dict]:
    """The events of an answer that says something and calls two functions, or is cut in the second call."""
    first, second = (
        partial(Delta, 0, "call", call="call_a"),
        partial(Delta, 0, "call", call="call_b", call_number=1),
    )
    deltas = [Delta(0, "text", "Let me "), Delta(0, "text", "look."), first(name="look")]
    deltas += [first(text='{"at": '), first(text="7}"), first(ended=True), second(name="wait")]
    deltas += [second(text='{"a')] if cut else [second(text="{}"), second(ended=True)]
    deltas.append(Delta(0, "text", finish="length" if cut else "tool_calls"))

    async def come():
        for delta in deltas:
            yield delta._replace(usage=USAGE)

    async def events() -> list[dict]:
        return [event async for event in made.events(come())]

    return asyncio.run(events())


def test_calls_are_items_and_come_back_as_one_message():
    fields = {"model": NAME, "input": "Hm?", "tools": [TOOL]}
    request = check_request({"model": NAME, "messages": [{"role": "user", "content": "Hm?"}]})
    made = responses.Made(fields, request)
    for event in converted(made):
        EVENTS.validate_python(event, strict=True)
    whole = Response.model_validate(made.whole, strict=True)
    _, first, second = whole.output
    assert whole.output_text == "Let me look." and whole.status == "completed"
    assert [(one.call_id, one.name, one.arguments) for one in (first, second)] == [
        ("call_a", "look", '{"at": 7}'),
        ("call_b", "wait", "{}"),
    ]
    picture = [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]
    results = [{"type": "function_call_output", "call_id": "call_a", "output": picture}]
    results += [{"type": "function_call_output", "call_id": "call_b", "output": "done"}]
    items = [item.model_dump(exclude_none=True) for item in whole.output]
    _, answer, one, other = responses.messages_of([{"role": "user", "content": "Hm?"}, *items, *results])
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["look", "wait"]
    assert answer["content"] == [{"type": "text", "text": "Let me look."}]
    assert one["content"][0]["type"] == "image_url" and other["tool_call_id"] == "call_b"
    assert made.blocks.message["tool_calls"] == answer["tool_calls"]
    cut = responses.Made(fields, request)
    converted(cut, cut=True)
    assert cut.whole["status"] == "incomplete" == cut.whole["output"][-1]["status"]
    assert len(cut.blocks.message["tool_calls"]) == 1
    (tool,) = responses.chat_body(fields)["tools"]
    assert tool["function"]["name"] == "weather" and tool["type"] == "function"


SCHEMA = {"type": "object", "properties": {"to": {"enum": ["left", "right"]}}, "required": ["to"]}
SCHEMA |= {"additionalProperties": False}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_functions_are_called_in_each_protocol_and_their_results_seen(here, stream):
    function = {"name": "move", "description": "Moves.", "parameters": SCHEMA}
    fields = {"model": "hermes", "stream": stream, "parallel_tool_calls": False}
    message = {"role": "user", "content": "go"}
    chat = {"model": "hermes", "messages": [message], "tools": [{"type": "function", "function": function}]}
    chat |= {"tool_choice": "required", "parallel_tool_calls": False}
    (plain,) = here.send("POST", json=chat).json()["choices"][0]["message"]["tool_calls"]
    body = fields | {"input": "go", "tools": [{"type": "function", **function}], "tool_choice": "required"}
    made = read(here.send("POST", RESPONSES, json=body))
    (call,) = made.output
    assert (call.name, call.arguments) == ("move", plain["function"]["arguments"])
    logged = body | {"include": ["message.output_text.logprobs"]}
    assert [one.arguments for one in read(here.send("POST", RESPONSES, json=logged)).output] == [
        call.arguments
    ]
    parts = [{"type": "input_image", "image_url": data_url(CUP), "detail": "auto"}]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": parts}
    talk = [{"role": "user", "content": "go"}, call.model_dump(), result]
    seen = read(here.send("POST", RESPONSES, json=body | {"input": talk}))
    result["output"] = "done"
    told = read(here.send("POST", RESPONSES, json=body | {"input": talk}))
    assert seen.usage.input_tokens > told.usage.input_tokens > made.usage.input_tokens
    tool = {"name": "move", "description": "Moves.", "input_schema": SCHEMA}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {"model": "hermes", "max_tokens": 200, "messages": [message], "tools": [tool], "stream": stream}
    said = read_message(here.send("POST", MESSAGES, json=body | {"tool_choice": choice}))
    (block,) = said["content"]
    assert block["name"] == "move" and said["stop_reason"] == "tool_use"
    assert block["input"] == json.loads(plain["function"]["arguments"])
    content = [{"type": "tool_result", "tool_use_id": block["id"], "content": "done"}]
    talk = [message, {"role": "assistant", "content": [block]}, {"role": "user", "content": content}]
    usage = read_message(here.send("POST", MESSAGES, json=body | {"messages": talk}))["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == told.usage.input_tokens


# ------------------------------------------------------------------------------------- Anthropic's messages
def told(question: str = STAR, image: Path = EXAMPLE, **fields) -> dict:
    data = data_url(image).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": question}]
    return {"model": NAME, "max_tokens": 50, "messages": [{"role": "user", "content": content}]} | fields


def read_message(answer: httpx.Response) -> dict:
    """A message, streamed or not."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.status_code == 200, answer.text
        return answer.json()
    begun, *events, ended, last = read_events(answer)
    assert (begun["type"], ended["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    made, content = begun["message"], list[dict]()
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], content[event["index"]]
            for name in ("text", "thinking", "partial_json"):
                block |= {name: block.get(name, "") + delta[name]} if name in delta else {}
        elif "partial_json" in (block := content[event["index"]]):
            block["input"] = json.loads(block.pop("partial_json"))
    return made | ended["delta"] | {"usage": ended["usage"], "content": content}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_message_says_what_a_chat_completion_says(here, stream):
    made = read_message(
        here.send("POST", MESSAGES, json=told(SHAPES, CUP, system="Be short.", stream=stream))
    )
    chat = [{"role": "system", "content": "Be short."}, message(SHAPES, CUP)]
    plain = here.send("POST", json={"model": NAME, "messages": chat}).json()
    (block,), usage = made["content"], made["usage"]
    assert block["text"] == plain["choices"][0]["message"]["content"] and made["stop_reason"] == "end_turn"
    read, cached = usage["input_tokens"], usage["cache_read_input_tokens"]
    assert read + cached == plain["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == plain["usage"]["completion_tokens"]
    cut = read_message(here.send("POST", MESSAGES, json=told("Describe the picture.", max_tokens=2)))
    assert cut["stop_reason"] == "max_tokens"
    fields = {"model": "qwen", "max_tokens": 6, "messages": [{"role": "user", "content": QUESTION}]}
    fields |= {"thinking": {"type": "enabled", "budget_tokens": 9}, "stream": stream}
    thought, said = read_message(here.send("POST", MESSAGES, json=fields))["content"]
    assert thought["thinking"] and said["type"] == "text"


def test_calls_and_results_of_a_message():
    made = anthropic.Made(NAME)
    events = converted(made)
    said, first, second = made.whole["content"]
    assert said["text"] == "Let me look." and made.whole["stop_reason"] == "tool_use"
    assert (first["name"], first["input"], second["input"]) == ("look", {"at": 7}, {})
    cut = anthropic.Made(NAME)
    converted(cut, cut=True)
    assert [block["type"] for block in cut.whole["content"]] == ["text", "tool_use"]
    parts = [one["delta"]["partial_json"] for one in events if one.get("delta", {}).get("partial_json")]
    assert "".join(parts) == '{"at": 7}{}'
    result = {"type": "tool_result", "tool_use_id": first["id"], "content": [{"type": "text", "text": "7"}]}
    talk = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": made.whole["content"]}]
    talk += [{"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
    tools = [{"name": "look", "input_schema": {"type": "object"}, "description": "looks"}]
    choice = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
    body = anthropic.chat_body(told(messages=talk, tools=tools, tool_choice=choice))
    _, answer, tool, last = body["messages"]
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"at": 7}
    assert (tool["role"], tool["tool_call_id"], last["role"]) == ("tool", first["id"], "user")
    assert body["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert body["tool_choice"]["function"] == {"name": "look"} and body["parallel_tool_calls"] is False


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"thinking": {"type": []}}, "thinking.type"),
        ({"tool_choice": {"type": []}}, "tool_choice.type"),
        ({"n": 2}, "n"),
        ({"stream": "false"}, "stream"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"output_config": {"format": {"schema": {"type": "no"}}}}, "output_config.format"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_message_is_named_in_its_own_words(here, fields, param):
    answer = here.send("POST", MESSAGES, json=told(stream=True) | fields)
    error = denied(answer, 400, "invalid_request_error")
    assert error["param"] == param and "reasoning_effort" not in error["message"]


def test_what_is_wrong_is_named_where_nothing_is_streamed_too(here):
    form = {"type": "json_schema", "name": "x", "schema": {"type": "no"}}
    for wrong, param in (({"text": {"format": form}}, "text.format"), ({"background": True}, "background")):
        assert refused(here.send("POST", RESPONSES, json=asked() | wrong), 400)["param"] == param
    for wrong, param in (({"output_config": {"format": form}}, "output_config.format"), ({"n": 2}, "n")):
        answer = here.send("POST", MESSAGES, json=told() | wrong)
        assert denied(answer, 400, "invalid_request_error")["param"] == param


def denied(answer: httpx.Response, status: int, kind: str) -> dict:
    """The error of a response, in the form that Anthropic's clients read."""
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert told.pop("type") == "error" and told["error"]["type"] == kind and told["error"]["message"]
    (error,) = told.values()
    return error


@pytest.mark.slow
def test_a_key_may_come_as_anthropics_clients_send_it_and_every_refusal_has_their_form(monkeypatch):
    with running(api_key="secret", max_body=2**20, queue=1, slots=1) as served:

        def send(path: str = MESSAGES, key: str = "secret", method: str = "POST", **more) -> httpx.Response:
            headers = {"x-api-key": key} | more.pop("headers", {})
            return served.send(method, path, headers=headers, **({"json": told()} | more))

        assert send().status_code == 200
        denied(send(key="other"), 401, "authentication_error")
        denied(send(headers={"host": "elsewhere.example"}), 403, "permission_error")
        denied(send(json=told(model="none")), 404, "not_found_error")
        denied(send(f"{MESSAGES}/batches"), 404, "not_found_error")
        assert "allow" in send(method="GET", json=None).headers
        denied(send(method="GET", json=None), 405, "invalid_request_error")
        denied(send(json=told("x" * 2**20)), 413, "request_too_large")
        denied(send(json=None, content=b"{}"), 415, "invalid_request_error")
        denied(
            send(json=None, content=b"{", headers={"content-type": "application/json"}),
            400,
            "invalid_request_error",
        )
        for error, status, kind in (
            (QueueFull(3), 429, "rate_limit_error"),
            (KeyError(), 500, "api_error"),
            (MemoryError(), 503, "overloaded_error"),
            (TimeoutError(), 504, "timeout_error"),
        ):
            monkeypatch.setattr(served.engine, "submit", Mock(side_effect=error))
            for stream in (False, True):
                denied(send(json=told(stream=stream)), status, kind)
        refused(send(CHAT, key="other"), 401)  # others keep theirs
