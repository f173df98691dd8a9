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


def tiled(side: int, tile: int) -> bytes:
    """A grey TIFF cut out of one large deflated tile."""
    body = zlib.compress(bytes(tile * tile), 1)
    entries = [(256, side), (257, side), (258, 8), (259, 8), (262, 1), (277, 1), (322, tile), (323, tile),
               (324, 8), (325, len(body))]  # fmt: skip
    table = directory([(tag, 4, 1, value) for tag, value in entries])
    return b"II*\0" + struct.pack("<I", 8 + len(body)) + body + table


def directory(entries: list[tuple[int, int, int, int]], following: int = 0) -> bytes:
    """Little-endian (tag, type, count, value or place)."""
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<H", len(entries)) + table + struct.pack("<I", following)


def box(kind: bytes, body: bytes, version: int | None = None) -> bytes:
    body = body if version is None else struct.pack(">I", version << 24) + body
    return struct.pack(">I", 8 + len(body)) + kind + body


def heic(items: int = 0, size: int = 0) -> bytes:
    """48 x 32 pixels, blue beside red, described by items that are all the same bytes."""
    about = range(2, 2 + items)
    entries = struct.pack(">HH", 1, 0) + b"hvc1\0", *(struct.pack(">HH", i, 0) + b"Exif\0" for i in about)
    known = struct.pack(">H", 1 + items) + b"".join(box(b"infe", entry, 2) for entry in entries)
    references = b"".join(box(b"cdsc", struct.pack(">HHH", i, 1, 1)) for i in about)

    def meta(place: int) -> bytes:
        places = struct.pack(">HHHII", 1, 0, 1, place, len(HEVC))
        places += b"".join(struct.pack(">HHHII", i, 0, 1, place + len(HEVC), size) for i in about)
        located = box(b"iloc", b"\x44\0" + struct.pack(">H", 1 + items) + places, 0)
        handler = box(b"hdlr", bytes(4) + b"pict" + bytes(13), 0)
        parts = handler, box(b"pitm", b"\0\1", 0), located, box(b"iinf", known, 0)
        return box(b"meta", b"".join(parts) + (box(b"iref", references, 0) if items else b"") + PROPERTIES, 0)

    start = box(b"ftyp", b"heic" + bytes(4) + b"mif1heic")
    return start + meta(len(start) + len(meta(0)) + 8) + box(b"mdat", HEVC + bytes(size))


def strips(count: int) -> bytes:
    """A TIFF of 4 x 4 pixels in so many strips."""
    entries = [(256, 4, 1, 4), (257, 4, 1, 4), (258, 4, 1, 8), (259, 4, 1, 1), (262, 4, 1, 1),
               (273, 4, count, 200), (278, 4, 1, 1), (279, 4, count, 200)]  # fmt: skip
    head = b"II*\0" + struct.pack("<I", 8) + directory(entries)
    return head.ljust(200, b"\0") + struct.pack("<I", 190) * count


