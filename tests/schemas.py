"""JSON schemas of many kinds, whose values are all short: even random weights come to an end."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

WORD = {"type": "string", "maxLength": 8}
COUNT = {"type": "integer", "minimum": 0, "maximum": 12}
POINT = {"type": "object", "properties": {"x": COUNT, "y": COUNT}, "required": ["x", "y"]}


def record(required: bool = True, **properties: Any) -> dict[str, Any]:
    """An object with these properties."""
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | {"required": list(properties)} if required else schema


def several(items: Any, most: int = 3, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS: dict[str, dict[str, Any]] = {
    "word": WORD,
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": {"type": "integer", "minimum": -300, "maximum": 250},
    "number": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 7},
    "enum": {"enum": ["red", "green", 3, None, {"a": [1, 2]}]},
    "const": {"const": {"kind": "circle", "sides": 0}},
    "unicode": {"enum": ["größe", "日本語", "🦉 owl", 'a "quoted" one', "back\\slash", "line\nend"]},
    "record": record(name=WORD, count=COUNT),
    "optional": record(False, name=WORD, count=COUNT, seen={"type": "boolean"}),
    "open": {"type": "object", "properties": {"name": WORD}, "required": ["name"]},
    "awkward names": record(**{'a "b"': COUNT, "ä/ö": WORD, "": {"type": "null"}, "properties": COUNT}),
    "array": several(WORD),
    "some": several({"enum": ["circle", "square"]}, 4, 2),
    "tuple": {"type": "array", "prefixItems": [WORD, COUNT], "items": False, "minItems": 2},
    "nested": record(shapes=several(record(kind={"enum": ["circle", "square"]}, at=POINT))),
    "deep": record(a=record(b=record(c=record(d=several(record(e={"type": "boolean"})))))),
    "any of": {"anyOf": [COUNT, record(reason=WORD), {"type": "null"}]},
    "one of": {"oneOf": [record(kind={"const": "circle"}, radius=COUNT),
                         record(kind={"const": "square"}, side=COUNT)]},
    "all of": {"allOf": [{"type": "object", "properties": {"a": COUNT}, "required": ["a"]},
                         {"properties": {"b": WORD}, "required": ["b"], "additionalProperties": True}],
               "additionalProperties": False, "properties": {"a": True, "b": True}},
    "types": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    "reference": record(start={"$ref": "#/$defs/point"}, ends=several({"$ref": "#/$defs/point"}, 2))
    | {"$defs": {"point": POINT}},
    "pattern": record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "date": record(day={"type": "string", "format": "date"}),
    "tree": {"$ref": "#/$defs/tree", "$defs": {"tree": record(leaf={"type": "boolean"})
             | {"properties": {"leaf": {"type": "boolean"}, "left": {"$ref": "#/$defs/tree"}}}}},
}  # fmt: skip
GROWING = ("tree",)  # an answer may be of any length


def assert_fits(text: str, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
