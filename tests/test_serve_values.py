"""Values in requests: how many are looked at, and what numbers may be."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from data.tools import Tool
from inference.calls import CallReader, whole_calls
from inference.markup import MARKUPS
from tests.servers import MESSAGES, NAME, RESPONSES, Running, running
from web.blocks import Block, Blocks
from web.errors import Refused
from web.protocol import MOST_VALUES, ChatMessage, read_json, read_object


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    with running(max_new_tokens=100, max_body=4 * 2**20) as served:
        yield served


def called(arguments: str) -> list[dict]:
    """Items of a call with its result."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    return [call, {"type": "function_call_output", "call_id": "1", "output": "ok"}]


@pytest.mark.parametrize(
    "mark", [",", "[", "{", r"\u002c", r"\u002C", r"\u005b", r"\u005B", r"\u007b", r"\u007B"]
)
def test_values_in_texts_that_are_json_count_however_their_marks_are_written(mark):
    for arguments in (f"[{mark.join('0' * (MOST_VALUES + 2))}]", (mark * 190 + "]" * 190) * 300):
        with pytest.raises(Refused, match="values"):
            read_object(f'{{"arguments": "{arguments}"}}'.encode())


def test_arguments_that_come_as_an_object_are_kept_as_a_text():
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"é": [1, 2.5]}}}]}
    (one,) = ChatMessage.model_validate(called).tool_calls
    assert one.arguments == '{"é": [1, 2.5]}'


# --------------------------------------------------------------------------------- numbers that JSON can hold
NUMBERS = ["1e400", "-1e999", "1" * 400 + ".5", "NaN", "Infinity", "-Infinity", "1" * 5000, r'"\ud800"']


def bodies() -> Iterator[tuple[str, str]]:
    """(path, body) with NUMBER wherever a client's history, tools or fields may have one."""
    chat, asked = "v1/chat/completions", {"role": "user", "content": "a"}
    inner = json.dumps({"a": [{"b": "NUMBER"}]}).replace('"NUMBER"', "NUMBER")
    function = {"name": "f", "arguments": inner}
    calls = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "b"}
    yield chat, {"messages": [asked, calls, result]}
    yield chat, {"messages": [asked], "temperature": "NUMBER"}
    yield chat, {"messages": [asked], "seed": "NUMBER"}
    yield chat, {"messages": [asked], "metadata": {"a": "NUMBER"}}
    yield chat, {"messages": [asked | {"extra": "NUMBER"}]}
    schema = {"enum": ["NUMBER"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    yield chat, {"messages": [asked], "response_format": form}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    yield chat, {"messages": [asked], "tools": [{"type": "function", "function": tool}]}
    yield RESPONSES, {"input": [*called(inner), {"role": "user", "content": "a"}]}
    yield RESPONSES, {"input": "a", "metadata": {"a": "NUMBER"}}
    used = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "NUMBER"}}
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "b"}]}
    yield MESSAGES, {"messages": [asked, {"role": "assistant", "content": [used]}, told], "max_tokens": 4}
    yield MESSAGES, {"messages": [asked], "max_tokens": 4, "top_k": "NUMBER"}


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS, ids=lambda text: text[:9])
def test_numbers_that_json_cannot_hold_are_not_read(here, number):
    """At any place of any protocol, whole or streamed."""
    for count, (path, body) in enumerate(bodies()):
        content = json.dumps({"model": NAME, "stream": count % 2 == 0} | body)
        in_text = '"b": NUMBER' in content.replace("\\", "")  # JSON in a text
        content = content.replace('"NUMBER"', number)
        content = content.replace("NUMBER", json.dumps(number)[1:-1] if in_text else number)
        answer = here.send(
            "POST", path, content=content.encode(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400 and answer.json(), (path, content[:300], answer.text)


@pytest.mark.parametrize("markup", ["xml", "pythonic", "gemma", "hermes"])
@pytest.mark.parametrize("number", ["1e400", "-1e999", "[1, 2e999]", '{"a": 1e400, "n": 3}'])
def test_numbers_that_json_cannot_hold_are_not_said_in_calls(markup, number):
    """A model that is held to a grammar does not begin them, or they become the largest that can be."""
    tool = Tool("f", None, {"type": "object", "properties": {"x": {}}})
    written = {
        "xml": f"<parameter=x>\n{number}\n</parameter>\n",
        "pythonic": f"x={number}",
        "gemma": f"{{x:{number}}}",
    }
    own, call = MARKUPS[markup], written.get(markup, f'{{"x": {number}}}')
    layout, reader = own.layout(tool), CallReader(own, [tool])
    text = own.marks.opens + own.before + layout.head + call
    _, pieces = reader.put(text + layout.tail + own.after + own.marks.closes, last=True)
    (call,) = whole_calls(pieces)
    assert read_json(call.arguments).keys() == {"x"} and "3.0" not in call.arguments
    blocks = Blocks([Block("call", "1", "f", "".join(piece.arguments for piece in pieces), whole=True)])
    (kept,) = ChatMessage.model_validate(blocks.message).tool_calls
    assert read_json(kept.arguments).keys() == {"x"}
