"""The built-in picture-question world: drawn scenes with questions and answers.

A scene holds one to eight things: coloured shapes, at most one printed word and at
most one handwritten digit (UCI digits, split before anything is drawn). Everything
stays legible when the picture is reduced to 64 px. Nothing is downloaded, and all
randomness comes from the `random.Random` that is passed in.

    python -m data.shapes --out /tmp/shapes --n 8      # write pictures, print questions
"""
import argparse
import math
import random
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black")
DIGITS = tuple("0123456789")
WORDS = tuple("apple bear bird boat book box bread cake cat clock cup dog door duck egg fish "
              "frog hand house jam key king lamp leaf milk moon pig queen rain shoe snow sun "
              "tent tree wolf zebra".split())
FAMILIES = ("count", "colour", "shape", "exists", "position", "size", "word", "digit",
            "compare", "describe")
KINDS = ("background",) + SHAPES + DIGITS + WORDS  # kind_class indexes this
NUM_KINDS = len(KINDS)
KIND_CLASS = {name: i for i, name in enumerate(KINDS)}
HELDOUT_SEED = 1 << 40  # training scenes must use seeds below this one

RGB = {"red": (212, 28, 32), "orange": (250, 136, 8), "yellow": (242, 214, 16),
       "green": (28, 146, 58), "blue": (28, 78, 214), "purple": (116, 36, 160),
       "pink": (250, 112, 190), "black": (22, 22, 24)}
TONES = ((250, 250, 250), (250, 244, 228), (224, 224, 224), (192, 192, 194), (212, 226, 244),
         (214, 238, 216), (248, 224, 232), (230, 222, 246), (224, 208, 186), (198, 228, 226),
         (206, 199, 192), (160, 168, 176), (162, 182, 164), (236, 236, 200))
MAX_THINGS = 8
REACH = 0.56          # bounding radius of a shape, in diameters
BIG = 0.27            # from this diameter on a shape is called big
MIN_CENTRES = 0.11    # the closest two centres may come
MAX_COVER = 0.22      # most of a shape's bounding disc that others may share
MAX_TEXT_COVER = 0.06  # most of a word's or digit's box that others may share


@dataclass(frozen=True)
class Thing:
    """One object. Lengths are fractions of the picture's side, (x, y) the centre.

    width, height: the bounding box of a word or of a digit's ink (0 for shapes).
    """
    kind: str             # shape | word | digit
    name: str             # shape name, word in lower case, or digit character
    colour: str
    x: float
    y: float
    size: float           # diameter of a shape, width of a word, side of a digit's 8x8 image
    angle: float = 0.0    # degrees
    rgb: tuple = (0, 0, 0)
    width: float = 0.0
    height: float = 0.0
    upper: bool = False
    digit_index: int = -1  # into digit_images(scene.split)


@dataclass(frozen=True)
class Background:
    """Two tones mixed by a mask: plain, gradient, stripes or noise."""
    kind: str = "plain"
    first: tuple = (250, 244, 228)
    second: tuple = (250, 244, 228)
    variant: int = 0


@dataclass(frozen=True)
class Scene:
    """Things in drawing order (later ones on top), a background and the digit split."""
    things: tuple
    background: Background = Background()
    split: str = "train"

    def __post_init__(self):
        if not 1 <= len(self.things) <= MAX_THINGS:
            raise ValueError(f"expected 1 to {MAX_THINGS} things, got {len(self.things)}")

    def shapes(self):
        return [t for t in self.things if t.kind == "shape"]

    def first(self, kind):
        """The word or the digit, or None."""
        return next((t for t in self.things if t.kind == kind), None)


@dataclass(frozen=True)
class QA:
    """A question with its canonical answer and other answers that count as right."""
    family: str
    question: str
    answer: str
    accept: tuple = ()


# ---------------------------------------------------------------- words and digits

