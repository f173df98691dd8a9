"""How strangers draw: colours by several definitions, fonts, words, grounds, and the sizes of images.

Of colours and fonts some are held out: a `split` of "train" never draws with those of "heldout".
"""

from __future__ import annotations

import math
import random
import string
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from shapes.sampling import contrast
from shapes.world import RGB, WORDS, Background

TRAIN, HELDOUT = "train", "heldout"
# What each colour is by CSS names, matplotlib's "tab" and one-letter colours, Material's shade 500, and by
# Bootstrap, Flat UI, Google, Office, Pico-8, Open Color and Solarized.
_TRAIN_COLOURS = {
    "red": ("ff0000", "dc143c", "b22222", "d62728", "f44336", "e6194b", "dc3545", "e74c3c", "c0392b",
            "ea4335", "c00000", "ff004d", "fa5252", "dc322f", "8b0000", "cd5c5c"),
    "orange": ("ffa500", "ff8c00", "ff7f0e", "ff9800", "f58231", "fd7e14", "e67e22", "ed7d31", "ffa300",
               "cb4b16"),
    "yellow": ("ffff00", "ffd700", "ffeb3b", "bfbf00", "ffe119", "ffc107", "f1c40f", "fbbc04", "ffec27",
               "fcc419", "f0e442"),
    "green": ("008000", "00ff00", "32cd32", "228b22", "2ca02c", "4caf50", "3cb44b", "198754", "2ecc71",
              "27ae60", "34a853", "00b050", "92d050", "00e436", "008751", "40c057", "859900", "006400",
              "90ee90"),
    "blue": ("0000ff", "4169e1", "1e90ff", "0000cd", "1f77b4", "2196f3", "000080", "0d6efd", "3498db",
             "2980b9", "4285f4", "0070c0", "29adff", "228be6", "268bd2", "6495ed", "4682b4", "4472c4"),
    "purple": ("800080", "663399", "9400d3", "8a2be2", "9467bd", "9c27b0", "6f42c1", "9b59b6", "8e44ad",
               "7030a0", "7950f2", "4b0082", "9932cc", "911eb4"),
    "pink": ("ffc0cb", "ff69b4", "ff1493", "e377c2", "ffb6c1", "d63384", "ff77a8", "e64980", "fd79a8",
             "faa2c1", "e91e63"),
    "black": ("000000", "141414", "212121", "212529", "1a1a1a", "111111"),
}  # fmt: skip
# Tailwind's, Material's other shades, a telephone's, Dracula's, Nord's and those of a game engine.
_HELDOUT_COLOURS = {
    "red": ("ef4444", "d32f2f", "ff3b30", "ff5555", "bf616a", "e53935"),
    "orange": ("f97316", "f57c00", "ff9500", "ffb86c", "fb8c00"),
    "yellow": ("facc15", "fbc02d", "ffcc00", "eab308", "fdd835"),
    "green": ("22c55e", "388e3c", "34c759", "16a34a", "43a047", "50fa7b"),
    "blue": ("3b82f6", "1976d2", "007aff", "2563eb", "5e81ac"),
    "purple": ("a855f7", "7b1fa2", "8944ab", "9333ea", "6a1b9a"),
    "pink": ("ec4899", "f06292", "ff2d92", "ff79c6", "f472b6"),
    "black": ("111827", "0a0a0a", "1c1c1e", "0f172a"),
}

# fmt: off
MORE_WORDS = tuple(
    """
    able acid aged also area army aunt away baby back bake ball band bank barn bath bean beef bell belt
    bench bike bill bite black blue boot born bowl boy brain brick bridge brown bus bush butter button
    cafe cage calm camel camp candle car card care carpet cart castle chair chalk cheese cherry chess
    child church city class clay clean cliff cloud coal coast coat coffee coin cold cook corn cotton cow
    crab crane cream crow crown dance dark day deer desk dinner dish doll dollar dragon dream dress drink
    drum dry eagle ear earth east easy eight elbow empty engine evening eye face fair fall farm fast fat
    father feet fence field fig fire first five flag flat floor flower fly fog food foot forest fork four
    fox free fresh friend fruit full garden gate ghost giant gift girl glad glass glove goat gold good
    goose grape grass gray great green ground guitar hair half hall ham hammer happy hat hay head heart
    heavy hello help hen hill hive hole home honey hook horse hot hotel hour ice idea ink iron island
    jacket jar job joy juice jump kettle kid kind kite knee knife ladder lake land late laugh lawn lemon
    letter light lime line lion lip list lock log long lorry love lucky lunch mail man map market mask
    meal meat melon metal milk mine mint mirror money monkey month morning moss mother mouse mouth mud
    music nail name neck needle nest net new night nine north nose note nurse nut oak ocean office oil old
    olive one onion open orange oven owl paint palm pan paper park party path pea peach pear pen pencil
    penny people pepper piano picture pie pilot pink pipe plane plant plate plum pocket poem pond pony
    post pot potato pound purple quick quiet rabbit radio rat red rice right ring river road robot rock
    roof room root rope rose round ruler salad salt sand school sea seat seed seven sheep shelf shell ship
    shirt shop short silk silver sister six skin sky sleep slow small smile smoke snail soap sock sofa
    soft son song soup south space spoon spring stamp star start steel stone stop store storm story street
    sugar summer swan sweet swim table tail tall tape taxi tea ten test thin three tiger time tin toe
    tomato tooth top town toy train truck turtle two uncle valley van vase voice wagon wall warm watch
    water wave wax wedding week west wheat wheel white wide wind window wine wing winter woman wood wool
    word world yard year yellow yes young zero zoo
    """.split()  # noqa: SIM905
)
# fmt: on
MAX_LETTERS = 10
SMALLEST_IMAGE = 64  # pixels of the longer side


