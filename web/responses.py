"""OpenAI's Responses: a request becomes one of chat completions, and its chunks become events.

    body = chat_body(asked, before)             # for `web.protocol.check_request`; raises Refused
    made = Made(asked, request, before, store)
    async for event in made.events(chunks): ...

What was answered is kept for whoever goes on from it (`previous_response_id`): in memory, the latest. Its
messages are not checked again, so that a short request costs little, whatever it goes on from.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import to_json

from web.blocks import (
    STREAMED,
    Block,
    Change,
    Ending,
    assistant_message,
    changes,
    check_fields,
    parts_of,
    piece_of,
)
from web.errors import Refused, unexpected
from web.protocol import ChatMessage, ChatRequest, check_values, values_in

KEPT_BYTES = 2**28  # of responses with the conversations before them
PIECE_BYTES = 2000  # that a message, part or call takes beside its texts
# Fields of this protocol, by what chat completions call them; "" for those that say nothing there.
NAMES = {
    "input": "messages", "instructions": "", "text": "response_format", "reasoning": "reasoning_effort",
    "max_output_tokens": "max_completion_tokens", "previous_response_id": "", "store": "", "include": "",
    "metadata": "", "truncation": "", "background": "", "conversation": "", "prompt": "",
}  # fmt: skip
BACK = {"messages": "input", "response_format": "text.format", "reasoning_effort": "reasoning.effort"}
BACK |= {"max_completion_tokens": "max_output_tokens"}
INSTEAD = {other: own for own, other in NAMES.items() if other} | {"max_tokens": "max_output_tokens"}
ABSENT = ("background", "conversation", "prompt", "n", "pick")
LOGPROBS = "message.output_text.logprobs"
FAILURES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


# ---------------------------------------------------------------------------------------------- what is asked
def chat_body(asked: Mapping[str, Any], before: Sequence[ChatMessage] = ()) -> dict[str, Any]:
    """The body of chat completions for a request that follows these messages. What is not of this protocol
    alone is left as it is. Raises Refused."""
    for name in asked:
        if (own := INSTEAD.get(name)) is not None:
            raise Refused(400, f"{own}: expected it in place of {name}", own, "unsupported_parameter")
    check_fields(asked, ABSENT)
    text, reasoning = piece_of(asked, "text", dict) or {}, piece_of(asked, "reasoning", dict) or {}
    include = piece_of(asked, "include", list) or []
    tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(piece_of(asked, "tools", list) or ())]
    said: list[Any] = [*before, *messages_of(asked.get("input"))]
    if (instructions := piece_of(asked, "instructions", str)) is not None:
        said.insert(0, {"role": "system", "content": instructions})
    logprobs = LOGPROBS in include or None
    return {
        **{name: value for name, value in asked.items() if name not in NAMES},
        "messages": said,
        "max_completion_tokens": asked.get("max_output_tokens"),
        "response_format": _format(piece_of(text, "format", dict, "text.")),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
        "tools": tools or None,
        "tool_choice": _choice(asked.get("tool_choice")),
        "logprobs": logprobs,
        "top_logprobs": asked.get("top_logprobs") if logprobs else None,
        "truncation": None if asked.get("truncation") == "disabled" else asked.get("truncation"),
        **STREAMED,
    }


def _format(asked: dict[str, Any] | None) -> dict[str, Any] | None:
    if asked is None or asked.get("type") != "json_schema":
        return asked
    return {"type": "json_schema", "json_schema": {k: v for k, v in asked.items() if k != "type"}}


def _tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise unexpected(f"{place}.type", "'function': other tools do not exist here")
    function = {k: v for k, v in tool.items() if k in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            allowed = {"mode": mode, "tools": list(map(_choice, tools))}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def messages_of(given: Any) -> list[dict[str, Any]]:
    """Messages of chat completions from `input`. Calls that follow one another are one message. Raises
    Refused."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise Refused(400, "input: expected a text or a list of items", "input", "invalid_type")
    made: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}  # before what the assistant says or calls next
    for at, item in enumerate(given):
        place, before, thought = f"input[{at}]", thought, {}
        match item:
            case {"type": "reasoning"}:
                parts = piece_of(item, "content", list, f"{place}.") or piece_of(item, "summary", list) or ()
                texts = (part.get("text") for part in parts if isinstance(part, dict))
                thought = {"reasoning_content": "".join(text for text in texts if isinstance(text, str))}
            case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
                if not made or made[-1]["role"] != "assistant" or before:
                    made.append({"role": "assistant", "content": None, **before})
                calls = made[-1].setdefault("tool_calls", [])
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            case {"type": "function_call_output", "call_id": call_id, "output": output}:
                content = _content(output, f"{place}.output")
                made.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case {"role": role, "content": content} if item.get("type", "message") == "message":
                before = before if role == "assistant" else {}
                made.append({"role": role, "content": _content(content, f"{place}.content"), **before})
            case _:
                expected = "a message, function_call, function_call_output or reasoning, with all its fields"
                raise unexpected(place, expected)
    return made


