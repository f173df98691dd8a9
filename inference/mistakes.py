"""What people get wrong and what a machine lacks, as one sentence each."""

from __future__ import annotations

from torch import OutOfMemoryError

from data.errors import ImageError, ProcessorError, PromptError, one_line
from generation.decoding import NotFiniteError
from generation.memory import CacheMemoryError
from inference.checkpoint import RequestError
from models.checkpoints import CheckpointError

# Everything else is a programming error, to be seen with its traceback. Of OSErrors, BrokenPipeError is no
# mistake: whoever read our output has gone.
MISTAKES = (
    CheckpointError, ImageError, ProcessorError, PromptError, RequestError, NotFiniteError, CacheMemoryError,
    OSError, OutOfMemoryError, MemoryError,
)  # fmt: skip


def sentence(error: BaseException, more_memory: str) -> str:
    """What one of `MISTAKES` says, on one line.

    Args:
        more_memory: what to do where memory did not suffice.
    """
    if isinstance(error, OutOfMemoryError | MemoryError):
        what = ". ".join(str(error).split(". ")[:2]).rstrip(".")  # without the advice for programmers
        return one_line(f"{what or 'out of memory'}: {more_memory}")
    return one_line(error)
