"""Drawings as strangers make them: scenes in any colours, fonts, strokes, sizes and shapes."""

from __future__ import annotations

import io
import math
import random
from dataclasses import dataclass, replace

from PIL import Image, ImageFilter

from recipes.world import looks
from recipes.world.faces import face
from recipes.world.forms import Outline, random_fill, random_form
from recipes.world.painting import render, stroke_mask
from recipes.world.scene import Thing, in_any_look
from shapes import sampling
from shapes.drawing import word_mask
from shapes.world import COLOURS, DIGITS, MAX_THINGS, REACH, SHAPES, Scene

_SMALLEST = {"word": 0.042, "digit": 0.09}  # heights, as shares of the longer side
_SMALLEST_SHAPE = 0.07  # diameter
_THINNEST = 0.005  # line in place of a filled shape
_ROUNDEST = 0.8  # width over height of a printed zero: a rounder one would be a circle
_ALIKE = 0.25  # share of training's drawings in any look with shapes of one colour or kind, or all but one
_LEGIBLE = 7  # pixels of a word's height: nobody reads less


def sample_drawing(
    rng: random.Random,
    split: str = "train",
    difficulty: float = 1.0,
    aspect: float = 1.0,
    plain: float = 0.5,
) -> Scene:
    """A scene of this width over height, in looks of the split. `plain` is the share of those that look as
    `sampling.sample_scene` has them."""
    if rng.random() < plain:
        return replace(in_any_look(sampling.sample_scene(rng, split, difficulty)), aspect=aspect)
    shrink = rng.uniform(1 - 0.6 * difficulty, 1.0) if rng.random() < 0.6 else 1.0
    scene = in_any_look(sampling.sample_scene(rng, split, difficulty, makers=(_random_word, _random_digit)))
    if split == looks.TRAIN and rng.random() < _ALIKE:
        scene = replace(scene, things=tuple(_alike(list(scene.things), rng)))
    one_look = rng.random() < 0.6  # most people draw a picture with one kind of pen
    look = _look(rng)
    things = []
    for thing in _beside(list(scene.things), rng):
        rgb = looks.colour(rng, thing.colour, split)
        if thing.kind != "shape":
            least = _SMALLEST[thing.kind] * max(aspect, 1 / aspect)
            by = max(min(1.0, least / thing.height), shrink)
            things.append(
                replace(
                    thing, rgb=rgb, size=thing.size * by, width=thing.width * by, height=thing.height * by
                )
            )
            continue
        sized = replace(thing, rgb=rgb, size=max(_SMALLEST_SHAPE, thing.size * shrink))
        things.append(_dressed(sized, look if one_look else _look(rng), rng, split, difficulty))
    return _on_ground(things, rng, split, aspect)


def _beside(things: list[Thing], rng: random.Random) -> list[Thing]:
    """A word or a digit, sometimes in the colour of a shape that it does not touch; and a zero, mostly beside
    a circle, often in its colour: what is told apart by more than its colour is learnt from these."""
    shapes = [i for i, t in enumerate(things) if t.kind == "shape"]
    for i, thing in enumerate(things):
        if thing.kind == "shape" or not shapes:
            continue
        near = rng.choice(shapes)
        if thing.name == "0" and rng.random() < 0.7:
            things[near] = replace(things[near], name="circle", angle=0.0)
        other = things[near]
        apart = math.hypot(thing.x - other.x, thing.y - other.y)
        reach = REACH * other.size + math.hypot(thing.width, thing.height) / 2
        if apart > reach and rng.random() < 0.5:
            things[i] = replace(thing, colour=other.colour)
    return things


def _alike(things: list[Thing], rng: random.Random) -> list[Thing]:
    """The same things, their shapes of one colour, of one kind or both; often one of them as it was."""
    shapes = [i for i, t in enumerate(things) if t.kind == "shape"]
    if not shapes:
        return things
    model, kept = things[rng.choice(shapes)], rng.choice(shapes) if rng.random() < 0.4 else None
    which = rng.random()
    of_one_colour, of_one_kind = which < 0.5 or which > 0.9, which >= 0.5
    for i in shapes:
        if i != kept:
            colour = model.colour if of_one_colour else things[i].colour
            things[i] = replace(things[i], colour=colour, name=model.name if of_one_kind else things[i].name)
    return things


