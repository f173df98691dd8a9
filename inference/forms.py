"""The forms that a checkpoint's answers are held to: grammars, choices and tools, compiled once and kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from typing import TYPE_CHECKING

from data.processor import Processor
from inference.calls import CallReader
from inference.decide import choices_form
from inference.errors import FormError, RequestError
from inference.grammar import Form, ToolUse, choices_of, tool_grammar
from inference.markup import MARKUPS
from inference.thoughts import Thinking

if TYPE_CHECKING:
    from inference.constraint import Constraints

MOST_BYTES = 256 * 2**20  # of forms that are kept for the next answers
LEAST_KEPT = 4 * 2**20  # bytes, as which one of them counts


class Latest:
    """The forms that were used last, and why others were refused, by key: at most `most` bytes, of which each
    takes LEAST_KEPT or more. Several threads may ask."""

    def __init__(self) -> None:
        self.most, self._lock = MOST_BYTES, threading.Lock()
        self._kept = OrderedDict[str, tuple[Form | FormError, int]]()

    def get(self, key: str) -> Form | FormError | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: str, form: Form | FormError) -> None:
        size = form.size if isinstance(form, Form) else 0
        with self._lock:
            self._kept[key] = form, max(LEAST_KEPT, len(key) + size)
            while sum(size for _, size in self._kept.values()) > self.most:
                self._kept.popitem(last=False)


class Forms:
    """The forms of one checkpoint. `knows_tools`: its model may call one where it does not have to."""

    def __init__(
        self,
        processor: Processor,
        thinking: Thinking | None,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        knows_tools: bool,
    ):
        self._knows_tools = knows_tools
        self._processor, self._how = processor, (processor, thinking, vocab_size, stop_token_ids)
        self._kept = Latest()

    def constraint(self, grammar: str | ToolUse) -> Form:
        """The form of a grammar (`inference.grammar`), or of what an answer may do with tools:
        `GenerationOptions.constraint`. Raises RequestError for what cannot be used, and a tokenizer that
        cannot be held to any grammar."""
        if (form := self._kept.get(key := _key(grammar))) is None:
            try:
                form = self._made(grammar)
            except FormError as error:
                form = error
            self._kept.put(key, form)
        if isinstance(form, FormError):
            raise FormError(form, form.option)
        return form

    def kept_constraint(self, grammar: str | ToolUse) -> Form | None:
        """`constraint` if nothing has to be compiled for it, else None, also for what that would refuse."""
        form = self._kept.get(_key(grammar))
        return form if isinstance(form, Form) else None

    def _made(self, grammar: str | ToolUse) -> Form:
        if isinstance(grammar, ToolUse):
            return self._of_tools(grammar)
        choices = choices_of(grammar)
        return self._constraints(grammar) if choices is None else choices_form(*self._how, choices)

    def _of_tools(self, use: ToolUse) -> Form:
        if use.text is not None and not use.must and not self._knows_tools:
            return self._made(use.text)
        markup = MARKUPS[self._processor.chat.marks.markup]
        try:
            grammar = tool_grammar(markup, use, self.marks.get)
            if use.must or use.text is not None:
                form = self._constraints(grammar)
            else:
                form = self._constraints.may_call(grammar, markup.marks.opens, use.several)
        except RequestError as error:
            raise FormError(error, "tools") from None
        return replace(form, reader=partial(CallReader, markup, use.tools, use.must))

    @cached_property
    def marks(self) -> dict[str, int]:
        """The marks of calls that are tokens of their own, with their ids."""
        known = self._processor.tokenizer.get_added_vocab()
        return {mark: known[mark] for mark in self._processor.chat.marks.texts if mark in known}

    @cached_property
    def _constraints(self) -> Constraints:
        """Made once, as a large vocabulary takes a second; they go with the checkpoint."""
        from inference.constraint import Constraints  # its library is needed for nothing else

        _, _, vocab_size, stop_token_ids = self._how
        return Constraints(self._processor.tokenizer, vocab_size, stop_token_ids)


def _key(grammar: str | ToolUse) -> str:
    """A digest of uses of tools tells apart schemas that compare equal, as those of 1 and true do."""
    return grammar if isinstance(grammar, str) else sha256(repr(grammar).encode()).hexdigest()
