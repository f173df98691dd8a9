"""The text of an answer that may think before it, call tools, or be written in a form."""

from __future__ import annotations

from generation.options import GenerationOptions
from inference.answer_text import AnswerText, TextStream
from inference.calls import CallPiece, begun
from inference.checkpoint import Checkpoint
from inference.grammar import Form
from inference.thinking import Think
from inference.thoughts import Span, Thinking


class MarkedText(AnswerText):
    """The text of one answer, without its stop token, the space before its first word, and the thinking
    before that, which is `thought`.

    options: those that it was made with. Where they may call tools, `calls` are apart from the text.

    span: which tokens were thinking; None for a model that does not think.
    turned: the latest token has shown that all text so far was thought. Who has shown it cannot take it back:
        so the answer stands apart from it, and the marker is not shown.
    """

    def __init__(self, checkpoint: Checkpoint, options: GenerationOptions):
        super().__init__(checkpoint)
        self._thinking = checkpoint.thinking
        self._thoughts = TextStream(checkpoint.processor.tokenizer)
        think, form = isinstance(options.constraint, Think), options.constraint
        self.span = None if self._thinking is None else Span(self._thinking, think)
        self.turned = False
        form = form.form if isinstance(form, Think) else form
        self._reader = form.reader() if isinstance(form, Form) and form.reader is not None else None
        self._calls = list[CallPiece]()  # since the last time
        # Marks of calls that are special tokens, whose text is shown nowhere else.
        self._marks = {} if self._reader is None else {i: mark for mark, i in checkpoint.forms.marks.items()}
        self._held = list[int]()  # tokens of which it is open whether they begin a block of thinking
        self._thought = self._open = ""  # since the last time, and what may be its end
        self._has_thought = False
        self._mark = ""  # what may begin the end of a block that nothing has begun

    def put(self, token_id: int) -> str:
        """The text that this token completes; "" from the stop token on."""
        self.turned = False
        if token_id in self._stops:
            return self.finish()
        return "" if self._ended else self._beside_calls(self._show(self._take(token_id)))

    def thought(self) -> str:
        """The thoughts since the last call, without white space around all of them."""
        thought, self._thought = self._thought, ""
        return thought

    def calls(self) -> list[CallPiece]:
        """More of the calls since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def finish(self) -> str:
        """The text of what is left."""
        if self._ended:
            return ""
        self._ended = True
        if self.span is not None and self.span.place == "inside":
            self._open += self._thoughts.finish()
            self._think()
        shown = self._show(self._unheld() + self._mark + self._stream.finish())
        return self._beside_calls(shown, last=True)

    def _take(self, token_id: int) -> str:
        """The answer's part of a token's text."""
        span, thinking = self.span, self._thinking
        if span is None or thinking is None:
            return self._text_of(token_id)
        before = span.place
        span.put(token_id)
        if before == "answer" and span.place != "before":
            return self._before_end(token_id, thinking, span)
        if before == "inside":
            marker = span.place == "gap" and len(thinking.end_ids) == 1
            self._open += "" if marker else self._thoughts.put(token_id)
            if span.place == "inside":
                self._think(thinking.end)
                return ""
            self._open, _, rest = (self._open + self._thoughts.finish()).partition(thinking.end)
            self._think()
            return rest
        self._held = [*self._held, token_id] if span.place in ("before", "answer") else []
        if span.place == "inside" and self._begun:  # a block after words, which were thought then
            shown, self._mark, self.turned = self._mark + self._stream.finish(), "", True
            return f"{shown}\n\n"
        return self._unheld() if span.place == "answer" else ""

    def _before_end(self, token_id: int, thinking: Thinking, span: Span) -> str:
        """The text of a token of the answer, without a marker that ends a block which nothing has begun, or
        what may be its beginning. With the marker, all before it was thought."""
        ended, whole = span.place == "gap", len(thinking.end_ids) == 1
        text = self._mark + ("" if ended and whole else self._text_of(token_id))
        if ended:
            self._mark, self.turned = "", True
            return text.partition(thinking.end)[0] + "\n\n" * self._begun
        end = len(text) - (0 if whole else begun(text, thinking.end))
        self._mark = text[end:]
        return text[:end]

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

    def _beside_calls(self, piece: str, last: bool = False) -> str:
        """The piece without what is part of calls."""
        if self._reader is None:
            return piece
        shown, calls = self._reader.put(piece, last)
        self._calls += calls
        return shown

    def _show(self, piece: str) -> str:
        piece = piece if self._begun else piece.lstrip()
        self._begun = (self._begun or bool(piece)) and not self.turned
        return piece
