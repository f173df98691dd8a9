"""Where the things of a drawing lie, and what each patch of its image shows."""

from __future__ import annotations

import math
from functools import lru_cache
from operator import attrgetter

import numpy as np
from PIL import Image, ImageDraw

from shapes.drawing import bounds_of, draw_shape, font_of
from shapes.world import COLOURS, DIGITS, SHAPES

KINDS = ("background", *SHAPES, *DIGITS, "word")  # kind_class indexes this
NUM_KINDS = len(KINDS)


def _to_fractions(aspect):
    """Scales of an image of that shape squashed into 1 by 1."""
    return 1.0, 1.0, min(1.0, 1 / aspect), min(1.0, aspect)


def box_of(thing, aspect=1.0):
    """(x1, y1, x2, y2) around a thing in fractions of the image's width and height, cut at its edges."""
    return tuple(min(1.0, max(0.0, one)) for one in bounds_of(thing, _to_fractions(aspect)))


def object_map(scene, columns, rows=0):
    """uint8 (rows, columns), by default a square: 0 for background, else 1 + the index of the topmost thing.
    The image is squashed into it."""
    rows = rows or columns
    x_scale, y_scale = _to_fractions(scene.aspect)[2:]
    scales = (columns, rows, columns * x_scale, rows * y_scale)
    ids = Image.new("L", (columns, rows))
    draw = ImageDraw.Draw(ids)
    for i, t in enumerate(scene.things, 1):
        if t.kind == "shape":
            draw_shape(draw, t, scales, i)
        else:
            x1, y1, x2, y2 = map(round, bounds_of(t, scales))
            draw.rectangle((x1, y1, max(x1, x2 - 1), max(y1, y2 - 1)), fill=i)
    return np.asarray(ids)


@lru_cache(maxsize=4096)
def letter_edges(text, font=""):
    """Where each letter of a word ends, in fractions of its width."""
    lengths = [font_of(font).getlength(text[: i + 1]) for i in range(len(text))]
    return tuple(length / lengths[-1] for length in lengths)


@lru_cache(maxsize=16)
def _patch_of_pixel(columns, rows, cell):
    """(pixels,): 16 times the patch that each pixel of the object map lies in."""
    across, down = np.arange(columns * cell) // cell, np.arange(rows * cell) // cell
    return ((down[:, None] * columns + across) * 16).ravel()


def owners(scene, columns, rows):
    """Whose each patch is, row by row, of the image squashed into this grid: (index of a thing, or -1 for the
    background; the patch of each thing's centre)."""
    n, cell = len(scene.things), max(1, round(64 / max(columns, rows)))
    ids = object_map(scene, columns * cell, rows * cell)
    tally = np.bincount(_patch_of_pixel(columns, rows, cell) + ids.ravel(), minlength=rows * columns * 16)
    pixels = tally.reshape(rows * columns, 16)[:, 1 : n + 1].T  # (n, patches)
    x, y = np.array([t.x for t in scene.things]) * columns, np.array([t.y for t in scene.things]) * rows
    home = np.minimum(y.astype(int), rows - 1) * columns + np.minimum(x.astype(int), columns - 1)
    owner = np.where(pixels.max(0) >= 0.12 * cell * cell, pixels.argmax(0), -1)
    for i in np.argsort(pixels[np.arange(n), home], kind="stable"):  # where centres share a patch,
        owner[home[i]] = i  # the one seen most comes last
    return owner, home


def kind_class(thing):
    return KINDS.index("word" if thing.kind == "word" else thing.name)


_LIKENESSES = (attrgetter("name"), attrgetter("colour"), attrgetter("name", "colour"))
DENSE = 14  # columns of `dense_map`


def dense_map(scene, columns, rows, tile=0):
    """float32 (rows*columns, DENSE): what each patch, row by row, shows of the image squashed into this grid.

    Columns: kind_class (0 background, 1-6 shapes, 7-16 digits, 17 words), colour_class
    (-1 background), dx and dy from the patch's centre to the thing's in patches,
    log(size), 1 on the patch that holds the thing's centre; on a shape's patches how many
    shapes of the scene share its name, its colour, both (0 elsewhere); the distances from the patch's centre
    to the left, upper, right and lower edge of the thing's box, in patches, negative to the left and above,
    cut at the edges of the patch's own square of `tile` by `tile` patches (0: the whole grid); and which
    letter of the alphabet stands there (-1: none, or too small to tell).
    """
    owner, home = owners(scene, columns, rows)
    x, y = np.array([t.x for t in scene.things]) * columns, np.array([t.y for t in scene.things]) * rows
    facts = np.array([[kind_class(t), COLOURS.index(t.colour), math.log(t.size)] for t in scene.things])
    shapes = [t if t.kind == "shape" else None for t in scene.things]
    alike = np.array(
        [
            [sum(u is not None and key(t) == key(u) for u in shapes) if t else 0 for key in _LIKENESSES]
            for t in shapes
        ]
    )
    dense = np.zeros((rows * columns, DENSE), np.float32)
    dense[:, 1] = dense[:, 13] = -1
    patch = np.nonzero(owner >= 0)[0]
    who = owner[patch]
    across, down = patch % columns, patch // columns
    dense[patch, :2] = facts[who, :2]
    dense[patch, 2] = x[who] - (across + 0.5)
    dense[patch, 3] = y[who] - (down + 0.5)
    dense[patch, 4] = facts[who, 2]
    dense[home, 5] = 1
    dense[patch, 6:9] = alike[who]
    boxes = np.array([box_of(t, scene.aspect) for t in scene.things]) * (columns, rows, columns, rows)
    low, high = np.zeros((2, len(patch))), np.broadcast_to(np.array([[columns], [rows]]), (2, len(patch)))
    if tile:
        low = np.stack([across, down]) // tile * tile
        high = low + tile
    for i, (place, at) in enumerate(((across, 0), (down, 1)) * 2):
        edge = np.clip(boxes[who, i], low[at], high[at])
        dense[patch, 9 + i] = edge - (place + 0.5)
    for i, t in enumerate(scene.things):
        if t.kind == "word":
            _mark_letters(dense, t, boxes[i], np.nonzero(owner == i)[0], columns)
    return dense


def _mark_letters(dense, word, box, patches, columns):
    """The letter in the middle of each patch of a word, unless letters are too narrow to tell."""
    text = word.text
    width = box[2] - box[0]
    if width / len(text) < 0.7 or not word.name.isalpha():
        return
    at = np.searchsorted(letter_edges(text, word.font), (patches % columns + 0.5 - box[0]) / width)
    inside = at < len(text)
    dense[patches[inside], 13] = [ord(word.name[i]) - ord("a") for i in at[inside]]
