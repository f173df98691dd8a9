"""Write sample images and print their questions: python -m recipes.world --out DIR."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from messages import one_line
from recipes.world.drawings import paint, random_aspect, sample_drawing
from recipes.world.places import ask_absent, ask_place
from shapes import sample_questions


def main(arguments: list[str] | None = None) -> None:
    what = "Write sample images and print their questions."
    parser = argparse.ArgumentParser(prog="python -m recipes.world", description=what)
    parser.add_argument("--out", type=Path, required=True, help="folder for the images")
    parser.add_argument("--n", type=int, default=8, help="number of drawings (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first drawing (default 0)")
    parser.add_argument("--difficulty", type=float, default=1.0, help="0 (few, large, apart) to 1 (default)")
    args = parser.parse_args(arguments)
    try:
        draw(args)
    except (OSError, ValueError) as error:
        parser.error(one_line(error))


def draw(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    for i in range(args.n):
        rng = random.Random(args.seed + i)
        path = args.out / f"drawing_{i:03d}.png"
        scene = sample_drawing(rng, "train", args.difficulty, random_aspect(rng))
        paint(scene, rng).save(path)
        more = [qa for qa in (ask_place(scene, rng), ask_absent(scene, rng)) if qa]
        print(path)
        for qa in [*sample_questions(scene, rng, 10), *more]:
            print(f"  [{qa.family}] {qa.question} -> {qa.answer}")


if __name__ == "__main__":
    main()
