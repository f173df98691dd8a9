"""Boxes and points in the text of answers, in the seven forms that models write them in; rows with boxes as
questions and answers in these forms; and images that are flipped, cut and shrunk together with their boxes.

    form = processor.form((640, 480))                         # the model's own, or COORDINATES["qwen3-vl"]
    text = form.write([Box("star", (10, 20, 60, 80))], (640, 480))  # [{"bbox_2d": [16, 42, 94, 167], ...}]
    found = form.read(text, (640, 480))
    found.boxes, found.points, found.malformed
    Pixels(form, (640, 480), lines=True).put(text)            # "star: box 10 20 60 80", for a person

| form | a box | a point | step |
|---|---|---|---|
| `qwen3-vl` | {"bbox_2d": [x1, y1, x2, y2], "label": ...} | {"point_2d": [x, y], "label": ...} | 1/1000 |
| `qwen2.5-vl` | the same | the same | a pixel of the image as the model sees it |
| `lfm2.5-vl` | {"label": ..., "bbox": [x1, y1, x2, y2]}, each from 0 to 1 | none | 1/1000 |
| `paligemma` | <locY1><locX1><locY2><locX2> label, `;` between several | none | 1/1024 |
| `doctags` | <text><loc_X1><loc_Y1><loc_X2><loc_Y2>label</text> | none | 1/500 |
| `molmo` | none | <point x= y= alt=>, <points x1= y1= ... alt=>, in percent | 1/1000 |
| `moondream` | {"bins": [x, y, width, height], "label": ...} | {"bins": [x, y], "label": ...} | 1/1024 |

Here all coordinates are pixels of the image as `load_image` opens it, upright by its EXIF: (0, 0) is its
upper left corner, (width, height) its lower right one, and a box is (x1, y1, x2, y2).

Reading takes no notice of what stands around coordinates (sentences, code fences). What has the marks of
coordinates and is none (broken JSON, a wrong count, NaN, corners swapped, a place outside of the image, a
list that was cut off) is `Malformed` with the reason, and never a box. What is complete beside it counts.

| columns of rows | known from |
|---|---|
| `ref`, `bbox` | RefCOCO: what is meant, and its box; no box (null or []) is a thing that is not there |
| `objects` of `bbox` and `category` | COCO; LVIS calls them `bboxes` and `classes` |

A box of a row is [x, y, width, height], or with `corners` [x1, y1, x2, y2]. Names may be numbers of a
`ClassLabel` of the `datasets` library.
"""

from __future__ import annotations

import html
import json
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from PIL import Image

from data.errors import BadRow, ImageError
from data.images import load_image, measure

Size: TypeAlias = tuple[int, int]  # width, height
ABSENT = "There is none."  # in place of nothing at all
MAX_TEXT = 200_000  # letters that are read of an answer
_SHOWN = 80  # letters of what is malformed


