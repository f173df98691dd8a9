"""Grey text on a terminal: a draft that goes again, and what a model thinks before it answers.

None of it controls the terminal, whatever a model says: see `for_terminal`.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator

from messages import for_terminal

GREY, PLAIN, UP, ERASE = "\033[90m", "\033[0m", "\033[{}A", "\r\033[J"


def width(character: str) -> int:
    """Columns that a character takes."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):  # accents, and what joins or directs others
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


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


class Aside:
    """What a model thinks before it answers, on stderr while it is made: in grey at a terminal."""

    _begun = False

    def put(self, piece: str) -> None:
        """More of it."""
        self._print(piece if self._begun else f"[thinking] {piece}")
        self._begun = True

    def before(self, pieces: Iterable[tuple[int, str]]) -> Iterator[str]:
        """The pieces of the answer that comes after it."""
        try:
            for _, piece in pieces:
                self._end()
                yield piece
        finally:
            self._end()

    def _end(self) -> None:
        if self._begun:
            self._print("\n\n")
        self._begun = False

    def _print(self, text: str) -> None:
        grey, plain = (GREY, PLAIN) if sys.stderr.isatty() else ("", "")
        print(grey + for_terminal(text) + plain, end="", file=sys.stderr, flush=True)
