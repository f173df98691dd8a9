"""Each family's markup of calls: the grammar that holds a call to the schema of its tool, and the layout by
which `inference.calls` reads it.

    markup = MARKUPS[processor.chat.marks.markup]
    grammar = markup.answer(tools, several=True, rules=rules)  # of a whole answer of calls
    reader = CallReader(markup, tools)

hermes (Qwen3-VL): JSON in <tool_call> tags. xml (Qwen3.5): in these tags <function=NAME> with a
<parameter=NAME> for each, where texts stand as they are. pythonic (LFM2.5-VL): calls of Python between two
special tokens. gemma (Gemma 4): call:NAME{...} between two, with bare names and a token for the quotes of
texts. A template that knows no tools, or writes them otherwise, gets the plain form: a paragraph of the
system's message lists them, calls are Hermes', results are what the user says.

What the others cannot say (a schema that is no list of named parameters, a name that is no name of Python) is
JSON in the same tags, or f(**{...}): so a call can have any arguments that a schema allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from data import tools
from data.tools import CallMarks, Tool

ABOUT = {
    *("title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"),
}  # keywords of a schema that allow and forbid nothing
_OBJECT = ABOUT | {"type", "properties", "required", "additionalProperties"}
SCALARS = {  # types whose JSON cannot be taken for a text, with what may be written for them
    "null": r"null",
    "boolean": r"true|false",
    "integer": r"-?(0|[1-9][0-9]*)",
    "number": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
}
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # keywords whose value names schemas
VALUES = ("const", "enum", "default", "examples")  # keywords whose value is no schema
_FORMATS = {  # of texts that stand without quotes; the library knows those of JSON
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](Z|[+-][0-2][0-9]:[0-5][0-9])",
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}


class Rules:
    """Rules of a grammar (llguidance's variant of Lark) while it is written.

    json: writes the grammar of JSON that fits a schema. token: the id of a text that is a token of its own.
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
    """A string of the grammar's language, which is a string of JSON, too."""
    return json.dumps(text, ensure_ascii=False)


# ------------------------------------------------------------------------------------------------- schemas
class Named(NamedTuple):
    """A parameter of a tool with a plain list of them."""

    name: str
    schema: dict[str, Any]
    required: bool


def in_place(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """A schema with each definition where it is referred to. None where that never ends, is more than twice
    as long, or is more than a copy."""
    left = 2 * len(json.dumps(schema))

    def put(value: Any) -> Any:
        nonlocal left
        if isinstance(value, list):
            return list(map(put, value))
        if not isinstance(value, dict):
            return value
        if not isinstance(name := value.get("$ref"), str):
            return {key: one if key in VALUES else inner(key, one) for key, one in value.items()}
        found: Any = schema
        for step in name.removeprefix("#/").split("/"):
            found = found[unquote(step).replace("~1", "/").replace("~0", "~")]
        left -= len(json.dumps(found))
        if left < 0 or not value.keys() <= ABOUT | {"$ref"}:
            raise KeyError(name)
        return {**put(found), **{key: one for key, one in value.items() if key != "$ref"}}

    def inner(key: str, value: Any) -> Any:
        named = key in NAMED and isinstance(value, dict)
        return {name: put(one) for name, one in value.items()} if named else put(value)

    try:
        return put({key: one for key, one in schema.items() if key not in ("$defs", "definitions")})
    except (LookupError, TypeError, RecursionError):
        return None


def named_parameters(schema: Mapping[str, Any]) -> list[Named] | None:
    """The parameters of a schema that describes each of them by itself; None for any other schema."""
    if (whole := in_place(schema)) is None:
        return None
    properties, required = whole.get("properties", {}), whole.get("required", [])
    plain = whole.keys() <= _OBJECT and whole["type"] == "object" and isinstance(properties, dict)
    if not plain or not isinstance(required, list) or not set(map(str, required)) <= set(properties):
        return None
    if not properties and whole.get("additionalProperties", "properties" not in whole) is not False:
        return None  # any names
    if not all(isinstance(one, dict) for one in properties.values()):
        return None
    return [Named(name, one, name in required) for name, one in properties.items()]


def alternatives(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas one of which a value has to fit, as far as they stand side by side."""
    keys, kinds = schema.keys() - ABOUT, schema.get("type")
    listed = schema.get("anyOf")
    if keys == {"anyOf"} and isinstance(listed, list) and all(isinstance(one, dict) for one in listed):
        return [one for inner in listed for one in alternatives(inner)]
    if isinstance(kinds, list) and "enum" not in keys and "const" not in keys:
        return [dict(schema, type=kind) for kind in kinds]
    return [dict(schema)]


def texts_of(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts that a schema lists to choose from; None where it lists none, or other values too."""
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = isinstance(named, list) and named and all(isinstance(one, str) for one in named)
    return named if texts and schema.get("type", "string") == "string" else None


def kinds_of(schema: Mapping[str, Any]) -> set[str]:
    """The kinds of values that fit a schema: "text", one of `SCALARS` without a bound, or "json"."""

    def kind(one: Mapping[str, Any]) -> str:
        if one.get("type") == "string" or texts_of(one) is not None:
            return "text"
        named = isinstance(one.get("type"), str)  # else the library that holds answers to it refuses it
        plain = named and one.keys() - ABOUT == {"type"} and one["type"] in SCALARS
        return str(one["type"]) if plain else "json"

    return {kind(one) for one in alternatives(schema)}


def free_text(schema: Mapping[str, Any]) -> str | None:
    """The terminal of a text of the model's own; None for one that has to be JSON."""
    if not schema.keys() <= ABOUT | {"type", "minLength", "maxLength", "pattern", "format"}:
        return None
    terminal = f"/{_FORMATS.get(str(schema.get('format')), '(?s:.*)')}/"
    if "pattern" in schema:
        pattern = str(schema["pattern"])
        inner = pattern.removeprefix("^")
        inner = inner[:-1] if (ends := inner.endswith("$") and not inner.endswith(r"\$")) else inner
        if re.search(r"[|^$\n]|\(\?", re.sub(r"\\.|\[\^", "", inner)):
            return None  # anchors that do not stand for all of it
        before, after = "" if pattern[:1] == "^" else "(?s:.*)", "" if ends else "(?s:.*)"
        terminal += f" & /{before}{slashes_escaped(inner)}{after}/"
    if "minLength" in schema or "maxLength" in schema:
        terminal += f" & /(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/"
    return terminal


def slashes_escaped(pattern: str) -> str:
    """A regular expression as it may stand between the slashes of a terminal."""
    return re.sub(r"\\.|/", lambda found: r"\/" if found[0] in ("/", r"\/") else found[0], pattern)


def in_order(parameters: Sequence[Named], comma: str, rules: Rules, written: Callable[[Named], str]) -> str:
    """The grammar of parameters one after another, without some of those that are not required."""
    first = more = '""'  # what may come of the parameters from here on: the first of all, or one more
    for parameter in reversed(parameters):
        one = rules.add(f"{written(parameter)} {more}")
        skipped, left_out = ("", "") if parameter.required else (f" | {first}", f" | {more}")
        first, more = rules.add(f"{one}{skipped}"), rules.add(f"{quoted(comma)} {one}{left_out}")
    return first


# ------------------------------------------------------------------------------------------------- markups
class Layout(NamedTuple):
    """The form of one tool's arguments in a call: one object (JSON, or with a `quote`, Gemma's), or, where
    `named` lists them, fields one after another.

    head, tail: before and after the arguments.
    begins: a field up to its value; its name is the first group.
    ends: what follows a value, in which a text stands as it is; "" where values are Python's.
    """

    head: str
    tail: str
    quote: str = ""
    named: list[Named] | None = None
    begins: re.Pattern[str] = re.compile("")
    ends: str = ""


class Markup:
    """A family's way to write calls: blocks between two marks. This class itself is Hermes, the plainest.

    before, after: what stands between a block's marks and its calls. inner: between calls of one block, ""
    where a block has one. outer: between blocks, None where there is one.
    """

    before, after, inner = "\n", "\n", ""
    outer: str | None = "\n"

    def __init__(self, marks: CallMarks):
        self.marks = marks

    def layout(self, tool: Tool) -> Layout:
        return Layout(f'{{"name": {quoted(tool.name)}, "arguments": ', "}")

    def arguments(self, tool: Tool, rules: Rules) -> str:
        """The grammar of the arguments."""
        named = self.layout(tool).named
        return rules.add(rules.json(tool.schema)) if named is None else self.fields(named, rules)

    def fields(self, named: Sequence[Named], rules: Rules) -> str:
        """The grammar of arguments that are fields."""
        raise NotImplementedError

    def value(self, schema: Mapping[str, Any], rules: Rules, depth: int = 0) -> str:
        """The grammar of a value: JSON, but for what has a `way` of its own."""
        ways, rest = list[str](), list[dict[str, Any]]()
        for one in alternatives(schema):
            if way := self.way(one, rules, depth):
                ways.append(way)
            else:
                rest.append(one)
        if rest:
            inner = rest[0] if len(rest) == 1 else {"anyOf": rest}
            ways.append(rules.add(rules.json(inner if ways else schema)))
        return rules.add(" | ".join(ways))

    def way(self, schema: Mapping[str, Any], rules: Rules, depth: int) -> str:
        """The grammar of one of the `alternatives` where it is not JSON; else ""."""
        return ""

    def block(self, tools: Sequence[Tool], several: bool, rules: Rules) -> str:
        """The grammar of a block after its opening mark."""
        calls = []
        for tool in tools:
            layout = self.layout(tool)
            calls.append(f"{quoted(layout.head)} {self.arguments(tool, rules)} {quoted(layout.tail)}")
        call = rules.add(" | ".join(calls))
        more = f" ({quoted(self.inner)} {call})*" if several and self.inner else ""
        return f"{quoted(self.before)} {call}{more} {quoted(self.after)} {rules.mark(self.marks.closes)}"

    def answer(self, tools: Sequence[Tool], several: bool, rules: Rules) -> str:
        """The grammar of a whole answer of calls."""
        block = rules.add(f"{rules.mark(self.marks.opens)} {self.block(tools, several, rules)}")
        return f"{block} ({quoted(self.outer)} {block})*" if several and self.outer is not None else block


class _Xml(Markup):
    _BEGINS, _ENDS = re.compile("<parameter=(.*?)>\n", re.DOTALL), "\n</parameter>\n"
    _MARK = r"<\/?(parameter|function|tool_call)[=>]"
    _NO_MARKS = rf"~/(?s:.*){_MARK}(?s:.*)/"

    def layout(self, tool: Tool) -> Layout:
        named = named_parameters(tool.schema)
        names = [tool.name, *(one.name for one in named or ())]
        if named is None or not all(re.fullmatch(r"[^<>\n]+", name) for name in names):
            return super().layout(tool)
        if any(self._text(one.schema) is None for one in named):
            return super().layout(tool)
        head = f"<function={tool.name}>\n"
        return Layout(head, "</function>", named=named, begins=self._BEGINS, ends=self._ENDS)

    def fields(self, named: Sequence[Named], rules: Rules) -> str:
        written = []
        for name, schema, required in named:
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
                allowed.append(f"/{SCALARS[one['type']]}/")
            elif (texts := texts_of(one)) is not None:
                if any(re.search(self._MARK, text) for text in texts):
                    return None
                allowed += map(quoted, texts)
            elif (free := free_text(one)) is not None:
                allowed.append(f"({free} & {self._NO_MARKS})")
            else:
                return None
        return " | ".join(allowed)


class _Pythonic(Markup):
    before, after, inner, outer = "[", "]", ", ", None
    _BEGINS = re.compile("(?:, )?(.*?)=", re.DOTALL)

    def layout(self, tool: Tool) -> Layout:
        named = named_parameters(tool.schema)
        if named is None or not all(one.name.isidentifier() for one in named):
            return Layout(f"{tool.name}(**", ")")
        return Layout(f"{tool.name}(", ")", named=named, begins=self._BEGINS)

    def fields(self, named: Sequence[Named], rules: Rules) -> str:
        return in_order(
            named, ", ", rules, lambda one: f"{quoted(one.name + '=')} {self.value(one.schema, rules)}"
        )

    def way(self, schema: Mapping[str, Any], rules: Rules, depth: int) -> str:
        words = {"null": '"None"', "boolean": '"True" | "False"'}
        return words.get(str(schema["type"]), "") if schema.keys() - ABOUT == {"type"} else ""


class Gemma(Markup):
    before, after, outer = "", "", ""
    _MARK = r'(<\|"\|>|<\|?tool_call\|?>)'
    NO_MARKS = rf"~/(?s:.*){_MARK}(?s:.*)/"
    _DEPTH = 8  # within one another; deeper values are JSON

    def layout(self, tool: Tool) -> Layout:
        return Layout(f"call:{tool.name}", "", self.marks.quote)

    def arguments(self, tool: Tool, rules: Rules) -> str:
        return self.value(tool.schema, rules)

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
            written = self.value(items, rules, depth + 1) if depth < self._DEPTH else ""
            return f'"[" ({written} ("," {written})*)? "]"' if written else ""
        return ""

    def _text(self, terminal: str, rules: Rules) -> str:
        """The grammar of a text in quotes."""
        mark = rules.mark(self.marks.quote)
        if mark != quoted(self.marks.quote):  # a token, which no terminal has in it
            return f"{mark} {rules.add(terminal, 'T')} {mark}"
        ends = rules.add(f"({terminal}) {mark}", "T")
        return f"{mark} {rules.add(ends, options='[lazy]')}"


MARKUPS: dict[str, Markup] = {
    "hermes": Markup(tools.HERMES),
    "xml": _Xml(tools.XML),
    "pythonic": _Pythonic(tools.PYTHONIC),
    "gemma": Gemma(tools.GEMMA),
    "plain": Markup(tools.PLAIN),
}
