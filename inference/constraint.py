"""Answers that are held to a grammar, token by token, with llguidance.

    constraints = Constraints(tokenizer, vocab_size, stop_token_ids)      # of a checkpoint
    options = GenerationOptions(constraint=constraints(json_grammar(schema)))

Each answer has a matcher of its own, so that rows of a batch know nothing of one another. What the grammar
leaves no choice about is forced: those tokens are not asked of the model, and they are computed together.
After what cannot go on, the stop token is forced as well.

This file and its library are imported only where an answer is constrained (`Checkpoint.constraint`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import llguidance
import torch
from torch import Tensor

from data.errors import one_line
from data.tokenizer import AnyTokenizer, no_panic
from generation.kv_cache import to_device
from generation.options import ConstraintError
from inference.errors import RequestError
from inference.grammar import LIMITS, refusal

_IS_ZERO = bytes([1] + 255 * [0])
MOST_COMPILED = 64  # grammars that are kept for the next answers


class Constraint:
    """What may come next in one answer: a `generation.protocol.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, stop_ids: Sequence[int], ids: int, vocab_size: int):
        self._matcher, self._stop_ids = matcher, list(stop_ids)
        # One tensor that stays, on these bytes: a token of a small model takes no longer than a few tensors.
        self._bytes = bytearray(ids)
        self._banned = torch.frombuffer(self._bytes, dtype=torch.bool)[:vocab_size]
        self._ended = False
        self._forced = self._find_forced()

    def allows(self, token_id: int) -> bool:
        if self._ended or self._forced:
            return token_id in (self._stop_ids if self._ended else self._forced[:1])
        known = self._stop_ids[0] if token_id in self._stop_ids else token_id  # to llguidance
        return self._matcher.validate_tokens([known]) == 1

    def mask(self, scores: Tensor) -> None:
        """Scores (V,), in place. Raises ConstraintError where the grammar has become too large to go on."""
        if self._ended or self._forced:
            only = self._stop_ids if self._ended else self._forced[:1]
            kept = scores[only]
            scores.fill_(-torch.inf)
            scores[only] = kept
            return
        bias = self._matcher.compute_logit_bias()  # 0 where a token is not allowed
        if self._matcher.is_error():
            raise ConstraintError(refusal(self._matcher.get_error()))
        self._bytes[:] = bias.translate(_IS_ZERO)
        for stop_id in self._stop_ids[1:]:  # the first is the one that llguidance knows
            self._bytes[stop_id] = self._bytes[self._stop_ids[0]]
        on_cpu = scores.device.type == "cpu"
        scores.masked_fill_(self._banned if on_cpu else to_device(self._banned, scores.device), -torch.inf)

    def accept(self, token_id: int) -> None:
        if self._ended or token_id in self._stop_ids:
            self._ended, self._forced = True, []
            return
        self._matcher.consume_token(token_id)  # one that is not allowed is an error that `mask` raises
        self._forced = self._forced[1:] if self._forced[:1] == [token_id] else []
        if not self._forced:
            self._forced = self._find_forced()

    def forced(self) -> list[int]:
        return list(self._forced)

    def _find_forced(self) -> list[int]:
        ids, after = [], self._matcher
        if not after.is_stopped():
            ids = after.compute_ff_tokens()
            if ids:
                after = after.deep_copy()
                after.consume_tokens(ids)
        return ids + self._stop_ids[:1] if after.is_stopped() and not after.is_error() else ids


class Constraints:
    """Makes constraints for the answers of one checkpoint; keeps the grammars that it compiled last.

    Args:
        vocab_size: of the model, which may have more ids than the tokenizer.
        stop_token_ids: what ends an answer.

    Raises RequestError for a tokenizer that does not say which bytes its tokens stand for.
    """

    def __init__(self, tokenizer: AnyTokenizer, vocab_size: int, stop_token_ids: Sequence[int]):
        if not stop_token_ids:
            raise RequestError("this model has no stop token, so no answer can end where its grammar does")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError("this model's tokenizer is not one of the tokenizers library: no constraints")
        spec = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
        size = max(vocab_size, 1 + max(backend.get_vocab().values()))
        try:
            with no_panic():
                self._tokenizer = llguidance.LLTokenizer(json.dumps(spec), size, stop_token_ids[0])
        except ValueError as error:
            raise RequestError(
                f"this model's tokenizer cannot be held to a grammar ({one_line(error, 200)})"
            ) from None
        self._stop_ids, self._vocab_size = tuple(stop_token_ids), vocab_size
        self._compiled = lru_cache(MOST_COMPILED)(self._compile)

    def __call__(self, grammar: str) -> Callable[[], Constraint]:
        """What makes a constraint for each answer; RequestError for a grammar that cannot be used."""
        compiled = self._compiled(grammar)
        ids = self._tokenizer.vocab_size
        return lambda: Constraint(compiled.deep_copy(), self._stop_ids, ids, self._vocab_size)

    def _compile(self, grammar: str) -> Any:
        limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        for before in (b"", b" "):  # some grammars are too large for their first token, or allow none
            first = matcher.deep_copy()
            first.consume_tokens(self._tokenizer.tokenize_bytes(before))
            first.compute_logit_bias()
            if first.is_error():
                raise RequestError(refusal(first.get_error()))
        return matcher


@lru_cache(4)
def constraints_of(tokenizer: AnyTokenizer, vocab_size: int, stop_token_ids: tuple[int, ...]) -> Constraints:
    """Those of a checkpoint, made once: a large vocabulary takes a second."""
    return Constraints(tokenizer, vocab_size, stop_token_ids)
