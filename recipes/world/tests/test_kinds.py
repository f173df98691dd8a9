"""Questions whose truth is computed: each says what a count of its own says, in words without a gap."""

from __future__ import annotations

import json
import random
import re

import pytest

LIBRARIES = [pytest.importorskip(name) for name in ("resvg_py", "skimage", "matplotlib")]

from recipes.world import computed, json_answers, kinds, letters, looks, turns, where  # noqa: E402
from recipes.world.drawings import random_aspect, sample_drawing, sample_rows  # noqa: E402
from recipes.world.grammar import say  # noqa: E402
from recipes.world.scene import ABSENT, NOT_UNDERSTOOD, Thing  # noqa: E402
from shapes.questions import NUMBER_WORDS, plural  # noqa: E402
from shapes.world import COLOURS, SHAPES, Background, Scene  # noqa: E402

_COLOUR, _SHAPE = "|".join(COLOURS), "|".join(SHAPES)


def scenes(count):
    for number in range(count):
        rng = random.Random(number)
        sample = sample_rows if number % 4 == 0 else sample_drawing
        yield sample(rng, looks.TRAIN, aspect=random_aspect(rng)), rng


def asked(asker, count=300):
    """(scene, question) of one asker, for the scenes that it finds something in."""
    found = [(scene, qa) for scene, rng in scenes(count) for _ in range(3) if (qa := asker(scene, rng))]
    assert len(found) > 20, asker.__name__
    return found


@pytest.fixture
def three():
    """A red circle, a blue square right of it, and a big red star below it."""
    things = (
        Thing("shape", "circle", "red", 0.2, 0.2, 0.2),
        Thing("shape", "square", "blue", 0.8, 0.2, 0.2),
        Thing("shape", "star", "red", 0.2, 0.8, 0.35),
    )
    return Scene(things, Background(first=(255, 255, 255), second=(255, 255, 255)))


@pytest.mark.parametrize("asker", sorted({*kinds.KINDS}, key=str))
def test_every_kind_is_asked_in_many_words_without_a_gap(asker):
    found = asked(asker)
    for _, qa in found:
        assert not re.search(r"[{}()|]|  | [?.,]", qa.question), qa.question
        assert qa.answer and qa.question[0] == qa.question[0].upper()
    assert len({qa.question for _, qa in found}) > 15


def test_a_pattern_has_all_its_alternatives_and_no_others():
    rng = random.Random(0)
    made = {say("(a|b (c|d)|) {t}( e|)?", rng, t="x") for _ in range(300)}
    assert made == {f"{front}x{back}?" for front in ("a ", "b c ", "b d ", "") for back in ("", " e")}


def test_two_kinds_are_counted_together():
    for scene, qa in asked(kinds._count_of_two):
        said = re.search(rf"({_COLOUR}) (?:\w+ )?(?:and|or) ({_COLOUR}) ([a-z]+)", qa.question.lower())
        if said and not re.search(rf"\b(?:{_SHAPE})e?s\b", qa.question.lower()):
            assert qa.answer == str(sum(t.colour in said.groups() for t in scene.shapes())), qa.question
        names = re.fullmatch(rf".*?\b(?<!\w )({_SHAPE})e?s (?:and|or) ({_SHAPE})e?s\b.*", qa.question.lower())
        if names and not re.search(_COLOUR, qa.question.lower()):
            assert qa.answer == str(sum(t.name in names.groups() for t in scene.shapes())), qa.question


def test_exact_numbers():
    checked = 0
    numbers = {word: i for i, word in enumerate(NUMBER_WORDS)} | {str(i): i for i in range(10)}
    form = re.compile(
        rf"(exactly|just|only|precisely|at least|more than|fewer than|less than) "
        rf"({'|'.join(numbers)}) ({'|'.join(map(plural, SHAPES))})\b"
    )
    for scene, qa in asked(kinds._exactly):
        if said := form.search(qa.question.lower()):
            k, count = numbers[said[2]], sum(plural(t.name) == said[3] for t in scene.shapes())
            true = {"at least": count >= k, "more than": count > k}.get(said[1], count == k)
            true = count < k if said[1] in ("fewer than", "less than") else true
            assert qa.answer == ("yes" if true else "no"), qa.question
            checked += 1
    assert checked > 30


def test_lists_name_what_is_so():
    for scene, qa in asked(kinds._which_are):
        colour = re.search(rf"\b({_COLOUR})\b", qa.question.lower())
        name = re.search(rf"\b({_SHAPE})e?s\b", qa.question.lower())
        if colour:
            wanted = sorted(t.name for t in scene.shapes() if t.colour == colour[1])
            assert sorted(qa.answer.split(", ")) == (wanted or [ABSENT]), qa.question
        else:
            wanted = {t.colour for t in scene.shapes() if t.name == name[1]}
            assert sorted(qa.answer.split(", ")) == sorted(wanted), qa.question


