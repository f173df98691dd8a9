"""Everything that writes, killed with SIGKILL again and again: nothing is lost, nothing is there twice.

    python -m tests.soak.kills                 # 100 kills, some minutes
    python -m tests.soak.kills --parts batch --kills 50

`training` is `tests/kills.py`: map-style and streaming data and a changing number of ranks, compared to the
bit with a run that was never killed. `evaluation` (`python -m eval`) and `batch` (`generate.py --batch`) must
hold every question exactly once in the end, with the answers of a run that was never killed. `saving` writes
two checkpoints in turns over one folder, which must hold one of them whole after every kill.

What ends before its kills are used up is begun anew elsewhere. The exit status is 1 where anything is not as
it should be, or fewer kills came about than were asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, count
from pathlib import Path

import torch

import generate
from eval.__main__ import main as evaluate
from models.vision_language_model import VisionLanguageModel
from tests.evaluations import FORK, answered, write_rows
from tests.kills import MORE_ROUNDS, kill_and_compare
from tests.processors import embedded
from tests.runs import tiny_checkpoint
from tests.waiting import PATIENCE

SHARES = {"training": 0.5, "evaluation": 0.15, "batch": 0.2, "saving": 0.15}  # of all kills
STYLES = {"map": 0.4, "streaming": 0.4, "ranks": 0.2}  # of those in training
EACH = 6  # questions about an image, for evaluation and batch


@dataclass(frozen=True)
class Outcome:
    """How often something was killed, how far it was each time, and whether the end is as if it never was."""

    part: str
    killed: int
    reached: list[int]
    as_never_killed: bool


def kill_evaluation(folder: Path, kills: int, seed: int = 0, images: int = 30) -> Outcome:
    """`python -m eval` on rows of images; progress is the lines of samples.jsonl."""
    rows = write_rows(folder, images, EACH)
    whole = folder / "eval-whole"

    def start(output: Path) -> Callable[[], object]:
        arguments = ["--data", str(rows), "--output", str(output), "--compile", "off"]
        return lambda: evaluate([*arguments, "--batch-size", "4"])

    killed, reached = kill_rounds(
        folder / "eval-killed", start, lambda output: lines(output / "samples.jsonl"), kills, seed
    )
    to_the_end(start(whole))
    expected = answered(whole)
    same = len(expected) == images * EACH and all(answered(output) == expected for output in killed)
    return Outcome("evaluation", len(reached), reached, same)


def kill_batch(folder: Path, kills: int, seed: int = 0, images: int = 30) -> Outcome:
    """`generate.py --batch` on the same questions; progress is the lines of its results."""
    write_rows(folder, images, EACH)
    whole = folder / "whole.jsonl"

    def start(out: Path) -> Callable[[], object]:
        paths = ["--batch", str(folder / "rows.jsonl"), "--out", str(out), "--compile", "off"]
        return lambda: generate.main([*paths, "--max-new-tokens", "32", "--batch-size", "4"])

    killed, reached = kill_rounds(folder / "killed.jsonl", start, lines, kills, seed)
    to_the_end(start(whole))
    expected = sorted(whole.read_text().splitlines())
    same = sorted(json.loads(line)["line"] for line in expected) == list(range(1, images * EACH + 1))
    same &= all(sorted(out.read_text().splitlines()) == expected for out in killed)
    return Outcome("batch", len(reached), reached, same)


def kill_saving(folder: Path, kills: int, seed: int = 0) -> Outcome:
    """Two models saved in turns over one folder; progress is how often that was seen to change hands."""
    target, versions, whole, reached = folder / "saved", [], True, []
    first = VisionLanguageModel.from_pretrained(tiny_checkpoint(folder / "first"))
    second = VisionLanguageModel(first.config)
    second.init_weights(torch.Generator().manual_seed(1))
    for number, model in enumerate((first, second)):
        model.save_pretrained(folder / f"version-{number}", embedded())
        versions.append(contents(folder / f"version-{number}"))

    def saving():
        for number in count():
            (first, second)[number % 2].save_pretrained(target, embedded())

    rng, progress = random.Random(seed), Changes(target / "config.json")
    for _ in range(kills):
        reached += kill_again_and_again(saving, progress, 1, rng, span=3)
        whole &= not target.exists() or contents(target) in versions
    first.save_pretrained(target, embedded())
    whole &= contents(target) == versions[0] and not list(folder.glob(".saved*"))
    return Outcome("saving", len(reached), reached, whole)


class Changes:
    """How often calls have found another file in a path's place, or other content in it: a file system may
    give the number of a file that is gone to a new one."""

    def __init__(self, path: Path):
        self.path, self.seen, self._last = path, 0, None

    def __call__(self) -> int:
        with suppress(OSError):
            status = self.path.stat()
            now = (status.st_ino, status.st_mtime_ns)
            self.seen, self._last = self.seen + (now != self._last), now
        return self.seen


def kill_rounds(
    output: Path,
    start: Callable[[Path], Callable[[], object]],
    progress: Callable[[Path], int],
    kills: int,
    seed: int,
) -> tuple[list[Path], list[int]]:
    """Kill `start(output)` until that was done `kills` times, each time it has ended with a new output, and
    let the last one end: the outputs, and how far it was at each kill."""
    rng, outputs, reached = random.Random(seed), [], []
    while len(reached) < kills and len(outputs) < kills + MORE_ROUNDS:
        now = output.with_name(f"{len(outputs)}-{output.name}")
        outputs.append(now)
        reached += kill_again_and_again(start(now), partial(progress, now), kills - len(reached), rng)
        to_the_end(start(now))
    return outputs, reached


def kill_again_and_again(
    work: Callable[[], object], progress: Callable[[], int], kills: int, rng: random.Random, span: int = 12
) -> list[int]:
    """Do `work` in a process that is killed, and again, `kills` times or until it has ended: how far it was
    at each.

    A moment is some milliseconds after a number of steps of `progress` from where the process began, `span`
    at most: with none, while it opens its files.

    Raises:
        RuntimeError: it failed, or nothing came of it for `PATIENCE` seconds.
    """
    reached: list[int] = []
    for _ in range(kills):
        process = FORK.Process(target=silenced, args=(work,))
        begin, goal, until = progress(), rng.randint(0, span), time.monotonic() + PATIENCE
        process.start()
        while process.exitcode is None and progress() < begin + goal and time.monotonic() < until:
            time.sleep(0.001)
        late = process.exitcode is None and progress() < begin + goal
        time.sleep(rng.uniform(0, 0.02) if goal else rng.uniform(0, 1))
        ended = process.exitcode
        process.kill()
        process.join()
        if late:
            raise RuntimeError(f"expected {goal} steps of progress in {PATIENCE} seconds, got fewer")
        if ended == 0:
            break
        if ended is not None:
            raise RuntimeError(f"expected work that goes on or ends with status 0, got {ended}")
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
    for style, share in apportioned(kills, STYLES).items():
        if share:
            outcome = kill_and_compare(folder, style, share, seed)
            made.append(Outcome(f"training, {style}", outcome.killed, outcome.steps, outcome.as_never_killed))
    return made


def apportioned(kills: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Each one's part of so many kills; their sum is `kills`."""
    made: dict[str, int] = {}
    for name, upto in zip(shares, accumulate(shares.values())):
        made[name] = round(kills * upto / sum(shares.values())) - sum(made.values())
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="of all parts together (default 100)")
    parser.add_argument("--parts", nargs="+", choices=tuple(SHARES), default=tuple(SHARES))
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    asked = parser.parse_args(arguments)
    report = os.fdopen(os.dup(1), "w", buffering=1)
    killed, bad = 0, 0
    torch.set_num_threads(1)  # threads do not survive a fork
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # progress bars of some dozen runs
        os.dup2(silent, stream)
    for part, kills in apportioned(asked.kills, {part: SHARES[part] for part in asked.parts}).items():
        if not kills:
            continue
        with tempfile.TemporaryDirectory() as folder:
            made = PARTS[part](Path(folder), kills, asked.seed)
        for outcome in made if isinstance(made, list) else [made]:
            killed, bad = killed + outcome.killed, bad + (not outcome.as_never_killed)
            report.write(json.dumps(asdict(outcome)) + "\n")
    report.write(json.dumps({"asked": asked.kills, "killed": killed, "not_as_never_killed": bad}) + "\n")
    return int(bad > 0 or killed < asked.kills)


PARTS: dict[str, Callable[[Path, int, int], Outcome | list[Outcome]]] = {
    "training": kill_training,
    "evaluation": kill_evaluation,
    "batch": kill_batch,
    "saving": kill_saving,
}

if __name__ == "__main__":
    sys.exit(main())
