"""Questions that plain scenes are not asked: where things are, about things that are not there, follow-ups.

Boxes and points are asked for and written as Qwen3-VL does it, in thousandths of the image's sides.
"""

from __future__ import annotations

import random

from data.boxes import COORDINATES, Box, Point
from recipes.shapes.dense import box_of
from recipes.world.scene import ABSENT, Thing
from shapes.questions import TEMPLATES, absent, plural, reading_order, tally, unique_phrases
from shapes.world import COLOURS, QA, SHAPES, Scene

MOST_PLACES = 4  # things in one answer; `stream` trains on more of them in drawings
FORM = COORDINATES["qwen3-vl"]
DETECT, POINT = FORM.question("detect", "{t}"), FORM.question("point", "{t}")
_WHOLE = (1, 1)  # the size of an image in whose fractions places are given
_DETECT = (DETECT, DETECT, "Where is the {t}?", "Detect {t}.", "Detect the {t}.", "Find the {t}.",
           "Locate the {t}.", "Draw a box around the {t}.", "Give the bounding box of the {t}.")  # fmt: skip
_POINT = (POINT, POINT, "Point at the {t}.", "Point to the {t}.", "Show me the {t} with a point.")
_MANY = (DETECT, DETECT, "Detect {t}.", "Find all {t}.", "Locate the {t}.", "Where are the {t}?")
_MANY_POINT = (POINT, "Point at the {t}.", "Point to all {t}.")
DESCRIBE = "Describe the picture with boxes."
_OF_IT = {
    "colour": ("What colour is it?", "And its colour?", "Which color is it?"),
    "shape": ("What shape is it?", "And its shape?"),
}
_ALL = (DESCRIBE, "Describe the image with boxes.", "Detect everything.",
        "Give a box for each thing.")  # fmt: skip


def boxes(scene: Scene, things: list[Thing], label: str = "") -> str:
    """The things' boxes, row by row; `label` in place of their own names."""
    return FORM.write([Box(label or name(t), box_of(t, scene.aspect)) for t in reading_order(things)], _WHOLE)


def points(scene: Scene, things: list[Thing], label: str = "") -> str:
    """The things' centres, row by row."""
    return FORM.write([Point(label or name(t), (t.x, t.y)) for t in reading_order(things)], _WHOLE)


def name(thing: Thing) -> str:
    """What a box is labelled with."""
    return f"{thing.colour} {thing.name}" if thing.kind == "shape" else thing.kind


def matching(scene: Scene, phrase: str) -> list[Thing]:
    """The things that a phrase such as "red circle", "circle", "red shape", "shape" or "word" names."""
    colour, _, noun = phrase.rpartition(" ")
    return [
        t
        for t in scene.things
        if (not colour or t.colour == colour)
        and (t.kind == noun if noun in ("word", "digit") else t.kind == "shape" and noun in (t.name, "shape"))
    ]


def ask_place(scene: Scene, rng: random.Random, many: float = 0.25, most: int = MOST_PLACES) -> QA | None:
    """Where one thing is, or all of a kind (with probability `many`, or where no thing is alone), or
    something that is not there. None where that is more than `most` things."""
    which = rng.random()
    if which < 0.12:
        return ask_absent_place(scene, rng)
    if which < 0.2 and len(scene.things) <= most:
        return ask_everything(scene, rng)
    write, one, all_of = (boxes, _DETECT, _MANY) if rng.random() < 0.7 else (points, _POINT, _MANY_POINT)
    known = unique_phrases(scene)
    if known and which < 1 - many:
        thing, phrases = rng.choice(known)
        phrase = rng.choice(phrases)
        return QA("place", rng.choice(one).format(t=phrase), write(scene, [thing], phrase), things=(thing,))
    phrase = rng.choice((rng.choice(SHAPES), f"{rng.choice(COLOURS)} shape", "shape", "shape"))
    present = [t for t in scene.shapes()]
    if present and rng.random() < 0.8:
        thing = rng.choice(present)
        phrase = rng.choice((thing.name, f"{thing.colour} shape", f"{thing.colour} {thing.name}", "shape"))
    found = matching(scene, phrase)
    if len(found) > most:
        return None
    template = rng.choice(all_of)
    asked = phrase if template in (DETECT, POINT) else plural(phrase)
    things = tuple(reading_order(found))
    return QA("place", template.format(t=asked), write(scene, found, phrase), things=things)


