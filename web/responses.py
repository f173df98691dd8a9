"""OpenAI's Responses: a request becomes one of chat completions, and its answer becomes events.

    body = chat_body(asked)               # for `web.protocol.check_request`
    made = Made(asked, request)
    async for event in made.events(deltas): ...

Nothing is kept: a conversation goes on with all of its items in `input`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from web.blocks import (
    Block,
    Blocks,
    Change,
    Delta,
    Logged,
    check_fields,
    content_of,
    function_tool,
    piece_of,
    tool_call,
)
from web.errors import Refused, unexpected
from web.protocol import ChatRequest

# Fields of chat completions that this protocol has by another name.
BACK = {"messages": "input", "response_format": "text.format", "reasoning_effort": "reasoning.effort"}
BACK |= {"max_completion_tokens": "max_output_tokens"}
ABSENT = ("background", "conversation", "previous_response_id", "prompt", "n")
LOGPROBS = "message.output_text.logprobs"
FAILURES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


# ---------------------------------------------------------------------------------------------- what is asked
def chat_body(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The body of chat completions for a request. What is not of this protocol alone is left as it is. Raises
    Refused."""
    check_fields(asked, ABSENT)
    text, reasoning = piece_of(asked, "text", dict) or {}, piece_of(asked, "reasoning", dict) or {}
    include = piece_of(asked, "include", list) or []
    tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(piece_of(asked, "tools", list) or ())]
    said = messages_of(asked.get("input"))
    if (instructions := piece_of(asked, "instructions", str)) is not None:
        said.insert(0, {"role": "system", "content": instructions})
    logprobs = LOGPROBS in include or None
    return {
        **asked,
        "messages": said,
        "max_completion_tokens": asked.get("max_output_tokens"),
        "response_format": _format(piece_of(text, "format", dict, "text.")),
        "reasoning_effort": reasoning.get("effort"),
        "tools": tools or None,
        "tool_choice": _choice(asked.get("tool_choice")),
        "logprobs": logprobs,
        "top_logprobs": asked.get("top_logprobs") if logprobs else None,
    }


def _format(asked: dict[str, Any] | None) -> dict[str, Any] | None:
    if asked is None or asked.get("type") != "json_schema":
        return asked
    return {"type": "json_schema", "json_schema": {k: v for k, v in asked.items() if k != "type"}}


