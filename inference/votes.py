"""The best of several answers to one question: by vote, or by how sure the model was.

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
from typing import Any

PICKS = ("vote", "confidence")


def normalised(answer: str) -> str:
    """An answer as votes compare it: without case, white space around words, and a dot at the end."""
    return " ".join(answer.lower().split()).removesuffix(".").rstrip()


def pick(
    answers: Sequence[str],
    confidences: Sequence[float],
    by: str = "vote",
    same: Callable[[str], Hashable] = normalised,
) -> dict[str, Any]:
    """{"by", "number": which answer, from 0, "answer": its text, "votes"}. By vote it is the surest of the
    most frequent, by confidence that of all; the first of equals. Votes are the groups of answers for which
    `same` is equal, the winner first: their surest "answer", "count", mean "confidence" and "numbers"."""
    assert by in PICKS, f"expected one of {PICKS}, got {by!r}"
    groups: dict[Hashable, list[int]] = {}
    for number, answer in enumerate(answers):
        groups.setdefault(same(answer), []).append(number)

    def mean(numbers: list[int]) -> float:
        return math.fsum(confidences[number] for number in numbers) / len(numbers)

    ordered = sorted(groups.values(), key=lambda numbers: (-len(numbers), -mean(numbers)))
    surest = [max(numbers, key=confidences.__getitem__) for numbers in ordered]
    number = surest[0] if by == "vote" else max(range(len(answers)), key=confidences.__getitem__)
    votes = [
        {"answer": answers[one], "count": len(group), "confidence": mean(group), "numbers": group}
        for one, group in zip(surest, ordered)
    ]
    return {"by": by, "number": number, "answer": answers[number], "votes": votes}