@dataclass(frozen=True)
class Box:
    """A named box (x1, y1, x2, y2) in pixels, x1 <= x2 and y1 <= y2. `raw` are the model's own numbers."""

    label: str
    box: tuple[float, float, float, float]
    raw: tuple[float, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Point:
    """A named point (x, y) in pixels. `raw` are the model's own numbers."""

    label: str
    point: tuple[float, float]
    raw: tuple[float, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Malformed:
    """What has the marks of coordinates, and why it is none."""

    text: str
    reason: str


@dataclass(frozen=True)
class Located:
    """What an answer locates, in its order; all empty where it holds no coordinates."""

    boxes: tuple[Box, ...] = ()
    points: tuple[Point, ...] = ()
    malformed: tuple[Malformed, ...] = ()


class _Bad(ValueError):
    """Why something is no box or point."""


@dataclass(frozen=True)
class CoordinateForm(ABC):
    """One way to write boxes and points.

    detect, point, describe: what its models are asked, with {thing} in it, or for everything in the image;
    "" where they have no such answer, or none that all of them were trained on.
    """

    name: str
    detect: str
    point: str
    describe: str = field(default="", kw_only=True)

    def question(self, kind: str, thing: str = "") -> str:
        """What to ask for a `kind`: "detect", "point", "describe". ValueError where there is no prompt."""
        prompt = {"detect": self.detect, "point": self.point, "describe": self.describe}[kind]
        if not prompt and kind == "describe":
            raise ValueError(f"--describe: the form {self.name} has no prompt for it; ask in words with -q")
        if not prompt:
            other = "points" if kind == "detect" else "boxes"
            raise ValueError(f"the form {self.name} has {other} only")
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
        """What a text locates in an image of `size`; `label` for what has none."""
        found = list(self._found(text[:MAX_TEXT], size))
        boxes = (replace(one, label=one.label or label) for one in found if isinstance(one, Box))
        points = (replace(one, label=one.label or label) for one in found if isinstance(one, Point))
        malformed = (one for one in found if isinstance(one, Malformed))
        return Located(tuple(boxes), tuple(points), tuple(malformed))

    @abstractmethod
    def _found(self, text: str, size: Size) -> Iterator[Box | Point | Malformed]: ...

    def cut(self, text: str, lines: bool, last: bool) -> tuple[list[tuple[int, int]], int]:
        """Where in a text that may go on (unless it is the `last`) stands what `Pixels` writes otherwise, and
        up to where it is certain that nothing else does. Nothing where the notation names its own unit."""
        return [], len(text)

    def scaled(self, text: str, size: Size, back: bool = False) -> str:
        """A text with its JSON lists of the model's numbers as whole pixels, or `back`."""
        return text

    def _sayable(self, things: Sequence[Box | Point], size: Size) -> bool:
        """Whether there is anything to say; ValueError for what is not in the image or not in this form."""
        for thing in things:
            kind, numbers = ("detect", thing.box) if isinstance(thing, Box) else ("point", thing.point)
            self.question(kind)
            _checked(numbers, len(numbers), *size)
        return bool(things)


def _checked(numbers: Any, count: int, width: float, height: float) -> list[float]:
    """`count` numbers x, y (and x, y again) within width and height. Raises _Bad."""
    if not _is_list(numbers) or len(numbers) != count:
        raise _Bad(f"expected {count} numbers")
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers):
        raise _Bad("expected numbers")
    try:
        values = [float(one) for one in numbers]
    except OverflowError:
        raise _Bad("outside of the image") from None
    if not all(map(math.isfinite, values)):
        raise _Bad("expected finite numbers")
    if not all(0 <= one <= (height if at % 2 else width) for at, one in enumerate(values)):
        raise _Bad("outside of the image")
    if count == 4 and (values[0] > values[2] or values[1] > values[3]):
        raise _Bad("corners in the wrong order")
    return values


def _scaled(values: Sequence[float], scale_x: float, scale_y: float) -> tuple[Any, ...]:
    return tuple(value * (scale_y if at % 2 else scale_x) for at, value in enumerate(values))


def _thing(label: str, numbers: Sequence[float], raw: Sequence[float]) -> Box | Point:
    """A box of four numbers or a point of two."""
    kind: Any = Box if len(numbers) == 4 else Point
    return kind(" ".join(label.split()), tuple(numbers), tuple(raw))


def _numbers(thing: Box | Point) -> tuple[float, ...]:
    return thing.box if isinstance(thing, Box) else thing.point


def _shown(text: str) -> str:
    return " ".join(text[: 4 * _SHOWN].split())[:_SHOWN]


# -------------------------------------------------------------------------------------------------- JSON
_LABELS = ("label", "text_content")  # the second is a text that was read
_LIST_BEGINS = re.compile(r"\[\s*\Z")
_OBJECT = re.compile(r'\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')  # around no other
_OBJECT_BEGINS = re.compile(r'\{\s*(?:"([^"]*)("?))?')
_AROUND = re.compile(r"(?:`{1,3}\w*\s*)?(?:\[\s*)?\Z")  # a list begins, perhaps in a code fence
_HELD = 2_000  # letters that are waited for: an object is not so long


@dataclass(frozen=True)
class _Json(CoordinateForm):
    """Objects with coordinates under a key, in a list or alone, wherever in the text.

    keys: key -> how many numbers may stand under it.
    canvas: the width and height that its numbers are out of; None is the size in which the model sees an
        image, or the image's own where that is not known.
    decimals: of its numbers.
    label_first: of the two keys of an object.
    """

    keys: Mapping[str, tuple[int, ...]]
    canvas: Size | None
    decimals: int = 0
    label_first: bool = False

    def on(self, seen: Size) -> CoordinateForm:
        return replace(self, canvas=self.canvas or seen)

    def write(self, things: Sequence[Box | Point], size: Size) -> str:
        if not self._sayable(things, size):
            return ABSENT
        of_count = {count: key for key, counts in self.keys.items() for count in counts}
        objects = [
            [(of_count[len(numbers)], self._from_pixels(numbers, size)), ("label", thing.label)]
            for thing in things
            for numbers in [_numbers(thing)]
        ]
        ordered = [dict(reversed(one) if self.label_first else one) for one in objects]
        return json.dumps(ordered, ensure_ascii=False)

    def _from_pixels(self, numbers: Sequence[float], size: Size) -> Sequence[float]:
        width, height = self.canvas or size
        return self._rounded(_scaled(numbers, width / size[0], height / size[1]))

    def _rounded(self, numbers: Sequence[float]) -> Sequence[float]:
        return [round(one, self.decimals or None) for one in numbers]

    def _to_pixels(self, numbers: Any, count: int, size: Size) -> Sequence[float]:
        """Numbers of an object in pixels. Raises _Bad."""
        width, height = self.canvas or size
        return _scaled(_checked(numbers, count, width, height), size[0] / width, size[1] / height)

    def _found(self, text: str, size: Size) -> Iterator[Box | Point | Malformed]:
        decoder = json.JSONDecoder()
        at, end, in_list, broken = 0, 0, False, False
        while (at := text.find("{", at)) >= 0:
            try:
                value, after = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                # It may be an object around others, which are tried by themselves.
                following = text.find("{", at + 1)
                part = text[at : following if following > 0 else len(text)]
                at += 1
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
            at = end = after
        if in_list and not broken and text[end:].lstrip(" \t\r\n,")[:1] != "]":
            yield Malformed(_shown(text[-_SHOWN:]), "a list that was cut off")

    def cut(self, text: str, lines: bool, last: bool) -> tuple[list[tuple[int, int]], int]:
        return self._objects(text, last) if lines else ([], len(text) if last else self._certain(text))

    def _objects(self, text: str, last: bool) -> tuple[list[tuple[int, int]], int]:
        """Where a thing stands by itself or in a list; what is within other JSON stays JSON."""
        spans, at, names = list[tuple[int, int]](), 0, (*self.keys, *_LABELS)
        while (at := text.find("{", at)) >= 0:
            begun, whole = _OBJECT_BEGINS.match(text, at), _OBJECT.match(text, at, at + _HELD)
            assert begun is not None, "it begins with a brace"
            name, closed = begun[1] or "", bool(begun[2])
            may_be = name in names if closed else any(one.startswith(name) for one in names)
            is_thing = may_be and any(f'"{key}"' in (whole[0] if whole else text[at:]) for key in self.keys)
            if whole and is_thing:
                spans.append(whole.span())
                at = whole.end()
                continue
            goes_on = not whole and may_be and len(text) - at < _HELD and (closed or begun.end() == len(text))
            if goes_on and not last:
                break
            if goes_on and is_thing and "{" not in text[at + 1 :]:
                spans.append((at, len(text)))  # it was cut off
                break
            at += 1
        certain = len(text) if last or at < 0 else at
        if not last:
            around = _AROUND.search(text, spans[-1][1] if spans else 0, certain)
            assert around is not None, "nothing may stand around"
            certain = around.start()
        return spans, certain

    def _lists(self) -> re.Pattern[str]:
        """Numbers under one of the keys, also where all this stands in a text of JSON."""
        return re.compile(rf'"(?:{"|".join(self.keys)})\\*"\s*(?::\s*(?:(\[[^\[\]]*)(\])?)?)?')

    def _certain(self, text: str) -> int:
        """Up to where a text does not end within numbers, or the key before them."""
        begun = [match for match in self._lists().finditer(text) if match.end() == len(text) and not match[2]]
        at = begun[0].start() if begun else max(text.rfind('"'), 0)
        name = text[at:].replace("\\", "")
        opened = bool(begun) or any(f'"{key}"'.startswith(name) for key in self.keys)
        return at if opened and len(text) - at < _HELD else len(text)

    def scaled(self, text: str, size: Size, back: bool = False) -> str:
        shown, canvas = size, self.canvas or size
        shown, canvas = (canvas, shown) if back else (shown, canvas)

        def rescaled(match: re.Match[str]) -> str:
            numbers = _numbers_of(f"{match[1]}]") if match[2] else []
            values = _scaled(numbers, shown[0] / canvas[0], shown[1] / canvas[1])
            written = self._rounded(values) if back else [*map(round, values)]
            return match[0].replace(f"{match[1]}]", json.dumps(written)) if numbers else match[0]

        return self._lists().sub(rescaled, text)

    def _read(self, one: Mapping[str, Any], key: str, size: Size) -> Box | Point | Malformed:
        numbers, counts = one[key], self.keys[key]
        label = next((one[name] for name in _LABELS if name in one), "")
        count = len(numbers) if isinstance(numbers, list) and len(numbers) in counts else counts[0]
        try:
            if not isinstance(label, str):
                raise _Bad("expected a label as text")
            return _thing(label, self._to_pixels(numbers, count, size), numbers)
        except _Bad as error:
            return Malformed(_shown(json.dumps(one, ensure_ascii=False)), str(error))


def _numbers_of(text: str) -> list[float]:
    """The numbers of a list in JSON, [] where it holds anything else."""
    try:
        values = json.loads(text)
    except ValueError:
        return []
    real = all(type(one) in (int, float) and abs(one) < 1e9 for one in values)
    return values if real else []


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in a JSON value, in the order of the text."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            yield one
        if isinstance(one, dict | list):
            stack += reversed(list(one.values() if isinstance(one, dict) else one))


# ---------------------------------------------------------------------------------------------- moondream
_BINS = 1024  # of a place, and of a width or height between 1/1024 and 1 in equal ratios
_OCTAVES = 10


class _Moondream(_Json):
    """Bins as moondream's region head decodes them: the centre of a box, and its width and height on a
    logarithmic scale. A box may lie over the edge of the image by its bins' steps, and is cut there."""

    def scaled(self, text: str, size: Size, back: bool = False) -> str:
        return text  # bins are shares of other things than a side

    def _from_pixels(self, numbers: Sequence[float], size: Size) -> Sequence[float]:
        x1, y1, x2, y2 = (*numbers, *numbers)[:4]
        centre = [(x1 + x2) / 2 / size[0], (y1 + y2) / 2 / size[1]]
        bins = [min(_BINS - 1, round(share * _BINS)) for share in centre]
        if len(numbers) == 4:
            shares = (max((x2 - x1) / size[0], 2**-_OCTAVES), max((y2 - y1) / size[1], 2**-_OCTAVES))
            bins += [round((math.log2(share) / _OCTAVES + 1) * (_BINS - 1)) for share in shares]
        return bins

    def _to_pixels(self, numbers: Any, count: int, size: Size) -> Sequence[float]:
        bins = _checked(numbers[:2] if isinstance(numbers, list) else numbers, 2, _BINS - 1, _BINS - 1)
        x, y = _scaled(bins, size[0] / _BINS, size[1] / _BINS)
        if count == 2:
            _checked(numbers, 2, _BINS - 1, _BINS - 1)
            return x, y
        sides = _checked(numbers[2:], 2, _BINS - 1, _BINS - 1)
        width, height = (
            length * 2 ** ((one / (_BINS - 1) - 1) * _OCTAVES)
            for one, length in zip(sides, size, strict=True)
        )
        corners = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        return tuple(min(max(one, 0.0), float(size[at % 2])) for at, one in enumerate(corners))


# --------------------------------------------------------------------------------------- location tokens
@dataclass(frozen=True)
class _Tokens(CoordinateForm):
    """Four location tokens a box, each a share of the image in `steps`.

    most: the last token that is written; `steps` itself may be read where a vocabulary has it.
    vertical_first: y before x.
    mark: the beginning of a token.
    separator: between boxes.
    tagged: a label stands between tags, whose name is the label of a box without one.
    """

    steps: int
    most: int
    vertical_first: bool
    mark: str
    token: re.Pattern[str]
    separator: str
    tagged: bool

    def write(self, things: Sequence[Box | Point], size: Size) -> str:
        if not self._sayable(things, size):
            return ABSENT
        written = []
        for thing in things:
            label = html.escape(thing.label, quote=False) if self.tagged else thing.label
            if not self.tagged and set(";<>") & set(label):
                raise ValueError(f"the form {self.name} has no label with ; < or >: {label!r}")
            shares = _scaled(_numbers(thing), self.steps / size[0], self.steps / size[1])
            x1, y1, x2, y2 = (min(self.most, round(share)) for share in shares)
            order = (y1, x1, y2, x2) if self.vertical_first else (x1, y1, x2, y2)
            digits = "" if self.tagged else "04"
            tokens = "".join(f"{self.mark}{number:{digits}}>" for number in order)
            written.append(f"<text>{tokens}{label}</text>" if self.tagged else f"{tokens} {label}")
        return self.separator.join(written)

    def _found(self, text: str, size: Size) -> Iterator[Box | Point | Malformed]:
        # A tag or none, a run of tokens, what PaliGemma segments, and a label up to what ends it.
        runs = re.finditer(
            rf"(?:<(?P<tag>(?!loc)\w+)>\s*)?(?P<run>(?:{self.token.pattern}\s*)+)(?:<seg\d+>\s*)*"
            rf"(?P<label>[^<\n{'' if self.tagged else ';'}]*)",
            text,
        )
        end = 0
        for run in runs:
            yield from self._broken(text[end : run.start()])
            end = run.end()
            numbers = raw = [int(one) for one in self.token.findall(run["run"])]
            try:
                if len(numbers) == 4 and self.vertical_first:
                    numbers = [numbers[at] for at in (1, 0, 3, 2)]
                values = _checked(numbers, 4, self.steps, self.steps)
                label = html.unescape(run["label"]).strip() or (run["tag"] or "" if self.tagged else "")
                yield _thing(label, _scaled(values, size[0] / self.steps, size[1] / self.steps), raw)
            except _Bad as error:
                yield Malformed(_shown(run[0]), str(error))
        yield from self._broken(text[end:])

    def _broken(self, text: str) -> Iterator[Malformed]:
        """What begins like a token and is none."""
        if (at := text.find(self.mark)) >= 0:
            yield Malformed(_shown(text[at:]), "a location token that is broken or cut off")


# --------------------------------------------------------------------------------------------------- XML
_TAG = re.compile(r"<points?\b([^<>]*)>(?:([^<]*)</points?>)?")
_ATTRIBUTE = re.compile(r"([a-z]+?)(\d*)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')")


class _Molmo(CoordinateForm):
    """Percent of width and height in the attributes of a tag."""

    def write(self, things: Sequence[Box | Point], size: Size) -> str:
        """Neighbours of one label stand in one tag."""
        if not self._sayable(things, size):
            return ABSENT
        groups: dict[str, list[str]] = {}
        for thing in things:
            x, y = (f"{one:.1f}" for one in _scaled(_numbers(thing), 100 / size[0], 100 / size[1]))
            groups.setdefault(thing.label, []).extend((x, y))
        written = []
        for label, numbers in groups.items():
            one = len(numbers) == 2
            names = ["x", "y"] if one else [f"{'xy'[at % 2]}{at // 2 + 1}" for at in range(len(numbers))]
            given = " ".join(f'{name}="{number}"' for name, number in zip(names, numbers, strict=True))
            tag, text = "point" if one else "points", html.escape(label)
            written.append(f'<{tag} {given} alt="{text}">{text}</{tag}>')
        return "\n".join(written)

    def _found(self, text: str, size: Size) -> Iterator[Box | Point | Malformed]:
        end = 0
        for tag in _TAG.finditer(text):
            yield from self._broken(text[end : tag.start()])
            end = tag.end()
            places: dict[str, dict[str, str]] = {}
            named = {}
            for letter, number, *values in _ATTRIBUTE.findall(tag[1]):
                value = "".join(values)
                if letter in ("x", "y"):
                    places.setdefault(number, {})[letter] = value
                else:
                    named[letter] = value
            label = html.unescape(named.get("alt") or tag[2] or "")
            if not places:
                yield Malformed(_shown(tag[0]), "expected x and y")
            for place in places.values():
                try:
                    values = _checked([_decimal(place.get(letter, "")) for letter in "xy"], 2, 100, 100)
                    yield _thing(label, _scaled(values, size[0] / 100, size[1] / 100), values)
                except _Bad as error:
                    yield Malformed(_shown(tag[0]), str(error))
        yield from self._broken(text[end:])

    def _broken(self, text: str) -> Iterator[Malformed]:
        if begun := re.search(r"<points?\b", text):
            yield Malformed(_shown(text[begun.start() :]), "a tag that is broken or cut off")


def _decimal(text: str) -> float:
    if not re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)\s*", text, re.ASCII):
        raise _Bad("expected numbers")
    return float(text)


