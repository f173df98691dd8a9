"""Rewards by name and by a function: what they give, and what is refused before a run begins."""

from __future__ import annotations

import pytest

from data.box_rows import BoxRows, by_name
from data.boxes import COORDINATES, Box, Point
from training.rewards import Rewards

ROW = {"target": "Three.", "level": 2}


def longer(answers, row, *, base=0):
    return [base + len(answer) * row["level"] for answer in answers]


def raises(answers, row):
    return row["absent"]


def unable(answers, row):
    return [None] * len(answers)


def given_by(name: str, answers: list[str], row: dict, **options) -> list[float]:
    return Rewards({name: {"weight": 1, **options}})(answers, row)[name]


def test_answers_get_the_weighted_sum_of_their_rewards():
    rewards = Rewards({"exact": 1.0, f"{__name__}:longer": {"weight": 0.1, "base": 1}})
    given = rewards(["three", "four", " THREE. "], ROW)
    assert given == {"exact": [1, 0, 1], f"{__name__}:longer": [11, 9, 17]}
    assert rewards.totals(given) == pytest.approx([2.1, 0.9, 2.7])


@pytest.mark.parametrize(
    ("name", "options", "row", "answers"),
    [
        ("exact", {}, {"target": "a dog", "accept": ["Dog"]}, {"dog.": 1, "a dog": 1, "dogs": 0}),
        (
            "number",
            {"tolerance": 0.5},
            {"target": "1,234.5"},
            {"It is 1,234": 1, "-1234.5": 0, "3 of 1.2345e3": 1, "none": 0, "1,23,4": 0},
        ),
        ("number", {}, {"target": "3 dogs"}, {"3": 1, "I see 2, no, 3.0": 1, "2-3": 1, "30": 0}),
        ("length", {"most": 4, "least": 2}, {"target": ""}, {"": 0, "a": 0.5, "abcd": 1, "abcdef": 0.5}),
        ("length", {"most": 2}, {"target": ""}, {"": 1, "abcd": 0, "a" * 9: 0}),
        ("relaxed_accuracy", {"tolerance": 0.1}, {"target": "20"}, {"21": 1, "23": 0}),
    ],
)  # fmt: skip
def test_a_reward_by_name(name, options, row, answers):
    assert given_by(name, list(answers), row, **options) == pytest.approx(list(answers.values()))


@pytest.mark.parametrize("form", ["qwen3-vl", "qwen2.5-vl"])
def test_boxes_and_points_are_read_in_the_models_form(form):
    """Of a row as evaluation asks it: one thing, one that is there twice, and one that is not there."""
    form, size = COORDINATES[form], (200, 100)
    names = ["Save", "Tab", "Tab", "Exit"]
    boxes = [[10, 10, 40, 20], [0, 50, 20, 20], [100, 50, 20, 20], None]
    rows = [
        {"ref": name, "bbox": [box for other, box in zip(names, boxes) if other == name and box]}
        for name in dict.fromkeys(names)
    ]
    reader = BoxRows(form.name, points=True)
    save, tabs, absent = (
        {"target": said, **fields}
        for row in rows
        for fields, said in reader.asked(reader.groups(row, size), size, by_name)
    )

    def points(*places: tuple[float, float]) -> str:
        return form.write([Point("it", place) for place in places], size)

    assert given_by("point_in_box", [points((20, 20)), points((80, 80)), "at the top"], save) == [1, 0, 0]
    assert given_by("point_in_box", [points((5, 60), (110, 60)), points((5, 60))], tabs) == [1, 2 / 3]
    assert given_by("point_in_box", [points((5, 60)), "There is none."], absent) == [0, 1]
    answers = [form.write([Box("it", box)], size) for box in ((10, 10, 50, 30), (10, 10, 30, 30))]
    assert given_by("iou", answers, save) == pytest.approx([1, 0.5])
    assert given_by("iou", [*answers[:1], "none"], absent) == [0, 1]
    both = form.write([Box("it", (100, 50, 120, 70)), Box("it", (0, 50, 20, 60))], size)
    assert given_by("iou", [both], tabs) == pytest.approx([0.75])


def test_a_reward_that_cannot_score_a_row_is_left_out_of_the_sum():
    """One without boxes, one without a number, and whatever a function says so of."""
    rewards = Rewards({"exact": 2.0, "iou": 1.0, "number": 1.0, f"{__name__}:unable": 1.0})
    given = rewards(["[1, 2, 3, 4]", "three"], ROW)
    assert given == {"exact": [0, 1]} and rewards.totals(given) == [0, 2]


@pytest.mark.parametrize("accept", ["six", 6, ["six", 6]])
def test_another_answer_need_not_be_a_list(accept):
    answer = str(accept[-1] if isinstance(accept, list) else accept)
    row = {"target": "half a dozen", "accept": accept}
    assert given_by("exact", [answer, "s", "half a dozen"], row) == [1, 0, 1]


def test_a_file_may_hold_dataclasses_and_import_the_one_beside_it(tmp_path):
    (tmp_path / "beside_rewards.py").write_text("BEST = 3\n")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n\nfrom dataclasses import dataclass\n\n"
        "from beside_rewards import BEST\n\n"
        "@dataclass\nclass Score:\n    value: float\n\n"
        "def score(answers, row):\n    return [Score(BEST).value for _ in answers]\n"
    )
    assert given_by(f"{tmp_path}/mine.py:score", ["a"], ROW) == [3]


@pytest.mark.parametrize(
    "weights",
    [
        *({name: 1.0} for name in ("exakt", "no_such_module:reward", "absent.py:reward", f"{__name__}:ROW")),
        {f"{__name__}:absent": 1.0},
        {"exact": float("nan")},
        {"exact": "much"},
        {"exact": {"weight": 1, "case": True}},
        {"number": {"tolerance": "much"}},
        {"number": {"tolerance": -1}},
        {"relaxed_accuracy": {"tolerance": 2}},
        {f"{__name__}:longer": {"height": 2}},
    ],
)
def test_a_reward_that_there_is_not_is_refused(weights):
    with pytest.raises(ValueError, match=next(iter(weights))):
        Rewards(weights)


@pytest.mark.parametrize(
    "given",
    ["None", "1.0", "'1'", "['1']", "[None, 1]", "[]", "[1, 2]", "[float('nan')]", "{'a': 1}", "1 / 0"],
)
def test_a_function_that_gives_no_numbers_is_named(given, tmp_path, monkeypatch):
    """In a file of one's own, wherever that lies."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(f"def score(answers, row):\n    return {given}\n")
    with pytest.raises(ValueError, match=r"mine\.py:score"):
        Rewards({"mine.py:score": 1.0})(["a"], ROW)


def test_an_error_in_a_function_says_where():
    with pytest.raises(ValueError, match=r"KeyError.*absent.*test_rewards.py, line \d+"):
        given_by(f"{__name__}:raises", ["a"], ROW)
