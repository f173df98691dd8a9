"""Metrics by name. Where a benchmark has an official scorer, the metric gives its scores.

    metric = find_metric("relaxed_accuracy", years_exact=True)
    score = metric.score("24.5 %", ["25"], {})

| metric | source |
|---|---|
| `exact_match` | exact_match of lmms-eval and of Hugging Face's evaluate |
| `vqa_accuracy` | Goyal et al., "Making the V in VQA Matter" (2017); https://visualqa.org/evaluation.html |
| `anls` | Biten et al., "Scene Text Visual Question Answering" (2019), equation 1, as DocVQA scores it |
| `relaxed_accuracy` | Masry et al., "ChartQA" (2022), section 5.1, after Methani et al., "PlotQA" (2020) |
| `multiple_choice` | MMStar in lmms-eval, whose other tasks bring scorers of their own |
| `boxes` | Acc@0.5 of RefCOCO (Yu et al. 2016) |
"""

from __future__ import annotations

import math
import re
import statistics
import string
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, validate_call

from data.boxes import COORDINATES
from eval.boxes import Asked, figures, score_of

Fields = Mapping[str, Any]
Share = Annotated[float, Field(ge=0, le=1)]


class MetricError(ValueError):
    """A metric or option that does not exist, or a question that the metric cannot score."""


@dataclass(frozen=True)
class Scored:
    """One answered question; `fields` are the row's other columns, such as {"choices": [...]}."""

    answer: str
    targets: tuple[str, ...]
    score: float
    fields: Fields = field(default_factory=dict)


def mean_score(samples: Sequence[Scored]) -> dict[str, float]:
    """{"score": the mean}, rounded once, so that it does not depend on the order of the samples."""
    return {"score": math.fsum(sample.score for sample in samples) / len(samples)}


@dataclass(frozen=True)
class Metric:
    """How answers are scored.

    description: normalisation, formula and source in one sentence; runs are resumed and compared by it.
    score: (answer, targets, the row's other columns) -> 0 to 1. Raises MetricError where that is impossible.
    summarise: all questions -> figures, of which "score" is the one that is reported.
    parts: all questions -> scores by name that are reported beside, each of the questions that have it.
    targets_needed: with fewer targets no answer can score 1.
    chooses: where a prompt lists choices, the answer is the likeliest of their letters.
    same: (answer, the row's other columns) -> what is equal for answers that are one in a vote; None where
        `inference.votes.normalised` says that.
    """

    name: str
    description: str
    score: Callable[[str, Sequence[str], Fields], float]
    summarise: Callable[[Sequence[Scored]], dict[str, float]] = mean_score
    parts: Callable[[Sequence[Scored]], Mapping[str, Sequence[float]]] = lambda scored: {}
    targets_needed: int = 1
    chooses: bool = False
    same: Callable[[str, Fields], Hashable] | None = None


# ------------------------------------------------------------------------------------------- exact match
def exact_match(strip: bool = True, ignore_case: bool = True, ignore_punctuation: bool = False) -> Metric:
    def normalised(text: str) -> str:
        text = text.strip() if strip else text
        text = text.lower() if ignore_case else text
        return text.translate(str.maketrans("", "", string.punctuation)) if ignore_punctuation else text

    def score(answer: str, targets: Sequence[str], fields: Fields) -> float:
        return float(normalised(answer) in map(normalised, targets))

    ignored = {"space at the ends": strip, "case": ignore_case, "punctuation": ignore_punctuation}
    but_for = " and ".join(name for name, is_ignored in ignored.items() if is_ignored) or "nothing"
    return Metric(
        "exact_match",
        f"Exact match: 1 where the answer equals one of the targets but for {but_for} (after exact_match in "
        f"lmms-eval and Hugging Face's evaluate{', which keep space at the ends' if strip else ''}).",
        score,
        same=lambda answer, fields: normalised(answer),
    )


