"""What a file is, by its first bytes: HEIC, which needs a package of its own, and what is no image."""

from __future__ import annotations

_HEIC = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"))
_IMAGE = "save it as PNG or JPEG"
_PAGE = "save the page you mean as PNG or JPEG"
_FRAME = "save one frame of it as PNG or JPEG"
_UNPACK = "unpack it first"
_DOWNLOAD = "download the image itself"
_CHOOSE = "choose an image"
# (place, bytes there, what it is, what to do); the first that fits counts.
_KINDS = (
    (0, b"%PDF-", "a PDF document", _PAGE),
    (0, b"%!PS", "a PostScript document", _PAGE),
    (0, b"\xc5\xd0\xd3\xc6", "a PostScript document", _PAGE),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Office document", _PAGE),
    (0, b"{\\rtf", "an RTF document", _PAGE),
    (0, b"8BPS", "a Photoshop document", _IMAGE),
    (0, b"gimp xcf", "a GIMP document", _IMAGE),
    (0, b"\0\0\1\0", "a Windows icon", _IMAGE),
    (0, b"\0\0\2\0", "a Windows cursor", _IMAGE),
    (0, b"icns", "an icon of macOS", _IMAGE),
    (0, b"\xd7\xcd\xc6\x9a", "a Windows metafile", _IMAGE),
    (0, b"\xff\x0a", "a JPEG XL image", _IMAGE),
    (4, b"JXL ", "a JPEG XL image", _IMAGE),
    (0, b"qoif", "a QOI image", _IMAGE),
    (0, b"DDS ", "a DDS texture", _IMAGE),
    (0, b"v/1\x01", "an OpenEXR image", _IMAGE),
    (0, b"#?RADIANCE", "a Radiance image", _IMAGE),
    (0, b"/* XPM */", "an XPM image", _IMAGE),
    (0, b"#define ", "an XBM image or a C file", _IMAGE),
    (0, b"SIMPLE  =", "a FITS file", _IMAGE),
    (128, b"DICM", "a DICOM file", _IMAGE),
    (0, b"\x93NUMPY", "a NumPy array", _IMAGE),
    (0, b"FUJIFILMCCD-RAW", "a camera's raw file", _IMAGE),
    (0, b"IIU\0", "a camera's raw file", _IMAGE),
    (0, b"IIRO", "a camera's raw file", _IMAGE),
    (8, b"crx ", "a camera's raw file", _IMAGE),
    (0, b"\x1aE\xdf\xa3", "a WebM or Matroska video", _FRAME),
    (8, b"AVI ", "an AVI video", _FRAME),
    (0, b"FLV\1", "a Flash video", _FRAME),
    (0, b"\0\0\1\xba", "an MPEG video", _FRAME),
    (0, b"OggS", "an Ogg video or sound", _FRAME),
    (8, b"WAVE", "a sound", _CHOOSE),
    (0, b"ID3", "a sound", _CHOOSE),
    (0, b"fLaC", "a sound", _CHOOSE),
    (0, b"\x1f\x8b", "a gzip archive", _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (0, b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"version https://git-lfs", "a pointer of Git LFS", "fetch the image with `git lfs pull`"),
)
_OFFICE = (
    (b"word/document", "a Word document"),
    (b"ppt/presentation", "a PowerPoint document"),
    (b"xl/workbook", "an Excel document"),
)
_HEAD = 4096  # bytes that are looked at


def is_heic(data: bytes) -> bool:
    """Whether it is HEIC by what it says; AVIF says more."""
    if data[4:8] != b"ftyp" or data[8:12] not in _HEIC:
        return False
    return b"avi" not in data[8 : min(int.from_bytes(data[:4], "big"), _HEAD)]


def register_heic() -> bool:
    """Have Pillow read HEIC: whether the package is installed. Of a file the image alone is looked at."""
    try:
        import pi_heif
    except ImportError:
        return False
    pi_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False)
    return True


def kind(data: bytes) -> str:
    """What a file that Pillow does not know is and what to do, as the end of a sentence."""
    if is_heic(data):
        if register_heic():
            return f"a HEIC image that is damaged or of a rare kind; {_IMAGE}"
        return "a HEIC image: install the package pi-heif, or save it as JPEG"
    for place, start, what, advice in _KINDS:
        if data.startswith(start, place):
            return f"{what}; {advice}"
    head = data[:_HEAD].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if head.startswith(b"pk\3\4"):
        office = [what for part, what in _OFFICE if part in data]
        return f"{office[0]}; {_PAGE}" if office else f"a ZIP archive; {_UNPACK}"
    if data[4:8] == b"ftyp" and data[8:11] != b"avi":
        return f"a sound; {_CHOOSE}" if data[8:11] == b"M4A" else f"an MP4 or QuickTime video; {_FRAME}"
    if head.startswith((b"<!doctype html", b"<html")):
        return f"a web page (HTML); {_DOWNLOAD}"
    if head.startswith(b"<") and b"<svg" in head:
        return f"an SVG drawing; {_IMAGE}"
    return f"a file that starts with {data[:16]!r}; it is another kind of file or damaged"
