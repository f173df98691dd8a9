"""Grammars of answers: JSON that fits a schema, one of several texts, text that a pattern matches.

    grammar = json_grammar({"type": "object", "properties": {"count": {"type": "integer"}}})
    grammar = choice_grammar(["yes", "no"])
    options = GenerationOptions(constraint=checkpoint.forms.constraint(grammar))

A grammar is text in the language of llguidance (its variant of Lark), but for choices, which are all looked
at (`inference.decide`). JSON is written as `json.dumps` writes it, one space after each comma and colon and
no other: so most of its punctuation and names follow from what stands before, and no model can go on with
white space for ever. For the same reason an object has only the properties that its schema names, unless that
speaks of others. One space may stand in front of everything, because many models begin their answers with
one; it is no part of the answer's text.

Schemas come from strangers: how long they are, what compiling them takes (`inference.trial`) and what they
can make of a single token is bounded.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from data.tools import Tool
from inference.calls import CallReader
from inference.errors import FormError, RequestError
from inference.markup import ABOUT, Markup, Rules, quoted, reached, slashes_escaped
from inference.trial import TrialFailed, Trials
from messages import one_line

if TYPE_CHECKING:
    from generation.protocol import Constraint  # imports torch, which --help does without

T = TypeVar("T")
MOST_BYTES = 65_536  # of a schema, all choices, or a pattern
MOST_WRITTEN = 2**20  # of the grammar of tools, whose definitions stand in it several times
LEAST_KEPT = 2**20  # bytes, as which a grammar that is kept counts
MOST_CHOICES = 1000
MOST_DECIDED, LONGEST_DECIDED = 128, 8_192  # choices of a stranger that are all looked at, and characters
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


def is_json(grammar: str) -> bool:
    """True of a `json_grammar`."""
    return grammar.startswith(f"{_START}%json ")


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
    written = set[str]()

    def schema_rule(schema: Any) -> str:
        rule = json_grammar(reached(schema)).removeprefix(_START)
        written.add(rule)
        if (size := sum(map(len, written))) > MOST_WRITTEN:
            raise RequestError(
                f"tools: expected a grammar of at most {MOST_WRITTEN} bytes, got {size} or more"
            )
        return rule

    for tool in use.tools:
        _check_counts(tool.schema)
    rules = Rules(schema_rule, token)
    if use.must or use.text is not None:
        words = "" if use.text is None or use.must else use.text.removeprefix(_START)
        words = words if (choices := choices_of(words)) is None else " | ".join(map(quoted, choices))
        text = f" | {words}" if words else ""
        return f"{_START}{markup.answer(use.tools, use.several, rules)}{text}\n{rules}"
    return f"start: {markup.block(use.tools, use.several, rules)}\n{rules}"


def check_grammar(grammar: str) -> str:
    """Refuse, before any model is loaded, what llguidance does not understand. Returns the grammar."""
    try:
        Trials(None)(grammar)
    except TrialFailed as error:
        raise RequestError(refusal(str(error))) from None
    return grammar


# ------------------------------------------------------------- models that did not learn to write JSON


@dataclass(frozen=True)
class Form:
    """The form that holds an answer: `GenerationOptions.constraint`.

    constraint: makes one for each answer.
    write: makes the answer's text of what the model said; None where that is the answer.
    choices: the texts, one of which the model says, and tokens: of the longest; () and 0 where there are
        others (`inference.decide`).
    reader: tells the calls in an answer from the text beside them; None where there can be none.
    """

    constraint: Callable[[], Constraint]
    write: Callable[[str], str] | None = None
    choices: tuple[str, ...] = ()
    tokens: int = 0
    reader: Callable[[], CallReader] | None = None

    def __call__(self) -> Constraint:
        return self.constraint()


class Latest(Generic[T]):
    """The values that were used last, by key: at most `most` bytes, where each counts LEAST_KEPT or more.
    Several threads may ask."""

    def __init__(self, most: int = 64 * LEAST_KEPT):
        self.most, self._lock, self._kept = most, threading.Lock(), OrderedDict[str, tuple[T, int]]()

    def get(self, key: str) -> T | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: str, value: T, size: int) -> None:
        """size: of the value, in bytes, without its key."""
        with self._lock:
            self._kept[key] = value, max(LEAST_KEPT, len(key) + size)
            while sum(size for _, size in self._kept.values()) > self.most:
                self._kept.popitem(last=False)


_DIGITS = "-?[0-9]{1,20}"  # as many as `inference.constraint` lets a number have
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_COORDINATES = {"bbox_2d", "point_2d", "bbox", "label"}  # objects that such a model may write all the same
_DEPTH = 8  # objects and references within one another
_NO_JSON = (
    "this model did not learn to write JSON: give a schema that asks for one value, or names the texts to "
    "choose from (enum)"
)


def plain_form(grammar: str) -> tuple[str, Callable[[str], str]] | None:
    """For a model that did not learn to write JSON: (the grammar of what it says by itself, what makes the
    JSON of that). After a brace and a name such a model says nothing sensible, but the one value that a
    schema asks for is what it answers anyhow: a text, a number, yes or no, one of several texts, or a list
    of texts with commas. None for any other grammar, which it is held to as it stands.

    Raises FormError for a schema that asks for more than one value, for texts of the model's own that are no
    answer, or for JSON of any form.
    """
    if not is_json(grammar):
        return None
    schema = json.loads(grammar.removeprefix(f"{_START}%json "))
    schema.pop("x-guidance")
    names, value = list[str](), _resolved(schema, schema)
    while len(_properties(value)) == 1 and len(names) < _DEPTH:
        ((name, inner),) = value["properties"].items()
        known = value.keys() <= {"type", "properties", "required", "additionalProperties"} | ABOUT
        if not known or value.get("required") not in (None, [], [name]):
            break
        names.append(name)
        value = _resolved(inner, schema)
    try:
        plain_value = _plain_value(value, schema)
    except RequestError:  # a text that cannot be chosen as it stands
        plain_value = None
    if plain_value is None:
        _check_fillable(schema)
        return None
    plain, read = plain_value

    def write(text: str) -> str:
        before = "".join(f"{{{json.dumps(name, ensure_ascii=False)}: " for name in names)
        return before + read(text.strip()) + len(names) * "}"

    return plain, write


def plain_call(tools: Sequence[Tool]) -> tuple[str, Callable[[str], str]] | None:
    """`plain_form` of the arguments of a tool that has to be called. Raises FormError where there are several
    to choose from, too."""
    if len(tools) > 1:
        raise FormError(_NO_JSON)
    return plain_form(json_grammar(tools[0].schema))


def _check_fillable(schema: dict) -> None:
    """Raises FormError where a model that writes no JSON would have to fill in several values, or make up
    texts or names. Coordinates it may have learnt to write all the same."""
    fixed = set[int]()
    for one in _objects(schema):
        if _is_place(one, schema):
            fixed |= {id(inner) for inner in _objects(one)}
        elif _is_place(_resolved(one.get("items"), schema), schema):
            fixed.add(id(one))
    for one in _objects(schema):
        kinds, properties = one.get("type"), _properties(one)
        kinds = kinds if isinstance(kinds, list) else [kinds]
        parts = [
            part for key in ("anyOf", "oneOf", "allOf") if isinstance(one.get(key), list) for part in one[key]
        ]
        parts += [{"$ref": one["$ref"]}] if "$ref" in one else []
        objects = sum(bool(_properties(_resolved(part, schema))) for part in parts) + bool(properties)
        any_names = "object" in kinds and not properties and one.get("additionalProperties") is not False
        text = "string" in kinds and one.keys() <= {"type"} | ABOUT
        several = (
            len(properties) > 1 or objects > 1 or "array" in kinds or {"items", "prefixItems"} & one.keys()
        )
        required = one["required"] if isinstance(one.get("required"), list) else []
        more = one.get("minProperties", 0) > max(1, len(properties)) or "patternProperties" in one
        more = more or not set(map(str, required)) <= properties.keys()
        named = [inner for key in _NAMED if isinstance(one.get(key), dict) for inner in one[key].values()]
        anything = not one.keys() - ABOUT or True in [*parts, *named]
        if more or (id(one) not in fixed and (several or any_names or text or anything)):
            raise FormError(_NO_JSON)


def _is_place(one: dict, schema: dict) -> bool:
    """True of a schema of an object of coordinates, each of which is a list of numbers."""

    def fits(name: str, value: dict) -> bool:
        if name == "label":
            return value.get("type") in ("string", ["string", "null"]) or "enum" in value
        first = value.get("prefixItems")
        items = first if isinstance(first, list) and first else [value.get("items")]
        return all(_resolved(item, schema).get("type") in ("integer", "number") for item in items)

    named = _properties(one)
    alone = named.keys() <= _COORDINATES and not {"allOf", *_ELSEWHERE} & one.keys()
    return bool(named) and alone and all(fits(name, _resolved(named[name], schema)) for name in named)


def _properties(schema: dict) -> dict:
    named = schema.get("properties")
    return named if isinstance(named, dict) else {}


def _resolved(value: Any, schema: dict) -> dict:
    """A schema without what stands elsewhere or may be null; {} for one that is none."""
    for _ in range(_DEPTH):
        if not isinstance(value, dict):
            return {}
        others = [key for key in ("anyOf", "oneOf", "allOf") if key in value]
        name = str(value.get("$ref", ""))
        if name.startswith("#/") and value.keys() <= {"$ref"} | ABOUT:
            inner: Any = schema
            for part in name.split("/")[1:]:
                inner = inner.get(part) if isinstance(inner, dict) else None
            value = inner
        elif len(others) == 1 and value.keys() <= {*others} | ABOUT and isinstance(value[others[0]], list):
            real = [one for one in value[others[0]] if one != {"type": "null"}]
            if len(real) != 1:
                return value
            value = real[0]
        else:
            return value
    return {}


def _plain_value(value: dict, schema: dict) -> tuple[str, Callable[[str], str]] | None:
    """(the grammar of what a model says by itself for a value, what makes the value's JSON of it)."""
    keys, kind = value.keys() - ABOUT, value.get("type")
    if isinstance(kind, list) and len(kinds := [one for one in kind if one != "null"]) == 1:
        kind, value = kinds[0], value | {"type": kinds[0]}
    texts = [value["const"]] if "const" in value else value.get("enum")
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        few = len(texts) <= MOST_DECIDED and sum(map(len, texts)) <= LONGEST_DECIDED
        one_of = choice_grammar(texts)  # refuses what is no choice
        one_of = one_of if few else _START + " | ".join(map(quoted, texts))
        return (one_of, quoted) if keys <= {"type", "enum", "const"} else None
    if kind == "boolean" and keys == {"type"}:
        return choice_grammar(("yes", "no")), lambda text: "true" if text == "yes" else "false"
    if kind in ("integer", "number") and keys <= {"type"} | _BOUNDS:
        return _START + _json(value), str
    if kind == "string" and keys <= {"type", "minLength", "maxLength"}:
        least, most = value.get("minLength", 0), value.get("maxLength", "")
        return pattern_grammar(rf"[^\x00-\x1f]{{{least},{most}}}"), quoted
    if kind == "array" and keys <= {"type", "items"}:
        return _plain_list(_resolved(value.get("items"), schema))
    return None


def _plain_list(item: dict) -> tuple[str, Callable[[str], str]] | None:
    """`_plain_value` of a list of such items."""
    keys, kind, texts = item.keys() - ABOUT, item.get("type"), item.get("enum")
    if keys == {"type"} and kind == "string":
        return pattern_grammar(r"[^\x00-\x1f]*"), _listed
    if keys == {"type"} and kind == "integer":
        return pattern_grammar(f"({_DIGITS}(, {_DIGITS})*)?"), lambda text: f"[{text}]"
    choices = texts if isinstance(texts, list) and keys <= {"type", "enum"} else []
    if choices and all(isinstance(text, str) and ", " not in text for text in choices):
        choice_grammar(choices)  # refuses what is no choice
        grammar = f'{_START}one (", " one)*\none: ' + " | ".join(map(quoted, choices))
        return grammar, _listed
    return None


def _listed(text: str) -> str:
    """A list in JSON: "red circle, word tree" is two; a sentence, and coordinates, are one thing."""
    whole = text.endswith(".") or text.startswith(("[", "{"))
    return json.dumps([text] if whole else [one for one in text.split(", ") if one], ensure_ascii=False)


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
            named = key in _NAMED and isinstance(inner, dict)
            yield from _objects([*inner.values()] if named else inner if key not in _VALUES else None)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects(inner)


_VALUES = ("const", "enum", "default", "examples")  # keywords whose value is no schema
_COUNTS = {f"{of}{what}" for of in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")}
_ONE = ("items", "additionalProperties")  # keywords whose value is a schema
_SEVERAL = ("anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
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
        elif key in _NAMED and isinstance(value, dict):
            closed[key] = {name: _closed(one) for name, one in value.items()}
    named, required = schema.get("properties"), schema.get("required", [])
    known = isinstance(named, dict) and isinstance(required, list) and set(map(str, required)) <= set(named)
    if known and not (_OF_OBJECTS - {"properties", "required"}) & schema.keys():
        closed["additionalProperties"] = False
    return closed
