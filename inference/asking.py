"""Questions as requests to a scheduler, and answers that are one of several choices."""

from __future__ import annotations

from dataclasses import replace

import torch

from data.processor import EncodedConversation
from generation.options import GenerationOptions
from generation.requests import Request, each_answer
from inference.checkpoint import Checkpoint, RequestError
from inference.errors import ContextFullError
from inference.thinking import Think, for_prompt, form_of


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


def requests_for(
    checkpoint: Checkpoint, row: EncodedConversation, limit: int, options: GenerationOptions
) -> list[Request]:
    """A request to a `Scheduler` for each answer to one question, of at most `limit` new tokens."""
    options = replace(options, max_new_tokens=limit, stop_token_ids=checkpoint.stop_token_ids)
    options = for_choices(options, checkpoint.context - len(row.input_ids))
    if isinstance(options.constraint, Think):
        options = for_prompt(checkpoint, row, options)
    return [Request(torch.tensor(row.input_ids), row.parts, options=one) for one in each_answer(options)]
