"""Questions of `kinds`, `where` and `turns`: their answers against what a scene of known things shows."""

import random
import re

import pytest
import torch

from recipes.world import kinds, turns, where
from recipes.world.scene import Thing
from recipes.world.training import refusal_loss
from shapes.world import Scene


def shape(name, colour, x, y, size=0.2):
    return Thing("shape", name, colour, x, y, size, 0.0, (0, 0, 0))


GRID = Scene(
    (
        shape("star", "red", 0.2, 0.2), shape("circle", "red", 0.5, 0.2),
        shape("star", "blue", 0.8, 0.2, 0.3), shape("square", "red", 0.2, 0.8),
        shape("star", "green", 0.6, 0.8),
    )
)  # fmt: skip


def asked(asker, scene=GRID, count=400):
    """What an asker asks about a scene in so many tries, in small letters."""
    found = (asker(scene, random.Random(i)) for i in range(count))
    return [(qa.question.lower(), qa.answer) for qa in found if qa is not None]


@pytest.mark.parametrize("asker", sorted({*kinds._SETS}, key=str))
def test_many_sentences_and_nothing_of_the_grammar_left(asker):
    questions = {question for question, _ in asked(asker)}
    assert len(questions) > 40
    assert not any(re.search(r"[{}()|]|  ", question) for question in questions)


def test_rows_and_columns():
    rows = {"top": "red star, red circle, blue star", "bottom": "red square, green star"}
    seen = set()
    for question, answer in asked(where.ask_row):
        if "column" in question:
            continue  # two or three: the middle one of two rows belongs to none
        top = bool(re.search(r"\b(top|upper|first|topmost)\b.*\b(row|line)|row.*first", question))
        expected = rows["top" if top else "bottom"]
        seen.add(top)
        assert answer in (expected, str(len(expected.split(", ")))), question
    assert seen == {True, False}
    scattered = Scene(
        (shape("star", "red", 0.2, 0.2), shape("star", "red", 0.5, 0.4), shape("star", "red", 0.8, 0.6))
    )
    assert asked(where.ask_row, scattered) == []


def test_the_second_from_a_side():
    line = Scene(
        tuple(
            shape("star", c, x, 0.5) for c, x in (("red", 0.1), ("blue", 0.4), ("green", 0.7), ("pink", 0.9))
        )
    )
    colours, seen = ["red", "blue", "green", "pink"], 0
    for question, answer in asked(where.ask_in_order, line):
        words = {"second": 1, "2nd": 1, "third": 2, "3rd": 2, "fourth": 3, "4th": 3}
        k = next(at for word, at in words.items() if word in question)
        left = re.search(r"from (the )?left|starting left", question)
        expected = colours[k if left else -1 - k]
        if answer != "star":  # a shape is asked for, and all are stars
            assert expected in answer, question
        seen += 1
    assert seen > 100


def test_both_either_and_neither():
    here = {"red", "blue", "green"}
    names = {"star", "circle", "square"}
    for question, answer in asked(kinds._both):
        if re.search(r"\b(orange|purple|pink|yellow|black) \w+|red star|blue star|green star", question):
            continue
        named = re.findall(
            r"\b(red|blue|green|star|circle|square|triangle|diamond|cross)(?:e?s)?\b", question
        )
        there = [kind in here | names for kind in named]
        if len(named) != 2:
            continue
        said = all(there) if " and " in question or "as well" in question else any(there)
        said = not any(there) if re.search("neither|are there no", question) else said
        assert answer == ("yes" if said else "no"), question


def test_whether_anything_is_not_so():
    assert {answer for _, answer in asked(kinds._any_other)} == {"yes"}
    alike = Scene(tuple(shape("star", "red", x, 0.5) for x in (0.2, 0.5, 0.8)))
    assert {answer for _, answer in asked(kinds._any_other, alike)} == {"no"}


def test_what_there_is_fewer_of():
    counts = {"stars": 3, "circles": 1, "squares": 1, "red": 3, "blue": 1, "green": 1}
    for question, answer in asked(kinds._fewer):
        least = re.search(r"\b(fewer|less|rarer|least|smaller)\b", question)
        assert counts.get(answer, 0) in ((0, 1) if least else (3, 1)), (question, answer)


def test_the_biggest_and_the_other_end():
    for question, answer in asked(where.ask_biggest):
        assert re.search(r"big(gest|)|largest|greatest", question) and answer in (
            "blue star",
            "star",
            "blue",
        ), question
    line = Scene(tuple(shape("star", c, x, 0.5) for c, x in (("red", 0.2), ("blue", 0.5), ("green", 0.8))))
    ends = [made for i in range(200) if (made := turns._other_end(line, random.Random(i)))]
    assert ends and all(re.search("leftmost|rightmost", made[0].question) for made in ends)


def test_a_word_is_read_and_then_spelled():
    word = Thing("word", "apple", "red", 0.5, 0.5, 0.3, 0.0, (0, 0, 0), 0.3, 0.1)
    for i in range(100):
        first, *later = turns._of_word(Scene((word,)), random.Random(i))
        assert first.answer == "apple" and {qa.answer for qa in later} <= {"5", "a", "e", "red"}


@pytest.mark.parametrize(("shares", "refused"), [((0.9, 0.1, 0.0), False), ((0.6, 0.4, 0.0), False),
                                                 ((0.4, 0.35, 0.25), True)])  # fmt: skip
def test_what_would_be_wrong_more_often_than_not_is_refused(shares, refused):
    """A table of logits learns from answers that are right with these shares."""
    logits = torch.zeros(4, requires_grad=True)
    rule = torch.optim.Adam([logits], 0.1)
    targets = torch.repeat_interleave(torch.arange(3), torch.tensor([round(100 * share) for share in shares]))
    for _ in range(300):
        rule.zero_grad()
        refusal_loss(logits.expand(len(targets), 4), targets, 3, 0.5).div(len(targets)).backward()
        rule.step()
    assert (logits.argmax() == 3) == refused
    among = logits[:3].softmax(0)
    assert torch.allclose(among, torch.tensor(shares), atol=0.05)
