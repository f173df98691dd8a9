"""Images of visitors, made to do harm: refused or loaded in bounded time and memory, whatever format hides
them."""

from __future__ import annotations

import base64
import multiprocessing
import resource
import struct
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import image_sizes, images
from data.errors import ImageError
from tests.processors import draw_image
from tests.test_images import chunk, encoded, png
from web.images import VisitorLimits

# How a HEIC of 48 x 32 pixels is to be read, and its pixels.
PROPERTIES = base64.b64decode(
    "AAAA/WlwcnAAAADdaXBjbwAAAHZodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMAAAMA"
    "HroCQGEAAQAqQgEBA3AAAAMAkAAAAwAAAwAeoCCBBZbq5Ka5uAhoMCAAAAMDIAAAAwAhYgABAAZEAcFzwIkAAAATY29scm5j"
    "bHgAAQANAAaAAAAAFGlzcGUAAAAAAAAAQAAAAEAAAAAoY2xhcAAAADAAAAABAAAAIAAAAAH////wAAAAAv///+AAAAACAAAA"
    "EHBpeGkAAAAAAwgICAAAABhpcG1hAAAAAAAAAAEAAQWBAgMFhA=="
)
HEVC = base64.b64decode(
    "AAAASigBrwng48Calv/7k3979C5//F4MbvitsTJf8Btt/VekNg5VvpsGEOBrHgrOnSWuR1rx6VWXoUym0lnBg2r3VWSqIBbYdiHjqP3/"
)
load_image = partial(images.load_image, limits=VisitorLimits())
image_size = partial(image_sizes.image_size, limits=VisitorLimits())
MEMORY, SECONDS = 1024 * 2**20, 5  # beyond what the process has; of processor time
ROWS = bytes(4 * 13)  # black pixels of a PNG of 4 x 4


def bomb() -> bytes:
    return zlib.compress(b"\0" * (100 * 2**20), 1)


def gif(extension: bytes) -> bytes:
    """A GIF with an extension in front of its image."""
    whole = encoded(draw_image(4, 4).convert("1"), "GIF")
    place = whole.index(b",\0\0\0\0")
    return whole[:place] + extension + whole[place:]


def scanned(data: bytes, more: int) -> bytes:
    """A progressive JPEG whose last scan comes so many times more."""
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * more + data[-2:]


def directory(entries: list[tuple[int, int, int, int]], following: int = 0) -> bytes:
    """Little-endian (tag, type, count, value or place)."""
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<H", len(entries)) + table + struct.pack("<I", following)


def box(kind: bytes, body: bytes, version: int | None = None) -> bytes:
    body = body if version is None else struct.pack(">I", version << 24) + body
    return struct.pack(">I", 8 + len(body)) + kind + body


def heic() -> bytes:
    """48 x 32 pixels, blue beside red."""
    known = struct.pack(">H", 1) + box(b"infe", struct.pack(">HH", 1, 0) + b"hvc1\0", 2)

    def meta(place: int) -> bytes:
        places = b"\x44\0" + struct.pack(">HHHHII", 1, 1, 0, 1, place, len(HEVC))
        handler = box(b"hdlr", bytes(4) + b"pict" + bytes(13), 0)
        parts = handler, box(b"pitm", b"\0\1", 0), box(b"iloc", places, 0), box(b"iinf", known, 0)
        return box(b"meta", b"".join(parts) + PROPERTIES, 0)

    start = box(b"ftyp", b"heic" + bytes(4) + b"mif1heic")
    return start + meta(len(start) + len(meta(0)) + 8) + box(b"mdat", HEVC)


# Small images for all that they carry.
LOADED = ("pixels that go on",)
CASES: dict[str, Callable[[], bytes]] = {
    "zTXt bomb": lambda: png(4, 4, ROWS, chunk(b"zTXt", b"k\0\0" + bomb())),
    "iCCP bomb": lambda: png(4, 4, ROWS, chunk(b"iCCP", b"k\0\0" + bomb())),
    "pixels that go on": lambda: png(4, 4, pixels=b"\0" * (100 * 2**20)),
    "a million chunks behind the pixels": lambda: png(4, 4, ROWS, after=chunk(b"tEXt", b"") * 1_000_000),
    "a million GIF blocks": lambda: encoded(draw_image(4, 4), "GIF")[:13] + b"!\xfe\1x\0" * 1_000_000,
    "a JPEG of scans": lambda: scanned(
        encoded(Image.new("L", (4000, 4000)), "JPEG", progressive=True), 3_000
    ),
    "a JPEG of fill bytes": lambda: encoded(draw_image(4, 4), "JPEG")[:-2] + b"\xff" * 10**6 + b"\0",
    "a GIF of one comment": lambda: gif(b"!\xfe" + (b"\xff" + bytes(255)) * 80_000 + b"\0"),
}


