"""Conversations as callers write them, in the Hub's form, made into messages of one form.

messages = read_conversation([{"role": "user", "content": "What is it?"}])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data.errors import PromptError
from data.tools import ToolCall

ROLES = ("system", "user", "assistant", "tool")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # how templates and programs call what was thought
LONGEST_TEXT = 1_000_000  # characters of a conversation: a second of tokenizing, and more than any context


@dataclass(frozen=True)
class Message:
    """One turn.

    parts: in their order, each a text or the source of an image or a video.
    calls, thoughts: what the assistant calls with it, and what it thought before (`reasoning_content`).
    call_id, name: of a tool's result, the id of its call, and the function if that is said.
    as_text: its content was given as a text, not as a list of parts: templates may tell them apart.
    """

    role: str
    parts: tuple[tuple[str, Any], ...]  # ("text", str), ("image", source) or ("video", source)
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    thoughts: str = ""
    name: str = ""
    as_text: bool = False

    @property
    def text(self) -> str:
        return "".join(value for kind, value in self.parts if kind == "text")

    @property
    def images(self) -> list[Any]:
        """Videos as well."""
        return [value for kind, value in self.parts if kind != "text"]


class GivenText(list):
    """The one part of a content that was given as a text."""


def read_conversation(
    conversation: Sequence[Mapping[str, Any]], label: str = "conversation", image_order: str | None = None
) -> list[Message]:
    """A conversation in the Hub's form, its content made uniform and its images `in_order`. A PromptError
    names `label` and message."""
    if isinstance(conversation, str | Mapping) or not isinstance(conversation, Sequence) or not conversation:
        raise PromptError(f"{label}: expected a list of messages, got {str(conversation)[:80]!r}")
    messages = []
    for i, message in enumerate(conversation):
        place = f"{label}, message {i}"
        about = dict(message) if isinstance(message, Mapping) else {}
        if about.get("content") is None and any(map(about.get, ("tool_calls", *THOUGHTS))):
            about["content"] = ""
        if not {"role", "content"} <= about.keys():
            raise PromptError(f"{place}: expected {{'role': ..., 'content': ...}}, got {str(message)[:80]!r}")
        role, content = about["role"], about["content"]
        if role not in ROLES:
            raise PromptError(f"{place}: expected role {', '.join(ROLES)}, got {str(role)[:40]!r}")
        as_text = isinstance(content, str | GivenText)
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, Sequence):
            raise PromptError(f"{place}: expected content as text or parts, got {type(content).__name__}")
        parts = tuple(_read_part(part, place) for part in content)
        thought = next((key for key in THOUGHTS if about.get(key)), THOUGHTS[0])
        thoughts, call_id, name = (
            check_text(about.get(key) or "", f"{place}, {key}") for key in (thought, "tool_call_id", "name")
        )
        try:
            calls = tuple(map(ToolCall.read, about.get("tool_calls") or ()))
        except ValueError as error:
            raise PromptError(f"{place}: {error}") from None
        made = Message(role, parts, calls, call_id, thoughts, name, as_text)
        messages.append(in_order(made, image_order))
    check_text("".join(message.thoughts + message.text for message in messages), label)
    return messages


def in_order(message: Message, image_order: str | None) -> Message:
    """A message with its images "first" or "last", in their order; None leaves them where they are. A space
    stands between texts that had an image between them."""
    texts, images, parted = list[tuple[str, Any]](), list[tuple[str, Any]](), False
    for kind, value in message.parts:
        if kind != "text":
            images.append((kind, value))
        elif parted and texts and texts[-1][1][-1:].strip() and value[:1].strip():
            texts.append((kind, f" {value}"))
        else:
            texts.append((kind, value))
        parted = kind != "text"
    if image_order is None or not images:
        return message
    return replace(message, parts=(*images, *texts) if image_order == "first" else (*texts, *images))


def _read_part(part: Mapping[str, Any], label: str) -> tuple[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and "text" in part:
        return "text", check_text(part["text"], label)
    if kind in ("image", "video"):
        for key in (kind, "url", "path", "base64"):
            if part.get(key) is not None:
                return kind, part[key]
    wanted = "{'type': 'text', 'text': ...}, or 'image' or 'video' likewise"
    raise PromptError(f"{label}: expected a part {wanted}, got {str(part)[:80]!r}")


def check_question(messages: Sequence[Message], label: str) -> None:
    """Raises PromptError unless the user asks something last."""
    last = next((message for message in reversed(messages) if message.role == "user"), None)
    if last is None or not last.text.strip():
        got = "no message of the user" if last is None else repr(last.text)
        raise PromptError(f"{label}: expected a question, got {got}")


def check_text(text: Any, label: str) -> str:
    """`text` itself, if it is a string of bounded length that can be written as UTF-8."""
    if not isinstance(text, str):
        raise PromptError(f"{label}: expected text, got {type(text).__name__}")
    if len(text) > LONGEST_TEXT:
        raise PromptError(f"{label}: expected at most {LONGEST_TEXT:,} characters, got {len(text):,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{label}: expected valid Unicode, got half a surrogate at {error.start}"
        ) from error
    return text
