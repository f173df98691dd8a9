"""What `data/` raises about pictures, prompts, processors and datasets: one sentence each, for a person."""

from __future__ import annotations

from models.untrusted import escaped

_LONGEST = 2000  # characters of a sentence that quotes a file


def printable(message: object) -> str:
    """One line of printable characters and of bounded length, whatever a message quotes."""
    shown = str(message)
    shown = shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "…"
    shown = escaped(shown)
    return shown if len(shown) <= _LONGEST + 1 else shown[:_LONGEST] + "…"


def one_line(said: object) -> str:
    """A message or an error as `printable` text whose white space is single blanks; an error of the system's
    is its file and what is wrong with it."""
    if isinstance(said, OSError) and said.filename is not None:
        said = f"{said.filename}: {said.strerror}"
    return printable(" ".join(str(said).split()))


class OneSentence(ValueError):
    """Its message is `printable`."""

    def __init__(self, message: object):
        super().__init__(printable(message))


class ImageError(OneSentence):
    """A picture that cannot be used."""


class FetchError(OneSentence):
    """Why a download was refused or failed, without the URL (the caller names it)."""


class PromptError(OneSentence):
    """A conversation that cannot be used."""


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
