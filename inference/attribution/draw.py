"""Attribution maps as one image: the images as they are, and once more under a heat map for each word."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from data.files import replacing
from inference.attribution.attention import AttentionMaps, attention_maps
from inference.attribution.occlusion import OcclusionMaps, occlusion_maps
from inference.attribution.settings import SIGNATURE, WINDOW
from inference.attribution.teacher_forcing import Word, answer_words
from inference.checkpoint import Checkpoint, RequestError

MAX_WORDS = 96  # nobody looks at more
_MARGIN, _GAP = 40, 16
_PAPER, _INK, _QUIET, _ANSWER = "#f3f4f6", "#111827", "#6b7280", "#b4235a"
# (level, red, green, blue): from violet over red and orange to pale yellow. It grows lighter all the way, so
# it reads in grey print and without telling red from green.
_RAMP = (
    (0.00, 20, 18, 50),
    (0.25, 98, 26, 128),
    (0.50, 204, 48, 98),
    (0.75, 250, 138, 40),
    (1.00, 255, 240, 150),
)
_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial Unicode.ttf", "arial.ttf")
_MIN_FALL = 0.25  # full heat of occlusion is at least this fall, so that small differences stay dark


def draw_maps(found: AttentionMaps | OcclusionMaps, words: Sequence[Word], question: str = "") -> Image.Image:
    """The images, and a heat map of them for each of the first 96 words; `words` are those of the answer.

    Each word has its own scale, from nothing to the highest cell of its maps.
    """
    if not words:
        raise ValueError("words: expected at least one to draw, got none")
    occlusion, images = isinstance(found, OcclusionMaps), found.images
    shown, cells = words[:MAX_WORDS], min(len(words), MAX_WORDS) + 1
    columns = max(1, min(cells, 4 if cells <= 8 else 5, 6 // len(images)))
    inner = max(860 if columns < 3 else 1200, 120 * len(images))
    width = (inner + _GAP) // columns - _GAP
    side = max(16, (width + _GAP) // len(images) - _GAP)
    small = [_fit(image, side) for image in images]
    as_is = ("the image", "as it is") if len(images) == 1 else ("the images", "as they are")
    drawn = [(small, *as_is)]
    for word in shown:
        maps = found.of(word.tokens)
        full = max(*(float(one.max()) for one in maps), _MIN_FALL if occlusion else 1e-9)
        heated = [overlay(image, one / full) for image, one in zip(small, maps, strict=True)]
        drawn.append((heated, word.text, _figures(found, word, maps)))

    height = max(image.height for image in small)
    answer = " ".join(word.text for word in shown) + " …" * (len(shown) < len(words))
    if occlusion:
        title, low, high = "How greying each place changes the answer", "probability stays", "falls most"
        notes = [found.setting, "Under a word: its probability, and the lowest one with a window greyed."]
        notes += ["Dark does not mean unseen: what shows in two places is missed in neither."]
    else:
        title, low, high = "The decoder's attention", "no attention", "most attention"
        notes = [found.setting, "Attention is not explanation: it does not show what a word depends on."]
    head = [(line, 19, _QUIET) for line in _lines(f"{title}, word by word", 19, inner, 1)]
    head += [(line, 33, _INK) for line in _lines(question, 33, inner, 2)]
    head += [(line, 33, _ANSWER) for line in _lines(answer, 33, inner, 4)]
    foot = [(line, 16, _QUIET) for note in notes for line in _lines(note, 16, inner, 2)]
    top = _MARGIN + sum(size + 12 for _, size, _ in head) + _GAP
    bottom = top + -(-len(drawn) // columns) * (height + 62 + _GAP)
    sheet = Image.new("RGB", (inner + 2 * _MARGIN, bottom + 28 * (len(foot) + 1) + _MARGIN), _PAPER)
    _write(sheet, _MARGIN, _MARGIN, head)
    for number, (row, caption, figures) in enumerate(drawn):
        x = _MARGIN + number % columns * (width + _GAP)
        y = top + number // columns * (height + 62 + _GAP)
        for place, image in enumerate(row):
            sheet.paste(image, (x + place * (side + _GAP), y + (height - image.height) // 2))
        texts = _lines(caption, 22, width, 1)[:1] or [""], _lines(figures, 15, width, 1)
        _write(
            sheet, x, y + height + 4, [(texts[0][0], 22, _INK), *((line, 15, _QUIET) for line in texts[1])]
        )
    _write(sheet, _MARGIN, bottom, [(low, 16, _QUIET)])
    bar = _MARGIN + round(_font(16).getlength(low)) + 12
    colours = _colours(np.tile(np.linspace(0, 1, 240), (14, 1))).astype(np.uint8)
    sheet.paste(Image.fromarray(colours), (bar, bottom + 4))
    _write(sheet, bar + 252, bottom, [(f"{high}, for this word", 16, _QUIET)])
    _write(sheet, _MARGIN, bottom + 28, foot)
    return sheet


def overlay(image: Image.Image, heat: np.ndarray) -> Image.Image:
    """An RGB image under its heat (h, w): dark where that is 0, glowing where it is 1. Cells divide the image
    evenly and are smoothed."""
    smooth = Image.fromarray(heat.astype(np.float32)).resize(image.size, Image.Resampling.BICUBIC)
    level = np.clip(np.asarray(smooth), 0, 1)[..., None]  # (H, W, 1)
    colour = np.asarray(image, dtype=np.float32)
    grey = np.asarray(image.convert("L"), dtype=np.float32)[..., None]
    dark = 0.16 * grey + 0.24 * colour + np.array(_RAMP[0][1:])
    lit = dark + (colour - dark) * level
    strength = 0.55 * level**0.6
    return Image.fromarray(((1 - strength) * lit + strength * _colours(level[..., 0])).astype(np.uint8))


def write_attribution(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    question: str,
    answer_ids: Sequence[int],
    args: argparse.Namespace,
) -> None:
    """Write the maps of an answer as generate.py's arguments say. Raises RequestError, OSError."""
    words = answer_words(checkpoint, answer_ids)
    if not words:
        raise RequestError("the answer has no word to draw a map for")
    found: AttentionMaps | OcclusionMaps
    if args.method == "occlusion":
        window = WINDOW if args.window is None else args.window
        found = occlusion_maps(checkpoint, images, question, answer_ids, window, args.system, progress=True)
    else:
        found = attention_maps(checkpoint, images, question, answer_ids, args.layers, args.heads, args.system)
    write_sheet(draw_maps(found, words, question), args.show_attention)


