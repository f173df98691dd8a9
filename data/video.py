"""Videos as `Clip`s, whose frames are decoded when they are asked for. `data.visuals` opens them.

PyAV, an optional requirement, decodes what Pillow does not. FFmpeg below it reads many formats, some of which
open other files: it is handed the bytes alone, and the name of the format that they have.
"""

from __future__ import annotations

import bisect
import io
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from data.errors import ImageError, optional
from data.images import ImageLimits, check_size, open_file, refusing_damage, upright
from messages import one_line

MOST_BYTES = 2**31  # of a file that is read piece by piece
MOST_SECONDS = 2 * 3600
MOST_FRAMES = 500_000  # of a file
MOST_FRAME_PIXELS = 2**24  # a decoder keeps sixteen of them
DECODE_THREADS = 4
MOST_RATE = 100  # frames a second of an animation
UNKNOWN_RATE = 24.0  # frames a second where a file does not say, as in transformers


@dataclass(frozen=True)
class Clip:
    """A video that can be decoded, at least its first frame.

    count: frames. rate: of them a second. size: (width, height) in pixels. read: see `frames`. animated: it
    is an image that moves.
    """

    name: str
    count: int
    rate: float
    size: tuple[int, int]
    read: Callable[[Sequence[int]], Iterator[Image.Image]]
    animated: bool = False

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of these numbers, which ascend, of one size. Raises ImageError."""
        for frame in self.read(indices):
            if frame.size != self.size:
                sizes = " and ".join(f"{width} x {height}" for width, height in (self.size, frame.size))
                raise ImageError(f"{self.name}: expected frames of one size, got {sizes}")
            yield frame


# ---------------------------------------------------------------------------------------- what FFmpeg decodes
def clip_of_file(source: Path | bytes, container: str, limits: ImageLimits, name: str) -> Clip:
    """A file, or the bytes of one, in the format that FFmpeg calls `container`."""
    if isinstance(source, Path) and (size := source.stat().st_size) > MOST_BYTES:
        raise ImageError(f"{name}: expected at most {MOST_BYTES:,} bytes, got {size:,}")

    def open_file() -> BinaryIO:
        return source.open("rb") if isinstance(source, Path) else io.BytesIO(source)

    with _decoder(open_file, container, name) as (opened, stream):
        rate = float(stream.average_rate or stream.guessed_rate or UNKNOWN_RATE)
        if not (count := stream.frames):  # as in Matroska; a packet is a frame
            count = sum(packet.size > 0 for packet in _in_time(opened.demux(stream), limits, name))
    seconds = count / rate if rate > 0 else math.inf
    for what, got, most in (
        ("frames", count, MOST_FRAMES),
        ("seconds", math.ceil(min(seconds, 1e9)), MOST_SECONDS),
    ):
        if not 1 <= got <= most:
            raise ImageError(f"{name}: expected a video of 1 to {most:,} {what}, got {got:,}")

    def read(indices: Sequence[int]) -> Iterator[Image.Image]:
        with _decoder(open_file, container, name) as (opened, stream):
            yield from _decoded(_in_time(opened.decode(stream), limits, name), name, indices, rate)

    return Clip(name, count, rate, next(read([0])).size, read)


def _decoded(frames: Iterator[Any], name: str, indices: Sequence[int], rate: float) -> Iterator[Image.Image]:
    """The frames of these numbers. Of those within the last second that a file's header counts and that are
    not there, the last that is stands in their place."""
    wanted, done, last = list(indices), 0, None
    for done, frame in enumerate(frames, start=1):
        check_size(frame.width, frame.height, ImageLimits(max_pixels=MOST_FRAME_PIXELS), name)
        last = frame
        while wanted and wanted[0] < done:
            del wanted[0]
            yield _upright(frame)
        if not wanted:
            return
    if last is None or wanted[-1] - done > rate:
        raise ImageError(f"{name}: expected {wanted[-1] + 1} frames, got {done}; the video is cut off")
    for _ in wanted:
        yield _upright(last)


def _upright(frame: Any) -> Image.Image:
    """An RGB image, turned as the file says."""
    turns = {90: Image.Transpose.ROTATE_90, 270: Image.Transpose.ROTATE_270, 180: Image.Transpose.ROTATE_180}
    image, turn = frame.to_image(), turns.get(round(frame.rotation) % 360)
    return image if turn is None else image.transpose(turn)


@contextmanager
def _decoder(open_file: Callable[[], BinaryIO], container: str, name: str) -> Iterator[tuple[Any, Any]]:
    """PyAV's container and the stream of its pictures; what goes wrong in here becomes an ImageError."""
    advice = "to read videos, install the package av: pip install -r requirements-video.txt"
    av = optional("av", f"{name}: {advice} (an animated GIF needs nothing)")
    try:
        with open_file() as file, av.open(file, format=container) as opened:
            if not opened.streams.video:
                raise ImageError(f"{name}: expected a video, found no pictures in it")
            stream = opened.streams.video[0]
            stream.codec_context.options = {"max_pixels": str(MOST_FRAME_PIXELS)}
            # Several frames at a time, each of which takes memory.
            stream.thread_type, stream.codec_context.thread_count = "AUTO", DECODE_THREADS
            yield opened, stream
    except ImageError:
        raise
    except Exception as error:  # a decoder meets hostile bytes: whatever it raises is a refusal
        said = error.strerror if isinstance(error, av.FFmpegError) else error
        raise ImageError(f"{name}: the video is damaged or cut off ({one_line(said, 200)})") from error


