"""The forms that a checkpoint's answers are held to: grammars, choices and tools, compiled once and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from typing import TYPE_CHECKING

from data.processor import Processor
from inference.calls import CallReader
from inference.decide import choices_form
from inference.errors import FormError, RequestError
from inference.grammar import Form, Latest, ToolUse, choices_of, plain_call, plain_form, tool_grammar
from inference.markup import MARKUPS, Markup
from inference.thoughts import Thinking

if TYPE_CHECKING:
    from inference.constraint import Constraints

Written = tuple[str, Callable[[str], str] | None]  # a grammar, and what writes the answer of it


class Forms:
    """The forms of one checkpoint. `writes_json`: its model has learned to write JSON."""

    def __init__(
        self,
        processor: Processor,
        thinking: Thinking | None,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        writes_json: bool,
    ):
        self._processor, self._thinking, self._vocab_size = processor, thinking, vocab_size
        self._stop_token_ids, self._writes_json = stop_token_ids, writes_json

    def constraint(self, grammar: str | ToolUse) -> Form:
        """The form of a grammar (`inference.grammar`), or of what an answer may do with tools:
        `GenerationOptions.constraint`. Raises RequestError for what cannot be used, and a tokenizer that
        cannot be held to any grammar."""
        if isinstance(grammar := self._known(grammar), ToolUse):
            form = self._tools(grammar, self._written(grammar), self.constraint)
            assert form is not None, "what is not kept was compiled"
            return form
        if choices_of(grammar) is None:
            as_it_stands = self._constraints(grammar)  # first: what cannot be used is refused by every model
        plain, write = self._plain(grammar)
        if (choices := choices_of(plain)) is not None:
            if (form := self._choices.get(plain)) is None:
                how = self._processor, self._thinking, self._vocab_size, self._stop_token_ids
                form = choices_form(*how, choices)
                self._choices.put(plain, form, len(plain))
            return replace(form, write=write)
        return Form(as_it_stands if plain == grammar else self._constraints(plain), write)

    def kept_constraint(self, grammar: str | ToolUse) -> Form | None:
        """`constraint` if nothing has to be compiled for it, else None, also for what that would refuse."""
        try:
            if isinstance(grammar := self._known(grammar), ToolUse):
                written = self._tool_grammars.get(_key(grammar))
                return None if written is None else self._tools(grammar, written, self.kept_constraint)
            plain, write = self._plain(grammar)
        except RequestError:
            return None
        if (choice := self._choices.get(plain)) is not None:
            return replace(choice, write=write)
        kept = self._constraints.kept(plain) if "_constraints" in vars(self) else None
        return None if kept is None else Form(kept, write)

    def _known(self, grammar: str | ToolUse) -> str | ToolUse:
        """The part of it that the model can do: without JSON it calls only where it must."""
        text = grammar.text if isinstance(grammar, ToolUse) and not grammar.must else None
        return grammar if text is None or self._writes_json else text

    def _written(self, use: ToolUse) -> Written:
        """The grammar of calls. A model that did not learn to write JSON says the one value of the one tool
        that it has to call as it answers anyhow; it is made to call nothing else. Raises FormError."""
        if (written := self._tool_grammars.get(_key(use))) is not None:
            return written
        plain = None
        try:
            if use.must and not self._writes_json:
                plain = plain_call(use.tools)
            if plain is None or self._processor.chat.marks.native:
                written = tool_grammar(self._markup, use, self.marks.get), None
            else:
                written = plain
        except RequestError as error:
            raise FormError(error, "tools") from None
        self._tool_grammars.put(_key(use), written, len(written[0]))
        return written

    def _tools(self, use: ToolUse, written: Written, find: Callable[[str], Form | None]) -> Form | None:
        """`find` compiles a grammar, or looks for one that is compiled."""
        markup, (grammar, write) = self._markup, written
        try:
            form = find(grammar)
        except FormError as error:
            raise FormError(error, "tools") from None
        if form is None:
            return None
        reader = partial(CallReader, markup, use.tools, use.must)
        if not use.must and use.text is None:
            may = self._constraints.may_call(grammar, markup.marks.opens, use.several)
            return Form(may, reader=reader)
        whole = write and (lambda text: markup.written(use.tools[0], write(text)))
        return replace(form, write=whole, reader=reader)

    def _plain(self, grammar: str) -> tuple[str, Callable[[str], str] | None]:
        """The grammar that this model is held to instead, and what writes the answer of that: see
        `plain_form`."""
        return (None if self._writes_json else plain_form(grammar)) or (grammar, None)

    @property
    def _markup(self) -> Markup:
        return MARKUPS[self._processor.chat.marks.markup]

    @cached_property
    def marks(self) -> dict[str, int]:
        """The marks of calls that are tokens of their own, with their ids."""
        known = self._processor.tokenizer.get_added_vocab()
        return {mark: known[mark] for mark in self._processor.chat.marks.texts if mark in known}

    @cached_property
    def _tool_grammars(self) -> Latest[Written]:
        return Latest()

    @cached_property
    def _choices(self) -> Latest[Form]:
        """Compiled choices, by their grammar."""
        return Latest()

    @cached_property
    def _constraints(self) -> Constraints:
        """Made once, as a large vocabulary takes a second; they go with the checkpoint."""
        from inference.constraint import Constraints  # its library is needed for nothing else

        return Constraints(self._processor.tokenizer, self._vocab_size, self._stop_token_ids)


def _key(use: ToolUse) -> str:
    """A digest that tells apart schemas that compare equal, as those of 1 and true do."""
    return sha256(repr(use).encode()).hexdigest()
