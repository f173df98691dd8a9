"""The process in which grammars are tried out, on systems that fork: each in a fork of its own, which the
system ends. The tokenizer is read once: forking is safe because there are no threads."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from inference.compiling import read_tokenizer, refusal_of, reply
from inference.trial import MEMORY, SECONDS, TOO_MUCH, WALL_SECONDS

FAILED = 2  # the exit status after an error that is none of the grammar's


def serve() -> None:
    """Try out the grammars that stdin says, one a line, until it ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = read_tokenizer()
    for line in sys.stdin.buffer:
        if (child := os.fork()) == 0:
            try:
                _try_out(tokenizer, json.loads(line))
            except MemoryError:
                os._exit(1)
            finally:
                os._exit(FAILED)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == FAILED:
            reply(0, "the library that compiles it fails")
        elif code:  # mostly by a signal
            reply(0, TOO_MUCH)


def _try_out(tokenizer: Any, grammar: str) -> None:
    """All of a forked process."""
    bound(SECONDS, MEMORY)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = refusal_of(tokenizer, grammar)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        signal.setitimer(timer, 0)
    reply(taken * (1 if sys.platform == "darwin" else 1024), message)  # macOS counts bytes, Linux KiB
    os._exit(0)


def bound(seconds: float, memory: int) -> None:
    """Have this process end when it has taken so much processor time, or asks for so much more memory."""
    with suppress(OSError, ValueError):  # no such file, no such limit: not Linux
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
