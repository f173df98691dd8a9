"""Texts of errors, the ground floor: one printable line each, whatever they quote."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

COMMAND = ""  # `ocelli`, where it runs one of the programs
LONGEST = 2_000  # characters of a message
CONTROL = frozenset((*range(32), *range(127, 160))) - {*b"\n\t"}  # could do anything to a terminal
ALIKE = 0.75  # of two names (difflib's ratio), one of which may be a slip for the other


def printable(message: object, most: int = LONGEST, end: int = 0) -> str:
    """One line of at most `most` printable characters: of a longer message its beginning and its last `end`
    characters."""

    def cut(text: str) -> str:
        return text if len(text) <= most else f"{text[: most - 1 - end]}…{text[len(text) - end :]}"

    # Cut before as well: a message may quote megabytes.
    return cut("".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut(str(message))))


def for_terminal(text: str) -> str:
    """A text that somebody else wrote, such as a model's answer, without control characters: whoever prints
    one passes it through here. Line breaks and tabs are text."""
    return text.translate(dict.fromkeys(CONTROL))


def named(text: str) -> str:
    """A text with the programs' names as the command `ocelli` has them, where it runs them."""
    if not COMMAND:
        return text
    return re.sub(
        r"(?:python )?(generate|serve|app|train)\.py|python -m (eval prove|eval|tools)", _named, text
    )


def _named(found: re.Match[str]) -> str:
    own = {"generate": "", "app": " page", "tools": "", "eval prove": " prove"}
    name = found[1] or found[2]
    return COMMAND + own.get(name, f" {name}")


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


def some(names: Collection[str]) -> str:
    """The first few of many names, for a message: "a, b, c and 12 more"."""
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def counted(number: int, one: str, more: str = "") -> str:
    """ "1 box", "2 boxes": a number and its noun; the plural `more` is by default `one` with an s."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: ", did you mean NAME?" with the nearest, or "" where none
    is so much alike. Dashes in front, which all options have, do not count."""
    names = {name.lstrip("-"): name for name in known}
    close = difflib.get_close_matches(word.lstrip("-"), names, n=1, cutoff=ALIKE)
    return f", did you mean {names[close[0]]}?" if close else ""


class OneSentence(ValueError):
    """Its message is `printable`."""

    def __init__(self, message: object):
        super().__init__(printable(message))
