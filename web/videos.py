"""A stranger's video is opened once, in a process of its own: for a bounded time, in bounded memory.

    with open_apart(data, limits, "video 1") as clip:  # ImageError, as of `data.visuals.open_video`
        for frame in clip.frames([0, 12]): ...

A packet of a few bytes can keep a decoder busy for hours, or crash it: no thread can be ended then, but a
process can. It gives way to the models' threads.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any

from PIL import Image

from data.errors import ImageError
from data.images import ImageLimits
from data.video import Clip
from data.visuals import open_video
from inference.trial import end_process, start_process

MEMORY = 2 * 2**30  # bytes for one video
WALL = 60.0  # seconds, on a machine that is busy with other things: so long others may wait for a decoder
NICE = 10
PROGRAM = "from web.videos import serve; serve()"
OUT_OF_MEMORY = 77  # its exit status
log = logging.getLogger(__name__)
# The processes that decode for what is being done here: whoever else holds the set can end them.
RUNNING: ContextVar[set[subprocess.Popen[bytes]] | None] = ContextVar("RUNNING", default=None)


@contextmanager
def open_apart(data: bytes, limits: ImageLimits, name: str) -> Iterator[Clip]:
    """The Clip of a video's bytes, within `max_seconds` of processor time for all that is done with it, until
    the block ends. Raises ImageError, as its frames do."""
    process = start_process(PROGRAM)
    sent, received = process.stdin, process.stdout
    assert sent is not None and received is not None, "they are pipes"
    if (running := RUNNING.get()) is not None:
        running.add(process)

    def reply() -> dict[str, Any]:
        line = received.readline()
        if line.endswith(b"\n"):  # else it has ended, perhaps within a line
            told = json.loads(line)
            if "error" in told:
                raise ImageError(told["error"])
            return told
        status, most = process.wait(), f"{limits.max_seconds:g} s or {MEMORY // 2**20:,} MiB"
        too_much = f"it takes more than {most} to decode; give a shorter video"
        why = dict.fromkeys((-signal.SIGPROF, OUT_OF_MEMORY), too_much)
        why[-signal.SIGALRM] = f"not decoded within {WALL:g} s on a busy server; ask again, or give less"
        if status not in (*why, -signal.SIGTERM):  # with which it ends where nobody waits for it any more
            log.warning("a process that decoded a video has ended with status %d", status)
        said = why.get(status, "it could not be decoded; give another video, or save it anew")
        raise ImageError(f"{name}: {said}")

    def read(indices: Sequence[int]) -> Iterator[Image.Image]:
        with suppress(OSError):  # it has ended
            sent.write(json.dumps([*indices]).encode() + b"\n")
            sent.flush()
        for _ in indices:
            width, height = reply()["size"]
            pixels = received.read(width * height * 3)
            if len(pixels) < width * height * 3:
                reply()
            yield Image.frombytes("RGB", (width, height), pixels)

    try:
        with suppress(OSError):
            about = {"name": name, "bytes": len(data), "limits": asdict(limits)}
            sent.write(json.dumps(about).encode() + b"\n" + data)
            sent.flush()
        told = reply()
        yield Clip(name, told["count"], told["rate"], tuple(told["size"]), read, told["animated"])
    finally:
        end_process(process)
        if running is not None:
            running.discard(process)


def serve() -> None:
    """All of the process: stdin says which video it is and, line by line, which frames are wanted."""
    about = json.loads(sys.stdin.buffer.readline())
    limits = ImageLimits(**about["limits"])
    os.nice(NICE)
    with suppress(OSError, ValueError):  # not everywhere
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.setitimer(signal.ITIMER_PROF, limits.max_seconds)  # these signals end it
    signal.setitimer(signal.ITIMER_REAL, WALL)
    try:
        clip = open_video(sys.stdin.buffer.read(about["bytes"]), limits, about["name"])
        _reply({"count": clip.count, "rate": clip.rate, "size": clip.size, "animated": clip.animated})
        for line in sys.stdin.buffer:
            for frame in clip.read(json.loads(line)):
                _reply({"size": frame.size}, frame.tobytes())
    except ImageError as error:
        _reply({"error": str(error)})
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


def _reply(told: dict[str, Any], data: bytes = b"") -> None:
    sys.stdout.buffer.write(json.dumps(told).encode() + b"\n" + data)
    sys.stdout.buffer.flush()
