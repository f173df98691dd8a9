"""Anthropic's Messages: a request becomes one of chat completions, and its answer becomes events.

body = chat_body(asked)               # for `web.protocol.check_request`; raises Refused
made = Made(model)
async for event in made.events(deltas): ...
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

from web.blocks import Block, Blocks, Delta, check_fields, content_of, function_tool, piece_of, tool_call
from web.errors import Refused, unexpected

# Fields of chat completions that this protocol has by another name.
BACK = {"stop": "stop_sequences", "response_format": "output_config.format", "reasoning_effort": "thinking"}
BACK |= {"thinking_token_budget": "thinking.budget_tokens"}
ABSENT = ("n", "logprobs", "top_logprobs")
ENDINGS = {"length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


def error_body(error: Refused) -> dict[str, Any]:
    """An error in this protocol's form, before a stream and in it; `param` and `code` are OpenAI's."""
    kind = {"server_error": "api_error"}.get(error.kind, error.kind)
    told = {"type": KINDS.get(error.status, kind), "message": str(error)}
    return {"type": "error", "error": told | {"param": error.param, "code": error.code}}


# ---------------------------------------------------------------------------------------------- what is asked
def chat_body(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The body of chat completions for a request. What is not of this protocol alone is left as it is. Raises
    Refused."""
    if asked.get("max_tokens") is None:
        expected = "max_tokens: expected this field, found none"
        raise Refused(400, expected, "max_tokens", "missing_required_parameter")
    check_fields(asked, ABSENT)
    choice, thinking = piece_of(asked, "tool_choice", dict) or {}, piece_of(asked, "thinking", dict) or {}
    output = piece_of(asked, "output_config", dict) or {}
    kind = piece_of(thinking, "type", str, "thinking.")
    effort = {None: None, "disabled": "none"}.get(kind, output.get("effort", "medium"))
    form = piece_of(output, "format", dict, "output_config.")
    messages: list[dict[str, Any]] = []
    if (system := asked.get("system")) is not None:
        messages.append({"role": "system", "content": content_of(system, "system")})
    for at, message in enumerate(piece_of(asked, "messages", list) or ()):
        messages += _messages(message, f"messages[{at}]")
    tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(piece_of(asked, "tools", list) or ())]
    return {
        **asked,
        "messages": messages,
        "stop": piece_of(asked, "stop_sequences", list),
        "response_format": form and {"type": "json_schema", "json_schema": {"schema": form.get("schema")}},
        "reasoning_effort": effort,
        "thinking_token_budget": thinking.get("budget_tokens"),
        "tools": tools or None,
        "tool_choice": _choice(choice) if choice else None,
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
    }


def _tool(tool: Any, place: str) -> dict[str, Any]:
    match tool:
        case {"name": name, "input_schema": schema} if tool.get("type", "custom") == "custom":
            return function_tool(name=name, parameters=schema, description=tool.get("description"))
    expected = "a tool with name and input_schema: Anthropic's own tools do not exist here"
    raise unexpected(place, expected)


def _choice(choice: Mapping[str, Any]) -> Any:
    kind = piece_of(choice, "type", str, "tool_choice.")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"any": "required"}.get(kind, kind)


def _messages(message: Any, place: str) -> list[dict[str, Any]]:
    """A message as those of chat completions: results of tools stand before what is said with them."""
    match message:
        case {"role": role, "content": str(text)}:
            return [{"role": role, "content": text}]
        case {"role": role, "content": [*blocks]}:
            pass
        case _:
            raise unexpected(place, "a role, and content as a text or a list of blocks")
    results, calls, rest, thought = list[dict[str, Any]](), list[dict[str, Any]](), list[Any](), ""
    for at, block in enumerate(blocks):
        match block:
            case {"type": "thinking", "thinking": str(text)}:
                thought += text
            case {"type": "thinking" | "redacted_thinking"}:  # of which nothing can be read
                pass
            case {"type": "tool_use", "id": call, "name": name, "input": given}:
                calls.append(tool_call(call, name, json.dumps(given)))
            case {"type": "tool_result", "tool_use_id": call}:
                content = content_of(block.get("content", ""), f"{place}.content[{at}].content")
                results.append({"role": "tool", "tool_call_id": call, "content": content})
            case _:
                rest.append(block)
    if not calls and not rest:
        return results
    said = {"role": role, "content": content_of(rest, f"{place}.content") if rest else None}
    beside = {"tool_calls": calls, "reasoning_content": thought}
    return [*results, said | {name: value for name, value in beside.items() if value}]


# ------------------------------------------------------------------------------------------- what is answered
class Made:
    """A message as it is made: `events` of a stream, and `whole` after them."""

    def __init__(self, model: str):
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        self._head["model"] = model
        self.blocks, self._last = Blocks(), Delta(0, "text")

    @property
    def whole(self) -> dict[str, Any]:
        made = [self._block(block, block.text) for block in self.blocks if not block.cut]
        return {**self._head, "content": made, **self._end(), "usage": self._usage()}

    async def events(self, deltas: AsyncIterator[Delta]) -> AsyncIterator[dict[str, Any]]:
        begun: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        async for self._last in deltas:
            if begun:
                yield {"type": "message_start", "message": begun | {"usage": self._usage()}}
                begun = {}
            for what, block, text, _ in self.blocks.grow(self._last):
                fields: dict[str, Any] = {}
                if what == "begins":
                    fields = {"content_block": self._block(block)}
                elif what == "more":
                    kind, name = {
                        "text": ("text_delta", "text"),
                        "thought": ("thinking_delta", "thinking"),
                        "call": ("input_json_delta", "partial_json"),
                    }[block.kind]
                    fields = {"delta": {"type": kind, name: text}}
                kind = {"begins": "start", "more": "delta", "ends": "stop"}[what]
                yield {"type": f"content_block_{kind}", "index": self.blocks.index(block), **fields}
        yield {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _end(self) -> dict[str, Any]:
        return {"stop_reason": ENDINGS.get(self._last.finish, "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        usage = self._last.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }

    def _block(self, block: Block, text: str = "") -> dict[str, Any]:
        if block.kind == "call":
            given = json.loads(block.arguments) if text else {}
            return {"type": "tool_use", "id": block.call, "name": block.name, "input": given}
        if block.kind == "thought":
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text, **block.beside}