# Small images for all that they carry.
LOADED = ("pixels that go on", "a PBM of comments", "a HEIC of items")
CASES: dict[str, Callable[[], bytes]] = {
    "zTXt bomb": lambda: png(4, 4, ROWS, chunk(b"zTXt", b"k\0\0" + bomb())),
    "iCCP bomb": lambda: png(4, 4, ROWS, chunk(b"iCCP", b"k\0\0" + bomb())),
    "pixels that go on": lambda: png(4, 4, pixels=b"\0" * (100 * 2**20)),
    "a million chunks behind the pixels": lambda: png(4, 4, ROWS, after=chunk(b"tEXt", b"") * 1_000_000),
    "a million GIF blocks": lambda: encoded(draw_image(4, 4), "GIF")[:13] + b"!\xfe\1x\0" * 1_000_000,
    "a PPM of comment": lambda: b"P6\n#" + b"x" * 20_000_000 + b"\n4 4\n255\n" + bytes(48),
    "a PPM of text": lambda: b"P3 8000 8000 255\n" + b"1 " * 20_000_000,
    "a TIFF of strips": lambda: strips(10_000_000),
    "a JPEG of scans": lambda: scanned(
        encoded(Image.new("L", (4000, 4000)), "JPEG", progressive=True), 3_000
    ),
    "a JPEG of fill bytes": lambda: encoded(draw_image(4, 4), "JPEG")[:-2] + b"\xff" * 10**6 + b"\0",
    "a GIF of one comment": lambda: gif(b"!\xfe" + (b"\xff" + bytes(255)) * 80_000 + b"\0"),
    "a PBM of comments": lambda: b"P1 9 9 " + b"#\n" * 290_000 + b"1" * 81,
    "a HEIC of items": lambda: heic(items=900, size=5_000_000),
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
    whole = load_image(heic())
    assert whole.size == (48, 32) and whole.getpixel((2, 2))[2] > 200 < whole.getpixel((45, 30))[0]
    with pytest.raises(ImageError, match="heic"):  # its first bytes, which say so
        load_image(heic()[:300])
    monkeypatch.setitem(sys.modules, "pi_heif", None)
    with pytest.raises(ImageError, match=r"HEIC.*pi-heif"):
        load_image(heic())


def test_rare_encodings_of_usual_size_load():
    """A comment in an image of text means nothing."""
    plain, told = b"P3 2 1 255\n255 0 0 0 0 255\n", b"P3 # RGB\n2 #\r1\n255\n255 0 # red\n0 0 0 2#\n55"
    assert list(load_image(told).get_flattened_data()) == list(load_image(plain).get_flattened_data())
    assert load_image(b"P6 2 1 1023\n" + bytes(12)).size == (2, 1)
    assert load_image(encoded(draw_image(200, 100), "JPEG", progressive=True)).size == (200, 100)
    assert load_image(strips(4)).size == (4, 4)
    # A thumbnail's markers in a segment, and a film behind the image, are no scans.
    whole = encoded(draw_image(20, 10), "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", 602) + b"\xff\xda" * 300
    assert load_image(whole[:2] + segment + whole[2:] + b"\xff\xda" * 10_000).size == (20, 10)


# --------------------------------------------------------------------------------------- frames and kinds
@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_of_many_frames_the_first_counts(format):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue", "green")]
    lossless = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:] * 20, **lossless)
    pixel = np.asarray(load_image(data))[0, 0].astype(int)
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


def exif_of_shared_tags(format: str) -> bytes:
    exif = tags_that_share()
    if format == "JPEG":
        return joined(exif)
    if format != "AVIF":
        return encoded(draw_image(8, 6), format, exif=exif)
    # Written with another EXIF in its place, as Pillow would read it.
    light = (b"II*\0\x08\0\0\0" + directory([(1000, 7, LONG, 8)])).ljust(len(exif) - 6, b"\1")
    data = encoded(draw_image(8, 6), format, exif=light)
    assert light in data
    return data.replace(light, exif[6:])


@pytest.mark.parametrize(
    "kind", ["TIFF directory", "TIFF EXIF", "TIFF next", "EXIF JPEG", "EXIF PNG", "EXIF WEBP", "EXIF AVIF"]
)
def test_tags_that_share_bytes(kind):
    """All of it would be 600 MB, or twice that."""
    container, _, where = kind.partition(" ")
    data = heavy_tiff(where) if container == "TIFF" else exif_of_shared_tags(where)
    took, made = peak(load_image, data)
    upright = {"TIFF": (4, 4), "EXIF": (8, 6) if where == "AVIF" else (6, 8)}[container]
    assert made.size == image_size(data) == upright
    assert took < (60 if container == "TIFF" else 20) * LONG


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
    limits = VisitorLimits(max_pixels=1_000_000)
    with pytest.raises(ImageError, match="1200 x 1200"):
        function(tiled(16, 1200), limits=limits)
    assert load_image(tiled(16, 640), limits=limits).size == (16, 16)
    with pytest.raises(ImageError, match="JPEG 2000"):
        small = encoded(Image.new("L", (8, 8)), "JPEG2000")
        function(small.replace(struct.pack(">II", 8, 8), struct.pack(">II", 4000, 4100), 1))
    few = encoded(Image.new("L", (4000, 4000)), "JPEG", progressive=True)
    with pytest.raises(ImageError, match="at most 75 scans"):
        function(scanned(few, 90))
