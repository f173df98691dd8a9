"""Coordinates in the text of an answer: boxes and points become pixels of the image that was asked about."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from data.boxes import LABELS, CoordinateForm, JsonForm, Size, form_of, lines_of, scaled
from data.tiles import Sizes

ANY_SIZE = (10**4, 10**4)  # of an image, to find coordinates that are not to become pixels
OPEN_NOTE = "(The numbers are the model's own: which image they are of is open.)"
_OBJECT = re.compile(r'\{(?:[^{}"]++|"(?:[^"\\]++|\\.)*+")*+\}')  # around no other
_AROUND = re.compile(r"\s*(?:`{1,3}\w*\s*)?(?:\[\s*)?")  # a list begins, perhaps in a code fence
_HELD = 2_000  # letters that are waited for: a list of numbers is not so long


class PixelText:
    """The text of an answer with its coordinates in pixels of an image of these sizes: `put` each piece, then
    `finish`. Cut into any pieces, a text becomes the same. Without a form nothing changes, and a form that is
    no JSON names its own unit. Without sizes lines end with a note if there are coordinates.

    lines: for a person, an answer of nothing but boxes and points is a line for each, at its end, such as
        `star: box 10 20 60 80`. Otherwise JSON stays JSON, and its lists hold whole pixels.
    """

    def __init__(self, coordinates: Any, sizes: Sizes | None, lines: bool = True):
        self._form, self._sizes, self._lines = spoken_form(coordinates, sizes), sizes, lines
        self._text = self._held = ""  # of all pieces, and what is not shown yet

    def put(self, piece: str) -> str:
        """The text that can be shown with this piece."""
        return self._take(piece, last=False)

    def finish(self) -> str:
        """The rest of the text."""
        return self._take("", last=True)

    def each(self, pieces: Iterable[str]) -> Iterator[str]:
        """The pieces of a whole answer; Ctrl-C gives what is left of it so far."""
        try:
            yield from map(self.put, pieces)
        except KeyboardInterrupt:
            yield self.finish()
            raise
        yield self.finish()

    def whole(self, text: str) -> str:
        """A whole answer."""
        return self.put(text) + self.finish()

    def _take(self, piece: str, last: bool) -> str:
        form, text = self._form, self._held + piece
        self._text += piece
        if form is not None and self._sizes is None and self._lines and last:
            found = form.read(self._text, ANY_SIZE)
            return f"\n{OPEN_NOTE}" if found.boxes or found.points else ""
        if self._sizes is None or not isinstance(form, JsonForm):
            return piece
        size, listed = self._sizes[0], self._lines and _begins_with_thing(form, self._text)
        things = _OBJECT.findall(text) if listed and last else []
        lines = [line for one in things for line in lines_of(form.read(one, size))]
        if lines and not re.search(r"\w", _OBJECT.sub("", _AROUND.sub("", text, count=1))):
            return "\n".join(lines)
        certain = len(text) if last else 0 if listed else _certain(form, text)
        self._held = text[certain:]
        return rescaled(form, text[:certain], size)


def _begins_with_thing(form: JsonForm, text: str) -> bool:
    """True if a text begins with a box or point, alone or in a list, as far as there is some of it."""
    around = _AROUND.match(text)
    assert around is not None, "nothing may stand around"
    begun = "".join(text[around.end() :][:_HELD].split())
    return any(f'{{"{name}"'.startswith(begun[: len(name) + 3]) for name in (*form.keys, *LABELS))


def spoken_form(coordinates: Any, sizes: Sizes | None) -> CoordinateForm | None:
    """The form in which a model (`Processor.coordinates`) writes boxes and points of an image of these sizes.
    None as well where its file says nonsense: other questions have answers all the same, and --detect says
    what is wrong."""
    try:
        form = form_of(coordinates)
    except ValueError:
        return None
    return form.on(sizes[1]) if form is not None and sizes is not None else form


def rescaled(form: CoordinateForm, text: str, size: Size, back: bool = False) -> str:
    """A text with its JSON lists of the model's numbers as whole pixels, or `back`."""
    if not isinstance(form, JsonForm):
        return text
    shown, canvas = size, form.canvas or size
    shown, canvas = (canvas, shown) if back else (shown, canvas)

    def one(match: re.Match[str]) -> str:
        numbers = _numbers_of(f"{match[1]}]") if match[2] else []
        values = scaled(numbers, shown[0] / canvas[0], shown[1] / canvas[1])
        written = form.rounded(values) if back else [*map(round, values)]
        return match[0].replace(f"{match[1]}]", json.dumps(written)) if numbers else match[0]

    return _lists(form).sub(one, text)


def _lists(form: JsonForm) -> re.Pattern[str]:
    """Numbers under one of the keys, also where all this stands in a text of JSON."""
    return re.compile(rf'"(?:{"|".join(form.keys)})\\*"\s*(?::\s*(?:(\[[^\[\]]*)(\])?)?)?')


def _numbers_of(text: str) -> list[float]:
    """The numbers of a list in JSON, [] where it holds anything else."""
    try:
        values = json.loads(text)
    except ValueError:
        return []
    real = all(type(one) in (int, float) and abs(one) < 1e9 for one in values)
    return values if real else []


def _certain(form: JsonForm, text: str) -> int:
    """The end of what does not reach into numbers, or the key before them, however the text goes on."""
    begun = [match for match in _lists(form).finditer(text) if match.end() == len(text) and not match[2]]
    at = begun[0].start() if begun else max(text.rfind('"'), 0)
    name = text[at:].replace("\\", "")
    opened = bool(begun) or any(f'"{key}"'.startswith(name) for key in form.keys)
    return at if opened and len(text) - at < _HELD else len(text)
