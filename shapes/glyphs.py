"""Ink of printed words and of real handwritten digits, split before anything is drawn."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont


@cache
def digit_images(split):
    """(images uint8 (n, 8, 8) 0..255, labels (n,)) of the UCI digits, 80% train, 20% heldout."""
    if split not in ("train", "heldout"):
        raise ValueError(f"expected split 'train' or 'heldout', got {split!r}")
    from sklearn.datasets import load_digits  # slow to import, so only when digits are drawn

    images, labels = load_digits(return_X_y=True)
    images = np.round(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.random.RandomState(0).permutation(len(labels))
    chosen = []
    for digit in range(10):
        of_class = order[labels[order] == digit]
        cut = round(len(of_class) * 0.2)
        chosen.append(of_class[:cut] if split == "heldout" else of_class[cut:])
    chosen = np.sort(np.concatenate(chosen))
    return images[chosen], labels[chosen]


@lru_cache(maxsize=4096)
def digit_mask(split, index):
    """Ink of one digit: (alpha with a border of one empty pixel, ink width, ink height)."""
    image = digit_images(split)[0][index]
    rows, columns = np.nonzero(image.max(1) > 60)[0], np.nonzero(image.max(0) > 60)[0]
    ink = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    ink = np.minimum(ink.astype(np.int32) * 5 // 4, 255).astype(np.uint8)
    return Image.fromarray(np.pad(ink, 1)), ink.shape[1], ink.shape[0]


@cache
def _font():
    return ImageFont.load_default(96)


@cache
def word_mask(text):
    """Ink of a printed word as an alpha image cropped to it."""
    mask = Image.new("L", (700, 180))
    ImageDraw.Draw(mask).text((20, 20), text, font=_font(), fill=255, stroke_width=2, stroke_fill=255)
    return mask.crop(mask.getbbox())


def ink_of(thing, split):
    """(alpha image, width, height) to draw a word or digit with, in fractions of the side."""
    if thing.kind == "word":
        return word_mask(thing.name.upper() if thing.upper else thing.name), thing.width, thing.height
    mask, w, h = digit_mask(split, thing.digit_index)
    return mask, thing.width * (w + 2) / w, thing.height * (h + 2) / h
