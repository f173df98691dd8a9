"""Words for made pages: sentences, names, dates, amounts and code, from a vocabulary written for them.

Each function takes a `random.Random`, and the same state gives the same text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


def _split(text: str, mark: str | None = None) -> list[str]:
    return [one.strip() for one in text.strip().split(mark)]


# fmt: off
_THINGS = _split("""
    bridge ferry harbour orchard workshop kiln lantern archive ledger meadow pump sluice turbine greenhouse
    quarry mill canal depot signal platform kitchen bakery loom anchor barge beacon cistern gate hedge
    lighthouse market nursery pavilion ramp reservoir station tower vineyard weir yard boiler compass crane
    filter furnace gauge hinge ladder lever panel pipe pulley shelter sensor shutter spring tank valve wheel
""")
_PEOPLE = _split("""
    carpenter gardener surveyor miller teacher engineer clerk baker sailor nurse printer weaver keeper mason
    librarian driver porter inspector apprentice treasurer
""")
_LOOKS = _split("""
    narrow old quiet small broad careful cheap copper damp dry early eastern empty even fresh heavy late
    light long low modest northern open plain public rough short slow solid southern steady steep thin warm
    western wooden yearly
""")
_DOES = _split("""
    carries checks cleans closes counts covers crosses feeds fills holds keeps lifts measures moves needs
    opens paints repairs replaces shows stores supplies turns warms watches
""")
_WHEN = _split("""
    in spring|after the flood|before noon|every second week|during the winter|since the last survey
    |on market days|at low water|for eleven years|without a pause|as the plan requires|in most rooms
    |near the old wall|between the two gates|at the end of each shift|under a tin roof
""", "|")
_LINKS = ("and", "but", "while", "because", "so", "although")
_OPENERS = ("In the second year", "By contrast", "As a rule", "From then on", "On the other hand", "At first")
_FIRST = _split("Ada Bruno Clara Dorte Emil Frida Goran Hilde Ivo Jonna Karel Lotte Milan Nora Otto Petra")
_LAST = _split("""
    Almquist Barrow Castellan Dunmore Esker Fenwick Garrod Holloway Ibsen Jarrow Kestrel Lindqvist Marlowe
    Norling Ostrow Pellman Quarles Rosco Sandell Thornby
""")
_PLACES = _split("""
    Ashby Brindle Corran Dunwick Elmstead Farrow Glenholt Harwick Inverley Kelder Lowmoor Mossend
""")
_STREETS = _split("Mill Lane|Quay Street|Orchard Road|Station Hill|Weir Close|Tower Row|Canal Walk", "|")
_MONTHS = _split("""
    January February March April May June July August September October November December
""")
_GOODS = _split("""
    oat bread|rye rolls|goat cheese|plum jam|barley soup|apple juice|black tea|honey, 250 g|smoked trout
    |potatoes, 2 kg|lamp oil|candles|linen thread|soap|nails, 40 mm|twine|seed packets|paper bags|matches
    |walnut cake|ginger beer|pickled beets
