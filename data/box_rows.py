"""Rows of boxes, as questions and answers in a form of `data.boxes`.

| columns of rows | known from |
|---|---|
| `ref`, `bbox` | RefCOCO: what is meant, and its box; no box (null or []) is a thing that is not there |
| `objects` of `bbox` and `category` | COCO; LVIS calls them `bboxes` and `classes` |

A box of a row is [x, y, width, height], or with `corners` [x1, y1, x2, y2]. Names may be numbers of a
`ClassLabel` of the `datasets` library. Columns `width` and `height`, as COCO's, are the size of the image
that the boxes were drawn on; they are brought to the one that is there, which may be a smaller copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from data.boxes import COORDINATES, Box, CoordinateForm, Corners, Size, centre, form_of, is_list, scaled
from data.errors import BadRow, ImageError
from data.image_sizes import measure

BAD_BOX = "bad box"
CATEGORIES = ("objects", "ref")  # columns whose names may be numbers
SIZES = ("width", "height")  # columns
_SLACK = 1.0  # pixels by which annotations may leave their image, and are cut
_BOXES, NAMES = ("bbox", "bboxes"), ("category", "categories", "classes", "label", "labels", "category_id")

FormFor: TypeAlias = Callable[[Size, str], CoordinateForm | None]  # `Processor.form`
Groups: TypeAlias = dict[str, list[Box]]


def by_name(size: Size, name: str) -> CoordinateForm | None:
    """The form of that name, for a model that is not known."""
    return form_of(None, name)


@dataclass(frozen=True)
class BoxRows:
    """The way in which the boxes of a dataset are read and asked for.

    form: a name in COORDINATES; "" is the model's, and qwen3-vl for one that names none.
    corners: boxes are x1, y1, x2, y2.
    detect, point: what is asked, with {thing} in it; "" are the form's own words.
    points: asked for is a point in each box.
    names: of categories that are numbers.
    """

    form: str = ""
    corners: bool = False
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
        self, row: Mapping[str, Any], image: Any, form_for: FormFor
    ) -> tuple[list[Mapping[str, Any]], Any]:
        """A user's and an assistant's message for each thing that a row (with our column names) is about, and
        the image to show. Raises BadRow."""
        groups, size, image = self.read(row, image)
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
        kind = "point" if self.points else "detect"
        for thing, boxes in groups.items():
            fields = {"question": form.question(kind, thing), "thing": thing, "size": size, "form": form}
            things = [centre(box) for box in boxes] if kind == "point" else boxes
            yield fields | {"boxes": [box.box for box in boxes]}, form.write(things, size)

    def read(self, row: Mapping[str, Any], image: Any) -> tuple[Groups, Size, Any]:
        """The row's `groups`, the size of its image, and the image to open. Raises BadRow."""
        try:
            size, image = measure(image)
            return self.groups(row, size), size, image
        except (ImageError, OSError) as error:
            raise BadRow("broken image", str(error)) from error

    def groups(self, row: Mapping[str, Any], size: Size) -> Groups:
        """Name -> its boxes in an image of `size`, none where it is not there. Raises BadRow."""
        found: Groups = {}
        drawn_on = _drawn_on(row, size)
        for name, numbers in _pairs(row):
            name = self.names.get(name, name) if type(name) is int else name
            if not isinstance(name, str) or not name.strip():
                raise BadRow(BAD_BOX, f"expected the name of a thing, got {name!r:.80}")
            boxes = found.setdefault(name.strip(), [])
            if numbers is not None:
                box = self._corners(numbers, drawn_on)
                scale = size[0] / drawn_on[0], size[1] / drawn_on[1]
                boxes.append(Box(name.strip(), scaled(box, *scale)))
        if not found:
            raise BadRow(BAD_BOX, "expected at least one object, got none")
        return found

    def _corners(self, numbers: Any, size: Size) -> Corners:
        if not (is_list(numbers) and len(numbers) == 4 and all(isinstance(n, int | float) for n in numbers)):
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


def _drawn_on(row: Mapping[str, Any], size: Size) -> Size:
    """The size of the image that a row's boxes were drawn on. Raises BadRow where the image of `size` is no
    copy of it."""
    width, height = (row.get(key) for key in SIZES)
    if not (width and height):  # unknown, which some programs write as 0
        return size
    if not all(type(one) in (int, float) and 0 < one < math.inf for one in (width, height)):
        raise BadRow(BAD_BOX, f"expected width and height in pixels, got {width!r:.40} and {height!r:.40}")
    # Both sides by the same factor, each rounded to a whole pixel, up or down.
    if not (
        width * (size[1] - 1) < height * (size[0] + 1) and height * (size[0] - 1) < width * (size[1] + 1)
    ):
        got = f"{width} x {height} pixels, and its image has {size[0]} x {size[1]}"
        raise BadRow(BAD_BOX, f"expected width and height of the image, or of a copy of it, got {got}")
    return width, height


def _pairs(row: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """(name, numbers or None) of each object of a row."""
    if "bbox" in row:
        name, boxes = row.get("ref"), row["bbox"]
        name = name[0] if is_list(name) and name else name
        if boxes is None or (is_list(boxes) and not boxes):
            return [(name, None)]
        return [(name, one) for one in (boxes if is_list(boxes) and is_list(boxes[0]) else [boxes])]
    objects = row.get("objects")
    if isinstance(objects, Mapping):
        names, boxes = (_first(objects, keys) for keys in (NAMES, _BOXES))
        if not (is_list(names) and is_list(boxes) and len(names) == len(boxes)):
            raise BadRow(BAD_BOX, "objects: expected as many names as boxes")
        return list(zip(names, boxes, strict=True))
    if is_list(objects) and all(isinstance(one, Mapping) for one in objects or ()):
        return [(_first(one, NAMES), _first(one, _BOXES)) for one in objects or ()]
    raise BadRow(BAD_BOX, f"objects: expected boxes and their names, got {type(objects).__name__}")


def _first(values: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((values[key] for key in keys if values.get(key) is not None), None)
