"""Random scenes: what is in them, how large, where, on which background."""

from __future__ import annotations

import math
from functools import partial

from shapes.drawing import digit_images, digit_mask, word_mask
from shapes.world import (
    COLOURS,
    MAX_COVER,
    MAX_TEXT_COVER,
    MIN_CENTRES,
    REACH,
    RGB,
    SHAPES,
    TONES,
    WORDS,
    Background,
    Scene,
    Thing,
)


def sample_scene(rng, split="train", difficulty=1.0, makers=None):
    """A random scene. difficulty 0..1 goes from 1-3 large things far apart to the full world.

    makers: of a word and of a digit, in place of plain ones: (rng, things in all, split, shrink) -> Thing.
    """
    if not 0.0 <= difficulty <= 1.0:
        raise ValueError(f"expected difficulty in 0..1, got {difficulty}")
    has_word, has_digit = rng.random() < 0.4, rng.random() < 0.4
    n = max(rng.randint(1, 3 + round(5 * difficulty)), has_word + has_digit)
    shapes, colours = _palette(rng)
    placed, cover = [], []
    word, digit = makers or (
        lambda rng, n, split, k: _random_word(rng, n, k),
        lambda rng, n, split, k: random_digit(rng, n, k, split),
    )
    if has_word:
        _place(rng, placed, cover, difficulty, lambda k: word(rng, n, split, k))
    if has_digit:
        _place(rng, placed, cover, difficulty, lambda k: digit(rng, n, split, k))
    low, high = _size_range(n, difficulty)
    sizes = sorted((rng.uniform(low, high) for _ in range(n - has_word - has_digit)), reverse=True)
    for size in sizes:  # the largest first: they are the hardest to place
        name, colour = rng.choice(shapes), rng.choice(colours)
        angle = rng.uniform(-12, 12) if name in ("square", "triangle", "star") else 0.0
        rgb = _jitter(rng, colour)
        draw = partial(_random_shape, rng, name, colour, (max(0.16, 0.8 * low), size), angle, rgb)
        _place(rng, placed, cover, difficulty, draw)
    rng.shuffle(placed)
    return Scene(tuple(placed), _random_background(rng, [t.rgb for t in placed]), split)


def place_all(rng, makers, difficulty=1.0):
    """The things of makers (shrink -> Thing), in their order, that find a place beside the others."""
    placed, cover = [], []
    for make in makers:
        _place(rng, placed, cover, difficulty, make)
    return placed


def _palette(rng):
    """The shapes and colours of a scene; half the time few of them, so that repeats are common."""
    shapes, colours = SHAPES, COLOURS
    if rng.random() < 0.5:
        mode = rng.randrange(3)
        if mode != 1:
            shapes = rng.sample(SHAPES, rng.randint(2, 3))
        if mode != 0:
            colours = rng.sample(COLOURS, rng.randint(2, 4))
    return shapes, colours


def _size_range(n, difficulty):
    high = 0.42 if n <= 4 else 0.32 if n <= 6 else 0.26
    low = 0.16 + 0.10 * (1 - difficulty) if n <= 4 else 0.16
    return low, high


def _jitter(rng, colour):
    return tuple(min(255, max(0, c + rng.randint(-9, 9))) for c in RGB[colour])


def _ink_colour(rng):
    return "black" if rng.random() < 0.3 else rng.choice(COLOURS)


def _random_shape(rng, name, colour, sizes, angle, rgb, shrink):
    """sizes: (the smallest allowed, the one wished for)."""
    size = max(sizes[0], sizes[1] * shrink)
    margin = REACH * size + 0.01
    x, y = rng.uniform(margin, 1 - margin), rng.uniform(margin, 1 - margin)
    return Thing("shape", name, colour, x, y, size, angle, rgb)


def _random_word(rng, n, shrink):
    name, upper, colour = rng.choice(WORDS), rng.random() < 0.5, _ink_colour(rng)
    mask = word_mask(name.upper() if upper else name)
    aspect = mask.width / mask.height
    low = 0.45 + 0.09 * (len(name) - 3)
    high = max(low + 0.02, min(0.9, 0.36 * aspect) * shrink if n <= 4 else low + 0.1)
    width = rng.uniform(low, high)
    height = width / aspect
    x = rng.uniform(width / 2 + 0.02, 0.98 - width / 2)
    y = rng.uniform(height / 2 + 0.03, 0.97 - height / 2)
    return Thing("word", name, colour, x, y, width, 0.0, _jitter(rng, colour), width, height, upper)


