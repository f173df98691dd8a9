"""Grammars become matchers: in the server, and before that on trial, where time and memory are bounded.

    matcher = compiled(tokenizer, grammar)             # ValueError for one that cannot be used

It imports nothing but llguidance. Where a system forks, the process of `inference.trial.Trials` runs
`inference.forking`, elsewhere `serve`, which is watched from outside.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import llguidance

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


def serve() -> None:
    """Try out the grammars that stdin says, one a line, until it ends, within no bounds. The first reply says
    that the tokenizer has been read."""
    tokenizer = read_tokenizer()
    reply(0, "")
    for line in sys.stdin.buffer:
        reply(0, refusal_of(tokenizer, json.loads(line)))


def read_tokenizer() -> Any:
    """What `inference.trial.Trials` sends first; None for none."""
    spec = json.loads(sys.stdin.buffer.readline())
    return spec and llguidance.LLTokenizer(*spec)


def refusal_of(tokenizer: Any, grammar: str) -> str:
    """Why there is no matcher of a grammar, or ""."""
    try:
        compiled(tokenizer, grammar)
    except ValueError as error:
        return str(error)[:1000]
    return ""


def compiled(tokenizer: Any, grammar: str) -> Any:
    """The matcher of a grammar; without a tokenizer the grammar is only looked at. Raises ValueError."""
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


def reply(taken: int, message: str) -> None:
    """The bytes that a grammar takes, and why it cannot be used, to whoever asked."""
    os.write(1, json.dumps([taken, message]).encode() + b"\n")
