"""Rows about images, and runs of the evaluation on them, for its tests."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from pathlib import Path

from PIL import Image

from eval.__main__ import main
from shapes import ask, render, sample_scene
from tests.waiting import PATIENCE, free_port

FORK = multiprocessing.get_context("fork")
ASKED = ("count", "describe", "colour", "shape", "exists", "position", "size")


def write_rows(folder: Path, images: int = 4, each: int = 4, shuffle: int | None = None) -> Path:
    """rows.jsonl: questions about plain drawings, several about each image, in an order that `shuffle`
    seeds."""
    rows = []
    for image in range(images):
        scene, rng = sample_scene(random.Random(2**41 + image), "heldout"), random.Random(image)
        name = f"image-{image}.png"
        render(scene, 96 + 16 * image).save(folder / name)
        for number in range(each):
            family = ASKED[number % len(ASKED)]
            qa = ask(scene, rng, family) or ask(scene, rng, "count") or ask(scene, rng, "describe")
            row = {"id": f"{image}-{number}", "image": name, "family": qa.family}
            rows.append(row | {"question": qa.question, "answers": [qa.answer, *qa.accept]})
    if shuffle is not None:
        random.Random(shuffle).shuffle(rows)
    return save_rows(folder / "rows.jsonl", rows)


def save_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def blank_image(folder: Path, name: str = "grey.png") -> str:
    Image.new("RGB", (48, 48), (90, 90, 90)).save(folder / name)
    return name


def run(*arguments) -> int:
    """`python -m eval` in this process."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:  # from argparse
        return stop.code


def exits_of_ranks(each: list[tuple]) -> list[int | None]:
    """The exit status of every rank, each with its own arguments."""
    port = str(free_port())
    processes = [
        FORK.Process(target=_rank, args=(rank, len(each), port, [str(argument) for argument in arguments]))
        for rank, arguments in enumerate(each)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    return [process.exitcode for process in processes]


def _rank(rank: int, ranks: int, port: str, arguments: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    raise SystemExit(main(arguments))


def samples_of(folder: Path, name: str = "samples.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def answered(folder: Path) -> dict[str, tuple[str, float]]:
    """id -> (answer, score); each question stands there once."""
    records = samples_of(folder)
    found = {record["id"]: (record["answer"], record["score"]) for record in records}
    assert len(found) == len(records)
    return found


def results_of(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))
