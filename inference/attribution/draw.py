"""Attribution maps as one image: the images as they are, and once more under a heat map for each word."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps
from PIL.PngImagePlugin import PngInfo

from data.errors import replacing
from inference.attribution import SIGNATURE
from inference.attribution.attention import AttentionMaps, Word

_NOTES = (
    "From no attention (dark) to most attention for this word (bright).",
    "all layers, all heads",
    "Attention is not explanation: it does not show what a word depends on.",
)
MAX_WORDS = 96  # nobody looks at more
_MARGIN, _GAP = 40, 16
_PAPER, _INK, _QUIET, _ANSWER = "#f3f4f6", "#111827", "#6b7280", "#b4235a"
# From violet over red and orange to pale yellow. It grows lighter all the way, so it reads in grey print and
# without telling red from green.
_RAMP = np.array([(20, 18, 50), (98, 26, 128), (204, 48, 98), (250, 138, 40), (255, 240, 150)])
_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial Unicode.ttf", "arial.ttf")


def draw_maps(found: AttentionMaps, words: Sequence[Word], question: str = "") -> Image.Image:
    """The images, and a heat map of them for each of the first 96 words; `words` are those of the answer, at
    least one. Each word has its own scale, from nothing to the highest cell of its maps."""
    images, shown = found.images, words[:MAX_WORDS]
    columns = max(1, min(len(shown) + 1, 4, 6 // len(images)))
    inner = max(1200 if columns > 2 else 860, 120 * len(images))
    width = (inner + _GAP) // columns - _GAP
    side = (width + _GAP) // len(images) - _GAP
    small = [_fit(image, side) for image in images]
    cards = [_card(small, "as it is" if len(images) == 1 else "as they are", "", width)]
    for word in shown:
        maps = found.of(word.tokens)
        full = max(1e-9, *(float(heat.max()) for heat in maps))
        heated = [overlay(image, heat / full) for image, heat in zip(small, maps, strict=True)]
        share = sum(float(heat.sum()) for heat in maps)
        cards.append(
            _card(heated, word.text, f"{share:.0%} of it on the image{'s' * (len(maps) > 1)}", width)
        )
    answer = " ".join(word.text for word in shown) + " …" * (len(shown) < len(words))
    parts = [
        _text("The decoder's attention, word by word", 19, _QUIET, inner),
        _text(question, 33, _INK, inner, 2),
        _text(answer, 33, _ANSWER, inner, 4),
        *(_joined(cards[row : row + columns], across=True) for row in range(0, len(cards), columns)),
        Image.fromarray(_colours(np.tile(np.linspace(0, 1, 240), (14, 1))).astype(np.uint8)),
        *(_text(note, 16, _QUIET, inner, 2) for note in _NOTES),
    ]
    return ImageOps.expand(_joined(parts), _MARGIN, _PAPER)


def overlay(image: Image.Image, heat: np.ndarray) -> Image.Image:
    """An RGB image under its heat (h, w): dark where that is 0, glowing where it is 1. Cells divide the image
    evenly and are smoothed."""
    smooth = Image.fromarray(heat.astype(np.float32)).resize(image.size, Image.Resampling.BICUBIC)
    level = np.clip(np.asarray(smooth), 0, 1)[..., None]  # (H, W, 1)
    colour = np.asarray(image, dtype=np.float32)
    grey = np.asarray(image.convert("L"), dtype=np.float32)[..., None]
    dark = 0.16 * grey + 0.24 * colour + _RAMP[0]
    lit = dark + (colour - dark) * level
    strength = 0.55 * level**0.6
    return Image.fromarray(((1 - strength) * lit + strength * _colours(level[..., 0])).astype(np.uint8))


def save_signed(image: Image.Image, path: Path) -> None:
    """Write an image as a PNG that a later run may overwrite."""
    signed = PngInfo()
    signed.add_text("Software", SIGNATURE)
    with replacing(path) as temporary:
        image.save(temporary, "PNG", pnginfo=signed, optimize=True)


def _colours(level: np.ndarray) -> np.ndarray:
    """Levels from 0 to 1 → RGB in a last axis, float32."""
    at = np.linspace(0, 1, len(_RAMP))
    return np.stack([np.interp(level, at, channel) for channel in _RAMP.T], axis=-1).astype(np.float32)


def _card(images: Sequence[Image.Image], title: str, figures: str, width: int) -> Image.Image:
    """Images beside one another, and two lines under them."""
    texts = [_text(title, 22, _INK, width), _text(figures, 15, _QUIET, width)]
    return _joined([_joined(images, across=True), *texts], 2)


def _joined(parts: Sequence[Image.Image], gap: int = _GAP, across: bool = False) -> Image.Image:
    """Images under one another, or beside one another."""
    widths, heights = zip(*(part.size for part in parts), strict=True)
    gaps = gap * (len(parts) - 1)
    size = (sum(widths) + gaps, max(heights)) if across else (max(widths), sum(heights) + gaps)
    sheet, x, y = Image.new("RGB", size, _PAPER), 0, 0
    for part in parts:
        sheet.paste(part, (x, y))
        x, y = (x + part.width + gap, 0) if across else (0, y + part.height + gap)
    return sheet


def _fit(image: Image.Image, side: int) -> Image.Image:
    """The image with its longer side changed to `side` pixels."""
    width, height = (max(1, round(length * side / max(image.size))) for length in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _text(text: str, size: int, colour: str, width: int, most: int = 1) -> Image.Image:
    """A strip of this width with at most `most` lines; what is too long is cut."""
    letters = font(size, text.replace("…", "").isascii())
    length = letters.getlength(text)
    fits = len(text) if length <= width else int(0.93 * len(text) * width / length)
    lines = textwrap.wrap(text, max(1, fits), max_lines=most, placeholder="…")
    strip = Image.new("RGB", (width, max(1, len(lines)) * (size + 8)), _PAPER)
    for number, line in enumerate(lines):
        ImageDraw.Draw(strip).text((0, number * (size + 8)), line, colour, letters)
    return strip


@cache
def font(size: int, ascii_only: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own, which every machine has; for letters that it lacks, one of the system's."""
    for name in () if ascii_only else _FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)