""", "|")
_UNITS = ("kg", "km", "litres", "hours", "m²", "tonnes", "%")
_NAMES = _split("count total row level size rate limit queue batch offset width cache score index")
# fmt: on


def some(rng: random.Random, words: Sequence[str]) -> str:
    return rng.choice(words)


def noun_phrase(rng: random.Random) -> str:
    """ "the narrow bridge", "each gardener" """
    first = some(rng, ("the", "the", "the", "each", "every", "this", "one"))
    look = some(rng, _LOOKS) + " " if rng.random() < 0.55 else ""
    return f"{first} {look}{some(rng, _THINGS if rng.random() < 0.7 else _PEOPLE)}"


def _clause(rng: random.Random) -> str:
    clause = f"{noun_phrase(rng)} {some(rng, _DOES)} {noun_phrase(rng)}"
    if rng.random() < 0.45:
        clause += " " + some(rng, _WHEN)
    elif rng.random() < 0.25:
        clause += f" by {quantity(rng)}"
    return clause


def sentence(rng: random.Random) -> str:
    text = _clause(rng)
    if rng.random() < 0.45:
        link = some(rng, _LINKS)
        text += f"{',' if link != 'and' else ''} {link} {_clause(rng)}"
    if rng.random() < 0.15:
        text = f"{some(rng, _OPENERS)}, {text}"
    if rng.random() < 0.08:
        text += f" ({some(rng, _PLACES)}, {rng.randint(1890, 2024)})"
    return text[0].upper() + text[1:] + "."


def paragraph(rng: random.Random, least: int = 2, most: int = 6) -> str:
    return " ".join(sentence(rng) for _ in range(rng.randint(least, most)))


def heading(rng: random.Random) -> str:
    """ "Repairs of the narrow bridge" """
    first = some(rng, ("Repairs of", "Notes on", "Costs of", "Use of", "Plans for", "Care of", "Limits of"))
    thing = f"{some(rng, _LOOKS)} {some(rng, _THINGS)}"
    form = rng.randrange(3)
    if form == 0:
        return f"{first} the {thing}"
    return plural(thing).capitalize() if form == 1 else f"The {thing} and the {some(rng, _THINGS)}"


def plural(noun: str) -> str:
    if noun.endswith(("sh", "ch", "s")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun[-1] == "y" and noun[-2] not in "aeiou" else f"{noun}s"


def label(rng: random.Random) -> str:
    """A short name of a row or column."""
    look = f"{some(rng, _LOOKS)} " if rng.random() < 0.4 else ""
    return f"{look}{some(rng, _THINGS)}".capitalize()


def item(rng: random.Random) -> str:
    """A line of a list."""
    return sentence(rng) if rng.random() < 0.3 else _clause(rng).capitalize()


def quantity(rng: random.Random) -> str:
    return f"{number(rng)} {some(rng, _UNITS)}"


def number(rng: random.Random) -> str:
    form = rng.randrange(4)
    if form == 0:
        return str(rng.randint(2, 99))
    if form == 1:
        return f"{rng.randint(1000, 98000):,}"
    return f"{rng.uniform(0.1, 90):.{form - 1}f}"


def money(rng: random.Random, most: int = 4000) -> float:
    return rng.randint(25, most) / 100


def person(rng: random.Random) -> str:
    return f"{some(rng, _FIRST)} {some(rng, _LAST)}"


def place(rng: random.Random) -> str:
    return some(rng, _PLACES)


def address(rng: random.Random) -> str:
    return f"{rng.randint(1, 99)} {some(rng, _STREETS)}, {place(rng)}"


def date(rng: random.Random) -> str:
    day, month, year = rng.randint(1, 28), rng.randrange(12), rng.randint(1995, 2025)
    forms = (
        f"{day} {_MONTHS[month]} {year}",
        f"{year}-{month + 1:02}-{day:02}",
        f"{day:02}.{month + 1:02}.{year}",
    )
    return some(rng, forms)


def goods(rng: random.Random) -> str:
    return some(rng, _GOODS).capitalize()


def formula(rng: random.Random) -> str:
    """LaTeX of a formula of a line."""
    a, b, c, x, n = rng.sample("abcdkmpqrstuvwxyz", 5)
    i, j, greek = (
        rng.randint(2, 9),
        rng.randint(2, 12),
        some(rng, ("alpha", "beta", "lambda", "theta", "sigma", "mu")),
    )
    forms = (
        rf"{a} = \frac{{{b} + {i}}}{{{c} - {j}}}",
        rf"{x}^{i} + {j}{x} - {i} = 0",
        rf"{x} = \frac{{-{b} \pm \sqrt{{{b}^2 - {i}{a}{c}}}}}{{2{a}}}",
        rf"\sum_{{{a}=1}}^{{{n}}} {a}^2 = \frac{{{n}({n}+1)(2{n}+1)}}{{6}}",
        rf"\int_0^{i} {x}^{j} d{x} = {c}",
        rf"\sqrt{{{a}^2 + {b}^2}} \leq {a} + {b}",
        rf"\{greek}_{i} = {a}\{greek}_{j} + {b}^{{{i}}}",
        rf"{a}({x}) = {i}{x}^2 - \frac{{{j}}}{{{x}}}",
        rf"\lim_{{{x} \to 0}} \frac{{\sin {x}}}{{{x}}} = 1",
        rf"\frac{{d{a}}}{{d{b}}} = -\{greek} {a}",
        rf"{a}_{{{i}}} \cdot {b}_{{{j}}} \geq \{greek}^{{-{i}}}",
    )  # fmt: skip
    return some(rng, forms)


def inline_formula(rng: random.Random) -> str:
    a, b = rng.sample("abcknpxyz", 2)
    i = rng.randint(2, 9)
    return some(rng, (rf"{a}_{i}", rf"{a}^{i}", rf"{a} = {i}{b}", rf"\sqrt{{{a}}}", rf"{a} \leq {i}"))


def code(rng: random.Random) -> tuple[str, str]:
    """A language's name and some lines of it."""
    a, b, c, d = rng.sample(_NAMES, 4)
    i, j = rng.randint(2, 99), rng.randint(2, 9)
    python = (
        f"def {a}_of({b}, {c}={i}):\n    {d} = 0\n    for {a} in {b}:\n        if {a} > {c}:\n"
        f"            {d} += {a} * {j}\n    return {d}",
        f"class {a.capitalize()}{b.capitalize()}:\n    def __init__(self, {c}: int) -> None:\n"
        f"        self.{c} = max({c}, {i})\n\n    def {d}(self) -> int:\n        return self.{c} // {j}",
        f"with open(\"{a}.csv\") as file:\n    {b} = [line.split(\",\") for line in file]\n"
        f"print(len({b}), sum(int({c}[{j}]) for {c} in {b}))",
    )  # fmt: skip
    c_like = (
        f"int {a}(const int *{b}, int {c}) {{\n    int {d} = {i};\n    for (int i = 0; i < {c}; i++) {{\n"
        f"        {d} += {b}[i] % {j};\n    }}\n    return {d};\n}}",
        f"static double {a}(double {b}) {{\n    if ({b} < {j}.0)\n        return {i}.0;\n"
        f"    return {b} / {j}.0;\n}}",
    )
    shell = (
        f"mkdir -p {a}\nfor {b} in *.txt; do\n    sort \"${b}\" | head -n {i} > \"{a}/${b}\"\ndone",
        f"grep -c \"{a}\" {b}.log\ncut -d , -f {j} {c}.csv | sort -n | tail -n {i}",
    )  # fmt: skip
    json_like = (f'{{\n  "{a}": {i},\n  "{b}": [{j}, {i}],\n  "{c}": {{"{d}": true}}\n}}',)
    language, texts = rng.choice((("Python", python), ("C", c_like), ("Bash", shell), ("JSON", json_like)))
    return language, some(rng, texts)
