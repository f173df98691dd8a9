"""Work on what strangers send, in a process of its own: the system ends it where it takes too much.

    child = Apart("web.videos:serve")                  # runs `serve()` of that module
    child.send({"name": "video 1"}, data)              # a line of JSON, and bytes after it
    message = child.reply()                            # a line of JSON; None: see `child.status`
    child.end()

No thread of this process can be ended, and a packet of a video or a schema of 90 bytes can keep a decoder or
a compiler busy for hours. The child knows nothing of this process's secrets.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS, MEMORY = 1.0, 256 * 2**20  # of processor time and of memory, for one grammar
WALL_SECONDS = 30.0  # on a machine that is busy with other things
TOO_MUCH = f"it takes more than {SECONDS:g} s or {MEMORY // 2**20} MiB to compile"


class Apart:
    """A process that runs a function of ours, "module:name", with pipes to it and from it."""

    def __init__(self, function: str):
        module, name = function.split(":")
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        # NumPy's threads, one for each core, would need more memory than such a process may take.
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {module} import {name}; {name}()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
            start_new_session=True,  # Ctrl-C is not for it
        )

    def send(self, message: Any, data: bytes = b"") -> None:
        assert self._process.stdin is not None, "it is a pipe"
        with suppress(OSError):  # it has ended, as `reply` says
            self._process.stdin.write(json.dumps(message).encode() + b"\n" + data)
            self._process.stdin.flush()

    def reply(self) -> Any:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None  # it may end within a line

    def read(self, size: int) -> bytes:
        """The bytes after a reply; fewer where it has ended."""
        assert self._process.stdout is not None, "it is a pipe"
        return self._process.stdout.read(size)

    @property
    def status(self) -> int:
        """Its exit status, or minus the signal that ended it."""
        return self._process.wait()

    def terminate(self) -> None:
        """Have it end soon, whoever waits for its reply."""
        self._process.terminate()

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe and pipe.close()
        self._process.wait()


def bounded(seconds: float, wall: float, memory: int) -> None:
    """From here on this process may take so much processor time, time and memory; a signal ends it then, or a
    MemoryError."""
    with suppress(OSError, ValueError):  # no such file, no such limit: not Linux
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        taken = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (taken + memory, taken + memory))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, wall)


def say(message: Any, data: bytes = b"") -> None:
    """A reply of the process apart."""
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n" + data)
    sys.stdout.buffer.flush()


class TrialFailed(Exception):
    """The reason why a grammar cannot be used, in llguidance's words or in ours."""


class Trials:
    """Grammars are tried out in a process of their own (`inference.compiling.serve`), because llguidance's
    limits do not see all that a grammar takes. It is started for the first one, and ends with this object.

    Args:
        tokenizer: as JSON, its number of ids, and the id that ends an answer.
    """

    def __init__(self, tokenizer: tuple[str, int, int]):
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self._child: Apart | None = None

    def __call__(self, grammar: str) -> int:
        """Bytes that the grammar takes, about. Raises TrialFailed."""
        with self._lock:
            reply = self._ask(grammar) or self._ask(grammar)  # again if the process has gone
        taken, message = reply or (0, "the process that compiles grammars has ended")
        if message:
            raise TrialFailed(message)
        return taken

    def _ask(self, grammar: str) -> tuple[int, str] | None:
        if self._child is None:
            self._child = Apart("inference.compiling:serve")
            weakref.finalize(self, self._child.end)
            self._child.send(self._tokenizer)
        self._child.send(grammar)
        if (reply := self._child.reply()) is None:
            self._child.end()
            self._child = None
        return reply
