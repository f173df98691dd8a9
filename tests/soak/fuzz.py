"""Damaged inputs by the ten thousand, in a process with limits that may die of them.

    python -m tests.soak.fuzz images --inputs 50000 --seed 0
    python -m tests.soak.fuzz images --seed 1234567 --inputs 1      # one input

An input is made by a random generator whose seed is its number. It must be taken, or refused by an exception
of our own in one printable sentence, within 5 s of processor time and 2 GiB of memory. Prints a line for each
kind of finding, with an input's number; the exit status is 1 if there are any. An input that ends the process
or hangs is the one whose number was printed last: go on behind it with --seed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("checkpoints", "images", "processor")
MOST_SECONDS = 5.0  # of processor time for one input
MOST_BYTES = 2 * 2**30
LONGEST_SENTENCE = 4000


class Wrong(Exception):
    """An input was taken, and what came of it is not what was promised."""


class Outcome(NamedTuple):
    """kind: "accepted", "refused" or "finding". name: for counting. detail: of a finding."""

    kind: str
    name: str
    detail: str = ""


def target(name: str) -> ModuleType:
    """A target's module: `REFUSALS`, its exceptions that are refusals; `make(rng)`, an input;
    `opened(folder)`, a function that takes an input and says in a word what it was."""
    return import_module(f"tests.soak.fuzz_{name}")


def judge(run: Callable[[Any], str], value: Any, refusals: tuple[type[Exception], ...]) -> Outcome:
    """Run one input. Only the keyboard still interrupts: Rust's panics are no Exception."""
    began = time.process_time()
    try:
        outcome = Outcome("accepted", run(value))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        trace, text = "".join(traceback.format_exception(error))[-6000:], str(error)
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if f.filename.startswith(str(ROOT)) and "/tests/" not in f.filename]
        last = (ours or frames)[-1]  # exceptions of one type from one place count as one finding
        place = f"{type(error).__name__}@{Path(last.filename).name}:{last.name}"
        if not isinstance(error, refusals):
            return Outcome("finding", place, trace)
        if not text.strip() or not text.isprintable() or len(text) > LONGEST_SENTENCE:
            return Outcome("finding", f"sentence:{place}", trace)
        if "MemoryError" in trace or "can't allocate memory" in trace:
            return Outcome("finding", f"memory:{place}", trace)
        outcome = Outcome("refused", type(error).__name__)
    seconds = time.process_time() - began
    return outcome if seconds <= MOST_SECONDS else Outcome("finding", "slow", f"{seconds:.1f} s")


def fuzz(name: str, numbers: range, folder: Path) -> tuple[Counter[str], dict[str, str]]:
    """How many inputs of each kind, and for each finding a number and a trace."""
    module, kinds, findings = target(name), Counter[str](), dict[str, str]()
    run = module.opened(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in numbers:
            print(f"\r{name} {number}", end="", file=sys.stderr, flush=True)
            outcome = judge(run, module.make(random.Random(number)), module.REFUSALS)
            kinds[outcome.kind] += 1
            if outcome.kind == "finding":
                findings.setdefault(outcome.name, f"{name} --seed {number} --inputs 1\n{outcome.detail}")
    return kinds, findings


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of {', '.join(TARGETS)}; all")
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs of each target (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first input")
    settings = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # waiting threads would count as computing
    faulthandler.enable()
    found = False
    for name in settings.targets or TARGETS:
        target(name)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_BYTES, resource.RLIM_INFINITY))
        with tempfile.TemporaryDirectory(prefix="ocelli-fuzz-") as folder:
            numbers = range(settings.seed, settings.seed + settings.inputs)
            kinds, findings = fuzz(name, numbers, Path(folder))
        print(name, dict(kinds), *findings.values(), sep="\n", flush=True)
        found |= bool(findings)
    sys.exit(found)


if __name__ == "__main__":
    main()
