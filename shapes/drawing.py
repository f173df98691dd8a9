"""Scenes to images, and to dense targets for each patch.

The handwritten digits are real ones, of UCI, and split before anything is drawn.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from operator import attrgetter

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from shapes.world import COLOURS, KIND_CLASS


@cache
def digit_images(split):
    """(images uint8 (n, 8, 8) 0..255, labels (n,)) of the UCI digits, 80% train, 20% heldout."""
    if split not in ("train", "heldout"):
        raise ValueError(f"expected split 'train' or 'heldout', got {split!r}")
    from sklearn.datasets import load_digits  # slow to import, so only when digits are drawn

    images, labels = load_digits(return_X_y=True)
    images = np.round(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.random.RandomState(0).permutation(len(labels))
    chosen = []
    for digit in range(10):
        of_class = order[labels[order] == digit]
        cut = round(len(of_class) * 0.2)
        chosen.append(of_class[:cut] if split == "heldout" else of_class[cut:])
    chosen = np.sort(np.concatenate(chosen))
    return images[chosen], labels[chosen]


@lru_cache(maxsize=4096)
def digit_mask(split, index):
    """Ink of one digit: (alpha with a border of one empty pixel, ink width, ink height)."""
    image = digit_images(split)[0][index]
    rows, columns = np.nonzero(image.max(1) > 60)[0], np.nonzero(image.max(0) > 60)[0]
    ink = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    ink = np.minimum(ink.astype(np.int32) * 5 // 4, 255).astype(np.uint8)
    return Image.fromarray(np.pad(ink, 1)), ink.shape[1], ink.shape[0]


@cache
def _font():
    return ImageFont.load_default(96)


@cache
def word_mask(text):
    """Ink of a printed word as an alpha image cropped to it."""
    mask = Image.new("L", (700, 180))
    ImageDraw.Draw(mask).text((20, 20), text, font=_font(), fill=255, stroke_width=2, stroke_fill=255)
    return mask.crop(mask.getbbox())


def ink_of(thing, split):
    """(alpha image, width, height) to draw a word or digit with, in fractions of the side."""
    if thing.kind == "word":
        return word_mask(thing.name.upper() if thing.upper else thing.name), thing.width, thing.height
    mask, w, h = digit_mask(split, thing.digit_index)
    return mask, thing.width * (w + 2) / w, thing.height * (h + 2) / h


@cache
def _background_mask(kind, variant):
    """The mask (256, 256) that mixes a background's two tones: three kinds in eight variants."""
    if kind == "noise":
        grain = np.random.RandomState(variant).randint(0, 256, (48, 48)).astype(np.uint8)
        return Image.fromarray(grain).resize((256, 256), Image.Resampling.BILINEAR)
    t = (np.arange(256) + 0.5) / 256
    along, across = (t[None, :], t[:, None]) if variant & 1 else (t[:, None], t[None, :])
    slant = (variant >> 1) * 0.33
    mix = (along + slant * across) / (1 + slant)
    if kind == "stripes":
        mix = 0.5 + 0.5 * np.sin(mix * 2 * math.pi * (6 + variant))
    return Image.fromarray(np.broadcast_to(mix * 255, (256, 256)).astype(np.uint8))


def _paint_background(background, side):
    if background.kind == "plain":
        return Image.new("RGB", (side, side), background.first)
    mask = _background_mask(background.kind, background.variant)
    mask = mask.resize((side, side), Image.Resampling.BILINEAR)
    first, second = np.array(background.first), np.array(background.second)
    ramp = first + (second - first) * np.linspace(0, 1, 256)[:, None]  # (256, 3)
    mask.putpalette(ramp.round().astype(np.uint8).tobytes())  # a palette mixes faster than a paste
    return mask.convert("RGB")


_A, _B = 0.17, 0.5  # half the width and half the length of the cross's arms
OUTLINES = {  # corners around the centre, in diameters
    "square": [(-0.43, -0.43), (0.43, -0.43), (0.43, 0.43), (-0.43, 0.43)],
    "triangle": [(0.0, -0.49), (0.52, 0.43), (-0.52, 0.43)],
    "diamond": [(0.0, -0.56), (0.42, 0.0), (0.0, 0.56), (-0.42, 0.0)],
    "star": [
        (radius * math.sin(i * math.pi / 5), -radius * math.cos(i * math.pi / 5))
        for i, radius in enumerate((0.56, 0.25) * 5)
    ],
    "cross": [
        (-_A, -_B), (_A, -_B), (_A, -_A), (_B, -_A), (_B, _A), (_A, _A),
        (_A, _B), (-_A, _B), (-_A, _A), (-_B, _A), (-_B, -_A), (-_A, -_A),
    ],
}  # fmt: skip