def write_sheet(sheet: Image.Image, path: Path) -> None:
    """Write a PNG that `--show-attention` may overwrite later. Raises OSError."""
    signed = PngInfo()
    signed.add_text("Software", SIGNATURE)
    with replacing(path) as temporary:
        sheet.save(temporary, "PNG", pnginfo=signed, optimize=True)


def _figures(found: AttentionMaps | OcclusionMaps, word: Word, maps: list[np.ndarray]) -> str:
    """The line under a word."""
    if isinstance(found, OcclusionMaps):
        lowest = found.occluded_probability(word.tokens).min()
        return f"{found.probability(word.tokens):.0%}, greyed {lowest:.0%}"
    return f"{sum(float(one.sum()) for one in maps):.0%} of it on the image{'s' * (len(maps) > 1)}"


def _colours(level: np.ndarray) -> np.ndarray:
    """Levels from 0 to 1 → RGB in a last axis, float32."""
    at, *channels = zip(*_RAMP, strict=True)
    return np.stack([np.interp(level, at, channel) for channel in channels], axis=-1).astype(np.float32)


def _fit(image: Image.Image, side: int) -> Image.Image:
    """The image with its longer side changed to `side` pixels."""
    scale = side / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS)


def _font(size: int, text: str = "") -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own, which every machine has; for letters that it lacks, one of the system's."""
    if not text.replace("…", "").isascii():
        for name in _FONTS:
            try:
                return ImageFont.truetype(name, size)
            except OSError:
                continue
    return ImageFont.load_default(size)


def _lines(text: str, size: int, width: float, most: int) -> list[str]:
    """`text` broken between words into at most `most` lines of a width in pixels; what is too long is cut."""
    font, lines = _font(size, text), [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if not lines[-1] or len(lines) == most or font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    for number, line in enumerate(lines):
        while font.getlength(line) > width and len(line) > 1:
            line = line.rstrip("…")[:-1] + "…"
        lines[number] = line
    return lines if text.strip() else []


def _write(sheet: Image.Image, x: int, y: int, lines: list[tuple[str, int, str]]) -> None:
    """Write (text, size, colour) under one another."""
    draw = ImageDraw.Draw(sheet)
    for text, size, colour in lines:
        draw.text((x, y), text, colour, _font(size, text))
        y += size + 12
