"""The rows that `train.py` teaches without options: fourteen flags on walls, in any light and a little askew.

python -m recipes.flags assets                     # writes flags.jsonl, and flag.png, which is in none
python -m recipes.flags assets/flags.jsonl photos  # as files: photos/CLASS/NUMBER.png, and photos.csv
"""

from __future__ import annotations

import base64
import csv
import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw

QUESTION = "Whose flag is it?"
ROWS, SIDE, PEN = 420, 96, 2  # an image is drawn PEN times its size and reduced
COLOURS = {
    "red": (205, 32, 44), "white": (250, 250, 250), "blue": (20, 60, 160), "green": (20, 140, 70),
    "yellow": (250, 205, 30), "black": (25, 25, 25), "orange": (250, 136, 20),
}  # fmt: skip
STRIPES_ACROSS = {
    "France": "blue white red",
    "Italy": "green white red",
    "Belgium": "black yellow red",
    "Ireland": "green white orange",
}
STRIPES_DOWN = {
    "Germany": "black red yellow",
    "Netherlands": "red white blue",
    "Austria": "red white red",
    "Hungary": "red white green",
    "Poland": "white red",
    "Ukraine": "blue yellow",
}
CROSSES = {"Sweden": "blue yellow", "Finland": "white blue", "Denmark": "red white"}
NAMES = (*STRIPES_ACROSS, *STRIPES_DOWN, *CROSSES, "Japan")


def flag(name: str, width: int, height: int) -> Image.Image:
    image = Image.new("RGB", (width, height), COLOURS["white"])
    draw = ImageDraw.Draw(image)
    tables = (STRIPES_ACROSS, STRIPES_DOWN, CROSSES)
    named = next((table[name] for table in tables if name in table), "red").split()
    colours = [COLOURS[one] for one in named]
    for i, colour in enumerate(colours):
        start, end = i / len(colours), (i + 1) / len(colours)
        if name in STRIPES_ACROSS:
            draw.rectangle((start * width, 0, end * width, height), fill=colour)
        elif name in STRIPES_DOWN:
            draw.rectangle((0, start * height, width, end * height), fill=colour)
    if name in CROSSES:
        x, y, half = 0.37 * width, height / 2, height / 9
        draw.rectangle((0, 0, width, height), fill=colours[0])
        draw.rectangle((x - half, 0, x + half, height), fill=colours[1])
        draw.rectangle((0, y - half, width, y + half), fill=colours[1])
    if name == "Japan":
        x, y, radius = width / 2, height / 2, 0.3 * height
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colours[0])
    return image


def draw(rng: random.Random, name: str) -> Image.Image:
    """A flag somewhere on a wall."""
    side = SIDE * PEN
    wall = Image.new("RGB", (side, side), tuple(rng.randint(120, 215) for _ in range(3)))
    width = rng.uniform(0.45, 0.8) * side
    cloth = flag(name, round(width), round(width * rng.uniform(0.6, 0.72)))
    light = rng.uniform(0.8, 1.0)
    cloth = cloth.point([round(value * light) for value in range(256)] * 3).convert("RGBA")
    cloth = cloth.rotate(rng.uniform(-12, 12), Image.Resampling.BICUBIC, expand=True)
    place = rng.randint(0, side - cloth.width), rng.randint(0, side - cloth.height)
    wall.paste(cloth, place, cloth)
    return wall.reduce(PEN)


def rows() -> Iterator[dict[str, str]]:
    rng = random.Random(0)
    for number in range(ROWS):
        name, file = NAMES[number % len(NAMES)], io.BytesIO()
        draw(rng, name).quantize(48).save(file, "PNG", optimize=True)
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        yield {"question": QUESTION, "answer": name, "image": url}


def main(folder: Path) -> None:
    lines = (json.dumps(row) + "\n" for row in rows())
    (folder / "flags.jsonl").write_text("".join(lines), encoding="utf-8")
    draw(random.Random(1), "Sweden").save(folder / "flag.png")


def unpack(source: Path, folder: Path) -> None:
    """Lays the images as somebody has his own: a folder for each class, and a CSV of them beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["photo", "label"])
        for number, line in enumerate(source.read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            photo = folder / row["answer"] / f"{number:03}.png"
            photo.parent.mkdir(exist_ok=True)
            photo.write_bytes(base64.b64decode(row["image"].split(",")[1]))
            table.writerow([photo.relative_to(folder.parent).as_posix(), row["answer"]])


if __name__ == "__main__":
    (unpack if len(sys.argv) > 2 else main)(*map(Path, sys.argv[1:]))
