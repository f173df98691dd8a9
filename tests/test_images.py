"""The image loader: every kind of source, every mode, every refusal."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tracemalloc
import zlib
from urllib.error import HTTPError

import numpy as np
import pytest
from PIL import Image

from data.errors import BadRow, DatasetError, ImageError, ProcessorError, PromptError
from data.image_sizes import image_size, measure
from data.images import ImageLimits, describe, load_image
from messages import one_line
from tests.house import data_url
from tests.processors import draw_image


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def same(image: Image.Image, expected: Image.Image | np.ndarray) -> bool:
    return image.mode == "RGB" and np.array_equal(np.asarray(image), np.asarray(expected))


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, pixels: bytes = b"", before: bytes = b"", after: bytes = b"") -> bytes:
    """An RGB PNG of a claimed size; `pixels` with a filter byte for each row, and chunks around them."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(pixels, 1))
    return b"\x89PNG\r\n\x1a\n" + header + before + data + after + chunk(b"IEND", b"")


def hiding(depth: int, hidden: tuple[int, ...], other: tuple[int, ...]) -> bytes:
    """A grey or RGB PNG of so many bits: a pixel of the colour that it hides (tRNS), and one of another."""
    bits = "".join(format(value, f"0{depth}b") for value in (*hidden, *other))
    pixels = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    header = struct.pack(">IIBBBBB", 2, 1, depth, 0 if len(hidden) == 1 else 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"tRNS", struct.pack(f">{len(hidden)}H", *hidden))
    data = b"".join(
        chunk(*one) for one in (*chunks, (b"IDAT", zlib.compress(b"\0" + pixels)), (b"IEND", b""))
    )
    return b"\x89PNG\r\n\x1a\n" + data


