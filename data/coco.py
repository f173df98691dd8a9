"""COCO's files, each of which holds the images and annotations of a whole data set.

    with open("annotations/instances_val2017.json", "rb") as opened:
        rows = coco_rows(opened, "instances_val2017.json")
    rows[0]  # {"image": "000000397133.jpg", "width": 640, "height": 427, "objects": {"bbox": [[x, y, width,
    #           height], ...], "category_id": [44, ...]}}, and rows.names says that 44 is a bottle

A row of instances_*.json (or LVIS) is an image with its boxes, and one of captions_*.json is a caption, with
the image's others after it. Such a file is read once; polygons, which are most of it, are not kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from copy import copy
from typing import IO, Any

import numpy as np

from data.box_rows import SIZES
from data.errors import DatasetError

_KEPT = ("image_id", "category_id", "bbox", "iscrowd", "caption")  # of an annotation


class CocoRows(Sequence):
    """rows: (n, 4) int64, of each its image, the image's annotations, from and to, and the one that is first.
    images: what rows have of each image: its file and, with boxes, the size that these were drawn on.
    names: of categories, by their numbers."""

    def __init__(self, rows: np.ndarray, images: Sequence[Any], found: Sequence[Any], names: dict[int, str]):
        self.rows, self.images, self.names = rows, images, names
        self.captions = [one["caption"] for one in found if "bbox" not in one]
        self.boxes = np.array([one["bbox"] for one in found if "bbox" in one], np.float64)  # (annotations, 4)
        self.categories = np.array([one["category_id"] for one in found if "bbox" in one], np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, numbers: np.ndarray) -> CocoRows:
        part = copy(self)
        part.rows = self.rows[numbers]
        return part

    def __getitem__(self, index: Any) -> Any:
        image, begin, end, first = self.rows[index].tolist()
        row: dict[str, Any] = {**self.images[image]}
        if self.captions:
            others = (self.captions[at] for at in range(begin, end) if at != first)
            return row | {"answer": [self.captions[first], *others]}
        held = {"bbox": self.boxes[begin:end], "category_id": self.categories[begin:end]}
        return row | {"objects": {name: values.tolist() for name, values in held.items()}}


def coco_rows(opened: IO[bytes], name: str) -> CocoRows | None:
    """The rows of a file that begins with an object, None where it is lines of JSON. A crowd is left out, and
    what is of its category in the same image: nobody counted it. So are images without annotations."""
    text, lines, whole = next((line for line in opened if line.strip()), b""), True, None
    try:
        whole = json.loads(text, object_hook=_smaller)
    except json.JSONDecodeError as error:
        if text.rstrip().endswith(b"}") or error.pos < len(error.doc.rstrip()):  # a line that is broken
            return None
        lines = False
        # What begins with a brace alone is no row: whoever reads it says where such an object is broken.
        with nullcontext() if text.strip() == b"{" else suppress(ValueError, RecursionError):
            whole = json.loads(text + opened.read(), object_hook=_smaller)
    except (ValueError, RecursionError):
        return None
    if not isinstance(whole, dict) or (lines and opened.read(2**16).strip()):
        return None
    images, annotations = (whole.get(key) for key in ("images", "annotations"))
    each = [one for part in (images, annotations) for one in (part if isinstance(part, list) else [None])]
    kinds = [key for key in ("bbox", "caption") if any(key in one for one in each if isinstance(one, dict))]
    if not kinds or not all(isinstance(one, dict) for one in each):
        listed = [one for key in ("images", "categories") for one in whole.get(key) or [None]]
        if lines and not all(isinstance(one, dict) and "id" in one for one in listed):
            return None
        wanted = "a list, an object in each line, or COCO's images and annotations with a bbox or a caption"
        raise DatasetError(f"{name}: expected {wanted}, got an object with {', '.join(whole)}")
    try:
        return _rows(whole, kinds[0])
    except KeyError as error:
        wanted = f"{error} in each of COCO's images, annotations and categories"
        raise DatasetError(f"{name}: expected {wanted}, but one has none") from None


def _rows(whole: dict[str, Any], kind: str) -> CocoRows:
    images, annotations = whole["images"], whole["annotations"]
    numbers = {one["id"]: at for at, one in enumerate(images)}
    found = [one for one in annotations if kind in one and one["image_id"] in numbers]
    crowds = {(one["image_id"], one.get("category_id")) for one in annotations if one.get("iscrowd")}
    found = [one for one in found if (one["image_id"], one.get("category_id")) not in crowds]
    found.sort(key=lambda one: numbers[one["image_id"]])
    of_image = np.array([numbers[one["image_id"]] for one in found], np.int64)
    own, begin, count = np.unique(of_image, return_index=True, return_counts=True)
    rows = np.stack([own, begin, begin + count, begin], axis=1)
    if kind == "caption":
        rows = np.repeat(rows, count, axis=0)
        rows[:, 3] = np.arange(len(rows))
    # LVIS has the address of an image in place of its name, which begins with the folder.
    files = [
        one["file_name"]
        if one.get("file_name") or "coco_url" not in one
        else "/".join(one["coco_url"].split("/")[-2:])
        for one in images
    ]
    sized = kind == "bbox"
    sizes = [{key: one[key] for key in SIZES} if sized and {*SIZES} <= {*one} else {} for one in images]
    shown = [{"image": file, **size} for file, size in zip(files, sizes, strict=True)]
    return CocoRows(rows, shown, found, {one["id"]: one["name"] for one in whole.get("categories") or ()})


def _smaller(one: dict[str, Any]) -> dict[str, Any]:
    return {key: one[key] for key in _KEPT if key in one} if "image_id" in one else one
