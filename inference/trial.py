"""Grammars are tried out in a process of their own, which ends those that take too long or too much memory.

    trials = Trials((tokenizer_json, vocab_size, stop_token_id))
    taken = trials(grammar)                            # bytes; TrialFailed for one that cannot be used

A schema of 90 bytes can stand for millions of states, and llguidance's limits do not see all of them. So a
grammar is compiled in the server only after it was compiled, within bounds, in a process of its own: what
that does is in `inference.forking`, where the system forks, and else in `inference.compiling`, with an eye on
it from here. Those are imported, like llguidance, only where something is compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

SECONDS, MEMORY = 1.0, 256 * 2**20  # of processor time and of memory, for one grammar
WALL_SECONDS = 30.0  # on a machine that is busy with other things
TOO_MUCH = f"it takes more than {SECONDS:g} s or {MEMORY // 2**20} MiB to compile"
FORKS = hasattr(os, "fork")
PROGRAMS = {True: "from inference.forking import serve; serve()",
            False: "from inference.compiling import serve; serve()"}  # fmt: skip
LOOK_EVERY = 0.02  # seconds


class TrialFailed(Exception):
    """Why a grammar cannot be used, in llguidance's words or in ours."""


class Trials:
    """The process is started for the first grammar, and ends with this object or the process that made it.

    Args:
        tokenizer: as JSON, its number of ids, and the id that ends an answer; None looks at grammars alone.
    """

    def __init__(self, tokenizer: tuple[str, int, int] | None):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, grammar: str) -> int:
        """Bytes that the grammar takes, about. Raises TrialFailed."""
        line = json.dumps(grammar).encode() + b"\n"
        with self._lock:
            reply = self._ask(line) or self._ask(line)  # again if the process has gone
        if not reply:
            raise TrialFailed("the process that compiles grammars has ended")
        taken, message = json.loads(reply)
        if message:
            raise TrialFailed(message)
        return taken

    def _ask(self, line: bytes) -> bytes:
        over = threading.Event()
        with suppress(OSError):
            if self._process is None:
                self._process = self._start()
            assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
            with _watched(self._process, over):
                self._process.stdin.write(line)
                self._process.stdin.flush()
                if reply := self._process.stdout.readline():
                    return reply
        if self._process is not None:
            _end(self._process)
        self._process = None
        if over.is_set():
            raise TrialFailed(TOO_MUCH)
        return b""

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAMS[FORKS]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
            start_new_session=True,  # Ctrl-C is not for it
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None and process.stdout is not None, "they are pipes"
        process.stdin.write(json.dumps(self._tokenizer).encode() + b"\n")
        if not FORKS:
            process.stdin.flush()
            process.stdout.readline()  # so that reading the tokenizer is no part of what a grammar takes
        return process


@contextmanager
def _watched(process: subprocess.Popen[bytes], over: threading.Event) -> Iterator[None]:
    """Where the system does not fork, end the process once it has taken more than a grammar may: `over`."""
    ended = threading.Event()

    def watch() -> None:
        with suppress(psutil.Error):  # it has ended
            seen = psutil.Process(process.pid)
            before, held, began = _taken(seen), seen.memory_info().rss, time.monotonic()
            looking = True
            while looking:
                late = time.monotonic() - began > WALL_SECONDS
                if late or _taken(seen) > before + SECONDS or seen.memory_info().rss > held + MEMORY:
                    over.set()
                    process.kill()
                    return
                looking = not ended.wait(LOOK_EVERY)

    watching = None if FORKS else threading.Thread(target=watch, name="trial")
    if watching is not None:
        watching.start()
    try:
        yield
    finally:
        ended.set()
        if watching is not None:
            watching.join()


def _taken(seen: psutil.Process) -> float:
    """Processor seconds of a process so far."""
    return sum(seen.cpu_times()[:2])


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe and pipe.close()
    process.kill()
    process.wait()
