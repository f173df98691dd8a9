"""What the command lines of all programs share. Without torch, so that a mistake is refused at once."""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from data.errors import ImageError
from inference.errors import check_text_only
from inference.thinking import THINK_TOKENS
from messages import did_you_mean, for_terminal, named, one_line, printable
from models import __version__
from models.checkpoints.names import table
from models.checkpoints.sources import check_has_config, last_name, open_files, repository
from models.config import check_device

T = TypeVar("T")
DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4")
_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
LOG_AFTER = 1.0  # seconds of loading
MOST_THREADS = 512  # with more, OpenMP ends the process
MODEL = "folder, GGUF file, repository on the Hub, or a short name such as smolvlm-256m (list: prints them)"
ADAPTER = (
    "LoRA adapter for the model: a folder of peft's or train.py's, or a repository on the Hub, its newest"
)
STDIN = "-"  # the image that is read from stdin
_URL = re.compile(r"\w+://|data:", re.IGNORECASE)
_PATH = re.compile(r"\.{0,2}/|~\w*/")
_SUFFIX = re.compile(
    r"\.(jpe?g|png|webp|gif|bmp|tiff?|p[bgpn]m|avif|hei[cf]|jp2|jxl|svg|pdf|mp4|m4v|mov|webm|mkv|avi)",
    re.IGNORECASE,
)


class Parser(argparse.ArgumentParser):
    """Refuses a wrong command line in one sentence with exit status 2, and has --version."""

    def __init__(self, **options):
        options |= {
            name: named(text) for name, text in options.items() if name in ("prog", "description") and text
        }
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        version = f"%(prog)s (Ocelli) {__version__}"
        self.add_argument("--version", action="version", version=version, help="print the version and exit")

    def error(self, message: str):
        if found := re.match(r"unrecognized arguments: (?:.* )?(--?\w[^\s=]*)", message):
            message = f"unknown option {found[1]}{did_you_mean(found[1], self._option_string_actions)}"
        self.exit(2, f"{self.prog}: error: {printable(message)} (--help lists the options)\n")

    def refuse_together(self, args: argparse.Namespace, *rules: str) -> None:
        """End if an option is given beside one that it excludes. A rule names it and then these others, as in
        "--draft, --think, --num-answers", with a value where only that one matters: "--compile on"."""

        def is_given(option: str) -> bool:
            name, _, value = option.partition(" ")
            dest = self._option_string_actions[name].dest
            own = getattr(args, dest)
            return str(own) == value if value else own != self.get_default(dest)

        for first, *others in (rule.split(", ") for rule in rules):
            if is_given(first) and (beside := next(filter(is_given, others), "")):
                self.error(f"{first} cannot be combined with {beside}")


# --------------------------------------------------------------------------------------- types of options
def positive(text: str, most: int | None = None, least: int = 1) -> int:
    """The type of an option that takes an integer of at least `least`, and at most `most`."""
    is_number = text.strip().lstrip("+-").isdecimal()
    if not is_number or int(text) < least or (most is not None and int(text) > most):
        limits = f"at least {least}" + ("" if most is None else f" and at most {most}")
        raise argparse.ArgumentTypeError(f"expected a whole number, {limits}, got {text!r}")
    return int(text)


def option(read: Callable[[str], T]) -> Callable[[str], T]:
    """A type of options: argparse shows the sentence of the error that `read` raises."""

    def convert(text: str) -> T:
        try:
            return read(text)
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(one_line(error)) from None

    return convert


@option
def said(text: str) -> str:
    """A text with a word in it."""
    if not text.strip():
        raise ValueError(f"expected a text, got {text!r}")
    return text


@option
def frames_a_second(text: str) -> float:
    """A number above 0, up to 1000."""
    if not 0 < float(text) <= 1000:
        raise ValueError(f"expected more than 0 and at most 1000, got {text}")
    return float(text)


device = option(check_device)  # the name of a kind of device, with or without an index


@option
def adapter(name: str) -> str:
    """A folder or a repository that has an adapter."""
    if not open_files(name).json("adapter_config.json"):
        raise ValueError(f"{name} has no adapter_config.json: expected a LoRA adapter as peft saves it")
    return name


