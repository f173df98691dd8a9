"""What comes from a pipe: an image's bytes, or a question."""

from __future__ import annotations

import sys
from select import select

from inference.errors import RequestError

STDIN_TIMEOUT = 5.0  # seconds for a piped question to begin: nobody may be writing to the pipe


def read_image(max_bytes: int) -> bytes:
    """The bytes of the image on stdin, one more than `max_bytes` at most. Raises RequestError."""
    raw = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read(max_bytes + 1)
    if not raw:
        raise RequestError("-: expected an image on stdin, got nothing; pipe a file into this command")
    return raw


def read_question() -> list[str]:
    """All of stdin as a question. [] if it is a terminal, closed, empty, or a pipe that nobody writes to, as
    under cron and CI."""
    try:
        if sys.stdin is None or sys.stdin.isatty() or not select([sys.stdin], [], [], STDIN_TIMEOUT)[0]:
            return []
        question = sys.stdin.buffer.read().decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        said = "stdin: expected a question in UTF-8; pass - to read an image from stdin"
        raise RequestError(said) from None
    except (OSError, ValueError):
        return []
    return [question] if question else []
