"""What an answer is made of: thinking, text and calls, in their order. And the parts of what is asked.

All protocols are written from these. Those besides chat completions are one conversion each, there and back.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from inference.calls import literal
from web.errors import Refused, unexpected, unsupported

Kind = Literal["thought", "text", "call"]
Logged = list[dict[str, Any]]  # log-probabilities as chat completions have them
NOTHING: dict[str, Any] = {}
NAMES = {"image": "image_url", "video": "video_url", "document": "file"}  # of parts, in chat completions


class Delta(NamedTuple):
    """More of an answer.

    call, call_number, name: of a call its id and number, and at its beginning the function. ended: it is
        whole.
    finish: why the answer has ended, with its last delta, and beside: what stands beside its text then.
    usage: of all answers, so far.
    """

    answer: int
    kind: Kind
    text: str = ""
    logprobs: Logged = []  # noqa: RUF012
    call: str = ""
    call_number: int = 0
    name: str = ""
    ended: bool = False
    finish: str = ""
    beside: dict[str, Any] = NOTHING
    usage: dict[str, Any] = NOTHING


@dataclass(eq=False)
class Block:
    """text: so far; of a call its arguments, as JSON. call, name: the id of a call, and the function's name.
    whole: of a call, that its arguments have an end; else nobody can run it. beside: boxes and others, once
    the answer has ended."""

    kind: Kind
    call: str = ""
    name: str = ""
    text: str = ""
    whole: bool = False
    logprobs: Logged = field(default_factory=list)
    beside: dict[str, Any] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def arguments(self) -> str:
        """Of a call that is whole."""
        return literal(self.text)

    @property
    def cut(self) -> bool:
        return self.kind == "call" and not self.whole


class Change(NamedTuple):
    """`what` happens to a block: it "begins", gets "more" (`text`, `logprobs`), or "ends"."""

    what: Literal["begins", "more", "ends"]
    block: Block
    text: str = ""
    logprobs: Logged = []  # noqa: RUF012


class Blocks(list[Block]):
    """The blocks of one answer; at its end there is at least one."""

    _waiting: Logged = []  # noqa: RUF012  # of tokens whose text is yet to come

    def grow(self, delta: Delta) -> list[Change]:
        """What a delta changes."""
        changes, block, last = list[Change](), self[-1] if self else None, bool(delta.finish)
        self._waiting = [] if delta.kind == "call" else [*self._waiting, *delta.logprobs]
        other = block is None or block.kind != delta.kind or delta.call not in ("", block.call)
        if (other and (delta.text or delta.name)) or (block is None and last):
            if block is not None:
                changes.append(Change("ends", block))
            block = Block(delta.kind, delta.call, delta.name)
            self.append(block)
            changes.append(Change("begins", block))
        if block is None:
            return changes
        block.whole |= delta.ended
        logged = self._waiting if block.kind == "text" and (delta.text or last) else []
        if delta.text or logged:
            self._waiting = [] if block.kind == "text" else self._waiting
            block.text += delta.text
            block.logprobs += logged
            changes.append(Change("more", block, delta.text, logged))
        if last:
            block.beside = delta.beside if block.kind == "text" else {}
            changes.append(Change("ends", block))
        return changes

    @property
    def message(self) -> dict[str, Any]:
        """What was answered as a message of chat completions."""
        calls = [tool_call(one.call, one.name, one.arguments) for one in self if one.whole]
        text, thought = (
            "".join(one.text for one in self if one.kind == kind) for kind in ("text", "thought")
        )
        content = None if not text and any(one.kind == "call" for one in self) else text
        beside = {"tool_calls": calls, "reasoning_content": thought.strip()}
        return {"role": "assistant", "content": content} | {key: one for key, one in beside.items() if one}


# ---------------------------------------------------------------------------------------------- what is asked
def check_fields(asked: Mapping[str, Any], absent: Iterable[str]) -> None:
    """What a protocol does not have here must not be asked for. Raises Refused."""
    for name in absent:
        if asked.get(name):
            raise unsupported(name)
    piece_of(asked, "stream", bool)


def content_of(content: Any, place: str) -> Any:
    """What a message says, as chat completions have it. Raises Refused."""
    if not isinstance(content, list):
        return content
    return [_part(part, f"{place}[{at}]") for at, part in enumerate(content)]


def _part(part: Any, place: str) -> dict[str, Any]:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": text}:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": text}:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": url} if url is not None:
            return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail")}}
        case {"type": "input_video" | "video_url", "video_url": url} if url is not None:
            return {"type": "video_url", "video_url": url}
        case {"type": "input_file", "file_data": url} | {"type": "input_file", "file_url": url}:
            return {"type": "file", "file": {"url": url}}
        case {"type": "image" | "video" | "document" as kind, "source": {"type": "url", "url": url}}:
            return {"type": (name := NAMES[kind]), name: {"url": url}}
        case {"type": "image" | "video" | "document" as kind, "source": {"type": "base64"} as source}:
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            return {"type": (name := NAMES[kind]), name: {"url": url}}
    raise unexpected(place, "text, or an image, video or PDF with its data or address")


def piece_of(asked: Mapping[str, Any], name: str, kind: type, place: str = "") -> Any:
    """A field of a request, which must be of this kind; None where it is missing. Raises Refused."""
    value = asked.get(name)
    if value is not None and not isinstance(value, kind):
        expected = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}[kind]
        raise Refused(400, f"{place}{name}: expected {expected}", f"{place}{name}", "invalid_type")
    return value


def function_tool(**function: Any) -> dict[str, Any]:
    """A tool as chat completions have it, of fields that are not None."""
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
