"""Inputs by the ten thousand for what reads files and rows of others, in a process that may die of them.

    python -m tests.robustness.fuzz images --inputs 50000 --seed 0
    python -m tests.robustness.fuzz images --replay runs/fuzz/images/0a1b2c3d4e.pickle

Each input must be taken or refused by an exception of our own, within 5 s of processor time and 2 GiB of
memory. What is not lies in runs/fuzz/TARGET afterwards, one example of each kind, the smallest: the input
(a pickle) and what happened (text). Prints a line of JSON; the status is 1 if there are findings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from tests.robustness.judging import MOST_SECONDS, TARGETS, Outcome
from tests.robustness.worker import replay, work

FINDINGS = Path(__file__).resolve().parents[2] / "runs" / "fuzz"
LOOK_EVERY = 0.5  # seconds
MOST_LOOKS = 240  # for one input that waits without computing


@dataclass
class Report:
    """What a run has seen."""

    target: str
    inputs: int = 0
    accepted: Counter = field(default_factory=Counter)
    refused: Counter = field(default_factory=Counter)
    findings: Counter = field(default_factory=Counter)
    slowest: float = 0.0
    peak_bytes: int = 0
    cpu_seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps(
            {
                "target": self.target,
                "inputs": self.inputs,
                "inputs_per_cpu_second": round(self.inputs / max(self.cpu_seconds, 1e-9), 1),
                "accepted": dict(self.accepted),
                "refused": dict(self.refused),
                "findings": dict(self.findings),
                "slowest_cpu_seconds": round(self.slowest, 3),
                "peak_mebibytes": self.peak_bytes // 2**20,
            }
        )


class Supervisor:
    """Keeps a worker running until all inputs are through, and notes what became of each.

    Args:
        name: of the target, or of a module that is one.
        folder: for findings.
    """

    def __init__(self, name: str, folder: Path, seconds: float = MOST_SECONDS, progress: bool = False):
        self.name, self.folder, self.seconds = name, folder, seconds
        self.report = Report(name.rpartition(".")[2])
        self._sizes: dict[str, int] = {}
        self._bar = tqdm(unit="input", mininterval=10, disable=not progress)

    def run(self, inputs: int, seed: int) -> Report:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._bar.reset(total=inputs)
        number = idle = 0
        while self.report.inputs < inputs and idle < 3:
            before = self.report.inputs
            self._one_worker(inputs - before, seed + 1_000_003 * number)
            number += 1
            idle = idle + 1 if self.report.inputs == before else 0
        assert self.report.inputs >= inputs, f"workers for {self.name} end before their first input"
        return self.report

    def _one_worker(self, count: int, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        with tempfile.TemporaryDirectory(prefix="ocelli-fuzz-") as scratch:
            log = Path(scratch, "signals.log")
            arguments = (theirs, self.name, Path(scratch, "files"), log, seed, count)
            Path(scratch, "files").mkdir()
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._listen(ours, process, log)
            process.join()
            ours.close()

    def _listen(self, connection, process, log: Path) -> None:
        current: bytes | None = None
        cpu = 0.0
        try:
            while True:
                if not self._comes(connection, process.pid, current, log):
                    return
                message = connection.recv_bytes()
                if current is None:
                    current = message
                    continue
                outcome, peak = pickle.loads(message)
                self._note(outcome, current)
                self.report.peak_bytes = max(self.report.peak_bytes, peak)
                cpu, current = cpu_seconds(process.pid) or cpu, None
        except (EOFError, ConnectionResetError):
            process.join()
            if current is not None:
                reason = f"the process died: exit code {process.exitcode}\n{log.read_text()}"
                self._note(Outcome("finding", f"died:{process.exitcode}", reason), current)
        finally:
            self.report.cpu_seconds += cpu

    def _comes(self, connection, pid: int, current: bytes | None, log: Path) -> bool:
        """Wait for the next message; False where the worker had to be killed."""
        at_first, looks = None, 0
        while not connection.poll(LOOK_EVERY):
            if current is None:
                continue  # it is starting, or hypothesis thinks
            looks, cpu = looks + 1, cpu_seconds(pid)
            at_first = cpu if at_first is None else at_first
            if cpu is None or (cpu - at_first <= self.seconds and looks < MOST_LOOKS):
                continue
            os.kill(pid, signal.SIGUSR1)  # it says where it is
            told = 0
            for _ in range(MOST_LOOKS):
                time.sleep(LOOK_EVERY)
                before, told = told, log.stat().st_size
                if told and told == before:
                    break
            os.kill(pid, signal.SIGKILL)
            self._note(Outcome("finding", "hang", f"more than {self.seconds} s\n{log.read_text()}"), current)
            return False
        return True

    def _note(self, outcome: Outcome, value: bytes) -> None:
        report = self.report
        report.inputs += 1
        self._bar.update()
        self._bar.set_postfix(report.findings, refresh=False)
        report.slowest = max(report.slowest, outcome.seconds)
        counts = {"accepted": report.accepted, "refused": report.refused}.get(outcome.kind, report.findings)
        counts[outcome.name] += 1
        if outcome.kind == "finding" and len(value) < self._sizes.get(outcome.name, sys.maxsize):
            self._sizes[outcome.name] = len(value)
            place = self.folder / hashlib.sha256(outcome.name.encode()).hexdigest()[:10]
            place.with_suffix(".pickle").write_bytes(value)
            shown = repr(pickle.loads(value))[:4000]
            text = f"{outcome.name}\n\n{outcome.detail}\n\n{shown}\n"
            place.with_suffix(".txt").write_text(text, encoding="utf-8", errors="backslashreplace")


def cpu_seconds(pid: int) -> float | None:
    """Processor time of a process so far; None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.robustness.fuzz", description=__doc__.splitlines()[0]
    )
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--inputs", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=Path, help="run the input of one finding, in this process")
    asked = parser.parse_args(arguments)
    if asked.replay:
        with tempfile.TemporaryDirectory() as folder:
            outcome = replay(asked.target, Path(folder), pickle.loads(asked.replay.read_bytes()))
        print(f"{outcome.kind}: {outcome.name}\n{outcome.detail}")
        sys.exit(outcome.kind == "finding")
    report = Supervisor(asked.target, FINDINGS / asked.target, progress=True).run(asked.inputs, asked.seed)
    print(report.to_json())
    sys.exit(bool(report.findings))


if __name__ == "__main__":
    main()
