"""Boxes and points in the text of answers, in the four forms that models write them in.

    form = processor.form((640, 480))                         # the model's own, or COORDINATES["qwen3-vl"]
    text = form.write([Box("star", (10, 20, 60, 80))], (640, 480))  # [{"bbox_2d": [16, 42, 94, 167], ...}]
    found = form.read(text, (640, 480))
    found.boxes, found.points, found.malformed
    lines_of(found)                                           # "star: box 10 20 60 80", for a person

| form | a box | a point | step |
|---|---|---|---|
| `qwen3-vl` | {"bbox_2d": [x1, y1, x2, y2], "label": ...} | {"point_2d": [x, y], "label": ...} | 1/1000 |
| `qwen2.5-vl` | the same | the same | a pixel of the image as the model sees it |
| `lfm2.5-vl` | {"label": ..., "bbox": [x1, y1, x2, y2]}, each from 0 to 1 | none | 1/1000 |
| `doctags` | <text><loc_X1><loc_Y1><loc_X2><loc_Y2>label</text> | none | 1/500 |

Here all coordinates are pixels of the image as `load_image` opens it, upright by its EXIF: (0, 0) is its
upper left corner, (width, height) its lower right one, and a box is (x1, y1, x2, y2).

Reading ignores text around coordinates (sentences, code fences). Text with the marks of coordinates that is
none (broken JSON, a wrong count, NaN, corners swapped, a number outside of the image, a list that was cut
off) is `Malformed` with the reason, and never a box. Complete things beside it count.
"""

from __future__ import annotations

import html
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

Size: TypeAlias = tuple[int, int]  # width, height
Corners: TypeAlias = tuple[float, float, float, float]  # x1, y1, x2, y2
ABSENT = "There is none."  # in place of nothing at all
MAX_TEXT = 50_000  # letters that are read of an answer
_SHOWN = 80  # letters of what is malformed


