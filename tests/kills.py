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
from tests.runs import SETTINGS, curve, flags, named, start, tiny_checkpoint, write_rows
from tests.waiting import PATIENCE
from training.metrics import METRICS
from training.state import FOLDER, states

STYLES = ("map", "streaming", "ranks")
MORE_ROUNDS = 5  # than kills, of work that ended before its kills were used up


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
    data = named(folder / "rows.jsonl", streaming=style == "streaming")
    made = {"init_from": str(folder / "tiny"), "output": str(folder / name), "data": data}
    made |= {"save_every": 2, "ema": 0.9, "shuffle_buffer": 5, "micro_batch_size": 2}
    return made | {"muon": "none" if style == "ranks" else "language"}


def kill_and_compare(folder: Path, style: str, kills: int, seed: int = 0) -> Outcome:
    """Kill runs until that was done `kills` times, let each end, and compare it; `folder` is for their files.

    A run that ended before its kills were used up is followed by a new one.
    """
    if not (folder / "tiny").exists():
        tiny_checkpoint(folder / "tiny")
        write_rows(folder / "rows.jsonl")
    rng, steps = random.Random(f"{style}:{seed}"), {"steps": 12 + 8 * kills}
    whole = settings_of(folder, style, f"whole-{style}") | steps
    train.main(flags(**(SETTINGS | whole)))
    theirs, weights = curve(Path(whole["output"])), Path(whole["output"], "model.safetensors").read_bytes()
    at, saving, samples, same, differs, rounds = [], 0, True, True, 0.0, 0
    while len(at) < kills and rounds < kills + MORE_ROUNDS:
        settings = settings_of(folder, style, f"killed-{style}-{rounds}") | steps
        reached, in_saving = kill_again_and_again(rng, style, settings, kills - len(at))
        at, saving, rounds = at + reached, saving + in_saving, rounds + 1
        train.main(flags(**(SETTINGS | settings)))
        ours = curve(Path(settings["output"]))
        samples &= [(step, ids) for step, _, ids in ours] == [(step, ids) for step, _, ids in theirs]
        same &= Path(settings["output"], "model.safetensors").read_bytes() == weights
        differs = max(differs, *(abs(a - b) for (_, a, _), (_, b, _) in zip(ours, theirs)))
    return Outcome(style, len(at), saving, at, samples, same, differs)


def kill_again_and_again(rng: random.Random, style: str, settings: dict, kills: int) -> tuple[list[int], int]:
    """Kill a run, and again what goes on with it, `kills` times or until it has ended: the steps that it had
    reached, and how often it was saving.

    Raises:
        RuntimeError: it failed.
    """
    output, saving, at = Path(settings["output"]), 0, []
    for number in range(kills):
        ranks = (2, 1)[number % 2] if style == "ranks" else 1
        before = left_by(output)
        processes = start(ranks, **settings)
        try:
            wait_for_moment(rng, output, processes[0], before, in_saving=number % 2 == 0)
        finally:
            ended = [process.exitcode for process in processes]
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
        if any(ended):
            raise RuntimeError(f"expected runs that go on or end with status 0, got {ended}")
        if 0 in ended:  # before its moment came
            break
        saving += bool(halves(output) - before)
        at.append(last_step(output))
    return at, saving


def wait_for_moment(rng: random.Random, output: Path, process, before: set, in_saving: bool) -> None:
    """Until a random moment: in one of the next three saves, or up to six steps behind the last save, which
    includes moments before the run has begun. `before` is what the last run left.

    Raises:
        RuntimeError: it did not come within `PATIENCE` seconds.
    """
    begin, saves, steps = last_save(output), rng.randint(0, 2), rng.randint(0, 6)
    until = time.monotonic() + PATIENCE
    while process.exitcode is None:
        now = left_by(output) - before
        if in_saving and now & halves(output) and last_save(output) >= begin + 2 * saves:
            break
        if not in_saving and (steps == 0 or (now and last_step(output) >= begin + steps)):
            break
        if time.monotonic() > until:
            raise RuntimeError(f"expected steps and saves within {PATIENCE} seconds, got none or too few")
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
