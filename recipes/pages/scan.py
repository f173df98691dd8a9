"""Images of pages, as a program writes them and as a scanner does."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

Boxes = list[list[float]]
COLOURS = 16  # of a page that was not scanned: letters have few


def save_plain(png: bytes, path: Path) -> tuple[int, int]:
    """Write a screenshot with few colours; its width and height."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return image.size


def save_scanned(
    png: bytes, path: Path, boxes: Sequence[Sequence[float]], rng: random.Random
) -> tuple[tuple[int, int], Boxes]:
    """Write a screenshot as a scan of it: turned by up to 1.2 degrees, blurred, on toned paper with uneven
    light and noise, and as a JPEG. Gives its size, and the boxes turned with it."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    width, height = image.size
    angle = rng.uniform(-1.2, 1.2)
    image = image.rotate(angle, Image.Resampling.BICUBIC, fillcolor=(255, 255, 255))
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.8)))
    paper = np.array(
        rng.choice([(252, 250, 243), (245, 245, 243), (248, 241, 225), (236, 236, 238)]), np.float32
    )
    ink = np.float32(rng.uniform(20, 60))
    noise = np.random.default_rng(rng.randrange(2**32))
    share = np.asarray(image, np.float32) / 255
    scanned = ink + share * (paper - ink)
    down, across = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j].astype(np.float32)
    light = (
        1
        - rng.uniform(0, 0.12) * (across if rng.random() < 0.5 else 1 - across)
        - rng.uniform(0, 0.06) * down
    )
    scanned = scanned * light[..., None] + noise.normal(0, rng.uniform(1, 5), (height, width, 1))
    grey = rng.random() < 0.5
    made = Image.fromarray(scanned.clip(0, 255).astype(np.uint8))
    (made.convert("L") if grey else made).save(path, quality=rng.randint(40, 75))
    return image.size, [_turned(box, angle, (width / 2, height / 2)) for box in boxes]


def _turned(box: Sequence[float], degrees: float, centre: tuple[float, float]) -> list[float]:
    """The upright box around a box that was turned counter-clockwise."""
    angle = math.radians(degrees)
    corners = [(x - centre[0], y - centre[1]) for x in (box[0], box[2]) for y in (box[1], box[3])]
    xs = [centre[0] + x * math.cos(angle) + y * math.sin(angle) for x, y in corners]
    ys = [centre[1] - x * math.sin(angle) + y * math.cos(angle) for x, y in corners]
    return [min(xs), min(ys), max(xs), max(ys)]
