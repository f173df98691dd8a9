"""Grammars become matchers: in the server, and before that on trial, where time and memory are bounded.

matcher = compiled(tokenizer, grammar)             # ValueError for one that cannot be used
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

import llguidance

from inference.apart import MEMORY, SECONDS, TOO_MUCH, WALL_SECONDS, bounded, say

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
FAILED = 2  # the exit status after an error that is none of the grammar's


def problem(grammar: str) -> str:
    """The reason why a grammar cannot be used, whatever the tokenizer, or ""."""
    limits = llguidance.LLParserLimits(**LIMITS)
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    return messages[0] if failed else ""


def compiled(tokenizer: Any, grammar: str) -> Any:
    """The matcher of a grammar. Raises ValueError."""
    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    for before in (b"", b" "):  # some grammars are too large for their first token, or allow none
        first, ids = matcher.deep_copy(), tokenizer.tokenize_bytes(before)
        if first.validate_tokens(ids) < len(ids):
            continue
        first.consume_tokens(ids)
        first.compute_logit_bias()
        if first.is_error():
            raise ValueError(first.get_error())
    return matcher


def serve() -> None:
    """All of the process of `inference.apart.Trials`: it reads the tokenizer once, and tries out each grammar
    in a fork, which the system may end. Forking is safe because there are no threads."""
    tokenizer = llguidance.LLTokenizer(*json.loads(sys.stdin.buffer.readline()))
    for line in sys.stdin.buffer:
        if (child := os.fork()) == 0:
            try:
                _try_out(tokenizer, json.loads(line))
            except MemoryError:
                os._exit(1)
            finally:
                os._exit(FAILED)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:  # mostly by a signal
            say([0, "the library that compiles it fails" if code == FAILED else TOO_MUCH])


def _try_out(tokenizer: Any, grammar: str) -> None:
    """All of a forked process: says the bytes that a grammar takes, and why it cannot be used."""
    bounded(SECONDS, WALL_SECONDS, MEMORY)
    message, before = "", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        compiled(tokenizer, grammar)
    except ValueError as error:
        message = str(error)[:1000]
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        signal.setitimer(timer, 0)
    say([taken * (1 if sys.platform == "darwin" else 1024), message])  # macOS counts bytes, Linux KiB
    os._exit(0)