# ------------------------------------------------------------------------------------------ VQA accuracy
_AGREEING = 3  # other people who give an answer make it right

_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_DIGITS = {"none": "0"} | {word: str(number) for number, word in enumerate(_NUMBERS)}
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,+(?=\d)")
_PERIOD = re.compile(r"\.(?!\d)")
_PERIODS_REMOVED = 32  # the official scorer passes re.UNICODE, which is 32, as the number to replace

# Words that get their apostrophe back where one of them is missing.
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
def _contractions() -> dict[str, str]:
    """A word without one of its apostrophes -> the word."""
    table = {"somebody'd": "somebodyd"}  # the wrong way round in the official scorer, too
    for word in _APOSTROPHES.split():
        for place in (at for at, letter in enumerate(word) if letter == "'"):
            table[word[:place] + word[place + 1 :]] = word
    return table


def _normalise_vqa(text: str, style: str) -> str:
    """Lower case, digits for number words, no articles, no punctuation; slips of the official scorer kept."""
    if style == "textvqa":
        text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    text = text.strip().replace("\n", " ").replace("\t", " ").strip()
    # A mark beside a space is removed and any other becomes a space, except where a number has a comma: that
    # removes all of them. What decides is the text before any mark was taken out.
    in_number, cleaned = _COMMA_IN_NUMBER.search(text) is not None, text
    for mark in _PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        cleaned = cleaned.replace(mark, "" if beside_space or in_number else " ")
    cleaned = _PERIOD.sub("", cleaned, count=_PERIODS_REMOVED)
    words = [_DIGITS.get(word, word) for word in cleaned.lower().split()]
    return " ".join(_contractions().get(word, word) for word in words if word not in ("a", "an", "the"))


def vqa_accuracy(style: Literal["vqav2", "textvqa"] = "vqav2") -> Metric:
    """min(1, people who gave this answer / 3), averaged over leaving each person out in turn. The `style`
    textvqa, as MMF's and EvalAI's, first treats commas, ? and 's."""

    def score(answer: str, targets: Sequence[str], fields: Fields) -> float:
        normal = _normalise_vqa(answer, style)
        agree = [_normalise_vqa(target, style) == normal for target in targets]
        return float(statistics.mean(min(1, (sum(agree) - left_out) / _AGREEING) for left_out in agree))

    return Metric(
        "vqa_accuracy",
        "VQA accuracy: min(1, other people with this answer / 3), averaged over each of the (ten) people "
        "left out, after the official normalisation (lower case, digits for number words, no articles, no "
        f"punctuation; {style}); Goyal et al. 2017.",
        score,
        targets_needed=_AGREEING + 1,  # one of them is left out
        same=lambda answer, fields: _normalise_vqa(answer, style),
    )


