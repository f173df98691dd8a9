"""Coordinates in the text of an answer: boxes and points become pixels of the image that was asked about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from data.boxes import CoordinateForm, form_of
from data.tiles import Sizes
from inference.pixels import Pixels

ANY_SIZE = (10**4, 10**4)  # of an image, to find coordinates that are not to become pixels
OPEN_NOTE = "(The numbers are the model's own: which image they are of is open.)"


class PixelText:
    """The text of an answer with its coordinates in pixels of an image of these sizes (`inference.pixels`):
    `put` each piece, then `finish`. For a model without a form nothing changes, and without sizes lines end
    with a note if there are coordinates."""

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