def _content(content: Any, place: str) -> Any:
    expected = (
        "input_text or output_text with text, input_image with image_url, or input_video with video_url"
    )
    return parts_of(content, place, _part, expected)


def _part(part: Any) -> dict[str, Any] | None:
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": text}:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": text}:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": url} if url is not None:
            return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail")}}
        case {"type": "input_video" | "video_url", "video_url": url} if url is not None:
            return {"type": "video_url", "video_url": url}
    return None


# ------------------------------------------------------------------------------------------- what is answered
class Made:
    """A response as it is made: `events` of a stream, and `whole` after them.

    asked: the body of its request; request: what became of it; before: what it goes on from. At its end it is
    put into `store`, unless the request says no.
    """

    def __init__(
        self,
        asked: Mapping[str, Any],
        request: ChatRequest,
        before: Stored,
        store: Callable[[str, Stored], None],
    ):
        self.id, self.number, self.output = f"resp_{secrets.token_hex(24)}", 0, list[dict[str, Any]]()
        self.blocks, self.ending, self.whole = list[Block](), Ending(), dict[str, Any]()
        self._store, self._before = (None if asked.get("store") is False else store), before
        reasoning = asked.get("reasoning") or {}
        self._summary = bool(reasoning.get("summary"))
        self._about = {
            "id": self.id, "object": "response", "created_at": int(time.time()), "model": request.model,
            "temperature": request.temperature, "top_p": request.top_p, "truncation": "disabled",
            "previous_response_id": asked.get("previous_response_id"), "background": False,
            "instructions": asked.get("instructions"), "store": self._store is not None,
            "metadata": piece_of(asked, "metadata", dict) or {}, "tools": asked.get("tools") or [],
            "tool_choice": asked.get("tool_choice") or "auto",
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "text": {"format": {"type": "text"}} | (asked.get("text") or {}),
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "max_output_tokens": asked.get("max_output_tokens"), "top_logprobs": request.top_logprobs or 0,
            "user": asked.get("user"), "service_tier": "default",
        }  # fmt: skip
        self._said = request.messages[asked.get("instructions") is not None :]

    def response(self, status: str, error: Refused | None = None) -> dict[str, Any]:
        cut, usage = status == "incomplete", self.ending.usage
        failure = error and {"code": FAILURES.get(error.status, "server_error"), "message": str(error)}
        details = {"reason": "max_output_tokens"} if cut else None
        about = self._about | {"status": status, "output": [*self.output], "error": failure}
        return about | {"usage": usage_of(usage) if usage else None, "incomplete_details": details}

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.number += 1
        return {"type": f"response.{kind}", "sequence_number": self.number - 1, **fields}

    def failed(self, error: Refused) -> dict[str, Any]:
        """The last event of a stream that an error ends."""
        return self.event("failed", response=self.response("failed", error))

    async def events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self.event(kind, response=self.response("in_progress"))
        async for change in changes(chunks, self.ending):
            for event in self._of(change):
                yield event
        status = "incomplete" if self.ending.finish == "length" else "completed"
        self.whole = self.response(status)
        if self._store is not None:
            said = [*self._said, ChatMessage.model_validate(assistant_message(self.blocks))]
            self._store(self.id, self._before.followed_by(said, to_json(self.whole)))
        yield self.event(status, response=self.whole)

    def _of(self, change: Change) -> list[dict[str, Any]]:
        """The events of one change."""
        block = change.block
        if change.what == "begins":
            self.blocks.append(block)
        item, part = self._item(block, change.what)
        place = {"output_index": len(self.blocks) - 1}
        texts = place | {"item_id": item["id"]}
        name, of_part, where = {
            "text": ("output_text", "content_part", "content"),
            "call": ("function_call_arguments", "", ""),
            "thought": ("reasoning_text", "content_part", "content"),
        }[block.kind]
        if block.kind == "thought" and self._summary:
            name, of_part, where = "reasoning_summary_text", "reasoning_summary_part", "summary"
        texts |= {f"{where}_index": 0} if where else {}
        logged = {"logprobs": _logged(change.logprobs)} if block.kind == "text" else {}
        if change.what == "begins":
            added = [self.event("output_item.added", item=item, **place)]
            return added + ([self.event(f"{of_part}.added", part=part, **texts)] if part else [])
        if change.what == "more":
            return [self.event(f"{name}.delta", delta=change.text, **logged, **texts)]
        self.output.append(item)
        whole = {"arguments": block.text, "name": block.name} if part is None else {"text": block.text}
        logged = {"logprobs": _logged(block.logprobs)} if logged else {}
        done = [self.event(f"{name}.done", **whole, **logged, **texts)]
        done += [self.event(f"{of_part}.done", part=part, **texts)] if part else []
        return [*done, self.event("output_item.done", item=item, **place)]

    def _item(self, block: Block, what: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The item of a block, and its part: without what is in them until the block ends."""
        ended, cut = what == "ends", self.ending.finish == "length"
        text = block.text if ended else ""
        status = {"status": ("incomplete" if cut else "completed") if ended else "in_progress"}
        if block.kind == "call":
            about = {"type": "function_call", "call_id": block.call, "name": block.name, "arguments": text}
            return {"id": f"fc_{block.key}", **about, **status}, None
        if block.kind == "thought":
            part: dict[str, Any] = {"type": "summary_text" if self._summary else "reasoning_text"}
            part["text"] = text
            empty: dict[str, Any] = {"summary": []} if self._summary else {"summary": [], "content": []}
            filled = {"summary" if self._summary else "content": [part]} if ended else {}
            return {"id": f"rs_{block.key}", "type": "reasoning", **empty, **filled, **status}, part
        part = {"type": "output_text", "text": text, "annotations": []} | block.located
        part["logprobs"] = _logged(block.logprobs) if ended else []
        item = {"id": f"msg_{block.key}", "type": "message", "role": "assistant"}
        return {**item, "content": [part] if ended else [], **status}, part


def _logged(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As this protocol has them: bytes are always a list."""
    return [
        entry
        | {"bytes": entry["bytes"] or []}
        | {"top_logprobs": [one | {"bytes": one["bytes"] or []} for one in entry["top_logprobs"]]}
        for entry in entries
    ]


def usage_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached, thought = usage["prompt_tokens_details"], usage["completion_tokens_details"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached["cached_tokens"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }


# ----------------------------------------------------------------------------------------------- what is kept
class Stored(NamedTuple):
    """A response as JSON and the messages up to it. size, values: of these messages as JSON, bytes and what
    `web.protocol.values_in` counts; client: whose it is."""

    response: bytes
    messages: Sequence[ChatMessage] = ()
    size: int = 0
    values: int = 0
    client: str = ""

    @property
    def taken(self) -> int:
        """Bytes of memory, about."""
        pieces = sum(one.pieces for one in self.messages)
        return len(self.response) + self.size + pieces * PIECE_BYTES

    def followed_by(self, messages: Sequence[ChatMessage], response: bytes) -> Stored:
        """A response to a conversation that goes on from this one; only what is new in it is counted."""
        new = to_json(messages[len(self.messages) :], exclude_none=True)
        return Stored(response, messages, self.size + len(new), self.values + values_in(new))


class Store:
    """The latest responses, of at most `most` bytes with the messages before them: the first to have been
    used go, of the client who has most. What is larger by itself is not kept."""

    def __init__(self, most: int = KEPT_BYTES):
        self._most, self._kept, self._sizes = most, OrderedDict[str, Stored](), Counter[str]()

    def get(self, name: str) -> Stored:
        """Raises Refused for one that is not kept here."""
        if name not in self._kept:
            message = f"there is no response {name[:100]!r} here: expected one of the latest"
            raise Refused(404, message, code="response_not_found")
        self._kept.move_to_end(name)
        return self._kept[name]

    def before(self, name: str | None, body: bytes, most: int) -> Stored:
        """What a request with this body goes on from. Raises Refused for what is not kept, and for a
        conversation that would be more than one body may hold, of `most` bytes."""
        field = "previous_response_id"
        try:
            before = Stored(b"") if name is None else self.get(name)
        except Refused as error:
            raise Refused(400, str(error), field, "previous_response_not_found") from None
        if before.size + len(body) > most:
            message = f"expected at most {most:,} bytes with the responses before, got more"
            raise Refused(413, f"{field}: {message}", field)
        check_values(before.values + values_in(body), field)
        return before

    def put(self, name: str, stored: Stored, client: str = "") -> None:
        if stored.taken > self._most:
            return
        self._kept[name] = stored._replace(client=client)
        self._sizes[client] += stored.taken
        while self._sizes.total() > self._most:
            most = max(self._sizes, key=self._sizes.__getitem__)
            self.drop(next(one for one, kept in self._kept.items() if kept.client == most))

    def drop(self, name: str) -> None:
        """Raises Refused for one that is not kept here."""
        stored = self.get(name)
        del self._kept[name]
        self._sizes[stored.client] -= stored.taken
        self._sizes += Counter()  # without those who have none
