"""What `data/` raises about pictures, prompts, processors and datasets: one sentence each, for a person."""

from __future__ import annotations

_LONGEST = 2000  # characters of a sentence that quotes a file


class ImageError(ValueError):
    """A picture that cannot be used."""


class PromptError(ValueError):
    """A conversation that cannot be used."""


class ProcessorError(ValueError):
    """A folder whose processor cannot be opened, or does not fit its model."""


class DatasetError(ValueError):
    """A dataset that cannot be opened, or that a run cannot go on with; one line, whatever its names hold."""

    def __init__(self, message: str):
        shown = message if len(message) <= _LONGEST else message[:_LONGEST] + "…"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown))


class BadRow(ValueError):
    """A row that cannot be trained on and is left out whole; `reason` is what such rows are counted under."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason

    def __reduce__(self):
        return type(self), (self.reason, str(self))
