"""Damaged inputs by the ten thousand, in a process with limits that may die of them.

    python -m tests.soak.fuzz images --inputs 50000 --seed 0
    python -m tests.soak.fuzz images --replay 1234567        # one input, in this process

An input is made by a random generator whose seed is its number. It must be taken, or refused by an exception
of our own in one printable sentence, within 5 s of processor time and 2 GiB of memory. Prints a line of JSON
with one input's number for each kind of finding; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
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
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("checkpoints", "images", "processor", "rows")
MOST_SECONDS = 5.0  # of processor time for one input
MOST_BYTES = 2 * 2**30
LONGEST_SENTENCE = 4000
LOOK_EVERY = 0.5  # seconds


class Wrong(Exception):
    """An input was taken, and what came of it is not what was promised."""


class Outcome(NamedTuple):
    """kind: "accepted", "refused" or "finding". name: for counting. detail: of a finding."""

    kind: str
    name: str
    detail: str = ""


@dataclass
class Report:
    """What became of the inputs: how many of each name, and a number and detail for each kind of finding."""

    inputs: int = 0
    accepted: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    findings: dict[str, tuple[int, str]] = field(default_factory=dict)
    peak_bytes: int = 0

    def note(self, number: int, outcome: Outcome) -> None:
        self.inputs += 1
        if outcome.kind == "finding":
            self.findings.setdefault(outcome.name, (number, outcome.detail))
        else:
            (self.accepted if outcome.kind == "accepted" else self.refused)[outcome.name] += 1


def target(name: str) -> ModuleType:
    """A target's module: `REFUSALS`, its exceptions that are refusals; `make(rng)`, an input;
    `opened(folder)`, a function that takes an input and says in a word what it was."""
    return import_module(name if "." in name else f"tests.soak.fuzz_{name}")


def judge(run: Callable[[Any], str], value: Any, refusals: tuple[type[Exception], ...]) -> Outcome:
    """Run one input. Only the keyboard still interrupts: Rust's panics are no Exception."""
    began = time.process_time()
    try:
        outcome = Outcome("accepted", run(value))
    except KeyboardInterrupt:
        raise
    except refusals as error:
        outcome = _refused(error)
    except BaseException as error:
        return Outcome("finding", _signature(error), _trace(error))
    seconds = time.process_time() - began
    if seconds > MOST_SECONDS and outcome.kind != "finding":
        return Outcome("finding", "slow", f"{seconds:.1f} s of processor time: {outcome.name}")
    return outcome


def _refused(error: Exception) -> Outcome:
    text, cause = str(error), error
    if not text.strip() or not text.isprintable() or len(text) > LONGEST_SENTENCE:
        return Outcome("finding", f"sentence:{_signature(error)}", f"{text[:500]!r}\n{_trace(error)}")
    while cause is not None:
        if isinstance(cause, MemoryError) or "can't allocate memory" in str(cause):
            return Outcome("finding", f"memory:{_signature(cause)}", _trace(error))
        cause = cause.__cause__ or cause.__context__
    return Outcome("refused", type(error).__name__)


def _signature(error: BaseException) -> str:
    """Exceptions of one type from one place count as one finding."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(str(ROOT)) and "/tests/" not in f.filename]
    last = (ours or frames)[-1:]
    return f"{type(error).__name__}@" + "".join(f"{Path(f.filename).name}:{f.name}" for f in last)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-6000:]


# ------------------------------------------------------------------------------------------------ the worker
def work(connection: Connection, name: str, folder: str, numbers: range, log: str) -> None:
    """Run the inputs of these numbers; before each its number is sent, after it (outcome, peak bytes)."""
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    faulthandler.enable(os.open(log, os.O_WRONLY | os.O_CREAT))
    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: waiting threads would count as computing
    os.environ["HF_HUB_OFFLINE"] = "1"
    module = target(name)
    run = module.opened(Path(folder))
    memory = psutil.Process().memory_info()
    resource.setrlimit(resource.RLIMIT_AS, (memory.vms + MOST_BYTES - memory.rss,) * 2)
    for number in numbers:
        value = module.make(random.Random(number))
        connection.send(number)
        outcome = judge(run, value, module.REFUSALS)
        connection.send((outcome, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def supervise(name: str, numbers: range, seconds: float = MOST_SECONDS) -> Report:
    """Run the inputs of these numbers in workers: one that dies or hangs is replaced."""
    report, following = Report(), numbers
    while following:
        with tempfile.TemporaryDirectory(prefix="ocelli-fuzz-") as folder:
            at = _one_worker(report, name, folder, following, seconds)
        if at is None:
            break
        following = following[following.index(at) + 1 :]
    return report


def _one_worker(report: Report, name: str, folder: str, numbers: range, seconds: float) -> int | None:
    """The number of the input that ended the worker; None where it came to its end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    log = Path(folder, "signals.log")
    process = context.Process(target=work, args=(theirs, name, folder, numbers, str(log)), daemon=True)
    process.start()
    theirs.close()
    number = None
    try:
        while True:
            started = cpu_seconds(process.pid)
            while not ours.poll(LOOK_EVERY):
                if number is not None and cpu_seconds(process.pid) - started > 2 * seconds:
                    process.kill()
                    report.note(number, Outcome("finding", "hang", f"more than {2 * seconds} s"))
                    return number
            message = ours.recv()
            if isinstance(message, int):
                number = message
            else:
                report.note(number, message[0])
                report.peak_bytes, number = max(report.peak_bytes, message[1]), None
    except (EOFError, ConnectionResetError):
        process.join()
        if number is None:
            assert process.exitcode == 0, f"the worker ended before an input: {process.exitcode}"
            return None
        died = Outcome("finding", f"died:{process.exitcode}", log.read_text() if log.exists() else "")
        report.note(number, died)
        return number


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far; 0 where it is gone."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.Error:
        return 0.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of {', '.join(TARGETS)}; all")
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs of each target (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first input")
    parser.add_argument("--replay", type=int, help="run the input of this number, in this process")
    settings = parser.parse_args(arguments)
    found = False
    for name in settings.targets or TARGETS:
        if settings.replay is not None:
            module = target(name)
            with tempfile.TemporaryDirectory() as folder:
                value = module.make(random.Random(settings.replay))
                outcome = judge(module.opened(Path(folder)), value, module.REFUSALS)
            print(f"{outcome.kind}: {outcome.name}\n{outcome.detail}\n{value!r:.4000}")
            found |= outcome.kind == "finding"
            continue
        report = supervise(name, range(settings.seed, settings.seed + settings.inputs))
        found |= bool(report.findings)
        print(json.dumps({"target": name, **vars(report)}), flush=True)
    sys.exit(found)


if __name__ == "__main__":
    main()
