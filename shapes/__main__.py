"""Write sample images and print their questions: python -m shapes --out DIR."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from messages import one_line
from shapes import render, sample_questions, sample_scene


def main(arguments: list[str] | None = None) -> None:
    what = "Write sample images and print their questions."
    parser = argparse.ArgumentParser(prog="python -m shapes", description=what)
    parser.add_argument("--out", type=Path, required=True, help="folder for the images")
    parser.add_argument("--n", type=int, default=8, help="number of scenes (default 8)")
    parser.add_argument("--size", type=int, default=256, help="side of an image in pixels (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first scene (default 0)")
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
        path = args.out / f"scene_{i:03d}.png"
        scene = sample_scene(rng, "train", args.difficulty)
        render(scene, args.size).save(path)
        print(path)
        for qa in sample_questions(scene, rng, 10):
            print(f"  [{qa.family}] {qa.question} -> {qa.answer}")


if __name__ == "__main__":
    main()
