"""The one video loader: anything that holds a video -> a `Clip`, whose frames are decoded when needed.

    clip = open_video("clip.mp4")                 # MP4, QuickTime, WebM, Matroska, AVI; path, URL or bytes
    clip = open_video("dance.gif")                # an animated GIF, WebP or PNG
    clip = open_video("frames")                   # a folder of images, in the order of their names
    for frame in clip.frames([0, 12, 24]): ...    # upright RGB images

Videos are strangers, as images are (`data.images`): every refusal is an `ImageError`. PyAV, an optional
requirement, decodes what Pillow does not. FFmpeg below it reads many formats, some of which open other files:
it is told which one a file has, and is handed the bytes alone.
"""

from __future__ import annotations

import bisect
import io
import itertools
import math
import mimetypes
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from data.errors import ImageError
from data.images import (
    ImageLimits,
    NamedBytes,
    animation,
    check_size,
    describe,
    load_image,
    moves,
    read_bytes,
)
from messages import one_line

MOST_BYTES = 2**31  # of a file that is read piece by piece
MOST_SECONDS = 2 * 3600
MOST_FRAMES = 500_000  # of a file
MOST_FRAME_PIXELS = 2**24  # a decoder keeps sixteen of them
DECODE_THREADS = 4
MOST_RATE = 100  # frames a second of an animation
UNKNOWN_RATE = 24.0  # frames a second where a file does not say, as in transformers
_CONTAINERS = (
    (rb".{4}(?:ftyp|moov|mdat|wide|free|skip)", "mov"),
    (rb"\x1aE\xdf\xa3", "matroska"),
    (rb"RIFF.{4}AVI ", "avi"),
)
_NO_VIDEO = re.compile(rb".{4}ftyp(?:hei|hev|mif1|msf1|avi)", re.DOTALL)  # HEIC and AVIF images
_ANIMATED = re.compile(rb"GIF8|RIFF.{4}WEBP|\x89PNG", re.DOTALL)
_URL = re.compile(r"\w{2,}:", re.IGNORECASE)
HEAD = 16  # bytes that tell


@dataclass(frozen=True)
class Clip:
    """A video that can be decoded, at least its first frame.

    count: frames. rate: of them a second; None for a folder, whose images somebody has chosen already.
    size: (width, height) in pixels. read: see `frames`. animated: it is an image that moves.
    """

    name: str
    count: int
    rate: float | None
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


def open_visual(
    source: Any,
    limits: ImageLimits = ImageLimits(),  # noqa: B008
    name: str | None = None,
) -> Image.Image | Clip:
    """What `load_image` gives; or of a video, an animation or a folder of images, a Clip."""
    opened = clip_of(source, limits, name or describe(source))
    return opened if isinstance(opened, Clip) else load_image(opened, limits, name)


def open_video(source: Any, limits: ImageLimits = ImageLimits(), name: str | None = None) -> Clip:  # noqa: B008
    """A Clip of what is a video, an animation or a folder of images. Raises ImageError."""
    name = name or describe(source)
    if not isinstance(clip := clip_of(source, limits, name), Clip):
        if isinstance(clip, str | os.PathLike):
            read_bytes(clip, limits, name)  # says why there are none
        kinds = "MP4, QuickTime, WebM, Matroska, AVI, an animated GIF, WebP or PNG, or a folder of images"
        raise ImageError(f"{name}: expected a video ({kinds}), got something else")
    return clip


def is_video(data: bytes, limits: ImageLimits, name: str, rest: Callable[[], bytes] = bytes) -> bool:
    """Whether `open_visual` would make a Clip of these bytes, without a look at more than a frame of them.
    Those that follow the first HEAD may be the `rest`, which is read where they have to tell. Raises
    ImageError for an animation that cannot be opened."""
    if container_of(data[:HEAD]) is not None:
        return True
    return _ANIMATED.match(data) is not None and moves(data + rest(), limits, name)


def clip_of(source: Any, limits: ImageLimits, name: str) -> Any:
    """A Clip, or of what is no video, what to give to `load_image`."""
    readable = isinstance(source, str | os.PathLike | bytes | bytearray | memoryview)
    if isinstance(source, Clip) or not (readable or hasattr(source, "read")):
        return source
    local = isinstance(source, os.PathLike) or (isinstance(source, str) and not _URL.match(source))
    if local and limits.allow_paths:
        try:
            path = Path(source).expanduser()  # type: ignore[arg-type]
            head, size = (_head(path), path.stat().st_size) if path.is_file() else (None, 0)
        except (OSError, ValueError, RuntimeError):
            return source  # `load_image` says what is wrong with it
        if head is None:
            return _of_folder(path, limits, name) if path.is_dir() else source
        if container := container_of(head):
            if size > MOST_BYTES:
                raise ImageError(f"{name}: expected at most {MOST_BYTES:,} bytes, got {size:,}")
            return _of_file(lambda: path.open("rb"), container, limits, name)
        if not _ANIMATED.match(head):
            return source
    data = NamedBytes(read_bytes(source, limits, name))
    data.name = name
    if container := container_of(data[:HEAD]):
        return _of_file(lambda: io.BytesIO(data), container, limits, name)
    return (_ANIMATED.match(data) and _of_animation(data, limits, name)) or data


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)


def container_of(head: bytes) -> str | None:
    """FFmpeg's name of a video's format, by a file's first bytes."""
    if _NO_VIDEO.match(head):
        return None
    return next((form for start, form in _CONTAINERS if re.match(start, head, re.DOTALL)), None)


# ---------------------------------------------------------------------------------------- what FFmpeg decodes
def _of_file(open_file: Callable[[], BinaryIO], container: str, limits: ImageLimits, name: str) -> Clip:
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
    try:
        import av  # an optional requirement
    except ImportError:
        advice = "to read videos, install the package av: pip install -r requirements-video.txt"
        raise ImageError(f"{name}: {advice} (an animated GIF and a folder of images need nothing)") from None
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
def _of_animation(data: bytes, limits: ImageLimits, name: str) -> Clip | None:
    """None for an image that does not move. Its frames may be shown for different times: a video of it has so
    many frames a second that each is shown for a whole number of them, at most `MOST_RATE`."""
    times, size = list[float](), (0, 0)
    for frame, shown in _in_time(animation(data, limits, name), limits, name):
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
        frames = enumerate(_in_time(animation(data, limits, name), limits, name))
        yield from (frame for number, (frame, _) in frames for _ in range(wanted.count(number)))

    return Clip(name, round(seconds / each), 1 / each, size, read, animated=True)


def _of_folder(folder: Path, limits: ImageLimits, name: str) -> Clip:
    def number(path: Path) -> list[Any]:  # frame-2 before frame-10
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)]

    try:
        shown = (path for path in folder.iterdir() if not path.name.startswith("."))
        kinds = [(mimetypes.guess_type(path)[0] or "", path) for path in shown]
    except OSError as error:
        raise ImageError(f"{name}: the folder cannot be read ({one_line(error, 200)})") from error
    files = sorted((path for kind, path in kinds if kind.startswith("image/")), key=number)
    if not 1 <= len(files) <= MOST_FRAMES:
        raise ImageError(
            f"{name}: expected a folder with images, the frames of a video, got {len(files)} of them"
        )

    def read(indices: Sequence[int]) -> Iterator[Image.Image]:
        return (load_image(files[index], limits) for index in indices)

    return Clip(name, len(files), None, load_image(files[0], limits).size, read)
