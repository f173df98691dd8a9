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
_OBJECT_BEGINS = re.compile(r'\{\s*(?:"([^"]*)("?))?')
_AROUND = re.compile(r"(?:`{1,3}\w*\s*)?(?:\[\s*)?\Z")  # a list begins, perhaps in a code fence
_HELD = 2_000  # letters that are waited for: an object is not so long


class PixelText:
    """The text of an answer with its coordinates in pixels of an image of these sizes: `put` each piece, then
    `finish`. Without a form nothing changes; without sizes lines end with a note if there are coordinates."""

    def __init__(self, coordinates: Any, sizes: Sizes | None, lines: bool = True):
        form = spoken_form(coordinates, sizes)
        self._pixels = Pixels(form, sizes[0], lines) if form and sizes else None
        self._unsized, self._text = form if lines and not sizes else None, ""

    def put(self, piece: str) -> str:
        """The text that can be shown with this piece."""
        if self._pixels is not None:
            return self._pixels.put(piece)
        self._text += piece
        return piece

    def finish(self) -> str:
        """The rest of the text."""
        if self._pixels is not None:
            return self._pixels.finish()
        found = None if self._unsized is None else self._unsized.read(self._text, ANY_SIZE)
        return f"\n{OPEN_NOTE}" if found and (found.boxes or found.points) else ""

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


def spoken_form(coordinates: Any, sizes: Sizes | None) -> CoordinateForm | None:
    """The form in which a model (`Processor.coordinates`) writes boxes and points of an image of these sizes.
    None as well where its file says nonsense: other questions have answers all the same, and --detect says
    what is wrong."""
    try:
        form = form_of(coordinates)
    except ValueError:
        return None
    return form.on(sizes[1]) if form is not None and sizes is not None else form


class Pixels:
    """The text of an answer in pixels of its image, piece by piece: `put` each, then `finish`.

    lines: for a person, each box or point is a line, `star: box 10 20 60 80`. Otherwise JSON stays JSON, and
        its lists hold whole pixels. Cut into any pieces, a text becomes the same. A form that is no JSON
        names its own unit, and stays as it is.
    """

    def __init__(self, form: CoordinateForm, size: Size, lines: bool):
        self._form, self._size, self._lines = form, size, lines
        self._held = self._end = ""  # not shown yet; how what is shown ends
        self._in_list = False  # a thing was the last that was shown
        self._depth = 0  # open braces of other JSON
        self._json = Pixels(form, size, lines=False) if lines else None  # whatever is no thing by itself

    def put(self, piece: str) -> str:
        """The text that can be shown with this piece."""
        return self._take(piece, last=False)

    def finish(self) -> str:
        """The text that is left."""
        return self._take("", last=True)

    def _take(self, piece: str, last: bool) -> str:
        form, text = self._form, self._held + piece
        if not isinstance(form, JsonForm):
            return piece
        if self._json is None:
            certain = len(text) if last else _certain(form, text)
            self._held = text[certain:]
            return rescaled(form, text[:certain], self._size)
        spans, certain = _things(form, text, last)
        self._held = text[certain:]
        at, counted, shown = 0, 0, list[str]()
        for begin, end in spans:
            self._count(text[counted:begin])
            counted = begin
            if self._depth > 0:
                continue  # within other JSON
            before = _AROUND.split(text[at:begin])[0]
            shown += [self._between(before), self._json.finish()]
            line = "\n".join(lines_of(form.read(text[begin:end], self._size)))
            self._end = "".join(shown)[-1:] or self._end
            shown.append(line if self._end in ("", "\n") else f"\n{line}")
            at = counted = end
            self._in_list = True
        self._count(text[counted:certain])
        shown += [self._between(text[at:certain]), self._json.finish() if last else ""]
        self._end = "".join(shown)[-1:] or self._end
        return "".join(shown)

    def _count(self, text: str) -> None:
        self._depth += text.count("{") - text.count("}")

    def _between(self, text: str) -> str:
        """Text that is no thing, without the marks that separate things from one another."""
        assert self._json is not None, "of lines"
        if self._in_list and (text := text.lstrip(" \t\r\n,;.]`")):
            self._in_list, text = False, f"\n{text}"
        return self._json.put(text)


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


def _things(form: JsonForm, text: str, last: bool) -> tuple[list[tuple[int, int]], int]:
    """The begin and end of each thing that stands by itself or in a list, and the end of the text in which no
    other one can begin. A thing within other JSON stays JSON."""
    spans, at, names = list[tuple[int, int]](), 0, (*form.keys, *LABELS)
    while (at := text.find("{", at)) >= 0:
        begun, whole = _OBJECT_BEGINS.match(text, at), _OBJECT.match(text, at, at + _HELD)
        assert begun is not None, "it begins with a brace"
        name, closed = begun[1] or "", bool(begun[2])
        may_be = name in names if closed else any(one.startswith(name) for one in names)
        said = whole[0] if whole else text[at : at + _HELD]
        is_thing = may_be and any(f'"{key}"' in said for key in form.keys)
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