@lru_cache(maxsize=None)
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
def _digit_mask(split, index):
    """Ink of one digit: (alpha with a border of one empty pixel, ink width, ink height)."""
    image = digit_images(split)[0][index]
    rows, columns = np.nonzero(image.max(1) > 60)[0], np.nonzero(image.max(0) > 60)[0]
    ink = image[rows[0]:rows[-1] + 1, columns[0]:columns[-1] + 1]
    ink = np.minimum(ink.astype(np.int32) * 5 // 4, 255).astype(np.uint8)
    return Image.fromarray(np.pad(ink, 1)), ink.shape[1], ink.shape[0]


@lru_cache(maxsize=None)
def _font():
    return ImageFont.load_default(96)


@lru_cache(maxsize=None)
def _word_mask(text):
    """Ink of a printed word as an alpha image cropped to it."""
    mask = Image.new("L", (700, 180))
    ImageDraw.Draw(mask).text((20, 20), text, font=_font(), fill=255, stroke_width=2, stroke_fill=255)
    return mask.crop(mask.getbbox())


def _ink(thing, split):
    """(alpha image, width, height) to draw a word or digit with, in fractions of the side."""
    if thing.kind == "word":
        return _word_mask(thing.name.upper() if thing.upper else thing.name), thing.width, thing.height
    mask, w, h = _digit_mask(split, thing.digit_index)
    return mask, thing.width * (w + 2) / w, thing.height * (h + 2) / h


# ---------------------------------------------------------------- sampling scenes

def sample_scene(rng, split="train", difficulty=1.0):
    """A random scene. difficulty 0..1 goes from 1-3 large things far apart to the full world."""
    if not 0.0 <= difficulty <= 1.0:
        raise ValueError(f"expected difficulty in 0..1, got {difficulty}")
    has_word, has_digit = rng.random() < 0.4, rng.random() < 0.4
    n = max(rng.randint(1, 3 + round(5 * difficulty)), has_word + has_digit)
    shapes, colours = _palette(rng)
    placed, cover = [], []
    if has_word:
        _place(rng, placed, cover, difficulty, lambda k: _random_word(rng, n, k))
    if has_digit:
        _place(rng, placed, cover, difficulty, lambda k: _random_digit(rng, n, k, split))
    low, high = _size_range(n, difficulty)
    sizes = sorted((rng.uniform(low, high) for _ in range(n - has_word - has_digit)), reverse=True)
    for size in sizes:  # the largest first: they are the hardest to place
        name, colour = rng.choice(shapes), rng.choice(colours)
        angle = rng.uniform(-12, 12) if name in ("square", "triangle", "star") else 0.0
        rgb = _jitter(rng, colour)
        _place(rng, placed, cover, difficulty,
               lambda k: _random_shape(rng, name, colour, max(0.16, 0.8 * low, size * k), angle, rgb))
    rng.shuffle(placed)
    return Scene(tuple(placed), _random_background(rng, [t.rgb for t in placed]), split)


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


def _random_shape(rng, name, colour, size, angle, rgb):
    margin = REACH * size + 0.01
    return Thing("shape", name, colour, rng.uniform(margin, 1 - margin), rng.uniform(margin, 1 - margin),
                 size, angle, rgb)


def _random_word(rng, n, shrink):
    name, upper, colour = rng.choice(WORDS), rng.random() < 0.5, _ink_colour(rng)
    mask = _word_mask(name.upper() if upper else name)
    aspect = mask.width / mask.height
    low = 0.45 + 0.09 * (len(name) - 3)
    high = max(low + 0.02, min(0.9, 0.36 * aspect) * shrink if n <= 4 else low + 0.1)
    width = rng.uniform(low, high)
    height = width / aspect
    return Thing("word", name, colour, rng.uniform(width / 2 + 0.02, 0.98 - width / 2),
                 rng.uniform(height / 2 + 0.03, 0.97 - height / 2), width, 0.0, _jitter(rng, colour),
                 width, height, upper)


def _random_digit(rng, n, shrink, split):
    labels = digit_images(split)[1]
    index, colour = rng.randrange(len(labels)), _ink_colour(rng)
    size = max(0.3, rng.uniform(0.3, 0.5 if n <= 4 else 0.38) * shrink)
    _, w, h = _digit_mask(split, index)
    width, height = w * size / 8, h * size / 8
    x_margin, y_margin = width / 2 + 0.03, height / 2 + 0.03
    return Thing("digit", str(labels[index]), colour, rng.uniform(x_margin, 1 - x_margin),
                 rng.uniform(y_margin, 1 - y_margin), size, 0.0, _jitter(rng, colour),
                 width, height, False, index)


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
        if all(c <= _limit(t) for c, t in zip(total + [own], placed + [thing])):
            cover[:] = total + [own]
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
        if mine and (alike or not shared or max(mine, theirs) > MAX_COVER
                     or "shape" not in (thing.kind, other.kind)):
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
    area = (a * a * math.acos(p / a) + b * b * math.acos(q / b)
            - distance * math.sqrt(max(0.0, a * a - p * p)))
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


def _random_background(rng, inks):
    """A background that contrasts with every ink in use."""
    tones = [t for t in TONES if all(_contrast(t, ink) >= 105 for ink in inks)] or [TONES[0]]
    kind = rng.choice(("plain", "gradient", "stripes", "noise"))
    first = rng.choice(tones)
    if kind == "plain":
        second = first
    elif kind == "gradient":
        second = rng.choice(tones)
    else:
        second = tuple(c - rng.randint(8, 16) for c in first)
    return Background(kind, first, second, rng.randrange(8))


def _contrast(a, b):
    """A distance of two RGB colours in which blue, which the eye hardly sees, counts less."""
    return math.sqrt((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2 + 0.36 * (a[2] - b[2]) ** 2)


# ---------------------------------------------------------------- drawing

@lru_cache(maxsize=None)
def _background_mask(kind, variant):
    """The mask (256, 256) that mixes a background's two tones: three kinds in eight variants."""
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


def _paint_background(background, side):
    if background.kind == "plain":
        return Image.new("RGB", (side, side), background.first)
    mask = _background_mask(background.kind, background.variant)
    mask = mask.resize((side, side), Image.Resampling.BILINEAR)
    first, second = np.array(background.first), np.array(background.second)
    ramp = first + (second - first) * np.linspace(0, 1, 256)[:, None]        # (256, 3)
    mask.putpalette(ramp.round().astype(np.uint8).tobytes())  # a palette mixes faster than a paste
    return mask.convert("RGB")


def _star():
    return [((0.56 if i % 2 == 0 else 0.25) * math.sin(i * math.pi / 5),
             -(0.56 if i % 2 == 0 else 0.25) * math.cos(i * math.pi / 5)) for i in range(10)]


_A, _B = 0.17, 0.5  # half the width and half the length of the cross's arms
OUTLINES = {  # corners around the centre, in diameters
    "square": [(-0.43, -0.43), (0.43, -0.43), (0.43, 0.43), (-0.43, 0.43)],
    "triangle": [(0.0, -0.49), (0.52, 0.43), (-0.52, 0.43)],
    "diamond": [(0.0, -0.56), (0.42, 0.0), (0.0, 0.56), (-0.42, 0.0)],
    "star": _star(),
    "cross": [(-_A, -_B), (_A, -_B), (_A, -_A), (_B, -_A), (_B, _A), (_A, _A), (_A, _B), (-_A, _B),
              (-_A, _A), (-_B, _A), (-_B, -_A), (-_A, -_A)],
}


def _draw_shape(draw, thing, side, fill):
    x, y, d = thing.x * side, thing.y * side, thing.size * side
    if thing.name == "circle":
        draw.ellipse((x - d / 2, y - d / 2, x + d / 2, y + d / 2), fill=fill)
        return
    c, s = d * math.cos(math.radians(thing.angle)), d * math.sin(math.radians(thing.angle))
    draw.polygon([(x + c * u - s * v, y + s * u + c * v) for u, v in OUTLINES[thing.name]], fill=fill)


def _draw_ink(canvas, thing, side, split):
    mask, width, height = _ink(thing, split)
    w, h = max(1, round(width * side)), max(1, round(height * side))
    corner = round(thing.x * side - w / 2), round(thing.y * side - h / 2)
    canvas.paste(thing.rgb, (*corner, corner[0] + w, corner[1] + h),
                 mask.resize((w, h), Image.Resampling.BICUBIC))


def render(scene, size=256):
    """The picture as an RGB image (size, size), drawn at twice the size and reduced."""
    side = 2 * size
    canvas = _paint_background(scene.background, side)
    draw = ImageDraw.Draw(canvas)
    for thing in scene.things:
        if thing.kind == "shape":
            _draw_shape(draw, thing, side, thing.rgb)
        else:
            _draw_ink(canvas, thing, side, scene.split)
    return canvas.reduce(2)


def object_map(scene, side):
    """uint8 (side, side): 0 for background, else 1 + the index of the topmost thing."""
    ids = Image.new("L", (side, side))
    draw = ImageDraw.Draw(ids)
    for i, t in enumerate(scene.things, 1):
        if t.kind == "shape":
            _draw_shape(draw, t, side, i)
        else:
            x, y, w, h = t.x * side, t.y * side, t.width * side / 2, t.height * side / 2
            draw.rectangle((round(x - w), round(y - h), round(x + w) - 1, round(y + h) - 1), fill=i)
    return np.asarray(ids)


def render_with_map(scene, size, grid):
    """(picture, dense float32 (grid*grid, 6)): what each patch, row by row, shows.

    Columns: kind_class (0 background, 1-6 shapes, 7-16 digits, 17- words), colour_class
    (-1 background), dx and dy from the patch's centre to the thing's in patches,
    log(size), and 1 on the patch that holds the thing's centre.
    """
    return render(scene, size), _dense(scene, grid)


@lru_cache(maxsize=16)
def _patch_of_pixel(grid, cell):
    """(pixels,): 16 times the patch that each pixel of the object map lies in."""
    t = np.arange(grid * cell) // cell
    return ((t[:, None] * grid + t) * 16).ravel()


def _dense(scene, grid):
    n, cell = len(scene.things), max(1, round(64 / grid))
    ids = object_map(scene, grid * cell)
    tally = np.bincount(_patch_of_pixel(grid, cell) + ids.ravel(), minlength=grid * grid * 16)
    pixels = tally.reshape(grid * grid, 16)[:, 1:n + 1].T                    # (n, patches)
    x, y = np.array([t.x for t in scene.things]) * grid, np.array([t.y for t in scene.things]) * grid
    home = y.astype(int) * grid + x.astype(int)  # centres lie inside the picture
    owner = np.where(pixels.max(0) >= 0.12 * cell * cell, pixels.argmax(0), -1)
    for i in np.argsort(pixels[np.arange(n), home], kind="stable"):  # where centres share a patch,
        owner[home[i]] = i                                           # the one seen most comes last
    facts = np.array([[KIND_CLASS[t.name], COLOURS.index(t.colour), math.log(t.size)] for t in scene.things])
    dense = np.zeros((grid * grid, 6), np.float32)
    dense[:, 1] = -1
    patch = np.nonzero(owner >= 0)[0]
    who = owner[patch]
    dense[patch, :2] = facts[who, :2]
    dense[patch, 2] = x[who] - (patch % grid + 0.5)
    dense[patch, 3] = y[who] - (patch // grid + 0.5)
    dense[patch, 4] = facts[who, 2]
    dense[home, 5] = 1
    return dense


# ---------------------------------------------------------------- questions

TEMPLATES = {
    "count": ("How many {t} are there?", "How many {t} can you see?", "Count the {t}.",
              "What is the number of {t}?", "How many {t} does the picture show?",
              "Tell me how many {t} you see."),
    "colour": ("What colour is the {t}?", "What color is the {t}?", "Which colour is the {t}?",
               "Tell me the color of the {t}.", "Name the colour of the {t}.",
               "The {t} is what color?"),
    "shape": ("What shape is {t}?", "Which shape is {t}?", "What kind of shape is {t}?",
              "Name the shape that is {t}.", "Tell me which shape is {t}."),
    "exists": ("Is there {t}?", "Is there {t} in the picture?", "Can you see {t}?",
               "Does the picture show {t}?", "Do you see {t} here?", "Does the image contain {t}?"),
    "position": ("Is the {a} {r} the {b}?", "Is the {a} {r} the {b} in this picture?",
                 "Does the {a} lie {r} the {b}?", "Would you say the {a} is {r} the {b}?",
                 "Can you see the {a} {r} the {b}?"),
    "where": ("Where is the {a} relative to the {b}?", "Where is the {a} compared with the {b}?",
              "In which direction is the {a} from the {b}?", "Seen from the {b}, where is the {a}?",
              "Where does the {a} lie, seen from the {b}?"),
    "side": ("Is the {a} {r} the {b}?", "Would you say the {a} is {r} the {b}?",
             "Does the {a} lie {r} the {b}?"),
    "size": ("Is the {a} {r} than the {b}?", "Would you say the {a} is {r} than the {b}?",
             "Does the {a} look {r} than the {b}?"),
    "which": ("Which is {r}, the {a} or the {b}?", "Which one is {r}, the {a} or the {b}?",
              "What is {r}, the {a} or the {b}?"),
    "word": ("What does the word say?", "Which word is written here?", "Read the word.",
             "What is the printed word?", "What word do you see?", "Which word is in the picture?"),
    "digit": ("What is the digit?", "Which digit is written here?", "Read the handwritten digit.",
              "What digit do you see?", "Which number is handwritten in the picture?"),
    "more": ("Are there more {a} than {b}?", "Does the picture show more {a} than {b}?",
             "Can you see more {a} than {b}?", "Do you see more {a} than {b}?"),
    "either": ("Are there more {a} or {b}?", "Which are there more of, {a} or {b}?",
               "Do you see more {a} or {b}?"),
    "equal": ("Are there as many {a} as {b}?", "Is the number of {a} equal to the number of {b}?",
              "Does the picture show as many {a} as {b}?"),
    "describe": ("Describe the picture.", "Describe the image.", "What is in the picture?",
                 "What do you see?", "List everything in the picture.",
                 "Tell me what the picture shows."),
}
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight",
                "nine")
ARTICLE = {"orange": "an"}
PHRASE = {"left": "left of", "right": "right of", "above": "above", "below": "below"}
OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above",
            "bigger": "smaller", "smaller": "bigger"}
REGIONS = (("top left", "top", "top right"), ("left", "middle", "right"),
           ("bottom left", "bottom", "bottom right"))


def ask(scene, rng, family):
    """One question of a family about the scene, or None where the family does not apply."""
    if family not in FAMILIES:
        raise ValueError(f"expected a family in {FAMILIES}, got {family!r}")
    return _ASKERS[family](scene, rng)


def sample_questions(scene, rng, n, families=FAMILIES):
    """Up to n different questions, the families drawn uniformly among those that apply.

    Fewer come back only where the scene has no more to ask.
    """
    families, found = list(families), {}
    for _ in range(8 * n):
        if not families or len(found) == n:
            break
        family = rng.choice(families)
        qa = ask(scene, rng, family)
        if qa is None:
            families.remove(family)
        else:
            found.setdefault(qa.question, qa)
    return list(found.values())


def _qa(rng, family, template, answer, accept=(), **slots):
    return QA(family, rng.choice(TEMPLATES[template]).format(**slots), answer, accept)


def _plural(name):
    return name + ("es" if name == "cross" else "s")


def _tally(scene):
    """Counts of shapes by name, by colour and by (colour, name)."""
    shapes = scene.shapes()
    return (Counter(t.name for t in shapes), Counter(t.colour for t in shapes),
            Counter((t.colour, t.name) for t in shapes))


def _phrases(scene):
    """[(thing, the noun phrases that mean only it)], for things that have one."""
    names, _, pairs = _tally(scene)
    found = []
    for t in scene.things:
        if t.kind != "shape":
            found.append((t, (t.kind,)))
        elif names[t.name] == 1:
            found.append((t, (t.name, f"{t.colour} {t.name}")))
        elif pairs[t.colour, t.name] == 1:
            found.append((t, (f"{t.colour} {t.name}",)))
    return found


def _extremes(scene):
    """(clearly biggest shape or None, clearly smallest shape or None)."""
    shapes = sorted(scene.shapes(), key=lambda t: t.size)
    if len(shapes) < 2:
        return None, None
    return (shapes[-1] if shapes[-1].size >= 1.25 * shapes[-2].size else None,
            shapes[0] if shapes[1].size >= 1.25 * shapes[0].size else None)


def _ask_count(scene, rng):
    names, colours, pairs = _tally(scene)
    if not names:
        return None
    by_count = {}
    total = sum(names.values())
    for count, text in ([(total, "shapes")] + [(c, _plural(n)) for n, c in names.items()]
                        + [(c, f"{n} shapes") for n, c in colours.items()]
                        + [(c, f"{n} {_plural(m)}") for (n, m), c in pairs.items()]):
        by_count.setdefault(count, []).append(text)
    if rng.random() < 0.1:
        count, text = 0, _absent(rng, names, colours, pairs)[1]
    else:  # high counts are rarer among scenes, so they are preferred within one
        count = rng.choices(list(by_count), weights=[c ** 1.2 for c in by_count])[0]
        text = rng.choice(by_count[count])
    return _qa(rng, "count", "count", str(count), (NUMBER_WORDS[count],), t=text)


def _absent(rng, names, colours, pairs):
    """(singular with article, plural) of shapes that the scene lacks, mostly near misses."""
    form = rng.choice(("pair", "pair", "name", "colour"))
    gone_names = [n for n in SHAPES if n not in names]
    gone_colours = [c for c in COLOURS if c not in colours]
    if form == "name" and gone_names:
        name = rng.choice(gone_names)
        return f"a {name}", _plural(name)
    if form == "colour" and gone_colours:
        colour = rng.choice(gone_colours)
        return f"{ARTICLE.get(colour, 'a')} {colour} shape", f"{colour} shapes"
    near = [(c, n) for c in (colours or COLOURS) for n in (names or SHAPES) if (c, n) not in pairs]
    half = [(c, n) for c in COLOURS for n in SHAPES
            if (c in colours) != (n in names)] if rng.random() < 0.4 or not near else near
    colour, name = rng.choice(half or near)
    return f"{ARTICLE.get(colour, 'a')} {colour} {name}", f"{colour} {_plural(name)}"


def _ask_colour(scene, rng):
    names, _, _ = _tally(scene)
    targets = [(t.colour, t.name if t.kind == "shape" else t.kind) for t in scene.things
               if t.kind != "shape" or names[t.name] == 1]
    biggest, _ = _extremes(scene)
    if biggest:
        targets.append((biggest.colour, rng.choice(("biggest shape", "largest shape"))))
    if not targets:
        return None
    colour, text = rng.choice(targets)
    return _qa(rng, "colour", "colour", colour, t=text)


def _ask_shape(scene, rng):
    _, colours, _ = _tally(scene)
    targets = [(t.name, t.colour) for t in scene.shapes() if colours[t.colour] == 1]
    biggest, smallest = _extremes(scene)
    if biggest:
        targets.append((biggest.name, rng.choice(("the biggest", "the largest"))))
    if smallest:
        targets.append((smallest.name, "the smallest"))
    if not targets:
        return None
    name, text = rng.choice(targets)
    return _qa(rng, "shape", "shape", name, t=text)


def _ask_exists(scene, rng):
    names, colours, pairs = _tally(scene)
    present = [k for k in ("word", "digit") if scene.first(k)]
    lacking = [k for k in ("word", "digit") if k not in present]
    answer = rng.choice(("yes", "no"))
    text_kinds = present if answer == "yes" else lacking
    if text_kinds and (rng.random() < 0.2 or (answer == "yes" and not names)):
        text = f"a {rng.choice(text_kinds)}"
    elif answer == "no":
        text = _absent(rng, names, colours, pairs)[0]
    else:
        colour, name = rng.choice(list(pairs))
        text = rng.choice((f"{ARTICLE.get(colour, 'a')} {colour} {name}",) * 2
                          + (f"a {name}", f"{ARTICLE.get(colour, 'a')} {colour} shape"))
    return _qa(rng, "exists", "exists", answer, t=text)


def _ask_position(scene, rng):
    known = _phrases(scene)
    pairs = [(a, b) for a in known for b in known if a is not b]
    rng.shuffle(pairs)
    for (one, a), (two, b) in pairs:
        dx, dy = one.x - two.x, one.y - two.y
        axes = ([("right" if dx > 0 else "left")] if abs(dx) >= 0.12 else [])
        axes += [("below" if dy > 0 else "above")] if abs(dy) >= 0.12 else []
        if not axes:
            continue
        a, b, truth = rng.choice(a), rng.choice(b), rng.choice(axes)
        form = rng.random()
        long, short = max(abs(dx), abs(dy)), min(abs(dx), abs(dy))
        if form < 0.3 and long >= 0.15 and long >= 1.6 * short:
            truth = axes[0] if abs(dx) > abs(dy) else axes[-1]
            return _qa(rng, "position", "where", truth, _also(truth), a=a, b=b)
        if form < 0.6:
            text = "left or right of" if truth in ("left", "right") else "above or below"
            return _qa(rng, "position", "side", truth, _also(truth), a=a, b=b, r=text)
        answer = rng.choice(("yes", "no"))
        said = PHRASE[truth if answer == "yes" else OPPOSITE[truth]]
        if said.endswith("of") and rng.random() < 0.5:
            said = "to the " + said
        return _qa(rng, "position", "position", answer, a=a, b=b, r=said)
    return None


def _also(direction):
    return (f"to the {direction}", f"{direction} of") if direction in ("left", "right") else ()


def _ask_size(scene, rng):
    known = [k for k in _phrases(scene) if k[0].kind == "shape"]
    pairs = [(a, b) for a in known for b in known if a[0].size >= 1.3 * b[0].size]
    if not pairs:
        return None
    (_, big), (_, small) = rng.choice(pairs)
    big, small = rng.choice(big), rng.choice(small)
    a, b = (big, small) if rng.random() < 0.5 else (small, big)
    said = rng.choice(("bigger", "smaller"))
    if rng.random() < 0.5:
        return _qa(rng, "size", "which", big if said == "bigger" else small, a=a, b=b, r=said)
    truth = "bigger" if a == big else "smaller"
    return _qa(rng, "size", "size", "yes" if said == truth else "no", a=a, b=b, r=said)


def _ask_word(scene, rng):
    word = scene.first("word")
    return word and _qa(rng, "word", "word", word.name)


def _ask_digit(scene, rng):
    digit = scene.first("digit")
    return digit and _qa(rng, "digit", "digit", digit.name, (NUMBER_WORDS[int(digit.name)],))


def _ask_compare(scene, rng):
    names, colours, _ = _tally(scene)
    if not names:
        return None
    by_name = rng.random() < 0.5
    counts, everything = (names, SHAPES) if by_name else (colours, COLOURS)
    kinds = list(counts)
    ties = [(a, b) for a in kinds for b in kinds if a != b and counts[a] == counts[b]]
    unequal = [(a, b) for a in kinds for b in kinds if counts[a] > counts[b]]
    if not unequal or rng.random() < 0.15:  # an absent kind is the easy case: only now and then
        gone = [k for k in everything if k not in counts]
        if gone:
            unequal = [(rng.choice(kinds), rng.choice(gone))]
    if not unequal:
        return None
    more, fewer = rng.choice(unequal)
    a, b = (more, fewer) if rng.random() < 0.5 else (fewer, more)
    form = rng.random()
    if form < 0.35:
        slots = {"a": _plural(a), "b": _plural(b)} if by_name else {"a": f"{a} shapes", "b": f"{b} shapes"}
        answer, accept = (_plural(more), (more,)) if by_name else (more, (f"{more} shapes",))
        return _qa(rng, "compare", "either", answer, accept, **slots)
    template, answer = "more", "yes" if a == more else "no"
    if form < 0.6 and ties:
        template, answer = "equal", rng.choice(("yes", "no"))
        if answer == "yes":
            a, b = rng.choice(ties)
    elif answer == "no" and ties and rng.random() < 0.3:
        a, b = rng.choice(ties)
    slots = {"a": _plural(a), "b": _plural(b)} if by_name else {"a": f"{a} shapes", "b": f"{b} shapes"}
    return _qa(rng, "compare", template, answer, **slots)


def describe(scene):
    """The canonical description: one item a thing, row by row, then from left to right."""
    def row(t):
        return min(2, int(t.y * 3))

    items = []
    for t in sorted(scene.things, key=lambda t: (row(t), t.x)):
        region = REGIONS[row(t)][min(2, int(t.x * 3))]
        if t.kind == "shape":
            items.append(f"{'big' if t.size >= BIG else 'small'} {t.colour} {t.name} {region}")
        else:
            items.append(f"{t.kind} {t.name} {region}")
    return ", ".join(items)


def _ask_describe(scene, rng):
    return _qa(rng, "describe", "describe", describe(scene))


_ASKERS = {"count": _ask_count, "colour": _ask_colour, "shape": _ask_shape, "exists": _ask_exists,
           "position": _ask_position, "size": _ask_size, "word": _ask_word, "digit": _ask_digit,
           "compare": _ask_compare, "describe": _ask_describe}


# ---------------------------------------------------------------- scoring

def score(qa_or_family, target, answer):
    """1.0 or 0.0 for an exact match after lower-casing, stripping and dropping a final dot.

    A QA's `accept` list counts as right as well. For "describe": F1 over the multiset of
    items (colour and shape, "word tree", "digit 7"); the words for size and region are
    not scored, since things near a border could be called either way.
    """
    family = qa_or_family.family if isinstance(qa_or_family, QA) else qa_or_family
    accept = qa_or_family.accept if isinstance(qa_or_family, QA) else ()
    if family not in FAMILIES:
        raise ValueError(f"expected a family in {FAMILIES}, got {family!r}")
    if family != "describe":
        return float(_clean(answer) in {_clean(target), *map(_clean, accept)})
    wanted, given = _items(target), _items(answer)
    hits = sum((wanted & given).values())
    return 2.0 * hits / max(1, sum(wanted.values()) + sum(given.values()))


def _clean(text):
    return text.strip().lower().removesuffix(".").strip()


def _items(text):
    """The multiset of things that a description names."""
    found = Counter()
    for item in _clean(text).split(","):
        tokens = item.split()
        if len(tokens) > 1 and tokens[0] in ("word", "digit"):
            found[tokens[0], tokens[1]] += 1
        elif tokens:
            found[next((t for t in tokens if t in COLOURS), None),
                  next((t for t in tokens if t in SHAPES), None)] += 1
    return found


def majority_answers(qas):
    """{family: its most common answer}: the control that never looks at the picture."""
    answers = {}
    for qa in qas:
        answers.setdefault(qa.family, Counter())[qa.answer] += 1
    return {family: counts.most_common(1)[0][0] for family, counts in answers.items()}


def heldout_questions(n, seed=0):
    """n (Scene, QA), families in equal numbers, each from its own scene with held-out digits.

    Scene seeds start at HELDOUT_SEED, which training never reaches.
    """
    found = []
    for i in range(n):
        family, qa, attempt = FAMILIES[i % len(FAMILIES)], None, 0
        while qa is None:
            rng = random.Random(HELDOUT_SEED + (seed << 32) + i * 1000 + attempt)
            scene = sample_scene(rng, "heldout")
            qa, attempt = ask(scene, rng, family), attempt + 1
        found.append((scene, qa))
    return found


def example_scene():
    """A fixed scene for the README: five shapes, a word and a digit."""
    mask = _word_mask("tree")
    index = int(np.nonzero(digit_images("heldout")[1] == 7)[0][0])
    _, w, h = _digit_mask("heldout", index)

    def shape(name, colour, x, y, size, angle=0.0):
        return Thing("shape", name, colour, x, y, size, angle, RGB[colour])

    return Scene((
        shape("circle", "red", 0.20, 0.20, 0.32),
        shape("star", "blue", 0.52, 0.19, 0.22, 8.0),
        shape("square", "green", 0.82, 0.21, 0.26, -6.0),
        Thing("word", "tree", "black", 0.34, 0.53, 0.54, 0.0, RGB["black"], 0.54,
              0.54 * mask.height / mask.width),
        Thing("digit", "7", "purple", 0.82, 0.55, 0.34, 0.0, RGB["purple"], w * 0.34 / 8, h * 0.34 / 8,
              False, index),
        shape("triangle", "orange", 0.24, 0.82, 0.28),
        shape("diamond", "pink", 0.62, 0.83, 0.24),
    ), Background("gradient", (250, 250, 250), (212, 226, 244), 0), "heldout")


def main():
    parser = argparse.ArgumentParser(description="Write sample pictures and print their questions.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--n", type=int, default=8, help="how many scenes")
    parser.add_argument("--size", type=int, default=256, help="side of the pictures in pixels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--difficulty", type=float, default=1.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for i in range(args.n):
        rng = random.Random(args.seed + i)
        scene = sample_scene(rng, "train", args.difficulty)
        path = args.out / f"scene_{i:03d}.png"
        render(scene, args.size).save(path)
        print(path)
        for qa in sample_questions(scene, rng, 10):
            print(f"  [{qa.family}] {qa.question} -> {qa.answer}")


if __name__ == "__main__":
    main()
