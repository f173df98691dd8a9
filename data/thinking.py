"""What a reasoning model says before its answer: between which markers it stands, how a prompt asks for it or
ends it, and which tokens of an answer it is.

    thinking = processor.thinking                          # None: a model without the markers
    prompt = thinking.prompt(rendered, wanted=True)
    thoughts, answer = thinking.split(ids, inside=True)

A template writes `<think>` at the end of its prompt (Qwen3-VL-Thinking, Qwen3.5 with `enable_thinking`), an
empty block (Qwen3.5 without), or nothing, and then the model begins the block itself (Qwen3, Gemma 4). Here a
prompt always ends inside a block where thinking is wanted, and outside of one where it is not: a template
that has no switch is followed by the empty block that templates with a switch write. Earlier answers stand in
a prompt without their thinking, as in those templates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from data.tokenizer import AnyTokenizer

# What opens and closes a block, and what stands between that and the answer: Qwen's and LFM2.5's, Gemma 4's.
MARKERS = (("<think>", "</think>", "\n\n"), ("<|channel>thought", "<channel|>", ""))


class Thinking:
    """How one checkpoint thinks.

    begin, end: the markers. begin_id: the first token of the one, where it is special. end_ids: tokens of the
    other, one where the tokenizer has it whole.
    close_ids: what ends a block and leads to the answer. gap_ids: what stands between the two.
    in_template: whether the chat template speaks of them, so that the model can be asked to think.
    """

    def __init__(self, tokenizer: AnyTokenizer, begin: str, end: str, gap: str, in_template: bool):
        self.tokenizer, self.begin, self.end, self.in_template = tokenizer, begin, end, in_template
        whole = tokenizer.get_added_vocab().get(end)
        self.end_ids = self._encode(end) if whole is None else [whole]
        first = self._encode(begin)[0]  # where it is a special token, nobody quotes it
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder().get(first)
        self.begin_id = first if added is not None and added.special else None
        self.gap_ids, self._gap = self._encode(gap), gap
        self.close_ids = [*self._encode("\n"), *self.end_ids, *self.gap_ids]

    def prompt(self, rendered: str, wanted: bool) -> str:
        """A rendered prompt that ends inside a block if thinking is wanted, and outside of one if not."""
        written = rendered.rstrip()
        if wanted:
            closed = re.search(rf"{re.escape(self.begin)}\s*{re.escape(self.end)}$", written)
            written = written[: closed.start()] if closed else rendered
            return written if written.rstrip().endswith(self.begin) else f"{written}{self.begin}\n"
        return f"{written}\n\n{self.end}{self._gap}" if written.endswith(self.begin) else rendered

    def answer_in(self, text: str) -> str:
        """The text of an earlier answer, without the thinking that a client has left in it."""
        return text.rpartition(self.end)[2].lstrip() if self.end in text else text

    def split(self, ids: list[int], inside: bool) -> tuple[list[int], list[int]]:
        """The tokens of one answer: what was thought, with the markers, and the answer itself. `inside`: it
        begins in a block that its prompt has opened."""
        thought = self.span(ids, inside).thought
        return ids[:thought], ids[thought:]

    def span(self, ids: Sequence[int], inside: bool) -> Span:
        """Where the thinking of an answer is after these tokens."""
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
    """Where the thinking of one answer ends, token by token.

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
        """Whether the marker ends with the latest token. One that is a token is no text that looks alike."""
        end_ids = self._thinking.end_ids
        if len(end_ids) == 1:
            return self._recent[-1] == end_ids[0]
        return self._thinking.end in self._thinking.text(self._recent[-len(self._thinking.end) :])
