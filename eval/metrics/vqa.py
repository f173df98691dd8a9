"""VQA accuracy: an answer is right as far as people agree with it.

Goyal et al., "Making the V in VQA Matter" (2017), after Antol et al., "VQA" (2015): an answer that at least 3
of 10 people gave scores 1. Each of the ten is left out in turn and the ten scores are averaged. What counts
as the same answer is set out at https://visualqa.org/evaluation.html; where its scorer does something that
the page does not say, so do we, and a comment says so.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from eval.metrics.base import Metric, MetricError, checked_targets, mean_score

STYLES = ("vqav2", "textvqa")
PEOPLE_THAT_AGREE = 3  # make an answer right

_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_DIGITS = {"none": "0"} | {word: str(number) for number, word in enumerate(_NUMBERS)}
_ARTICLES = {"a", "an", "the"}
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,+(?=\d)")
_PERIOD = re.compile(r"\.(?!\d)")
_PERIODS_REMOVED = 32  # the scorer passes re.UNICODE, 32, where `sub` takes how many to replace

# Words whose apostrophe is put back where one of them is missing.
_APOSTROPHES = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't
    haven't he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've
    might've mustn't must've needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've
    shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd someone'd've someone'll
    someone's something'd something'd've something'll that's there'd there'd've there're there's they'd
    they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've
    when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't
    would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""


@cache
def contractions() -> dict[str, str]:
    """A word without one of its apostrophes -> the word."""
    table = {"somebody'd": "somebodyd"}  # the wrong way round in the scorer, too
    for word in _APOSTROPHES.split():
        for place in (at for at, letter in enumerate(word) if letter == "'"):
            table[word[:place] + word[place + 1 :]] = word
    return table


def normalise(text: str, style: str = "vqav2") -> str:
    """The text as it is compared: lower case, digits for numbers, without articles and most punctuation."""
    if style == "textvqa":
        text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    return _words(_punctuation(text.strip().replace("\n", " ").replace("\t", " ").strip()))


def _punctuation(text: str) -> str:
    """A mark beside a space is removed, another becomes a space; all are removed beside a number's comma."""
    in_number, cleaned = _COMMA_IN_NUMBER.search(text) is not None, text
    for mark in _PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        cleaned = cleaned.replace(mark, "" if beside_space or in_number else " ")
    return _PERIOD.sub("", cleaned, count=_PERIODS_REMOVED)


def _words(text: str) -> str:
    words = [_DIGITS.get(word, word) for word in text.lower().split()]
    return " ".join(contractions().get(word, word) for word in words if word not in _ARTICLES)


def vqa_accuracy(
    answer: str,
    targets: Sequence[str],
    fields: Mapping[str, Any],
    *,
    style: str = "vqav2",
    skip_unanimous: bool = False,
) -> float:
    """The mean, over each person left out, of min(1, how many of the others gave this answer / 3)."""
    people = [target.replace("\n", " ").replace("\t", " ").strip() for target in checked_targets(targets)]
    answer = answer.replace("\n", " ").replace("\t", " ").strip() if style == "vqav2" else answer
    if not skip_unanimous or len(set(people)) > 1:
        people = [normalise(target, style) for target in (people if style == "vqav2" else targets)]
        answer = normalise(answer, style)
    agree = [person == answer for person in people]
    return statistics.mean(min(1, (sum(agree) - left_out) / PEOPLE_THAT_AGREE) for left_out in agree)


def vqa_metric(style: str = "vqav2", skip_unanimous: bool = False) -> Metric:
    """`vqa_accuracy`.

    Args:
        style: vqav2, or textvqa: commas, question marks and "'s" are treated first, as in MMF and EvalAI.
        skip_unanimous: where all people say the same, compare without any normalisation, as the scripts of
            the VQA challenge do and lmms-eval does not.
    """
    if style not in STYLES:
        raise MetricError(f"vqa_accuracy: expected style {' or '.join(STYLES)}, got {style!r}")
    return Metric(
        "vqa_accuracy",
        "VQA accuracy: min(1, other people with this answer / 3), averaged over each of the (ten) people "
        "left out, after the official normalisation (lower case, digits for number words, no articles, no "
        f"punctuation; {style}{', unanimous targets as they are' if skip_unanimous else ''}); "
        "Goyal et al. 2017.",
        lambda answer, targets, fields: float(
            vqa_accuracy(answer, targets, fields, style=style, skip_unanimous=skip_unanimous)
        ),
        mean_score,
        targets_needed=PEOPLE_THAT_AGREE + 1,  # one of them is left out
    )
