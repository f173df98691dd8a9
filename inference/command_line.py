"""The command lines of the entry points. Nothing here needs torch: a mistake is told at once."""

from __future__ import annotations

import argparse

from data.errors import printable


class Parser(argparse.ArgumentParser):
    """Mistakes on the command line read like every other mistake: one sentence, exit status 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {printable(message)} (--help lists the options)\n")


def positive(text: str) -> int:
    """An option's whole number, one at least."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value
