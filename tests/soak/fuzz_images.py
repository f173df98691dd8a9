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
from tests.soak.changes import NUMBERS, mutate_bytes
from tests.soak.fuzz import Wrong

REFUSALS = (ImageError,)
LIMITS = ImageLimits(allow_urls=False)
SIGNATURE = b"\x89PNG\r\n\x1a\n"
ONE_IN = 1500  # large images within the limits


def opened(folder: Path):
    def run(value: Any) -> str:
        if isinstance(value, tuple):
            value = _array(*value)
        try:  # by itself: a row that is not loaded yet is measured
            told = image_size(value, LIMITS)
        except ImageError:
            load_image(value, LIMITS)
            raise Wrong("image_size refuses what load_image takes") from None
        image = load_image(value, LIMITS)
        if image.mode != "RGB" or image.info:
            raise Wrong(f"expected RGB without info, got {image.mode} with {sorted(image.info)}")
        if told != image.size:
            raise Wrong(f"image_size tells {told}, load_image gives {image.size}")
        return type(value).__name__

    return run


# ---------------------------------------------------------------------------------------------- the inputs
def make(rng: random.Random) -> Any:
    """Bytes mostly; now and then a data: URL, or a tuple that tells an array."""
    if rng.randrange(ONE_IN) == 0:
        return large(rng)
    kind = rng.random()
    if kind < 0.06:
        return (
            rng.randrange(2**32),
            rng.choice(("uint8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool",
                        "complex64", "U1")),
            tuple(rng.choice((0, 1, 2, 3, 4, 5, 17, 40)) for _ in range(rng.choice((0, 1, 2, 2, 3, 3, 4)))),
            rng.random() < 0.4,
        )  # fmt: skip
    if kind < 0.09:
        return rng.randbytes(rng.choice((0, 1, 8, 60, 2000)))
    names = seeds()
    data = rng.choice(list(names.values()))
    if data.startswith(SIGNATURE) and rng.random() < 0.6:
        data = mutate_png(rng, data)
    elif rng.random() < 0.97:
        data = mutate_bytes(rng, data, tuple(names.values()))
    if kind < 0.13:
        encoded = base64.b64encode(data).decode()
        return rng.choice(("data:image/png;base64,", "data:;base64,", "data:", "DATA:,")) + encoded
    return data


def mutate_png(rng: random.Random, data: bytes) -> bytes:
    """Chunks changed, doubled, dropped and reordered, with checksums that are right again."""
    chunks, at = [], len(SIGNATURE)
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not chunks:
            break
        number = rng.randrange(len(chunks))
        name, body = chunks[number]
        kind = rng.randrange(6)
        if kind == 0:
            chunks.pop(number)
        elif kind == 1:
            chunks.insert(rng.randrange(len(chunks) + 1), (name, body))
        elif kind == 2:
            names = (
                b"tRNS",
                b"PLTE",
                b"eXIf",
                b"iCCP",
                b"tEXt",
                b"zTXt",
                b"iTXt",
                b"acTL",
                b"fcTL",
                b"fdAT",
                b"gAMA",
            )
            chunks.insert(number, (rng.choice(names), mutate_bytes(rng, rng.choice(_bodies()))))
        elif name == b"IHDR" and len(body) == 13 and kind < 5:
            width, height, *rest = struct.unpack(">IIBBBBB", body)
            fields = [width, height, *rest]
            which = rng.randrange(len(fields))
            choice = rng.choice((*NUMBERS, width * 2, 20_000))
            fields[which] = choice if which < 2 else choice % 256
            chunks[number] = (name, struct.pack(">IIBBBBB", *fields))
        else:
            chunks[number] = (name, mutate_bytes(rng, body))
    out = SIGNATURE
    for name, body in chunks:
        out += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return out


@cache
def _bodies() -> tuple[bytes, ...]:
    exif = Image.Exif()
    exif[0x0112] = 6
    text = b"Comment\x00\x00" + zlib.compress(b"a" * 3_000_000)
    return (
        exif.tobytes(),
        text,
        b"icc\x00\x00" + zlib.compress(b"\x00" * 200),
        b"\x00" * 8,
        b"\x00\x00\x00\x05" * 3,
    )


