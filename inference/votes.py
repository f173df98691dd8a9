"""Of several answers to one question, the one to give: by vote, or by how sure the model was.

    options = GenerationOptions(num_return_sequences=8, temperature=0.8, seed=0, confidence=True)
    result = ask(checkpoint, ["photo.jpg"], "How many boats are there?", options).finish()
    print(pick(result["answers"], result["confidences"])["answer"])

A vote is won by the answer that was given most often (Wang and others, "Self-Consistency Improves Chain of
Thought Reasoning in Language Models", 2023), and among equals by the one with the higher mean confidence. A
confidence is the geometric mean of the probabilities of an answer's tokens, so that the order of confidences
is that of mean log-probabilities: a longer answer is not at a disadvantage (`generation.confidence`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PICKS = ("vote", "confidence")


@dataclass(frozen=True)
class Group:
    """Answers that are the same: how the surest of them is written, how many there are, their mean
    confidence, and their numbers, from 0."""

    answer: str
    count: int
    confidence: float
    numbers: list[int]


def normalised(answer: str) -> str:
    """What tells answers apart in a vote: case, white space and a dot at the end do not."""
    return " ".join(answer.lower().split()).removesuffix(".").rstrip()


def tally(
    answers: Sequence[str], confidences: Sequence[float], same: Callable[[str], Hashable] = normalised
) -> list[Group]:
    """The groups of answers for which `same` is equal: the winner of the vote first, then the next ones."""
    groups: dict[Hashable, list[int]] = {}
    for number, answer in enumerate(answers):
        groups.setdefault(same(answer), []).append(number)
    found = []
    for own in groups.values():
        surest = max(own, key=confidences.__getitem__)
        confidence = math.fsum(confidences[number] for number in own) / len(own)
        found.append(Group(answers[surest], len(own), confidence, own))
    return sorted(found, key=lambda group: (-group.count, -group.confidence))


def pick(
    answers: Sequence[str],
    confidences: Sequence[float],
    by: str = "vote",
    same: Callable[[str], Hashable] = normalised,
) -> dict[str, Any]:
    """{"by", "number": which answer, from 0, "answer": its text, "votes": the groups of `tally`, each as a
    dict}. By vote it is the surest of the most frequent, by confidence that of all; the first of equals.

    Raises ValueError for no answers, not as many confidences, and anything else than PICKS.
    """
    if by not in PICKS:
        raise ValueError(f"by: expected {' or '.join(map(repr, PICKS))}, got {by!r}")
    if not answers or len(answers) != len(confidences):
        raise ValueError(
            f"expected answers with a confidence each, got {len(answers)} and {len(confidences)}"
        )
    groups = tally(answers, confidences, same)
    among = groups[0].numbers if by == "vote" else range(len(answers))
    number = max(among, key=confidences.__getitem__)
    votes = [asdict(group) for group in groups]
    return {"by": by, "number": number, "answer": answers[number], "votes": votes}
