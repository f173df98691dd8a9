"""Errors of users and of machines, as one sentence each. Nothing here imports torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from data.errors import ImageError, ProcessorError, PromptError
from generation.options import CacheMemoryError, ConstraintError, NotFiniteError
from messages import OneSentence, one_line
from models.checkpoints.files import CheckpointError


class RequestError(OneSentence):
    """A request that cannot be fulfilled. The message is one sentence for a person."""


class ContextFullError(RequestError):
    """A prompt, such as a conversation with its next question, leaves no room for its answer."""


class FormError(RequestError):
    """A form (schema, choices, pattern) that no answer, or none of this model, can be held to. `option`: what
    asked for it."""

    def __init__(self, message: object, option: str = "response_format"):
        super().__init__(message)
        self.option = option


def check_text_only(generation_config: Mapping[str, Any]) -> None:
    """Raises RequestError if a question without an image means nothing to the model: its
    generation_config.json says "needs_image" if it was trained on questions about images only."""
    if generation_config.get("needs_image", False):
        raise RequestError(
            "this model was trained on questions about images: expected at least one image, got none"
        )


def user_errors() -> tuple[type[BaseException], ...]:
    """The types of these errors. Any other type is a bug, which needs its traceback. Of OSErrors, handle
    BrokenPipeError first: it says that the reader of our output has gone."""
    known = (CheckpointError, ImageError, ProcessorError, PromptError, RequestError, NotFiniteError,
             CacheMemoryError, ConstraintError, OSError, MemoryError)  # fmt: skip
    out_of_memory = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)  # None: not imported so far
    return known if out_of_memory is None else (*known, out_of_memory)


def user_message(error: BaseException, more_memory: str) -> str:
    """One line about one of the `user_errors`; `more_memory` is the advice if memory did not suffice."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        what = ". ".join(str(error).split(". ")[:2]).rstrip(".")  # without the advice for programmers
        return one_line(f"{what or 'out of memory'}: {more_memory}")
    return one_line(error)
