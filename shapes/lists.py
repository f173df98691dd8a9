"""Dense training questions: everything in the image, in one answer, in many orders.

A one-word answer teaches a language model little. A list looks up thing after thing: colours by shape, shapes
from left to right, counts by colour. These are for training; they are not among the scored FAMILIES.
"""

from __future__ import annotations

from collections import Counter

from shapes.questions import unique_phrases
from shapes.wordings import REGIONS
from shapes.world import COLOURS, QA, SHAPES

_WORDINGS = {
    "colours": ("Name the colour of each shape.", "Which colour is each shape?"),
    "places": ("Where is each shape?", "Tell me where each thing is."),
    "across": ("Name all from left to right.", "What do you see from left to right?"),
    "down": ("Name all from above to below.", "What do you see from top to bottom?"),
    "sizes": ("Name the shapes from the biggest to the smallest.", "Which shapes are there, biggest first?"),
    "by_shape": ("How many are there of each shape?", "Count each shape."),
    "by_colour": ("How many shapes are there of each colour?", "Count each colour."),
}


_AROUND = ("Where is each thing relative to the {b}?", "Seen from the {b}, where is each thing?")
_BESIDE = ("Is each shape bigger or smaller than the {b}?", "Tell me which shapes are bigger than the {b}.")
_RELATIONS = 0.4  # share of the lists that relate everything to one thing


def ask_list(scene, rng) -> QA | None:
    """A question whose answer goes through the whole scene; None where there is nothing of its kind."""
    if rng.random() < _RELATIONS:
        return _ask_relations(scene, rng)
    kind = rng.choice(tuple(_WORDINGS))
    items = _ITEMS[kind](scene)
    if not items:
        return None
    return QA("list", rng.choice(_WORDINGS[kind]), ", ".join(items))


def _ask_relations(scene, rng) -> QA | None:
    """Where all lies seen from one thing, or how large it is beside it; doubtful pairs are left out."""
    anchors = unique_phrases(scene)
    if not anchors:
        return None
    anchor, phrases = rng.choice(anchors)
    phrase = rng.choice(phrases)
    if anchor.kind == "shape" and rng.random() < 0.4:
        ratios = [(t, t.size / anchor.size) for t in _reading_order(scene.shapes()) if t is not anchor]
        items = [f"{_name(t)} {'bigger' if r > 1 else 'smaller'}" for t, r in ratios if not 0.8 < r < 1.25]
        wordings = _BESIDE
    else:
        others = [t for t in _reading_order(scene.things) if t is not anchor]
        items = [f"{_name(t)} {way}" for t in others if (way := _direction(anchor, t))]
        wordings = _AROUND
    return QA("list", rng.choice(wordings).format(b=phrase), ", ".join(items)) if items else None


def _direction(anchor, thing) -> str | None:
    """left, right, above or below, by the clearly larger difference; None where neither is."""
    across, down = thing.x - anchor.x, thing.y - anchor.y
    if max(abs(across), abs(down)) < 0.12 or 0.7 < abs(across) / (abs(down) + 1e-9) < 1.4:
        return None
    if abs(across) > abs(down):
        return "left" if across < 0 else "right"
    return "above" if down < 0 else "below"


def _region(thing) -> str:
    return REGIONS[min(2, int(thing.y * 3))][min(2, int(thing.x * 3))]


def _name(thing) -> str:
    return f"{thing.colour} {thing.name}" if thing.kind == "shape" else f"{thing.kind} {thing.name}"


def _reading_order(things):
    return sorted(things, key=lambda t: (min(2, int(t.y * 3)), t.x))


def _colours(scene):
    return [f"{t.name} {t.colour}" for t in _reading_order(scene.shapes())]


def _places(scene):
    # The shape first, so that the place is looked up by it.
    return [f"{t.name} {t.colour} {_region(t)}" for t in _reading_order(scene.shapes())]


def _across(scene):
    return [_name(t) for t in sorted(scene.things, key=lambda t: t.x)]


def _down(scene):
    return [_name(t) for t in sorted(scene.things, key=lambda t: t.y)]


def _sizes(scene):
    return [_name(t) for t in sorted(scene.shapes(), key=lambda t: -t.size)]


def _by_shape(scene):
    counts = Counter(t.name for t in scene.shapes())
    return [f"{name} {counts[name]}" for name in SHAPES if counts[name]]


def _by_colour(scene):
    counts = Counter(t.colour for t in scene.shapes())
    return [f"{colour} {counts[colour]}" for colour in COLOURS if counts[colour]]


_ITEMS = {
    "colours": _colours,
    "places": _places,
    "across": _across,
    "down": _down,
    "sizes": _sizes,
    "by_shape": _by_shape,
    "by_colour": _by_colour,
}
