"""What an answer is made of, from the chunks of a chat completion: thinking, text and calls in their order.

Other protocols than chat completions are written from these: each is one conversion, there and back.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from inference.calls import literal
from web.errors import Refused, unexpected, unsupported
from web.protocol import OURS

Kind = Literal["thought", "text", "call"]
# Of all that is converted.
STREAMED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass(eq=False)
class Block:
    """text: so far; of a call its arguments, as JSON. call, name: the id of a call, and the function's name.
    logprobs: entries of chat completions. located: boxes and points, once the answer has ended."""

    kind: Kind
    call: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    located: dict[str, Any] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def arguments(self) -> str:
        """Of a call that is whole."""
        return literal(self.text)

    @property
    def cut(self) -> bool:
        """Whether it is a call whose arguments have no end, because the answer was cut: nobody can run it."""
        try:
            return self.kind == "call" and not isinstance(from_json(self.text), dict)
        except ValueError:
            return True


class Change(NamedTuple):
    """`what` happens to a block: it "begins", gets "more" (`text`, `logprobs`), or "ends"."""

    what: Literal["begins", "more", "ends"]
    block: Block
    text: str = ""
    logprobs: list[dict[str, Any]] = []  # noqa: RUF012


@dataclass
class Ending:
    """finish: OpenAI's word for why an answer ended. usage: of chat completions."""

    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


async def changes(chunks: AsyncIterator[dict[str, Any]], ending: Ending) -> AsyncIterator[Change]:
    """The changes of one answer's blocks, at least one of them; `ending` is filled in before the last."""
    block: Block | None = None
    waiting: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is yet to come
    async for chunk in chunks:
        ending.usage = chunk.get("usage") or ending.usage
        if not chunk["choices"]:
            continue
        (choice,) = chunk["choices"]
        delta, ending.finish = choice["delta"], choice["finish_reason"] or ending.finish
        parts: list[tuple[Kind, str, str, str | None]] = [
            ("thought", "", "", delta.get("reasoning_content")),
            ("text", "", "", delta.get("content")),
        ]
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            parts.append(("call", call.get("id", ""), function.get("name", ""), function.get("arguments")))
        waiting += (choice["logprobs"] or {}).get("content") or []
        for kind, call_id, name, text in parts:
            if kind == "call":
                waiting = []  # those of a call's tokens have no place
            if not (text or call_id):
                continue
            logged, waiting = (waiting, []) if kind == "text" else ([], waiting)
            if block is None or block.kind != kind or (call_id and block.call != call_id):
                if block is not None:
                    yield Change("ends", block)
                block = Block(kind, call_id, name)
                yield Change("begins", block)
            block.text += text or ""
            block.logprobs += logged
            if text:
                yield Change("more", block, text, logged)
        if choice["finish_reason"]:
            if block is None:
                block = Block("text")
                yield Change("begins", block)
            if block.kind == "text":
                if waiting:  # of tokens that show nothing
                    block.logprobs += waiting
                    yield Change("more", block, "", waiting)
                block.located = {name: delta[name] for name in OURS if name in delta}
    if block is not None:
        yield Change("ends", block)


def assistant_message(blocks: list[Block]) -> dict[str, Any]:
    """What was answered as a message of chat completions."""
    calls = [
        {"id": one.call, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        for one in blocks
        if one.kind == "call" and not one.cut
    ]
    text, thought = ("".join(one.text for one in blocks if one.kind == kind) for kind in ("text", "thought"))
    beside = {"tool_calls": calls, "reasoning_content": thought}
    return {"role": "assistant", "content": text} | {key: value for key, value in beside.items() if value}


def check_fields(asked: Mapping[str, Any], absent: Iterable[str]) -> None:
    """What a protocol does not have here must not be asked for. Raises Refused."""
    for name in absent:
        if asked.get(name):
            raise unsupported(name)
    piece_of(asked, "stream", bool)


def parts_of(content: Any, place: str, part_of: Callable[[Any], dict[str, Any] | None], expected: str) -> Any:
    """What a message says, as chat completions have it: `part_of` makes each part, or None of what it does
    not know. Raises Refused."""
    if not isinstance(content, list):
        return content
    parts = []
    for at, given in enumerate(content):
        if (part := part_of(given)) is None:
            raise unexpected(f"{place}[{at}]", expected)
        parts.append(part)
    return parts


def piece_of(asked: Mapping[str, Any], name: str, kind: type, place: str = "") -> Any:
    """A field of a request, which must be of this kind; None where it is missing. Raises Refused."""
    value = asked.get(name)
    if value is not None and not isinstance(value, kind):
        expected = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}[kind]
        raise Refused(400, f"{place}{name}: expected {expected}", f"{place}{name}", "invalid_type")
    return value