@dataclass(frozen=True)
class Box:
    """A named box (x1, y1, x2, y2) in pixels, x1 <= x2 and y1 <= y2. `raw` are the model's own numbers."""

    label: str
    box: Corners
    raw: tuple[float, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Point:
    """A named point (x, y) in pixels. `raw` are the model's own numbers."""

    label: str
    point: tuple[float, float]
    raw: tuple[float, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Malformed:
    """Text with the marks of coordinates that is none, and why."""

    text: str
    reason: str


@dataclass(frozen=True)
class Located:
    """The things that an answer locates, in its order; all empty where it holds no coordinates."""

    boxes: tuple[Box, ...] = ()
    points: tuple[Point, ...] = ()
    malformed: tuple[Malformed, ...] = ()


class _Bad(ValueError):
    """Why something is no box or point."""


@dataclass(frozen=True)
class CoordinateForm(ABC):
    """One way to write boxes and points.

    detect, point, describe: what its models are asked, with {thing} in it, or for everything in the image;
        "" for the last two where they have no such answer, or none that all of them were trained on.
    """

    name: str
    detect: str
    point: str
    describe: str = field(default="", kw_only=True)

    def question(self, kind: str, thing: str = "") -> str:
        """The question for a `kind`: "detect", "point", "describe". ValueError where there is no prompt."""
        prompt = {"detect": self.detect, "point": self.point, "describe": self.describe}[kind]
        if not prompt and kind == "describe":
            raise ValueError(f"--describe: the form {self.name} has no prompt for it; ask in words with -q")
        if not prompt:
            raise ValueError(f"the form {self.name} has boxes only")
        return prompt.replace("{thing}", thing)

    def asking(self, prompts: Mapping[str, str]) -> CoordinateForm:
        """This form with other prompts for what it can say; "" keeps its own."""
        can = {"detect": self.detect, "point": self.point, "describe": self.detect}
        return replace(self, **{key: prompts[key] for key in can if can[key] and prompts.get(key)})

    def on(self, seen: Size) -> CoordinateForm:
        """This form for an image that the model sees in the size `seen`, where its numbers depend on that."""
        return self

    @abstractmethod
    def write(self, things: Sequence[Box | Point], size: Size) -> str:
        """Boxes or points of an image of `size` as text, `ABSENT` for none. ValueError where the form cannot
        say them."""

    def read(self, text: str, size: Size, label: str = "") -> Located:
        """The things that a text locates in an image of `size`; `label` is for things without one."""
        found = list(self._found(text[:MAX_TEXT], size))
        boxes = (replace(one, label=one.label or label) for one in found if isinstance(one, Box))
        points = (replace(one, label=one.label or label) for one in found if isinstance(one, Point))
        malformed = (one for one in found if isinstance(one, Malformed))
        return Located(tuple(boxes), tuple(points), tuple(malformed))

    @abstractmethod
    def _found(self, text: str, size: Size) -> Iterator[Box | Point | Malformed]: ...

    def _sayable(self, things: Sequence[Box | Point], size: Size) -> bool:
        """False where there is nothing to say. ValueError for what is not in the image or this form."""
        for thing in things:
            kind, numbers = ("detect", thing.box) if isinstance(thing, Box) else ("point", thing.point)
            self.question(kind)
            _checked(numbers, len(numbers), *size)
        return bool(things)


def _checked(numbers: Any, count: int, width: float, height: float) -> list[float]:
    """`count` numbers x, y (and x, y again) within width and height. Raises _Bad."""
    if not is_list(numbers) or len(numbers) != count:
        raise _Bad(f"expected {count} numbers")
    if not all(type(one) in (int, float) and one == one for one in numbers):  # NaN is not
        raise _Bad("expected numbers")
    if not all(0 <= one <= (height if at % 2 else width) for at, one in enumerate(numbers)):
        raise _Bad("outside of the image")
    values = list(map(float, numbers))
    if count == 4 and (values[0] > values[2] or values[1] > values[3]):
        raise _Bad("corners in the wrong order")
    return values


def scaled(values: Sequence[float], scale_x: float, scale_y: float) -> tuple[Any, ...]:
    return tuple(value * (scale_y if at % 2 else scale_x) for at, value in enumerate(values))


def _thing(label: str, numbers: Sequence[float], raw: Sequence[float]) -> Box | Point:
    """A box of four numbers or a point of two."""
    kind: Any = Box if len(numbers) == 4 else Point
    return kind(" ".join(label.split()), tuple(numbers), tuple(raw))


def _numbers(thing: Box | Point) -> tuple[float, ...]:
    return thing.box if isinstance(thing, Box) else thing.point


def centre(box: Box) -> Point:
    x1, y1, x2, y2 = box.box
    return Point(box.label, ((x1 + x2) / 2, (y1 + y2) / 2))


def is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _shown(text: str) -> str:
    return " ".join(text[: 4 * _SHOWN].split())[:_SHOWN]


# -------------------------------------------------------------------------------------------------- JSON
LABELS = ("label", "text_content")  # the second is a text that was read
_DECODER = json.JSONDecoder()
_LIST_BEGINS = re.compile(r"\[\s*\Z")


@dataclass(frozen=True)
class JsonForm(CoordinateForm):
    """Objects with coordinates under a key, in a list or alone, wherever in the text.

    keys: key -> how many numbers stand under it.
    canvas: the width and height that its numbers are out of; None is the size in which the model sees an
        image, or the image's own where that is not known.
    decimals: of its numbers.
    label_first: of the two keys of an object.
    """

    keys: Mapping[str, int]
    canvas: Size | None
    decimals: int = 0
    label_first: bool = False

    def on(self, seen: Size) -> CoordinateForm:
        return replace(self, canvas=self.canvas or seen)

    def write(self, things: Sequence[Box | Point], size: Size) -> str:
        if not self._sayable(things, size):
            return ABSENT
        width, height = self.canvas or size
        scale = width / size[0], height / size[1]
        of_count = {count: key for key, count in self.keys.items()}
        objects = [
            [(of_count[len(numbers)], self.rounded(scaled(numbers, *scale))), ("label", thing.label)]
            for thing in things
            for numbers in [_numbers(thing)]
        ]
        ordered = [dict(reversed(one) if self.label_first else one) for one in objects]
        return json.dumps(ordered, ensure_ascii=False)

    def rounded(self, numbers: Sequence[float]) -> Sequence[float]:
        return [round(one, self.decimals or None) for one in numbers]

    def _found(self, text: str, size: Size) -> Iterator[Box | Point | Malformed]:
        end, in_list, broken = 0, False, False
        for at, after, value in _objects_in(text):
            if not after:
                # It may be an object around others, which come next.
                following = text.find("{", at + 1)
                part = text[at : following if following > 0 else len(text)]
                if any(key in part for key in self.keys):
                    broken = True
                    yield Malformed(_shown(part), "JSON that is broken or cut off")
                continue
            between = text[end:at]
            in_list = bool(_LIST_BEGINS.search(between)) or (in_list and "]" not in between)
            for one in _objects(value):
                if key := next((key for key in self.keys if key in one), None):
                    yield self._read(one, key, size)
                    broken = False
                for said in (own for own in one.values() if isinstance(own, str)):  # JSON in a text of JSON
                    yield from self._found(said, size) if any(f'"{key}"' in said for key in self.keys) else ()
            end = after
        if in_list and not broken and text[end:].lstrip(" \t\r\n,")[:1] != "]":
            yield Malformed(_shown(text[-_SHOWN:]), "a list that was cut off")

    def _read(self, one: Mapping[str, Any], key: str, size: Size) -> Box | Point | Malformed:
        label = next((one[name] for name in LABELS if name in one), "")
        width, height = self.canvas or size
        try:
            if not isinstance(label, str):
                raise _Bad("expected a label as text")
            values = _checked(one[key], self.keys[key], width, height)
            return _thing(label, scaled(values, size[0] / width, size[1] / height), one[key])
        except _Bad as error:
            written = json.JSONEncoder(ensure_ascii=False).iterencode(one)  # of which the beginning is shown
            return Malformed(_shown("".join(islice(written, 4 * _SHOWN))), str(error))


def _objects_in(text: str) -> Iterator[tuple[int, int, Any]]:
    """The begin, the end and the value of each JSON object in a text, without those within objects; and each
    brace that begins none, with 0 for its end."""
    at = 0
    while (at := text.find("{", at)) >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, end = None, 0
        yield at, end, value
        at = end or at + 1


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in a JSON value, in the order of the text."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            yield one
        if isinstance(one, dict | list):
            stack += reversed(list(one.values() if isinstance(one, dict) else one))


# --------------------------------------------------------------------------------------- location tokens
_STEPS = 500  # of a side; a vocabulary ends at the last but one, and what has the last is read
_TOKEN = re.compile(r"<loc_([0-9]{1,4})>")
# A tag or none, a run of tokens, and a label up to what ends it.
_ELEMENT = re.compile(rf"(?:<(?P<tag>(?!loc)\w+)>\s*)?(?P<run>(?:{_TOKEN.pattern}\s*)+)(?P<label>[^<\n]*)")


class _DocTags(CoordinateForm):
    """Four location tokens a box, then its label, between tags whose name is the label of a box without
    one."""

    def write(self, things: Sequence[Box | Point], size: Size) -> str:
        if not self._sayable(things, size):
            return ABSENT
        written = []
        for thing in things:
            shares = scaled(_numbers(thing), _STEPS / size[0], _STEPS / size[1])
            tokens = "".join(f"<loc_{min(_STEPS - 1, round(share))}>" for share in shares)
            written.append(f"<text>{tokens}{html.escape(thing.label, quote=False)}</text>")
        return "\n".join(written)

    def _found(self, text: str, size: Size) -> Iterator[Box | Point | Malformed]:
        end = 0
        for element in _ELEMENT.finditer(text):
            yield from self._broken(text[end : element.start()])
            end = element.end()
            numbers = [int(one) for one in _TOKEN.findall(element["run"])]
            try:
                values = _checked(numbers, 4, _STEPS, _STEPS)
                label = html.unescape(element["label"]).strip() or element["tag"] or ""
                yield _thing(label, scaled(values, size[0] / _STEPS, size[1] / _STEPS), numbers)
            except _Bad as error:
                yield Malformed(_shown(element[0]), str(error))
        yield from self._broken(text[end:])

    def _broken(self, text: str) -> Iterator[Malformed]:
        """Text that begins like a token and is none."""
        if (at := text.find("<loc_")) >= 0:
            yield Malformed(_shown(text[at:]), "a location token that is broken or cut off")


def lines_of(found: Located) -> list[str]:
    """A line for each thing that an answer locates."""

    def line(kind: str, thing: Box | Point) -> str:
        numbers = " ".join(f"{one:.0f}" for one in _numbers(thing))
        return f"{thing.label}: {kind} {numbers}" if thing.label else f"{kind} {numbers}"

    lines = [line("box", one) for one in found.boxes] + [line("point", one) for one in found.points]
    return lines + [f"malformed: {one.reason}: {one.text}" for one in found.malformed]


# --------------------------------------------------------------------------------------------- by name
# The prompts are those of the models' own documentation.
_SAID = ("form", "detect", "point", "describe")
_KEYS = {"bbox_2d": 4, "point_2d": 2}
COORDINATES: dict[str, CoordinateForm] = {
    form.name: form
    for form in (
        JsonForm(
            "qwen3-vl",
            'Locate every instance that belongs to the following categories: "{thing}". '
            "Report bbox coordinates in JSON format.",
            'Locate every instance of "{thing}" with points. Report point coordinates in JSON format.',
            *(_KEYS, (1000, 1000)),
            describe="Locate every object in the image. Report bbox coordinates and names in JSON format.",
        ),
        JsonForm(
            "qwen2.5-vl",
            "Outline the position of each {thing} and output all the coordinates in JSON format.",
            "Point to each {thing} and output all the point coordinates in JSON format, "
            'like this: {"point_2d": [x, y], "label": "name"}.',
            *(_KEYS, None),
            describe="Outline the position of every item, and output all bbox coordinates and names in JSON "
            "format.",
        ),
        # Of examples/satellite-vlm in Liquid AI's cookbook, which says that its models were trained on it.
        JsonForm(
            "lfm2.5-vl",
            "Inspect the image and detect the {thing}. Provide result as a valid JSON: "
            '[{"label": str, "bbox": [x1,y1,x2,y2]}, ...]. Coordinates must be normalized to 0-1.',
            *("", {"bbox": 4}, (1, 1), 3, True),
        ),
        _DocTags(
            *("doctags", "Find all '{thing}' elements on the page.", ""),
            describe="Convert this page to docling.",
        ),
    )
}


def form_of(said: Any, name: str | None = None) -> CoordinateForm | None:
    """The form called `name`, else the one that a checkpoint names, else None.

    said: `data.processor.coordinates_of` it. Its generation_config.json may have {"coordinates": {"form":
        "qwen3-vl", "detect": "Where is the {thing}?", "point": ..., "describe": ...}}, or the name alone;
        these prompts replace the form's own. Raises ValueError for what is none of these.
    """
    said = {"form": said} if isinstance(said, str) else said or {}
    if not isinstance(said, Mapping) or not all(isinstance(said.get(key, ""), str) for key in _SAID):
        raise ValueError(f"generation_config.json: coordinates: expected {', '.join(_SAID)} as texts")
    wanted = name or said.get("form")
    if wanted is None:
        return None
    if wanted not in COORDINATES:
        raise ValueError(f"unknown form of coordinates {wanted!r}; expected {', '.join(COORDINATES)}")
    return COORDINATES[wanted].asking(said if wanted == said.get("form") else {})