# ------------------------------------------------------------------------------------------- for readers
class Pixels:
    """The text of an answer in pixels of its image, piece by piece: `put` each, then `finish`.

    lines: for a person, each box or point is a line, `star: box 10 20 60 80`. Otherwise JSON stays JSON, and
        its lists hold whole pixels. Cut into any pieces, a text becomes the same.
    after: what has been shown before.
    """

    def __init__(self, form: CoordinateForm, size: Size, lines: bool, after: str = ""):
        self._form, self._size, self._lines = form, size, lines
        self._held, self._end = "", after[-1:]  # not shown yet; how what is shown ends
        self._in_list = False  # a thing was the last that was shown
        self._depth = 0  # open braces of other JSON
        self._json = Pixels(form, size, lines=False) if lines else None  # whatever is no thing by itself

    def put(self, piece: str) -> str:
        """What can be shown with this piece."""
        return self._take(piece, last=False)

    def finish(self) -> str:
        """What is left."""
        return self._take("", last=True)

    def _take(self, piece: str, last: bool) -> str:
        text = self._held + piece
        spans, certain = self._form.cut(text, self._lines, last)
        self._held = text[certain:]
        if self._json is None:
            return self._form.scaled(text[:certain], self._size)
        at, shown = 0, list[str]()
        for begin, end in spans:
            if self._depth + text.count("{", at, begin) > text.count("}", at, begin):
                continue  # within other JSON
            before = _AROUND.split(text[at:begin])[0]
            shown += [self._between(before), self._json.finish()]
            line = "\n".join(lines_of(self._form.read(text[begin:end], self._size)))
            self._end = "".join(shown)[-1:] or self._end
            shown.append(line if self._end in ("", "\n") else f"\n{line}")
            at, self._in_list = end, True
        shown += [self._between(text[at:certain]), self._json.finish() if last else ""]
        self._end = "".join(shown)[-1:] or self._end
        return "".join(shown)

    def _between(self, text: str) -> str:
        """Text that is no thing, without what separates things from one another."""
        assert self._json is not None, "of lines"
        self._depth += text.count("{") - text.count("}")
        if self._in_list and (text := text.lstrip(" \t\r\n,;.]`")):
            self._in_list, text = False, f"\n{text}"
        return self._json.put(text)


