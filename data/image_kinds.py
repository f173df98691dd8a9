"""Files that people give in place of an image, and what is said of them."""

from __future__ import annotations

import mimetypes
import re

from data.errors import ImageError

# By their first bytes.
_KINDS = (
    (rb"%PDF-", "a PDF document"),
    (rb"PK\x03\x04", "a ZIP archive or an Office document"),
    (rb"8BPS", "a Photoshop document"),
    (rb"\xff\x0a|\x00\x00\x00\x0cJXL ", "a JPEG XL image"),
    (rb"version https://git-lfs", "a Git LFS pointer, to be fetched with `git lfs pull`"),
    (rb".{4}ftyp(?!hei|hev|mif1|msf1)|\x1aE\xdf\xa3", "a video (MP4, QuickTime or WebM)"),
    (rb".{4}ftyp", "a HEIC image that is damaged or of a rare kind"),
    (rb"\s*<(?:!doctype )?html", "a web page (HTML)"),
    (rb"(?:\xef\xbb\xbf)?\s*<.{,4000}<?svg", "an SVG drawing"),
)


def no_image(data: bytes, name: str) -> ImageError:
    """The error for a file that is none of the formats that are read."""
    kind = next((kind for start, kind in _KINDS if re.match(start, data, re.DOTALL | re.I)), "")
    got = kind or f"a file that starts with {data[:16]!r}"
    wanted = "an image, such as PNG, JPEG or WebP"
    if kind.startswith("a video"):
        got += ", which is given as a video: a part or column of that name"
    elif (mimetypes.guess_type(name.strip("'"))[0] or "").startswith("video/"):
        wanted = "a video: MP4, QuickTime, WebM, Matroska or AVI"
    return ImageError(f"{name}: expected {wanted}, got {got}")
