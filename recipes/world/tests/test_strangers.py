"""The questions by another hand: the same each time, apart from training, and judged whatever the form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARIES = [pytest.importorskip(name) for name in ("resvg_py", "skimage", "matplotlib")]

from recipes.world import strangers  # noqa: E402
from recipes.world.evaluation import strangers_task  # noqa: E402
from recipes.world.scene import NOT_UNDERSTOOD, REFUSAL  # noqa: E402


def truth_of(asked):
    """A right answer in plain words, or as an object."""
    if asked.how == "refusal":
        return NOT_UNDERSTOOD
    if asked.how != "json":
        return ", ".join(asked.accept) if asked.how in ("colours", "things") else asked.accept[0]
    values = {}
    for key, how, accept in asked.truth:
        said = list(accept) if how in ("colours", "things") else accept[0]
        values[key] = list(accept) if how == "box" else said == "yes" if how == "yes" else said
    return json.dumps(values)


@pytest.mark.parametrize("group", strangers.GROUPS)
def test_what_is_true_is_right_and_the_same_each_time(group):
    found = strangers.strangers(40, group)
    assert [one for _, one in found] == [one for _, one in strangers.strangers(40, group)]
    assert len({one.asked for _, one in found}) > 25
    for _, asked in found:
        assert asked.group == group
        assert strangers.judge(asked, truth_of(asked)) == "right", (asked, truth_of(asked))
        refused = strangers.judge(asked, REFUSAL)
        assert refused == ("right" if asked.how == "refusal" else "refused")
        assert strangers.judge(asked, "") == "wrong" or asked.how == "number"


def test_forms_of_an_answer():
    def judge(how, accept, answer):
        return strangers.judge(strangers.Stranger("own wordings", "", "?", how, accept), answer)

    for how, accept, right, wrong in (
        ("number", ("3",), ("3", "three", "There are 3.", "3 stars"), ("2", "yes", "3 or 4")),
        ("yes", ("no",), ("no", "No.", "No, it is not."), ("yes", "red")),
        ("colours", ("red", "blue"), ("blue, red", "red and blue"), ("red", "red, blue, pink")),
        ("things", ("red star",), ("red star", "star", "The star is red."), ("blue star", "red", "circle")),
        ("place", ("top left",), ("top left", '[{"bbox_2d": [9, 9, 90, 90], "label": "x"}]'), ("left",)),
        ("text", ("tree",), ("tree", 'The word is "tree".'), ("trees", "tre")),
    ):
        assert all(judge(how, accept, answer) == "right" for answer in right), (how, right)
        assert all(judge(how, accept, answer) == "wrong" for answer in wrong), (how, wrong)


def test_a_typo_is_one_and_names_nothing_else():
    for _, asked in strangers.strangers(80, "one typo"):
        before, after = asked.clean.split(), asked.question.split()
        assert len(before) == len(after)
        assert sum(a != b for a, b in zip(before, after)) == 1


def test_nothing_that_trains_knows_them():
    loads = "import sys, recipes.world.training, recipes.world.grow; print(*sys.modules)"
    root = Path(strangers.__file__).parents[2]
    said = subprocess.run([sys.executable, "-c", loads], cwd=root, capture_output=True, text=True, check=True)
    assert "recipes.world.stream" in said.stdout.split()
    assert "recipes.world.strangers" not in said.stdout.split()


def test_the_task_asks_all_groups_with_what_stands_around_them():
    task = strangers_task(320)
    assert [sample.family for sample in task.samples[::40]] == [*strangers.GROUPS]
    assert any(sample.system for sample in task.samples) and any(sample.earlier for sample in task.samples)
    assert {len(sample.shows) for sample in task.samples} == {1, 2}
    assert all(len(sample.images()) == len(sample.shows) for sample in task.samples[::40])
    task.check()
