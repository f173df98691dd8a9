"""Everything that writes, killed with SIGKILL again and again: nothing is lost, nothing is there twice.

    python -m tests.robustness.kills                 # 100 kills, some minutes
    python -m tests.robustness.kills --parts batch --kills 50

`training` is `tests/kills.py`: map-style and streaming data and a changing number of ranks, compared to the
bit with a run that was never killed. `evaluation` (`python -m eval`) and `batch` (`generate.py --batch`) must
hold every question exactly once in the end, with the answers of a run that was never killed. `saving` writes
two checkpoints in turns over one folder, which must hold one of them whole after every kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import torch

import generate
from eval.__main__ import main as evaluate
from models.vision_language_model import VisionLanguageModel
from tests.evaluations import FORK, answered, write_rows
from tests.kills import kill_and_compare
from tests.processors import embedded
from tests.runs import tiny_checkpoint

SHARES = {"training": 0.5, "evaluation": 0.15, "batch": 0.2, "saving": 0.15}  # of all kills
STYLES = {"map": 0.4, "streaming": 0.4, "ranks": 0.2}  # of those in training
EACH = 6  # questions about a picture, for evaluation and batch


@dataclass(frozen=True)
class Outcome:
    """How often something was killed, how far it was each time, and whether the end is as if it never was."""

    part: str
    killed: int
    reached: list[int]
    as_never_killed: bool


def kill_evaluation(folder: Path, kills: int, seed: int = 0, pictures: int = 30) -> Outcome:
    """`python -m eval` on rows of pictures; progress is the lines of samples.jsonl."""
    rows = write_rows(folder, pictures, EACH)
    killed, whole = folder / "eval-killed", folder / "eval-whole"

    def start(output: Path):
        arguments = ["--data", str(rows), "--output", str(output), "--compile", "off"]
        return lambda: evaluate([*arguments, "--batch-size", "4"])

    reached = kill_again_and_again(start(killed), lambda: lines(killed / "samples.jsonl"), kills, seed)
    to_the_end(start(killed))
    to_the_end(start(whole))
    same = answered(killed) == answered(whole) and len(answered(whole)) == pictures * EACH
    return Outcome("evaluation", len(reached), reached, same)


def kill_batch(folder: Path, kills: int, seed: int = 0, pictures: int = 30) -> Outcome:
    """`generate.py --batch` on the same questions; progress is the lines of its results."""
    write_rows(folder, pictures, EACH)
    killed, whole = folder / "killed.jsonl", folder / "whole.jsonl"

    def start(out: Path):
        paths = ["--batch", str(folder / "rows.jsonl"), "--out", str(out), "--compile", "off"]
        return lambda: generate.main([*paths, "--max-new-tokens", "32", "--batch-size", "4"])

    reached = kill_again_and_again(start(killed), lambda: lines(killed), kills, seed)
    to_the_end(start(killed))
    to_the_end(start(whole))
    found, expected = (sorted(path.read_text().splitlines()) for path in (killed, whole))
    same = found == expected and sorted(json.loads(line)["line"] for line in found) == list(
        range(1, pictures * EACH + 1)
    )
    return Outcome("batch", len(reached), reached, same)


def kill_saving(folder: Path, kills: int, seed: int = 0) -> Outcome:
    """Two models saved in turns over one folder; progress is how often that changed hands."""
    target, versions, whole, changes = folder / "saved", [], True, 0
    first = VisionLanguageModel.from_pretrained(tiny_checkpoint(folder / "first"))
    second = VisionLanguageModel(first.config)
    second.init_weights(torch.Generator().manual_seed(1))
    for number, model in enumerate((first, second)):
        model.save_pretrained(folder / f"version-{number}", embedded())
        versions.append(contents(folder / f"version-{number}"))

    def saving():
        for number in count():
            (first, second)[number % 2].save_pretrained(target, embedded())

    def progress() -> int:
        with suppress(OSError):
            seen.add((target / "config.json").stat().st_ino)
        return len(seen)

    rng, seen = random.Random(seed), set()
    for _ in range(kills):
        changes += len(kill_again_and_again(saving, progress, 1, rng.randrange(2**32), span=3))
        whole &= not target.exists() or contents(target) in versions
    first.save_pretrained(target, embedded())
    whole &= contents(target) == versions[0] and not list(folder.glob(".saved*"))
    return Outcome("saving", changes, [len(seen)], whole)


def kill_again_and_again(
    work: Callable[[], object], progress: Callable[[], int], kills: int, seed: int, span: int = 12
) -> list[int]:
    """Do `work` in a process that is killed, and again, `kills` times: how far it was at each.

    A moment is some milliseconds after a number of steps of `progress` from where the process began, `span`
    at most: with none, while it opens its files.
    """
    rng, reached = random.Random(seed), []
    for _ in range(kills):
        process = FORK.Process(target=silenced, args=(work,))
        begin, goal = progress(), rng.randint(0, span)
        process.start()
        while process.exitcode is None and progress() < begin + goal:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02) if goal else rng.uniform(0, 1))
        ended = process.exitcode is not None
        process.kill()
        process.join()
        if ended:
            break
        reached.append(progress())
    return reached


def to_the_end(work: Callable[[], object]) -> None:
    process = FORK.Process(target=silenced, args=(work,))
    process.start()
    process.join(600)
    if process.exitcode != 0:
        raise RuntimeError(f"expected the last start to end with status 0, got {process.exitcode}")


def silenced(work: Callable[[], object]) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    torch.set_num_threads(1)
    status = work()
    sys.exit(status if isinstance(status, int) else 0)


def lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kill_training(folder: Path, kills: int, seed: int = 0) -> list[Outcome]:
    made = []
    for style, share in STYLES.items():
        outcome = kill_and_compare(folder, style, round(kills * share), seed)
        made.append(Outcome(f"training, {style}", outcome.killed, outcome.steps, outcome.as_never_killed))
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.robustness.kills", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kills", type=int, default=100, help="of all parts together (default 100)")
    parser.add_argument("--parts", nargs="+", choices=tuple(SHARES), default=tuple(SHARES))
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    asked = parser.parse_args(arguments)
    report = os.fdopen(os.dup(1), "w", buffering=1)
    total, bad = sum(SHARES[part] for part in asked.parts), 0
    torch.set_num_threads(1)  # threads do not survive a fork
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # progress bars of some dozen runs
        os.dup2(silent, stream)
    for part in asked.parts:
        kills = round(asked.kills * SHARES[part] / total)
        with tempfile.TemporaryDirectory() as folder:
            made = PARTS[part](Path(folder), kills, asked.seed)
        for outcome in made if isinstance(made, list) else [made]:
            bad += not outcome.as_never_killed
            report.write(json.dumps(asdict(outcome)) + "\n")
    return int(bad > 0)


PARTS: dict[str, Callable[[Path, int, int], Outcome | list[Outcome]]] = {
    "training": kill_training,
    "evaluation": kill_evaluation,
    "batch": kill_batch,
    "saving": kill_saving,
}

if __name__ == "__main__":
    sys.exit(main())
