"""The drawn world: splits, legibility, dense targets, answers that follow from the scene."""

import random
from collections import Counter

import numpy as np
import pytest

import shapes as S
from recipes.shapes.__main__ import main
from recipes.shapes.dense import object_map
from shapes.questions import unique_phrases
from shapes.world import MIN_CENTRES


def scenes(n, **kwargs):
    return [S.sample_scene(random.Random(i), **kwargs) for i in range(n)]


def shape(name, colour, x, y, size=0.2):
    return S.Thing("shape", name, colour, x, y, size, 0.0, S.RGB[colour])


def test_digit_split_is_disjoint_stratified_and_complete():
    (train, train_labels), (held, held_labels) = S.digit_images("train"), S.digit_images("heldout")
    assert train.dtype == np.uint8 and train.shape[1:] == (8, 8) and len(train) + len(held) == 1797
    assert not {a.tobytes() for a in train} & {a.tobytes() for a in held}
    share = np.bincount(held_labels) / (np.bincount(held_labels) + np.bincount(train_labels))
    assert np.all(abs(share - 0.2) < 0.01)
    with pytest.raises(ValueError, match="expected split"):
        S.digit_images("test")


def test_scenes_follow_their_seed_and_their_difficulty():
    a, b = scenes(1)[0], scenes(1)[0]
    assert a == b and S.render(a, 96).tobytes() == S.render(b, 96).tobytes()
    assert all(
        len(s.things) <= 3 and all(t.size >= 0.2 for t in s.things) for s in scenes(200, difficulty=0.0)
    )
    sample = scenes(600)
    counts = Counter(len(s.things) for s in sample)
    assert set(counts) == set(range(1, 9)) and min(counts.values()) > 45
    for kind in ("word", "digit"):
        assert 0.33 < np.mean([s.first(kind) is not None for s in sample]) < 0.47


def test_everything_stays_visible_and_apart():
    for s in scenes(150):
        ids = object_map(s, 128)
        for i, t in enumerate(s.things, 1):
            alone = (object_map(S.Scene((t,)), 128) > 0).sum()
            assert (ids == i).sum() >= (0.7 if t.kind == "shape" else 0.9) * alone
            assert all(np.hypot(t.x - o.x, t.y - o.y) >= MIN_CENTRES for o in s.things if o is not t)
            assert np.abs(np.subtract(s.background.first, t.rgb)).max() >= 60


def test_drawn_colour_is_the_named_one():
    for s in scenes(50):
        pixels, ids = np.asarray(S.render(s, 128), np.float32), object_map(s, 128)
        for i, t in enumerate(s.things, 1):
            if t.kind == "shape" and ids[int(t.y * 128), int(t.x * 128)] == i:
                seen = pixels[int(t.y * 128), int(t.x * 128)]
                assert min(S.COLOURS, key=lambda c: np.abs(seen - S.RGB[c]).sum()) == t.colour


def test_answers_by_hand():
    """Every question that can be asked of one small scene, checked against a table."""
    squares = shape("square", "blue", 0.8, 0.5), shape("square", "blue", 0.5, 0.15)
    scene = S.Scene((shape("circle", "red", 0.2, 0.5, 0.35), *squares))
    truth = {
        "How many blue squares are there?": "2",
        "How many shapes are there?": "3",
        "How many circles are there?": "1",
        "What colour is the circle?": "red",
        "What colour is the biggest shape?": "red",
        "Which shape is red?": "circle",
        "Which shape is the biggest?": "circle",
        "Is there a red circle?": "yes",
        "Is there a red square?": "no",
        "Is there a word?": "no",
        "Can you see a blue circle?": "no",
        "Are there more circles than squares?": "no",
        "Are there more red shapes or blue shapes?": "blue",
        "Are there more squares than circles?": "yes",
        "Are there more circles or squares?": "squares",
    }
    asked = {}
    for i in range(1000):
        for family in ("count", "colour", "shape", "exists", "compare"):
            qa = S.ask(scene, random.Random(i), family)
            asked[qa.question] = qa.answer
    assert {q: asked.get(q) for q in truth} == truth
    assert S.describe(scene) == ("small blue square top, big red circle left, small blue square right")
    assert S.ask(scene, random.Random(0), "word") is None and S.ask(scene, random.Random(0), "digit") is None
    assert S.ask(scene, random.Random(0), "position") is None  # only the circle can be named
    with pytest.raises(ValueError, match="expected a family"):
        S.ask(scene, random.Random(0), "mood")