# -------------------------------------------------------------------------------------------------- ANLS
def edit_distance(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Levenshtein's distance: insertions, deletions and replacements of a letter, or of another element. The
    bits of integers are the differences in a column of its table (Hyyrö 2003)."""
    if not one or one == other:
        return 0 if one else len(other)
    at: dict[Hashable, int] = {}
    for place, letter in enumerate(one):
        at[letter] = at.get(letter, 0) | 1 << place
    mask, last = (1 << len(one)) - 1, 1 << len(one) - 1
    more, less, distance = mask, 0, len(one)  # places of `one` where the distance grows by 1, or falls
    for letter in other:
        equal = at.get(letter, 0)
        same = ((equal & more) + more ^ more | equal | less) & mask
        up, down = less | ~(same | more) & mask, same & more
        distance += bool(up & last) - bool(down & last)
        up = up << 1 | 1
        more, less = (down << 1 | ~(same | up)) & mask, up & same & mask
    return distance


def similarity(one: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    """1 - the edit distance over the length of the longer one; 1 for two that are empty."""
    return 1 - edit_distance(one, other) / max(len(one), len(other), 1)


def anls(threshold: Share = 0.5) -> Metric:
    """1 - the smallest normalised edit distance to a target; 0 where that is below the threshold."""

    def distance(answer: str, target: str) -> float:
        # The official scorer squeezes spaces before it compares, but counts them in the length.
        length = max(len(target.upper()), len(answer.upper()))
        squeezed = (" ".join(text.lower().split()) for text in (target, answer))
        return edit_distance(*squeezed) / length if length else 0.0

    def score(answer: str, targets: Sequence[str], fields: Fields) -> float:
        similarity = 1 - min(distance(answer, target) for target in targets)
        return similarity if similarity >= threshold else 0.0

    return Metric(
        "anls",
        "ANLS: 1 - edit distance / length of the longer text, to the nearest target, in lower case with "
        f"single spaces; 0 below {threshold}; Biten et al. 2019, as scored by DocVQA.",
        score,
        same=lambda answer, fields: " ".join(answer.lower().split()),
    )


# -------------------------------------------------------------------------------------- relaxed accuracy
_YEAR = re.compile(r"\s*(1\d|20)\d\d\s*", re.ASCII)  # 1000 to 2099, written as a whole number


def _as_number(text: str) -> float | None:
    """The number that a text is, a percentage as a fraction; None where it is none."""
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def relaxed_accuracy(tolerance: Share = 0.05, years_exact: bool = False) -> Metric:
    """Five percent of a year is a century, so that 1950 is a right answer to 2020, here as in the official
    scorer; `years_exact` asks for the very number where the target is 1000 to 2099."""

    def matches(answer: str, target: str) -> bool:
        got, wanted = _as_number(answer), _as_number(target)
        if got is None or not wanted:  # nothing is within 5 % of 0: a target of 0 is compared as text
            return answer.lower() == target.lower()
        if years_exact and _YEAR.fullmatch(target):
            return got == wanted
        return abs(got - wanted) / abs(wanted) <= tolerance

    years = "exact for years" if years_exact else "for years, too, as in the official scorer"
    return Metric(
        "relaxed_accuracy",
        f"Relaxed accuracy: numbers within {tolerance:.2%} of the target ({years}; a percentage is a "
        "fraction), other answers equal but for case; Masry et al. 2022, after Methani et al. 2020.",
        lambda answer, targets, fields: float(any(matches(answer, target) for target in targets)),
        same=lambda answer, fields: answer.lower() if (got := _as_number(answer)) is None else got,
    )


# --------------------------------------------------------------------------------------- multiple choice
_LETTERS_WITHOUT_CHOICES = "ABCD"  # where only the question holds the choices, as in MMStar
_CALLED = [*(f"{kind}answer" for kind in ("", "correct ", "best ")), "correct option", "best option"]
_CALLED += ["choice", "correct choice"]
_PHRASES = (
    *(f"{word}{called} is" for called in _CALLED for word in ("", "the ")),
    *("my answer is", "my choice is", "i choose", "i select", "i pick"),
    *("옵션", "정답은", "답은", "답:", "答案是", "答案为", "选", "答えは"),
)
_FORMS = ("({})", "{}.", "{}:", "{})", "{} ")  # from the most certain on


def _letter(answer: str, letters: str) -> str:
    """The letter that lmms-eval's MMStar finds, or ""."""
    text = answer.strip()
    for mark in ",.!?;:'\"":
        text = text.strip(mark)
    bare, text = text.strip(), f" {text} "
    if bare and bare[0] in letters and not bare[1:2].isalpha():
        return bare[0]
    if bare and bare[-1] in letters and not bare[-2:-1].isalpha():
        return bare[-1]
    begins = [at + len(phrase) for phrase in _PHRASES if (at := text.lower().find(phrase)) >= 0]
    found = [(text.find(letter, begin), letter) for begin in begins for letter in letters]
    for form in (*_FORMS, "{}"):
        if any(at >= 0 for at, _ in found):
            break
        found = [(text.rfind(form.format(letter)), letter) for letter in letters]
    at, letter = max(found)
    return letter if at >= 0 else ""


def multiple_choice() -> Metric:
    """A target is a letter or the text of one of the choices."""

    def letters_of(fields: Fields) -> str:
        choices = fields.get("choices") or ()
        return string.ascii_uppercase[: len(choices)] if choices else _LETTERS_WITHOUT_CHOICES

    def score(answer: str, targets: Sequence[str], fields: Fields) -> float:
        choices, letters = list(fields.get("choices") or ()), letters_of(fields)
        by_text = dict(zip(reversed(choices), reversed(letters)))  # of equal texts, the first
        named = [(target, target.strip().upper()) for target in targets]
        wanted = {letter if letter in [*letters] else by_text.get(target) for target, letter in named}
        if None in wanted:
            raise MetricError(
                f"multiple_choice: expected a letter or text of {', '.join(letters)}, got {targets!r:.200}"
            )
        return float(_letter(answer, letters) in wanted)

    return Metric(
        "multiple_choice",
        "Multiple choice: 1 where the chosen letter is the target's: of listed choices the likeliest whole "
        "answer, its end included; else the most certain form of a letter in the answer, the last of that "
        "form; none is wrong (lmms-eval's MMStar; Chen et al. 2024).",
        score,
        chooses=True,
        same=lambda answer, fields: _letter(answer, letters_of(fields)),
    )


# ------------------------------------------------------------------------------------------------- boxes
# Of a row: the name, corners of each box, (width, height), and how the model writes coordinates of its image.
BOX_FIELDS = ("thing", "boxes", "size", "form")


def asked_of(answer: str, fields: Fields) -> Asked:
    """What a row asks for, and what an answer locates."""
    if any(name not in fields for name in BOX_FIELDS):
        raise MetricError("boxes: expected rows with ref and bbox, or objects, and an image")
    found = fields["form"].read(answer, tuple(fields["size"]), fields["thing"])
    return Asked(tuple(map(tuple, fields["boxes"])), found)


def boxes(form: str = "qwen3-vl", points: bool = False, corners: bool = False) -> Metric:
    """`corners` is how rows give boxes; see `data.box_rows`."""
    if form not in COORDINATES:
        raise MetricError(f"metric boxes: expected form as {' or '.join(COORDINATES)}, got {form!r}")

    def summarise(samples: Sequence[Scored]) -> dict[str, float]:
        found = figures([asked_of(one.answer, one.fields) for one in samples], points)
        return mean_score(samples) | found

    kind = "its first point lies in the box" if points else "its first box has an IoU of 0.5 or more"
    return Metric(
        "boxes",
        f"Boxes in the form {form}{', given as corners' if corners else ''}: 1 where {kind}, F1 of "
        "one-to-one hits where several are asked for, and 1 for a thing that is not there where the answer "
        "has no coordinates (Yu et al. 2016; Lin et al. 2014).",
        lambda answer, targets, fields: score_of(asked_of(answer, fields), points),
        summarise,
    )


# ----------------------------------------------------------------------------------------------- by name
METRICS: dict[str, Callable[..., Metric]] = {
    metric.__name__: validate_call(config={"strict": True})(metric)
    for metric in (exact_match, vqa_accuracy, anls, relaxed_accuracy, multiple_choice, boxes)
}


def find_metric(name: str, /, **options) -> Metric:
    """The metric of this name, with options of its own. Raises MetricError for what there is not."""
    if name not in METRICS:
        raise MetricError(f"unknown metric {name!r}; expected {' or '.join(sorted(METRICS))}")
    try:
        return METRICS[name](**options)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        said = f"option {wrong['loc'][0]}: {wrong['msg']}, got {wrong['input']!r:.80}"
        raise MetricError(f"metric {name}: {said}; docs/evaluate.md lists the options") from None
