"""COCO's files, each of which holds the images and annotations of a whole data set.

    rows = coco_rows(json.load(opened, object_hook=without_polygons), "instances_val2017.json")
    rows[0]  # {"image": "000000397133.jpg", "width": 640, "height": 427, "objects": {"bbox": [[x, y, width,
    #           height], ...], "category_id": [44, ...]}}, and rows.names says that 44 is a bottle

A row of instances_*.json (or LVIS) is an image with its boxes, and one of captions_*.json is a caption, with
the image's others after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from data.box_rows import SIZES
from data.errors import DatasetError

_KEPT = ("image_id", "category_id", "bbox", "iscrowd", "caption")  # of an annotation


def without_polygons(one: dict[str, Any]) -> dict[str, Any]:
    """The `object_hook` of `json.load`: polygons, which are most of a file, are not kept."""
    return {key: one[key] for key in _KEPT if key in one} if "image_id" in one else one


class CocoRows(Sequence):
    """images: the beginning of a row for each image, with its file and, beside boxes, the size that these
    were drawn on. found: of each image, its captions, or its boxes (n, 4) and their categories (n,). rows:
    (n, 2) int64, of each row its image and its caption. names: of categories, by their numbers."""

    def __init__(self, images: list[dict], found: list[Any], rows: np.ndarray, names: dict[int, str]):
        self.images, self.found, self.rows, self.names = images, found, rows, names

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, numbers: np.ndarray) -> CocoRows:
        part = copy(self)
        part.rows = self.rows[numbers]
        return part

    def __getitem__(self, index: Any) -> Any:
        image, caption = self.rows[index].tolist()
        if isinstance(found := self.found[image], list):
            others = found[:caption] + found[caption + 1 :]
            return self.images[image] | {"answer": [found[caption], *others]}
        boxes, categories = found
        return self.images[image] | {"objects": {"bbox": boxes.tolist(), "category_id": categories.tolist()}}


def coco_rows(whole: Any, name: str) -> CocoRows:
    """The rows of a file that is one object. A crowd is left out, and what is of its category in the same
    image: nobody counted it. So are images without annotations."""
    try:
        kind = next(key for one in whole["annotations"] for key in ("bbox", "caption") if key in one)
        crowds = {(one["image_id"], one["category_id"]) for one in whole["annotations"] if one.get("iscrowd")}
        of_image: dict[Any, list[dict]] = defaultdict(list)
        for one in whole["annotations"]:
            if kind in one and (one["image_id"], one.get("category_id")) not in crowds:
                of_image[one["image_id"]].append(one)
        shown = [one for one in whole["images"] if one["id"] in of_image]
        images = [_beginning(one, kind) for one in shown]
        found = [_found(of_image[one["id"]], kind) for one in shown]
        names = {one["id"]: one["name"] for one in whole.get("categories") or ()}
    except (KeyError, TypeError, StopIteration) as error:
        wanted = "a list, an object in each line, or COCO's images, annotations and categories"
        got = f"an object with {', '.join(whole)}" if isinstance(whole, dict) else type(whole).__name__
        missing = f", of which one has no {error}" if isinstance(error, KeyError) else ""
        raise DatasetError(f"{name}: expected {wanted}, got {got}{missing}") from None
    each = [len(own) if kind == "caption" else 1 for own in found]
    rows = [(image, caption) for image, count in enumerate(each) for caption in range(count)]
    return CocoRows(images, found, np.array(rows, np.int64).reshape(-1, 2), names)


def _found(annotations: list[dict], kind: str) -> Any:
    """The entry of an image in `CocoRows.found`."""
    if kind == "caption":
        return [one["caption"] for one in annotations]
    boxes, categories = ([one[key] for one in annotations] for key in ("bbox", "category_id"))
    return np.array(boxes, np.float64), np.array(categories, np.int64)


def _beginning(image: dict[str, Any], kind: str) -> dict[str, Any]:
    """LVIS has the address of an image in place of its name, which begins with the folder."""
    if not (file := image.get("file_name")):
        file = "/".join(image["coco_url"].split("/")[-2:])
    sized = kind == "bbox" and {*SIZES} <= image.keys()
    return {"image": file} | ({key: image[key] for key in SIZES} if sized else {})
