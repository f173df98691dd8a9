"""Held-out questions about drawings, with colours, fonts, strokes, photographs and programs of their own.

Each family is one bar of an evaluation; `evaluation` scores the answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from PIL import Image

from recipes.shapes.dense import box_of
from recipes.world import looks, signs
from recipes.world.asking import as_json, ask_both, ask_more, ask_of_one
from recipes.world.drawings import one_thing, paint, random_aspect, sample_drawing, weather
from recipes.world.outside import outside_image
from recipes.world.places import ask_absent, ask_place, follow_up, is_there
from recipes.world.renderers import drawable, render_matplotlib, render_svg
from recipes.world.scene import NOT_UNDERSTOOD, REFUSAL, Thing
from recipes.world.unanswerable import ask_outside
from shapes.questions import TEMPLATES, ask, unique_phrases
from shapes.world import COLOURS, FAMILIES, HELDOUT_SEED, QA, REACH, SHAPES, Scene

LETTERS = 24  # least size of type in pixels where words are read from other programs
TURNS = ("first question", "second question", "third question")  # of a conversation, about one drawing
_FOREIGN = ("count", "colour", "shape", "word")
_TURNED = tuple(name for name in SHAPES if name != "circle")  # each alone, in all forms and at all angles
_SIGNS = {"icons": signs.icons, "emoji": signs.emoji, "codes": signs.code, "charts": signs.chart}
DRAWING_FAMILIES = (
    *FAMILIES, "box", "box at 0.5", "boxes", "point", "absent", "outside image", "outside question",
    *TURNS, *(f"{family}, other program" for family in _FOREIGN),
    *(f"shape, any {name}" for name in _TURNED), *(f"outside image, {kind}" for kind in _SIGNS),
    "asked otherwise", "in JSON", "of one of two images", "of two images",
)  # fmt: skip

BY_QUESTION = (*TURNS, "asked otherwise", "of one of two images", "of two images")  # scored as what is asked


@dataclass(frozen=True)
class DrawingQuestion:
    """A question about an image that `image` draws; `family` is one of DRAWING_FAMILIES. `earlier` are the
    turns of its conversation before it, `boxes` lie around what the answer is about, in thousandths. `second`
    draws the image that is shown after the first, if there is one."""

    family: str
    qa: QA
    image: Callable[[], Image.Image]
    seed: int
    earlier: tuple[QA, ...] = ()
    boxes: tuple[tuple[float, float, float, float], ...] = ()
    second: Callable[[], Image.Image] | None = None

    def images(self) -> list[Image.Image]:
        """All that are shown."""
        return [draw() for draw in (self.image, self.second) if draw]


def drawing_questions(count: int, seed: int = 0) -> list[DrawingQuestion]:
    """`count` questions, families in turn, each about a drawing of its own but the turns of a conversation:
    its third question is also asked first, so that the two differ in what was said before alone."""
    found = []
    for i in range(count):
        family, made, attempt = DRAWING_FAMILIES[i % len(DRAWING_FAMILIES)], None, 0
        drawing = i - TURNS.index(family) if family in TURNS else i
        while made is None:
            number = HELDOUT_SEED + (seed << 32) + (1 << 31) + drawing * 1000 + attempt
            made, attempt = _question(family, number), attempt + 1
        found.append(made)
    return found


def _question(family: str, number: int) -> DrawingQuestion | None:
    rng = random.Random(number)
    scene = sample_drawing(rng, looks.HELDOUT, 1.0, random_aspect(rng), plain=0.0)
    kind, _, other = family.partition(", ")
    if kind == "outside image":
        aspect = random_aspect(rng)
        asked = ask(scene, rng, rng.choice(FAMILIES)) or QA("", "What is in the picture?", "")
        refused = QA(family, asked.question, REFUSAL)
        return DrawingQuestion(family, refused, lambda: _outside(number, aspect, other), number)
    if other in (f"any {name}" for name in _TURNED):
        return _turned(family, other.removeprefix("any "), number)
    if family in ("of one of two images", "of two images"):
        return _of_two(family, scene, number)
    if other and not drawable(scene):
        return None
    if other and kind == "word" and not _large_words(scene):
        return None
    earlier: list[QA] = []
    if family in TURNS:
        earlier, last = _follow_up(scene, rng), ask(scene, rng, rng.choice(FAMILIES))
        if not earlier or last is None:
            return None
        at = TURNS.index(family)
        qa: QA | None = earlier[1] if at == 1 else last
        earlier = earlier[:at]
    elif family == "outside question":
        qa = QA(family, ask_outside(rng, looks.HELDOUT), NOT_UNDERSTOOD)
    elif kind in ("box", "box at 0.5", "boxes", "point"):
        qa = ask_place(scene, rng)
        wanted = "point_2d" if kind == "point" else "bbox_2d"
        alone = qa is not None and len(qa.things) == 1
        qa = qa if qa and wanted in qa.answer and alone == (kind != "boxes") else None
    elif kind == "asked otherwise":
        qa = next(iter(ask_more(scene, rng, 1)), None)
    elif kind == "in JSON":
        asked_first = ask(scene, rng, rng.choice(("count", "colour", "shape", "exists", "digit")))
        qa = as_json(asked_first, rng) if asked_first else None
        qa = qa if qa and qa.question.startswith(asked_first.question + " ") else None  # it says so
    else:
        qa = ask_absent(scene, rng) if kind == "absent" else ask(scene, rng, kind)
    if qa is None:
        return None
    edges = [box_of(thing, scene.aspect) for thing in qa.things]
    boxes = tuple((1000 * x1, 1000 * y1, 1000 * x2, 1000 * y2) for x1, y1, x2, y2 in edges)
    if other:
        draw = rng.choice((render_svg, render_matplotlib))
        return DrawingQuestion(family, qa, lambda: draw(scene, _PIXELS), number)
    return DrawingQuestion(
        family, qa, lambda: paint(scene, random.Random(number)), number, tuple(earlier), boxes
    )


def _follow_up(scene: Scene, rng: random.Random) -> list[QA]:
    """Two turns, of which the second asks by "it" for what the first does not say; [] if none are found."""
    alone = [t for t, phrases in unique_phrases(scene) if t.kind == "shape" and t.name in phrases]
    if alone and rng.random() < 0.5:
        thing = rng.choice(alone)
        first = is_there(thing.name, rng)
        return [first, QA("colour", rng.choice(("What colour is it?", "And its colour?")), thing.colour)]
    turns = follow_up(scene, rng)
    return turns if turns and turns[1].family == "place" else []  # its others can be answered from the first


_PIXELS = 320  # on the shorter side of what other programs draw


def _large_words(scene: Scene) -> bool:
    """Whether the word is printed with at least LETTERS pixels: capitals have about 0.72 of a type's size."""
    word = scene.first("word")
    return word is not None and word.height * _PIXELS >= 0.72 * LETTERS


