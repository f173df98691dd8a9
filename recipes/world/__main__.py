"""Write sample images and print their questions: python -m recipes.world --out DIR."""

from __future__ import annotations

import argparse
import random

from PIL import Image

from recipes.shapes.__main__ import samples_parser, write_samples
from recipes.world.drawings import paint, random_aspect, sample_drawing
from recipes.world.places import ask_absent, ask_place
from shapes import QA, sample_questions


def main(arguments: list[str] | None = None) -> None:
    write_samples(samples_parser("python -m recipes.world"), arguments, "drawing", sample)


def sample(rng: random.Random, args: argparse.Namespace) -> tuple[Image.Image, list[QA]]:
    scene = sample_drawing(rng, "train", args.difficulty, random_aspect(rng))
    image = paint(scene, rng)
    more = [qa for qa in (ask_place(scene, rng), ask_absent(scene, rng)) if qa]
    return image, [*sample_questions(scene, rng, 10), *more]


if __name__ == "__main__":
    main()
