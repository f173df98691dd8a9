"""What a checkpoint can raise: what was wrong, expected, got, and what to do, in a sentence."""

from __future__ import annotations

from collections.abc import Collection

_LONGEST = 1_000  # characters of a message: whatever a checkpoint put into it, a person can read it


class CheckpointError(ValueError):
    """A checkpoint cannot be found, read or written. The message is one sentence meant for the user.

    A message may quote the checkpoint. It is one line all the same, of printable characters, and not long.
    """

    def __init__(self, message: str):
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST - 200]} … {message[-197:]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


def some(names: Collection[str], limit: int = 3) -> str:
    """The first few of many names, for a message: "a, b, c and 12 more"."""
    ordered = sorted(names)
    shown = ", ".join(ordered[:limit])
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"
