"""What a file that is no readable image is, by its first bytes, and what to do about it."""

from __future__ import annotations

_IMAGE = "save it as PNG or JPEG"
_PAGE = "save the page you mean as PNG or JPEG"
_FRAME = "save one frame of it as PNG or JPEG"
_UNPACK = "unpack it first"
_CHOOSE = "choose an image"
# (offset, bytes there, what it is, what to do); the first that fits counts.
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
    (0, b"icns", "a macOS icon", _IMAGE),
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
    (0, b"OggS", "an Ogg video or audio file", _FRAME),
    (8, b"WAVE", "an audio file", _CHOOSE),
    (0, b"ID3", "an audio file", _CHOOSE),
    (0, b"fLaC", "an audio file", _CHOOSE),
    (8, b"M4A", "an audio file", _CHOOSE),
    (0, b"\x1f\x8b", "a gzip archive", _UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (0, b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (257, b"ustar", "a tar archive", _UNPACK),
    (0, b"version https://git-lfs", "a Git LFS pointer", "fetch the image with `git lfs pull`"),
)
_OFFICE = (
    (b"word/document", "a Word document"),
    (b"ppt/presentation", "a PowerPoint document"),
    (b"xl/workbook", "an Excel document"),
)


def kind_of_file(data: bytes) -> str:
    """What the file is and what to do, as the end of a sentence."""
    for place, start, what, advice in _KINDS:
        if data.startswith(start, place):
            return f"{what}; {advice}"
    head = data[:4096].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if head.startswith(b"pk\3\4"):
        office = [what for part, what in _OFFICE if part in data]
        return f"{office[0]}; {_PAGE}" if office else f"a ZIP archive; {_UNPACK}"
    if data[4:8] == b"ftyp" and data[8:11] != b"avi":
        return f"an MP4 or QuickTime video; {_FRAME}"
    if head.startswith((b"<!doctype html", b"<html")):
        return "a web page (HTML); download the image itself"
    if head.startswith(b"<") and b"<svg" in head:
        return f"an SVG drawing; {_IMAGE}"
    return f"a file that starts with {data[:16]!r}; it is another kind of file or damaged"
