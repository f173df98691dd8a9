"""Answers before which a model thinks: how long it may, and what ends it.

    options = GenerationOptions(constraint=Think(tokens=512))    # asks for it: `inference.answer.ask`
    options = held_to(options, checkpoint.forms.constraint(grammar))   # the answer alone is held to a form

Two limits stand side by side. `Think.tokens` counts the thinking: there it is ended by force, with the tokens
that a template writes after it. `max_new_tokens` counts the answer that follows. So an answer is made of both
limits' tokens at most and is never empty because the thinking took all of them; where the context has not
enough room for both, the thinking gets what the answer leaves, and at least half of it.

A model that would end its turn while it thinks ends the thinking instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from generation.options import GenerationOptions
from inference.errors import ContextFullError
from inference.grammar import Form

if TYPE_CHECKING:
    from torch import Tensor

    from data.processor import EncodedConversation
    from data.thinking import ThinkingMarks
    from data.tokenizer import AnyTokenizer
    from generation.protocol import Constraint  # imports torch, which --help does without

THINK_TOKENS = 1024  # of thinking, where nobody says how many


# --------------------------------------------------------------- the thinking of an answer that has been made
class Thinking:
    """The markers of one checkpoint's thinking, in tokens.

    begin, end: the markers. end_ids: tokens of the end, one where the tokenizer has it whole.
    close_ids: what ends a block and leads to the answer. gap_ids: what stands between the two.
    """

    def __init__(self, tokenizer: AnyTokenizer, marks: ThinkingMarks):
        self.tokenizer, self.begin, self.end = tokenizer, marks.begin, marks.end
        whole = tokenizer.get_added_vocab().get(self.end)
        self.end_ids = self._encode(self.end) if whole is None else [whole]
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

    place: "before" the answer's first word, which may become the beginning of a block that nobody asked for;
        "inside" a block; in the "gap" of white space after it; in the "answer". Where nobody asked for
        thinking, another block may follow a gap.
    thought: the number of tokens that are not of the answer: the blocks with their markers, and the gap. They
        are the first ones, `count` are all.
    """

    def __init__(self, thinking: Thinking, inside: bool):
        self.place, self.thought, self.count = "inside" if inside else "before", 0, 0
        self._thinking, self._asked, self._recent = thinking, inside, list[int]()

    def put(self, token_id: int) -> None:
        thinking, self.count = self._thinking, self.count + 1
        self._recent = [*self._recent[-len(thinking.begin + thinking.end) :], token_id]
        if self.place == "gap" and thinking.text([token_id]).strip():
            self.place, self._recent = "answer" if self._asked else "before", [token_id]
        if self.place == "before":
            text = thinking.text(self._recent).lstrip()
            if text.startswith(thinking.begin):
                self.place, self._recent = "inside", []
            elif not thinking.begin.startswith(text):
                self.place = "answer"
        elif self.place == "inside" and self._ends():
            self.place = "gap"
        if self.place in ("inside", "gap"):
            self.thought = self.count

    def _ends(self) -> bool:
        """True if the latest token ends the marker. Where the marker is a token, text that looks like it is
        none."""
        end_ids = self._thinking.end_ids
        if len(end_ids) == 1:
            return self._recent[-1] == end_ids[0]
        return self._thinking.end in self._thinking.text(self._recent[-len(self._thinking.end) :])


# ------------------------------------------------------------------------------------- thinking that is asked
@dataclass(frozen=True)
class Think:
    """A request for thinking: `GenerationOptions.constraint`, until `for_prompt` makes it one of a model.

    tokens: of the thinking at most, its marker included unless that is forced. form: what the answer is held
    to. thinking, stop_token_ids, answer_tokens: of the model, and how long the answer may be.
    """

    tokens: int = THINK_TOKENS
    form: Form | None = None
    thinking: Thinking | None = None
    stop_token_ids: tuple[int, ...] = ()
    answer_tokens: int = 0

    def __call__(self) -> Constraint:
        assert self.thinking is not None, "expected `for_prompt` before answers are made"
        return _ThinkFirst(self, self.thinking)


def form_of(options: GenerationOptions) -> Form | None:
    """The form that holds the answers themselves."""
    held = options.constraint
    return held.form if isinstance(held, Think) else held if isinstance(held, Form) else None


def think_first(options: GenerationOptions, tokens: int | None) -> GenerationOptions:
    """These options with so many tokens of thinking at most, None for no thinking."""
    form = form_of(options)
    return replace(options, constraint=form if tokens is None else Think(tokens, form))


def held_to(options: GenerationOptions, form: Form | None) -> GenerationOptions:
    """These options with answers of a form, after the thinking if there is some."""
    held = options.constraint
    return replace(options, constraint=replace(held, form=form) if isinstance(held, Think) else form)