def dtype(text: str) -> str:
    """The full name of a dtype."""
    return _DTYPE_ALIASES.get(text, text)


def model(name: str) -> str:
    """The type of an option that names a model: a short name becomes its repository. "list" prints the short
    names and ends the program."""
    if name == "list" and not os.path.isdir(name):
        print(table())
        sys.exit(0)
    return repository(name)


# ------------------------------------------------------------------------------------ groups of options
def add_machine(add: Callable[..., Any]) -> None:
    """Options of `inference.checkpoint.open_checkpoint`, beside --device and --dtype."""
    number, pixels = partial(positive, most=MOST_THREADS), partial(positive, least=1024)
    usual = "OMP_NUM_THREADS, or one for each processor that this process may use"
    add("--threads", type=number, metavar="N", help=f"maximum of CPU threads (default: {usual})")
    about = "pixels that larger images are made to fit, where a model takes images whole (default: the "
    about += "checkpoint's own, which is never exceeded, and on a CPU at most 524288; of pages 2097152)"
    add("--max-pixels", type=pixels, metavar="N", help=about)
    shown = "shown of a video (default: as the checkpoint says)"
    add("--fps", type=frames_a_second, metavar="N", help=f"frames of a second that are {shown}")
    add("--max-frames", type=positive, metavar="N", help=f"most frames that are {shown}")
    add("--adapter", type=adapter, metavar="FOLDER", help=ADAPTER)


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """How `inference.checkpoint.open_checkpoint` is to open a model, as those options say."""
    names = ("device", "dtype", "threads", "max_pixels", "fps", "max_frames", "adapter")
    return {name: getattr(args, name) for name in names}


def add_think(add: Callable[..., Any]) -> None:
    """The options of `inference.thinking.Think`."""
    first = "let the model think before it answers (default: off)"
    add("--think", action=argparse.BooleanOptionalAction, default=False, help=first)
    most = f"maximum of tokens of the thinking (default {THINK_TOKENS})"
    add("--think-tokens", type=positive, metavar="N", help=most)


def check_model(source: str, revision: str | None, text_only: bool = False) -> None:
    """Refuse a model whose name is wrong or whose config.json cannot be reached, and one that needs an image
    for `text_only` questions."""
    check_has_config(source, revision)
    if text_only:
        check_text_only(open_files(source, revision).generation_config)


# ------------------------------------------------------------------- words that name images, and questions
def is_image_name(word: str) -> bool:
    """Whether one word names an image and nothing else: a URL, or what is written like a path."""
    path = _PATH.match(word) and word.count("/") > 1 - word.startswith((".", "~"))  # "/stats" is no path
    url = _URL.match(word) and not word.endswith(":")
    return bool(path or url or _SUFFIX.fullmatch(os.path.splitext(word)[1]))


def is_question(text: str) -> bool:
    """Whether a positional argument is a question, not an image: several words, or what ends in a question
    mark, that is no file and is not written like one. A mistyped path is refused instead of asked."""
    if text == STDIN or is_image_name(text) or os.path.lexists(os.path.expanduser(text)):
        return False
    return text.rstrip().endswith(("?", "？", "؟")) or any(map(str.isspace, text))


# The end of a sentence about a name of no file.
LOST = "; a question of several words needs quotes, or -q before it"


def check_image_name(name: str) -> None:
    """Raises ImageError if a path names no file."""
    if name != STDIN and not _URL.match(name) and not os.path.lexists(os.path.expanduser(name)):
        raise ImageError(f"{name!r}: no such file{LOST}")


# ------------------------------------------------------------------------------- what the programs print
@contextmanager
def log_if_slow(program: str, model: str) -> Iterator[None]:
    """Says on stderr that this model is being loaded if the block takes more than a moment."""
    text = f"{program}: loading {last_name(model)}"
    timer = threading.Timer(LOG_AFTER, log, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def log(text: str) -> None:
    """Lines on stderr, none of which controls a terminal."""
    print(for_terminal(named(text)), file=sys.stderr, flush=True)


def say(pieces: Iterable[str]) -> None:
    """Print an answer while it is made; nothing in it controls a terminal."""
    for piece in pieces:
        print(for_terminal(piece), end="", flush=True)
    print(flush=True)
