"""What `data/` raises about images, prompts, processors and datasets: one sentence each, for a person."""

from __future__ import annotations

from messages import OneSentence


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
