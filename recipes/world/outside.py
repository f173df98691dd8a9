"""Images of what is outside of the world: photographs, screenshots, charts, textures, noise, blanks.

Photographs are cuts of those that packages carry, of others for each split. Everything else is drawn; `split`
decides its fonts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from recipes.world import looks
from recipes.world.faces import face
from shapes.drawing import paint_background

# Files of packages; README.md has their licences.
_PHOTOGRAPHS = {
    looks.TRAIN: (
        "sklearn/datasets/images/china.jpg", "skimage/data/astronaut.png", "skimage/data/coffee.png",
        "skimage/data/camera.png", "skimage/data/coins.png", "skimage/data/grass.png",
        "skimage/data/ihc.png", "skimage/data/moon.png", "skimage/data/hubble_deep_field.jpg",
        "skimage/data/motorcycle_left.png", "skimage/data/page.png", "skimage/data/retina.jpg",
    ),
    looks.HELDOUT: (
        "sklearn/datasets/images/flower.jpg", "skimage/data/chelsea.png", "skimage/data/rocket.jpg",
        "skimage/data/gravel.png", "skimage/data/brick.png", "skimage/data/text.png",
        "matplotlib/mpl-data/sample_data/grace_hopper.jpg", "skimage/data/cell.png",
    ),
}  # fmt: skip


def outside_image(rng: random.Random, split: str = "train", aspect: float = 1.0) -> Image.Image:
    """An image of any size, of this width over height, that shows nothing of the world."""
    longer = looks.image_size(rng)
    width, height = longer * min(1.0, aspect), longer * min(1.0, 1 / aspect)
    _, draw = rng.choice(KINDS_OUTSIDE + _MORE_OFTEN * (split == looks.TRAIN))
    return draw(rng, (round(width), round(height)), split)


@cache
def _photograph(name: str) -> Image.Image:
    image = Image.open(looks.package_file(name)).convert("RGB")
    image.thumbnail((800, 800))
    return image


def _photo(rng: random.Random, size, split) -> Image.Image:
    """A cut of a photograph, perhaps mirrored, in other colours or grey."""
    image = _photograph(rng.choice(_PHOTOGRAPHS[split]))
    share = rng.uniform(0.35, 1.0)
    width, height = round(image.width * share), round(image.height * share)
    x, y = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
    image = image.crop((x, y, x + width, y + height)).resize(size, Image.Resampling.BICUBIC)
    if rng.random() < 0.5:
        image = ImageOps.mirror(image)
    if rng.random() < 0.2:
        image = Image.merge("RGB", rng.sample(image.split(), 3))
    if rng.random() < 0.4:
        pixels = np.asarray(image, np.float32) / 255
        gains = np.array([rng.uniform(0.6, 1.3) for _ in range(3)], np.float32)
        pixels = (pixels * gains) ** rng.uniform(0.6, 1.6)
        image = Image.fromarray((pixels.clip(0, 1) * 255).astype(np.uint8))
    return ImageOps.grayscale(image).convert("RGB") if rng.random() < 0.15 else image


def _tone(rng: random.Random, low=0, high=255) -> tuple[int, int, int]:
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)


def _blank(rng: random.Random, size, split) -> Image.Image:
    """A ground as drawings have it, with nothing on it."""
    return paint_background(looks.background(rng, [_tone(rng)]), size)


def _noise(rng: random.Random, size, split) -> Image.Image:
    """Grey or coloured, fine or coarse, even or in the proportions of photographs (1/f)."""
    source, wide = np.random.RandomState(rng.randrange(1 << 31)), 1 << rng.randint(3, 8)
    grain = source.standard_normal((3 if rng.random() < 0.7 else 1, wide, wide))
    if rng.random() < 0.6:
        f = np.hypot(np.fft.fftfreq(wide)[:, None], np.fft.fftfreq(wide)[None]) + 1 / wide
        grain = np.fft.ifft2(np.fft.fft2(grain) / f ** rng.uniform(0.6, 1.8)).real
        grain = grain / (grain.std() + 1e-9)
    pixels = (128 + rng.uniform(25, 90) * grain).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(np.broadcast_to(pixels, (wide, wide, 3)))).resize(
        size, rng.choice((Image.Resampling.NEAREST, Image.Resampling.BICUBIC))
    )


def _texture(rng: random.Random, size, split) -> Image.Image:
    """Checks, waves, rings, bricks or a maze of short strokes, in two tones or more, all over the image."""
    x, y = np.meshgrid(np.linspace(0, 1, size[0]), np.linspace(0, 1, size[1]))
    turn, often = rng.uniform(0, math.pi), rng.uniform(6, 40)
    u, v = x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)
    which = rng.randrange(5)
    if which == 0:
        mix = ((np.floor(u * often) + np.floor(v * often)) % 2).astype(float)
    elif which == 1:
        mix = 0.5 + 0.5 * np.sin(2 * math.pi * often * (u + 0.05 * np.sin(v * often)))
    elif which == 2:
        mix = 0.5 + 0.5 * np.sin(2 * math.pi * often * np.hypot(x - rng.random(), y - rng.random()))
    elif which == 3:
        row = np.floor(v * often)
        mix = (((v * often) % 1 < 0.12) | ((u * often / 2 + row / 2) % 1 < 0.06)).astype(float)
    else:
        mix = 0.5 + 0.25 * (np.sin(often * u * 6) + np.sin(often * v * 5 + 3 * np.sin(often * u)))
    first, second = np.array(_tone(rng)), np.array(_tone(rng))
    return Image.fromarray((first + (second - first) * mix[..., None]).astype(np.uint8))


def _font(rng: random.Random, split, pixels: float):
    return ImageFont.truetype(face(rng, split).partition("@")[0], max(6, round(pixels)))


def _sentence(rng: random.Random, words: int) -> str:
    return " ".join(looks.word(rng) for _ in range(words)).capitalize() + rng.choice((".", "", ":", "?"))


def _page(rng: random.Random, size, split) -> Image.Image:
    """Lines of text, as of a book, a letter or a terminal."""
    dark = rng.random() < 0.3
    image = Image.new("RGB", size, _tone(rng, 0, 50) if dark else _tone(rng, 215, 255))
    draw, height = ImageDraw.Draw(image), max(7.0, min(size) * rng.uniform(0.03, 0.09))
    font, y = _font(rng, split, height), height
    ink = _tone(rng, 190, 255) if dark else _tone(rng, 0, 70)
    while y < size[1] - height:
        words = rng.randint(3, 12)
        if rng.random() < 0.9:
            draw.text((height, y), _sentence(rng, words), font=font, fill=ink)
        y += height * 1.4
    return image


def _screen(rng: random.Random, size, split) -> Image.Image:
    """Windows with bars, buttons and text."""
    image = Image.new("RGB", size, _tone(rng))
    draw, (width, height) = ImageDraw.Draw(image), size
    font, bar = _font(rng, split, min(size) * 0.045), max(6, round(min(size) * 0.07))
    for _ in range(rng.randint(1, 4)):
        x1, y1 = rng.uniform(0, 0.5) * width, rng.uniform(0, 0.5) * height
        x2, y2 = (
            min(width, x1 + rng.uniform(0.3, 0.8) * width),
            min(height, y1 + rng.uniform(0.3, 0.8) * height),
        )
        draw.rectangle((x1, y1, x2, y2), fill=_tone(rng, 190, 255), outline=_tone(rng, 60, 150))
        draw.rectangle((x1, y1, x2, y1 + bar), fill=_tone(rng, 60, 200))
        draw.text((x1 + bar / 2, y1 + bar / 6), _sentence(rng, 3), font=font, fill=_tone(rng))
        y = y1 + 1.4 * bar
        while y < y2 - bar:
            if rng.random() < 0.3:
                draw.rounded_rectangle(
                    (x1 + bar / 2, y, min(x2 - 1, x1 + bar * rng.uniform(3, 6)), y + bar), bar // 4,
                    fill=_tone(rng, 80, 240), outline=_tone(rng, 60, 150),
                )  # fmt: skip
            draw.text((x1 + bar, y + 1), _sentence(rng, rng.randint(1, 5)), font=font, fill=_tone(rng, 0, 90))
            y += 1.3 * bar
    return image


def _chart(rng: random.Random, size, split) -> Image.Image:
    """Bars, lines, points or a pie, with axes and labels."""
    image = Image.new("RGB", size, _tone(rng, 225, 255))
    draw, (width, height) = ImageDraw.Draw(image), size
    font, ink = _font(rng, split, min(size) * 0.05), _tone(rng, 0, 90)
    left, bottom, right, top = 0.14 * width, 0.86 * height, 0.95 * width, 0.12 * height
    count, kind = rng.randint(3, 9), rng.choice(("bars", "lines", "points", "pie"))
    draw.text((0.3 * width, 0.02 * height), _sentence(rng, 2), font=font, fill=ink)
    if kind == "pie":
        r, at, x, y = 0.36 * min(size), 0.0, width / 2, 0.55 * height
        for _ in range(count):
            to = at + 360 / count * rng.uniform(0.6, 1.4)
            draw.pieslice((x - r, y - r, x + r, y + r), at, to, fill=_tone(rng), outline=ink)
            at = to
        return image
    draw.line((left, top, left, bottom, right, bottom), fill=ink, width=max(1, min(size) // 150))
    for i in range(5):
        y = bottom + (top - bottom) * i / 5
        if rng.random() < 0.8:
            draw.line((left, y, right, y), fill=_tone(rng, 180, 220))
        draw.text((0.03 * width, y - 0.03 * height), str(i * 10), font=font, fill=ink)
    step, fill = (right - left) / count, _tone(rng)
    for _ in range(1 if kind == "bars" else rng.randint(1, 3)):
        places = [(left + step * (i + 0.5), bottom + (top - bottom) * rng.random()) for i in range(count)]
        for i, (x, y) in enumerate(places):
            if kind == "bars":
                draw.rectangle((x - 0.35 * step, y, x + 0.35 * step, bottom), fill=fill)
                draw.text((x - 0.3 * step, bottom + 2), looks.word(rng)[:4], font=font, fill=ink)
                fill = _tone(rng) if i % 2 and rng.random() < 0.5 else fill
            elif kind == "points":
                r = 0.012 * min(size)
                draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        if kind == "lines":
            draw.line(places, fill=fill, width=max(1, min(size) // 100))
        fill = _tone(rng)
    return image


def _scribble(rng: random.Random, size, split) -> Image.Image:
    """Lines without a meaning, drawn by a shaky hand."""
    image = Image.new("RGB", size, _tone(rng, 200, 255))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randint(3, 14)):
        x, y = rng.random() * size[0], rng.random() * size[1]
        line = [(x, y)]
        for _ in range(rng.randint(3, 25)):
            x, y = x + rng.gauss(0, 0.1) * size[0], y + rng.gauss(0, 0.1) * size[1]
            line.append((x, y))
        draw.line(line, fill=_tone(rng, 0, 200), width=rng.randint(1, max(1, min(size) // 60)))
    return image


_Draw = Callable[[random.Random, tuple[int, int], str], Image.Image]
_OF_SIGNS = (
    "segno/__init__.py", "resvg_py/__init__.py", "fontTools/__init__.py", "deckr_fonts/fonts",
    "justmyresource_lucide/icons.zip", "justmyresource_material_icons/icons.zip",
)  # fmt: skip


def check_installed() -> None:
    """FileNotFoundError names what images for training are drawn with and is not installed."""
    for name in (*_PHOTOGRAPHS[looks.TRAIN], *_OF_SIGNS):
        looks.package_file(name)


def _sign(name: str) -> _Draw:
    """One of `signs`, whose packages are imported only when one is drawn."""

    def draw(rng: random.Random, size, split) -> Image.Image:
        from recipes.world import signs

        return getattr(signs, name)(rng, size, split)

    return draw


KINDS_OUTSIDE: tuple[tuple[str, _Draw], ...] = (
    ("photograph", _photo), ("photograph", _photo), ("photograph", _photo), ("photograph", _photo),
    ("blank", _blank), ("noise", _noise), ("texture", _texture), ("page", _page), ("screen", _screen),
    ("chart", _chart), ("chart", _sign("chart")), ("chart", _sign("chart")), ("scribble", _scribble),
    ("icon", _sign("icons")), ("icon", _sign("icons")), ("emoji", _sign("emoji")), ("emoji", _sign("emoji")),
    ("code", _sign("code")),
)  # fmt: skip
_MORE_OFTEN = (("icon", _sign("icons")),) * 3 + (("emoji", _sign("emoji")),) * 3  # the most like drawn shapes
