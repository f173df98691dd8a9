"""Training runs that are killed with SIGKILL again and again, compared with one that never was.

    python -m tests.kills --kills 20        # for each style of data; some minutes

Half of the moments are drawn while something is being saved. Every run goes on from what the last one left;
at the end loss curve and sample ids must be those of the run that was never killed: to the bit, weights as
well, or, where the number of ranks changes from one run to the next, samples exactly and losses within 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import train
from tests.runs import SETTINGS, curve, flags, start, tiny_checkpoint, write_rows
from training.metrics import METRICS
from training.state import FOLDER, states

STYLES = ("map", "streaming", "ranks")


@dataclass(frozen=True)
class Outcome:
    """How often a run was killed, how often of these while it saved, at which steps, and how it differs from
    the one that never was."""

    style: str
    killed: int
    saving: int
    steps: list[int]
    same_samples: bool
    same_weights: bool
    largest_difference: float

    @property
    def as_never_killed(self) -> bool:
        if self.style == "ranks":
            return self.same_samples and self.largest_difference <= 1e-5
        return self.same_samples and self.same_weights and self.largest_difference == 0


def settings_of(folder: Path, style: str, name: str) -> dict:
    """Settings of a run that saves every second step."""
    data = {"path": str(folder / "rows.jsonl"), "name": "rows", "streaming": style == "streaming"}
    made = {"init_from": str(folder / "tiny"), "output": str(folder / name), "data": [data]}
    made |= {"save_every": 2, "ema": 0.9, "shuffle_buffer": 5, "micro_batch_size": 2}
    return made | {"muon": "none" if style == "ranks" else "language"}


def kill_and_compare(folder: Path, style: str, kills: int, seed: int = 0) -> Outcome:
    """Kill a run `kills` times, let it end, and compare it; `folder` is for its files."""
    if not (folder / "tiny").exists():
        tiny_checkpoint(folder / "tiny")
        write_rows(folder / "rows.jsonl")
    rng, steps = random.Random(f"{style}:{seed}"), 12 + 8 * kills
    settings = settings_of(folder, style, f"killed-{style}") | {"steps": steps}
    output, killed, saving, at = Path(settings["output"]), 0, 0, []
    for number in range(kills):
        ranks = (2, 1)[number % 2] if style == "ranks" else 1
        before = left_by(output)
        processes = start(ranks, **settings)
        wait_for_moment(rng, output, processes[0], before, in_saving=number % 2 == 0)
        ended = any(process.exitcode is not None for process in processes)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        if ended:  # before its moment came
            break
        killed, saving = killed + 1, saving + bool(halves(output) - before)
        at.append(last_step(output))
    train.main(flags(**(SETTINGS | settings)))
    whole = settings_of(folder, style, f"whole-{style}") | {"steps": steps}
    train.main(flags(**(SETTINGS | whole)))
    ours, theirs = curve(output), curve(Path(whole["output"]))
    weights = [Path(run["output"], "model.safetensors").read_bytes() for run in (settings, whole)]
    return Outcome(
        style,
        killed,
        saving,
        at,
        [(step, samples) for step, _, samples in ours] == [(step, samples) for step, _, samples in theirs],
        weights[0] == weights[1],
        max(abs(a - b) for (_, a, _), (_, b, _) in zip(ours, theirs)),
    )


def wait_for_moment(rng: random.Random, output: Path, process, before: set, in_saving: bool) -> None:
    """Until a random moment: in one of the next three saves, or up to six steps behind the last save, which
    includes moments before the run has begun. `before` is what the last run left."""
    begin, saves, steps = last_save(output), rng.randint(0, 2), rng.randint(0, 6)
    while process.exitcode is None:
        now = left_by(output) - before
        if in_saving and now & halves(output) and last_save(output) >= begin + 2 * saves:
            break
        if not in_saving and (steps == 0 or (now and last_step(output) >= begin + steps)):
            break
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.02) if in_saving or steps else rng.uniform(0, 1))


def halves(output: Path) -> set[tuple]:
    """What a save has begun and not ended: folders under their temporary names, and what tells them apart."""
    return marks([*(output / FOLDER).glob(".writing-*"), *output.parent.glob(f".{output.name}.saving")])


def left_by(output: Path) -> set[tuple]:
    """The same, and the metrics, which a run that goes on begins by writing anew."""
    return halves(output) | marks([output / METRICS])


def marks(paths: list[Path]) -> set[tuple]:
    found = set()
    for path in paths:
        with suppress(OSError):
            found.add((path, path.stat().st_ino))
    return found


def last_save(output: Path) -> int:
    found = states(output / FOLDER)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def last_step(output: Path) -> int:
    """The step of the last whole line of metrics.jsonl; 0 before there is one."""
    try:
        lines = (output / METRICS).read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:
        return 0
    return max((json.loads(line)["step"] for line in lines[-1:]), default=0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each style (default 20)")
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=STYLES)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    asked = parser.parse_args(arguments)
    report = os.fdopen(os.dup(1), "w", buffering=1)
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # some dozen progress bars
        os.dup2(silent, stream)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for style in asked.styles:
            outcome = kill_and_compare(Path(folder), style, asked.kills, asked.seed)
            failed |= not outcome.as_never_killed or outcome.killed < asked.kills
            report.write(json.dumps(asdict(outcome) | {"as_never_killed": outcome.as_never_killed}) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
