"""What a checkpoint can raise: what was wrong, expected, got, and what to do, in a sentence."""

from __future__ import annotations

from collections.abc import Collection


class CheckpointError(ValueError):
    """A checkpoint cannot be found, read or written. The message is one sentence meant for the user."""


def some(names: Collection[str], limit: int = 3) -> str:
    """The first few of many names, for a message: "a, b, c and 12 more"."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit])
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"
