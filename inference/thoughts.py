"""The tokens of an answer that are thought, and those that are the answer itself.

thinking = checkpoint.thinking                         # None: a model without the markers
thoughts, answer = thinking.split(ids, inside=True)
"""

from __future__ import annotations

from collections.abc import Sequence

from data.thinking import ThinkingMarks
from data.tokenizer import AnyTokenizer


class Thinking:
    """The markers of one checkpoint's thinking, in tokens.

    begin, end: the markers. begin_id: the first token of the one, where it is special. end_ids: tokens of the
    other, one where the tokenizer has it whole.
    close_ids: what ends a block and leads to the answer. gap_ids: what stands between the two.
    """

    def __init__(self, tokenizer: AnyTokenizer, marks: ThinkingMarks):
        self.tokenizer, self.begin, self.end = tokenizer, marks.begin, marks.end
        whole = tokenizer.get_added_vocab().get(self.end)
        self.end_ids = self._encode(self.end) if whole is None else [whole]
        first = self._encode(self.begin)[0]  # where it is a special token, nobody quotes it
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().get(first)
        self.begin_id = first if added is not None and added.special else None
        self.gap_ids = self._encode(marks.gap)
        self.close_ids = [*self._encode("\n"), *self.end_ids, *self.gap_ids]

    def split(self, ids: list[int], inside: bool) -> tuple[list[int], list[int]]:
        """The tokens of one answer: what was thought, with the markers, and the answer itself. `inside`: it
        begins in a block that its prompt has opened."""
        thought = self.span(ids, inside).thought
        return ids[:thought], ids[thought:]

    def span(self, ids: Sequence[int], inside: bool) -> Span:
        """The state of an answer's thinking after these tokens."""
        span = Span(self, inside)
        for token_id in ids:
            span.put(token_id)
        return span

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, markers and other special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


class Span:
    """The extent of one answer's thinking, token by token.

    place: "before" the answer's first word, which may become the begin of a block that nobody asked for;
        "inside" the block; in the "gap" of white space after it; in the "answer". Where nobody asked for
        thinking, a model may think without the begin of a block, or in several: an end that nothing has
        begun leads from the answer into the gap, and from there it may go on with another block. A special
        token that begins one does so after words, too.
    thought: how many tokens are not of the answer: the blocks with their markers, and the gap. They are the
        first ones, `count` are all.
    """

    def __init__(self, thinking: Thinking, inside: bool):
        self.place, self.thought, self.count = "inside" if inside else "before", 0, 0
        self._thinking, self._asked, self._recent = thinking, inside, list[int]()

    def put(self, token_id: int) -> None:
        thinking, self.count = self._thinking, self.count + 1
        if self.place == "answer" and self._asked:
            return
        self._recent.append(token_id)
        if self.place == "answer" and token_id == thinking.begin_id:
            self.place, self._recent = "before", [token_id]
        if self.place == "gap" and thinking.text([token_id]).strip():
            self.place, self._recent = "answer" if self._asked else "before", [token_id]
        if self.place == "before":
            text = thinking.text(self._recent).lstrip()
            if text.startswith(thinking.begin):
                self.place, self._recent = "inside", []
            elif text.startswith(thinking.end):
                self.place = "gap"
            elif not any(mark.startswith(text) for mark in (thinking.begin, thinking.end)):
                self.place = "answer"
        elif self.place == "inside":
            self._recent = self._recent[-len(thinking.end) :]
            self.place = "gap" if self._ends() else "inside"
        elif self.place == "answer" and not self._asked and self._ends():
            self.place = "answer" if thinking.begin in thinking.text(self._recent) else "gap"
        if self.place in ("inside", "gap"):
            self.thought = self.count

    def _ends(self) -> bool:
        """True if the latest token ends the marker. Where the marker is a token, text that looks like it is
        none."""
        end_ids = self._thinking.end_ids
        if len(end_ids) == 1:
            return self._recent[-1] == end_ids[0]
        return self._thinking.end in self._thinking.text(self._recent[-len(self._thinking.end) :])
