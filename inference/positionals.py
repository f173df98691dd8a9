"""The words of a command line without an option: which of them name images, and which are questions."""

from __future__ import annotations

import os
import re
import select
import stat
import sys
from collections.abc import Callable

from data.errors import ImageError, nearest_file
from inference.errors import RequestError

STDIN = "-"  # the image that is read from stdin
STDIN_TIMEOUT = 5.0  # seconds for a piped question to begin: nobody may be writing to the pipe
_URL = re.compile(r"\w+://|data:", re.IGNORECASE)
_PATH = re.compile(r"\.{0,2}/|~\w*/")
_SUFFIX = re.compile(
    r"\.(jpe?g|png|webp|gif|bmp|tiff?|p[bgpn]m|avif|hei[cf]|jp2|jxl|svg|pdf|mp4|m4v|mov|webm|mkv|avi)",
    re.IGNORECASE,
)
_MANY_TOGETHER, _MOST_TOGETHER = 4, 256  # images in one question: a hint beyond, and an error
_ALIKE = 0.8  # text with spaces is a mistyped path if it is this similar to the name of a file


def is_question(text: str) -> bool:
    """Whether a positional argument is a question, not an image. A file that exists is an image. So is what
    looks like a path, so that a mistyped path is refused instead of asked."""
    if text == STDIN or _URL.match(text) or os.path.lexists(os.path.expanduser(text)):
        return False
    if text.rstrip().endswith(("?", "？", "؟")):
        return True
    if not any(map(str.isspace, text)):
        return not text  # one word is a name; an empty argument was meant as a question
    return not (
        _PATH.match(text) or _SUFFIX.fullmatch(os.path.splitext(text)[1]) or nearest_file(text, _ALIKE)
    )


def is_image_name(word: str) -> bool:
    """Whether one word names an image and nothing else: a URL, or what is written like a path."""
    return bool(
        (_URL.match(word) and not word.endswith(":"))
        or _SUFFIX.fullmatch(os.path.splitext(word)[1])
        or (_PATH.match(word) and word.count("/") > 1 - word.startswith((".", "~")))  # "/stats" is no path
    )


def lacks_quotes(names: list[str], questions: list[str]) -> str | None:
    """A sentence about what seems to be a question of several words without quotes, or None: names of no
    files that are single words, several of them, or one beside a question of one word."""

    def is_lost(name: str) -> bool:
        inside = name.rstrip(".,;:!")  # a sentence may end in these
        named = name == STDIN or is_image_name(name) or any(mark in inside for mark in "./*?[")
        return not named and not os.path.lexists(name) and not nearest_file(name, folders=True)

    lost = [*filter(is_lost, names)]
    if not lost or len(lost) + sum(not re.search(r"\s", one.strip()) for one in questions) < 2:
        return None
    return f"{lost[0]!r}: no such file; a text of several words, such as a question, needs quotes around it"


def check_image_name(name: str, advice: str = "") -> None:
    """Raises ImageError with the nearest name, and `advice`, if a path names no file."""
    if name == STDIN or _URL.match(name) or os.path.lexists(os.path.expanduser(name)):
        return
    hint = nearest_file(name) or f" (looked in {os.getcwd()}), check the path"
    raise ImageError(f"{name!r}: no such file{hint}{advice}")


def check_together(names: list[str], log: Callable[[str], None]) -> None:
    """Refuse names of no images, and so many that they were hardly meant to be shown in one prompt."""
    each = "to ask about each by itself: generate.py batch IMAGE... -q TEXT --out FILE.jsonl"
    for name in names:
        check_image_name(name, " (a question that looks like a path takes -q)")
        if name != STDIN and os.path.isdir(os.path.expanduser(name)):
            log(f"{name}: its images are shown as a video; {each.replace('IMAGE...', name)}")
    if len(names) > _MOST_TOGETHER:
        raise ImageError(
            f"expected at most {_MOST_TOGETHER} images in one question, got {len(names)}; {each}"
        )
    if len(names) > _MANY_TOGETHER:
        log(f"{len(names)} images are shown together, in one question; {each}")


def read_stdin_image(max_bytes: int) -> bytes:
    """The bytes of the image on stdin, one more than `max_bytes` at most. Raises RequestError."""
    raw = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read(max_bytes + 1)
    if not raw:
        raise RequestError("-: expected an image on stdin, got nothing; pipe a file into this command")
    return raw


def read_stdin_questions() -> list[str]:
    """All of stdin as a question. [] if stdin is a terminal, closed, /dev/null, empty, or a pipe that nobody
    writes to, as under cron and CI."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return []
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        if not select.select([sys.stdin], [], [], STDIN_TIMEOUT)[0]:
            return []
    elif not stat.S_ISREG(mode):
        return []
    try:
        question = sys.stdin.buffer.read().decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise RequestError(
            "stdin: expected a question in UTF-8; pass - to read an image from stdin"
        ) from None
    return [question] if question else []