def _tool(tool: Any, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise unexpected(f"{place}.type", "'function': other tools do not exist here")
    return function_tool(**{name: tool.get(name) for name in ("name", "description", "parameters")})


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
                made[-1].setdefault("tool_calls", []).append(tool_call(call_id, name, arguments))
            case {"type": "function_call_output", "call_id": call_id, "output": output}:
                content = content_of(output, f"{place}.output")
                made.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case {"role": role, "content": content} if item.get("type", "message") == "message":
                before = before if role == "assistant" else {}
                made.append({"role": role, "content": content_of(content, f"{place}.content"), **before})
            case _:
                expected = "a message, function_call, function_call_output or reasoning, with all its fields"
                raise unexpected(place, expected)
    return made


# ------------------------------------------------------------------------------------------- what is answered
class Made:
    """A response as it is made: `events` of a stream, and `whole` after them.

    asked: the body of its request; request: what became of it.
    """

    def __init__(self, asked: Mapping[str, Any], request: ChatRequest):
        self.number, self.output = 0, list[dict[str, Any]]()
        self.blocks, self._last, self.whole = Blocks(), Delta(0, "text"), dict[str, Any]()
        reasoning = asked.get("reasoning") or {}
        self._summary = bool(reasoning.get("summary"))
        self._about = {
            "id": f"resp_{secrets.token_hex(24)}", "object": "response", "created_at": int(time.time()),
            "model": request.model, "temperature": request.temperature, "top_p": request.top_p,
            "truncation": "disabled", "previous_response_id": None, "background": False,
            "instructions": asked.get("instructions"), "store": False,
            "metadata": piece_of(asked, "metadata", dict) or {}, "tools": asked.get("tools") or [],
            "tool_choice": asked.get("tool_choice") or "auto",
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "text": {"format": {"type": "text"}} | (asked.get("text") or {}),
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "max_output_tokens": asked.get("max_output_tokens"), "top_logprobs": request.top_logprobs or 0,
            "user": asked.get("user"), "service_tier": "default",
        }  # fmt: skip

    def response(self, status: str, error: Refused | None = None) -> dict[str, Any]:
        failure = error and {"code": FAILURES.get(error.status, "server_error"), "message": str(error)}
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        about = self._about | {"status": status, "output": [*self.output], "error": failure}
        return about | {"usage": usage_of(self._last.usage), "incomplete_details": details}

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.number += 1
        return {"type": f"response.{kind}", "sequence_number": self.number - 1, **fields}

    def failed(self, error: Refused) -> dict[str, Any]:
        """The last event of a stream that an error ends."""
        return self.event("failed", response=self.response("failed", error))

    @property
    def _status(self) -> str:
        return "incomplete" if self._last.finish == "length" else "completed"

    async def events(self, deltas: AsyncIterator[Delta]) -> AsyncIterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self.event(kind, response=self.response("in_progress"))
        async for self._last in deltas:
            for change in self.blocks.grow(self._last):
                for event in self._of(change):
                    yield event
        self.whole = self.response(self._status)
        yield self.event(self._status, response=self.whole)

    def _of(self, change: Change) -> list[dict[str, Any]]:
        """The events of one change: those of an item, and within them those of its one part."""
        block, summary = change.block, self._summary and change.block.kind == "thought"
        (item, part), index = self._item(block, change.what == "ends"), self.blocks.index(block)
        place = {"output_index": index, "item_id": item["id"]}
        if part is not None:
            place |= {"summary_index" if summary else "content_index": 0}
        kind = "reasoning_summary_part" if summary else "content_part"
        name = "function_call_arguments" if part is None else part["type"]
        name = f"reasoning_{name}" if summary else name
        logged: dict[str, Any] = {}
        if block.kind == "text":
            logged["logprobs"] = _logged(block.logprobs if change.what == "ends" else change.logprobs)
        if change.what == "more":
            return [self.event(f"{name}.delta", delta=change.text, **logged, **place)]
        if change.what == "begins":
            made = [self.event("output_item.added", item=item, output_index=index)]
            return made + ([self.event(f"{kind}.added", part=part, **place)] if part else [])
        self.output.append(item)
        whole = {"arguments": block.text, "name": block.name} if part is None else {"text": block.text}
        made = [self.event(f"{name}.done", **whole, **logged, **place)]
        made += [self.event(f"{kind}.done", part=part, **place)] if part else []
        return [*made, self.event("output_item.done", item=item, output_index=index)]

    def _item(self, block: Block, ended: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The item of a block, and its part: without what is in them until the block ends."""
        about: dict[str, Any] = {"status": self._status if ended else "in_progress"}
        text = block.text if ended else ""
        if block.kind == "call":
            about |= {"id": f"fc_{block.key}", "type": "function_call", "call_id": block.call}
            return about | {"name": block.name, "arguments": text}, None
        if block.kind == "thought":
            part: dict[str, Any] = {"type": "summary_text" if self._summary else "reasoning_text"}
            part["text"] = text
            about |= {"id": f"rs_{block.key}", "type": "reasoning", "summary": []}
            return about | {"summary" if self._summary else "content": [part] if ended else []}, part
        part = {"type": "output_text", "text": text, "annotations": []} | block.beside
        part["logprobs"] = _logged(block.logprobs) if ended else []
        about |= {"id": f"msg_{block.key}", "type": "message", "role": "assistant"}
        return about | {"content": [part] if ended else []}, part


def _logged(entries: Logged) -> Logged:
    """As this protocol has them: bytes are always a list."""
    return [
        entry
        | {"bytes": entry["bytes"] or []}
        | {"top_logprobs": [one | {"bytes": one["bytes"] or []} for one in entry["top_logprobs"]]}
        for entry in entries
    ]


def usage_of(usage: Mapping[str, Any]) -> dict[str, Any] | None:
    if not usage:
        return None
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
