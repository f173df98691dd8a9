"""Answers and targets to score: hand-made ones about every rule of a metric, and 1,000 drawn ones of a kind.

Drawn answers are mostly near a target: unrelated texts would only ever score 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

HAND_MADE = Path(__file__).resolve().parent / "fixtures" / "metric_cases.yaml"
DRAWN = 1000
LETTERS = "ABCDEFGH"
WORDS = """
    red blue two 2 ten 10 none 0 the a an cat dog's dogs dont don't couldntve hes what's street no. 5 1,000
    12.5 u.s.a. left-right yes no stop/go (sign) coca-cola isnt it's its mr. t-shirt 50% $3.50 café Straße
    東京 one zero THE An o'clock yall'll wheres at&t a.m. 3pm "quoted" semi;colon under_score e=mc @home
    <b> [x]
"""
SPACES = (" ", " ", " ", "  ", "\n", "\t")


@dataclass(frozen=True)
class Case:
    answer: str
    targets: list[str]
    fields: dict[str, Any] = field(default_factory=dict)


def phrase(draw: random.Random, longest: int = 4) -> str:
    words = draw.choices(WORDS.split(), k=draw.randint(1, longest))
    return "".join(word + draw.choice(SPACES) for word in words[:-1]) + words[-1]


def disturbed(draw: random.Random, text: str) -> str:
    """The text with up to three small changes, or none."""
    for _ in range(draw.choice((0, 0, 1, 1, 2, 3))):
        at = draw.randint(0, len(text))
        text = draw.choice(
            (
                text[:at] + text[at + 1 :],
                text[:at] + draw.choice("aeiost ,.'-/?!5%\n") + text[at:],
                draw.choice((text.upper(), text.lower(), text.title())),
                draw.choice(("a ", "the ", " ", "\t", "")) + text,
                text + draw.choice((".", " ", "?", "!", "\n", "")),
                text.replace(" ", draw.choice(("", "  ", "-", ", "))),
                text.replace("'", "").replace("two", "2").replace("10", "ten"),
            )
        )
    return text


def vqa_case(draw: random.Random) -> Case:
    said = [phrase(draw) for _ in range(draw.randint(1, 3))]
    targets = [disturbed(draw, draw.choice(said)) for _ in range(10)]
    return Case(disturbed(draw, draw.choice((*said, draw.choice(targets)))), targets)


def text_case(draw: random.Random) -> Case:
    targets = [phrase(draw) for _ in range(draw.randint(1, 3))]
    return Case(disturbed(draw, disturbed(draw, draw.choice(targets))), targets)


def number_case(draw: random.Random) -> Case:
    ranges = (draw.randint(-5, 20), draw.randint(1900, 2030), draw.uniform(-2, 2), 1e6 * draw.random())
    shape = draw.choice((str, "{:.2f}".format, "{:.0f}".format, "{:.1e}".format, "{:,.1f}".format))
    target = shape(draw.choice(ranges)) + draw.choice(("", "", "", "%", " %", "%%", " ", " million"))
    try:
        near = float(target.rstrip("% ")) * draw.choice((1, 0.95, 1.05, 0.9500001, 1.0499, 1.06, -1, 0.01))
    except ValueError:
        return Case(disturbed(draw, target), [target])
    shape = draw.choice((str, "{:.3f}".format, "{:.0f}".format, "{:.4e}".format))
    return Case(shape(near) + draw.choice(("", "", "%", ".", "\n")), [target])


def choice_case(draw: random.Random) -> Case:
    count = draw.choice((2, 4, 4, 4, 5))
    choices = [f"{phrase(draw, 2)} {n}" for n in range(count)]
    # One letter more than there are choices: some answers choose what does not exist.
    letter, other = draw.choice(LETTERS[: count + 1]), draw.choice(LETTERS[:count])
    form = draw.choice(written()["forms of choosing"])
    answer = form.format(letter, other, draw.choice(choices), draw.choice(choices))
    if draw.random() < 0.1:
        answer = disturbed(draw, answer)
    target = letter if letter in LETTERS[:count] and draw.random() < 0.6 else other
    return Case(answer, [target], {"choices": choices})


def yes_no_case(draw: random.Random) -> Case:
    plain, other = ("yes", "no", "Yes", "No"), ("Yes.", " no\n", "YES", "Yes, one", "not sure", "", "maybe")
    said = draw.choice(plain if draw.random() < 0.7 else other)
    return Case(said, [draw.choice(("yes", "no"))])


def caption_case(draw: random.Random) -> Case:
    words = WORDS.split()[:24]
    people = [" ".join(draw.choices(words, k=draw.randint(4, 12))) for _ in range(draw.randint(1, 5))]
    return Case(disturbed(draw, " ".join(draw.choices(draw.choice(people).split(), k=8))), people)


DRAW: dict[str, Callable[[random.Random], Case]] = {
    "vqa": vqa_case,
    "text": text_case,
    "number": number_case,
    "choice": choice_case,
    "yes_no": yes_no_case,
    "caption": caption_case,
}


@cache
def written() -> dict[str, list]:
    return yaml.safe_load(HAND_MADE.read_text(encoding="utf-8"))


def hand_made(kind: str) -> list[Case]:
    found = []
    for group in written()[kind]:
        targets = group["targets"]
        if "people" in group:
            targets = targets * group["people"] + ["something else"] * (10 - group["people"])
        fields = {"choices": group["choices"]} if "choices" in group else {}
        found += [Case(answer, targets, fields) for answer in group["answers"]]
    return found


def cases(kind: str) -> list[Case]:
    """All cases of a kind, the same ones every time."""
    draw = random.Random(f"metrics {kind}")
    return [*hand_made(kind), *(DRAW[kind](draw) for _ in range(DRAWN))]