def in_a_process(connection: Connection) -> None:
    """Load each with little memory, and say what came of it."""
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + MEMORY, own + MEMORY))
    for name, make in CASES.items():
        data, began = make(), time.process_time()
        try:
            kind, text = "loaded", str(load_image(data).size)
        except ImageError as error:
            kind, text = "refused", str(error)
        connection.send((name, kind, text, time.process_time() - began))


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list]:
    context, found = multiprocessing.get_context("fork"), {}  # which imports nothing again
    ours, theirs = context.Pipe()
    process = context.Process(target=in_a_process, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    with suppress(EOFError):
        while True:
            name, *rest = ours.recv()
            found[name] = rest
    process.join()
    assert found.keys() == CASES.keys(), (list(found)[-1:], process.exitcode)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_image_hangs_or_fills_memory(verdicts, name):
    """Memory is the process's limit; time is its processor's, five seconds being a hang."""
    kind, text, seconds = verdicts[name]
    assert kind == ("loaded" if name in LOADED else "refused"), text
    assert "\n" not in text and len(text) < 1000
    assert seconds < SECONDS


def test_heic_loads_and_without_its_package_the_sentence_says_what_to_install(monkeypatch):
    whole = images.load_image(heic())
    assert whole.size == (48, 32) and whole.getpixel((2, 2))[2] > 200 < whole.getpixel((45, 30))[0]
    with pytest.raises(ImageError, match="heic"):  # its first bytes, which say so
        images.load_image(heic()[:300])
    monkeypatch.setitem(sys.modules, "pi_heif", None)
    with pytest.raises(ImageError, match=r"HEIC.*pi-heif"):
        images.load_image(heic())


@pytest.mark.parametrize("format", ["TIFF", "AVIF", "JPEG2000", "BMP", "PPM"])
def test_rare_formats_are_opened_for_their_owner_and_not_for_visitors(format):
    data = encoded(draw_image(20, 10), format)
    assert images.load_image(data).size == (20, 10)
    with pytest.raises(ImageError, match="such as PNG, JPEG"):
        load_image(data)


def test_usual_photos_load():
    """A thumbnail's markers in a segment, and a film behind the image, are no scans."""
    assert load_image(encoded(draw_image(200, 100), "JPEG", progressive=True)).size == (200, 100)
    assert load_image(encoded(draw_image(200, 100), "MPO")).size == (200, 100)
    whole = encoded(draw_image(20, 10), "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", 602) + b"\xff\xda" * 300
    assert load_image(whole[:2] + segment + whole[2:] + b"\xff\xda" * 10_000).size == (20, 10)


# --------------------------------------------------------------------------------------- frames and kinds
@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_of_many_frames_the_first_counts(format):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    lossless = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:] * 20, **lossless)
    pixel = np.asarray(images.load_image(data))[0, 0].astype(int)
    assert np.abs(pixel - (255, 0, 0)).max() < 40


@pytest.mark.filterwarnings("ignore")  # of Pillow's, about the EXIF
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_orientations_that_are_none(format):
    """Wrong types, endless directories, and numbers there are no turns for."""
    entry = struct.pack("<HHII", 0x0112, 3, 1, 99)
    for exif in (
        b"Exif\0\0II*\0\x08\0\0\0\1\0" + entry + bytes(4),
        b"Exif\0\0II*\0\x08\0\0\0\1\0" + struct.pack("<HHII", 0x0112, 2, 2**31, 0) + bytes(4),
        b"Exif\0\0II*\0\x08\0\0\0\1\0" + entry + struct.pack("<I", 8),
        b"Exif\0\0MM\0*" + b"\xff" * 60,
        b"Exif\0\0garbage",
        *(exif_of(11, struct.pack("<f", value)) for value in (np.inf, -np.inf, np.nan, 6.0)),
    ):
        data = encoded(draw_image(8, 6), format, exif=exif)
        assert load_image(data).size == image_size(data) == (8, 6)


# ---------------------------------------------------------------------------- directories and orientations
MANY, LONG = 3_000, 200_000  # tags, and bytes that each of them points at


def tags_that_share(orientation: int = 6) -> bytes:
    """An EXIF block of which Pillow would copy 600 MB."""
    entries = [(0x0112, 3, 1, orientation), *((1000 + n, 7, LONG, 8) for n in range(MANY))]
    return (b"Exif\0\0II*\0\x08\0\0\0" + directory(entries)).ljust(LONG + 20, b"\0")


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


def exif_of_shared_tags(format: str) -> bytes:
    exif = tags_that_share()
    return joined(exif) if format == "JPEG" else encoded(draw_image(8, 6), format, exif=exif)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_tags_that_share_bytes(format):
    """All of it would be 600 MB, or twice that."""
    data = exif_of_shared_tags(format)
    took, made = peak(load_image, data)
    assert made.size == image_size(data) == (6, 8)
    assert took < 20 * LONG


def exif_of(kind: int, value: bytes) -> bytes:
    return b"Exif\0\0II*\0\x08\0\0\0\1\0" + struct.pack("<HHI4s", 0x0112, kind, 1, value) + bytes(4)


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
    few = encoded(Image.new("L", (4000, 4000)), "JPEG", progressive=True)
    with pytest.raises(ImageError, match="at most 75 scans"):
        function(scanned(few, 90))
