"""The pages of a document, drawn one at a time: those of a PDF, the frames of a TIFF, or an image alone.

    with closing(Pages(Path("scan.pdf"), "scan.pdf")) as pages:
        for number in range(1, pages.count + 1):
            image = pages.draw(number, processor.images)    # upright RGB

pypdfium2, an optional requirement, draws PDFs. A refusal is an `ImageError`.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from data.errors import ImageError, optional
from data.images import ImageLimits, check_size, open_file, orientation_of, refusing_damage, upright

if TYPE_CHECKING:
    from data.image_rules import Images  # imports torch, which --help does without

DPI = 200  # of a scan, or less where it would have too many pixels
ADVICE = "to read PDFs, install the package pypdfium2: pip install -r requirements-read.txt"


class Pages:
    """An open document of `count` pages: a file or the bytes of one, which errors call `name`."""

    def __init__(self, source: Path | bytes, name: str, limits: ImageLimits = ImageLimits()):  # noqa: B008
        if isinstance(source, Path) and not source.is_file():
            raise ImageError(f"{name}: expected a PDF or an image, got no file")
        self._name, self._limits, self._pdf = name, limits, None
        self._file = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
        is_pdf = b"%PDF-" in self._file.read(1024)
        self._file.seek(0)
        if is_pdf:
            pdfium = optional("pypdfium2", f"{name}: {ADVICE}")
            try:
                self._pdf = pdfium.PdfDocument(self._file, autoclose=True)
                self._pdf.init_forms()  # so that what was filled in is drawn
            except pdfium.PdfiumError as error:
                why = "it needs a password" if "password" in str(error) else "it is damaged"
                raise ImageError(f"{name}: expected a PDF that can be opened, but {why}") from error
            self.count = len(self._pdf)
        elif name.lower().endswith(".pdf"):
            raise ImageError(f"{name}: expected a PDF, got a file that does not begin as one")
        else:
            self._image, self._orientation = open_file(self._file, limits, name)
            with refusing_damage(f"{name}: the image"):
                self.count = getattr(self._image, "n_frames", 1) if self._image.format == "TIFF" else 1
        if not self.count:
            raise ImageError(f"{name}: expected a document with pages, got none")

    def close(self) -> None:
        (self._pdf or self._file).close()

    def draw(self, number: int, images: Images | None = None) -> Image.Image:
        """Page `number`, from 1. A PDF's is as large as a model with this rule for images sees a scan of it;
        without a rule, as large as the scan. Raises ImageError."""
        name = f"{self._name}: page {number}"
        if self._pdf is None:
            with refusing_damage(name):
                if self.count > 1:
                    self._image.seek(number - 1)
                    self._orientation = orientation_of(self._image)
            check_size(*self._image.size, self._limits, name)
            return upright(self._image, self._orientation, name)
        with refusing_damage(name):
            page = self._pdf[number - 1]
            size = page.get_size()  # in points, as it is turned
            scale = min(DPI / 72, math.sqrt(self._limits.max_pixels / math.prod(size)))
            width, height = (max(1, math.floor(side * scale)) for side in size)
        check_size(width, height, self._limits, name)
        side = max(width, height) if images is None else seen_side(images, width, height)
        with refusing_damage(name):
            # A little less, because the sides are rounded up.
            image = page.render(scale=(side - 0.01) / max(size)).to_pil().convert("RGB")
            page.close()
        return image


def seen_side(images: Images, width: int, height: int) -> int:
    """Pixels of the longer side of an image, as large as the finest parts that a rule makes of it show it."""
    visual, tall = images.plan(width, height), height > width
    cells = images.cells(visual)  # (top, left, bottom, right)
    ends = [(cell[1 - tall], cell[3 - tall]) for cell in cells]
    whole, sides = max(end for _, end in ends), [part.pixels.shape[-1 - tall] for part in visual.parts]
    return max(side * whole // (end - begin) for side, (begin, end) in zip(sides, ends, strict=True))
