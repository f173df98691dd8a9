"""What a person reads on a terminal: answers while they are made, drafts that go again, and lines about them.

    for text in wrapped(piece for _, piece in reply):
        print(text, end="", flush=True)

None of it controls the terminal, whatever a model or a file says: see `for_terminal`.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator

from messages import for_terminal

GREY, PLAIN, UP, ERASE = "\033[90m", "\033[0m", "\033[{}A", "\r\033[J"
TAB = 8  # columns


def wrapped_lines(text: str) -> str:
    """Each line in as many as it needs here, so that no word is cut at the terminal's edge."""
    return "\n".join(map(_wrapped, text.split("\n")))


def _wrapped(line: str) -> str:
    """A line, those that it goes on in further to the right."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    parts = textwrap.wrap(
        line,
        columns(),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return "\n".join(parts)


def columns() -> int:
    """Of the terminal; it may have been resized since the last answer."""
    return max(1, shutil.get_terminal_size().columns)


def width(character: str) -> int:
    """Columns that a character takes."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):  # accents, and what joins or directs others
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrapped(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces of an answer as a terminal is to show them. A word is given once it is complete, so that
    none is cut at the edge, where the language has words; Ctrl-C gives what there is of it."""
    lines = Lines(columns())
    try:
        for piece in pieces:
            if shown := "".join(map(lines.take, for_terminal(piece))):
                yield shown
    except KeyboardInterrupt:
        yield lines.word()
        raise
    yield lines.word()


class Lines:
    """Text broken between words into lines of so many columns, a character at a time."""

    def __init__(self, columns: int):
        self._columns = columns
        self._column, self._gap, self._word = 0, "", ""

    def take(self, character: str) -> str:
        """What can be shown after one more character."""
        if character == "\n":
            shown, self._column, self._gap = self.word() + "\n", 0, ""
            return shown
        if character in " \t":
            shown = self.word()
            self._gap += character if character == " " else " " * (TAB - self._column % TAB)
            return shown
        alone = width(character) == 2  # in scripts without spaces a line may end after any character
        shown = self.word() if alone else ""
        self._word += character
        too_long = sum(map(width, self._word)) >= self._columns
        return shown + self.word() if alone or too_long else shown

    def word(self) -> str:
        """The word so far, after the space before it, or at the beginning of the next line."""
        if not self._word:
            return ""
        wide, gap, word = sum(map(width, self._word)), self._gap, self._word
        if self._column and self._column + len(gap) + wide > self._columns:
            self._column, gap = 0, "\n"
        end = self._column + len(gap.strip("\n")) + wide
        self._column = end if end <= self._columns else (end - 1) % self._columns + 1
        self._gap = self._word = ""
        return gap + word


class GreyText:
    """Text on stdout that can be taken away again, if that is a terminal (`possible`). It begins in the first
    column and ends where more would scroll its beginning out of sight."""

    def __init__(self, wanted: bool = True) -> None:
        self.possible = wanted and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.visible = self._full = False
        self._columns, self._lines = shutil.get_terminal_size()
        self._row = self._column = 0  # of the cursor, from where the text begins

    def put(self, piece: str) -> None:
        """Show more of it."""
        fitting = ""
        for character in for_terminal(piece).replace("\t", " "):
            wide = width(character)
            if character == "\n" or self._column + wide > self._columns:
                self._full = self._full or self._row + 2 > self._lines
                self._row, self._column = self._row + (not self._full), 0
            if self._full:
                break
            self._column += wide * (character != "\n")
            fitting += character
        if self.possible and fitting:
            print(GREY + fitting + PLAIN, end="", flush=True)
            self.visible = True

    def clear(self) -> None:
        """Take it away."""
        if self.visible:
            print((UP.format(self._row) if self._row else "") + ERASE, end="", flush=True)
        self.visible, self._row, self._column = False, 0, 0
