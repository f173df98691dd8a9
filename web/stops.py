"""The text of an answer up to a stop string, piece by piece, with the tokens that it is made of."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from generation.options import GenerationOptions
from generation.requests import TokenLogprobs
from inference.answer_text import AnswerText
from inference.calls import CallPiece, begun
from inference.checkpoint import Checkpoint


class Piece(NamedTuple):
    """More of an answer: its text may lag behind the tokens, where it would be cut in the middle.

    thought: what was thought before it, in the first `thinking` of the tokens, which have no logprobs.
    made: by work that follows the answer. calls: of tools, beside the text.
    """

    answer: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: list[TokenLogprobs] | None = None
    thought: str = ""
    thinking: int = 0
    made: Any = None
    calls: Sequence[CallPiece] = ()


class StopText:
    """The text of answer `number`. A stop string may begin in one token and end in another; nothing that one
    may begin with is shown. Stop strings are looked for in the answer, not in thoughts and calls."""

    def __init__(
        self, checkpoint: Checkpoint, options: GenerationOptions, stop: Sequence[str], number: int = 0
    ):
        self._text, self._stop = AnswerText(checkpoint, options), stop
        self._number, self.stopped = number, False
        self._held, self._length = "", 0  # text that is not shown yet; length of what is
        self._tokens = deque[tuple[int, int, TokenLogprobs | None]]()  # with the place at which each begins

    def put(
        self, token_ids: Sequence[int], logprobs: list[TokenLogprobs] | None = None, last: bool = False
    ) -> Piece:
        """What can be shown after these tokens, with the tokens of it and their logprobs."""
        if self.stopped:
            return Piece(self._number)
        ready, span = list[tuple[int, int, TokenLogprobs | None]](), self._text.span
        for index, token_id in enumerate(token_ids):
            at = self._length + len(self._held)
            self._held += self._text.put(token_id)
            if span is not None and span.thought == span.count and span.place != "answer":
                ready.append((at, token_id, None))
            else:
                self._tokens.append((at, token_id, None if logprobs is None else logprobs[index]))
        thinking = len(ready)  # up to the first token of the answer
        self._held += self._text.finish() if last else ""
        end = min((at for stop in self._stop if (at := self._held.find(stop)) >= 0), default=-1)
        self.stopped = end >= 0
        if not self.stopped:
            waits = 0 if last else max((begun(self._held, stop) for stop in self._stop), default=0)
            end = len(self._held) - waits
        shown, self._held = self._held[:end], self._held[end:]
        self._length += end
        # A token in which the stop string begins belongs to the text, one that begins with it does not.
        while self._tokens and (self._tokens[0][0] < self._length or not (self._held or self.stopped)):
            ready.append(self._tokens.popleft())
        entries = None if logprobs is None else [one for *_, one in ready if one is not None]
        ids, calls = [token_id for _, token_id, _ in ready], self._text.calls()
        return Piece(self._number, shown, ids, entries, self._text.thought(), thinking, calls=calls)
