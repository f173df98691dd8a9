"""Multiple choice: the letter that an answer chooses.

How a letter is found in free text differs between benchmarks, and matters more than most models' differences:

mmstar  the most certain form in which a letter appears ("B" alone, "(B)", "the answer is B", ...), the last
        one of that form: lmms-eval's rule for MMStar (Chen et al., "Are We on the Right Way ...", 2024). An
        answer without a letter is wrong.
mmmu    bracketed letters, then letters, then the text of a choice: the rule of MMMU's own scorer (Yue et al.,
        2024). For an answer that chooses nothing that scorer guesses at random; this one scores what such a
        guess is worth on average, 1 / choices.
letter  the letter and nothing else, or followed by a full stop: the rule of ScienceQA (Lu et al., 2022) in
        LLaVA's evaluation.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.metrics.base import Metric, MetricError, checked_targets, mean_score

LETTERS_WITHOUT_CHOICES = "ABCD"  # where the choices stand in the question only, as in MMStar

_CALLED = [*(f"{kind}answer" for kind in ("", "correct ", "best ")), "correct option", "best option"]
_CALLED += ["choice", "correct choice"]
_PHRASES = (
    *(f"{word}{called} is" for called in _CALLED for word in ("", "the ")),
    *("my answer is", "my choice is", "i choose", "i select", "i pick"),
    *("옵션", "정답은", "답은", "답:", "答案是", "答案为", "选", "答えは"),
)
_FORMS = ("({})", "{}.", "{}:", "{})", "{} ")  # the more certain first


def mmstar_letter(answer: str, letters: str) -> str:
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


def mmmu_letter(answer: str, letters: str, choices: Sequence[str]) -> str:
    """The letter that MMMU's scorer finds, or "" where it would guess."""
    for mark in ",.!?;:'":
        answer = answer.strip(mark)
    text = f" {answer} "
    for form, place in (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} ")):
        found = [letter for letter in letters if form.format(letter) in text]
        if found:  # the last one, or the first where none stands free
            return max(found, key=lambda letter: text.rfind(place.format(letter)))
    if len(text.split()) <= 5:
        return ""
    places = {letter: text.lower().rfind(choice.lower()) for letter, choice in zip(letters, choices)}
    letter = max(places, key=lambda letter: places[letter])
    return letter if places[letter] >= 0 else ""


def plain_letter(answer: str, letters: str) -> str:
    """The answer as a letter, or the letter before a full stop at its beginning, or ""."""
    text = answer.strip()
    alone, before_stop = len(text) == 1, text[1:2] == "." and text[0].isupper()
    letter = text[0].lower().upper() if alone or before_stop else ""
    return letter if len(letter) == 1 and letter in letters else ""


def _letters(choices: Sequence[str]) -> str:
    if len(choices) > len(string.ascii_uppercase):
        raise MetricError(f"multiple_choice: expected at most 26 choices, got {len(choices)}")
    return string.ascii_uppercase[: len(choices)]


def _read(fields: Mapping[str, Any], style: str) -> tuple[str, Sequence[str]]:
    choices = fields.get("choices")
    if choices is None and style != "mmmu":
        return LETTERS_WITHOUT_CHOICES, ()
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise MetricError(
            f"multiple_choice: expected field choices as a list of texts, got {str(choices)[:80]!r}"
        )
    return _letters(choices), choices


def multiple_choice(
    answer: str, targets: Sequence[str], fields: Mapping[str, Any], *, style: str = "mmstar"
) -> float:
    """1 where the answer chooses a target: a letter, or the text of one of the choices."""
    letters, choices = _read(fields, style)
    wanted = set()
    for target in checked_targets(targets):
        letter = target.strip().upper()
        if letter not in letters or len(letter) != 1:
            if target not in choices:
                raise MetricError(
                    f"multiple_choice: expected a target among {', '.join(letters)} or a choice, "
                    f"got {target!r}"
                )
            letter = letters[list(choices).index(target)]
        wanted.add(letter)
    if style == "mmmu":
        got = mmmu_letter(answer, letters, choices)
        return float(got in wanted) if got else len(wanted) / len(letters)
    find: Callable[[str, str], str] = mmstar_letter if style == "mmstar" else plain_letter
    return float(find(answer, letters) in wanted)


_STYLES = {
    "mmstar": "the most certain form of a letter in the answer, the last of that form; none is wrong "
    "(lmms-eval's MMStar; Chen et al. 2024)",
    "mmmu": "bracketed letter, letter, or text of a choice, the last one; none scores 1 / choices, what the "
    "official random guess scores on average (Yue et al. 2024)",
    "letter": "the letter alone or before a full stop (ScienceQA, Lu et al. 2022, as in LLaVA)",
}


def choice_metric(style: str = "mmstar") -> Metric:
    """`multiple_choice` by the rule of `style`: mmstar, mmmu or letter."""
    if style not in _STYLES:
        raise MetricError(f"multiple_choice: expected style {', '.join(_STYLES)}, got {style!r}")
    return Metric(
        "multiple_choice",
        f"Multiple choice: 1 where the chosen letter is the target's; {_STYLES[style]}.",
        lambda answer, targets, fields: multiple_choice(answer, targets, fields, style=style),
        mean_score,
    )
