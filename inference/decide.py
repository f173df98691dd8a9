"""Typed decisions: which of several texts, with the probability of each.

    form = checkpoint.constraint(choice_grammar(["yes", "no"]))  # GenerationOptions.constraint
    decided(form, decision)                                      # the fields of a result about it

Each text is what the model's own chat template makes of it as an answer: with the space in front that belongs
to its first token, and the token that ends it. So its probability is what `generation.score` makes of that
one way of writing it; another way (Yes for yes) is another text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import Any

from data.processor import Processor
from generation.score import Choices, Decision
from inference.errors import RequestError
from inference.grammar import Form, choice_grammar
from inference.thoughts import Thinking


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
