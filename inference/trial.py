"""Grammars are tried out in a process of their own, which ends those that take too long or too much memory.

    trials = Trials((tokenizer_json, vocab_size, stop_token_id))
    taken = trials(grammar)                            # bytes; TrialFailed for one that cannot be used

A schema of 90 bytes can stand for millions of states, and llguidance's limits do not see all of them. So a
grammar is compiled in the server only after a fork of another process compiled it within bounds
(`inference.compiling.serve`). That, like llguidance, is imported only where something is compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path

SECONDS, MEMORY = 1.0, 256 * 2**20  # of processor time and of memory, for one grammar
WALL_SECONDS = 30.0  # on a machine that is busy with other things
TOO_MUCH = f"it takes more than {SECONDS:g} s or {MEMORY // 2**20} MiB to compile"
PROGRAM = "from inference.compiling import serve; serve()"


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
        with suppress(OSError):
            if self._process is None:
                self._process = self._start()
            assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
            self._process.stdin.write(line)
            self._process.stdin.flush()
            if reply := self._process.stdout.readline():
                return reply
        if self._process is not None:
            end_process(self._process)
        self._process = None
        return b""

    def _start(self) -> subprocess.Popen[bytes]:
        process = start_process(PROGRAM)
        weakref.finalize(self, end_process, process)
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(json.dumps(self._tokenizer).encode() + b"\n")
        return process


def start_process(program: str) -> subprocess.Popen[bytes]:
    """One that runs this line of Python, with pipes to and from it, and nothing of this one's secrets.

    NumPy's threads, one for each core, would need more memory than such a process may take."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
        start_new_session=True,  # Ctrl-C is not for it
    )


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe and pipe.close()
    process.wait()
