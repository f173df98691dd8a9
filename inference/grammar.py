"""Grammars of answers: JSON that fits a schema, one of several texts, text that a pattern matches.

    grammar = json_grammar({"type": "object", "properties": {"count": {"type": "integer"}}})
    grammar = choice_grammar(["yes", "no"])
    options = GenerationOptions(constraint=checkpoint.forms.constraint(grammar))

A grammar is text in the language of llguidance (its variant of Lark), but for choices, which are all looked
at (`inference.forms`). JSON is written as `json.dumps` writes it, one space after each comma and colon and
no other: so most of its punctuation and names follow from what stands before, and no model can go on with
white space for ever. For the same reason an object has only the properties that its schema names, unless that
speaks of others. One space may stand in front of everything, because many models begin their answers with
one; it is no part of the answer's text.

Schemas come from strangers: how long they are, what compiling them takes (`inference.apart`) and what they
can make of a single token is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data.tools import Tool
from inference.calls import CallReader
from inference.errors import RequestError
from inference.markup import NAMED, VALUES, Markup, Rules, quoted, slashes_escaped
from messages import one_line

if TYPE_CHECKING:
    from generation.protocol import Constraint  # imports torch, which --help does without

MOST_BYTES = 65_536  # of a schema, all choices, or a pattern
MOST_CHOICES = 1000
MOST_DECIDED, LONGEST_DECIDED = 128, 8_192  # choices of a stranger, and characters of all of them
# A schema may not change these, which "x-guidance" in it could do.
_JSON = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
_CHOICES = "choices: "
_START = 'start: answer | " " answer\nanswer: '


def _json(schema: dict) -> str:
    return f"%json {json.dumps(schema | {'x-guidance': _JSON}, allow_nan=False)}"


def json_grammar(schema: Mapping[str, Any] | str | bytes) -> str:
    """The JSON values that a schema (draft 2020-12), an object or its text, allows. Raises RequestError for
    one that is too large or no object; one that means nothing or uses what is not supported is refused when
    the grammar is compiled."""
    try:
        text = schema if isinstance(schema, str | bytes) else json.dumps(schema)
        _check_size("schema", text)
        value = json.loads(text)
        if not isinstance(value, dict):
            raise RequestError(f"schema: expected a JSON object, got {one_line(repr(value), 80)}")
        _check_counts(value)
        if not any(map(_puts_together, _objects(value))):
            value = _closed(value)
        return _START + _json(value)
    except RequestError:
        raise
    except RecursionError:
        raise RequestError("schema: nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"schema: not valid JSON ({one_line(error, 200)})") from None


def choice_grammar(choices: Sequence[str]) -> str:
    """Exactly one of several different texts. Raises RequestError for none, too many, or empty ones."""
    if isinstance(choices, str) or not all(isinstance(one, str) for one in choices):
        raise RequestError(f"choices: expected a list of texts, got {one_line(repr(choices), 80)}")
    if any(one != one.strip() or not one or "\0" in one for one in choices):
        raise RequestError("choices: expected texts that are not empty and have no space around them")
    if not 1 <= len(choices) <= MOST_CHOICES or len(set(choices)) < len(choices):
        got = f"{len(choices)}, {len(set(choices))} of them different"
        raise RequestError(f"choices: expected 1 to {MOST_CHOICES} different texts, got {got}")
    _check_size("choices", "".join(choices))
    return _CHOICES + json.dumps(choices)


def choices_of(grammar: str) -> list[str] | None:
    """The texts of a `choice_grammar`; None for any other one."""
    return json.loads(grammar.removeprefix(_CHOICES)) if grammar.startswith(_CHOICES) else None


def read_choices(text: str) -> list[str]:
    """The choices on a command line: texts with commas between them, a JSON list, or whole numbers from one
    to another, as 1..5. Raises ValueError."""
    if found := re.fullmatch(r"\s*(-?\d{1,9})\.\.(-?\d{1,9})\s*", text):
        first, last = map(int, found.groups())
        if not 0 <= last - first < MOST_CHOICES:
            raise RequestError(f"choices: expected 1 to {MOST_CHOICES} numbers such as 1..5, got {text!r}")
        return [str(number) for number in range(first, last + 1)]
    return json.loads(text) if text.lstrip().startswith("[") else [*map(str.strip, text.split(","))]


def pattern_grammar(pattern: str) -> str:
    """Text all of which a regular expression (Rust's, without look-around) matches."""
    _check_size("pattern", pattern)
    if "\n" in pattern:
        raise RequestError(r"pattern: expected one line; write a line's end as \n")
    return f"{_START}/{slashes_escaped(pattern)}/"


def lark_grammar(text: str) -> str:
    """Text that a grammar in llguidance's variant of Lark describes, from its rule `start` on."""
    _check_size("grammar", text)
    if re.search(r"^\s*root\s*::=", text, re.MULTILINE):
        raise RequestError("grammar: expected Lark (start: ...), got GBNF (root ::= ...)")
    return f"{_START}%lark {{\n{text}\n}}"


def grammar_of(schema: Any = None, choices: Any = None) -> str | None:
    """The grammar of a request that may name either of these. Raises RequestError."""
    if schema is not None and choices is not None:
        raise RequestError("expected either schema or choices, got both")
    if choices is not None:
        return choice_grammar(choices)
    return None if schema is None else json_grammar(schema)


def has_json_values(grammar: str) -> bool:
    """True if the values in its answers are JSON, so that `inference.constraint.JsonEnd` knows their ends."""
    return "%json " in grammar and "<parameter=" not in grammar


def response_grammar(response_format: Mapping[str, Any]) -> str | None:
    """The grammar of what OpenAI's protocol calls response_format; None for ordinary text."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar({"type": "object"})
    named = response_format.get("json_schema")
    if kind != "json_schema" or not isinstance(named, Mapping) or "schema" not in named:
        raise RequestError(
            "response_format: expected type text, json_object, or json_schema with its schema in json_schema"
        )
    return json_grammar(named["schema"])


@dataclass(frozen=True)
class ToolUse:
    """The use of tools that an answer may make.

    tools: those that may be called. must: the answer is a call, or several; else it may be text.
    several: more than one call is allowed. text: the grammar of an answer without calls; None for any.
    """

    tools: tuple[Tool, ...]
    must: bool = False
    several: bool = True
    text: str | None = None


def tool_grammar(markup: Markup, use: ToolUse, token: Callable[[str], int | None]) -> str:
    """The grammar of calls of tools: of a whole answer where it must be calls; else of a block of them, after
    its opening mark. `token`: the id of a mark that is a token. Raises RequestError."""
    _check_size("tools", "".join(json.dumps(tool.schema) for tool in use.tools))
    for tool in use.tools:
        _check_counts(tool.schema)
    rules = Rules(lambda schema: json_grammar(schema).removeprefix(_START), token)
    if use.must or use.text is not None:
        words = "" if use.text is None or use.must else use.text.removeprefix(_START)
        words = words if (choices := choices_of(words)) is None else " | ".join(map(quoted, choices))
        text = f" | {words}" if words else ""
        return f"{_START}{markup.answer(use.tools, use.several, rules)}{text}\n{rules}"
    return f"start: {markup.block(use.tools, use.several, rules)}\n{rules}"


@dataclass(frozen=True)
class Form:
    """The form that holds an answer: `GenerationOptions.constraint`.

    constraint: makes one for each answer.
    choices: the texts, one of which the model says, and tokens: of the longest; () and 0 where there are
        others (`inference.forms`).
    reader: tells the calls in an answer from the text beside them; None where there can be none.
    size: bytes that it takes, about.
    """

    constraint: Callable[[], Constraint]
    choices: tuple[str, ...] = ()
    tokens: int = 0
    reader: Callable[[], CallReader] | None = None
    size: int = 0

    def __call__(self) -> Constraint:
        return self.constraint()


def refusal(message: str) -> str:
    """A sentence of llguidance's error message, without the grammar that it quotes."""
    reason = message.strip().split("\n")[0]
    reason = re.sub(r"^at \d+\(\d+\): ", "", reason).removeprefix("failed to compile JSON schema: ")
    reason = "nothing fits it" if reason.startswith("NoExtension") else reason
    return f"the schema, choices, pattern or grammar cannot be used: {one_line(reason, 300)}"


def _check_size(what: str, text: str | bytes) -> None:
    size = len(text.encode("utf-8", "replace") if isinstance(text, str) else text)
    if size > MOST_BYTES:
        raise RequestError(f"{what}: expected at most {MOST_BYTES} bytes, got {size}")


def _check_counts(schema: Any) -> None:
    """Raises RequestError for a length or number of things that is no whole number."""
    for one in _objects(schema):
        for key in _COUNTS & one.keys():
            if type(value := one[key]) is not int or value < 0:
                got = one_line(json.dumps(value), 80)
                raise RequestError(f"schema: expected a whole number as {key}, got {got}")


def _objects(value: Any) -> Iterator[dict]:
    """All schemas in a schema."""
    if isinstance(value, dict):
        yield value
        for key, inner in value.items():
            named = key in NAMED and isinstance(inner, dict)
            yield from _objects([*inner.values()] if named else inner if key not in VALUES else None)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects(inner)


_COUNTS = {f"{of}{what}" for of in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")}
_ONE = ("items", "additionalProperties")  # keywords whose value is a schema
_SEVERAL = ("anyOf", "oneOf", "prefixItems")
_ELSEWHERE = {"$ref", "anyOf", "oneOf"}  # keywords that lead to other schemas for the same value
_OF_OBJECTS = {"properties", "required", "additionalProperties", "patternProperties", "minProperties"}


def _puts_together(schema: dict) -> bool:
    """True if two keywords of a schema may each add properties to one object."""
    elsewhere = len(_ELSEWHERE & schema.keys())
    return "allOf" in schema or elsewhere > 1 or (elsewhere == 1 and bool(_OF_OBJECTS & schema.keys()))


def _closed(schema: Any) -> Any:
    """A schema that puts nothing together, with no other properties in objects than it names, where it does
    not speak of others."""
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key, value in schema.items():
        if key in _ONE:
            closed[key] = _closed(value)
        elif key in _SEVERAL and isinstance(value, list):
            closed[key] = [_closed(one) for one in value]
        elif key in NAMED and isinstance(value, dict):
            closed[key] = {name: _closed(one) for name, one in value.items()}
    named, required = schema.get("properties"), schema.get("required", [])
    known = isinstance(named, dict) and isinstance(required, list) and set(map(str, required)) <= set(named)
    if known and not (_OF_OBJECTS - {"properties", "required"}) & schema.keys():
        closed["additionalProperties"] = False
    return closed
