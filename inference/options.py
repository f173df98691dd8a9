"""What generate.py's arguments mean, and which do not go together. Nothing here needs torch: a
mistake is told at once."""

from __future__ import annotations

import argparse
import os
import re
import select
import stat
import sys

from data.errors import ImageError
from data.files import expanded, nearest_file
from inference.errors import RequestError

STDIN = "-"  # the image that is read from there
MOST_QUESTION = 2**20  # bytes of a question that is piped in
WAIT = 5.0  # seconds for it to begin: stdin may be a pipe that nobody writes to
_URL = re.compile(r"https?://|data:", re.IGNORECASE)
_SUFFIX = re.compile(
    r"\.(jpe?g|png|webp|gif|bmp|tiff?|p[bgpn]m|avif|hei[cf]|jp2|jxl|svg|pdf|mp4)", re.IGNORECASE
)
_PATH = re.compile(r"/|\.\.?/|~\w*/|\w+://")
_ALIKE = 0.8  # text with spaces is a mistyped path if a file's name is as much like it as this


def mistake_in(settings: argparse.Namespace) -> str | None:
    """One sentence on what cannot be done as asked, or None."""
    if settings.batch is not None:
        if mistake := _mistake_in_batch(settings):
            return mistake
    elif settings.out is not None:
        return "--out belongs to --batch; use --json to have the results of one question on stdout"
    elif settings.batch_size is not None:
        return "--batch-size belongs to --batch: questions of the command line are asked one by one"
    if settings.chat and (settings.batch or settings.json or settings.num_answers != 1 or not settings.cache):
        return "--chat prints text from one cache: leave out --batch, --json, --num-answers, --no-cache"
    if settings.chat and STDIN in settings.images:
        return "--chat reads its lines from stdin: expected an image as a path or URL, got -"
    if settings.images.count(STDIN) > 1:
        return "-: stdin holds one image, got - several times"
    if settings.compile == "on" and not settings.cache:
        return "--compile on: the compiled step reads a cache, leave out --no-cache"
    if settings.dtype == "int8" and settings.device not in ("auto", "cpu", "cpu:0"):
        return f"--dtype int8: expected --device cpu, got {settings.device}; use bfloat16 there"
    if settings.no_image and settings.images:
        return "--no-image: expected no IMAGE, got " + ", ".join(settings.images)
    blank = next((question for question in settings.questions if not question.strip()), None)
    return None if blank is None else f"-q: expected a question, got {blank!r}"


def _mistake_in_batch(settings: argparse.Namespace) -> str | None:
    if settings.images or settings.questions or settings.no_image or settings.json:
        return "--batch takes images and questions from its file: leave out IMAGE, -q, --no-image, --json"
    if settings.out is None:
        return "--batch needs --out FILE.jsonl for its results"
    if not settings.cache:
        return "--batch shares a cache among its questions: leave out --no-cache"
    if settings.batch_size is not None and settings.batch_size < 1:
        return f"--batch-size: expected at least 1, got {settings.batch_size}"
    return None


def is_question(text: str) -> bool:
    """Whether an argument that stands where an image may is a question.

    What exists is an image, and so is what looks like a path: a mistyped one is to be refused, not asked.
    """
    if text == STDIN or _URL.match(text) or os.path.lexists(expanded(text)):
        return False
    if text.rstrip().endswith(("?", "？", "؟")):
        return True
    if not any(map(str.isspace, text)):
        return not text  # one word: a name; and nothing at all was meant for a question
    return not (
        _PATH.match(text) or _SUFFIX.fullmatch(os.path.splitext(text)[1]) or nearest_file(text, _ALIKE)
    )


def check_image_name(name: str, advice: str = "") -> None:
    """Raises ImageError where a path names no file, with the nearest name, and `advice`."""
    if name == STDIN or _URL.match(name) or "://" in name[:16] or os.path.lexists(expanded(name)):
        return
    hint = nearest_file(name) or f" (looked in {os.getcwd()}), check the path"
    raise ImageError(f"{name!r}: no such file{hint}{advice}")


def read_image() -> bytes:
    """The image that stdin holds, within the limits of `data.images`.

    Raises:
        RequestError: there is none.
    """
    from data.images import ImageLimits

    if sys.stdin is None or sys.stdin.isatty():
        raise RequestError("-: expected an image on stdin, got a terminal; pipe a file into this command")
    raw = sys.stdin.buffer.read(ImageLimits().max_bytes + 1)
    if not raw:
        raise RequestError("-: expected an image on stdin, got nothing")
    return raw


def piped_question(tell) -> str | None:
    """The question that is piped in: all that stdin holds. None where stdin is a terminal, closed, /dev/null,
    empty, or a pipe into which nobody writes, as cron and CI have it.

    Args:
        tell: gets a line where there is something to wait for.

    Raises:
        RequestError: no text, or too much of it.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return None
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        if not select.select([sys.stdin], [], [], min(1, WAIT))[0]:
            tell(f"waiting {WAIT:g} s for a question on stdin; -q TEXT or </dev/null spares that")
            if not select.select([sys.stdin], [], [], WAIT)[0]:
                return None
    elif not stat.S_ISREG(mode):
        return None
    raw = sys.stdin.buffer.read(MOST_QUESTION + 1)
    if len(raw) > MOST_QUESTION:
        raise RequestError(f"stdin: expected a question of at most {MOST_QUESTION} bytes, got more")
    try:
        return raw.decode("utf-8-sig").strip() or None
    except UnicodeDecodeError:
        raise RequestError(
            "stdin: expected a question in UTF-8, got other bytes; an image on stdin is named with -"
        ) from None
