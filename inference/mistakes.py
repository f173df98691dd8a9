"""What people get wrong and what a machine lacks, as one sentence each. Nothing here needs torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from data.errors import ImageError, OneSentence, ProcessorError, PromptError, one_line
from models.checkpoints.hub import CheckpointError


class RequestError(OneSentence):
    """What was asked for cannot be done as asked; the message is one sentence to show to a person."""


def check_images(generation_config: Mapping[str, Any], count: int) -> None:
    """Raises RequestError for a question about no image where the model was trained on questions about images
    only, so that an answer without one means nothing: what its generation_config.json says."""
    if count == 0 and generation_config.get("needs_image", False):
        raise RequestError(
            "this model was trained on questions about images: expected at least one image, got none"
        )


def mistakes() -> tuple[type[BaseException], ...]:
    """The types of their errors. Everything else is a programming error, to be seen with its traceback. Of
    OSErrors, BrokenPipeError is no mistake: whoever read our output has gone."""
    known = (CheckpointError, ImageError, ProcessorError, PromptError, RequestError, OSError, MemoryError)
    if not hasattr(sys.modules.get("torch"), "OutOfMemoryError"):  # nor has anything been raised by it
        return known
    from torch import OutOfMemoryError

    from generation.decoding import NotFiniteError
    from generation.kv_cache import CacheMemoryError

    return (*known, NotFiniteError, CacheMemoryError, OutOfMemoryError)


def sentence(error: BaseException, more_memory: str) -> str:
    """What one of `mistakes` says, on one line.

    Args:
        more_memory: what to do where memory did not suffice.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        what = ". ".join(str(error).split(". ")[:2]).rstrip(".")  # without the advice for programmers
        return one_line(f"{what or 'out of memory'}: {more_memory}")
    return one_line(error)