def lines_of(found: Located) -> list[str]:
    """What an answer locates, in a line each."""

    def line(kind: str, thing: Box | Point) -> str:
        numbers = " ".join(f"{one:.0f}" for one in _numbers(thing))
        return f"{thing.label}: {kind} {numbers}" if thing.label else f"{kind} {numbers}"

    lines = [line("box", one) for one in found.boxes] + [line("point", one) for one in found.points]
    return lines + [f"malformed: {one.reason}: {one.text}" for one in found.malformed]


# --------------------------------------------------------------------------------------------- by name
# The prompts are those of the models' own documentation.
_SAID = ("form", "detect", "point", "describe")
_KEYS = {"bbox_2d": (4,), "point_2d": (2,)}
COORDINATES: dict[str, CoordinateForm] = {
    form.name: form
    for form in (
        _Json(
            "qwen3-vl",
            'Locate every instance that belongs to the following categories: "{thing}". '
            "Report bbox coordinates in JSON format.",
            'Locate every instance of "{thing}" with points. Report point coordinates in JSON format.',
            *(_KEYS, (1000, 1000)),
            describe="Locate every object in the image. Report bbox coordinates and names in JSON format.",
        ),
        _Json(
            "qwen2.5-vl",
            "Outline the position of each {thing} and output all the coordinates in JSON format.",
            "Point to each {thing} and output all the point coordinates in JSON format, "
            'like this: {"point_2d": [x, y], "label": "name"}.',
            *(_KEYS, None),
            describe="Outline the position of every item, and output all bbox coordinates and names in JSON "
            "format.",
        ),
        # Of examples/satellite-vlm in Liquid AI's cookbook, which says that its models were trained on it.
        _Json(
            "lfm2.5-vl",
            "Inspect the image and detect the {thing}. Provide result as a valid JSON: "
            '[{"label": str, "bbox": [x1,y1,x2,y2]}, ...]. Coordinates must be normalized to 0-1.',
            *("", {"bbox": (4,)}, (1, 1), 3, True),
        ),
        _Tokens(
            *("paligemma", "detect {thing}", "", 1024, 1023, True),
            *("<loc", re.compile(r"<loc([0-9]{4})>"), " ; ", False),
        ),
        _Tokens(
            *("doctags", "Find all '{thing}' elements on the page.", "", 500, 499, False),
            *("<loc_", re.compile(r"<loc_([0-9]{1,4})>"), "\n", True),
            describe="Convert this page to docling.",
        ),
        _Molmo("molmo", "", "Point to {thing}."),
        _Moondream(
            *("moondream", "\n\nDetect: {thing}\n\n", "\n\nPoint: {thing}\n\n"),
            *({"bins": (4, 2)}, (_BINS, _BINS)),
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


# ------------------------------------------------------------------------------------------ rows of boxes
BAD_BOX = "bad box"
CATEGORIES = ("objects", "ref")  # columns whose names may be numbers
_SLACK = 1.0  # pixels by which annotations may leave their image, and are cut
_BOXES, NAMES = ("bbox", "bboxes"), ("category", "categories", "classes", "label", "labels", "category_id")


FormFor: TypeAlias = Callable[[Size, str], CoordinateForm | None]  # `Processor.form`


def by_name(size: Size, name: str) -> CoordinateForm | None:
    """The form of that name, for a model that is not known."""
    return form_of(None, name)


@dataclass(frozen=True)
class BoxRows:
    """How the boxes of a dataset are read and asked for.

    form: a name in COORDINATES; "" is the model's, and qwen3-vl for one that names none.
    corners: boxes are x1, y1, x2, y2.
    augment: images are cut and shrunk, with their boxes, where what they are asked for stays true.
    flip: with `augment`, they are flipped as well: no name and no image may be about left and right, or show
        what is written.
    detect, point: what is asked, with {thing} in it; "" are the form's own words.
    points: asked for is a point in each box, as forms that have no boxes do anyway.
    names: of categories that are numbers.
    """

    form: str = ""
    corners: bool = False
    augment: bool = False
    flip: bool = False
    detect: str = ""
    point: str = ""
    points: bool = False
    names: Mapping[int, str] = field(default_factory=dict)

    def coordinates(self, size: Size, form_for: FormFor) -> CoordinateForm:
        """The form for an image of `size`. Raises BadRow where the model takes no such image."""
        try:
            form = form_for(size, self.form) or COORDINATES["qwen3-vl"]
        except ImageError as error:
            raise BadRow("broken image", str(error)) from error
        return form.asking({"detect": self.detect, "point": self.point})

    def turns(
        self, row: Mapping[str, Any], image: Any, seed: Sequence[int], form_for: FormFor
    ) -> tuple[list[Mapping[str, Any]], Any]:
        """A user's and an assistant's message for each thing that a row (with our column names) is about, and
        the image to show. `seed` seeds the augmentation. Raises BadRow."""
        size, image = self.measure(image)
        groups = self.groups(row, size)
        if self.augment:
            try:
                opened = load_image(image)
            except ImageError as error:
                raise BadRow("broken image", str(error)) from error
            image, groups = augmented(opened, groups, seed, self.flip)
            size = image.size
        messages: list[Mapping[str, Any]] = []
        for fields, said in self.asked(groups, size, form_for):
            messages += [
                {"role": "user", "content": fields["question"], "asked": fields},
                {"role": "assistant", "content": said},
            ]
        return messages, image

    def asked(self, groups: Groups, size: Size, form_for: FormFor) -> Iterator[tuple[dict[str, Any], str]]:
        """For each name with its boxes in an image of `size`: the question and what scores its answers
        ({question, thing, size, form, boxes: their corners}), and the right answer. Raises BadRow."""
        form = self.coordinates(size, form_for)
        kind = "point" if self.points or not form.detect else "detect"
        for thing, boxes in groups.items():
            fields = {"question": form.question(kind, thing), "thing": thing, "size": size, "form": form}
            things = [centre(box) for box in boxes] if kind == "point" else boxes
            yield fields | {"boxes": [box.box for box in boxes]}, form.write(things, size)

    def measure(self, image: Any) -> tuple[tuple[int, int], Any]:
        """See `data.images.measure`."""
        try:
            return measure(image)
        except (ImageError, OSError) as error:
            raise BadRow("broken image", str(error)) from error

    def groups(self, row: Mapping[str, Any], size: Size) -> Groups:
        """Name -> its boxes in an image of `size`, none where it is not there. Raises BadRow."""
        found: dict[str, list[Box]] = {}
        for name, numbers in _pairs(row):
            name = self.names.get(name, name) if type(name) is int else name
            if not isinstance(name, str) or not name.strip():
                raise BadRow(BAD_BOX, f"expected the name of a thing, got {name!r:.80}")
            boxes = found.setdefault(name.strip(), [])
            if numbers is not None:
                boxes.append(Box(name.strip(), self._corners(numbers, size)))
        if not found:
            raise BadRow(BAD_BOX, "expected at least one object, got none")
        return found

    def _corners(self, numbers: Any, size: tuple[int, int]) -> tuple[float, float, float, float]:
        if not (_is_list(numbers) and len(numbers) == 4 and all(isinstance(n, int | float) for n in numbers)):
            raise BadRow(BAD_BOX, f"expected four numbers, got {numbers!r:.80}")
        x1, y1, x2, y2 = map(float, numbers)
        if not self.corners:
            x2, y2 = x1 + x2, y1 + y2
        cut = (max(0.0, x1), max(0.0, y1), min(float(size[0]), x2), min(float(size[1]), y2))
        near = all(abs(a - b) <= _SLACK for a, b in zip(cut, (x1, y1, x2, y2), strict=True))  # false for NaN
        if not near or cut[0] > cut[2] or cut[1] > cut[3]:
            kind = "x1, y1, x2, y2" if self.corners else "x, y, width, height"
            raise BadRow(BAD_BOX, f"expected {kind} within {size[0]} x {size[1]} pixels, got {list(numbers)}")
        return cut


def centre(box: Box) -> Point:
    x1, y1, x2, y2 = box.box
    return Point(box.label, ((x1 + x2) / 2, (y1 + y2) / 2))


def _pairs(row: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """(name, numbers or None) of each object of a row."""
    if "bbox" in row:
        name, boxes = row.get("ref"), row["bbox"]
        name = name[0] if _is_list(name) and name else name
        if boxes is None or (_is_list(boxes) and not boxes):
            return [(name, None)]
        return [(name, one) for one in (boxes if _is_list(boxes) and _is_list(boxes[0]) else [boxes])]
    objects = row.get("objects")
    if isinstance(objects, Mapping):
        names, boxes = (_first(objects, keys) for keys in (NAMES, _BOXES))
        if not (_is_list(names) and _is_list(boxes) and len(names) == len(boxes)):
            raise BadRow(BAD_BOX, "objects: expected as many names as boxes")
        return list(zip(names, boxes, strict=True))
    if _is_list(objects) and all(isinstance(one, Mapping) for one in objects or ()):
        return [(_first(one, NAMES), _first(one, _BOXES)) for one in objects or ()]
    raise BadRow(BAD_BOX, f"objects: expected boxes and their names, got {type(objects).__name__}")


def _first(values: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((values[key] for key in keys if values.get(key) is not None), None)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


# ------------------------------------------------------------------------------------------ augmentation
# A name that says where something is (left, top, nearest the edge) forbids cuts and flips, and one of
# something that is written forbids flips. That is known of English alone, and of what is in the name: images
# are flipped only where a dataset's entry says that no name is about a side.
Groups = dict[str, list[Box]]
FLIPPED, CUT, SHRUNK = 0.5, 0.5, 0.5  # shares of images
SMALLEST = 0.5  # of an image's sides
_SIDE = re.compile(
    r"\b(left|right|clock|counter|first|last|second|third|writ|word|text|letter|digit|number)", re.I
)
_PLACE = re.compile(
    r"\b(left|right|top|bottom|up|low|mid|cent|corner|edge|side|near|far|close|first|last|second|third|only|"
    r"large|small|big|tall|short)",
    re.I,
)


def augmented(
    image: Image.Image, groups: Mapping[str, Sequence[Box]], seed: Sequence[int], may_flip: bool = False
) -> tuple[Image.Image, Groups]:
    """An image and its boxes by name, changed at random; the same `seed` gives the same change."""
    random_ = random.Random(repr(tuple(seed)))
    flips, cuts, shrinks = (random_.random() < share for share in (FLIPPED, CUT, SHRUNK))
    moved, (width, height) = {name: list(boxes) for name, boxes in groups.items()}, image.size
    if may_flip and flips and not any(map(_SIDE.search, moved)):
        image, moved = flip(image, moved)
    left, top, right, bottom = 0, 0, width, height
    if cuts and not any(map(_PLACE.search, moved)):  # around all boxes
        boxes = [box.box for of_name in moved.values() for box in of_name]
        xs, ys = ([number for box in boxes for number in box[axis::2]] for axis in (0, 1))
        left = int(random_.uniform(0, min([*xs, width / 4])))
        top = int(random_.uniform(0, min([*ys, height / 4])))
        right -= int(random_.uniform(0, min(width - max(xs, default=0), width / 4)))
        bottom -= int(random_.uniform(0, min(height - max(ys, default=0), height / 4)))
    share = random_.uniform(SMALLEST, 1) if shrinks else 1
    return cut(image, moved, (left, top, right, bottom), share)


def flip(image: Image.Image, groups: Groups) -> tuple[Image.Image, Groups]:
    """Left and right exchanged."""
    flipped = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return flipped, _each(groups, lambda x1, y1, x2, y2: (image.width - x2, y1, image.width - x1, y2))


def cut(
    image: Image.Image, groups: Groups, part: tuple[int, int, int, int], share: float
) -> tuple[Image.Image, Groups]:
    """A part (x1, y1, x2, y2) of an image, in which all boxes must lie, all sides times `share`."""
    left, top, right, bottom = part
    size = max(1, round((right - left) * share)), max(1, round((bottom - top) * share))
    x, y = size[0] / (right - left), size[1] / (bottom - top)
    move = lambda x1, y1, x2, y2: ((x1 - left) * x, (y1 - top) * y, (x2 - left) * x, (y2 - top) * y)
    return image.crop(part).resize(size, Image.Resampling.LANCZOS), _each(groups, move)


def _each(groups: Groups, move: Callable[..., tuple[float, float, float, float]]) -> Groups:
    return {name: [replace(box, box=move(*box.box)) for box in boxes] for name, boxes in groups.items()}
