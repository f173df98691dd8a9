"""benchmarks.attribution: which thing a question asks for, and whether a map lies on it."""

from __future__ import annotations

import json

import pytest

from benchmarks import attribution
from shapes import object_map


def test_the_thing_asked_for_has_the_answer():
    asked = list(attribution.questions(150, seed=1))
    assert len(asked) == 150 and {qa.family for _, qa, _ in asked} == {"colour", "shape"}
    for scene, qa, number in asked:
        thing = scene.things[number]
        assert qa.answer == (thing.colour if qa.family == "colour" else thing.name), qa.question


def test_a_map_on_a_thing_is_found_on_it_and_on_no_other():
    scene, _, _ = next(attribution.questions(1, seed=1))
    things = object_map(scene, 960)
    for number in range(len(scene.things)):
        heat = (things == number + 1).astype(float)
        assert attribution.measure(scene, number, heat) == (True, True)
        assert attribution.measure(scene, (number + 1) % len(scene.things), heat) == (False, False)


def test_a_run_ends_in_its_figures(model_folder, capsys):
    assert attribution.main(["--model", str(model_folder), "--questions", "2", "--window", "1"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    methods = [row["method"] for row in result["rows"]]
    assert methods == [
        "occlusion, window 1",
        "attention, all layers",
        "attention, layer 0",
        "attention, layer 1",
    ]
    assert result["questions"] == 2 and 0 < result["guess"] <= 0.5
    assert all(row["low"] <= row["asked"] <= row["high"] for row in result["rows"])


@pytest.mark.parametrize("wrong", [("--window", "3"), ("--questions", "0")])
def test_what_cannot_be_measured(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        attribution.main(list(wrong))
    assert stop.value.code == 2 and wrong[0] in capsys.readouterr().err
