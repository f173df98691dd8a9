"""Conversations with tools for a chat template that knows none."""

from __future__ import annotations

import json
from collections.abc import Sequence

from data.conversation import Message
from data.tools import PLAIN, Tool, ToolCall


def in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """A conversation in which the system lists the tools, calls are part of an answer's text, and results are
    what the user says."""
    said, results = list[Message](), False
    for message in [Message("system", ()), *messages] if tools and messages[0].role != "system" else messages:
        parts, role = message.parts, message.role
        if role == "system" and tools:
            parts, tools = (*parts, ("text", "\n\n" * bool(parts) + list_of(tools))), ()
        if message.calls:
            text = "\n".join(map(call_text, message.calls))
            parts = (*parts, ("text", "\n" * bool(message.text.strip()) + text))
        if role == "tool":
            images = [part for part in parts if part[0] != "text"]
            text = f"<tool_response>\n{message.text}\n</tool_response>"
            parts, role = (*images, ("text", text)), "user"
            if results:
                parts = (*said.pop().parts, ("text", "\n"), *parts)
        results = message.role == "tool"
        as_text = message.as_text and len(parts) == 1
        said.append(Message(role, parts, thoughts=message.thoughts, as_text=as_text))
    return said


def list_of(tools: Sequence[Tool]) -> str:
    """The paragraph of a system message that lists tools for a model whose template knows none."""
    lines = "\n".join(json.dumps(tool.shown["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, each described by a line of JSON:\n{lines}\n\n"
        "To call one, answer with its name and arguments in tool_call tags; to call several, with one such "
        'block for each:\n<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>'
    )


def call_text(call: ToolCall) -> str:
    """A call as the plain form writes it."""
    written = {"name": call.name, "arguments": json.loads(call.arguments)}
    return f"{PLAIN.opens}\n{json.dumps(written, ensure_ascii=False)}\n{PLAIN.closes}"
