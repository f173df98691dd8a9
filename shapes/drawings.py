"""Drawings as strangers make them: scenes in any colours, fonts, strokes, sizes and shapes."""

from __future__ import annotations

import io
import math
import random
from dataclasses import replace

from PIL import Image, ImageFilter

from shapes import looks, sampling
from shapes.drawing import render, stroke_mask, word_mask
from shapes.world import COLOURS, DIGITS, MAX_THINGS, REACH, SHAPES, Scene, Thing

_TURNING = {"square": 25, "triangle": 25, "star": 36, "cross": 20, "diamond": 10}  # degrees to either side
_SMALLEST = {"word": 0.042, "digit": 0.09}  # heights, as shares of the longer side
_SMALLEST_SHAPE = 0.07  # diameter
_LEGIBLE = 7  # pixels of a word's height: nobody reads less


def sample_drawing(
    rng: random.Random,
    split: str = "train",
    difficulty: float = 1.0,
    aspect: float = 1.0,
    plain: float = 0.25,
) -> Scene:
    """A scene of this width over height, in looks of the split. `plain` is the share of those that look as
    `sampling.sample_scene` has them."""
    if rng.random() < plain:
        return replace(sampling.sample_scene(rng, split, difficulty), aspect=aspect)
    shrink = rng.uniform(1 - 0.6 * difficulty, 1.0) if rng.random() < 0.6 else 1.0
    scene = sampling.sample_scene(rng, split, difficulty, makers=(_random_word, _random_digit))
    one_look = rng.random() < 0.6  # most people draw a picture with one kind of pen
    look = _look(rng)
    things = []
    for thing in scene.things:
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
        things.append(_dressed(sized, look if one_look else _look(rng), rng, difficulty))
    return _on_ground(things, rng, split, aspect)


def sample_rows(rng: random.Random, split: str = "train", aspect: float = 1.0) -> Scene:
    """Two to eight shapes of few kinds, in one row or two along the longer side: as people draw what is to be
    counted."""
    count = rng.randint(2, MAX_THINGS)
    rows = 2 if count >= 4 and rng.random() < 0.3 else 1
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
        things.append(_dressed(thing, look, rng))
    return _on_ground(things, rng, split, aspect)


def sample_words(rng: random.Random, split: str = "train", aspect: float = 1.0) -> Scene:
    """Nothing but three to eight words, or fewer where they find no place: to learn to read from."""
    count = rng.randint(3, 8)
    makers = [lambda shrink: _random_word(rng, 8, split, shrink, letters=0.6)] * count
    placed = sampling.place_all(rng, makers)
    least = _SMALLEST["word"] * max(aspect, 1 / aspect)
    shrink = rng.uniform(0.5, 1.0)
    things = []
    for t in placed:
        by = max(min(1.0, least / t.height), shrink)
        rgb = looks.colour(rng, t.colour, split)
        things.append(replace(t, rgb=rgb, size=t.size * by, width=t.width * by, height=t.height * by))
    return _on_ground(things, rng, split, aspect)


def _on_ground(things: list[Thing], rng: random.Random, split: str, aspect: float) -> Scene:
    """A scene of these things, on a ground from which all of them stand out."""
    back = looks.background(rng, [thing.rgb for thing in things])
    return Scene(tuple(things), back, split, aspect, rng.choice((1, 2, 2, 3)))


def _dressed(thing: Thing, look: tuple[float, bool], rng: random.Random, difficulty: float = 1.0) -> Thing:
    """A shape in a `_look`, perhaps turned, in one of its forms."""
    hollow, border = look
    turn = _TURNING.get(thing.name, 0) * difficulty
    angle = rng.uniform(-turn, turn) if rng.random() < 0.5 else 0.0
    black = (0, 0, 0) if thing.colour != "black" else None
    return replace(
        thing, angle=angle, hollow=max(0.012, hollow * thing.size) if hollow else 0.0,
        border=black if border else None, form=rng.uniform(-1, 1),
    )  # fmt: skip


def _look(rng: random.Random) -> tuple[float, bool]:
    """(thickness of a line in place of a filled shape, in diameters, or 0; whether it has a border)"""
    which = rng.random()
    return (rng.uniform(0.05, 0.16), False) if which < 0.3 else (0.0, which < 0.5)


def _random_word(rng, n, split, shrink, letters=0.4) -> Thing:
    name, upper = looks.word(rng, letters), rng.random() < 0.4
    font, colour = rng.choice(looks.fonts(split)), "black" if rng.random() < 0.5 else rng.choice(COLOURS)
    mask = word_mask(name.upper() if upper else name, font)
    height = rng.uniform(0.08, 0.3 if n <= 4 else 0.16) * max(0.6, shrink)
    width = min(0.92, height * mask.width / mask.height)
    return _printed(
        "word", name, colour, width, width * mask.height / mask.width, rng, font=font, upper=upper
    )


def _random_digit(rng, n, split, shrink) -> Thing:
    which = rng.random()
    if which < 0.4:
        return sampling.random_digit(rng, n, shrink, split)
    name, colour = rng.choice(DIGITS), "black" if rng.random() < 0.5 else rng.choice(COLOURS)
    # Half of the seeds are for training, the other half for what is held out.
    seed = rng.randrange(1 << 20) * 2 + (split != looks.TRAIN) if which < 0.7 else -1
    font = rng.choice(looks.fonts(split)) if seed < 0 else ""
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
