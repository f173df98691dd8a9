"""What plain drawings are made of: names, colours, things, scenes, questions."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "black")
DIGITS = tuple("0123456789")
# fmt: off
WORDS = (
    "apple", "bear", "bird", "boat", "book", "box", "bread", "cake", "cat", "clock", "cup", "dog",
    "door", "duck", "egg", "fish", "frog", "hand", "house", "jam", "key", "king", "lamp", "leaf", "milk",
    "moon", "pig", "queen", "rain", "shoe", "snow", "sun", "tent", "tree", "wolf", "zebra",
)
# fmt: on
FAMILIES = ("count", "colour", "shape", "exists", "position", "size", "word", "digit", "compare", "describe")
HELDOUT_SEED = 1 << 40  # training scenes must use seeds below this one

RGB = {
    "red": (212, 28, 32),
    "orange": (250, 136, 8),
    "yellow": (242, 214, 16),
    "green": (28, 146, 58),
    "blue": (28, 78, 214),
    "purple": (116, 36, 160),
    "pink": (250, 112, 190),
    "black": (22, 22, 24),
}
TONES = (
    (250, 250, 250), (250, 244, 228), (224, 224, 224), (192, 192, 194), (212, 226, 244), (214, 238, 216),
    (248, 224, 232), (230, 222, 246), (224, 208, 186), (198, 228, 226), (206, 199, 192), (160, 168, 176),
    (162, 182, 164), (236, 236, 200),
)  # fmt: skip
MAX_THINGS = 8
REACH = 0.56  # bounding radius of a shape, in diameters
BIG = 0.27  # from this diameter on a shape is called big
MIN_CENTRES = 0.11  # the closest two centres may come, but in rows
MAX_COVER = 0.22  # most of a shape's bounding disc that others may share
MAX_TEXT_COVER = 0.06  # most of a word's or digit's box that others may share


_ARM, _HALF = 0.17, 0.5  # half the width and half the length of a cross's arms
CORNERS = {
    "circle": (),
    "square": ((-0.43, -0.43), (0.43, -0.43), (0.43, 0.43), (-0.43, 0.43)),
    "triangle": ((0.0, -0.49), (0.52, 0.43), (-0.52, 0.43)),
    "diamond": ((0.0, -0.56), (0.42, 0.0), (0.0, 0.56), (-0.42, 0.0)),
    "star": tuple(
        (radius * math.sin(i * math.pi / 5), -radius * math.cos(i * math.pi / 5))
        for i, radius in enumerate((0.56, 0.25) * 5)
    ),
    "cross": (
        (-_ARM, -_HALF), (_ARM, -_HALF), (_ARM, -_ARM), (_HALF, -_ARM), (_HALF, _ARM), (_ARM, _ARM),
        (_ARM, _HALF), (-_ARM, _HALF), (-_ARM, _ARM), (-_HALF, _ARM), (-_HALF, -_ARM), (-_ARM, -_ARM),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """One object. (x, y) is its centre, in fractions of the image's width and height; all other lengths are
    fractions of the shorter side.

    width, height: the bounding box of a word or of a digit's ink (0 for shapes).
    font: the file that a word is printed with; "": Pillow's own font.
    """

    kind: str  # shape | word | digit
    name: str  # shape name, word in lower case, or digit character
    colour: str
    x: float
    y: float
    size: float  # diameter of a shape, width of a word, side of a digit's 8x8 image
    angle: float = 0.0  # degrees
    rgb: tuple = (0, 0, 0)
    width: float = 0.0
    height: float = 0.0
    upper: bool = False
    digit_index: int = -1  # into digit_images(scene.split)
    font: str = ""

    @property
    def text(self) -> str:
        """A word or digit as it is printed."""
        return self.name.upper() if self.upper else self.name

    @property
    def corners(self) -> tuple[tuple[float, float], ...]:
        """Those of a shape around its centre, in diameters; a circle has none."""
        return CORNERS[self.name]


@dataclass(frozen=True)
class Background:
    """Two tones mixed by a mask: plain, gradient, stripes, noise, dots or lines."""

    kind: str = "plain"
    first: tuple = (250, 244, 228)
    second: tuple = (250, 244, 228)
    variant: int = 0


@dataclass(frozen=True)
class Scene:
    """Things in drawing order (later ones on top), a background and the digit split.

    aspect: the image's width over its height.
    pen: how many times the size an image is drawn in before it is reduced; 1 leaves hard edges.
    """

    things: tuple
    background: Background = Background()
    split: str = "train"
    aspect: float = 1.0
    pen: int = 2

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
    """A question with its canonical answer and other answers that count as right. `things`: what each
    item of the answer is about, in its order; empty where the items are not things. `forced`: characters
    at its start, or spans of characters, that a grammar would force, so that they are not learnt.
    `scene`: the drawing that it is about, where several are shown; None: all of them."""

    family: str
    question: str
    answer: str
    accept: tuple = ()
    things: tuple[Thing, ...] = ()
    forced: int | tuple[tuple[int, int], ...] = 0
    scene: Scene | None = None
