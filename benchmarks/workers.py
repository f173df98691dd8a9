"""Each system in a process of its own, asked in turn: what one does to memory or threads reaches no other.

The parent starts `python SCRIPT --child JSON`, writes one job a line to its stdin and reads one reply a line.
Whatever a library prints goes to stderr. A child that dies takes only its own system out of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

Handler = Callable[[dict], dict]


class Unavailable(RuntimeError):
    """This system cannot run here; the message says why."""


def serve(setup: str, make: Callable[[dict], Handler]) -> None:
    """The child's side: make a system of the setup, answer jobs until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    handle, first = None, {"ready": True}
    try:
        handle = make(json.loads(setup))
    except Unavailable as error:
        first = {"unavailable": str(error)}
    print(json.dumps(first), file=replies, flush=True)
    if handle is not None:
        for line in sys.stdin:
            print(json.dumps(handle(json.loads(line))), file=replies, flush=True)


class Worker:
    """The parent's side of one child. Starts when first asked, and again after `close`."""

    def __init__(self, script: str, setup: dict):
        self.script, self.setup = script, setup
        self._process: subprocess.Popen | None = None
        self._errors = None

    def ask(self, job: dict) -> dict:
        """Raises Unavailable: the child cannot make its system, or has died."""
        if self._process is None:
            self._start()
        return self._exchange(job)

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the child
        environment = os.environ | {"OMP_NUM_THREADS": str(self.setup["threads"])}
        environment |= self.setup.get("environment", {})
        self._process = subprocess.Popen(
            [sys.executable, self.script, "--child", json.dumps(self.setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            cwd=Path(__file__).resolve().parent.parent,
        )
        first = self._read()
        if "unavailable" in first:
            raise Unavailable(first["unavailable"])

    def _exchange(self, job: dict) -> dict:
        with suppress(BrokenPipeError):  # it has died: `_read` tells how
            print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        raise Unavailable(f"its process ended with status {status}: {''.join(last) or 'without a word'}")

    def close(self) -> None:
        if self._process is not None:
            with suppress(BrokenPipeError):  # what a dead child did not read
                self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait()
            self._errors.close()
            self._process = None


def interleave(
    script: str,
    setups: Iterable[dict],
    jobs: Callable[[dict], list[dict]],
    rounds: int,
    together: bool,
) -> tuple[list[list[list[dict]]], dict[int, str]]:
    """Ask every system for its jobs, round after round, in turn.

    Args:
        setups: of the systems, each with "name" and "threads".
        jobs: of a system; each is sent with its "round", from 0, besides.
        together: keep all children alive, change the system after each job, and do all rounds of a job before
            the next one: what a child has in its cache is there in the next round. Otherwise each child is
            ended when its turn is over, so that only one model is in memory.

    Returns:
        replies[system][job], one for each round; and by system why it dropped out.
    """
    workers = [Worker(script, setup) for setup in setups]
    todo = [jobs(worker.setup) for worker in workers]
    replies: list[list[list[dict]]] = [[[] for _ in own] for own in todo]
    failed: dict[int, str] = {}
    order = [
        (number, system, job)
        for number in range(rounds)
        for system, own in enumerate(todo)
        for job in range(len(own))
    ]
    if together:
        order.sort(key=lambda place: (place[2], place[0]))
    try:
        for place, (number, system, job) in enumerate(order):
            if system in failed:
                continue
            name = workers[system].setup["name"]
            print(f"round {number + 1}/{rounds}: {name}: {todo[system][job]}", file=sys.stderr)
            try:
                replies[system][job].append(workers[system].ask(todo[system][job] | {"round": number}))
            except Unavailable as error:
                failed[system] = str(error)
                print(f"left out: {name}: {error}", flush=True)
            last = place + 1 == len(order) or order[place + 1][:2] != (number, system)
            if system in failed or (last and not together):
                workers[system].close()
    finally:
        for worker in workers:
            worker.close()
    return replies, failed
