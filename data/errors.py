"""What `data/` raises about images, prompts, processors and datasets: one sentence each, for a person."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from models.checkpoints.hub import LONGEST, printable


def one_line(said: object, most: int = LONGEST) -> str:
    """A message or an error as `printable` text, its white space single blanks.

    The system's error about one file is that file and what is wrong with it; an error without words is its
    type's name.
    """
    text = " ".join(str(said).split())
    if isinstance(said, OSError) and said.strerror and said.filename is not None and said.filename2 is None:
        text = f"{said.filename}: {said.strerror}"
    elif isinstance(said, BaseException):
        text = text or type(said).__name__
    return printable(text, most)


def did_you_mean(word: str, known: Iterable[str], alike: float = 0.6) -> str:
    """The end of a sentence about an unknown name: ", did you mean NAME?" with the nearest, or "" where none
    is so much `alike` (difflib's ratio). Dashes in front, which all options have, do not count."""
    names = {name.lstrip("-"): name for name in known}
    close = difflib.get_close_matches(word.lstrip("-"), names, n=1, cutoff=alike)
    return f", did you mean {names[close[0]]}?" if close else ""


class OneSentence(ValueError):
    """Its message is `printable`."""

    def __init__(self, message: object):
        super().__init__(printable(message))


class ImageError(OneSentence):
    """An image that cannot be used."""


class PromptError(OneSentence):
    """A conversation that cannot be used."""


class PromptTooLong(PromptError):
    """A conversation of far more tokens than may be; not all of them were made."""


class ProcessorError(OneSentence):
    """A folder whose processor cannot be opened, or does not fit its model."""


class DatasetError(OneSentence):
    """A dataset that cannot be opened, or that a run cannot go on with."""


class BadRow(OneSentence):
    """A row that cannot be trained on and is left out whole; `reason` is what such rows are counted under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason

    def __reduce__(self):
        return type(self), (self.reason, str(self))