def _outside(number: int, aspect: float, kind: str = "") -> Image.Image:
    rng = random.Random(number)
    if not kind:
        return weather(outside_image(rng, looks.HELDOUT, aspect), rng)
    longer = looks.image_size(rng)
    size = max(1, round(longer * min(1.0, aspect))), max(1, round(longer * min(1.0, 1 / aspect)))
    return weather(_SIGNS[kind](rng, size, looks.HELDOUT), rng)


def _turned(family: str, name: str, number: int) -> DrawingQuestion:
    """What a large thing is that stands alone, drawn by another program."""
    rng = random.Random(number)
    colour, size = rng.choice(COLOURS), rng.uniform(0.3, 0.7)
    room = REACH * size + 0.02
    x, y = (rng.uniform(room, 1 - room) if room < 0.5 else 0.5 for _ in range(2))
    thing = Thing("shape", name, colour, x, y, size, rgb=looks.colour(rng, colour, looks.HELDOUT))
    scene = one_thing(thing, rng, looks.HELDOUT)
    qa = QA("shape", rng.choice(TEMPLATES["shape"]).format(t=colour), name)
    draw = rng.choice((render_svg, render_matplotlib))
    return DrawingQuestion(family, qa, lambda: draw(scene, _PIXELS), number)


def _of_two(family: str, scene: Scene, number: int) -> DrawingQuestion | None:
    """About one of two drawings, or about both."""
    rng = random.Random(f"{number}:two")
    scenes = scene, sample_drawing(rng, looks.HELDOUT, 1.0, random_aspect(rng), plain=0.0)
    qa = ask_both(scenes, rng) if family == "of two images" else ask_of_one(scenes, rng, FAMILIES)
    first, second = (
        partial(lambda which, i: paint(which, random.Random(f"{number}:{i}")), one, i)
        for i, one in enumerate(scenes)
    )
    return DrawingQuestion(family, qa, first, number, second=second) if qa else None
