"""Everything that writes, killed with SIGKILL again and again: nothing is lost, nothing is there twice.

    python -m tests.soak.kills                 # 100 kills, some minutes
    python -m tests.soak.kills --parts batch --kills 50

`map`, `streaming`, `rewards` and `ranks` are training runs: on rows that can be indexed, on a stream, on
rewards of a stream, and on a number of ranks that changes from one start to the next. What is logged, answers
that are kept and weights must be those of a run that was never killed, to the bit; with `ranks`, samples
exactly and losses within 1e-5. `evaluation` (`python -m eval`) and `batch` (`generate.py batch`) must hold
every question exactly once, with the answers of a run that was never killed. `saving` writes two checkpoints
in turns over one folder, which must hold one of them.

What ends before its kills are used up is begun anew elsewhere. The exit status is 1 if anything is not as it
should be, or fewer kills came about than were planned.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch

import generate
from eval.__main__ import main as evaluate
from models.vision_language_model import VisionLanguageModel
from tests import runs
from tests.evaluations import FORK, answered, write_rows
from tests.processors import embedded
from tests.runs import curve, figures, settings_in, tiny_checkpoint
from tests.waiting import PATIENCE
from training.metrics import METRICS
from training.state import FOLDER

EACH = 6  # questions about an image, for evaluation and batch
Start = Callable[[int], list]  # number of the start -> its processes


@dataclass(frozen=True)
class Outcome:
    """How often something was killed, how far it was each time, and whether the end is as if it never was."""

    part: str
    killed: int
    reached: list[int]
    as_never_killed: bool


# ------------------------------------------------------------------------------------------------- kills
def kill_again_and_again(
    start: Start,
    progress: Callable[[], int],
    kills: int,
    rng: random.Random,
    span: int = 12,
    saves: Callable[[], set] = set,
) -> list[int]:
    """Start processes and kill them, `kills` times or until they have ended: how far they were at each.

    A moment is some milliseconds after up to `span` steps of `progress` from where the processes began. With
    `saves`, every second one is in a save that these processes have begun. RuntimeError if they fail, or
    nothing comes of them for `PATIENCE` seconds.
    """
    reached: list[int] = []
    for number in range(kills):
        steps, before, in_save = rng.randint(0, span), saves(), saves is not set and number % 2 == 0
        goal, until, there = progress() + steps, time.monotonic() + PATIENCE, False
        processes = start(number)
        while not there and processes[0].exitcode is None and time.monotonic() < until:
            there = progress() >= goal and (not in_save or bool(saves() - before))
            time.sleep(0.001)
        late = not there and processes[0].exitcode is None
        time.sleep(rng.uniform(0, 0.02 if steps or in_save else 1))
        ended = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        if late or any(ended):
            raise RuntimeError(f"expected {steps} steps of progress, got status {ended} (None: too slow)")
        if 0 in ended:
            break
        reached.append(progress())
    return reached


def kill_rounds(
    output: Path,
    start: Callable[[Path], Start],
    progress: Callable[[Path], int],
    kills: int,
    seed: str,
    **more,
) -> tuple[list[Path], list[int]]:
    """Kill `start(output)` until that was done `kills` times, each time it has ended with a new output, and
    let the last one end: the outputs, and how far it was at each kill."""
    rng, outputs, reached = random.Random(seed), [], []
    while len(reached) < kills and len(outputs) < kills + 5:
        now = output.with_name(f"{len(outputs)}-{output.name}")
        outputs.append(now)
        moments = {name: partial(value, now) for name, value in more.items()}
        left = kills - len(reached)
        reached += kill_again_and_again(start(now), partial(progress, now), left, rng, **moments)
        to_the_end(start(now))
    return outputs, reached


def to_the_end(start: Start) -> None:
    if any(status != 0 for status in runs.ended(start(1))):
        raise RuntimeError("expected the last start to end with status 0")


def forked(work: Callable[[], object]) -> Start:
    def run() -> None:
        torch.set_num_threads(1)  # threads do not survive a fork
        status = work()
        sys.exit(status if isinstance(status, int) else 0)

    def start(number: int) -> list:
        process = FORK.Process(target=run)
        process.start()
        return [process]

    return start


def lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


# ------------------------------------------------------------------------------------------------- parts
def kill_training(folder: Path, kills: int, seed: int = 0, style: str = "map") -> Outcome:
    """train.py, saving every second step, or third; progress is the lines of metrics.jsonl."""
    if not (folder / "tiny").exists():
        runs.prepared(folder)
    more = {"save_every": 2, "ema": 0.9, "micro_batch_size": 2, "steps": 8 + 6 * kills}
    if streaming := style in ("streaming", "rewards"):
        more["shuffle_buffer"] = 5
    if style == "rewards":
        more |= runs.OF_REWARDS | {"save_every": 3, "batch_size": 4, "sequence_length": 200}
        more["rewards"] = {"length": {"weight": 1, "most": 8}}
    more["muon"] = "none" if style == "ranks" else "language"

    def start(output: Path) -> Start:
        settings = settings_in(folder, output.name, streaming=streaming, **more)
        return lambda number: runs.start((2, 1)[number % 2] if style == "ranks" else 1, **settings)

    killed, reached = kill_rounds(
        folder / f"killed-{style}",
        start,
        lambda output: lines(output / METRICS),
        kills,
        f"{style}:{seed}",
        saves=begun_saves,
    )
    whole, same = folder / f"whole-{style}", True
    to_the_end(start(whole))
    for output in killed:
        if style == "ranks":
            for one, other in zip(curve(output), curve(whole), strict=True):
                same &= (one[0], one[2]) == (other[0], other[2]) and abs(one[1] - other[1]) <= 1e-5
            continue
        same &= figures(output) == figures(whole) and len(figures(whole)) == more["steps"]
        kept = [runs.contents(run / "rollouts") for run in (output, whole)]
        weights = [(run / "model.safetensors").read_bytes() for run in (output, whole)]
        same &= kept[0] == kept[1] and weights[0] == weights[1]
    return Outcome(style, len(reached), reached, same)


def begun_saves(output: Path) -> set[tuple]:
    """What a save has begun and not ended: folders under their temporary names, and their times."""
    found = set()
    for path in [*(output / FOLDER).glob(".writing-*"), *output.parent.glob(f".{output.name}.saving")]:
        with suppress(OSError):
            found.add((path, path.stat().st_mtime_ns))
    return found


def kill_answers(command: str, folder: Path, kills: int, seed: int = 0, images: int = 30) -> Outcome:
    """`python -m eval`, or `generate.py batch`, on rows of images; progress is the lines of its results."""
    rows = write_rows(folder, images, EACH)
    few, results = ["--compile", "off", "--batch-size", "4"], {"evaluation": "samples.jsonl", "batch": ""}

    def start(out: Path) -> Start:
        if command == "evaluation":
            return forked(lambda: evaluate(["--data", str(rows), "--output", str(out), *few]))
        given = ["batch", str(rows), "--out", str(out), "--max-new-tokens", "32"]
        return forked(lambda: generate.main([*given, *few]))

    def answers(out: Path) -> list:
        if command == "evaluation":
            return sorted(answered(out).items())
        return sorted(out.read_text().splitlines())

    progress = lambda out: lines(out / results[command])
    killed, reached = kill_rounds(folder / f"killed-{command}", start, progress, kills, f"{seed}")
    to_the_end(start(whole := folder / f"whole-{command}"))
    expected = answers(whole)
    same = len(expected) == len(set(expected)) == images * EACH
    return Outcome(command, len(reached), reached, same and all(answers(out) == expected for out in killed))


def kill_saving(folder: Path, kills: int, seed: int = 0) -> Outcome:
    """Two models saved in turns over one folder; progress is how often one was."""
    target, log, versions, whole, reached = folder / "saved", folder / "log", [], True, []
    first = VisionLanguageModel.from_pretrained(tiny_checkpoint(folder / "first"))
    second = VisionLanguageModel(first.config)
    second.init_weights(torch.Generator().manual_seed(1))
    for number, model in enumerate((first, second)):
        model.save_pretrained(folder / f"version-{number}", embedded())
        versions.append(runs.contents(folder / f"version-{number}"))

    def save_in_turns() -> None:
        for number in count():
            (first, second)[number % 2].save_pretrained(target, embedded())
            with log.open("a") as file:
                file.write("saved\n")

    rng = random.Random(seed)
    for _ in range(kills):
        reached += kill_again_and_again(forked(save_in_turns), partial(lines, log), 1, rng, span=3)
        whole &= not target.exists() or runs.contents(target) in versions
    first.save_pretrained(target, embedded())
    whole &= runs.contents(target) == versions[0] and not list(folder.glob(".saved*"))
    return Outcome("saving", len(reached), reached, whole)


PARTS: dict[str, Callable[[Path, int, int], Outcome]] = {
    "map": kill_training,
    "streaming": partial(kill_training, style="streaming"),
    "rewards": partial(kill_training, style="rewards"),
    "ranks": partial(kill_training, style="ranks"),
    "evaluation": partial(kill_answers, "evaluation"),
    "batch": partial(kill_answers, "batch"),
    "saving": kill_saving,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="kills of all parts together (default 100)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # threads do not survive a fork
    kills, bad = max(1, options.kills // len(options.parts)), 0
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            outcome = PARTS[part](Path(folder), kills, options.seed)
        bad += not outcome.as_never_killed or outcome.killed < kills
        print(json.dumps(asdict(outcome)), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
