"""Answers that are held to a grammar, token by token, with llguidance.

    constraints = Constraints(tokenizer, vocab_size, stop_token_ids)      # of a checkpoint
    options = GenerationOptions(constraint=constraints(json_grammar(schema)))

Each answer has a matcher of its own, so that rows of a batch know nothing of one another. What the grammar
leaves no choice about is forced: those tokens are not asked of the model, and they are computed together.
After what cannot go on, the stop token is forced as well.

A model that has said what it has to say ends its answer: often in the middle of the JSON, because it knows
nothing of the brackets that are still to come. Only to ban the stop token there would make the next likeliest
token of it, which is one more digit or word. So where the value that is being written may end, ending the
answer means to end the value (`Constraint.close`).

This file and its library are imported only where an answer is constrained (`Checkpoint.constraint`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import llguidance
import torch
from torch import Tensor

from data.tokenizer import AnyTokenizer, no_panic
from generation.kv_cache import to_device
from generation.options import ConstraintError
from generation.sampling import keep
from inference.apart import TrialFailed, Trials
from inference.compiling import compiled
from inference.errors import FormError, RequestError
from inference.grammar import Form, has_json_values, refusal
from inference.markup import Gemma
from messages import one_line

_IS_ZERO = bytes([1] + 255 * [0])
NO_FORCING = '%llguidance {"no_forcing": true}\n'
MOST_DIGITS = 20  # of a number, as many as 2**64 has: it ends there, if it may


class JsonEnd:
    """The state of a JSON text at its end, while it is being written."""

    def __init__(self) -> None:
        self.in_string = self._escaped = False
        self.digits = 0  # of the number that it ends with
        self._last = ord(",")  # of what is no part of a string and no space

    def feed(self, text: bytes) -> None:
        for byte in text:
            if self._escaped:
                self._escaped = False
            elif self.in_string and byte == ord("\\"):
                self._escaped = True
            elif byte == ord('"'):
                self.in_string, self._last, self.digits = not self.in_string, byte, 0
            elif not self.in_string and byte != ord(" "):
                self._last, is_digit = byte, byte in b"0123456789"
                self.digits = self.digits + is_digit if byte in b"0123456789+-.eE" else 0

    @property
    def ends(self) -> bytes:
        """The characters that may end the value here, if the grammar allows it, the shortest way first."""
        if self.in_string:
            return b"" if self._escaped else b'"'
        return b"}]),"

    @property
    def after_value(self) -> bool:
        return not self.in_string and self._last not in b",:[{"


class Vocabulary:
    """The tokens of a tokenizer that end a value, and those that stop an answer.

    vocab_size: of the model, which may have more ids than the tokenizer, or fewer.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, vocab_size: int, stop_ids: Sequence[int]):
        self.tokenizer, self.vocab_size, self.stop_ids = tokenizer, vocab_size, list(stop_ids)
        texts = {tokenizer.decode_bytes([number]): number for number in range(tokenizer.vocab_size)}
        alone = {byte: texts.get(bytes([byte]), vocab_size) for byte in b'"}],)'}
        self.closers = {byte: token_id for byte, token_id in alone.items() if token_id < vocab_size}


