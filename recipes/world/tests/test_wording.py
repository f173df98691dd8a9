"""Wordings: the meaning and the slots stay, there are very many, and what is fixed is left alone."""

import random
import re

import pytest

from recipes.world import looks, unanswerable, wording
from shapes.questions import NUMBER_WORDS, TEMPLATES, plural
from shapes.world import COLOURS, SHAPES

RELATION = {"position": "to the left of", "side": "above or below", "size": "bigger", "which": "smaller"}
MANY = ("count", "places", "points", "more", "either", "equal")
WORLD = {*SHAPES, *map(plural, SHAPES), *COLOURS, *NUMBER_WORDS, "shape", "shapes", "word", "digit", "left"}
WORLD |= {"right", "above", "below", "bigger", "smaller", "more", "fewer", "not", "no", "or", "and"}


def slots(kind):
    """What is asked about: things of which each word has to be found in every wording again."""
    if kind == "shape":
        return {"t": "purple"}
    if kind in MANY:
        return {"t": "purple stars", "a": "purple stars", "b": "black crosses"}
    one = "an orange star" if kind == "exists" else "orange star"
    found = {"t": one, "x": "orange star", "p": "orange stars", "a": "black cross", "b": "orange star"}
    return found | ({"r": RELATION[kind]} if kind in RELATION else {})


def questions(kind):
    """All that `reword` knows again of a kind."""
    return [
        template.format(**slots(kind))
        for template in (*TEMPLATES.get(kind, ()), *wording._ASKED.get(kind, ()))
    ]


def nouns(text):
    """The shapes and colours that a text names, in their singular."""
    found = re.findall(rf"\b({'|'.join((*SHAPES, *COLOURS))})(?:e?s)?\b", text.lower())
    return sorted(set(found))


@pytest.mark.parametrize("kind", wording._WORDINGS)
def test_every_kind_has_many_wordings_that_keep_what_is_asked_about(kind):
    rng, asked, said = random.Random(0), questions(kind), set()
    for _ in range(2000):
        question = rng.choice(asked)
        made = wording.reword(question, rng)
        same = nouns(made) == nouns(question)  # but in "is it a square, a circle or what?"
        assert same or (re.search(r"\bor what\b", made) and {*nouns(question)} < {*nouns(made)}), made
        assert not re.search(r"[{}()|]|<[a-z]+>|  ", made), made
        assert len(wording._SHOWN.findall(made)) <= 2, made
        said.add(made)
    assert len(said) >= 450


@pytest.mark.parametrize("kind", ["more", "either", "size", "which", "where", "position", "side"])
def test_the_order_of_two_things_keeps_the_answer(kind):
    """What swaps the two also says the opposite."""
    rng = random.Random(1)
    first, second = ("star", "cross") if kind in MANY else ("cross", "star")
    for _ in range(1000):
        made = wording.reword(rng.choice(questions(kind)), rng).lower()
        swapped = made.index(first) > made.index(second)
        opposite = kind == "more" and re.search(r"\b(fewer|less|smaller|lower|outnumbered by)\b", made)
        if kind == "more":
            compared = re.search(r"\b(compared|comparison)\b", made)
            assert swapped == bool(opposite) or (compared and swapped), made
        if kind in ("either", "size", "which"):
            assert not swapped or re.search(r"\b(compared|comparing|against|next to)\b", made), made


def test_other_questions_come_back_as_they_are():
    rng = random.Random(0)
    for question in (
        "List the shapes.",
        "How many red shapes are not circles?",
        "What?",
        "Detect the 3 dots.",
        "Is the star left of the circle and above the cross?",
    ):
        assert all(wording.reword(question, rng) == question for _ in range(50))


def test_which_of_two_images_is_asked_about_stays_and_is_said_once():
    rng = random.Random(0)
    said = {wording.reword("In the second image, how many red stars are there?", rng) for _ in range(300)}
    assert len(said) > 50
    assert all(
        one.startswith("In the second image, ") and len(wording._SHOWN.findall(one)) == 1 for one in said
    )


def test_a_typo_changes_one_word_and_makes_no_other_word_of_the_world():
    rng, changed = random.Random(0), 0
    for kind in wording._WORDINGS:
        for question in questions(kind) * 25:
            made = wording.typo(question, rng)
            before, after = question.split(" "), made.split(" ")
            assert len(before) == len(after)
            other = [(a, b) for a, b in zip(before, after) if a != b]
            assert len(other) <= 1
            for was, now in other:
                assert now.lower().strip("?.,'s") not in WORLD, (was, now)
                assert not re.search(r"\d", now)
                changed += 1
    assert changed > 2000


