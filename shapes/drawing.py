"""Scenes to images.

The handwritten digits are real ones, of UCI, and split before anything is drawn.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont


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
def font_of(path):
    """A file's face; "FILE@700" is a variable font's weight of 700."""
    if not path:
        return ImageFont.load_default(96)
    file, _, weight = path.partition("@")
    font = ImageFont.truetype(file, 96)
    if weight:
        axes = font.get_variation_axes()
        is_weight = [axis["name"] == b"Weight" for axis in axes]
        font.set_variation_by_axes([float(weight) if it else a["default"] for it, a in zip(is_weight, axes)])
    return font


@lru_cache(maxsize=4096)
def word_mask(text, font=""):
    """Ink of a printed word as an alpha image cropped to it; `font` is a file's path."""
    mask, bold = Image.new("L", (1600, 320)), 0 if font else 2
    ImageDraw.Draw(mask).text(
        (80, 80), text, font=font_of(font), fill=255, stroke_width=bold, stroke_fill=255
    )
    return mask.crop(mask.getbbox())


def ink_of(thing, split):
    """(alpha image, width, height) to draw a word or digit with, in fractions of the shorter side."""
    if thing.kind == "word":
        return word_mask(thing.text, thing.font), thing.width, thing.height
    mask, w, h = digit_mask(split, thing.digit_index)
    return mask, thing.width * (w + 2) / w, thing.height * (h + 2) / h


@cache
def _background_mask(kind, variant):
    """The mask (256, 256) that mixes a background's two tones: five kinds in eight variants."""
    if kind in ("dots", "lines"):
        step = 8 + 3 * variant
        place = np.arange(256) % step
        mesh = (
            (place[:, None] < 2) & (place < 2)
            if kind == "dots"
            else (place[:, None] < 1) | (place < variant % 2)
        )
        return Image.fromarray(np.where(mesh, 255, 0).astype(np.uint8))
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


def paint_background(background, size):
    """The ground of a drawing as an image of `size` (width, height)."""
    if background.kind == "plain":
        return Image.new("RGB", size, background.first)
    mask = _background_mask(background.kind, background.variant)
    mask = mask.resize(size, Image.Resampling.BILINEAR)
    first, second = np.array(background.first), np.array(background.second)
    ramp = first + (second - first) * np.linspace(0, 1, 256)[:, None]  # (256, 3)
    mask.putpalette(ramp.round().astype(np.uint8).tobytes())  # a palette mixes faster than a paste
    return mask.convert("RGB")


def scales_of(size):
    """What a fraction of the width, of the height, of the shorter side (across and down) is in pixels, where
    an image is drawn as it looks."""
    return (*size, min(size), min(size))


def corners(thing, scales):
    """Corners of a shape in pixels, not of a circle; `scales` as `scales_of` has them."""
    across, down, sx, sy = scales
    turn = math.radians(thing.angle)
    c, s, x, y = thing.size * math.cos(turn), thing.size * math.sin(turn), thing.x * across, thing.y * down
    return [(x + sx * (c * u - s * v), y + sy * (s * u + c * v)) for u, v in thing.corners]


def bounds_of(thing, scales):
    """(x1, y1, x2, y2) around a thing in pixels."""
    across, down, sx, sy = scales
    if thing.kind == "shape" and thing.name != "circle":
        xs, ys = zip(*corners(thing, scales))
        return min(xs), min(ys), max(xs), max(ys)
    width, height = (thing.size, thing.size) if thing.kind == "shape" else (thing.width, thing.height)
    x, y, w, h = thing.x * across, thing.y * down, width * sx / 2, height * sy / 2
    return x - w, y - h, x + w, y + h


def draw_shape(draw, thing, scales, fill, line=0, colour=None):
    """Filled with a colour or with nothing, and with a line of so many pixels around it."""
    if thing.name == "circle":
        draw.ellipse(bounds_of(thing, scales), fill=fill, outline=colour, width=line)
    else:
        draw.polygon(corners(thing, scales), fill=fill, outline=colour, width=line)


def draw_ink(canvas, thing, scales, ink):
    """A word or a digit, with what `ink_of` has of it."""
    across, down, side, _ = scales
    mask, width, height = ink
    w, h = max(1, round(width * side)), max(1, round(height * side))
    corner = round(thing.x * across - w / 2), round(thing.y * down - h / 2)
    canvas.paste(
        thing.rgb, (*corner, corner[0] + w, corner[1] + h), mask.resize((w, h), Image.Resampling.BICUBIC)
    )


def draw_thing(canvas, thing, scales, split):
    if thing.kind == "shape":
        draw_shape(ImageDraw.Draw(canvas), thing, scales, thing.rgb)
    else:
        draw_ink(canvas, thing, scales, ink_of(thing, split))


def render(scene, size=256, draw=draw_thing):
    """The image in RGB with `size` pixels on its shorter side, drawn larger and reduced (`Scene.pen`)."""
    wide, high = (round(size * max(1.0, a)) for a in (scene.aspect, 1 / scene.aspect))
    scales = scales_of((wide * scene.pen, high * scene.pen))
    canvas = paint_background(scene.background, scales[:2])
    for thing in scene.things:
        draw(canvas, thing, scales, scene.split)
    return canvas.reduce(scene.pen) if scene.pen > 1 else canvas
