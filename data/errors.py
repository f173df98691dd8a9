"""What `data/` raises about pictures, prompts, processors and datasets: one sentence each, for a person."""

from __future__ import annotations


class ImageError(ValueError):
    """A picture that cannot be used."""


class PromptError(ValueError):
    """A conversation that cannot be used."""


class ProcessorError(ValueError):
    """A folder whose processor cannot be opened, or does not fit its model."""


class DatasetError(ValueError):
    """A dataset that cannot be opened, or that a run cannot go on with."""


class BadRow(ValueError):
    """A row that cannot be trained on and is left out whole; `reason` is what such rows are counted under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason

    def __reduce__(self):
        return type(self), (self.reason, str(self))
