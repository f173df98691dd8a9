"""The text of an answer, token by token: what was thought before it and calls of tools stand apart."""

from __future__ import annotations

from generation.options import GenerationOptions
from inference.calls import CallPiece, begun
from inference.checkpoint import Checkpoint
from inference.thinking import Span, Think, form_of

_INCOMPLETE = "\ufffd"  # what tokenizers decode half a UTF-8 sequence to


class TextStream:
    """The text of token ids as they arrive, cut only where a character is complete.

    A token may hold part of a character, and its text may depend on the token before. So text is decoded from
    the first token of the last piece on, and the part that was returned already is cut off. (The library's
    `DecodeStream` raises where bytes that are no text come before, as a sampler may have it.)
    """

    def __init__(self, tokenizer, skip_special_tokens: bool = True):
        self.tokenizer, self._skip = tokenizer, skip_special_tokens
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
            self.tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
            for ids in (self._ids[: self._returned], self._ids)
        )
        return text[len(before) :]


class AnswerText:
    """The text of one answer, without its stop token, the space before its first word, the thinking before
    that (`thought`), and calls of tools (`calls`) where its options allow some.

    span: the tokens that were thinking; None for a model that does not think.
    """

    def __init__(self, checkpoint: Checkpoint, options: GenerationOptions):
        self._stream = TextStream(checkpoint.processor.tokenizer)
        self._stops = frozenset(checkpoint.stop_token_ids)
        self._begun = self._ended = self._has_thought = False
        form, self._thinking = options.constraint and form_of(options), checkpoint.thinking
        asked = isinstance(options.constraint, Think)
        self.span = None if self._thinking is None else Span(self._thinking, asked)
        self._reader = form.reader() if form is not None and form.reader is not None else None
        self._calls = list[CallPiece]()  # since the last time
        # Marks of calls that are special tokens, whose text is shown nowhere else.
        self._marks = {} if self._reader is None else {i: mark for mark, i in checkpoint.forms.marks.items()}
        self._held = list[int]()  # tokens of which it is open whether they begin a block of thinking
        self._thought = self._open = ""  # since the last time, and what may be its end

    def put(self, token_id: int) -> str:
        """The text that this token completes; "" from the stop token on."""
        if token_id in self._stops:
            return self.finish()
        return "" if self._ended else self._show(self._take(token_id))

    def thought(self) -> str:
        """The thoughts since the last call, without white space around all of them."""
        thought, self._thought = self._thought, ""
        return thought

    def calls(self) -> list[CallPiece]:
        """The pieces of calls since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def finish(self) -> str:
        """The text of what is left."""
        if self._ended:
            return ""
        self._ended = True
        if self.span is not None and self.span.place == "inside":
            self._open += self._stream.finish()
            self._think()
        return self._show(self._unheld() + self._stream.finish(), last=True)

    def _take(self, token_id: int) -> str:
        """The answer's part of a token's text."""
        span, thinking = self.span, self._thinking
        if span is None or thinking is None or span.place == "answer":
            return self._text_of(token_id)
        before = span.place
        span.put(token_id)
        if before == "inside":
            marker = span.place == "gap" and len(thinking.end_ids) == 1
            self._open += "" if marker else self._stream.put(token_id)
            if span.place == "inside":
                self._think(thinking.end)
                return ""
            self._open, _, rest = (self._open + self._stream.finish()).partition(thinking.end)
            self._think()
            return rest
        self._held = [*self._held, token_id] if span.place in ("before", "answer") else []
        return self._unheld() if span.place == "answer" else ""

    def _text_of(self, token_id: int) -> str:
        mark = self._marks.get(token_id)
        return self._stream.put(token_id) if mark is None else self._stream.finish() + mark

    def _unheld(self) -> str:
        held, self._held = self._held, []
        return "".join(map(self._text_of, held))

    def _think(self, marker: str = "") -> None:
        """Take what is open as thought, but for the beginning of a marker, and white space before that."""
        shown = self._open[: len(self._open) - begun(self._open, marker)].rstrip()
        self._open = self._open[len(shown) :] if marker else ""
        self._thought += shown if self._has_thought else shown.lstrip()
        self._has_thought = self._has_thought or bool(shown.strip())

    def _show(self, piece: str, last: bool = False) -> str:
        """A piece of the text without what is part of calls."""
        piece = piece if self._begun else piece.lstrip()
        self._begun = self._begun or bool(piece)
        if self._reader is not None:
            piece, calls = self._reader.put(piece, last)
            self._calls += calls
        return piece