@cache
def seeds() -> dict[str, bytes]:
    """One small image of each format and mode that Pillow writes here."""
    noise = np.random.default_rng(0).integers(0, 256, (13, 18, 4), dtype=np.uint8)
    rgba = Image.fromarray(noise)
    images = {mode: rgba.convert(mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")}
    images["LAB"] = Image.frombytes("LAB", (5, 4), bytes(60))
    images["I;16"] = Image.fromarray(noise[..., 0].astype(np.uint16) * 200)
    images["I"] = Image.fromarray(noise[..., 0].astype(np.int32) * 70_000)
    images["F"] = Image.fromarray((noise[..., 0] / 255).astype(np.float32))
    images["F nan"] = Image.fromarray(np.full((3, 4), np.nan, np.float32))
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = {"save_all": True, "append_images": [images["L"], images["RGB"]]}
    options: dict[str, list[dict]] = {
        "PNG": [{}, {"exif": exif.tobytes()}, {"icc_profile": bytes(200)}, {**frames, "duration": 20}],
        "JPEG": [{}, {"exif": exif.tobytes()}, {"progressive": True}, {"icc_profile": bytes(200)}],
        "WEBP": [{}, {"lossless": True}, {"exif": exif.tobytes()}, frames],
        "GIF": [{}, frames],
        "BMP": [{}],
        "DIB": [{}],
        # Not JPEG in TIFF: writing some modes so ends the process.
        "TIFF": [{"compression": kind} for kind in (None, "tiff_lzw", "tiff_deflate", "packbits")]
        + [frames, {"exif": exif}],
        "PPM": [{}],
        "MPO": [frames],
    }
    options |= {"AVIF": [{}]} if features.check("avif") else {}
    options |= {"JPEG2000": [{}]} if features.check("jpg_2000") else {}
    found: dict[str, bytes] = {}
    for kind, ways in options.items():
        for number, way in enumerate(ways):
            for mode, image in images.items():
                buffer = io.BytesIO()
                try:
                    image.save(buffer, kind, **way)
                except Exception:  # this format has no such mode, which plugins tell in many ways
                    continue
                found[f"{kind}-{number}-{mode}"] = buffer.getvalue()
    return found


def large(rng: random.Random) -> bytes:
    """An image of some kilobytes that fills the limit on pixels, or another on what is decoded."""
    side = 8900 + rng.randrange(40)
    mode, kind, options = rng.choice(
        (
            ("L", "PNG", {}), ("RGBA", "PNG", {}), ("P", "GIF", {}), ("I;16", "PNG", {}), ("1", "TIFF", {}),
            ("I", "TIFF", {"compression": "tiff_deflate"}), ("F", "TIFF", {"compression": "tiff_deflate"}),
            ("CMYK", "TIFF", {"compression": "tiff_deflate"}), ("LA", "PNG", {}), ("RGBA", "JPEG2000", {}),
            ("RGB", "JPEG", {"progressive": True}), ("L", "tiles", {}),
        )
    )  # fmt: skip
    if kind == "tiles":
        data = tiled(16, side)
    else:
        side = 3990 if kind == "JPEG2000" else side
        buffer = io.BytesIO()
        Image.new(mode, (side, side)).save(buffer, kind, **options)
        data = buffer.getvalue()
    if kind == "JPEG":
        data = scanned(data, rng.choice((3, 5, 90)))
    return mutate_bytes(rng, data) if rng.random() < 0.3 else data


def scanned(data: bytes, more: int) -> bytes:
    """A progressive JPEG whose last scan comes so many times more."""
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * more + data[-2:]


def tiled(side: int, tile: int) -> bytes:
    """A grey TIFF cut out of one large deflated tile."""
    body = zlib.compress(bytes(tile * tile), 1)
    entries = [(256, side), (257, side), (258, 8), (259, 8), (262, 1), (277, 1), (322, tile), (323, tile),
               (324, 8), (325, len(body))]  # fmt: skip
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return (
        b"II*\0"
        + struct.pack("<I", 8 + len(body))
        + body
        + struct.pack("<H", len(entries))
        + table
        + bytes(4)
    )


def _array(seed: int, dtype: str, shape: tuple[int, ...], tensor: bool) -> np.ndarray | torch.Tensor:
    generator = np.random.default_rng(seed)
    values = generator.random(shape) * generator.choice((1, 1, 255, 300, -1))
    if seed % 7 == 0 and values.size:
        values.flat[0] = generator.choice((np.nan, np.inf, -1e30))
    with np.errstate(all="ignore"):
        array = np.asarray(values).astype(dtype)
    if tensor and dtype != "U1":
        made = torch.from_numpy(array.copy())
        return made.to(torch.bfloat16) if dtype == "float16" else made
    return array