def random_digit(rng, n, shrink, split):
    """A handwritten digit of UCI's."""
    labels = digit_images(split)[1]
    index, colour = rng.randrange(len(labels)), _ink_colour(rng)
    size = max(0.3, rng.uniform(0.3, 0.5 if n <= 4 else 0.38) * shrink)
    _, w, h = digit_mask(split, index)
    width, height = w * size / 8, h * size / 8
    x_margin, y_margin = width / 2 + 0.03, height / 2 + 0.03
    x, y = rng.uniform(x_margin, 1 - x_margin), rng.uniform(y_margin, 1 - y_margin)
    rgb, name = _jitter(rng, colour), str(labels[index])
    return Thing("digit", name, colour, x, y, size, 0.0, rgb, width, height, digit_index=index)


def _place(rng, placed, cover, difficulty, draw):
    """Add the first candidate of draw(shrink) that fits; after many failures, leave it out."""
    shared = difficulty > 0.5 or rng.random() < difficulty  # may it overlap others at all?
    gap = 0.05 * (1 - difficulty)
    for attempt in range(100):
        thing = draw(1.0 if attempt < 15 else 0.8 if attempt < 40 else 0.6)
        extra = _covers(thing, placed, gap, shared)
        if extra is None:
            continue
        own = sum(mine for mine, _ in extra)
        total = [c + theirs for c, (_, theirs) in zip(cover, extra)]
        if all(c <= _limit(t) for c, t in zip([*total, own], [*placed, thing])):
            cover[:] = [*total, own]
            placed.append(thing)
            return


def _limit(thing):
    return MAX_COVER if thing.kind == "shape" else MAX_TEXT_COVER


def _covers(thing, placed, gap, shared):
    """[(share of thing, share of the other) that overlaps], or None where they come too close."""
    extra = []
    for other in placed:
        distance = math.hypot(thing.x - other.x, thing.y - other.y)
        if distance < MIN_CENTRES:
            return None
        alike = thing.colour == other.colour  # these would melt into one blob
        if thing.kind == other.kind == "shape":
            reach = REACH * thing.size, REACH * other.size
            mine, theirs = _disc_overlap(distance - gap - 0.02 * alike, *reach)
        else:
            mine, theirs = _box_overlap(thing, other, gap)
        if mine and (
            alike or not shared or max(mine, theirs) > MAX_COVER or "shape" not in (thing.kind, other.kind)
        ):
            return None
        extra.append((mine, theirs))
    return extra


def _disc_overlap(distance, a, b):
    """Shares of two discs (radii a, b) that lie in both."""
    if distance >= a + b:
        return 0.0, 0.0
    if distance <= abs(a - b):
        return 1.0, 1.0
    p = (distance * distance + a * a - b * b) / (2 * distance)
    q = distance - p
    area = a * a * math.acos(p / a) + b * b * math.acos(q / b) - distance * math.sqrt(max(0.0, a * a - p * p))
    return area / (math.pi * a * a), area / (math.pi * b * b)


def _extent(thing):
    """Width and height of the bounding box."""
    if thing.kind == "shape":
        return 2 * REACH * thing.size, 2 * REACH * thing.size
    return thing.width, thing.height


def _box_overlap(one, two, gap):
    """Shares of two bounding boxes that lie in both."""
    (w1, h1), (w2, h2) = _extent(one), _extent(two)
    dx = (w1 + w2) / 2 + gap - abs(one.x - two.x)
    dy = (h1 + h2) / 2 + gap - abs(one.y - two.y)
    if dx <= 0 or dy <= 0:
        return 0.0, 0.0
    area = min(dx, w1, w2) * min(dy, h1, h2)
    return area / (w1 * h1), area / (w2 * h2)


def contrast(a, b) -> float:
    """A distance of two RGB colours in which blue, which the eye hardly sees, counts less."""
    return math.sqrt((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2 + 0.36 * (a[2] - b[2]) ** 2)


def _random_background(rng, inks):
    """A background that contrasts with every ink in use."""
    tones = [t for t in TONES if all(contrast(t, ink) >= 105 for ink in inks)] or [TONES[0]]
    kind = rng.choice(("plain", "gradient", "stripes", "noise"))
    first = rng.choice(tones)
    if kind == "plain":
        second = first
    elif kind == "gradient":
        second = rng.choice(tones)
    else:
        second = tuple(c - rng.randint(8, 16) for c in first)
    return Background(kind, first, second, rng.randrange(8))