def test_letters_are_those_of_the_word():
    for scene, qa in asked(letters.ask_letters, 900):
        word = scene.first("word").name
        if qa.family == "letter":
            last = re.search(r"last|final|end", qa.question.lower())
            assert qa.answer == (word[-1] if last else word[0]), qa.question
        if qa.family == "count":
            assert qa.answer == str(len(word))


def test_places_of_three_things(three):
    circle, square, star = three.things
    assert computed.farthest(three, three.things, "right") is square
    assert computed.farthest(three, three.things, "left") is None  # two are as far left
    assert computed.extreme_size(three.things, True) is star
    assert computed.extreme_size(three.things, False) is None
    assert computed.in_corner(three, "top right") == [square]
    assert computed.in_corner(three, "bottom right") == []
    assert computed.thing_beside(three, circle, "below", three.things) is star
    assert computed.thing_beside(three, circle, "left", three.things) is None
    assert computed.none_beside(three, circle, "left") and not computed.none_beside(three, circle, "right")
    assert computed.ground(three) == "white"


def test_what_lies_beside_lies_there(three):
    truth = {"right": "blue square", "below": "red star"}
    rng, seen = random.Random(0), set()
    for _ in range(3000):
        qa = where.ask_beside(three, rng)
        if qa and qa.question.startswith("What's ") and "the circle" in qa.question:
            side = next((s for s in ("right", "below") if s in qa.question), None)
            if side:
                assert qa.answer == truth[side], qa.question
                seen.add(side)
    assert seen == {"right", "below"}


def test_nothing_is_beside_where_another_is_nearer(three):
    circle, square, _ = three.things
    near = Thing("shape", "cross", "pink", 0.4, 0.5, 0.2)  # nearer than the square, but not straight beside
    assert computed.thing_beside(three, circle, "right", three.things) is square
    assert computed.thing_beside(three, circle, "right", (*three.things, near)) is None


def test_a_thing_between_two_others():
    def at(name, colour, x):
        return Thing("shape", name, colour, x, 0.5, 0.15)

    things = (at("circle", "red", 0.15), at("star", "pink", 0.5), at("square", "blue", 0.85))
    found = computed.thing_between(Scene(things), random.Random(0))
    assert found is not None and found[1].name == "star"
    assert computed.thing_between(Scene((things[0], things[2])), random.Random(0)) is None


def test_later_turns_lean_on_what_was_said():
    for scene, rng in scenes(200):
        branch = turns.lean_on(scene, rng)
        assert not branch or 2 <= len(branch) <= 3
        for qa in branch[1:]:
            said = re.fullmatch(rf"(?:And|What about|How about|Also|Now) the ({_SHAPE})\?", qa.question)
            if said and branch[0].family == "colour" and "other" not in qa.question:
                known = [t.colour for t in scene.shapes() if t.name == said[1]]
                assert known == [qa.answer], (branch[0].question, qa)


def test_which_of_two_images():
    rng = random.Random(0)
    for _ in range(300):
        both = sample_drawing(rng), sample_drawing(rng)
        qa = turns.first_or_second(both, rng)
        said = qa and re.fullmatch(rf"Which (?:image|picture|drawing) has an? ({_SHAPE})\?", qa.question)
        if said:
            has = [any(t.name == said[1] for t in scene.shapes()) for scene in both]
            assert has[0] != has[1] and qa.answer == ("first" if has[0] else "second")


def test_objects_hold_what_is_true_under_the_keys_that_were_asked_for():
    checked = set()
    for scene, rng in scenes(400):
        qa = json_answers.ask_object(scene, rng)
        if qa is None:
            continue
        made = json.loads(qa.answer)
        assert 1 <= len(made) <= json_answers.MOST
        if qa.forced:
            kept = "".join(c for i, c in enumerate(qa.answer) if not any(a <= i < b for a, b in qa.forced))
            marks = re.compile('[", ]')
            assert marks.sub("", kept) == marks.sub("", "".join(map(json.dumps, made.values())))
        for key, value in made.items():
            if key in {plural(name) for name in SHAPES}:
                assert value == sum(plural(t.name) == key for t in scene.shapes())
                checked.add("count")
            if re.fullmatch(rf"has_({_SHAPE})", key):
                assert value == any(t.name == key[4:] for t in scene.shapes())
                checked.add("has")
            if re.fullmatch(rf"({_SHAPE})_colou?r", key):
                assert [value] == [t.colour for t in scene.shapes() if t.name == key.split("_")[0]]
                checked.add("colour")
    assert checked == {"count", "has", "colour"}


def test_what_no_drawing_holds_is_not_understood():
    said = {json_answers.ask_unknown_object(random.Random(number)).answer for number in range(50)}
    assert said == {NOT_UNDERSTOOD}
