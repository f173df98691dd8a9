"""The pages of a document, drawn one at a time: those of a PDF, the frames of a TIFF, or an image alone.

    with closing(open_pages(Path("scan.pdf"))) as pages:
        for number in range(1, pages.count + 1):
            image = pages.draw(number, processor.images)    # upright RGB

A PDF's page is drawn as large as the model's image rule makes a scan of it, and no larger; without a rule, as
large as the scan. pypdfium2, an optional requirement, draws it. A refusal is an `ImageError`.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from PIL import Image

from data.errors import ImageError, optional
from data.images import ImageLimits, check_size, open_file, orientation_of, refusing_damage, upright

if TYPE_CHECKING:
    from data.image_rules import Images  # imports torch, which --help does without

SCAN_DPI = 200  # or less, of a poster whose scan would have too many pixels
ADVICE = "to read PDFs, install the package pypdfium2: pip install -r requirements-read.txt"


class Pages(Protocol):
    """An open document of `count` pages."""

    count: int

    def draw(self, number: int, images: Images | None = None) -> Image.Image:
        """Page `number`, from 1, as large as a model with this rule makes use of. Raises ImageError."""

    def close(self) -> None: ...


def open_pages(source: Path | bytes, name: str, limits: ImageLimits = ImageLimits()) -> Pages:  # noqa: B008
    """The pages of a file or of its bytes, which errors call `name`."""
    if isinstance(source, Path) and not source.is_file():
        raise ImageError(
            f"{name}: expected a PDF or an image, got {'no' if source.exists() else 'no such'} file"
        )
    file = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    try:
        head = file.read(1024)
        file.seek(0)
        if not head:
            raise ImageError(f"{name}: expected a PDF or an image, got an empty file")
        return PdfPages(file, name, limits) if b"%PDF-" in head else ImagePages(file, name, limits)
    except BaseException:
        file.close()
        raise


class PdfPages:
    """Those of a PDF."""

    def __init__(self, file: BinaryIO, name: str, limits: ImageLimits):
        pdfium = optional("pypdfium2", f"{name}: {ADVICE}")
        self._file, self._name, self._limits = file, name, limits
        try:
            self._pdf = pdfium.PdfDocument(file)
            self._pdf.init_forms()  # so that what was filled in is drawn
        except pdfium.PdfiumError as error:
            why = (
                "it needs a password: save it without"
                if "assword" in str(error)
                else "it is damaged, or none"
            )
            raise ImageError(f"{name}: the PDF cannot be opened: {why}") from error
        self.count = len(self._pdf)
        if not self.count:
            raise ImageError(f"{name}: expected a PDF with pages, got none")

    def draw(self, number: int, images: Images | None = None) -> Image.Image:
        with refusing_damage(f"{self._name}: page {number}"):
            page = self._pdf[number - 1]
            size = page.get_size()  # in points, as it is turned
            longest = max(size)
            scale = min(SCAN_DPI / 72, math.sqrt(self._limits.max_pixels / math.prod(size)))
            scan = [max(1, math.floor(side * scale)) for side in size]
        check_size(*scan, self._limits, f"{self._name}: page {number}")
        side = max(scan) if images is None else seen_side(images, *scan)
        with refusing_damage(f"{self._name}: page {number}"):
            # A little less, because the sides are rounded up.
            image = page.render(scale=(side - 0.01) / longest).to_pil().convert("RGB")
            page.close()
        return image

    def close(self) -> None:
        self._pdf.close()
        self._file.close()


class ImagePages:
    """Those of a TIFF, or an image."""

    def __init__(self, file: BinaryIO, name: str, limits: ImageLimits):
        self._file, self._name, self._limits = file, name, limits
        self._image, self._orientation = open_file(file, limits, name)
        self._is_tiff = self._image.format == "TIFF"
        with refusing_damage(f"{name}: the image"):
            self.count = getattr(self._image, "n_frames", 1) if self._is_tiff else 1

    def draw(self, number: int, images: Images | None = None) -> Image.Image:
        name, turned = f"{self._name}: page {number}" if self.count > 1 else self._name, self._orientation
        if self._is_tiff:
            with refusing_damage(name):
                self._image.seek(number - 1)
            check_size(*self._image.size, self._limits, name)
            turned = orientation_of(self._image)
        return upright(self._image, turned, name)

    def close(self) -> None:
        self._file.close()


def seen_side(images: Images, width: int, height: int) -> int:
    """Pixels of the longer side of an image, as large as the finest parts that a rule makes of it show it."""
    visual = images.plan(width, height)
    cells = images.cells(visual)
    across = max(right for *_, right in cells)
    down = max(bottom for _, _, bottom, _ in cells)
    sides = [
        (part.pixels.shape[-1] * across // (right - left), part.pixels.shape[-2] * down // (bottom - top))
        for part, (top, left, bottom, right) in zip(visual.parts, cells, strict=True)
    ]
    return max(side[height > width] for side in sides)
