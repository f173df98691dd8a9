"""What people get wrong and what a machine lacks, as one sentence each. Nothing here needs torch."""

from __future__ import annotations

import sys

from data.errors import ImageError, OneSentence, ProcessorError, PromptError, one_line
from models.checkpoints.errors import CheckpointError


class RequestError(OneSentence):
    """What was asked for cannot be done as asked; the message is one sentence to show to a person."""


def mistakes() -> tuple[type[BaseException], ...]:
    """The types of their errors. Everything else is a programming error, to be seen with its traceback. Of
    OSErrors, BrokenPipeError is no mistake: whoever read our output has gone."""
    known = (CheckpointError, ImageError, ProcessorError, PromptError, RequestError, OSError, MemoryError)
    if not hasattr(sys.modules.get("torch"), "OutOfMemoryError"):  # nor has anything been raised by it
        return known
    from torch import OutOfMemoryError

    from generation.decoding import NotFiniteError
    from generation.memory import CacheMemoryError

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
