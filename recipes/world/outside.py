"""Images of what is outside of the world: photographs, screenshots, charts, formulas, text, textures, noise.

Photographs are cuts of those that packages carry, of others for each split. Everything else is drawn; `split`
decides its fonts.
"""

from __future__ import annotations

import math
import random
import re
import textwrap
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

# --------------------------------------------------------------- formulas, running text and numbers, alone
# In formulas, @ stands for a term, ? for a variable, ~ for a number, & for a compound; in sentences, # for
# a number and what is in braces for one of _SLOTS; in _NUMBERS, # for a digit and ~ for one that is not 0.
_TERMS = (
    "?", "~", "~?", "?^{~}", "?_?", r"\frac{@}{@}", r"\sqrt{@}", "(@ + @)", "@ - @", r"\sin ?", "@^{?}",
)  # fmt: skip
_FORMULAS = {
    looks.TRAIN: (
        "@ = @", "@ + @ = @", r"? = \frac{@}{@}", "?(?) = @ + @ - @", r"\sqrt{@ + @} = @", "~ + ~ = ~",
        r"~ \times ~ = ~", r"\sum_{?=~}^{?} @ = @", r"\int_{~}^{?} @ \, d? = @", r"\lim_{? \to \infty} @ = @",
        r"\frac{d?}{d?} = @", "?^2 + ?^2 = ?^2", "@ < @", r"@ \leq ? \leq @", r"\|@\| \geq @", "E = mc^2",
        r"? = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}", r"e^{i\pi} + 1 = 0", "~ / ~ = ~", "~ - ~ = ~",
        r"\left(\genfrac{}{}{0}{}{?}{?} \; \genfrac{}{}{0}{}{?}{?}\right) \cdot @", r"\binom{?}{~} = @",
        r"\log_{~} @ = @", r"\mathrm{Let}\; ? = @.", r"\mathrm{& + ~& \rightarrow ~&}", r"?: ? \mapsto @",
        r"\mathbf{?} = (@, @)", r"\frac{\partial ?}{\partial ?} = @", r"P(? \mid ?) = \frac{P(?)}{P(?)}",
        r"\forall ? \in \mathbb{R}: @ > ~", r"? \sim N(~, ?^2)",
    ),
    looks.HELDOUT: (
        r"@ \neq @", r"@ \cdot @ = @ - @", r"? = \dfrac{@ + @}{@}", r"\sqrt[3]{@} = @ + @", r"~ \div ~ = ~",
        r"\prod_{?=~}^{?} @ = @", r"\oint @ \, d? = @", r"\cos^2 ? + \tan ? = @", "@ > @ + ~", "F = ma",
        r"\left[\genfrac{}{}{0}{}{?}{~} \; \genfrac{}{}{0}{}{~}{?}\right] ? = @", r"~ \cdot ~ = ~",
        r"\mathrm{~& \leftrightarrow & + &}", r"? \approx @ \; \mathrm{if}\; ? > ~", r"\hat{?} = @ \pm @",
        r"\iint @ \, d? \, d?", r"A \cup B \subset C \cap D", r"\nabla \cdot \mathbf{?} = @",
    ),
}  # fmt: skip
_MATH_FONTS = {
    looks.TRAIN: ("cm", "cm", "cm", "stix", "stix", "dejavusans"),
    looks.HELDOUT: ("stixsans", "dejavuserif"),
}
_VARIABLES = (*"xxxxyyyzabcnntkpqrfgmuvABMN", r"\alpha ", r"\beta ", r"\theta ", r"\lambda ", r"\pi ")
_COMPOUNDS = (
    "H_2O", "CO_2", "O_2", "H_2", "NaCl", "HCl", "CH_4", "NH_3", "H_2SO_4", "C_6H_{12}O_6", "Fe_2O_3",
)  # fmt: skip
_SAID = {
    looks.TRAIN: (
        "The {n} {v} on the {n}.", "The {a} {n} {v} over the {a} {n}.", "I have a {a} {n}.", "This is a {n}.",
        "Where is the {n}?", "Hello {N}, nice to meet you!", "Good morning, {N}!", "Happy birthday, {N}!",
        "{N} and {N} {v} by the {n}.", "Please do not {d} the {n}.", "How to {d} a {n}", "Dear {N}, thanks.",
        "We {d} the {n} at # o'clock.", "Chapter #: The {a} {n}", '"A {n} is never {a}," said {N}.',
        "It was a {a} day in the {n}.", "All you need is a {n}.", "Open from # to #.", "I think {N} {v}.",
        "A {n} a day keeps the {n} away.", "Once upon a time, a {n} {v} by the {n}.", "{n}, {n} and {n}",
    ),
    looks.HELDOUT: (
        "Every {n} has its {n}.", "Why did {N} {d} the {a} {n}?", "To {d} or not to {d}?", "You can {d} it.",
        "There were # {a} days before the {n} {v}.", "See you soon, {N}!", "'{N} {v}', he wrote.",
        "The {n} of the {n}", "In the {n}, nobody {v}.", "No {n} without a {n}!", "Part #. A {n} for {N}",
    ),
}  # fmt: skip
_SLOTS = {
    "{N}": ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Lucy"),
    "{n}": looks.MORE_WORDS,
    "{a}": ("small", "old", "quiet", "happy", "lazy", "strange", "bright", "empty", "new", "beautiful"),
    "{v}": ("sat", "slept", "jumped", "was seen", "waited", "fell", "danced", "looked up", "lived"),
    "{d}": ("touch", "open", "read", "feed", "bring", "clean", "paint", "see", "leave", "find"),
}  # fmt: skip
_NUMBERS = (
    "+~# ### ######", "(~##) ###-####", "~###-0~-1#", "1#.0~.20##", "~,###,###", "$~#.##", "1:4# am", "~#%",
    "~## + ~# = ~##", "~### #### #### ####", "3.14159265#", "No. ~####", "10:3# - 11:5#",
)  # fmt: skip