def sample_rows(rng: random.Random, split: str = "train", aspect: float = 1.0) -> Scene:
    """Two to eight shapes of few kinds, in one row or two along the longer side, in training three as well:
    as people draw what is to be counted."""
    count = rng.randint(2, MAX_THINGS)
    rows = 2 if count >= 4 and rng.random() < 0.3 else 1
    if split == looks.TRAIN and count >= 4 and rng.random() < 0.4:
        rows = 3 if count >= 6 and rng.random() < 0.4 else 2
    columns = -(-count // rows)
    longer, wide = max(aspect, 1 / aspect), aspect > 1 or (aspect == 1 and rng.random() < 0.5)
    most = min(0.45, 0.95 * min(longer / columns, 1 / rows) / (2 * REACH))
    size = max(_SMALLEST_SHAPE, most * rng.uniform(0.55, 1.0))
    names = rng.sample(SHAPES, rng.choice((1, 1, 2, 3)))
    colours = rng.sample(COLOURS, rng.choice((1, 1, 2, 3)))
    look, alike, middle = _look(rng), rng.random() < 0.7, rng.uniform(REACH * size, 1 - REACH * size)
    things = []
    for i in range(count):
        own = size if alike else max(_SMALLEST_SHAPE, size * rng.uniform(0.7, 1.0))
        room = longer / columns - 2 * REACH * own  # between this one and its neighbours
        along = (i % columns + 0.5) / columns + rng.uniform(-0.3, 0.3) * room / longer
        across = (i // columns + 0.5) / rows if rows > 1 else middle
        x, y = (along, across) if wide else (across, along)
        colour = rng.choice(colours)
        rgb = looks.colour(rng, colour, split)
        thing = Thing("shape", rng.choice(names), colour, x, y, own, 0.0, rgb)
        things.append(_dressed(thing, look, rng, split))
    return _on_ground(things, rng, split, aspect)


def sample_words(rng: random.Random, split: str = "train", aspect: float = 1.0) -> Scene:
    """Nothing but one to eight words, or fewer where they find no place: to learn to read from."""
    count = rng.choice((1, 1, 2, 3, 4, 5, 6, 7, 8))
    makers = [lambda shrink: _random_word(rng, 4 if count < 3 else 8, split, shrink, letters=0.5)] * count
    placed = sampling.place_all(rng, makers)
    least = _SMALLEST["word"] * max(aspect, 1 / aspect)
    shrink = rng.uniform(0.5, 1.0)
    things = []
    for t in placed:
        by = max(min(1.0, least / t.height), shrink)
        rgb = looks.colour(rng, t.colour, split)
        things.append(replace(t, rgb=rgb, size=t.size * by, width=t.width * by, height=t.height * by))
    return _on_ground(things, rng, split, aspect)


def one_thing(thing: Thing, rng: random.Random, split: str = "train") -> Scene:
    """A scene of this shape alone, in any look and form."""
    return _on_ground([_dressed(thing, _look(rng), rng, split)], rng, split, 1.0)


def _on_ground(things: list[Thing], rng: random.Random, split: str, aspect: float) -> Scene:
    """A scene of these things, on a ground from which all of them stand out."""
    back = looks.background(rng, [thing.rgb for thing in things])
    return Scene(tuple(things), back, split, aspect, rng.choice((1, 2, 2, 3)))


@dataclass(frozen=True)
class _Look:
    """How shapes are drawn: `line` is its thickness in diameters, in place of a flat colour, or 0."""

    line: float = 0.0
    border: bool = False
    fill: bool = False
    shadow: bool = False
    fade: bool = False
    by_hand: bool = False


def _look(rng: random.Random) -> _Look:
    which = rng.random()
    if which < 0.42:
        return _Look(shadow=rng.random() < 0.12)
    if which < 0.55:
        return _Look(border=True)
    if which < 0.62:
        return _Look(fade=True)
    line = math.exp(rng.uniform(math.log(0.012), math.log(0.16)))
    return _Look(line=line, fill=which > 0.86, by_hand=rng.random() < 0.2)


def _dressed(thing: Thing, look: _Look, rng: random.Random, split: str, difficulty: float = 1.0) -> Thing:
    """A shape in a look, in one of its forms and at any angle that keeps its name."""
    outline: Outline = ()
    angle = 0.0
    if thing.name != "circle":
        outline, angle = random_form(rng, thing.name, split != looks.TRAIN)
        if rng.random() > difficulty:
            angle = 0.0
    dark = tuple(c // 2 for c in thing.rgb)
    border = None
    if look.border and thing.colour != "black":
        border = rng.choice(((0, 0, 0), (0, 0, 0), dark))
    paler = tuple(round(c + 0.35 * (255 - c)) for c in thing.rgb)
    return replace(
        thing, angle=angle, outline=outline, border=border,
        hollow=max(_THINNEST, look.line * thing.size) if look.line else 0.0,
        fill=random_fill(rng, split != looks.TRAIN) if look.fill else (),
        shadow=rng.uniform(0.03, 0.1) if look.shadow else 0.0,
        tint=rng.choice((paler, tuple(round(0.7 * c) for c in thing.rgb))) if look.fade else None,
        wobble=rng.uniform(0.006, 0.02) if look.by_hand else 0.0,
    )  # fmt: skip


def _random_word(rng, n, split, shrink, letters=0.4) -> Thing:
    name, which = looks.word(rng, letters, split), rng.random()
    font, colour = face(rng, split), "black" if rng.random() < 0.5 else rng.choice(COLOURS)
    case = {"upper": which < 0.3, "title": which > 0.75}
    mask = word_mask(Thing("word", name, colour, 0, 0, 0, **case).text, font)
    height = rng.uniform(0.08, 0.3 if n <= 4 else 0.16) * max(0.6, shrink)
    width = min(0.92, height * mask.width / mask.height)
    stretch = math.exp(rng.uniform(-0.3, 0.3)) if split == looks.TRAIN and rng.random() < 0.4 else 1.0
    tall = width * mask.height / mask.width * stretch
    return _printed("word", name, colour, width, tall, rng, font=font, **case)


def _random_digit(rng, n, split, shrink) -> Thing:
    which = rng.random()
    if which < 0.4:
        return sampling.random_digit(rng, n, shrink, split)
    name, colour = rng.choice((*DIGITS, "0", "0")), "black" if rng.random() < 0.5 else rng.choice(COLOURS)
    # Half of the seeds are for training, the other half for what is held out.
    seed = rng.randrange(1 << 20) * 2 + (split != looks.TRAIN) if which < 0.7 else -1
    font = face(rng, split) if seed < 0 else ""
    while font and name == "0" and (zero := word_mask(name, font)).width > _ROUNDEST * zero.height:
        font = face(rng, split)
    mask = word_mask(name, font) if font else stroke_mask(name, seed)
    height = rng.uniform(0.12, 0.4 if n <= 4 else 0.28) * max(0.6, shrink)
    return _printed(
        "digit", name, colour, height * mask.width / mask.height, height, rng, font=font, strokes=seed
    )


def _printed(kind, name, colour, width, height, rng, **how) -> Thing:
    x = rng.uniform(width / 2 + 0.02, 0.98 - width / 2)
    y = rng.uniform(height / 2 + 0.02, 0.98 - height / 2)
    return Thing(kind, name, colour, x, y, max(width, height), 0.0, (0, 0, 0), width, height, **how)


def paint(scene: Scene, rng: random.Random, smallest: int = looks.SMALLEST_IMAGE) -> Image.Image:
    """The scene as an image of any size, its longer side of `smallest` pixels or more, perhaps blurred or
    through JPEG."""
    shorter = looks.image_size(rng, smallest) / max(scene.aspect, 1 / scene.aspect)
    legible = max((_LEGIBLE / t.height for t in scene.things if t.kind == "word"), default=0)
    return weather(render(scene, max(24, round(max(shorter, legible)))), rng)


def random_aspect(rng: random.Random) -> float:
    """Width over height of a drawing: often a square, at most 3 : 1 either way."""
    return 1.0 if rng.random() < 0.4 else math.exp(rng.uniform(-1, 1) * math.log(3))


def weather(image: Image.Image, rng: random.Random) -> Image.Image:
    """What happens to images on their way: a little blur, JPEG, neither or both."""
    if rng.random() < 0.15:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 0.003 * max(image.size) + 0.2)))
    if rng.random() < 0.3:
        stored = io.BytesIO()
        image.save(stored, "JPEG", quality=rng.randint(35, 95))
        image = Image.open(stored).convert("RGB")
    return image
