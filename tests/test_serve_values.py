"""Values in requests: how many are looked at, what numbers may be, and what stays in memory of them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.test_serve import NAME, Running, refused, running
from web import responses
from web.errors import Refused
from web.protocol import MOST_PIECES, MOST_VALUES, check_request, read_object

RESPONSES, MESSAGES = "v1/responses", "v1/messages"


@pytest.fixture(scope="module")
def here() -> Iterator[Running]:
    with running(max_new_tokens=100, max_body=4 * 2**20) as served:
        yield served


def called(arguments: str) -> list[dict]:
    """Items of a call with its result."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    return [call, {"type": "function_call_output", "call_id": "1", "output": "ok"}]


# ------------------------------------------------------------------------------- conversations that are kept
def test_a_conversation_has_no_more_values_than_one_body(here):
    """However many responses it is spread over."""
    parts = [{"type": "input_text", "text": ""}] * (MOST_PIECES // 3)
    asked, before = {"model": NAME, "max_output_tokens": 1}, None
    for turn in range(3):
        given = [{"role": "user", "content": [*parts, {"type": "input_text", "text": "What?"}]}]
        body = asked | {"input": given, "previous_response_id": before}
        answer = here.send("POST", RESPONSES, json=body)
        if turn == 2:
            assert refused(answer, 400)["param"] == "input"
        else:
            before = answer.json()["id"]
    again = asked | {"input": "and?", "previous_response_id": before}
    assert here.send("POST", RESPONSES, json=again).status_code == 200  # after what was accepted


@pytest.mark.parametrize("comma", [",", r"\u002c", r"\u002C"])
def test_values_in_texts_that_are_json_count_however_their_commas_are_written(comma):
    arguments = "[" + comma.join("0" * (MOST_VALUES + 2)) + "]"
    with pytest.raises(Refused, match="values"):
        read_object(f'{{"arguments": "{arguments}"}}'.encode())


def test_what_is_kept_is_neither_checked_nor_counted_again():
    """What a request costs does not grow with the conversation before it: the same objects are in both."""
    store, before = responses.Store(), responses.Stored(b"")
    for turn in range(5):
        asked = {"model": NAME, "input": called('{"a": [1, 2]}')}
        request, _ = check_request(responses.chat_body(asked, before.messages), 10)
        kept, before = before, before.followed_by(request.messages, b"{}")
        assert all(one is other for one, other in zip(kept.messages, before.messages))
        store.put(str(turn), before)
        assert before.size - kept.size < 400 and len(before.messages) == 2 * (turn + 1)
    assert before.bytes > 10 * responses.PIECE_BYTES
    with pytest.raises(Refused) as caught:
        store.before("4", b"," * (MOST_VALUES - before.values + 1), 2**20)
    assert caught.value.status == 400
    with pytest.raises(Refused) as caught:
        store.before("4", b"{}", before.size)
    assert caught.value.status == 413


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": ""}] * 100},
        {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}] * 100},
    ],
)
def test_parts_and_calls_are_counted_before_they_are_looked_at(message):
    def check(count: int) -> None:
        check_request(read_object(json.dumps({"model": NAME, "messages": [message] * count}).encode()), 10)

    check(MOST_PIECES // 101)
    with pytest.raises(Refused) as caught:
        check(MOST_PIECES // 101 + 1)
    assert caught.value.param == "messages"