def test_a_typo_hits_no_text_in_quotes():
    rng = random.Random(0)
    for _ in range(500):
        made = wording.typo('Answer in JSON with the key "colour" and say "circle".', rng)
        assert '"colour"' in made and '"circle"' in made and "JSON" in made


def test_as_typed_leaves_formats_and_quotes_alone():
    rng = random.Random(0)
    fixed = (
        'Locate every instance of "red star". Report bbox coordinates in JSON format.',
        "How many stars are there? Answer in JSON.",
        'Give {"n": 3} with the box [12, 40, 300, 400].',
    )
    for question in fixed:
        made = [wording.as_typed(question, rng) for _ in range(400)]
        assert all(one[-len(question) + 1 :] == question[1:] for one in made)
        assert 10 < sum(one != question for one in made) < 120


def test_as_typed_changes_much_and_asks_the_same():
    """Without its typos, its synonyms aside, every noun is found again."""
    rng, question = random.Random(0), "What colour is the yellow star?"
    made = [wording.as_typed(question, rng) for _ in range(4000)]
    assert len(set(made)) > 800
    assert sum(nouns(one) == nouns(question) for one in made) > 0.93 * len(made)
    assert not any(
        re.search(r"yes or no|number|\||\(\w+\|", one, re.I) for one in made if "or number" not in one
    )
    assert all(one == one.strip() for one in made)  # as a chat template takes it
    capitals = sum("YELLOW" in one for one in made)
    lower = sum(one.islower() for one in made)
    assert 0.03 * len(made) < capitals < 0.15 * len(made) and lower > 0.1 * len(made)
    objects = [wording.as_typed("How many objects are there?", rng) for _ in range(1000)]
    assert sum("OBJECTS" in one for one in objects) > 200


def test_tails_fit_their_question():
    rng = random.Random(0)
    tails = {
        kind: " ".join(wording._tail(question, rng) for _ in range(400))
        for kind, question in {
            "exists": "Is there a red star?", "count": "How many stars are there?",
            "list": "List all shapes.",
            "either": "Are there more stars or circles?",
        }.items()
    }  # fmt: skip
    assert "yes or no" in tails["exists"].lower() and "single number" not in tails["exists"]
    assert "number" in tails["count"] and "yes or no" not in tails["count"].lower()
    assert not re.search("word|brief|short|number|yes or no", tails["list"].lower())
    assert not re.search("one word|yes or no", tails["either"].lower())


def test_questions_outside_differ_by_split_and_are_many():
    for name in ("QUESTIONS", "_ABOUT", "_OF_ITS_WORDS", "_HALVES", "_FOREIGN", "_CHAT"):
        listed = getattr(unanswerable, name)
        assert not set(listed[looks.TRAIN]) & set(listed[looks.HELDOUT])
    rng = random.Random(0)
    asked = {
        split: {unanswerable.ask_outside(rng, split) for _ in range(4000)} for split in ("train", "heldout")
    }
    assert not (asked["train"] & asked["heldout"]), asked["train"] & asked["heldout"]
    assert len(asked["train"]) > 2500 and len(asked["heldout"]) > 600
    assert all(one and not re.search(r"[{}|<]", one) for split in asked.values() for one in split)
    about = sum(bool(nouns(one)) for one in asked["train"])
    assert about > 500  # of words of the world in a question outside of it


def test_no_question_outside_is_one_of_the_world():
    rng = random.Random(0)
    known = [pattern for found in wording._patterns().values() for pattern, _ in found]
    for split in ("train", "heldout"):
        for _ in range(3000):
            question = unanswerable.ask_outside(rng, split)
            assert not any(pattern.fullmatch(question) for pattern in known), question


def test_what_stands_around_a_question():
    rng = random.Random(0)
    prompts = [wording.system_prompt(rng) for _ in range(2000)]
    lengths = [len(one.split()) for one in prompts]
    assert len(set(prompts)) > 1000 and min(lengths) <= 3 and max(lengths) <= 110
    assert 0.2 < sum(length > 25 for length in lengths) / len(lengths) < 0.45
    assert not re.search(r"json|one word|yes or no|\bbrief|list", " ".join(prompts).lower())
    leads = {wording.lead_in(rng) for _ in range(2000)}
    assert len(leads) > 400 and all(one and not re.search(r"[|()]", one) for one in leads)