def _draw_shape(draw, thing, side, fill):
    x, y, d = thing.x * side, thing.y * side, thing.size * side
    if thing.name == "circle":
        draw.ellipse((x - d / 2, y - d / 2, x + d / 2, y + d / 2), fill=fill)
        return
    c, s = d * math.cos(math.radians(thing.angle)), d * math.sin(math.radians(thing.angle))
    draw.polygon([(x + c * u - s * v, y + s * u + c * v) for u, v in OUTLINES[thing.name]], fill=fill)


def _draw_ink(canvas, thing, side, split):
    mask, width, height = ink_of(thing, split)
    w, h = max(1, round(width * side)), max(1, round(height * side))
    corner = round(thing.x * side - w / 2), round(thing.y * side - h / 2)
    canvas.paste(
        thing.rgb, (*corner, corner[0] + w, corner[1] + h), mask.resize((w, h), Image.Resampling.BICUBIC)
    )


def render(scene, size=256):
    """The image as an RGB image (size, size), drawn at twice the size and reduced."""
    side = 2 * size
    canvas = _paint_background(scene.background, side)
    draw = ImageDraw.Draw(canvas)
    for thing in scene.things:
        if thing.kind == "shape":
            _draw_shape(draw, thing, side, thing.rgb)
        else:
            _draw_ink(canvas, thing, side, scene.split)
    return canvas.reduce(2)


def object_map(scene, side):
    """uint8 (side, side): 0 for background, else 1 + the index of the topmost thing."""
    ids = Image.new("L", (side, side))
    draw = ImageDraw.Draw(ids)
    for i, t in enumerate(scene.things, 1):
        if t.kind == "shape":
            _draw_shape(draw, t, side, i)
        else:
            x, y, w, h = t.x * side, t.y * side, t.width * side / 2, t.height * side / 2
            draw.rectangle((round(x - w), round(y - h), round(x + w) - 1, round(y + h) - 1), fill=i)
    return np.asarray(ids)


def render_with_map(scene, size, grid):
    """(image, dense float32 (grid*grid, 9)): what each patch, row by row, shows.

    Columns: kind_class (0 background, 1-6 shapes, 7-16 digits, 17- words), colour_class
    (-1 background), dx and dy from the patch's centre to the thing's in patches,
    log(size), 1 on the patch that holds the thing's centre; and on a shape's patches how many
    shapes of the scene share its name, its colour, both (0 elsewhere).
    """
    return render(scene, size), _dense(scene, grid)


@lru_cache(maxsize=16)
def _patch_of_pixel(grid, cell):
    """(pixels,): 16 times the patch that each pixel of the object map lies in."""
    t = np.arange(grid * cell) // cell
    return ((t[:, None] * grid + t) * 16).ravel()


_LIKENESSES = (attrgetter("name"), attrgetter("colour"), attrgetter("name", "colour"))


def _dense(scene, grid):
    n, cell = len(scene.things), max(1, round(64 / grid))
    ids = object_map(scene, grid * cell)
    tally = np.bincount(_patch_of_pixel(grid, cell) + ids.ravel(), minlength=grid * grid * 16)
    pixels = tally.reshape(grid * grid, 16)[:, 1 : n + 1].T  # (n, patches)
    x, y = np.array([t.x for t in scene.things]) * grid, np.array([t.y for t in scene.things]) * grid
    home = y.astype(int) * grid + x.astype(int)  # centres lie inside the image
    owner = np.where(pixels.max(0) >= 0.12 * cell * cell, pixels.argmax(0), -1)
    for i in np.argsort(pixels[np.arange(n), home], kind="stable"):  # where centres share a patch,
        owner[home[i]] = i  # the one seen most comes last
    facts = np.array([[KIND_CLASS[t.name], COLOURS.index(t.colour), math.log(t.size)] for t in scene.things])
    shapes = [t if t.kind == "shape" else None for t in scene.things]
    alike = np.array(
        [
            [sum(u is not None and key(t) == key(u) for u in shapes) if t else 0 for key in _LIKENESSES]
            for t in shapes
        ]
    )
    dense = np.zeros((grid * grid, 9), np.float32)
    dense[:, 1] = -1
    patch = np.nonzero(owner >= 0)[0]
    who = owner[patch]
    dense[patch, :2] = facts[who, :2]
    dense[patch, 2] = x[who] - (patch % grid + 0.5)
    dense[patch, 3] = y[who] - (patch // grid + 0.5)
    dense[patch, 4] = facts[who, 2]
    dense[home, 5] = 1
    dense[patch, 6:] = alike[who]
    return dense
