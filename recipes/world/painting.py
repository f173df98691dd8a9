"""Things in any look to images: outlines, fills, shadows, shaky hands, digits of a mouse."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from shapes import drawing
from shapes.drawing import bounds_of, corners, draw_ink, draw_shape, word_mask

_STROKES = {  # each digit as lines through points, in a box of 1 by 1.4
    "0": [[(0.5, 0), (0.1, 0.3), (0, 0.8), (0.2, 1.3), (0.5, 1.4), (0.85, 1.2), (1, 0.7), (0.85, 0.2),
         (0.5, 0)]],
    "1": [[(0.2, 0.35), (0.6, 0), (0.6, 1.4)]],
    "2": [[(0.05, 0.35), (0.3, 0.03), (0.7, 0.03), (0.95, 0.35), (0.8, 0.7), (0, 1.4), (1, 1.4)]],
    "3": [[(0.05, 0.15), (0.45, 0), (0.9, 0.2), (0.85, 0.5), (0.4, 0.68), (0.95, 0.9), (0.95, 1.2), (0.5,
         1.4), (0, 1.25)]],
    "4": [[(0.65, 0), (0, 0.9), (1, 0.9)], [(0.7, 0.4), (0.7, 1.4)]],
    "5": [[(0.95, 0), (0.15, 0), (0.1, 0.6), (0.6, 0.55), (0.95, 0.85), (0.9, 1.2), (0.5, 1.4), (0,
         1.25)]],
    "6": [[(0.8, 0), (0.3, 0.35), (0.03, 0.9), (0.2, 1.3), (0.6, 1.4), (0.95, 1.1), (0.8, 0.75), (0.4,
         0.7), (0.06, 1.0)]],
    "7": [[(0, 0), (1, 0), (0.35, 1.4)]],
    "8": [[(0.5, 0.65), (0.12, 0.35), (0.3, 0.03), (0.7, 0.03), (0.88, 0.35), (0.5, 0.65), (0.05, 1.0),
         (0.3, 1.38), (0.7, 1.38), (0.95, 1.0), (0.5, 0.65)]],
    "9": [[(0.92, 0.4), (0.6, 0.7), (0.2, 0.65), (0.05, 0.35), (0.3, 0.03), (0.75, 0.05), (0.95, 0.35),
         (0.9, 0.8), (0.55, 1.4)]],
}  # fmt: skip


@lru_cache(maxsize=4096)
def stroke_mask(digit, seed):
    """Ink of a digit as a mouse would draw it, cropped: the seed bends, slants and thickens it."""
    rng = random.Random(seed)
    mask, thick = Image.new("L", (240, 280)), rng.randint(8, 26)
    slant, narrow, draw = rng.uniform(-0.25, 0.15), rng.uniform(0.65, 1.1), ImageDraw.Draw(mask)
    for line in _STROKES[digit]:
        bent = [(x + rng.gauss(0, 0.035), y + rng.gauss(0, 0.035)) for x, y in line]
        places = [(50 + 120 * narrow * (x - slant * (y - 0.7)), 50 + 125 * y) for x, y in _rounded(bent)]
        draw.line(places, fill=255, width=thick, joint="curve")
        for x, y in (places[0], places[-1]):
            draw.ellipse((x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2), fill=255)
    return mask.crop(mask.getbbox())


def _rounded(points):
    """A line with each corner cut twice (Chaikin), its ends in place."""
    for _ in range(2):
        cut = [points[0]]
        for (x1, y1), (x2, y2) in pairwise(points):
            cut += [
                (0.75 * x1 + 0.25 * x2, 0.75 * y1 + 0.25 * y2),
                (0.25 * x1 + 0.75 * x2, 0.25 * y1 + 0.75 * y2),
            ]
        points = [*cut, points[-1]]
    return points


def ink_of(thing, split):
    """`drawing.ink_of`, also of a digit that a mouse draws or a font prints."""
    if thing.kind == "digit" and thing.strokes >= 0:
        return stroke_mask(thing.name, thing.strokes), thing.width, thing.height
    if thing.kind == "digit" and thing.font:
        return word_mask(thing.name, thing.font), thing.width, thing.height
    return drawing.ink_of(thing, split)


def _paint_shape(draw, thing, scales):
    """In the thing's colour, filled or as a line, with or without a border."""
    side = scales[2]
    if thing.wobble:
        _draw_by_hand(draw, thing, scales)
    elif thing.hollow:
        draw_shape(draw, thing, scales, None, max(1, round(thing.hollow * side)), thing.rgb)
    elif thing.border:
        draw_shape(draw, thing, scales, thing.rgb, max(1, round(0.05 * thing.size * side)), thing.border)
    else:
        draw_shape(draw, thing, scales, thing.rgb)