class Constraint:
    """The tokens that may come next in one answer: a `generation.protocol.Constraint`.

    is_json: whether the values of the grammar's answers are JSON.
    """

    thinking = full = False
    choice = None

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary, is_json: bool):
        self._matcher, self._vocabulary, self._stop_ids = matcher, vocabulary, vocabulary.stop_ids
        # One tensor that stays, on these bytes: a token of a small model takes no longer than a few tensors.
        self._bytes = bytearray(vocabulary.tokenizer.vocab_size)
        self._banned = torch.frombuffer(self._bytes, dtype=torch.bool)[: vocabulary.vocab_size]
        self._json_end = JsonEnd() if is_json else None
        self._ended = False
        self._closer: int | None = None  # what ends the value where the model would end its answer
        self._closing = False  # it has just done so: what may be left out is left out
        self._forced = self._find_forced()

    def close(self, scores: Tensor) -> None:
        self._closer = None
        if self._json_end is None or self._ended or self._forced:
            return
        long = self._json_end.digits >= MOST_DIGITS
        if self._matcher.is_accepting():
            if long:
                keep(scores, self._stop_ids)
        elif (closer := self._find_closer(self._json_end.ends)) is not None:
            *stops, closing = scores[[*self._stop_ids, closer]].tolist()
            stop = _log_sum_exp(stops)
            for stop_id in self._stop_ids:
                scores[stop_id] = -math.inf
            scores[closer] = _log_sum_exp([stop, closing])
            if long:
                keep(scores, [closer])
            if stop > closing:
                self._closer = closer

    def allows(self, token_id: int) -> bool:
        if self._ended or self._forced:
            return token_id in (self._stop_ids if self._ended else self._forced[:1])
        # llguidance knows one of the stop tokens.
        return self._allowed(self._stop_ids[0] if token_id in self._stop_ids else token_id)

    def mask(self, scores: Tensor) -> None:
        """Scores (V,), in place. Raises ConstraintError where the grammar has become too large to go on, and
        where it asks for what no token is, or for one that ends answers."""
        if self._ended or self._forced:
            keep(scores, self._stop_ids if self._ended else self._forced[:1])
            return
        bias = self._matcher.compute_logit_bias()  # 0 where a token is not allowed
        if self._matcher.is_error():
            raise ConstraintError(refusal(self._matcher.get_error()))
        self._bytes[:] = bias.translate(_IS_ZERO)
        for stop_id in self._stop_ids[1:]:
            self._bytes[stop_id] = self._bytes[self._stop_ids[0]]
        if self._banned.all():
            raise ConstraintError(refusal("NoExtension"))
        on_cpu = scores.device.type == "cpu"
        scores.masked_fill_(self._banned if on_cpu else to_device(self._banned, scores.device), -torch.inf)

    def accept(self, token_id: int) -> None:
        if self._ended or token_id in self._stop_ids:
            self._ended, self._forced = True, []
            return
        self._matcher.consume_token(token_id)  # one that is not allowed is an error that `mask` raises
        if self._json_end is not None:
            self._json_end.feed(self._vocabulary.tokenizer.decode_bytes([token_id]))
        if self._forced[:1] == [token_id]:
            self._forced = self._forced[1:]
        else:
            self._forced, self._closing = [], token_id == self._closer
        if not self._forced:
            self._forced = self._find_forced()

    def forced(self) -> list[int]:
        return list(self._forced)

    def take(self, token_id: int) -> bool:
        """Accept this token if it is allowed. Whether it was."""
        if allowed := self._allowed(token_id):
            self.accept(token_id)
        return allowed

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Whether all of these may come next, one after the other."""
        return self._matcher.validate_tokens([*token_ids]) == len(token_ids)

    def _find_closer(self, ends: bytes) -> int | None:
        closers = (self._vocabulary.closers[byte] for byte in ends if byte in self._vocabulary.closers)
        return next(filter(self._allowed, closers), None)

    def _allowed(self, token_id: int) -> bool:
        return self.takes([token_id])

    def _find_forced(self) -> list[int]:
        ids, after = [], self._matcher
        if not after.is_stopped():
            ids = after.compute_ff_tokens()
            if ids:
                after = after.deep_copy()
                after.consume_tokens(ids)
        if after.is_stopped():
            return ids if after.is_error() else ids + self._stop_ids[:1]
        if not ids and self._closing and self._json_end is not None and self._json_end.after_value:
            if after.is_accepting():
                return self._stop_ids[:1]
            closer = self._find_closer(b"}]")
            return [] if closer is None else [closer]
        return ids


class CallsMayFollow:
    """A `generation.protocol.Constraint`: text of any kind, in which a mark that opens calls begins what is
    held to their grammar. After that there is text again, or the end where no more calls are allowed.

    calls: makes the constraint of a block of calls, after text of it that came in one token with the mark;
        None where that does not begin one.
    """

    thinking = full = False
    choice = None

    def __init__(
        self,
        vocabulary: Vocabulary,
        opens: bytes,
        several: bool,
        calls: Callable[[bytes], Constraint | None],
    ):
        self._vocabulary, self._opens, self._several, self._calls = vocabulary, opens, several, calls
        self._tail, self._over = b"", False
        self._held: Constraint | None = None

    def close(self, scores: Tensor) -> None:
        if self._held is not None:
            self._held.close(scores)

    def allows(self, token_id: int) -> bool:
        if self._over:
            return token_id == self._vocabulary.stop_ids[0]
        return self._held is None or self._held.allows(token_id)

    def mask(self, scores: Tensor) -> None:
        if self._over:
            keep(scores, self._vocabulary.stop_ids[:1])
        elif self._held is not None:
            self._held.mask(scores)

    def accept(self, token_id: int) -> None:
        if self._held is not None:
            self._held.accept(token_id)
            if self._held.forced() == self._vocabulary.stop_ids[:1]:  # the block has ended
                self._held, self._over = None, not self._several
            return
        self._tail += self._vocabulary.tokenizer.decode_bytes([token_id])
        _, mark, after = self._tail.rpartition(self._opens)
        self._held = self._calls(after) if mark else None
        self._tail = b"" if mark else self._tail[-len(self._opens) :]

    def forced(self) -> list[int]:
        if self._over:
            return self._vocabulary.stop_ids[:1]
        if self._held is None:
            return []
        ids, stop = self._held.forced(), self._vocabulary.stop_ids[0]
        return ids[: ids.index(stop)] if stop in ids else ids


def _log_sum_exp(values: Sequence[float]) -> float:
    """NaN where one of them is not finite, but for -inf."""
    most = max(values)
    return most if most == -math.inf else most + math.log(sum(math.exp(one - most) for one in values))


class Constraints:
    """Makes the forms of one checkpoint's answers that are held to a grammar.

    Args:
        vocab_size: of the model, which may have more ids than the tokenizer.
        stop_token_ids: what ends an answer.

    Raises RequestError for a tokenizer that does not say which bytes its tokens stand for.
    """

    def __init__(self, tokenizer: AnyTokenizer, vocab_size: int, stop_token_ids: Sequence[int]):
        stop_token_ids = [one for one in stop_token_ids if one < vocab_size]  # others are never chosen
        if not stop_token_ids:
            raise RequestError("this model has no stop token, so no answer can end where its grammar does")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RequestError("this model's tokenizer is not one of the tokenizers library: no constraints")
        spec = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
        added = (one.content for one in backend.get_added_tokens_decoder().values())
        self._special = {form for text in added for form in (text, json.dumps(text)[1:-1])}
        size = max(vocab_size, 1 + max(backend.get_vocab().values()))
        known = json.dumps(spec), size, stop_token_ids[0]
        try:
            with no_panic():
                self._tokenizer = llguidance.LLTokenizer(*known)
        except ValueError as error:
            raise RequestError(
                f"this model's tokenizer cannot be held to a grammar ({one_line(error, 200)})"
            ) from None
        self.vocabulary = Vocabulary(self._tokenizer, vocab_size, stop_token_ids)
        self._trials = Trials(known)

    def __call__(self, grammar: str) -> Form:
        """The form of answers that are all of it. Raises FormError."""
        begin, size = self._compile(grammar)
        return Form(begin, size=size)

    def may_call(self, grammar: str, opens: str, several: bool) -> Form:
        """The form of answers that may call tools: the grammar is of a block of calls, after its mark."""
        (begin, size), vocabulary = self._compile(grammar), self.vocabulary

        def block(after: bytes) -> Constraint | None:
            held = begin()
            return held if all(map(held.take, vocabulary.tokenizer.tokenize_bytes(after))) else None

        return Form(lambda: CallsMayFollow(vocabulary, opens.encode(), several, block), size=size)

    def _compile(self, grammar: str) -> tuple[Callable[[], Constraint], int]:
        """A function that makes constraints, and the bytes that it takes. A grammar is compiled here only
        after it was tried out. Raises FormError."""
        # Where it spells a special token, llguidance would force that in place of its characters.
        said = grammar.replace(Gemma.NO_MARKS, "")  # texts have no marks in them
        plain = said.replace("\\", "")
        ordinary = any(text in said or text in plain for text in self._special)
        try:
            tried = NO_FORCING * ordinary + grammar
            size = self._trials(tried)
            matcher = compiled(self._tokenizer, tried)
        except (TrialFailed, ValueError) as error:
            raise FormError(refusal(str(error))) from None
        vocabulary, is_json = self.vocabulary, has_json_values(grammar)
        return lambda: Constraint(matcher.deep_copy(), vocabulary, is_json), size
