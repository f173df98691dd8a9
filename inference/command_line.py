"""What the entry points' command lines share. Nothing here needs torch: a mistake is told at once."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from data.errors import did_you_mean, printable
from models import __version__
from models.checkpoints.hub import resolve_source
from models.config import check_device

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
PATIENCE = 1.0  # seconds of silence


class Parser(argparse.ArgumentParser):
    """Mistakes on the command line read like every other mistake: one sentence, exit status 2."""

    def __init__(self, **options):
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        self.add_argument("--version", action="version", version=f"%(prog)s (Ocelli) {__version__}")

    def error(self, message: str):
        unknown = [word for word in message.split() if word.startswith("-") and len(word) > 1]
        if message.startswith("unrecognized arguments: ") and unknown:
            word = unknown[0].partition("=")[0]
            message = f"unknown option {word}{did_you_mean(word, self._options())}"
        self.exit(2, f"{self.prog}: error: {printable(message)} (--help lists the options)\n")

    def _options(self) -> list[str]:
        commands = [
            action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)
        ]
        parsers = [self, *(parser for choices in commands for parser in choices.values())]
        return [name for parser in parsers for name in parser._option_string_actions]


def positive(text: str) -> int:
    """An option's whole number, one at least."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def dtype(text: str) -> str:
    """The name of a dtype, which has shorter ones."""
    return _SHORT.get(text, text)


def device(text: str) -> str:
    """The name of a device that this machine may have."""
    try:
        return check_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check_model(source: str, revision: str | None) -> None:
    """Refuse the name of a model that cannot be one, or that cannot be reached.

    Raises:
        CheckpointError: see `resolve_source` and `check_has_config`.
    """
    place = resolve_source(source, revision)
    if os.path.isdir(place) and os.path.isfile(os.path.join(place, "config.json")):
        return
    from models.checkpoints.hub import check_has_config  # the Hub's client takes 0.2 s to import

    check_has_config(source, revision)


@contextmanager
def told_if_slow(program: str, model: str) -> Iterator[None]:
    """Say on stderr that this model is being loaded if the block takes more than a moment."""
    name = os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model
    text = f"{program}: loading {name}"
    timer = threading.Timer(PATIENCE, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
