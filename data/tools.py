"""Tools that a model may call, in each family's markup: how a prompt lists them, what holds a call to the
schema of its tool, and how calls are read while they are made.

    markup = markup_of(chat_template)                       # Hermes, Xml, Pythonic, Gemma, or the plain form
    answer = markup.turn(tools, several=True, rules=rules)  # the grammar of a whole answer of calls
    reader = CallReader(markup, tools)
    text, pieces = reader.put(piece)                        # text beside calls, and more of the calls

Hermes (Qwen3-VL): JSON in <tool_call> tags. Xml (Qwen3.5): in these tags <function=NAME> with a
<parameter=NAME> for each, where texts stand as they are. Pythonic (LFM2.5-VL): calls of Python between two
special tokens. Gemma (Gemma 4): call:NAME{...} between two, with bare names and a token for the quotes of
texts. A template that knows no tools, or writes them otherwise, gets the plain form: a paragraph of the
system's message lists them, calls are Hermes', results are what the user says.

What the others cannot say (a schema that is no list of named parameters, a name that is no name of Python) is
JSON in the same tags, or f(**{...}): so a call can have any arguments that a schema allows.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple
from urllib.parse import unquote

ABOUT = {
    *("title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"),
}  # keywords of a schema that allow and forbid nothing
_OBJECT = ABOUT | {"type", "properties", "required", "additionalProperties"}
_SCALARS = {  # types whose JSON no text has to give way to, with what may be written for them
    "null": r"null",
    "boolean": r"true|false",
    "integer": r"-?(0|[1-9][0-9]*)",
    "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
}
_OF_CALL = {"id", "type", "index", "function", "name"}  # keys of a call without arguments
MOST_REPEATED = 2**18  # characters of definitions, for all parameters of a tool that name them
_FORMATS = {  # of texts that stand without quotes; JSON's are the library's
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](Z|[+-][0-2][0-9]:[0-5][0-9])",
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}


@dataclass(frozen=True)
class Tool:
    """parameters: a JSON schema of an object. given: as a row has it, which is shown then."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = field(default=None, hash=False)
    given: Mapping[str, Any] | None = field(default=None, hash=False)

    @classmethod
    def read(cls, given: Any) -> Tool:
        """As rows hold it, in the form of chat templates or its function alone. Raises ValueError."""
        function = given.get("function", given) if isinstance(given, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"tools: expected functions with a name, got {str(given)[:80]!r}")
        whole = given if "function" in given else {"type": "function", "function": function}
        return cls(function["name"], function.get("description"), function.get("parameters"), whole)

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments. A tool without one has none."""
        return {"type": "object", **(self.parameters or {"properties": {}})}

    @property
    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
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
        """As messages hold it: OpenAI's and transformers' form, or its function alone, with arguments as an
        object or as JSON. Raises ValueError."""
        if isinstance(given, ToolCall):
            return given
        function = given.get("function", given) if isinstance(given, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool_calls: expected a function with a name, got {str(given)[:80]!r}")
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
        """As chat templates take it."""
        function = {"name": self.name, "arguments": json.loads(self.arguments)}
        return {"type": "function", "id": self.id, "function": function}


@dataclass(frozen=True)
class ToolUse:
    """What an answer may do with tools: what it is held to (see `Checkpoint.constraint`).

    tools: those that may be called. must: the answer is a call, or several; else it may be text.
    several: more than one call is allowed. text: the grammar of an answer without calls; None for any.
    """

    tools: tuple[Tool, ...]
    must: bool = False
    several: bool = True
    text: str | None = None


@dataclass(frozen=True)
class CallPiece:
    """More of one call of an answer. The first has the name; `ended` is that of the last, which has all."""

    index: int
    id: str
    name: str = ""
    arguments: str = ""
    ended: bool = False


# ------------------------------------------------------------------------------------------------ grammars
class Rules:
    """Rules of a grammar (llguidance's variant of Lark) while it is written.

    json: the grammar of JSON that fits a schema. token: the id of a text that is a token of its own.
    """

    def __init__(self, json: Callable[[Any], str], token: Callable[[str], int | None]):
        self.json, self._token, self._names = json, token, dict[tuple[str, str, str], str]()

    def add(self, body: str, kind: str = "rule", options: str = "") -> str:
        """The name of a rule, or of a "TERMINAL": each is written once."""
        return self._names.setdefault((kind, options, body), f"{kind}{len(self._names)}")

    def mark(self, text: str) -> str:
        token_id = self._token(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def __str__(self) -> str:
        return "\n".join(f"{name}{options}: {body}" for (_, options, body), name in self._names.items())


def quoted(text: str) -> str:
    """A string of the grammar's language, which JSON's strings are."""
    return json.dumps(text, ensure_ascii=False)


class Named(NamedTuple):
    """A parameter of a tool with a plain list of them."""

    name: str
    schema: dict[str, Any]
    required: bool


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What references within a schema name: a part of it needs them, too."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def references(schema: Any) -> list[tuple[str, str]] | None:
    """(keyword, name) of the definitions that a schema names; None where it refers to anything else."""
    text = json.dumps(schema)
    found = re.findall(r'"\$ref": "#/(\$defs|definitions)/([^"/]*)', text)
    if text.count('"$ref":') != len(found) or '"$dynamicRef":' in text:
        return None
    names = ((key, unquote(json.loads(f'"{name}"'))) for key, name in found)
    return [(key, name.replace("~1", "/").replace("~0", "~")) for key, name in names]


def reached(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with those of its definitions that it leads to."""
    shared = definitions(schema)
    left: list[Any] = [{key: value for key, value in schema.items() if key not in shared}]
    found = dict[tuple[str, str], Any]()
    while left:
        if (names := references(left.pop())) is None:
            return dict(schema)
        for key, name in names:
            known = shared.get(key)
            if not isinstance(known, dict) or name not in known:
                return dict(schema)  # what is wrong with it is found elsewhere
            if (key, name) not in found:
                found[key, name] = known[name]
                left.append(known[name])
    needed = {key: {name: one for (of, name), one in found.items() if of == key} for key in shared}
    return {**schema, **needed}


def named_parameters(schema: Mapping[str, Any]) -> list[Named] | None:
    """The parameters of a schema that says of each by itself what it may be; None for any other, and where
    what they share is too long to be written for each."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    plain = schema.keys() <= _OBJECT and schema["type"] == "object" and isinstance(properties, dict)
    if not plain or not isinstance(required, list) or not set(map(str, required)) <= set(properties):
        return None
    if not properties and schema.get("additionalProperties", "properties" not in schema) is not False:
        return None  # any names
    shared, repeated, named = definitions(schema), 0, list[Named]()
    for name, one in properties.items():
        refs = references(one)
        if not isinstance(one, dict) or refs is None:
            return None
        named.append(Named(name, {**shared, **one} if refs else one, name in required))
        repeated += bool(refs)
    return named if repeated * len(json.dumps(shared)) <= MOST_REPEATED else None


def alternatives(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas one of which a value has to fit, as far as they stand side by side."""
    keys, kinds = schema.keys() - ABOUT, schema.get("type")
    listed = schema.get("anyOf")
    if keys == {"anyOf"} and isinstance(listed, list) and all(isinstance(one, dict) for one in listed):
        return [one for inner in listed for one in alternatives({**definitions(schema), **inner})]
    if isinstance(kinds, list) and "enum" not in keys and "const" not in keys:
        return [dict(schema, type=kind) for kind in kinds]
    return [dict(schema)]


def texts_of(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts that a schema names to choose from; None for one that names none, or other values too."""
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = isinstance(named, list) and named and all(isinstance(one, str) for one in named)
    return named if texts and schema.get("type", "string") == "string" else None


def kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """What a value may be: "text", one of `_SCALARS` without a bound, or "json"."""

    def kind(one: Mapping[str, Any]) -> str:
        if one.get("type") == "string" or texts_of(one) is not None:
            return "text"
        named = isinstance(one.get("type"), str)  # else the library that holds answers to it refuses it
        plain = named and one.keys() - ABOUT == {"type"} and one["type"] in _SCALARS
        return str(one["type"]) if plain else "json"

    return {kind(one) for one in alternatives(schema)}


def free_text(schema: Mapping[str, Any]) -> str | None:
    """The terminal of a text of the model's own; None for one that has to be JSON."""
    known = ABOUT | {"type", "minLength", "maxLength", "pattern", "format"}
    if not schema.keys() <= known:
        return None
    form = _FORMATS.get(str(schema.get("format")), "(?s:.*)")
    terminal = f"/{form}/"
    if "pattern" in schema:
        pattern = str(schema["pattern"])
        inner = pattern.removeprefix("^")
        inner = inner[:-1] if (ends := inner.endswith("$") and not inner.endswith(r"\$")) else inner
        if re.search(r"[|^$\n]|\(\?", re.sub(r"\\.|\[\^", "", inner)):
            return None  # anchors that do not stand for all of it
        inner = re.sub(r"\\.|/", lambda found: r"\/" if found[0] in ("/", r"\/") else found[0], inner)
        before, after = "" if pattern[:1] == "^" else "(?s:.*)", "" if ends else "(?s:.*)"
        terminal += f" & /{before}{inner}{after}/"
    if "minLength" in schema or "maxLength" in schema:
        terminal += f" & /(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/"
    return terminal


def in_order(parameters: Sequence[Named], comma: str, rules: Rules, written: Callable[[Named], str]) -> str:
    """The grammar of parameters one after another, without some of those that are not required."""
    first = more = '""'  # what may come of the parameters from here on: the first of all, or one more
    for parameter in reversed(parameters):
        one = rules.add(f"{written(parameter)} {more}")
        skipped, left_out = ("", "") if parameter.required else (f" | {first}", f" | {more}")
        first, more = rules.add(f"{one}{skipped}"), rules.add(f"{quoted(comma)} {one}{left_out}")
    return first


# ------------------------------------------------------------------------------------------------- markups
class Markup:
    """How a family writes calls: blocks between two marks. `Hermes` is its plainest form.

    before, after: what stands between a block's marks and its calls. inner: between calls of one block, ""
    where a block has one. outer: between blocks, None where there is one.
    """

    opens, closes = "<tool_call>", "</tool_call>"
    before, after, inner = "\n", "\n", ""
    outer: str | None = "\n"
    native = True  # a template writes it

    @property
    def marks(self) -> tuple[str, ...]:
        """What may be tokens of their own."""
        return self.opens, self.closes

    def head(self, tool: Tool) -> str:
        """What stands before the arguments."""
        return f'{{"name": {quoted(tool.name)}, "arguments": '

    def tail(self, tool: Tool) -> str:
        return "}"

    def arguments(self, tool: Tool, rules: Rules) -> str:
        """The grammar of the arguments."""
        return rules.add(rules.json(tool.schema))

    def value(self, schema: Mapping[str, Any], rules: Rules, depth: int = 0) -> str:
        """The grammar of a value: JSON, but for what has a `way` of its own."""
        ways, rest = list[str](), list[dict[str, Any]]()
        for one in alternatives(schema):
            if way := self.way(one, rules, depth):
                ways.append(way)
            else:
                rest.append(one)
        if rest:
            inner = rest[0] if len(rest) == 1 else {**definitions(schema), "anyOf": rest}
            ways.append(rules.add(rules.json(inner if ways else schema)))
        return rules.add(" | ".join(ways))

    def way(self, schema: Mapping[str, Any], rules: Rules, depth: int) -> str:
        """The grammar of one of its `alternatives` where it is not JSON; else ""."""
        return ""

    def read(self, tool: Tool) -> Arguments:
        """What makes JSON of the arguments."""
        return Arguments()

    def block(self, tools: Sequence[Tool], several: bool, rules: Rules) -> str:
        """The grammar of a block after its opening mark."""
        calls = []
        for tool in tools:
            head, tail = quoted(self.head(tool)), quoted(self.tail(tool))
            calls.append(f"{head} {self.arguments(tool, rules)} {tail}")
        call = rules.add(" | ".join(calls))
        more = f" ({quoted(self.inner)} {call})*" if several and self.inner else ""
        return f"{quoted(self.before)} {call}{more} {quoted(self.after)} {rules.mark(self.closes)}"

    def written(self, tool: Tool, arguments: str) -> str:
        """A block of one call, of JSON arguments where those are JSON in this markup."""
        call = f"{self.head(tool)}{arguments}{self.tail(tool)}"
        return f"{self.opens}{self.before}{call}{self.after}{self.closes}"

    def turn(self, tools: Sequence[Tool], several: bool, rules: Rules) -> str:
        """The grammar of a whole answer of calls."""
        block = rules.add(f"{rules.mark(self.opens)} {self.block(tools, several, rules)}")
        return f"{block} ({quoted(self.outer)} {block})*" if several and self.outer is not None else block


class Plain(Markup):
    """Hermes' calls for a template that knows no tools."""

    native = False


class Xml(Markup):
    _ENDS = "\n</parameter>\n"
    _MARK = r"<\/?(parameter|function|tool_call)[=>]"
    _NO_MARKS = rf"~/(?s:.*){_MARK}(?s:.*)/"

    def _parameters(self, tool: Tool) -> list[Named] | None:
        """None where they are JSON."""
        named = named_parameters(tool.schema)
        fits = named is not None and all(
            re.fullmatch(r"[^<>\n]+", one.name) and self._text(one.schema) is not None for one in named
        )
        return named if fits and re.fullmatch(r"[^<>\n]+", tool.name) else None

    def head(self, tool: Tool) -> str:
        return super().head(tool) if self._parameters(tool) is None else f"<function={tool.name}>\n"

    def tail(self, tool: Tool) -> str:
        return super().tail(tool) if self._parameters(tool) is None else "</function>"

    def read(self, tool: Tool) -> Arguments:
        parameters = self._parameters(tool)
        return super().read(tool) if parameters is None else XmlArguments(parameters)

    def arguments(self, tool: Tool, rules: Rules) -> str:
        parameters = self._parameters(tool)
        if parameters is None:
            return super().arguments(tool, rules)
        written = []
        for name, schema, required in parameters:
            if text := self._text(schema):
                value = rules.add(rules.add(f"({text}) {quoted(self._ENDS)}", "T"), options="[lazy]")
            else:
                value = f"{rules.add(rules.json(schema))} {quoted(self._ENDS)}"
            written.append(rules.add(f"{quoted(f'<parameter={name}>')} {quoted(chr(10))} {value}"))
            written[-1] += "" if required else "?"
        return rules.add(" ".join(written) or '""')

    def _text(self, schema: Mapping[str, Any]) -> str | None:
        """The terminal of a value that may be a text, which stands as it is; "" for one that is JSON, None
        for one that could be either."""
        kinds, allowed = kinds_of(schema), list[str]()
        if "text" not in kinds:
            return ""
        if "json" in kinds:
            return None
        for one in alternatives(schema):
            if one.get("type") in kinds - {"text"}:
                allowed.append(f"/{_SCALARS[one['type']]}/")
            elif (texts := texts_of(one)) is not None:
                if any(re.search(self._MARK, text) for text in texts):
                    return None
                allowed += map(quoted, texts)
            elif (free := free_text(one)) is not None:
                allowed.append(f"({free} & {self._NO_MARKS})")
            else:
                return None
        return " | ".join(allowed)


class Pythonic(Markup):
    opens, closes = "<|tool_call_start|>", "<|tool_call_end|>"
    before, after, inner, outer = "[", "]", ", ", None

    def _parameters(self, tool: Tool) -> list[Named] | None:
        """None where they are JSON, as f(**{...})."""
        named = named_parameters(tool.schema)
        return named if named is not None and all(one.name.isidentifier() for one in named) else None

    def head(self, tool: Tool) -> str:
        return f"{tool.name}(" + "**" * (self._parameters(tool) is None)

    def tail(self, tool: Tool) -> str:
        return ")"

    def read(self, tool: Tool) -> Arguments:
        return super().read(tool) if self._parameters(tool) is None else PythonArguments()

    def arguments(self, tool: Tool, rules: Rules) -> str:
        parameters = self._parameters(tool)
        if parameters is None:
            return super().arguments(tool, rules)
        return in_order(
            parameters, ", ", rules, lambda one: f"{quoted(one.name + '=')} {self.value(one.schema, rules)}"
        )

    def way(self, schema: Mapping[str, Any], rules: Rules, depth: int) -> str:
        words = {"null": '"None"', "boolean": '"True" | "False"'}
        return words.get(str(schema["type"]), "") if schema.keys() - ABOUT == {"type"} else ""


class Gemma(Markup):
    opens, closes = "<|tool_call>", "<tool_call|>"
    before, after, outer = "", "", ""
    QUOTE = '<|"|>'
    _MARK = r'(<\|"\|>|<\|?tool_call\|?>)'
    NO_MARKS = rf"~/(?s:.*){_MARK}(?s:.*)/"
    _DEPTH = 8  # within one another; deeper values are JSON

    @property
    def marks(self) -> tuple[str, ...]:
        return self.opens, self.closes, self.QUOTE

    def head(self, tool: Tool) -> str:
        return f"call:{tool.name}"

    def tail(self, tool: Tool) -> str:
        return ""

    def arguments(self, tool: Tool, rules: Rules) -> str:
        return self.value(tool.schema, rules)

    def read(self, tool: Tool) -> Arguments:
        return GemmaArguments()

    def way(self, schema: Mapping[str, Any], rules: Rules, depth: int) -> str:
        kind, texts = schema.get("type"), texts_of(schema)
        if texts is not None:
            plain = not any(re.search(self._MARK, text) for text in texts)
            return self._text(" | ".join(map(quoted, texts)), rules) if plain else ""
        if kind == "string" and (free := free_text(schema)) is not None:
            return self._text(f"{free} & {self.NO_MARKS}", rules)
        if kind == "object" and depth < self._DEPTH and (named := named_parameters(schema)) is not None:
            if not all(re.fullmatch(r"\w+", one.name) for one in named):
                return ""
            fields = in_order(
                sorted(named, key=lambda one: one.name.lower()), ",", rules,  # as templates write them
                lambda one: f"{quoted(one.name + ':')} {self.value(one.schema, rules, depth + 1)}",
            )  # fmt: skip
            return f'"{{" {fields} "}}"'
        items = schema.get("items")
        if kind == "array" and schema.keys() - ABOUT == {"type", "items"} and isinstance(items, dict):
            item = {**definitions(schema), **items}
            written = self.value(item, rules, depth + 1) if depth < self._DEPTH else ""
            return f'"[" ({written} ("," {written})*)? "]"' if written else ""
        return ""

    def _text(self, terminal: str, rules: Rules) -> str:
        """The grammar of a text in quotes."""
        mark = rules.mark(self.QUOTE)
        if mark != quoted(self.QUOTE):  # a token, which no terminal has in it
            return f"{mark} {rules.add(terminal, 'T')} {mark}"
        ends = rules.add(f"({terminal}) {mark}", "T")
        return f"{mark} {rules.add(ends, options='[lazy]')}"


HERMES, XML, PYTHONIC, GEMMA, PLAIN = Markup(), Xml(), Pythonic(), Gemma(), Plain()


def markup_of(chat_template: str) -> Markup:
    """How the model of a chat template writes calls."""
    if "tools" not in chat_template:
        return PLAIN
    if "<function=" in chat_template and "<tool_call>" in chat_template:
        return XML
    if "<|tool_call_start|>" in chat_template:
        return PYTHONIC
    if "<|tool_call>" in chat_template and Gemma.QUOTE in chat_template:
        return GEMMA
    return HERMES if "<tool_call>" in chat_template and "arguments" in chat_template else PLAIN


# ------------------------------------------------------------------------------------------ reading of calls
class Arguments:
    """Makes JSON of the arguments of one call while they come: here, of JSON. `ended` at their end."""

    def __init__(self) -> None:
        self.ended, self._depth, self._in_string, self._escaped = False, 0, False, False

    def put(self, text: str) -> tuple[str, str]:
        """(more of the JSON, what is left of `text` until more of it comes, or after the end)."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return text[: at + 1], text[at + 1 :]
        return text, ""


def begun(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin a mark."""
    return max((n for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


def text_until(mark: str, text: str) -> tuple[str, bool, str]:
    """More of a text that ends at a mark: (as JSON, whether it has ended, what is left)."""
    value, end, rest = text.partition(mark)
    value = value if end else text[: 1 - len(mark)]
    return quoted(value)[1:-1] + '"' * bool(end), bool(end), rest if end else text[len(value) :]


class XmlArguments(Arguments):
    _BEGINS, _ENDS, _LAST = "<parameter=", "\n</parameter>\n", "</function>"

    def __init__(self, parameters: Sequence[Named]):
        super().__init__()
        self._kinds = {one.name: kinds_of(one.schema) for one in parameters}
        self._made, self._text = "{", False  # not returned so far; a text is being read

    def put(self, text: str) -> tuple[str, str]:
        while not self.ended:
            left = self._step(text)
            if left == text:
                break
            text = left
        made, self._made = self._made, ""
        return made, text

    def _step(self, text: str) -> str:
        """What is left of `text`: all of it where more is needed."""
        if self._text:
            made, ended, left = text_until(self._ENDS, text)
            self._made, self._text = self._made + made, not ended
            return left
        if text.startswith(self._LAST):
            self._made, self.ended = self._made + "}", True
            return text
        name, begun, value = text.removeprefix(self._BEGINS).partition(">\n")
        if not text.startswith(self._BEGINS) or not begun:
            return text
        kinds, first = self._kinds.get(name, {"json"}), self._depth == 0
        if kinds == {"text"}:
            self._made += f'{"" if first else ", "}{quoted(name)}: "'
            self._text, self._depth = True, 1
            return value
        value, end, rest = value.partition(self._ENDS)
        if not end:
            return text
        written = value if "text" in kinds and not _may_be(value, kinds) else None
        self._made += f"{'' if first else ', '}{quoted(name)}: "
        self._made += quoted(written) if written is not None else literal(value)
        self._depth = 1
        return rest


def _may_be(text: str, kinds: set[str]) -> bool:
    """Whether a text says one of these scalars."""
    return any(re.fullmatch(_SCALARS[kind], text) for kind in kinds & _SCALARS.keys())


class PythonArguments(Arguments):
    def __init__(self) -> None:
        super().__init__()
        self._begun = False

    def put(self, text: str) -> tuple[str, str]:
        made = "" if self._begun else "{"
        self._begun = True
        while text and not text.startswith(")"):
            name, equals, value = text.removeprefix(", ").partition("=")
            end = _value_end(value)
            if not equals or end is None:
                return made, text
            made += f"{', ' if self._depth else ''}{quoted(name)}: {literal(value[:end])}"
            self._depth, text = 1, value[end:]
        self.ended = text.startswith(")")
        return made + "}" * self.ended, text


def _value_end(text: str) -> int | None:
    """Where a value of Python ends that an argument begins with; None where more is needed."""
    depth, quote, escaped = 0, "", False
    for at, char in enumerate(text):
        if escaped:
            escaped = False
        elif quote:
            escaped, quote = char == "\\", "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif depth == 0 and char in ",)":
            return at
        elif char in ")]}":
            depth -= 1
    return None


def no_constant(name: str) -> None:
    """`parse_constant` of json.loads, which takes NaN and Infinity else. Raises ValueError."""
    raise ValueError(f"{name} is no JSON")


def literal(text: str) -> str:
    """JSON of a value that is written as JSON or as Python; of a text that is neither, as a string. A number
    that no double holds becomes the largest."""
    beyond, most = False, sys.float_info.max

    def number(digits: str) -> int | float:
        nonlocal beyond
        nearest = max(-most, min(value := float(digits), most))
        beyond |= value != nearest
        return int(digits) if value == nearest and digits.lstrip("-").isdecimal() else nearest

    try:
        value = json.loads(text, parse_float=number, parse_int=number, parse_constant=no_constant)
        return json.dumps(value, ensure_ascii=False) if beyond else text
    except ValueError:
        try:
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return quoted(text)


class GemmaArguments(Arguments):
    """Of JSON, too."""

    def __init__(self) -> None:
        super().__init__()
        self._text, self._word = False, ""  # in a text between quotes; a name or a value that is not whole

    def put(self, text: str) -> tuple[str, str]:
        made, quote = "", Gemma.QUOTE
        while text and not self.ended:
            if self._text:
                more, ended, text = text_until(quote, text)
                made, self._text = made + more, not ended
                if not ended:
                    break
            elif not self._in_string and text.startswith(quote):
                made, text, self._text = made + '"', text[len(quote) :], True
            elif not self._in_string and quote.startswith(text):
                break
            else:
                made, text = made + self._read(text[0]), text[1:]
        return made, text

    def _read(self, char: str) -> str:
        """What a character outside of quotes completes."""
        if self._escaped or self._in_string:
            self._escaped, self._in_string = not self._escaped and char == "\\", self._escaped or char != '"'
            return char
        if char not in '{}[]:,"':
            self._word += char
            return ""
        word, self._word = self._word.strip(), ""
        self._in_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        self.ended = char == "}" and not self._depth
        return (word and (quoted(word) if char == ":" else literal(word))) + char


class CallReader:
    """Tells calls from the text beside them, while both come. What only looks like a call of these tools is
    text; the space before a call is neither. must: there is no text, so that what is cut is a call."""

    def __init__(self, markup: Markup, tools: Sequence[Tool], must: bool = False):
        self._must, self._markup, self._held, self._count = must, markup, "", 0
        self._heads = {markup.head(tool): tool for tool in tools}
        self._call: tuple[Tool, str, Arguments] | None = None  # with its id
        self._in_block = False

    def put(self, text: str, last: bool = False) -> tuple[str, list[CallPiece]]:
        """(more of the text, more of the calls). With the `last` of it, nothing is held back but a call that
        is not whole."""
        self._held, shown, pieces = self._held + text, "", list[CallPiece]()
        for more in self._steps(pieces):
            shown += more
        if last and self._call is None:
            shown, self._held = shown + self._held * (not self._must), ""
        return shown, pieces

    def _steps(self, pieces: list[CallPiece]) -> Iterator[str]:
        markup = self._markup
        while self._held:
            if self._call is not None:
                tool, call_id, arguments = self._call
                if not arguments.ended:
                    made, self._held = arguments.put(self._held)
                    if made:
                        pieces.append(CallPiece(self._count - 1, call_id, "", made))
                    if not arguments.ended:
                        return
                tail = markup.tail(tool)
                ways = [markup.inner] * bool(markup.inner) + [markup.after + markup.closes]
                rest = next((way for way in ways if self._held.startswith(tail + way)), None)
                if rest is None:
                    return
                pieces.append(CallPiece(self._count - 1, call_id, ended=True))
                self._call, self._in_block = None, rest == markup.inner != ""
                self._held = self._held[len(tail + rest) :]
                continue
            start = 0 if self._in_block else self._held.find(markup.opens)
            if start < 0:
                kept = self._may_open()
                yield self._held[: len(self._held) - kept]
                self._held = self._held[len(self._held) - kept :]
                return
            before = "" if self._in_block else markup.opens + markup.before
            heads = {before + head: tool for head, tool in self._heads.items()}
            held = self._held[start:]
            longer = any(head.startswith(held) and head != held for head in heads)
            if not longer and (found := [head for head in heads if held.startswith(head)]):
                head = max(found, key=len)
                yield self._held[:start].rstrip()
                tool, self._held = heads[head], held[len(head) :]
                self._call = tool, f"call_{secrets.token_hex(12)}", markup.read(tool)
                self._count += 1
                pieces.append(CallPiece(self._count - 1, self._call[1], tool.name))
            elif longer:
                yield self._held[:start].rstrip()
                self._held = self._held[len(self._held[:start].rstrip()) :]
                return
            else:
                self._in_block = False
                end = start + len(markup.opens)
                yield self._held[:end]
                self._held = self._held[end:]

    def _may_open(self) -> int:
        """How many of the last characters may belong to a call: the beginning of a mark, and space."""
        mark, held = self._markup.opens, self._held
        before = held[: len(held) - begun(held, mark)]
        return len(held) - len(before.rstrip())


def whole_calls(pieces: Sequence[CallPiece]) -> list[ToolCall]:
    calls = []
    for _, group in groupby(pieces, lambda piece: piece.index):
        parts = list(group)
        if parts[-1].ended:
            arguments = literal("".join(one.arguments for one in parts))
            calls.append(ToolCall(parts[0].id, parts[0].name, arguments))
    return calls


# ---------------------------------------------------------------------------------------- the plain form
def list_of(tools: Sequence[Tool]) -> str:
    """The paragraph of a system message that tells a model of its tools."""
    lines = "\n".join(json.dumps(tool.shown["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, each described by a line of JSON:\n{lines}\n\n"
        "To call one, answer with its name and arguments in tool_call tags; to call several, with one such "
        'block for each:\n<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>'
    )


def call_text(call: ToolCall) -> str:
    """A call as the plain form writes it."""
    return PLAIN.written(Tool(call.name), json.dumps(json.loads(call.arguments), ensure_ascii=False))
