"""The forms that a checkpoint's answers are held to: grammars, choices and tools, compiled once and kept.

    form = checkpoint.forms.constraint(choice_grammar(["yes", "no"]))  # GenerationOptions.constraint
    decided(form, decision)                                            # the fields of a result about it

Each choice is what the model's own chat template makes of it as an answer: with the space in front that
belongs to its first token, and the token that ends it. So its probability is what `generation.score` makes of
that one way of writing it; another way (Yes for yes) is another text.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from operator import mul
from typing import TYPE_CHECKING, Any

import torch

from data.processor import EncodedConversation, Processor
from generation.options import GenerationOptions
from generation.requests import Request, each_answer
from generation.score import Choices, Decision
from inference.calls import CallReader
from inference.errors import ContextFullError, FormError, RequestError
from inference.grammar import Form, ToolUse, choice_grammar, choices_of, tool_grammar
from inference.markup import MARKUPS
from inference.thinking import Think, Thinking, for_prompt, form_of

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
        return self.constraints(grammar) if choices is None else choices_form(*self._how, choices)

    def _of_tools(self, use: ToolUse) -> Form:
        if use.text is not None and not use.must and not self._knows_tools:
            return self._made(use.text)
        markup = MARKUPS[self._processor.chat.marks.markup]
        try:
            grammar = tool_grammar(markup, use, self.marks.get)
            if use.must or use.text is not None:
                form = self.constraints(grammar)
            else:
                form = self.constraints.may_call(grammar, markup.marks.opens, use.several)
        except RequestError as error:
            raise FormError(error, "tools") from None
        return replace(form, reader=partial(CallReader, markup, use.tools, use.must))

    @cached_property
    def marks(self) -> dict[str, int]:
        """The marks of calls that are tokens of their own, with their ids."""
        known = self._processor.tokenizer.get_added_vocab()
        return {mark: known[mark] for mark in self._processor.chat.marks.texts if mark in known}

    @cached_property
    def constraints(self) -> Constraints:
        """Made once, as a large vocabulary takes a second; they go with the checkpoint."""
        from inference.constraint import Constraints  # its library is needed for nothing else

        _, _, vocab_size, stop_token_ids = self._how
        return Constraints(self._processor.tokenizer, vocab_size, stop_token_ids)


def _key(grammar: str | ToolUse) -> str:
    """A digest of uses of tools tells apart schemas that compare equal, as those of 1 and true do."""
    return grammar if isinstance(grammar, str) else sha256(repr(grammar).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------- choices
def choices_form(
    processor: Processor,
    thinking: Thinking | None,
    vocab_size: int,
    stop_token_ids: Sequence[int],
    texts: Sequence[str],
) -> Form:
    """The form of answers that are one of these texts. Raises RequestError for texts that are no choice, or
    that a model with so many tokens, some of which end its answers, cannot say."""
    choice_grammar(texts)
    stop_ids = tuple(one for one in stop_token_ids if one < vocab_size)  # others are never chosen
    if not stop_ids:
        raise RequestError("choices: this model has no stop token, so no answer of it ends")
    answers = {answer_ids(processor, thinking, vocab_size, stop_ids, text): text for text in texts}
    if len(answers) < len(texts):
        lost = next(text for text in texts if text not in answers.values())
        raise RequestError(f"choices: {lost[:40]!r} and another one are the same to this model's tokenizer")
    return Form(Choices(tuple(answers), stop_ids), tuple(texts), max(map(len, answers)))


def answer_ids(
    processor: Processor, thinking: Thinking | None, vocab_size: int, stop_ids: Sequence[int], text: str
) -> tuple[int, ...]:
    """The tokens of an answer with this text, as a conversation has them, with the one that ends it. Raises
    RequestError for a text that does not come back from them."""
    question = processor.conversation([], "ok")
    spoken = {"role": "assistant", "content": [{"type": "text", "text": text}]}
    row = processor.encode_conversation([*question, spoken], label=f"choice {text[:40]!r}")
    ids = [token_id for token_id, own in zip(row.input_ids, row.assistant_mask) if own]
    end = next((place for place, token_id in enumerate(ids) if token_id in stop_ids), len(ids))
    said = ids[:end]
    thought = thinking is not None and bool(thinking.split(said, inside=False)[0])
    known = bool(said) and max(said) < vocab_size
    if thought or not known or processor.decode(said, skip_special_tokens=False).strip() != text:
        raise RequestError(f"choices: {text[:40]!r} is no answer that this model's tokenizer can write")
    return (*said, *(ids[end : end + 1] or stop_ids[:1]))


def decided(form: Form | None, decision: Decision | None) -> dict[str, Any]:
    """The fields of an answer that is one of a form's choices; {} for another. "probabilities" are those of
    each, among the choices, and add up to 1; "probability_mass" is that of any of them among all that the
    model could have said; "expected_value" is there where all are numbers."""
    if form is None or decision is None:
        return {}
    probabilities = dict(zip(form.choices, decision.probabilities, strict=True))
    fields: dict[str, Any] = {"probabilities": probabilities, "probability_mass": decision.mass}
    try:
        values = [float(text) for text in form.choices]
    except ValueError:
        return fields
    if not all(map(math.isfinite, values)):
        return fields
    expected = math.fsum(map(mul, values, decision.probabilities))
    return fields | {"expected_value": expected}


def for_choices(options: GenerationOptions, room: int) -> GenerationOptions:
    """Options of the answers to one prompt, with as many new tokens as the longest choice has, where they are
    choices. Raises RequestError if the context has no `room` for it, or no cache is kept, in which all are
    looked at."""
    form = None if options.constraint is None else form_of(options)
    if form is None or not form.tokens:
        return options
    if form.tokens > room:
        raise ContextFullError(
            f"choices: the longest takes {form.tokens} tokens, but the context has room for {max(0, room)} "
            "after the question: shorten either"
        )
    if not options.use_cache:
        raise RequestError("choices need the cache: expected use_cache=True, got False")
    return replace(options, max_new_tokens=form.tokens)


def limited(checkpoint: Any, row: EncodedConversation, options: GenerationOptions) -> GenerationOptions:
    """Options of a `Checkpoint`'s answers to one prompt, as far as there is room for choices and thinking."""
    options = for_choices(options, checkpoint.context - len(row.input_ids))
    return for_prompt(checkpoint, row, options) if isinstance(options.constraint, Think) else options


def requests_for(
    checkpoint: Any, row: EncodedConversation, limit: int, options: GenerationOptions
) -> list[Request]:
    """A request to a `Scheduler` for each answer to one question, of at most `limit` new tokens."""
    options = replace(options, max_new_tokens=limit, stop_token_ids=checkpoint.stop_token_ids)
    options = limited(checkpoint, row, options)
    return [Request(torch.tensor(row.input_ids), row.parts, options=one) for one in each_answer(options)]
