"""Grammars are tried out in a process of their own, which ends those that take too long or too much memory.

    trials = Trials((tokenizer_json, vocab_size, stop_token_id))
    taken = trials(grammar)                            # bytes; TrialFailed for one that cannot be used

A schema of 90 bytes can stand for millions of states, and llguidance's limits do not see all of them. So a
grammar is compiled in the server only after it was seen to take less than `SECONDS` and `MEMORY` here. The
process reads the tokenizer once and forks for each grammar, which is safe because it has no threads: after
one that was ended nothing has to be read again. It imports nothing but llguidance.
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
WALL_SECONDS = 30  # on a machine that is busy with other things
# Of llguidance's limits: 20 MB of states, and of the work for one token 15 ms.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "max_grammar_size": 100_000,
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "verbose_errors": False,
}
PROGRAM = "from inference.trial import serve; serve()"


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
            _end(self._process)
        self._process = None
        return b""

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
            start_new_session=True,  # Ctrl-C is not for it
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(json.dumps(self._tokenizer).encode() + b"\n")
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe and pipe.close()
    process.kill()
    process.wait()


# ------------------------------------------------------------------------------------------- in that process


def serve() -> None:
    """Try out the grammars that stdin says, one a line, until it ends."""
    import llguidance

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    spec = json.loads(sys.stdin.buffer.readline())
    tokenizer = spec and llguidance.LLTokenizer(*spec)
    for line in sys.stdin.buffer:
        if (child := os.fork()) == 0:
            try:
                _try_out(tokenizer, json.loads(line))
            finally:
                os._exit(1)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            message = f"it takes more than {SECONDS:g} s or {MEMORY // 2**20} MiB to compile"
            _reply(0, message)


def _try_out(tokenizer: Any, grammar: str) -> None:
    """All of a forked process."""
    bound(SECONDS, MEMORY)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        compiled(tokenizer, grammar)
        message = ""
    except ValueError as error:
        message = str(error)[:1000]
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        signal.setitimer(timer, 0)
    _reply(taken * 1024, message)
    os._exit(0)


def bound(seconds: float, memory: int) -> None:
    """Have this process end when it has taken so much processor time, or asks for so much more memory."""
    with suppress(OSError, ValueError):  # no such file, no such limit: not Linux
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)


def compiled(tokenizer: Any, grammar: str) -> Any:
    """The matcher of a grammar; without a tokenizer the grammar is only looked at. Raises ValueError."""
    import llguidance

    own = llguidance.LLParserLimits(**LIMITS)
    if tokenizer is None:
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, limits=own)
        if failed:
            raise ValueError(messages[0])
        return None
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=own)
    for before in (b"", b" "):  # some grammars are too large for their first token, or allow none
        first = matcher.deep_copy()
        first.consume_tokens(tokenizer.tokenize_bytes(before))
        first.compute_logit_bias()
        if first.is_error():
            raise ValueError(first.get_error())
    return matcher


def _reply(taken: int, message: str) -> None:
    os.write(1, json.dumps([taken, message]).encode() + b"\n")
