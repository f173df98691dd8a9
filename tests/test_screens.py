"""Screens to click on: what rows say is what is drawn, and training sees nothing of what is held out."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from data.boxes import BoxRows, Point, by_name
from eval.metrics import find_metric
from eval.tasks import DataConfig, data_task
from shapes import screens
from shapes.screens import FORM, SPLITS, main, render_screen, sample_screen, screen_row, words
from tests.rows import source
from training.rewards import Rewards


@pytest.mark.parametrize("split", SPLITS)
def test_every_control_is_drawn_in_its_box(split):
    """And nowhere else, but for a field's name; boxes do not overlap, and no word stands twice."""
    for seed in range(12):
        screen = sample_screen(random.Random(seed), split)
        blank = np.asarray(render_screen(replace(screen, controls=())), np.int64)
        assert blank.shape[:2] == screen.size[::-1]
        taken = np.zeros(blank.shape[:2], int)
        for control in screen.controls:
            x1, y1, x2, y2 = control.box
            alone = np.asarray(render_screen(replace(screen, controls=(control,))), np.int64)
            rows, columns = np.nonzero((alone != blank).any(-1))
            left = 0 if control.kind == "field" else x1
            assert y1 <= rows.min() and rows.max() < y2 and left <= columns.min() and columns.max() < x2
            assert columns.max() - max(columns.min(), x1) > 0.3 * (x2 - x1)
            taken[y1:y2, x1:x2] += 1
        texts = [control.text for control in screen.controls]
        assert taken.max() == 1 and len({*texts}) == len(texts) > 2


def test_a_seed_is_a_screen_and_splits_share_no_word():
    image, row = screen_row(3, "train")
    again, same = screen_row(3, "train")
    assert row == same and image.tobytes() == again.tobytes()
    assert screen_row(4, "train")[0].tobytes() != image.tobytes()
    said = {split: {word for kind in screens._ORDERS for word in words(kind, split)} for split in SPLITS}
    assert not said["train"] & said["heldout"]
    for split in SPLITS:
        rows = [screen_row(seed, split)[1] for seed in range(60)]
        assert {row["kind"] for row in rows} == {*screens._ORDERS}
        assert all(any(word in row["ref"].rstrip(".").split() for word in said[split]) for row in rows)


def test_rows_train_reward_and_evaluate(tmp_path):
    """A click into the control is right in all three, one beside it wrong."""
    main(["--out", str(tmp_path), "--n", "3", "--held-out", "2"])
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    entry = {"boxes": {"points": True, "point": "{thing}"}}
    opened = source(rows, **entry)
    schema = replace(opened.schema, folder=tmp_path)
    asks, answers = schema.conversation(rows[0])
    assert asks["content"][-1]["text"] == rows[0]["ref"]
    said = answers["content"][0]["text"]
    reader = BoxRows(**entry["boxes"])
    size = screen_row(0, "train")[0].size
    ((fields, target),) = reader.asked(reader.groups(rows[0], size), size, by_name)
    beside = fields["form"].write([Point("", (size[0] - 1, 1))], size)
    given = Rewards({"point_in_box": 1})([said, beside], {"target": target, **fields})
    assert target == said and given == {"point_in_box": [1, 0]}
    held_out = data_task(
        DataConfig(str(tmp_path / "validation.jsonl"), boxes=reader), find_metric("boxes", points=True)
    )
    for sample in held_out.samples:
        assert held_out.metric.score(sample.targets[0], sample.targets, sample.fields) == 1
        assert held_out.metric.score(beside, sample.targets, sample.fields) == 0


def test_every_control_of_a_screen_is_clicked_in_a_conversation(tmp_path):
    main(["--out", str(tmp_path), "--n", "1", "--held-out", "0", "--every"])
    (row,) = map(json.loads, (tmp_path / "train.jsonl").read_text().splitlines())
    screen = sample_screen(random.Random("screens:train:0"), "train")
    asked, said = ([one["content"] for one in row["messages"][part::2]] for part in (0, 1))
    assert len(asked) == len(screen.controls)
    for control in screen.controls:
        (answer,) = [answer for text, answer in zip(asked, said) if control.text in text.rstrip(".").split()]
        ((x, y),) = (one.point for one in FORM.read(answer, screen.size).points)
        assert control.box[0] < x < control.box[2] and control.box[1] < y < control.box[3]
