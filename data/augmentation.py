"""Images that are flipped, cut and shrunk together with their boxes, as far as their names stay true.

A name that says where something is (left, top, nearest the edge) forbids cuts and flips, and one of something
that is written forbids flips. That is known of English alone, and of what is in the name: images are flipped
only where a dataset's entry says that no name is about a side.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from PIL import Image

from data.coordinates import Box

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
    image: Image.Image, groups: Mapping[str, Sequence[Box]], draw: Sequence[int], may_flip: bool = False
) -> tuple[Image.Image, Groups]:
    """An image and its boxes by name, changed at random; the same `draw` gives the same change."""
    random_ = random.Random(repr(tuple(draw)))
    flips, cuts, shrinks = (random_.random() < share for share in (FLIPPED, CUT, SHRUNK))
    found = {name: list(boxes) for name, boxes in groups.items()}
    if may_flip and flips and not any(map(_SIDE.search, found)):
        image, found = flip(image, found)
    if cuts and not any(map(_PLACE.search, found)):
        boxes = [box.box for own in found.values() for box in own]
        width, height = image.size
        (x1, y1), (x2, y2) = (  # around all of them
            [edge([side, *(box[at + far] for box in boxes)]) for at, side in enumerate(sides)]
            for edge, far, sides in ((min, 0, (width, height)), (max, 2, (0, 0)))
        )
        left, top = int(random_.uniform(0, min(x1, width / 4))), int(random_.uniform(0, min(y1, height / 4)))
        right = width - int(random_.uniform(0, min(width - x2, width / 4)))
        bottom = height - int(random_.uniform(0, min(height - y2, height / 4)))
        image, found = crop(image, found, (left, top, right, bottom))
    if shrinks:
        image, found = scale(image, found, random_.uniform(SMALLEST, 1))
    return image, found


def flip(image: Image.Image, groups: Groups) -> tuple[Image.Image, Groups]:
    """Left and right exchanged."""
    flipped = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return flipped, _each(groups, lambda x1, y1, x2, y2: (image.width - x2, y1, image.width - x1, y2))


def crop(image: Image.Image, groups: Groups, part: tuple[int, int, int, int]) -> tuple[Image.Image, Groups]:
    """A part (x1, y1, x2, y2) of an image; all boxes must lie in it."""
    x, y = part[:2]
    return image.crop(part), _each(groups, lambda x1, y1, x2, y2: (x1 - x, y1 - y, x2 - x, y2 - y))


def scale(image: Image.Image, groups: Groups, share: float) -> tuple[Image.Image, Groups]:
    """All sides times `share`."""
    size = max(1, round(image.width * share)), max(1, round(image.height * share))
    x, y = size[0] / image.width, size[1] / image.height
    resized = image.resize(size, Image.Resampling.LANCZOS)
    return resized, _each(groups, lambda x1, y1, x2, y2: (x1 * x, y1 * y, x2 * x, y2 * y))


def _each(groups: Groups, move: Callable[..., tuple[float, float, float, float]]) -> Groups:
    return {name: [replace(box, box=move(*box.box)) for box in own] for name, own in groups.items()}