def _in_time(items: Iterator[Any], limits: ImageLimits, name: str) -> Iterator[Any]:
    """The same, within `max_seconds`."""
    most = limits.max_seconds
    end = time.monotonic() + most
    for number, item in enumerate(items):
        if number > MOST_FRAMES or time.monotonic() > end:
            raise ImageError(f"{name}: it takes more than {most:.0f} s to decode; give a shorter video")
        yield item


# ---------------------------------------------------------------------------------------- what Pillow decodes
def _animation(data: bytes, limits: ImageLimits, name: str) -> Iterator[tuple[Image.Image, float]]:
    """The frames of an animated GIF, WebP or PNG as `load_image` gives them, and for how many seconds each is
    shown."""
    image, orientation = open_file(io.BytesIO(data), limits, name)
    with refusing_damage(f"{name}: the animation"):
        count = getattr(image, "n_frames", 1)
    # A PNG may have one more in front, for programs that show no animation.
    for number in range(int(getattr(image, "default_image", False)), count):
        with refusing_damage(f"{name}: the animation"):
            image.seek(number)
        shown = upright(image, orientation, name)
        milliseconds = image.info.get("duration") or 0
        # Browsers take a tenth of a second where a hundredth or less is said.
        yield shown, milliseconds / 1000 if milliseconds > 10 else 0.1


def clip_of_animation(data: bytes, limits: ImageLimits, name: str) -> Clip | None:
    """An animated image; None for a single frame. Its frames may be shown for different times: the clip has
    so many frames a second that each is shown for a whole number of them, at most `MOST_RATE`."""
    times, size = list[float](), (0, 0)
    for frame, shown in _in_time(_animation(data, limits, name), limits, name):
        size = size if times else frame.size
        times.append(shown)
    if len(times) < 2:
        return None
    if (seconds := sum(times)) > MOST_SECONDS:
        raise ImageError(f"{name}: expected a video of at most {MOST_SECONDS:,} seconds, got {seconds:,.0f}")
    same = len(set(times)) == 1
    each = times[0] if same else max(math.gcd(*(round(1000 * one) for one in times)) / 1000, 1 / MOST_RATE)
    ends = list(itertools.accumulate(times))[:-1]

    def read(indices: Sequence[int]) -> Iterator[Image.Image]:
        # In the middle of its place, where no sum of times is a little too large.
        wanted = [bisect.bisect(ends, (index + 0.5) * each) for index in indices]
        frames = enumerate(_in_time(_animation(data, limits, name), limits, name))
        yield from (frame for number, (frame, _) in frames for _ in range(wanted.count(number)))

    return Clip(name, round(seconds / each), 1 / each, size, read, animated=True)
