"""Maps as one image to look at: a contact sheet with a card for each word of the answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from inference.attribution.maps import AttentionMaps, Maps, OcclusionMaps
from inference.attribution.words import Word

MOST_WORDS = 96  # more cards than that nobody looks at
_MARGIN, _GAP, _PAD = 40, 18, 12
_INK, _QUIET, _SAID, _PAPER, _CARD, _EDGE = "#111827", "#6b7280", "#b4235a", "#f3f4f6", "#ffffff", "#e5e7eb"
# Violet over red and orange to pale yellow: (at, red, green, blue), growing lighter all the way, so that it
# reads in print and to eyes that tell no red from green.
_RAMP = (
    (0.00, 20, 18, 50),
    (0.25, 98, 26, 128),
    (0.50, 204, 48, 98),
    (0.75, 250, 138, 40),
    (1.00, 255, 240, 150),
)
_SMOOTH = Image.Resampling.LANCZOS
_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial Unicode.ttf", "arial.ttf")
_LEAST_FALL = 0.25  # a word whose probability hardly falls anywhere stays dark
_TITLES = {
    AttentionMaps: "The decoder's attention, word by word",
    OcclusionMaps: "What greying each place does to the answer, word by word",
}
_NOTES = {
    AttentionMaps: "Attention is not explanation: what a word reads is not what it hangs on.",
    OcclusionMaps: "Dark does not mean unseen: what shows in two places is missed in neither.",
}


def draw_maps(found: Maps, words: Sequence[Word], question: str = "") -> Image.Image:
    """A contact sheet (RGB): question and answer, the images as they are, a card for each word, a legend.

    Each card has its own scale, from nothing to the most that any cell of the word's maps has; for occlusion
    to a fall by 25 % at least, so that small differences are not made to glow.

    Args:
        found: of one answer.
        words: of the same answer (`answer_words`), at least one; those behind the first 96 are left out.
        question: for the head of the sheet.
    """
    if not words:
        raise ValueError("words: expected at least one to draw, got none")
    shown = words[:MOST_WORDS]
    columns, inner = _columns(len(shown) + 1, len(found.images))
    width = (inner + _GAP) // columns - _GAP  # of a card
    side = max(16, (width - _PAD) // len(found.images) - _PAD)  # of an image on it
    small = [image.resize(_fit(image.size, side), _SMOOTH) for image in found.images]
    title = "the image" if len(small) == 1 else "the images"
    cards = [_card(small, title, "as it is" if len(small) == 1 else "as they are", width, side)]
    for word in shown:
        maps = found.of(word.tokens)
        most = max(float(one.max()) for one in maps)
        full = max(most, _LEAST_FALL if isinstance(found, OcclusionMaps) else 1e-9)
        painted = [overlay(image, one / full) for image, one in zip(small, maps, strict=True)]
        cards.append(_card(painted, word.text, _said(found, word, maps), width, side))
    answer = " ".join(word.text for word in shown) + (" …" if len(shown) < len(words) else "")
    return _sheet(found, question, answer, cards, columns, inner)


def overlay(image: Image.Image, heat: np.ndarray) -> Image.Image:
    """An image under its heat: in the dark where that is 0, glowing where it is 1.

    Args:
        image: RGB.
        heat: (h, w) float, cells that divide the image evenly; smoothed in between, and held to 0 … 1.
    """
    smooth = Image.fromarray(heat.astype(np.float32)).resize(image.size, Image.Resampling.BICUBIC)
    level = np.clip(np.asarray(smooth), 0, 1)[..., None]  # (H, W, 1)
    colour = np.asarray(image, dtype=np.float32)
    grey = np.asarray(image.convert("L"), dtype=np.float32)[..., None]
    dark = 0.16 * grey + 0.24 * colour + np.array(_RAMP[0][1:])
    lit = dark + (colour - dark) * level
    strength = 0.55 * level**0.6
    return Image.fromarray(((1 - strength) * lit + strength * _colours(level[..., 0])).astype(np.uint8))


def _colours(level: np.ndarray) -> np.ndarray:
    """Levels from 0 to 1 → RGB in a last axis, float32."""
    at, *channels = zip(*_RAMP, strict=True)
    return np.stack([np.interp(level, at, channel) for channel in channels], axis=-1).astype(np.float32)


def _said(found: Maps, word: Word, maps: list[np.ndarray]) -> str:
    """A line under a word, in numbers."""
    if isinstance(found, OcclusionMaps):
        return f"{found.certain(word.tokens):.0%}, greyed {found.doubted(word.tokens).min():.0%}"
    return f"{sum(float(one.sum()) for one in maps):.0%} of it on the image{'s' * (len(maps) > 1)}"


# ------------------------------------------------------------------------------------------------- the sheet
def _columns(cards: int, images: int) -> tuple[int, int]:
    """How many cards stand beside one another, and how many pixels they share: large where there are few."""
    wide = (cards,) if cards <= 4 else (4, 3) if cards <= 8 else (6, 5, 4) if cards <= 15 else (6, 5)
    columns = min(wide, key=lambda columns: -cards % columns)  # few empty places in the last row
    if images > 1:
        columns = max(1, min(columns, 6 // images))
    return columns, max(860 if columns < 3 else 1200, images * 120)


def _sheet(
    found: Maps, question: str, answer: str, cards: list[Image.Image], columns: int, inner: int
) -> Image.Image:
    head = [(_TITLES[type(found)], 19, _QUIET, 34)]
    head += [(line, 33, _INK, 43) for line in _lines(question, 33, inner, most=2)]
    head += [(line, 33, _SAID, 43) for line in _lines(answer, 33, inner, most=4)]
    top = _MARGIN + sum(step for *_, step in head) + _GAP
    foot = top + -(-len(cards) // columns) * (cards[0].height + _GAP) + 8
    said = _reading(found, inner)
    sheet = Image.new("RGB", (inner + 2 * _MARGIN, foot + 26 + 28 * len(said) + _MARGIN), _PAPER)
    draw, y = ImageDraw.Draw(sheet), _MARGIN
    for line, size, colour, step in head:
        draw.text((_MARGIN, y), line, colour, _font(size, line))
        y += step
    for number, card in enumerate(cards):
        row, column = divmod(number, columns)
        sheet.paste(card, (_MARGIN + column * (card.width + _GAP), top + row * (card.height + _GAP)))
    _legend(sheet, found, foot)
    for row, line in enumerate(said, 1):
        draw.text((_MARGIN, foot + 28 * row), line, _QUIET, _font(16, line))
    return sheet


def _reading(found: Maps, inner: int) -> list[str]:
    """Lines on how the sheet was made and is to be read."""
    legend = "under a word: its probability, and with the worst window greyed; "
    setting = legend * isinstance(found, OcclusionMaps) + found.setting
    return [line for text in (setting, _NOTES[type(found)]) for line in _lines(text, 16, inner, most=3)]


def _legend(sheet: Image.Image, found: Maps, top: int) -> None:
    occlusion = isinstance(found, OcclusionMaps)
    low = "probability stays" if occlusion else "no attention"
    high = f"{'falls' if occlusion else 'has'} most, for this word"
    draw, font, x = ImageDraw.Draw(sheet), _font(16), _MARGIN
    draw.text((x, top), low, _QUIET, font)
    x += round(font.getlength(low)) + 12
    bar = _colours(np.tile(np.linspace(0, 1, 240), (14, 1))).astype(np.uint8)
    sheet.paste(Image.fromarray(bar), (x, top + 4))
    draw.text((x + 252, top), high, _QUIET, font)


def _card(images: list[Image.Image], title: str, line: str, width: int, side: int) -> Image.Image:
    """Images beside one another in square places, a title and a line under them."""
    height = max(image.height for image in images) + _PAD
    card = Image.new("RGB", (width, height + 72), _CARD)
    draw = ImageDraw.Draw(card)
    draw.rectangle((0, 0, card.width - 1, card.height - 1), outline=_EDGE)
    for number, image in enumerate(images):
        left = _PAD + number * (side + _PAD) + (side - image.width) // 2
        card.paste(image, (left, _PAD + (height - _PAD - image.height) // 2))
    title, line = _shorten(title, 24, width - 2 * _PAD), _shorten(line, 15, width - 2 * _PAD)
    draw.text((_PAD, height + 8), title, _INK, _font(24, title))
    draw.text((_PAD, height + 42), line, _QUIET, _font(15, line))
    return card


def _fit(size: tuple[int, int], side: int) -> tuple[int, int]:
    """An image's size with its longer side changed to `side` pixels."""
    longest = max(size)
    return max(1, round(size[0] * side / longest)), max(1, round(size[1] * side / longest))


def _font(size: int, text: str = "") -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own, which is on every machine; for a text of letters that it lacks, one of the system's."""
    if not text.replace("…", "").isascii():
        for name in _FONTS:
            try:
                return ImageFont.truetype(name, size)
            except OSError:
                continue
    return ImageFont.load_default(size)


def _shorten(text: str, size: int, width: float) -> str:
    """`text` on one line, cut to a width in pixels with an ellipsis."""
    text = " ".join(text.split())
    font = _font(size, text)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


def _lines(text: str, size: int, width: float, most: int) -> list[str]:
    """`text` broken between words into at most so many lines of a width in pixels."""
    font, lines = _font(size, text), [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or len(lines) == most or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return [_shorten(line, size, width) for line in lines if line]