@pytest.mark.parametrize(("depth", "colours"), [(1, 1), (8, 1), (16, 1), (8, 3)])
def test_what_a_png_hides_is_white(depth, colours):
    top = 2**depth - 1
    for value in {0, 1, top // 2, top - 1, top}:
        hidden, other = ((value,) * colours, ((value + top // 2 + 1) % (top + 1),) * colours)
        data = hiding(depth, hidden, other)
        shown = [load_image(data).getpixel((x, 0)) for x in (0, 1)]
        expected = round(other[0] * 255 / top)
        assert shown[0] == (255, 255, 255) and all(abs(one - expected) <= 1 for one in shown[1])
        with Image.open(io.BytesIO(data)) as image:  # opened by somebody else, and looked at before
            image_size(image)
            assert [load_image(image).getpixel((x, 0)) for x in (0, 1)] == shown


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa"])
def test_what_an_alpha_channel_hides_is_white(mode):
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (60, 60, 60, 255))
    image = image.convert("LA").convert(mode) if mode == "La" else image.convert(mode)
    assert load_image(image).getpixel((0, 0)) == (255, 255, 255)
    assert load_image(image).getpixel((1, 0)) == (60, 60, 60)


# ------------------------------------------------------------------------------------------------ sources
def test_every_source_gives_the_same_pixels(tmp_path, monkeypatch):
    image = draw_image(7, 5)
    data = encoded(image)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    monkeypatch.setenv("HOME", str(tmp_path))
    sources = [
        path, str(path), "~/a.png", data, bytearray(data), io.BytesIO(data), image, data_url(data),
    ]  # fmt: skip
    for source in sources:
        assert same(load_image(source), image), source
    load_image(image).putpixel((0, 0), (1, 2, 3))  # nothing is shared with the source
    assert same(load_image(image), draw_image(7, 5))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation(orientation: int, format: str):
    upright = Image.new("RGB", (48, 16), "white")
    upright.paste((200, 0, 0), (0, 0, 16, 16))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's Transpose that leads to the stored image
    stored = upright.transpose(undo[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}.get(format, {})
    loaded = load_image(encoded(stored, format, exif=exif, **lossless))
    assert loaded.size == (48, 16)
    assert np.abs(np.asarray(loaded, np.int16) - np.asarray(upright)).max() < 12
    assert same(load_image(loaded), loaded)  # a second load does not turn it again


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_a_size_is_measured_from_a_header(tmp_path, format, orientation, kind):
    """The size of the loaded image, of files of 30 MB without reading them."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    icc = {"icc_profile": os.urandom(30_000)} if format in ("JPEG", "PNG") else {}
    data = encoded(draw_image(48, 16), format, exif=exif, **icc)
    behind = png(48, 16, bytes(16 * (48 * 3 + 1)), after=chunk(b"eXIf", exif.tobytes()[6:]))
    for content in (data, behind) if format == "PNG" else (data,):
        source = content
        if kind == "file":
            source = tmp_path / "image"
            source.write_bytes(content)
        size, kept = measure(source)
        assert load_image(kept).size == load_image(content).size == size == image_size(content)
        assert kept is source
    if kind == "file":  # as a string, which may be a URL, it is read once
        size, kept = measure(str(source))
        source.rename(tmp_path / "moved")
        assert describe(kept) == repr(str(source)) and load_image(kept).size == size
        source = tmp_path / "moved"
    if kind == "file" and format in ("JPEG", "PNG"):
        with source.open("r+b") as file:
            file.truncate(30_000_000)
        tracemalloc.start()
        measure(source)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2_000_000


def test_a_header_that_cannot_be_followed_is_not_guessed_at(tmp_path):
    """Damaged files and those that are too large are refused as when they are loaded."""
    (tmp_path / "large.jpg").write_bytes(encoded(draw_image(48, 16), "JPEG"))
    with pytest.raises(ImageError, match="at most 10 bytes"):
        measure(tmp_path / "large.jpg", ImageLimits(max_bytes=10))
    for source in (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n" + bytes(99), b"", tmp_path, tmp_path / "none.png"):
        with pytest.raises(ImageError):
            measure(source)
    junk = encoded(draw_image(48, 16), "JPEG").replace(b"\xff\xdb", b"\xff\x02\xff\xdb", 1)
    with pytest.raises(ImageError):  # a marker that Pillow does not know
        measure(junk)
    with pytest.raises(ImageError, match="pixels"):
        measure(png(100_000, 100_000))


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "YCbCr", "RGBX", "I;16", "I", "F"]
)
def test_modes_of_one_grey_level(mode: str):
    """White stays white and black black, in every mode."""
    white = {"1": 1, "CMYK": (0, 0, 0, 0), "YCbCr": (255, 128, 128), "RGBX": (255,) * 4, "I;16": 65535,
             "I": 65535, "F": 1.0, "LA": (255, 255), "RGBA": (255,) * 4, "RGB": (255,) * 3}  # fmt: skip
    black = {"CMYK": (0, 0, 0, 255), "YCbCr": (0, 128, 128), "LA": (0, 255), "RGBA": (0, 0, 0, 255),
             "RGB": (0, 0, 0), "RGBX": (0,) * 4, "F": 0.0}  # fmt: skip
    image = Image.new(mode, (3, 2), black.get(mode, 0))
    if mode == "P":
        image.putpalette([0, 0, 0, 255, 255, 255])
    image.putpixel((1, 0), white.get(mode, 1 if mode == "P" else 255))
    pixels = np.asarray(load_image(image))
    assert pixels.shape == (2, 3, 3)
    assert pixels[0, 1].tolist() == [255] * 3
    assert pixels[1, 2].tolist() == [0] * 3


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled_not_clipped(format: str):
    values = np.array([[0, 257, 25700, 32768, 65535]], np.uint16)
    loaded = np.asarray(load_image(encoded(Image.fromarray(values), format)))
    assert loaded[0, :, 0].tolist() == [0, 1, 100, 128, 255]


def test_floats():
    values = np.array([[0.0, 0.5, 1.0]], np.float32)
    assert np.asarray(load_image(encoded(Image.fromarray(values), "TIFF")))[0, :, 0].tolist() == [0, 128, 255]
    assert np.asarray(load_image(Image.fromarray(values * 255)))[0, :, 0].tolist() == [0, 128, 255]
    for bad in (np.nan, np.inf, -0.5, 300.0):
        values[0, 1] = bad
        with pytest.raises(ImageError, match="expected floats from 0 to 1"):
            load_image(encoded(Image.fromarray(values), "TIFF"))


def test_transparency_is_flattened_on_white():
    rgba = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    rgba.putpixel((1, 0), (0, 0, 0, 128))
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert np.asarray(load_image(encoded(rgba)))[0].tolist() == [[255] * 3, [127] * 3]
    assert np.asarray(load_image(encoded(palette, transparency=0)))[0].tolist() == [[255] * 3, [0, 0, 255]]
    rgb = Image.new("RGB", (2, 1), (9, 9, 9))
    rgb.putpixel((1, 0), (1, 2, 3))
    assert np.asarray(load_image(encoded(rgb, transparency=(9, 9, 9))))[0].tolist() == [[255] * 3, [1, 2, 3]]
    assert np.asarray(load_image(Image.new("LA", (1, 1), (0, 0))))[0].tolist() == [[255] * 3]


# ----------------------------------------------------------------------------------------------- refusals
def refused(source, match: str, **limits) -> None:
    with pytest.raises(ImageError, match=match) as error:
        load_image(source, ImageLimits(**limits))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (None, "no such file"),
        (b"hello, I am text", "hello, I am text"),
        (encoded(draw_image(64, 64), "JPEG")[:3000], "cut off"),
        (encoded(draw_image(64, 64), "JPEG")[:20], "expected an image"),
        (b"", "0 bytes"),
        (png(60_000, 60_000), "pixels"),
        (png(10_000, 10_000), "10000 x 10000"),
        (png(10_000, 1), "10,000:1"),
        (b"%PDF-1.7\n", "PDF"),
        (b"\0\0\0\x18ftypmp42", "a video"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_file_and_the_fault(data, fault, tmp_path, recwarn):
    if data is not None:
        (tmp_path / "photo.jpg").write_bytes(data)
    refused(tmp_path / "photo.jpg", rf"photo\.jpg.*{fault}")
    assert not recwarn.list  # Pillow's own, a second message beside ours


def test_sources_that_are_no_image(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")  # which must not hang
    for source in (tmp_path, tmp_path / "pipe.png", "/dev/zero", tmp_path / ("x" * 5000), "a\x00b.png",
                   "~nobody\x00/a.png", "file:///etc/passwd", "ftp://x.org/a.png", io.StringIO("text"), 12,
                   "data:image/png;base64,@@@", "data:image/png", png(10, 10)):  # fmt: skip
        refused(source, "expected|cannot be read|no such file|damaged")


def test_limits_are_adjustable_and_checked_before_decoding(tmp_path, monkeypatch):
    data = encoded(draw_image(40, 10))
    (tmp_path / "a.png").write_bytes(data)
    url = data_url(data)
    for source in (data, tmp_path / "a.png", io.BytesIO(data), url):
        refused(source, f"at most {len(data) - 1:,} bytes", max_bytes=len(data) - 1)
    assert load_image(data, ImageLimits(max_bytes=len(data), max_pixels=400)).size == (40, 10)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded before it was checked"))
    refused(data, "at most 399 pixels", max_pixels=399)
    refused(tmp_path / "a.png", "disabled", allow_paths=False)
    refused("http://127.0.0.1:9/a.png", "disabled", allow_urls=False)


@pytest.mark.parametrize("error", [ImageError, PromptError, ProcessorError, DatasetError])
def test_every_refusal_is_one_line_of_printable_characters(error):
    for said in ("\x1b]0;owned\x07\x1b[2J\nmore", "\u202e" * 100_000, "a" * 100_000):
        sentence = str(error(said))
        assert sentence.isprintable() and len(sentence) <= 2001 and str(error(sentence)) == sentence
    bad = pickle.loads(pickle.dumps(BadRow("bad", "a\x1bb")))  # from a data worker
    assert (bad.reason, str(bad)) == ("bad", r"a\x1bb")


def test_the_systems_errors_on_one_line():
    """With both of two files, and never without a reason."""
    moved = OSError(18, "Invalid cross-device link", "/a", None, "/b")
    assert one_line(FileNotFoundError(2, "No such file", "a b")) == "a b: No such file"
    assert "/a" in one_line(moved) and "/b" in one_line(moved)
    assert one_line(HTTPError("http://x", 404, None, None, None)) == "HTTP Error 404: None"
    assert one_line(KeyError()) == "KeyError" and one_line("a\n  b\x1b", 4) == "a b…"


# ---------------------------------------------------------------------------------- found by fuzzing, once


@pytest.mark.parametrize("values", [[0, 257, 65_535], [0, 2**24, 2**31 - 1, -(2**31), -1]])
def test_large_grey_images_of_32_bits_are_never_copied_to_64(values):
    """At the limit on pixels the copies took over 2 GiB and 5 s."""
    image = Image.fromarray(np.tile(np.array(values, np.int32), (600, 100)))
    expected = [round(v / 257) for v in values] if max(values) < 2**16 else [v % 2**32 >> 24 for v in values]
    tracemalloc.start()
    try:
        loaded = np.asarray(load_image(image))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (loaded == np.tile(np.array(expected), (600, 100))[..., None]).all()
    assert peak < 3 * 600 * 100 * len(values) * 4