def package_file(name: str) -> Path:
    """A file or folder of an installed package, by its path in there; FileNotFoundError without it."""
    package, _, rest = name.partition("/")
    spec = find_spec(package)
    path = Path(spec.submodule_search_locations[0]) / rest if spec else Path(name)  # type: ignore[index]
    if not path.exists():
        raise FileNotFoundError(f"{name}: not installed; pip install -r recipes/world/requirements.txt")
    return path


def colour(rng: random.Random, name: str, split: str) -> tuple[int, int, int]:
    """An RGB that `name` may mean: of a known palette, or near the line between two shades of it."""
    if split != TRAIN:
        shade = bytes.fromhex(rng.choice(_HELDOUT_COLOURS[name]))
    else:
        known = [RGB[name], *(tuple(bytes.fromhex(one)) for one in _TRAIN_COLOURS[name])]
        one, other = rng.choice(known), rng.choice(known)
        part = rng.random() if rng.random() < 0.3 else 0.0
        shade = bytes(round(a + part * (b - a)) for a, b in zip(one, other))
    return tuple(min(255, max(0, c + rng.randint(-6, 6))) for c in shade)  # type: ignore


@cache
def common_words(split: str) -> tuple[str, ...]:
    """Of the EFF's long list of words that people know, which xkcdpass brings; every fifth is held out."""
    listed = package_file("xkcdpass/static/eff-long").read_text(encoding="utf-8").split()
    known = [one for one in listed if one.isascii() and one.isalpha() and len(one) <= MAX_LETTERS]
    return tuple(one for i, one in enumerate(known) if (i % 5 == 0) == (split != TRAIN))


def word(rng: random.Random, letters: float = 0.4, split: str = TRAIN) -> str:
    """A word, or, with probability `letters`, letters that form no word."""
    which = rng.random() / (1 - letters)
    if which < 1:
        return rng.choice(WORDS if which < 0.1 else MORE_WORDS if which < 0.3 else common_words(split))
    if rng.random() < 0.5:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, MAX_LETTERS)))
    return _invented(rng)


@cache
def _followers() -> dict[str, str]:
    """What letters follow each pair of letters in the words, as often as they do; "" ends one."""
    found: dict[str, str] = {}
    for known in (*WORDS, *MORE_WORDS):
        for i in range(len(known) + 1):
            before = f"^^{known}"[i : i + 2]
            found[before] = found.get(before, "") + f"{known}$"[i]
    return found


def _invented(rng: random.Random) -> str:
    """Letters that follow one another as in words: mostly no word, and sometimes one that is not listed."""
    while True:
        made = ""
        while len(made) <= MAX_LETTERS and (letter := rng.choice(_followers()[f"^^{made}"[-2:]])) != "$":
            made += letter
        if 2 <= len(made) <= MAX_LETTERS:
            return made


def background(rng: random.Random, inks: list[tuple]) -> Background:
    """Of any colour from which all of the inks stand out: often white, flat oftener than not."""
    first: tuple[int, ...] = (255, 255, 255)
    for _ in range(40):
        which = rng.random()
        if which < 0.35:
            first = (255, 255, 255)
        elif which < 0.75:
            first = tuple(rng.randint(200, 255) for _ in range(3))
        else:
            grey = rng.randint(0, 255)
            first = tuple(min(255, max(0, grey + rng.randint(-50, 50))) for _ in range(3))
        if all(contrast(first, ink) >= 90 for ink in inks):
            break
    kind = rng.choices(("plain", "gradient", "stripes", "noise", "dots", "lines"), (10, 3, 2, 3, 2, 2))[0]
    second = first
    if kind != "plain":
        for _ in range(20):
            second = tuple(min(255, max(0, c + rng.randint(-40, 40))) for c in first)
            if all(contrast(second, ink) >= 80 for ink in inks):
                break
        else:
            second = first
    return Background(kind, first, second, rng.randrange(8))


def image_size(rng: random.Random, smallest: int = SMALLEST_IMAGE) -> int:
    """Pixels of a drawing's longer side: from `smallest` to 2,000, of which most are a few hundred."""
    if rng.random() < 0.04:
        return rng.randint(800, 2000)
    return round(math.exp(rng.uniform(math.log(smallest), math.log(800))))
