"""Drawn screens to click on: windows of buttons, fields, boxes to tick, menus and icons, with exact places.

    python -m shapes.screens --out runs/screens --n 2000    # train.jsonl, validation.jsonl and their images

Each row holds a screen, what to do (`ref`, "Press the Save button.") and the box of the one control to click
(`bbox`: x, y, width, height in pixels). Training and held-out screens share no layout, no word and no size.
Seeds say all; nothing is downloaded.

    --data '[{path: runs/screens/train.jsonl, boxes: {points: true, point: "{thing}"}}]'    # of train.py
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from data.boxes import COORDINATES, centre
from data.boxes import Box as Named
from messages import one_line

FORM = COORDINATES["qwen3-vl"]
Box = tuple[int, int, int, int]  # x1, y1, x2, y2 in pixels

# What is said on controls, and what to do with each.
_WORDS = {
    "button": "Save Cancel Send Print Apply Close Next Back Open Delete | Submit Reset Share Finish Retry",
    "field": "Name Email City Phone Street Title Country Date | Company Website Amount Password",
    "check": "Wrap Sound Backup Grid Ruler Hints | Sync Alerts Cache Zoom",
    "menu": "File Edit View Help Tools Format Window | Insert Table Layout Review Account",
    "icon": "Home Search Mail Music Photos Clock Maps | Camera Notes Games Books Wallet",
}  # fmt: skip
_ORDERS = {
    "button": ("Click {}.", "Press the {} button."),
    "field": ("Click the field {}.", "Fill in {}."),
    "check": ("Tick {}.", "Click the box {}."),
    "menu": ("Open the menu {}.", "Click {} in the menu."),
    "icon": ("Click the icon {}.", "Start {}."),
}
SPLITS = ("train", "heldout")
_SIZES = {"train": ((320, 240), (256, 256), (240, 320)), "heldout": ((300, 260), (260, 300))}
# Of each layout the groups of controls: kind, columns, rows, and its box in hundredths of the screen.
_Layout = tuple[tuple[str, int, int, Box], ...]
_FOR_TRAINING: tuple[_Layout, ...] = (
    (("field", 1, 3, (5, 14, 95, 56)), ("check", 2, 1, (5, 58, 95, 74)), ("button", 3, 1, (9, 80, 98, 96))),
    (("menu", 4, 1, (0, 11, 100, 22)), ("icon", 4, 1, (3, 25, 97, 52)), ("field", 1, 2, (5, 58, 95, 92))),
    (("icon", 3, 2, (4, 14, 62, 72)), ("button", 1, 4, (66, 16, 98, 90)), ("check", 2, 1, (4, 78, 62, 94))),
    (("menu", 3, 1, (0, 11, 80, 22)), ("check", 1, 4, (5, 28, 50, 90)), ("button", 1, 3, (56, 30, 96, 88))),
)
_HELD_OUT: tuple[_Layout, ...] = (
    (("icon", 1, 3, (2, 14, 28, 96)), ("button", 2, 1, (32, 14, 98, 30)), ("field", 1, 3, (34, 38, 96, 94))),
    (("button", 2, 2, (20, 16, 80, 52)), ("check", 3, 1, (3, 60, 97, 74)), ("menu", 4, 1, (0, 88, 99, 99))),
)
_LAYOUTS = {"train": _FOR_TRAINING, "heldout": _HELD_OUT}
_ACCENTS = {
    "train": ((40, 90, 200), (30, 130, 90), (120, 70, 160)),
    "heldout": ((190, 90, 30), (20, 120, 140)),
}
_GROUNDS = ((245, 245, 247), (228, 232, 238), (250, 246, 238))
_INK, _LINE, _WHITE = (28, 30, 34), (130, 134, 142), (255, 255, 255)


@dataclass(frozen=True)
class Control:
    """What can be clicked: `box` is all of it, and the only place that it is drawn in, but for a field's
    name, which stands to its left."""

    kind: str
    text: str
    box: Box


@dataclass(frozen=True)
class Screen:
    """`seed` is of what no question is about: icons, what fields hold, ticks."""

    size: tuple[int, int]
    controls: tuple[Control, ...]
    accent: tuple[int, int, int]
    ground: tuple[int, int, int]
    seed: int


def words(kind: str, split: str) -> list[str]:
    """What controls of a kind may say."""
    return _WORDS[kind].split("|")[SPLITS.index(split)].split()


def sample_screen(rng: random.Random, split: str = "train") -> Screen:
    """A screen on which no word stands twice."""
    size = rng.choice(_SIZES[split])
    controls = []
    for kind, columns, rows, area in rng.choice(_LAYOUTS[split]):
        cells = [*_cells(area, columns, rows, size)]
        shown = sorted(rng.sample(range(len(cells)), rng.randint((len(cells) + 1) // 2, len(cells))))
        for cell, text in zip(shown, rng.sample(words(kind, split), len(shown)), strict=True):
            controls.append(Control(kind, text, _within(cells[cell], kind, rng)))
    looks = rng.choice(_ACCENTS[split]), rng.choice(_GROUNDS), rng.randrange(2**32)
    return Screen(size, tuple(controls), *looks)


def _cells(area: Box, columns: int, rows: int, size: tuple[int, int]) -> Iterator[Box]:
    x1, y1, x2, y2 = (value * side // 100 for value, side in zip(area, size * 2, strict=True))
    for row in range(rows):
        for column in range(columns):
            across, down = (x2 - x1) / columns, (y2 - y1) / rows
            corner = x1 + column * across, y1 + row * down
            yield tuple(map(round, (*corner, corner[0] + across, corner[1] + down)))  # type: ignore[misc]


def _within(cell: Box, kind: str, rng: random.Random) -> Box:
    """A control's box in its cell: smaller by some, and to the right of a field's name."""
    x1, y1, x2, y2 = cell
    width, height = x2 - x1, y2 - y1
    least = 0.42 if kind == "field" else 0.02
    left, right = (round(width * rng.uniform(low, low + 0.1)) for low in (least, 0.02))
    top, bottom = (round(height * rng.uniform(0.06, 0.14)) for _ in range(2))
    return x1 + left, y1 + top, x2 - right, y2 - bottom


def order(control: Control, rng: random.Random) -> str:
    """What to do, in words that only this control of its screen fits."""
    return rng.choice(_ORDERS[control.kind]).format(control.text)


# ---------------------------------------------------------------------------------------------- drawing
@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _write(draw: ImageDraw.ImageDraw, text: str, box: Box, fill, anchor: str = "mm") -> None:
    """As large as it fits; "lm": from the left, "rm": from the right, "mm": in the middle."""
    x1, y1, x2, y2 = box
    size = min(18, max(7, int((y2 - y1) * 0.72)))
    while size > 7 and draw.textlength(text, _font(size)) > x2 - x1 - 4:
        size -= 1
    x = {"l": x1 + 2, "m": (x1 + x2) / 2, "r": x2 - 2}[anchor[0]]
    draw.text((x, (y1 + y2) / 2), text, fill, _font(size), anchor)


def render_screen(screen: Screen) -> Image.Image:
    image, rng = Image.new("RGB", screen.size, screen.ground), random.Random(screen.seed)
    draw, bar = ImageDraw.Draw(image), screen.size[1] // 10
    draw.rectangle((0, 0, screen.size[0], bar), screen.accent)
    for number in range(3):
        right = screen.size[0] - 5 - number * bar // 2
        draw.ellipse((right - bar // 3, bar // 3, right, 2 * bar // 3), _WHITE)
    for control in screen.controls:
        _DRAWN[control.kind](draw, control, screen, rng)
    return image


def _button(draw, control: Control, screen: Screen, rng: random.Random) -> None:
    filled = rng.random() < 0.5
    draw.rounded_rectangle(_inside(control.box), 4, screen.accent if filled else _WHITE, screen.accent, 2)
    _write(draw, control.text, control.box, _WHITE if filled else screen.accent)


def _field(draw, control: Control, screen: Screen, rng: random.Random) -> None:
    x1, y1, x2, y2 = control.box
    _write(draw, control.text, (x1 - round(0.7 * (x2 - x1)), y1, x1 - 3, y2), _INK, "rm")
    draw.rectangle(_inside(control.box), _WHITE, _LINE)
    _write(draw, "·" * rng.randint(0, 6), control.box, _LINE, "lm")


def _check(draw, control: Control, screen: Screen, rng: random.Random) -> None:
    x1, y1, x2, y2 = control.box
    side = min(16, y2 - y1 - 2)
    top = (y1 + y2 - side) // 2
    draw.rectangle((x1, top, x1 + side, top + side), _WHITE, _INK)
    if rng.random() < 0.5:
        ticked = ((x1 + 3, top + side // 2), (x1 + side // 2, top + side - 3), (x1 + side - 2, top + 3))
        draw.line(ticked, screen.accent, 2)
    _write(draw, control.text, (x1 + side + 2, y1, x2, y2), _INK, "lm")


def _menu(draw, control: Control, screen: Screen, rng: random.Random) -> None:
    _write(draw, control.text, control.box, _INK)
    draw.line((control.box[0], control.box[3] - 1, control.box[2] - 1, control.box[3] - 1), _LINE)


def _icon(draw, control: Control, screen: Screen, rng: random.Random) -> None:
    x1, y1, x2, y2 = control.box
    side, middle = min((y2 - y1) * 6 // 10, x2 - x1 - 2), (x1 + x2) // 2
    draw.rounded_rectangle((middle - side // 2, y1, middle + side // 2 - 1, y1 + side), 6, screen.accent)
    centre, sides = (middle, y1 + side // 2, side // 4), rng.choice((0, 3, 4, 5))
    if sides:
        draw.regular_polygon(centre, sides, rng.choice((0, 45)), _WHITE)
    else:
        draw.circle(centre[:2], centre[2], _WHITE)
    _write(draw, control.text, (x1, y1 + side, x2, y2), _INK)


_DRAWN = {"button": _button, "field": _field, "check": _check, "menu": _menu, "icon": _icon}


def _inside(box: Box) -> Box:
    """The pixels of a box, as Pillow counts them: the last one is drawn."""
    return box[0], box[1], box[2] - 1, box[3] - 1


# ----------------------------------------------------------------------------------------------- as rows
def screen_row(seed: int, split: str, every: bool = False) -> tuple[Image.Image, dict]:
    """A screen and a question about it: {"ref", "bbox", "kind"}; or a conversation about `every` control, in
    any order: {"messages"}."""
    rng = random.Random(f"screens:{split}:{seed}")
    screen = sample_screen(rng, split)
    control = rng.choice(screen.controls)
    x1, y1, x2, y2 = control.box
    row: dict = {"ref": order(control, rng), "bbox": [x1, y1, x2 - x1, y2 - y1], "kind": control.kind}
    if every:
        row = {"messages": []}
        for one in rng.sample(screen.controls, len(screen.controls)):
            point = FORM.write([centre(Named("", one.box))], screen.size)
            row["messages"] += [
                {"role": "user", "content": order(one, rng)},
                {"role": "assistant", "content": point},
            ]
    return render_screen(screen), row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m shapes.screens", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the images and rows")
    parser.add_argument("--n", type=int, default=2000, help="number of screens to train on (default 2000)")
    parser.add_argument("--held-out", type=int, default=200, help="number of other screens (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first screen (default 0)")
    parser.add_argument("--every", action="store_true", help="train on conversations about all controls")
    args = parser.parse_args(arguments)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        for split, name, count in zip(SPLITS, ("train", "validation"), (args.n, args.held_out), strict=True):
            with (args.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                for number in range(args.seed, args.seed + count):
                    image, row = screen_row(number, split, args.every and split == "train")
                    path = f"{name}-{number:06d}.png"
                    image.save(args.out / path)
                    file.write(json.dumps({"image": path, **row}) + "\n")
    except OSError as error:
        parser.error(one_line(error))


if __name__ == "__main__":
    main()
