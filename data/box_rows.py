"""Rows with boxes -> questions that ask for them, and answers in a form of `data.coordinates`.

| columns | known from |
|---|---|
| `ref`, `bbox` | RefCOCO: what is meant, and its box; no box (null or []) is a thing that is not there |
| `objects` of `bbox` and `category` | COCO; LVIS calls them `bboxes` and `classes` |

A box is [x, y, width, height] in pixels of the upright image, or with `corners` [x1, y1, x2, y2]. Names may
be numbers of a `ClassLabel` of the `datasets` library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.augmentation import augmented
from data.coordinates import COORDINATES, Box, CoordinateForm, Point
from data.errors import BadRow, ImageError
from data.images import load_image, measure

BAD_BOX = "bad box"
CATEGORIES = ("objects", "ref")  # columns whose names may be numbers
_SLACK = 1.0  # pixels by which annotations may leave their image, and are cut
_BOXES, NAMES = ("bbox", "bboxes"), ("category", "categories", "classes", "label", "labels")


@dataclass(frozen=True)
class BoxRows:
    """How the boxes of a dataset are read and asked for.

    form: a name in `data.coordinates.COORDINATES`.
    corners: boxes are x1, y1, x2, y2.
    augment: images are cut and shrunk, with their boxes, where what they are asked for stays true.
    flip: with `augment`, they are flipped as well: no name and no image may be about left and right, or show
        what is written.
    detect, point: what is asked, with {thing} in it; "" are the form's own words.
    names: of categories that are numbers, from 0.
    """

    form: str = "qwen3-vl"
    corners: bool = False
    augment: bool = False
    flip: bool = False
    detect: str = ""
    point: str = ""
    names: Sequence[str] = ()

    @property
    def coordinates(self) -> CoordinateForm:
        form = COORDINATES[self.form]
        return form.asking({"detect": self.detect, "point": self.point})

    def turns(
        self, row: Mapping[str, Any], image: Any, draw: Sequence[int]
    ) -> tuple[list[Mapping[str, Any]], Any]:
        """A user's and an assistant's message for each thing that a row (with our column names) is about, and
        the image to show. `draw` seeds the augmentation. Raises BadRow."""
        (size, image), form = self.measure(image), self.coordinates
        groups = self.groups(row, size)
        if self.augment:
            try:
                opened = load_image(image)
            except ImageError as error:
                raise BadRow("broken image", str(error)) from error
            image, groups = augmented(opened, groups, draw, self.flip)
            size = image.size
        kind = "detect" if form.detect else "point"
        messages: list[Mapping[str, Any]] = []
        for name, boxes in groups.items():
            things = boxes if kind == "detect" else [centre(box) for box in boxes]
            messages += [
                {"role": "user", "content": form.question(kind, name)},
                {"role": "assistant", "content": form.write(things, size)},
            ]
        return messages, image

    def measure(self, image: Any) -> tuple[tuple[int, int], Any]:
        """See `data.images.measure`."""
        try:
            return measure(image)
        except (ImageError, OSError) as error:
            raise BadRow("broken image", str(error)) from error

    def groups(self, row: Mapping[str, Any], size: tuple[int, int]) -> dict[str, list[Box]]:
        """Name -> its boxes in an image of `size`, none where it is not there. Raises BadRow."""
        found: dict[str, list[Box]] = {}
        for name, numbers in _pairs(row):
            if type(name) is int and 0 <= name < len(self.names):
                name = self.names[name]
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
