"""The text of an answer, token by token."""

from __future__ import annotations

from inference.calls import CallPiece
from inference.checkpoint import Checkpoint
from inference.thoughts import Span

_INCOMPLETE = "\ufffd"  # what tokenizers decode half a UTF-8 sequence to


class TextStream:
    """The text of token ids as they arrive, cut only where a character is complete.

    A token may hold part of a character, and its text may depend on the token before. So text is decoded from
    the first token of the last piece on, and the part that was returned already is cut off. (The library's
    `DecodeStream` raises where bytes that are no text come before, as a sampler may have it.)
    """

    def __init__(self, tokenizer, skip_special_tokens: bool = True):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self._ids: list[int] = []  # tokens of the last piece returned, then those not yet returned
        self._returned = 0  # how many of them are in the text already

    def put(self, token_id: int) -> str:
        """The text that this token completes, "" while a character is incomplete."""
        self._ids.append(int(token_id))
        text = self._new_text()
        if text and not text.endswith(_INCOMPLETE):
            self._ids, self._returned = self._ids[self._returned :], len(self._ids) - self._returned
            return text
        return ""

    def finish(self) -> str:
        """The text that is left at the end, without a character that never became complete."""
        text = self._new_text()
        self._ids, self._returned = [], 0
        return text.rstrip(_INCOMPLETE)

    def _new_text(self) -> str:
        before, text = (
            self.tokenizer.decode(
                ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
            )
            for ids in (self._ids[: self._returned], self._ids)
        )
        return text[len(before) :]


class AnswerText:
    """The text of one answer, without its stop token and the space before its first word. What else an answer
    may hold is read by `inference.marked_text.MarkedText`, which has the same methods.

    span: the tokens that were thinking; None for a model that does not think.
    turned: the latest token has shown that all text so far was thought.
    """

    span: Span | None = None
    turned = False

    def __init__(self, checkpoint: Checkpoint):
        self._stream = TextStream(checkpoint.processor.tokenizer)
        self._stops = frozenset(checkpoint.stop_token_ids)
        self._begun = self._ended = False

    def put(self, token_id: int) -> str:
        """The text that this token completes; "" from the stop token on."""
        if token_id in self._stops:
            return self.finish()
        return "" if self._ended else self._show(self._stream.put(token_id))

    def thought(self) -> str:
        """The thoughts since the last call, without white space around all of them."""
        return ""

    def calls(self) -> list[CallPiece]:
        """The pieces of calls since the last time."""
        return []

    def finish(self) -> str:
        """The text of what is left."""
        if self._ended:
            return ""
        self._ended = True
        return self._show(self._stream.finish())

    def _show(self, piece: str) -> str:
        piece = piece if self._begun else piece.lstrip()
        self._begun = self._begun or bool(piece)
        return piece