def _tex(rng: random.Random, form: str, depth: int = 0) -> str:
    """A formula of `form`, in TeX."""

    def fill(found: re.Match) -> str:
        if found[0] == "@":
            return f"{{{_tex(rng, rng.choice(_TERMS if depth < 2 else _TERMS[:4]), depth + 1)}}}"
        return str(rng.randint(0, rng.choice((9, 99)))) if found[0] == "~" else rng.choice(_VARIABLES)

    form = re.sub("&", lambda _: rng.choice(_COMPOUNDS), form)
    return re.sub("[@?~]", fill, form)


_Ink = Callable[[float], Image.Image]  # what it draws (L) with type of so many pixels


def _formula(rng: random.Random, split: str) -> _Ink:
    """One formula, or several under each other."""
    family, count = rng.choice(_MATH_FONTS[split]), rng.choices((1, 2, 3, 4), (12, 4, 2, 1))[0]
    lines = [f"${_tex(rng, rng.choice(_FORMULAS[split]))}$" for _ in range(count)]
    if rng.random() < 0.6:  # fractions as large as the rest
        lines = [line.replace(r"\frac", r"\dfrac") for line in lines]
    middle, gap = rng.random() < 0.5, rng.uniform(0.2, 1.0)

    def ink(pixels: float) -> Image.Image:
        from matplotlib import font_manager, mathtext

        font = font_manager.FontProperties(size=pixels, math_fontfamily=family)
        parse = mathtext.MathTextParser("agg").parse
        rows = [Image.fromarray(np.array(parse(line, 72, font).image)) for line in lines]
        width, step = max(row.width for row in rows), round(gap * pixels)
        image, y = Image.new("L", (width, sum(row.height + step for row in rows)), 0), 0
        for row in rows:
            image.paste(row, ((width - row.width) // 2 if middle else 0, y))
            y += row.height + step
        return image.crop(image.getbbox())

    return ink


def _written(rng: random.Random, split: str, lines: list[str], align: str) -> _Ink:
    """Lines in one font."""
    chosen, text = face(rng, split).partition("@")[0], "\n".join(lines)
    spacing, weight = rng.uniform(0.35, 0.8), rng.choice((400, 400, 700))

    def ink(pixels: float) -> Image.Image:
        font, apart = ImageFont.truetype(chosen, max(6, round(pixels))), spacing * pixels
        if "wght" in chosen:  # whose own weight may be that of a hair
            axes = [(axis["name"], axis["default"] or 0) for axis in font.get_variation_axes()]
            font.set_variation_by_axes([weight if name == b"Weight" else value for name, value in axes])
        measure = ImageDraw.Draw(Image.new("L", (1, 1)))
        x1, y1, x2, y2 = measure.multiline_textbbox((0, 0), text, font, spacing=apart, align=align)
        image = Image.new("L", (math.ceil(x2 - x1) + 4, math.ceil(y2 - y1) + 4), 0)
        draw = ImageDraw.Draw(image)
        draw.multiline_text((2 - x1, 2 - y1), text, 255, font, spacing=apart, align=align)
        return image.crop(image.getbbox())

    return ink


def _english(rng: random.Random, split: str) -> str:
    """A sentence that may be read, or one of words at random."""
    if rng.random() < 0.2:
        return _sentence(rng, rng.randint(3, 12))

    def fill(found: re.Match) -> str:
        return str(rng.randint(1, 12)) if found[0] == "#" else rng.choice(_SLOTS[found[0]])

    said = re.sub(r"\{\w\}|#", fill, rng.choice(_SAID[split]))
    said = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", said)
    return said[0].upper() + said[1:]


def _said(rng: random.Random, split: str) -> _Ink:
    """A sentence, a greeting, a heading or a quotation in one to three lines."""
    text = _english(rng, split)
    text = text.upper() if rng.random() < 0.12 else text.title() if rng.random() < 0.1 else text
    lines = min(rng.randint(1, 3), len(text.split()) // 2)  # one word in each would look strewn
    broken = textwrap.wrap(text, math.ceil(len(text) / lines) + 3)
    if rng.random() < 0.1:
        broken.append(f"- {rng.choice(_SLOTS['{N}'])}")
    return _written(rng, split, broken, rng.choice(("left", "center")))


def _paragraph(rng: random.Random, split: str) -> _Ink:
    """Three to eight lines, perhaps under a heading or as a list."""
    if rng.random() < 0.25:
        mark = rng.choice(("- ", "* ", "{}. ", "{}) "))
        lines = [mark.format(i + 1) + _english(rng, split) for i in range(rng.randint(3, 6))]
    else:
        text = " ".join(_english(rng, split) for _ in range(12))
        lines = textwrap.wrap(text, rng.randint(14, 42))[: rng.randint(3, 8)]
    if rng.random() < 0.2:
        lines = [_english(rng, split).rstrip(".?:"), "", *lines]
    return _written(rng, split, lines, rng.choice(("left", "left", "center")))


def _numbers(rng: random.Random, split: str) -> _Ink:
    """A date, a telephone's number, a price, a sum; or a table or a receipt."""
    forms = [rng.choice(_NUMBERS) for _ in range(rng.choice((1, 1, 2, 3)))]
    if table := rng.random() < 0.5:
        columns = rng.choices(("~.##", "~##", "~.#", "$~#.##"), k=rng.randint(1, 3))
        forms = ["   ".join(columns)] * rng.randint(3, 7)
    lines = [re.sub("[#~]", lambda one: str(rng.randint(one[0] == "~", 9)), form) for form in forms]
    if table and rng.random() < 0.7:
        lines = [f"{looks.word(rng, 0.1, split).capitalize()}   {line}" for line in lines]
    return _written(rng, split, lines, "right" if table else "left")


def _ground(rng: random.Random, size) -> tuple[Image.Image, tuple[int, int, int]]:
    """A ground that is mostly white or light, and an ink for it that is mostly dark."""
    which = rng.random()
    if which < 0.15:
        return Image.new("RGB", size, _tone(rng, 0, 60)), _tone(rng, 180, 255)
    ink = (0, 0, 0) if which < 0.5 else _tone(rng, 0, 110 if which < 0.8 else 190)
    if which < 0.65:
        return Image.new("RGB", size, (255, 255, 255) if rng.random() < 0.7 else _tone(rng, 215, 255)), ink
    return paint_background(looks.background(rng, [ink]), size), ink


def _alone(write: Callable[[random.Random, str], _Ink]) -> _Draw:
    """An image of what `write` says and nothing else, from filling it to small."""

    def draw(rng: random.Random, size, split) -> Image.Image:
        least = max(11, 0.04 * max(size))  # pixels of type, for which small images may have no room
        tried: list[tuple[float, _Ink]] = []
        while len(tried) < 4 and (not tried or tried[-1][0] < least):
            mask = (ink := write(rng, split))(32.0)
            tried.append((32 * min(0.93 * size[0] / mask.width, 0.93 * size[1] / mask.height), ink))
        most, ink = max(tried, key=lambda one: one[0])
        mask = ink(max(most * rng.uniform(0.3, 1.0), min(most, least)))
        mask.thumbnail((0.95 * size[0], 0.95 * size[1]), Image.Resampling.LANCZOS)  # type has whole pixels
        image, colour = _ground(rng, size)
        off = 0.4 if rng.random() < 0.4 else 0.0  # from the middle
        x, y = (rng.uniform(0.5 - off, 0.5 + off) for _ in size)
        image.paste(colour, (round(x * (size[0] - mask.width)), round(y * (size[1] - mask.height))), mask)
        return image

    return draw


_OF_SIGNS = (
    "segno/__init__.py", "resvg_py/__init__.py", "fontTools/__init__.py", "deckr_fonts/fonts",
    "matplotlib/mathtext.py", "justmyresource_lucide/icons.zip", "justmyresource_material_icons/icons.zip",
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
    ("code", _sign("code")), ("numbers", _alone(_numbers)), ("paragraph", _alone(_paragraph)),
    ("formula", _alone(_formula)), ("formula", _alone(_formula)),
    ("sentence", _alone(_said)), ("sentence", _alone(_said)),
)  # fmt: skip
_MORE_OFTEN = (  # the most like drawn shapes and words
    *(("icon", _sign("icons")), ("emoji", _sign("emoji"))) * 3,
    *(("formula", _alone(_formula)), ("sentence", _alone(_said))) * 2,
)
