"""Tags of images: EXIF and TIFF directories that are read at a bounded price, and nothing else of them."""

from __future__ import annotations

import io
import struct
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from data.errors import BadRow, ImageError, ProcessorError
from data.images import ImageLimits, image_size, load_image
from data.processor import Processor
from data.samples import SampleEncoder
from data.smolvlm import new_idefics
from tests.processors import draw_image, embedded
from tests.robustness.fuzz_images import scanned, tiled

MANY, LONG = 3_000, 200_000  # tags, and bytes that each of them points at


def encoded(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def directory(entries: list[tuple[int, int, int, int]], following: int = 0) -> bytes:
    """Little-endian (tag, type, count, value or place)."""
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<H", len(entries)) + table + struct.pack("<I", following)


def tags_that_share(orientation: int = 6) -> bytes:
    """An EXIF block of which Pillow would copy 600 MB."""
    entries = [(0x0112, 3, 1, orientation), *((1000 + n, 7, LONG, 8) for n in range(MANY))]
    return (b"Exif\0\0II*\0\x08\0\0\0" + directory(entries)).ljust(LONG + 20, b"\0")


def heavy_tiff(where: str) -> bytes:
    """4 x 4 grey pixels; what takes memory stands in the directory, in its EXIF or in the next one."""
    plain = [(256, 3, 1, 4), (257, 3, 1, 4), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8),
             (277, 3, 1, 1), (278, 3, 1, 4), (279, 4, 1, 16)]  # fmt: skip
    heavy = [(1000 + n, 7, LONG, 8) for n in range(MANY)]
    at = 8 + LONG
    if where == "directory":
        return b"II*\0" + struct.pack("<I", at) + bytes(LONG) + directory(plain + heavy)
    second = directory(heavy)
    mine = [*plain, (34665, 4, 1, at)] if where == "EXIF" else plain
    first = directory(mine, at if where == "next" else 0)
    return b"II*\0" + struct.pack("<I", at + len(second)) + bytes(LONG) + second + first


def peak(function, *args) -> tuple[int, object]:
    tracemalloc.start()
    try:
        return (function(*args), tracemalloc.get_traced_memory()[1])[::-1]
    finally:
        tracemalloc.stop()


def joined(exif: bytes) -> bytes:
    """A JPEG (8 x 6, without JFIF) whose EXIF takes several segments."""
    plain = encoded(draw_image(8, 6), "JPEG")
    parts = [exif[6:][at : at + 65_000] for at in range(0, len(exif), 65_000)]
    segments = (b"\xff\xe1" + struct.pack(">H", 8 + len(part)) + b"Exif\0\0" + part for part in parts)
    return plain[:2] + b"".join(segments) + plain[20:]


def asked(image) -> list[dict]:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "two"}]}
    return [*embedded().conversation(image, "how many?"), answer]


@pytest.mark.parametrize("function", [image_size, load_image])
@pytest.mark.parametrize("where", ["directory", "EXIF", "next"])
def test_tiff_tags_that_share_bytes(function, where):
    took, made = peak(function, heavy_tiff(where))
    assert (made if function is image_size else made.size) == (4, 4)
    assert took < 20 * LONG


@pytest.mark.parametrize("function", [image_size, load_image])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "AVIF"])
def test_exif_tags_that_share_bytes(function, format):
    exif = tags_that_share()
    if format == "AVIF":  # written with another EXIF in its place, as Pillow would read it
        light = (b"II*\0\x08\0\0\0" + directory([(1000, 7, LONG, 8)])).ljust(len(exif) - 6, b"\1")
        data = encoded(draw_image(8, 6), format, exif=light)
        assert light in data
        data = data.replace(light, exif[6:])
    else:
        data = joined(exif) if format == "JPEG" else encoded(draw_image(8, 6), format, exif=exif)
    took, made = peak(function, data)
    size = made if function is image_size else made.size
    assert size == ((8, 6) if format == "AVIF" else (6, 8))
    assert took < 20 * LONG


