"""Questions for training alone, whose answers are lists, and what the nouns of questions mean.

A one-word answer teaches a language model little, and a list looks up thing after thing (`ask_list`).
`mentions` and `facts` are a training target for a question's nouns: a language model that has looked its
nouns up can compare them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from shapes.questions import apart, name_of, plural, reading_order, region, unique_phrases
from shapes.world import COLOURS, QA, SHAPES, Scene, Thing


# ------------------------------------------------------------------------------------------------ lists
def _by(key, names):
    """Counts of the shapes by an attribute, in the order of the world's names."""

    def items(scene):
        counts = Counter(getattr(t, key) for t in scene.shapes())
        return [(None, f"{name} {counts[name]}") for name in names if counts[name]]

    return items


# The shape's name stands first where its place is asked for, so that the place is looked up by it.
_LISTS = {
    "colours": (
        ("Name the colour of each shape.", "Which colour is each shape?"),
        lambda scene: [(t, f"{t.name} {t.colour}") for t in reading_order(scene.shapes())],
    ),
    "places": (
        ("Where is each shape?", "Tell me where each thing is."),
        lambda scene: [(t, f"{t.name} {t.colour} {region(t)}") for t in reading_order(scene.shapes())],
    ),
    "across": (
        ("Name all from left to right.", "What do you see from left to right?"),
        lambda scene: [(t, name_of(t)) for t in sorted(scene.things, key=lambda t: t.x)],
    ),
    "down": (
        ("Name all from above to below.", "What do you see from top to bottom?"),
        lambda scene: [(t, name_of(t)) for t in sorted(scene.things, key=lambda t: t.y)],
    ),
    "sizes": (
        ("Name the shapes from the biggest to the smallest.", "Which shapes are there, biggest first?"),
        lambda scene: [(t, name_of(t)) for t in sorted(scene.shapes(), key=lambda t: -t.size)],
    ),
    "by_shape": (("How many are there of each shape?", "Count each shape."), _by("name", SHAPES)),
    "by_colour": (
        ("How many shapes are there of each colour?", "Count each colour."),
        _by("colour", COLOURS),
    ),
}
_AROUND = ("Where is each thing relative to the {b}?", "Seen from the {b}, where is each thing?")
_BESIDE = ("Is each shape bigger or smaller than the {b}?", "Tell me which shapes are bigger than the {b}.")
_RELATIONS = 0.4  # share of the lists that relate everything to one thing


def ask_list(scene, rng, which="") -> QA | None:
    """A question whose answer goes through the whole scene; None where there is nothing of its kind. `which`
    of _LISTS it is, or any."""
    if not which and rng.random() < _RELATIONS:
        return _ask_relations(scene, rng)
    wordings, items_of = _LISTS[which or rng.choice(tuple(_LISTS))]
    return _list(rng.choice(wordings), items_of(scene))


def _list(question, items) -> QA | None:
    """items: (the thing that it is about, or None; its text)"""
    if not items:
        return None
    things, texts = zip(*items)
    return QA("list", question, ", ".join(texts), things=things if all(things) else ())


def _ask_relations(scene, rng) -> QA | None:
    """Where all lies seen from one thing, or how large it is beside it; doubtful pairs are left out."""
    anchors = unique_phrases(scene)
    if not anchors:
        return None
    anchor, phrases = rng.choice(anchors)
    phrase = rng.choice(phrases)
    if anchor.kind == "shape" and rng.random() < 0.4:
        ratios = [(t, t.size / anchor.size) for t in reading_order(scene.shapes()) if t is not anchor]
        items = [
            (t, f"{name_of(t)} {'bigger' if r > 1 else 'smaller'}") for t, r in ratios if not 0.8 < r < 1.25
        ]
        wordings = _BESIDE
    else:
        others = [t for t in reading_order(scene.things) if t is not anchor]
        items = [(t, f"{name_of(t)} {way}") for t in others if (way := _direction(*apart(t, anchor, scene)))]
        wordings = _AROUND
    return _list(rng.choice(wordings).format(b=phrase), items)


def _direction(across: float, down: float) -> str | None:
    """left, right, above or below, by the clearly larger distance; None where neither is."""
    if max(abs(across), abs(down)) < 0.12 or 0.7 < abs(across) / (abs(down) + 1e-9) < 1.4:
        return None
    if abs(across) > abs(down):
        return "left" if across < 0 else "right"
    return "above" if down < 0 else "below"


# -------------------------------------------------------------------------------------- what nouns mean
_NAMES = {plural(name): name for name in SHAPES} | {"shapes": None}
_COLOUR = f"(?:({'|'.join(COLOURS)}) )?"
_MANY = re.compile(rf"\b{_COLOUR}({'|'.join(_NAMES)})\b")
_ONE = re.compile(rf"(?:\b[Tt]he |\"){_COLOUR}({'|'.join(SHAPES)}|word|digit)\b")


@dataclass(frozen=True)
class Mention:
    """A noun in a text: its last character, the colour in front of it, what it names (None: any shape) and
    whether it asks for all of them."""

    end: int
    colour: str | None
    name: str | None
    plural: bool


def mentions(text: str) -> list[Mention]:
    """The nouns of a question that mean something in the image, in no particular order."""
    many = [Mention(m.end() - 1, m[1], _NAMES[m[2]], True) for m in _MANY.finditer(text)]
    return many + [Mention(m.end() - 1, m[1], m[2], False) for m in _ONE.finditer(text)]


def meant(scene: Scene, mention: Mention) -> list[Thing]:
    """The things that a noun names."""
    return [
        t
        for t in (scene.shapes() if mention.plural else scene.things)
        if mention.name in (None, t.name if t.kind == "shape" else t.kind)
        and mention.colour in (None, t.colour)
    ]


def facts(scene: Scene, mention: Mention) -> tuple[float, float, float, float]:
    """(x, y, log size, how many) in steps of about one; NaN where the noun does not say, or fits several.

    x and y run from -2 to 2, log size is shifted by 1.3, counts are halved.
    """
    found = meant(scene, mention)
    if mention.plural:
        return (math.nan, math.nan, math.nan, len(found) / 2)
    if len(found) != 1:
        return (math.nan,) * 4
    thing = found[0]
    return (4 * thing.x - 2, 4 * thing.y - 2, math.log(thing.size) + 1.3, math.nan)
