"""Write sample images with rows for train.py, and print questions: python -m recipes.shapes --out DIR."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

from PIL import Image

from messages import one_line
from shapes import FAMILIES, QA, render, sample_questions, sample_scene

_PRINTED = 8  # images whose questions are printed


def main(arguments: list[str] | None = None) -> None:
    parser = samples_parser("python -m recipes.shapes")
    parser.add_argument("--size", type=int, default=256, help="side of an image in pixels (default 256)")
    parser.add_argument(
        "--families",
        nargs="+",
        choices=FAMILIES,
        default=FAMILIES,
        metavar="FAMILY",
        help=f"kinds of questions: {', '.join(FAMILIES)} (default: all)",
    )
    write_samples(parser, arguments, "scene", sample)


def samples_parser(prog: str) -> argparse.ArgumentParser:
    """The options of `write_samples`."""
    what = (
        "Write sample images and rows.jsonl, their questions with answers, and print those of the first ones."
    )
    parser = argparse.ArgumentParser(prog=prog, description=what)
    parser.add_argument("--out", type=Path, required=True, help="folder for the images")
    parser.add_argument("--n", type=int, default=8, help="number of images (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first image (default 0)")
    parser.add_argument("--difficulty", type=float, default=1.0, help="0 (few, large, apart) to 1 (default)")
    return parser


def write_samples(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    name: str,
    sample: Callable[[random.Random, argparse.Namespace], tuple[Image.Image, Iterable[QA]]],
) -> None:
    """Write images `name`_000.png, ... of a world, and what `sample` asks about each to rows.jsonl."""
    args = parser.parse_args(arguments)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "rows.jsonl").open("w", encoding="utf-8") as rows:
            for i in range(args.n):
                image, questions = sample(random.Random(args.seed + i), args)
                path = args.out / f"{name}_{i:03d}.png"
                image.save(path)
                if i < _PRINTED:
                    print(path)
                for qa in questions:
                    if i < _PRINTED:
                        print(f"  [{qa.family}] {qa.question} -> {qa.answer}")
                    row = {"image": path.name, "question": qa.question, "answer": qa.answer}
                    row |= {"accept": list(qa.accept), "family": qa.family}
                    rows.write(json.dumps(row, ensure_ascii=False) + "\n")
    except (OSError, ValueError) as error:
        parser.error(one_line(error))


def sample(rng: random.Random, args: argparse.Namespace) -> tuple[Image.Image, Iterable[QA]]:
    scene = sample_scene(rng, "train", args.difficulty)
    return render(scene, args.size), sample_questions(scene, rng, 10, args.families)


if __name__ == "__main__":
    main()
