"""Images: seeds of every format and mode, with damaged bytes, chunks and tags; garbage; arrays.

What is taken must be RGB, without leftover EXIF, and of the size that `image_size` tells.
"""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, features

from data.errors import ImageError
from data.images import ImageLimits, image_size, load_image
from tests.soak.changes import mutate_bytes
from tests.soak.fuzz import Wrong

REFUSALS = (ImageError,)
LIMITS = ImageLimits(allow_urls=False)
SIGNATURE = b"\x89PNG\r\n\x1a\n"
TYPES = ("uint8", "uint16", "int16", "int64", "float16", "float32", "float64", "bool", "complex64", "U1")


def opened(folder: Path):
    return run


def run(value: Any) -> str:
    if isinstance(value, tuple):
        value = _array(*value)
    try:  # by itself: a row that is not loaded yet is measured
        told = image_size(value, LIMITS)
    except ImageError:
        load_image(value, LIMITS)
        raise Wrong("image_size refuses what load_image takes") from None
    image = load_image(value, LIMITS)
    if image.mode != "RGB" or image.info or told != image.size:
        raise Wrong(f"expected RGB of {told}, got {image.mode} of {image.size} with {sorted(image.info)}")
    return type(value).__name__


# ---------------------------------------------------------------------------------------------- the inputs
def make(rng: random.Random) -> Any:
    """Bytes mostly; now and then a data: URL, or a tuple that tells an array."""
    kind = rng.random()
    if kind < 0.06:
        shape = tuple(
            rng.choice((0, 1, 2, 3, 4, 5, 17, 40)) for _ in range(rng.choice((0, 1, 2, 2, 3, 3, 4)))
        )
        return rng.randrange(2**32), rng.choice(TYPES), shape, rng.random() < 0.4
    if kind < 0.09:
        return rng.randbytes(rng.choice((0, 1, 8, 60, 2000)))
    data = rng.choice(seeds())
    if data.startswith(SIGNATURE) and rng.random() < 0.6:
        data = mutate_png(rng, data)
    elif rng.random() < 0.97:
        data = mutate_bytes(rng, data, seeds())
    if kind < 0.13:
        encoded = base64.b64encode(data).decode()
        return rng.choice(("data:image/png;base64,", "data:;base64,", "data:", "DATA:,")) + encoded
    return data


def _array(seed: int, dtype: str, shape: tuple[int, ...], tensor: bool) -> np.ndarray | torch.Tensor:
    generator = np.random.default_rng(seed)
    values = generator.random(shape) * generator.choice((1, 1, 255, 300, -1))
    if seed % 7 == 0 and values.size:
        values.flat[0] = generator.choice((np.nan, np.inf, -1e30))
    with np.errstate(all="ignore"):
        array = np.asarray(values).astype(dtype)
    return torch.from_numpy(array.copy()) if tensor and dtype != "U1" else array


def mutate_png(rng: random.Random, data: bytes) -> bytes:
    """Chunks changed, doubled, dropped, new and reordered, with checksums that are right again."""
    chunks, at = [], len(SIGNATURE)
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    for _ in range(rng.choice((1, 1, 2, 4))):
        number, kind = rng.randrange(len(chunks)), rng.randrange(5)
        name, body = chunks[number]
        if kind == 0 and len(chunks) > 1:
            chunks.pop(number)
        elif kind == 1:
            chunks.insert(rng.randrange(len(chunks) + 1), (name, body))
        elif kind == 2:
            names = (b"tRNS", b"PLTE", b"eXIf", b"iCCP", b"tEXt", b"zTXt", b"iTXt", b"acTL", b"fcTL", b"fdAT")
            bodies = (exif(), b"k\0\0" + zlib.compress(bytes(3_000_000)), bytes(8), b"\0\0\0\5" * 3)
            chunks.insert(number, (rng.choice(names), mutate_bytes(rng, rng.choice(bodies))))
        else:
            chunks[number] = (name, mutate_bytes(rng, body))
    return SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def exif() -> bytes:
    block = Image.Exif()
    block[0x0112] = 6
    return block.tobytes()


@cache
def seeds() -> tuple[bytes, ...]:
    """Small images of each format and mode that Pillow writes here."""
    noise = np.random.default_rng(0).integers(0, 256, (13, 18, 4), dtype=np.uint8)
    rgba, grey = Image.fromarray(noise), noise[..., 0]
    images = [rgba.convert(mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")]
    images.append(Image.frombytes("LAB", (5, 4), bytes(60)))
    images += map(Image.fromarray, (grey.astype(np.uint16) * 200, grey.astype(np.int32) * 70_000))
    images += map(Image.fromarray, ((grey / 255).astype(np.float32), np.full((3, 4), np.nan, np.float32)))
    turned, frames = {"exif": exif()}, {"save_all": True, "append_images": images[1:3]}
    options: dict[str, list[dict]] = {
        "PNG": [{}, turned, {"icc_profile": bytes(200)}, {**frames, "duration": 20}],
        "JPEG": [{}, turned, {"progressive": True}, {"icc_profile": bytes(200)}],
        "WEBP": [{}, {"lossless": True}, turned, frames],
        "GIF": [{}, frames],
        # Not JPEG in TIFF: writing some modes so ends the process.
        "TIFF": [{"compression": kind} for kind in (None, "tiff_lzw", "tiff_deflate", "packbits")] + [frames],
        "MPO": [frames],
        **{format: [{}] for format in ("BMP", "DIB", "PPM")},
        "AVIF": [{}] * features.check("avif"),
        "JPEG2000": [{}] * features.check("jpg_2000"),
    }
    found = []
    for format, ways in options.items():
        for way in ways:
            for image in images:
                buffer = io.BytesIO()
                try:
                    image.save(buffer, format, **way)
                except Exception:  # this format has no such mode, which plugins tell in many ways
                    continue
                found.append(buffer.getvalue())
    return tuple(found)
