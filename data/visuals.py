"""What can be shown to a model: an image, or a video as a `Clip`.

    open_visual("photo.jpg")                      # an image, as `data.images.load_image` gives it
    clip = open_visual("clip.mp4")                # MP4, QuickTime, WebM, Matroska, AVI; path, URL or bytes
    clip = open_visual("dance.gif")               # an animated GIF, WebP or PNG
    for frame in clip.frames([0, 12, 24]): ...    # upright RGB images

A refusal is an `ImageError`.
"""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

from PIL import Image

from data.errors import ImageError
from data.images import ImageLimits, NamedBytes, describe, load_image, open_file, read_bytes, refusing_damage
from data.video import Clip, clip_of_animation, clip_of_file

_CONTAINERS = (
    (rb".{4}(?:ftyp|moov|mdat|wide|free|skip)", "mov"),
    (rb"\x1aE\xdf\xa3", "matroska"),
    (rb"RIFF.{4}AVI ", "avi"),
)
_NO_VIDEO = re.compile(rb".{4}ftyp(?:hei|hev|mif1|msf1|avi)", re.DOTALL)  # HEIC and AVIF images
_ANIMATED = re.compile(rb"GIF8|RIFF.{4}WEBP|\x89PNG", re.DOTALL)
_URL = re.compile(r"\w{2,}:", re.IGNORECASE)
HEAD = 16  # bytes of a file that tell its format


def open_visual(
    source: Any,
    limits: ImageLimits = ImageLimits(),  # noqa: B008
    name: str | None = None,
) -> Image.Image | Clip:
    """An image as `load_image` gives it; or of a video or an animation, a Clip."""
    opened = clip_of(source, limits, name or describe(source))
    return opened if isinstance(opened, Clip) else load_image(opened, limits, name)


def open_video(source: Any, limits: ImageLimits = ImageLimits(), name: str | None = None) -> Clip:  # noqa: B008
    """A Clip of what is a video or an animation. Raises ImageError."""
    name = name or describe(source)
    if not isinstance(clip := clip_of(source, limits, name), Clip):
        if isinstance(clip, str | os.PathLike):
            read_bytes(clip, limits, name)  # says why there are none
        kinds = "MP4, QuickTime, WebM, Matroska, AVI, or an animated GIF, WebP or PNG"
        raise ImageError(f"{name}: expected a video ({kinds}), got something else")
    return clip


def clip_of(source: Any, limits: ImageLimits, name: str) -> Any:
    """A Clip, or of what is no video, what to give to `load_image`."""
    readable = isinstance(source, str | os.PathLike | bytes | bytearray | memoryview)
    if isinstance(source, Clip) or not (readable or hasattr(source, "read")):
        return source
    local = isinstance(source, os.PathLike) or (isinstance(source, str) and not _URL.match(source))
    if local and limits.allow_paths:
        try:
            path = Path(source).expanduser()  # type: ignore[arg-type]
            head = _head(path) if path.is_file() else b""
        except (OSError, ValueError, RuntimeError):
            return source  # `load_image` says what is wrong with it
        if container := container_of(head):
            return clip_of_file(path, container, limits, name)
        if not _ANIMATED.match(head):
            return source
    data = NamedBytes(read_bytes(source, limits, name))
    data.name = name
    if container := container_of(data[:HEAD]):
        return clip_of_file(data, container, limits, name)
    moving = _ANIMATED.match(data) and moves(data, limits, name)
    return (clip_of_animation(data, limits, name) if moving else None) or data


def moves(data: bytes, limits: ImageLimits, name: str) -> bool:
    """True for an animated GIF, WebP or PNG, by the header and what follows the first frame."""
    image, _ = open_file(io.BytesIO(data), limits, name)
    with refusing_damage(f"{name}: the animation"):
        return bool(getattr(image, "is_animated", False))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)


def container_of(head: bytes) -> str | None:
    """FFmpeg's name of a video's format, by a file's first bytes."""
    if _NO_VIDEO.match(head):
        return None
    return next((form for start, form in _CONTAINERS if re.match(start, head, re.DOTALL)), None)
