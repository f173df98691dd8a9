"""What `data/` raises about pictures, prompts and processors: each message is one sentence for a person."""

from __future__ import annotations


class ImageError(ValueError):
    """A picture that cannot be used."""


class PromptError(ValueError):
    """A conversation that cannot be used."""


class ProcessorError(ValueError):
    """A folder whose processor cannot be opened, or does not fit its model."""
