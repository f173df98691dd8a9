"""Clips for tests: of arrays, and files of them that PyAV and Pillow write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from data.video import Clip
from inference.apart import say
from web import videos


def noise(count: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """(count, H, W, 3) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def clip_of(frames: np.ndarray, rate: float = 10.0, name: str = "clip") -> Clip:
    """A Clip of (count, H, W, 3)."""
    size = (frames.shape[2], frames.shape[1])
    return Clip(name, len(frames), rate, size, lambda chosen: (Image.fromarray(frames[i]) for i in chosen))


def write_clip(path: Path, frames: np.ndarray, rate: int = 10, codec: str = "mpeg4") -> Path:
    """A video file of (count, H, W, 3), of even sides."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


def write_animation(path: Path, frames: np.ndarray, milliseconds: int | Sequence[int] = 100) -> Path:
    """An animated GIF, WebP or PNG of (count, H, W, 3)."""
    first, *others = map(Image.fromarray, frames)
    lossless = {"lossless": True} if path.suffix == ".webp" else {}
    first.save(path, save_all=True, append_images=others, duration=milliseconds, **lossless)
    return path


# ----------------------------------------------------------------------------- run by `inference.apart.Apart`


def say_threads() -> None:
    say(len(os.listdir("/proc/self/task")))


def decode_in_little_memory() -> None:
    videos.MEMORY = 2**24
    videos.serve()
