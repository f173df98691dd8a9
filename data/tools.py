"""Tools that a model may call, and its calls, as prompts and rows hold them. What an answer may call, and how
calls are read in it, is in `inference.markup` and `inference.calls`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LONGEST_NAME = 100  # characters of a special token that are looked for in values
# What templates look for in tools.
SCHEMA_WORDS = {
    *("array", "boolean", "default", "description", "enum", "function", "integer", "items", "name", "null"),
    *("nullable", "number", "object", "parameters", "properties", "required", "string", "type"),
}
_OF_CALL = {"id", "type", "index", "function", "name"}  # keys of a call without arguments


@dataclass(frozen=True)
class Tool:
    """parameters: a JSON schema of an object. given: the tool as a row has it, which is shown then."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = field(default=None, hash=False)
    given: Mapping[str, Any] | None = field(default=None, hash=False)

    @classmethod
    def read(cls, given: Any) -> Tool:
        """A tool of a row, in the form of chat templates or its function alone. Raises ValueError."""
        function = _function(given, "tools: expected functions")
        whole = given if "function" in given else {"type": "function", "function": function}
        return cls(function["name"], function.get("description"), function.get("parameters"), whole)

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments. A tool without one has no arguments."""
        return {"type": "object", **(self.parameters or {"properties": {}})}

    @property
    def shown(self) -> dict[str, Any]:
        """The form that chat templates take."""
        if self.given is not None:
            return dict(self.given)
        about = {"description": self.description, "parameters": self.parameters}
        known = {key: value for key, value in about.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **known}}


@dataclass(frozen=True)
class ToolCall:
    """arguments: JSON of an object."""

    id: str
    name: str
    arguments: str

    @classmethod
    def read(cls, given: Any) -> ToolCall:
        """A call of a message, in OpenAI's and transformers' form or its function alone, with arguments as an
        object or as JSON. Raises ValueError."""
        if isinstance(given, ToolCall):
            return given
        function = _function(given, "tool_calls: expected a function")
        arguments = function.get("arguments")
        others = {str(key) for one in (given, function) for key in one if one[key] is not None} - _OF_CALL
        if arguments is None and others:
            raise ValueError(f"tool_calls: expected a name and arguments, got {', '.join(sorted(others))}")
        try:
            arguments = json.loads(arguments) if arguments and isinstance(arguments, str) else arguments or {}
            text = json.dumps({**arguments}, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError("tool_calls: expected arguments that are a JSON object or its text") from None
        return cls(str(given.get("id") or ""), function["name"], text)

    @property
    def shown(self) -> dict[str, Any]:
        """The form that chat templates take."""
        function = {"name": self.name, "arguments": json.loads(self.arguments)}
        return {"type": "function", "id": self.id, "function": function}


def _function(given: Any, expected: str) -> Mapping[str, Any]:
    """The function of a tool or a call. Raises ValueError."""
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{expected} with a name, got {str(given)[:80]!r}")
    return function


class CallMarks(NamedTuple):
    """The texts between which a family's models write calls, and (quote) a text within a call.

    markup: its name. native: the chat template writes these marks itself.
    """

    markup: str
    opens: str = "<tool_call>"
    closes: str = "</tool_call>"
    quote: str = ""
    native: bool = True

    @property
    def texts(self) -> tuple[str, ...]:
        """All of them, each of which may be a token of its own."""
        return tuple(filter(None, (self.opens, self.closes, self.quote)))


HERMES, XML, PLAIN = CallMarks("hermes"), CallMarks("xml"), CallMarks("plain", native=False)
PYTHONIC = CallMarks("pythonic", "<|tool_call_start|>", "<|tool_call_end|>")
GEMMA = CallMarks("gemma", "<|tool_call>", "<tool_call|>", '<|"|>')


def marks_of(chat_template: str) -> CallMarks:
    """The marks around calls of a chat template's model; `PLAIN` where it knows no tools, or writes calls in
    a markup that is not known here."""
    if "tools" not in chat_template:
        return PLAIN
    if "<function=" in chat_template and XML.opens in chat_template:
        return XML
    if PYTHONIC.opens in chat_template:
        return PYTHONIC
    if GEMMA.opens in chat_template and GEMMA.quote in chat_template:
        return GEMMA
    return HERMES if HERMES.opens in chat_template and "arguments" in chat_template else PLAIN


# --------------------------------------------------------------------------------------------- in prompts
class Guard:
    """Breaks up special tokens inside JSON values with empty stand-ins, for templates that look into them.

    A stand-in follows whatever may begin a special token together with what a template writes after it, or
    lies within one; and it precedes whatever may end one.
    """

    def __init__(self, names: Sequence[str], nothing: str):
        self._inside, self._nothing = "\n".join(names), nothing
        self._beginnings = {name[:end] for name in names for end in range(1, len(name))}
        ends = {re.escape(name[-1]) for name in names}
        self._ends = re.compile("|".join(f"(?={one})" for one in ends) or "(?!)")

    def __call__(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self(key): self(one) for key, one in value.items()}
        if isinstance(value, list):
            return list(map(self, value))
        if not isinstance(value, str) or value in SCHEMA_WORDS:
            return value
        ends = (value[-n:] for n in range(1, 1 + min(len(value), LONGEST_NAME)))
        meets = value in self._inside or not self._beginnings.isdisjoint(ends)
        return self._ends.sub(self._nothing, value) + self._nothing * meets


def shown_call(
    call: ToolCall, guard: Guard, stand_in: Callable[[str, str], str], name: str = ""
) -> dict[str, Any]:
    """A call as a template gets it. `stand_in` takes a text and its role; `name` stands before the call's."""

    def argument(value: Any) -> Any:
        """A text that is written in one way only can have a stand-in, as those of messages have."""
        same = isinstance(value, str) and value.strip() == value and json.dumps(value)[1:-1] == value
        return stand_in(value, "") if same else guard(value)

    arguments = {guard(key): argument(value) for key, value in json.loads(call.arguments).items()}
    function = {"name": name + guard(call.name), "arguments": arguments}
    return call.shown | {"id": guard(call.id), "function": function}