def exif_of(kind: int, value: bytes) -> bytes:
    return b"Exif\0\0II*\0\x08\0\0\0\1\0" + struct.pack("<HHI4s", 0x0112, kind, 1, value) + bytes(4)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 6.0])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_an_orientation_that_is_a_float_is_none(format, value):
    data = encoded(draw_image(8, 6), format, exif=exif_of(11, struct.pack("<f", value)))
    assert load_image(data).size == image_size(data) == (8, 6)
    assert SampleEncoder(embedded(), 1000).encode(asked(data), ("toy", 0)).tiles == 1


def test_measuring_decodes_nothing():
    """Also not to look for EXIF behind the pixels, which are broken here."""
    data = encoded(draw_image(40, 30), "PNG")
    at = data.index(b"IDAT") + 10
    broken = data[:at] + b"\xff" * 20 + data[at + 20 :].replace(b"IEND", b"eXIf")
    assert image_size(broken) == (40, 30)
    with pytest.raises(ImageError, match="damaged or cut off"):
        load_image(broken)


# ------------------------------------------------------------------------------------- what costs time
@pytest.mark.parametrize("function", [image_size, load_image])
def test_pixels_that_cost_more_than_they_count(function):
    limits = ImageLimits(max_pixels=1_000_000)
    with pytest.raises(ImageError, match=r"1,440,000 pixels in tiles of 1200 x 1200, at most 1,000,000"):
        function(tiled(16, 1200), limits)
    assert load_image(tiled(16, 640), limits).size == (16, 16)
    with pytest.raises(ImageError, match=r"at most 16,000,000 pixels in JPEG 2000, got 4100 x 4000"):
        small = encoded(Image.new("L", (8, 8)), "JPEG2000")
        function(small.replace(struct.pack(">II", 8, 8), struct.pack(">II", 4000, 4100), 1))
    few = encoded(Image.new("L", (4000, 4000)), "JPEG", progressive=True)
    with pytest.raises(ImageError, match="at most 75 scans of 16,000,000 pixels, got 96"):
        function(scanned(few, 90))


# --------------------------------------------------------------------------------- a checkpoint's tiles
@pytest.mark.parametrize("longest", [32, 50, 64, 75, 100])
def test_tiles_are_counted_as_cut_whatever_the_longest_side(longest):
    p = embedded(split=True)
    images = new_idefics(p.tokenizer, image_size=32, image_seq_len=4, longest_edge=longest, split=True)
    for width, height in ((40, 24), (9, 31), (33, 32), (64, 5), (32, 32), (100, 51), (77, 300), (1000, 500)):
        tiles, rows, columns = images.tiles(draw_image(width, height))
        assert images.grid(width, height) == (len(tiles), rows, columns), (width, height)


def test_another_number_of_tiles_than_counted_is_refused(monkeypatch):
    p = embedded(split=True)
    monkeypatch.setattr(type(p.images), "grid", lambda *_: (2, 1, 1))
    with pytest.raises(ProcessorError, match=r"make \(tiles, rows, columns\) = .* expected \(2, 1, 1\)"):
        p.tile(draw_image(30, 30))


def test_training_counts_tiles_as_answers_do(monkeypatch):
    p = embedded(split=True)
    strict = Processor(p.images, p.tokenizer, p.chat.chat_template, limits=ImageLimits(max_tiles=16))
    talk = asked(draw_image(30, 30))
    with pytest.raises(BadRow, match="at most 16 tiles, got 17 of 30 x 30 pixels") as caught:
        SampleEncoder(strict, 100_000).encode(talk, ("toy", 0))
    assert caught.value.reason == "too many tiles"
    monkeypatch.setattr(type(p.images), "grid", lambda *_: 1 // 0)
    with pytest.raises(BadRow, match="image settings cannot be used"):
        SampleEncoder(p, 100_000).encode(talk, ("toy", 0))
