"""A stranger's video or PDF is opened once, in a process of its own: for a bounded time, in bounded memory.

with open_apart(data, limits, "video 1") as clip:  # ImageError, as of `data.visuals.open_video`
    for frame in clip.frames([0, 12]): ...
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any

from PIL import Image

from data.errors import ImageError
from data.images import ImageLimits
from data.pages import Pages
from data.video import Clip
from data.visuals import open_video
from inference.apart import Apart, bounded, say

MEMORY = 2 * 2**30  # bytes for one video
WALL = 60.0  # seconds, on a machine that is busy with other things: so long others may wait for a decoder
NICE = 10  # the models' threads come first
OUT_OF_MEMORY = 77  # its exit status
log = logging.getLogger(__name__)
# The processes that decode for what is being done here: whoever else holds the set can end them.
RUNNING: ContextVar[set[Apart] | None] = ContextVar("RUNNING", default=None)


@contextmanager
def open_apart(data: bytes, limits: ImageLimits, name: str) -> Iterator[Clip]:
    """The Clip of a video's bytes, within `max_seconds` of processor time for all that is done with it, until
    the block ends. Raises ImageError, as its frames do. Pages of a "file" are frames of their own sizes."""
    child, running = Apart("web.videos:serve"), RUNNING.get()
    if running is not None:
        running.add(child)

    def reply() -> dict[str, Any]:
        message = child.reply() or {"error": f"{name}: {_why(child.status, limits)}"}
        if "error" in message:
            raise ImageError(message["error"])
        return message

    def read(indices: Sequence[int]) -> Iterator[Image.Image]:
        child.send([*indices])
        for _ in indices:
            width, height = reply()["size"]
            pixels = child.read(width * height * 3)
            if len(pixels) < width * height * 3:
                reply()
            yield Image.frombytes("RGB", (width, height), pixels)

    try:
        child.send({"name": name, "bytes": len(data), "limits": asdict(limits)}, data)
        clip = reply()
        yield Clip(name, clip["count"], clip["rate"], tuple(clip["size"]), read, clip["animated"])
    finally:
        child.end()
        if running is not None:
            running.discard(child)


def _why(status: int, limits: ImageLimits) -> str:
    """The reason for which the process has ended, as advice."""
    if status == -signal.SIGALRM:
        return f"not decoded within {WALL:g} s on a busy server; ask again, or give less"
    if status in (-signal.SIGPROF, -signal.SIGABRT, OUT_OF_MEMORY):  # pdfium aborts without memory
        most = f"{limits.max_seconds:g} s or {MEMORY // 2**20:,} MiB"
        return f"it takes more than {most} to decode; give less"
    if status != -signal.SIGTERM:  # nobody waits for it any more
        log.warning("a process that decoded a video or PDF has ended with status %d", status)
    return "it could not be decoded; give another one, or save it anew"


def serve() -> None:
    """All of the process: stdin says which video it is and, line by line, which frames are wanted."""
    about = json.loads(sys.stdin.buffer.readline())
    limits = ImageLimits(**about["limits"])
    os.nice(NICE)
    bounded(limits.max_seconds, WALL, MEMORY)
    try:
        data, name = sys.stdin.buffer.read(about["bytes"]), about["name"]
        if name.startswith("video"):
            clip = open_video(data, limits, name)
        else:
            pages = Pages(data, name, limits)
            clip = Clip(name, pages.count, 1.0, (1, 1), lambda numbers: (pages.draw(n + 1) for n in numbers))
        say({"count": clip.count, "rate": clip.rate, "size": clip.size, "animated": clip.animated})
        for line in sys.stdin.buffer:
            for frame in clip.read(json.loads(line)):
                say({"size": frame.size}, frame.tobytes())
    except ImageError as error:
        say({"error": str(error)})
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
