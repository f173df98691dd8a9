"""The scene of README's first picture: five shapes, a word and a digit.

python -m recipes.shapes.example assets/example.png
"""

from __future__ import annotations

import sys

import numpy as np

from shapes import RGB, Scene, Thing, digit_images, render
from shapes.drawing import digit_mask, word_mask
from shapes.world import Background


def example_scene():
    mask = word_mask("tree")
    index = int(np.nonzero(digit_images("heldout")[1] == 7)[0][0])
    _, w, h = digit_mask("heldout", index)
    word_height, ink = 0.54 * mask.height / mask.width, (w * 0.34 / 8, h * 0.34 / 8)

    def shape(name, colour, x, y, size, angle=0.0):
        return Thing("shape", name, colour, x, y, size, angle, RGB[colour])

    return Scene(
        (
            shape("circle", "red", 0.20, 0.20, 0.32),
            shape("star", "blue", 0.52, 0.19, 0.22, 8.0),
            shape("square", "green", 0.82, 0.21, 0.26, -6.0),
            Thing("word", "tree", "black", 0.34, 0.53, 0.54, 0.0, RGB["black"], 0.54, word_height),
            Thing("digit", "7", "purple", 0.82, 0.55, 0.34, 0.0, RGB["purple"], *ink, digit_index=index),
            shape("triangle", "orange", 0.24, 0.82, 0.28),
            shape("diamond", "pink", 0.62, 0.83, 0.24),
        ),
        Background("gradient", (250, 250, 250), (212, 226, 244), 0),
        "heldout",
    )


if __name__ == "__main__":
    render(example_scene(), 384).save(sys.argv[1])