def ask_everything(scene: Scene, rng: random.Random) -> QA:
    """Where all things are."""
    things = tuple(reading_order(scene.things))
    return QA("place", rng.choice(_ALL), boxes(scene, list(things)), things=things)


def ask_absent_place(scene: Scene, rng: random.Random) -> QA:
    """Where something is that is not there."""
    return QA("absent", rng.choice(_DETECT + _POINT).format(t=absent(scene, rng)), ABSENT)


def ask_absent(scene: Scene, rng: random.Random) -> QA | None:
    """About the colour, place or text of something that is not there."""
    which = rng.random()
    lacking = [kind for kind in ("word", "digit") if not scene.first(kind)]
    if which < 0.4 and lacking:
        kind = rng.choice(lacking)
        return QA("absent", rng.choice(TEMPLATES[kind]), ABSENT)
    if which < 0.7:
        gone = [shape for shape in SHAPES if all(t.name != shape for t in scene.shapes())]
        if gone:
            return QA("absent", rng.choice(TEMPLATES["colour"]).format(t=rng.choice(gone)), ABSENT)
    gone = [colour for colour in COLOURS if all(t.colour != colour for t in scene.shapes())]
    if which > 0.85 and gone:
        return QA("absent", rng.choice(TEMPLATES["shape"]).format(t=rng.choice(gone)), ABSENT)
    return ask_absent_place(scene, rng)


def is_there(phrase: str, rng: random.Random) -> QA:
    """Whether a drawing shows what a phrase names and is known to be in it."""
    article = "an" if phrase[0] in "aeiou" else "a"
    return QA("exists", rng.choice(TEMPLATES["exists"]).format(t=f"{article} {phrase}"), "yes")


def follow_up(scene: Scene, rng: random.Random) -> list[QA]:
    """Two turns of which the second means the first one's thing by "it"; [] where no thing is known alone."""
    known = [(t, phrases) for t, phrases in unique_phrases(scene) if t.kind == "shape"]
    if not known:
        return []
    thing, phrases = rng.choice(known)
    phrase = rng.choice(phrases)
    if phrase == thing.name:
        first = QA("colour", rng.choice(TEMPLATES["colour"]).format(t=phrase), thing.colour)
    else:
        first = is_there(phrase, rng)
    one = (thing,)
    return [first, rng.choice((
        QA("colour", rng.choice(_OF_IT["colour"]), thing.colour),
        QA("shape", rng.choice(_OF_IT["shape"]), thing.name),
        QA("place", rng.choice(("Where is it?", "Give its box.")), boxes(scene, [thing], phrase), things=one),
        QA("place", rng.choice(("Point at it.", "Point to it.")), points(scene, [thing], phrase), things=one),
    ))]  # fmt: skip


def ask_of_it(scene: Scene, rng: random.Random) -> list[QA]:
    """Two turns, of which the second asks by "it" for the colour or the shape that the first does not say; []
    where no shape has a name or a colour of its own."""
    names, colours, _ = tally(scene)
    known = [(t.name, "colour", t.colour) for t in scene.shapes() if names[t.name] == 1]
    known += [(f"{t.colour} shape", "shape", t.name) for t in scene.shapes() if colours[t.colour] == 1]
    if not known:
        return []
    phrase, family, answer = rng.choice(known)
    return [is_there(phrase, rng), QA(family, rng.choice(_OF_IT[family]), answer)]