def for_prompt(checkpoint: Any, row: EncodedConversation, options: GenerationOptions) -> GenerationOptions:
    """Options that ask for thinking, as the model of a `Checkpoint` answers this prompt with them: with the
    tokens of the thinking in `max_new_tokens`, as far as the context has room."""
    think, thinking = options.constraint, checkpoint.thinking
    assert isinstance(think, Think) and thinking is not None, "others were refused, or need none of this"
    answer, closing = options.max_new_tokens, len(thinking.close_ids)
    room = checkpoint.context - len(row.input_ids)
    # Choices have the length that they need: what cuts one makes it none of them.
    chosen = think.form is not None and think.form.tokens > 0
    if chosen and answer + closing > room:
        raise ContextFullError(
            f"choices: the longest takes {answer} tokens and the end of thinking {closing}, the context has "
            f"room for {room} after the question: shorten either, or turn thinking off"
        )
    most = room - answer if chosen else max(room - answer, room // 2)
    tokens = max(0, min(think.tokens, most - closing))
    whole = max(answer, min(answer + tokens + closing, room))
    stops = tuple(one for one in checkpoint.stop_token_ids if one < checkpoint.model.config.text.vocab_size)
    own = replace(think, tokens=tokens, thinking=thinking, stop_token_ids=stops, answer_tokens=answer)
    return replace(options, constraint=own, max_new_tokens=whole)


def budget_of(options: GenerationOptions) -> int | None:
    """The tokens of thinking that options of `for_prompt` allow; None where they do not ask for it."""
    return options.constraint.tokens if isinstance(options.constraint, Think) else None


def thinking_end(checkpoint: Any, ids: Sequence[int], budget: int | None) -> str:
    """The reason why the thinking of an answer ended: "stop", or "length" by force, when it had taken all of
    its budget, or, unasked (None), with the answer."""
    thinking = checkpoint.thinking
    assert thinking is not None, "something was thought, or asked for"
    return "length" if thinking.span(ids[:budget], budget is not None).place == "inside" else "stop"


class _ThinkFirst:
    """A `generation.protocol.Constraint`: thinking of so many tokens at most, then the answer in its form."""

    def __init__(self, think: Think, thinking: Thinking):
        self._think, self._thinking, self._span = think, thinking, Span(thinking, inside=True)
        self._form = None if think.form is None else think.form()
        self._forced = list[int]() if think.tokens else list(thinking.close_ids)
        self._ends_turn = False  # the model would end its turn where it thinks

    @property
    def thinking(self) -> bool:
        return self._span.place != "answer"

    @property
    def full(self) -> bool:
        return self._span.count - self._span.thought >= self._think.answer_tokens

    @property
    def _of_answer(self) -> Constraint | None:
        """The constraint of the next token, if that may be one of the answer."""
        return self._form if self._span.place != "inside" and not self._forced else None

    @property
    def choice(self) -> Any:
        return None if (form := self._of_answer) is None else form.choice

    def close(self, scores: Tensor) -> None:
        if (form := self._of_answer) is not None:
            form.close(scores)
        elif self._span.place == "inside" and not self._forced:
            stops, end = [*self._think.stop_token_ids], self._thinking.end_ids[0]
            stop, ending = scores[stops].float().logsumexp(0), scores[end].float()
            self._ends_turn = bool(stop > ending)
            scores[end] = stop.logaddexp(ending).to(scores.dtype)
            scores[stops] = -math.inf

    def allows(self, token_id: int) -> bool:
        if self._forced:
            return token_id == self._forced[0]
        return (form := self._of_answer) is None or form.allows(token_id)

    def mask(self, scores: Tensor) -> None:
        if self._forced:
            kept = scores[self._forced[0]].clone()
            scores.fill_(-math.inf)
            scores[self._forced[0]] = kept
        elif (form := self._of_answer) is not None:
            form.mask(scores)

    def accept(self, token_id: int) -> None:
        form, span, thinking = self._of_answer, self._span, self._thinking
        was_inside = span.place == "inside"
        if form is not None:
            form.accept(token_id)
        if self._forced[:1] == [token_id]:
            del self._forced[0]
        elif was_inside and self._ends_turn and token_id == thinking.end_ids[0]:
            self._forced = thinking.end_ids[1:]
        span.put(token_id)
        if self._forced or not was_inside:
            return
        if span.place == "gap":
            self._forced = list(thinking.gap_ids) if self._form is not None else []
        elif span.thought >= self._think.tokens:
            self._forced = list(thinking.close_ids)

    def forced(self) -> list[int]:
        form = self._of_answer
        return list(self._forced) if self._forced or form is None else form.forced()
