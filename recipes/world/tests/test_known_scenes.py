"""Questions of `kinds`, `where` and `turns`: their answers against what a scene of known things shows."""

import random
import re

import pytest

LIBRARIES = [pytest.importorskip(name) for name in ("resvg_py", "skimage", "matplotlib")]

from recipes.world import kinds, turns, where  # noqa: E402
from recipes.world.scene import Thing  # noqa: E402
from shapes.world import COLOURS, SHAPES, Scene  # noqa: E402


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


@pytest.mark.parametrize("asker", sorted({*kinds.MORE_KINDS}, key=str))
def test_many_sentences_and_nothing_of_the_grammar_left(asker):
    questions = {question for question, _ in asked(asker)}
    assert len(questions) > 40
    assert not any(re.search(r"[{}()|]|  ", question) for question in questions)


def test_rows_and_columns():
    """Of a grid, and of the same grid on its side."""
    turned = Scene(tuple(shape(t.name, t.colour, t.y, t.x, t.size) for t in GRID.things))
    lines = ["red star, red circle, blue star", "red square, green star"]
    for scene, noun, first in ((GRID, r"row|line", "top|upper|first"), (turned, "column", "left|first")):
        seen = set()
        for question, answer in asked(where.ask_row, scene):
            assert re.search(noun, question), question
            expected = lines[not re.search(rf"\b({first})", question)]
            assert answer in (expected, str(len(expected.split(", ")))), question
            seen.add(expected)
        assert seen == {*lines}
    stairs = [shape("star", "red", 0.2 + step, 0.2 + step) for step in (0.0, 0.3, 0.6)]
    assert not any(asked(where.ask_row, Scene(tuple(stairs), aspect=a)) for a in (1.0, 1 / 3))
    columns = [shape("star", "red", x / 8, 0.5, 0.05) for x in range(1, 8)]
    assert asked(where.ask_row, Scene((*columns, shape("star", "blue", 7 / 8, 0.9, 0.05))))


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
    here, answers = {"red", "blue", "green", "star", "circle", "square"}, []
    for question, answer in asked(kinds._both, count=1500):
        named = re.findall(rf"\b({'|'.join((*COLOURS, *SHAPES))})(?:e?s)?\b", question)
        if len(named) != 2:
            continue  # "red stars"
        there = [kind in here for kind in named]
        said = all(there) if " and " in question or "as well" in question else any(there)
        said = not any(there) if re.search("neither|are there no", question) else said
        assert answer == ("yes" if said else "no"), question
        answers.append(answer)
    assert min(answers.count("yes"), answers.count("no")) > 50


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
    looks = (("red", 0.2, 0.12), ("blue", 0.5, 0.2), ("green", 0.8, 0.3))
    line = Scene(tuple(shape("star", colour, x, 0.5, size) for colour, x, size in looks))
    ends = {"red": "small|tiniest|littlest|least big|leftmost", "green": "big|largest|greatest|rightmost"}

    def end_of(question):
        return next(colour for colour in ("red", "green") if re.search(ends[colour], question.lower()))

    for question, answer in asked(where.ask_biggest, line):
        assert answer in (f"{end_of(question)} star", "star", end_of(question)), question
    made = [found for i in range(200) if (found := turns._other_end(line, random.Random(i)))]
    for first, second in made:
        one = end_of(first.question)
        assert first.answer in (f"{one} star", "star"), first
        other = one if re.search("colou?r", second.question) else end_of(second.question)
        assert second.answer in (f"{other} star", "star", other), second
    assert len({first.answer for first, _ in made}) > 1


def test_a_word_is_read_and_then_spelled():
    word = Thing("word", "apple", "red", 0.5, 0.5, 0.3, 0.0, (0, 0, 0), 0.3, 0.1)
    for i in range(100):
        first, *later = turns._of_word(Scene((word,)), random.Random(i))
        assert first.answer == "apple" and {qa.answer for qa in later} <= {"5", "a", "e", "red"}
