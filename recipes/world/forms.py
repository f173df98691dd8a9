"""What strangers draw for each shape: its kinds, its proportions, its angles, its corners, and what fills it.

An outline is a tuple of corners around a centre, in diameters, none of them farther away than `REACH`. What
could be called by two names is not drawn: a square stands on a side to within 33 degrees, for on a corner it
is a diamond, and a diamond whose axes are nearly alike stands on a corner.
"""

from __future__ import annotations

import math
import random

from shapes.world import REACH

Outline = tuple[tuple[float, float], ...]


def random_form(rng: random.Random, name: str, heldout: bool = False) -> tuple[Outline, float]:
    """(outline, angle in degrees) of a shape that is no circle. What is held out has stars of seven points,
    too, which training never sees."""
    outline, angle = _FORMS[name](rng, heldout)
    if rng.random() < 0.15:
        outline = rounded(outline, rng.uniform(0.08, 0.35 if name in ("star", "cross") else 0.22))
    return _within_reach(outline), angle % 360


def rounded(outline: Outline, share: float) -> Outline:
    """The same with each corner cut by a curve that takes `share` of the edges on both of its sides."""
    found = []
    for before, corner, after in zip((outline[-1], *outline[:-1]), outline, (*outline[1:], outline[0])):
        start = [c + share * (b - c) for b, c in zip(before, corner)]
        end = [c + share * (a - c) for a, c in zip(after, corner)]
        for t in (0.0, 0.25, 0.5, 0.75, 1.0):
            weights = (1 - t) ** 2, 2 * t * (1 - t), t * t
            found.append(tuple(sum(w * p for w, p in zip(weights, at)) for at in zip(start, corner, end)))
    return tuple(found)  # type: ignore[arg-type]


def _within_reach(outline: Outline) -> Outline:
    """Scaled until its farthest corner is as far away as any may be."""
    by = REACH / max(math.hypot(x, y) for x, y in outline)
    return tuple((x * by, y * by) for x, y in outline)


def _centred(outline) -> Outline:
    """Moved until its centre of mass is the centre."""
    area = across = down = 0.0
    for (x1, y1), (x2, y2) in zip(outline, (*outline[1:], outline[0])):
        cross = x1 * y2 - x2 * y1
        area, across, down = area + cross, across + (x1 + x2) * cross, down + (y1 + y2) * cross
    return tuple((x - across / (3 * area), y - down / (3 * area)) for x, y in outline)


def _angle(rng: random.Random, often: tuple[float, ...], share: float = 0.55) -> float:
    """One of those that people draw often, with this probability, else any."""
    return rng.choice(often) if rng.random() < share else rng.uniform(0, 360)


def _square(rng: random.Random, heldout: bool) -> tuple[Outline, float]:
    angle = 0.0 if rng.random() < 0.45 else rng.uniform(-33, 33)
    return ((-1, -1), (1, -1), (1, 1), (-1, 1)), angle


def _triangle(rng: random.Random, heldout: bool) -> tuple[Outline, float]:
    which, side = rng.random(), rng.choice((-1, 1))
    corners: list[tuple[float, float]]
    if which < 0.3:
        corners = [(0, -1), (0.866, 0.5), (-0.866, 0.5)]
    elif which < 0.55:
        wide = rng.uniform(0.5, 1.6)
        corners = [(0, -1), (wide, 1), (-wide, 1)]
    elif which < 0.8:  # with a right angle, to either side
        corners = [(0, 0), (side * rng.uniform(0.6, 1.6), 0), (0, -1)]
    else:
        corners = [(0, 0), (side * rng.uniform(0.9, 1.6), 0), (side * rng.uniform(0.1, 0.9), -1)]
    return _centred(corners), _angle(rng, (0, 0, 0, 180, 180, 90, 270))


def _diamond(rng: random.Random, heldout: bool) -> tuple[Outline, float]:
    wide = rng.choice((1.0, 0.75, rng.uniform(0.5, 1.0), rng.uniform(0.5, 0.7)))
    turn = 10 if wide > 0.85 else 20 if wide > 0.7 else 180
    angle = 0.0 if rng.random() < 0.45 else rng.uniform(-turn, turn) + rng.choice((0, 90))
    return ((0, -1), (wide, 0), (0, 1), (-wide, 0)), angle


def _star(rng: random.Random, heldout: bool) -> tuple[Outline, float]:
    points = rng.choices((5, 6, 4, 8, 7), (14, 2, 2, 1, 2 * heldout))[0]
    low, high = {4: (0.22, 0.42), 5: (0.34, 0.6), 6: (0.4, 0.65)}.get(points, (0.5, 0.72))
    inner = rng.uniform(low, high)
    corners = [
        (radius * math.sin(i * math.pi / points), -radius * math.cos(i * math.pi / points))
        for i, radius in enumerate((1.0, inner) * points)
    ]
    return tuple(corners), _angle(rng, (0, 0, 0, 180))


def _cross(rng: random.Random, heldout: bool) -> tuple[Outline, float]:
    arm = math.exp(rng.uniform(math.log(0.09), math.log(0.46)))
    up, aside, down = 1.0, 1.0, 1.0
    if rng.random() < 0.12:  # as on a church
        arm, up, aside, down = min(arm, 0.25), 0.7, 0.7, rng.uniform(1.1, 1.5)
    corners = (
        (-arm, -up), (arm, -up), (arm, -arm), (aside, -arm), (aside, arm), (arm, arm),
        (arm, down), (-arm, down), (-arm, arm), (-aside, arm), (-aside, -arm), (-arm, -arm),
    )  # fmt: skip
    return corners, _angle(rng, (0, 0, 0, 45, 45, 45), 0.7) + rng.choice((0, 0, rng.uniform(-6, 6)))


_FORMS = {"square": _square, "triangle": _triangle, "diamond": _diamond, "star": _star, "cross": _cross}


def random_fill(rng: random.Random, heldout: bool = False) -> tuple:
    """(kind, angle in degrees, spacing and thickness in diameters, share of the shape's colour below it):
    lines or dots in place of a flat colour. What is held out has crossed lines, too."""
    kind = rng.choice(("lines", "lines", "lines", "dots", *(("crossed",) * 3 * heldout)))
    spacing = rng.uniform(0.07, 0.2)
    thickness = spacing * (rng.uniform(0.5, 0.75) if kind == "dots" else rng.uniform(0.15, 0.5))
    return (
        kind,
        rng.choice((0, 45, 90, 135, rng.uniform(0, 180))),
        spacing,
        thickness,
        rng.choice((0, 0, 0.3)),
    )
