"""The built-in image-question world: drawn scenes with questions and answers.

A scene holds one to eight things: coloured shapes, at most one printed word and at
most one handwritten digit (UCI digits, split before anything is drawn). Everything
stays legible when the image is reduced to 64 px. Nothing is downloaded, and all
randomness comes from the `random.Random` that is passed in.
"""

from shapes.drawing import digit_images, render
from shapes.questions import ask, describe, sample_questions
from shapes.sampling import sample_scene
from shapes.scoring import heldout_questions, score
from shapes.world import COLOURS, FAMILIES, MAX_THINGS, QA, RGB, Scene, Thing

__all__ = [
    "COLOURS",
    "FAMILIES",
    "MAX_THINGS",
    "QA",
    "RGB",
    "Scene",
    "Thing",
    "ask",
    "describe",
    "digit_images",
    "heldout_questions",
    "render",
    "sample_questions",
    "sample_scene",
    "score",
]