def _dress(canvas, thing, scales):
    """What a shape has below its line or in place of its flat colour: a shadow, a fade, lines or dots."""
    side = scales[2] * thing.size  # a diameter in pixels
    x1, y1, x2, y2 = (round(edge) for edge in bounds_of(thing, scales))
    wide, high = max(1, x2 - x1 + 1), max(1, y2 - y1 + 1)
    mask = Image.new("L", (wide, high))
    moved = replace(thing, x=thing.x - x1 / scales[0], y=thing.y - y1 / scales[1])
    draw_shape(ImageDraw.Draw(mask), moved, scales, 255)
    if thing.shadow:
        far = max(1, round(thing.shadow * side))
        shade = Image.new("L", (wide + 2 * far, high + 2 * far))
        shade.paste(mask.point(lambda value: value * 2 // 5), (far, far))
        shade = shade.filter(ImageFilter.GaussianBlur(far / 2))
        canvas.paste((0, 0, 0), (x1, y1), shade)
    if thing.tint:
        ramp = np.linspace(0, 1, wide)[:, None] * np.subtract(thing.tint, thing.rgb) + thing.rgb  # (W, 3)
        fade = Image.fromarray(np.broadcast_to(ramp, (high, wide, 3)).round().astype(np.uint8))
        canvas.paste(fade, (x1, y1), mask)
    if thing.fill:
        kind, angle, spacing, thickness, share = thing.fill
        if share:
            pale = tuple(round(255 + share * (one - 255)) for one in thing.rgb)
            canvas.paste(pale, (x1, y1), mask)
        spacing, thickness = max(3.0, spacing * side), max(1.0, thickness * side)
        turn = math.radians(angle)
        across, down = np.arange(wide)[None, :], np.arange(high)[:, None]
        u = (across * math.cos(turn) + down * math.sin(turn)) % spacing
        v = (down * math.cos(turn) - across * math.sin(turn)) % spacing
        inked = (
            np.hypot(u - spacing / 2, v - spacing / 2) < thickness / 2 if kind == "dots" else u < thickness
        )
        inked = inked | (v < thickness) if kind == "crossed" else inked
        canvas.paste(thing.rgb, (x1, y1), Image.fromarray(np.asarray(mask) * inked))


def _draw_by_hand(draw, thing, scales):
    """Its line twice, each time a little off."""
    rng, line = random.Random(f"{thing.x}:{thing.y}"), max(1, round(thing.hollow * scales[2]))
    around = [(0.5 * math.sin(i * math.pi / 12), 0.5 * math.cos(i * math.pi / 12)) for i in range(24)]
    places = corners(replace(thing, outline=tuple(around)) if thing.name == "circle" else thing, scales)
    astray = thing.wobble * thing.size * scales[2]
    for _ in range(2):
        off = [(x + rng.gauss(0, astray), y + rng.gauss(0, astray)) for x, y in places]
        draw.line([*off, off[0]], fill=thing.rgb, width=line, joint="curve")


def draw_thing(canvas, thing, scales, split):
    if thing.kind != "shape":
        draw_ink(canvas, thing, scales, ink_of(thing, split))
        return
    if thing.fill or thing.shadow or thing.tint:
        _dress(canvas, thing, scales)
    if not thing.tint:
        _paint_shape(ImageDraw.Draw(canvas), thing, scales)


def render(scene, size=256):
    """`drawing.render` of things in any look."""
    return drawing.render(scene, size, draw_thing)