def test_positions_and_sizes_follow_the_coordinates():
    rng, checked = random.Random(1), Counter()
    for s in scenes(300):
        named = {phrase: t for t, phrases in unique_phrases(s) for phrase in phrases}
        for family in ("position", "size"):
            qa = S.ask(s, rng, family)
            mentioned = [p for p in sorted(named, key=len, reverse=True) if qa and f"the {p}" in qa.question]
            if len(mentioned) != 2:
                continue
            a, b = sorted(mentioned, key=lambda p: qa.question.index(f"the {p}"))
            a, b = named[a], named[b]
            if qa.question.startswith("Seen from"):
                a, b = b, a
            holds = {"left": a.x < b.x, "right": a.x > b.x, "above": a.y < b.y, "below": a.y > b.y}
            holds |= {"bigger": a.size > b.size, "smaller": a.size < b.size}
            if qa.answer in holds:
                assert holds[qa.answer], qa
            elif qa.answer in ("yes", "no"):
                said = next(w for w in holds if w in qa.question.split())
                assert holds[said] == (qa.answer == "yes"), qa
            checked[family] += 1
    assert checked["position"] > 80 and checked["size"] > 40


@pytest.mark.slow
def test_answer_balance_and_distinct_questions():
    answers = {}
    for i, s in enumerate(scenes(700)):
        found = S.sample_questions(s, random.Random(i), 4)
        assert len({qa.question for qa in found}) == len(found) <= 4
        some = S.sample_questions(s, random.Random(i), 3, ("word", "describe")) if i < 30 else []
        assert {qa.family for qa in some} <= {"word", "describe"}
        for qa in found:
            answers.setdefault(qa.family, Counter())[qa.answer] += 1
    assert set(answers) == set(S.FAMILIES)
    count = answers["count"]
    assert count["0"] <= 0.12 * count.total() and count.most_common(1)[0][1] <= 0.3 * count.total()
    for family in ("exists", "position", "size", "compare"):
        yes, no = answers[family]["yes"], answers[family]["no"]
        assert 0.4 < yes / (yes + no) < 0.6, (family, yes, no)
    assert all(qa == qa.lower() for c in answers.values() for qa in c)


def test_score():
    assert S.score("count", "3", " 3. ") == 1.0 and S.score("count", "3", "4") == 0.0
    assert S.score(S.QA("count", "How many?", "3", ("three",)), "3", "Three") == 1.0
    target = "big red circle top left, word tree bottom, digit 7 right"
    assert S.score("describe", target, target) == 1.0
    assert S.score("describe", target, "Small red circle left, word tree top, digit 7 top.") == 1.0
    assert S.score("describe", target, "big red circle top left") == pytest.approx(0.5)
    assert S.score("describe", target, "") == 0.0
    assert S.score("describe", "big red circle left", "red circle, red circle") == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="expected a family"):
        S.score("mood", "a", "a")


def test_heldout_questions():
    pairs = S.heldout_questions(45)
    counts = Counter(qa.family for _, qa in pairs)
    assert set(counts) == set(S.FAMILIES) and max(counts.values()) - min(counts.values()) <= 1
    assert all(s.split == "heldout" for s, _ in pairs) and len({s for s, _ in pairs}) == 45
    assert pairs == S.heldout_questions(45) and pairs != S.heldout_questions(45, seed=1)


def test_errors():
    with pytest.raises(ValueError, match="things"):
        S.Scene(())
    with pytest.raises(ValueError, match="difficulty"):
        S.sample_scene(random.Random(0), difficulty=2.0)


@pytest.mark.parametrize("mistake", [["--difficulty", "2"], ["--size", "0"], ["--out", __file__]])
def test_mistakes_at_the_command_line(tmp_path, capsys, mistake):
    with pytest.raises(SystemExit) as stop:
        main(["--out", str(tmp_path), "--n", "1", *mistake])
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err
