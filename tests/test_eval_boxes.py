"""Figures of boxes: known cases, and rows with boxes through `python -m eval`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

import eval.answers
from data.boxes import COORDINATES, Box, Located, Malformed, Point
from data.processor import Processor
from eval import __main__ as command
from eval.boxes import Asked, figures, hits, ious, score_of
from eval.metrics import MetricError, find_metric
from tests import qwen_checkpoints
from tests.house import json_lines

ONE, FAR = (0.0, 0.0, 10.0, 10.0), (50.0, 50.0, 60.0, 60.0)


def asked(targets, *boxes, points=(), malformed=0) -> Asked:
    found = Located(
        tuple(Box("star", box) for box in boxes),
        tuple(Point("star", point) for point in points),
        (Malformed("?", "broken"),) * malformed,
    )
    return Asked(tuple(targets), found)


def test_iou():
    others = [ONE, FAR, (10, 0, 20, 10), (0, 0, 10, 20)]
    assert ious([ONE], others).tolist() == [[1, 0, 0, 0.5]]
    assert ious([(3, 3, 3, 3)], [(3, 3, 3, 3)]).tolist() == [[0]] and ious([], [ONE]).shape == (0, 1)


def test_pairs_are_one_to_one_and_as_many_as_can_be():
    both, left = (0, 0, 20, 10), (0, 0, 9, 10)
    assert hits(asked([ONE, (10, 0, 20, 10)], both, left)) == 2  # the first must leave its first choice
    assert hits(asked([ONE], ONE, ONE, ONE)) == 1
    assert hits(asked([ONE])) == hits(asked([], ONE)) == hits(asked([ONE], FAR)) == 0


@pytest.mark.parametrize(
    ("question", "points", "expected"),
    [
        (asked([ONE], ONE), False, 1),
        (asked([ONE], FAR), False, 0),
        (asked([ONE], FAR, ONE), False, 0),  # the first counts
        (asked([ONE]), False, 0),
        (asked([ONE], (0, 0, 10, 20)), False, 1),  # an IoU of exactly 0.5
        (asked([ONE, FAR], ONE, FAR), False, 1),
        (asked([ONE, FAR], ONE, ONE), False, 0.5),  # the same box twice hits once
        (asked([ONE, FAR], ONE), False, 2 / 3),
        (asked([]), False, 1),
        (asked([], ONE), False, 0),
        (asked([], malformed=1), False, 0),  # that is no refusal
        (asked([ONE], points=[(5, 5)]), True, 1),
        (asked([ONE], points=[(5, 11)]), True, 0),
        (asked([ONE], ONE), True, 1),  # a box's centre
        (asked([ONE, FAR], points=[(5, 5), (6, 6)]), True, 0.5),
    ],
)
def test_score_of_a_question(question, points, expected):
    assert score_of(question, points) == pytest.approx(expected)


def test_figures():
    got = figures(
        [asked([ONE], ONE), asked([ONE], (0, 0, 10, 6)), asked([], FAR), asked([], malformed=1), asked([])]
    )
    assert got["acc_50"] == 1 and got["acc_90"] == 0.5 and got["mean_iou"] == pytest.approx(0.8)
    assert got["absent_refused"] == pytest.approx(1 / 3) and got["parse_failures"] == pytest.approx(0.2)
    assert got["f1_50"] == pytest.approx(2 * 2 / (3 + 2)) and got["point_in_box"] == 1
    assert set(figures([asked([])])) == {"absent_refused", "parse_failures"}
    page = (Path(__file__).parent.parent / "docs" / "evaluate.md").read_text(encoding="utf-8")
    table = page[page.index("| figure | is |") :].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(got)


# -------------------------------------------------------------------------------------------------- rows
def test_the_metric_needs_boxes():
    with pytest.raises(MetricError):
        find_metric("boxes").score("", ["x"], {})
    with pytest.raises(MetricError):
        find_metric("boxes", form="qwen9")


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows",
    [
        [{"ref": "red star", "bbox": [10, 20, 30, 40]}, {"ref": "hat", "bbox": []}],
        [{"objects": {"bbox": [[10, 20, 30, 40], [0, 0, 9, 9]], "category": ["star", "cat"]}}],
    ],
)
def test_rows_with_boxes(rows, tmp_path, capsys):
    """The embedded model knows no boxes: what counts is that all is asked, and scored as boxes."""
    Image.new("RGB", (120, 90), "white").save(tmp_path / "image.png")
    lines = [json.dumps(row | {"image": "image.png"}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    data = ["--data", str(tmp_path / "rows.jsonl"), "--metric", "boxes", "--max-new-tokens", "4"]
    assert command.main([*data, "--compile", "off", "--output", str(tmp_path / "run")]) == 0, (
        capsys.readouterr()
    )
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    things = sum(len(row["objects"].get("bbox", [1])) if "objects" in row else 1 for row in rows)
    assert results["n"] == things and results["task"]["metric"] == "boxes"
    assert {"acc_50", "acc_90", "mean_iou", "f1_50", "parse_failures"} <= set(results["figures"])
    assert ("absent_refused" in results["figures"]) == ("ref" in rows[0])
    samples = json_lines(tmp_path / "run" / "samples.jsonl")
    assert all("Locate" in one["prompt"] for one in samples)
    metric = find_metric("boxes")
    star = next(one for one in samples if "star" in one["question"])
    fields = {"thing": "star", "boxes": [(10, 20, 40, 60)], "size": (120, 90)}
    fields |= {"form": COORDINATES["qwen3-vl"]}
    assert metric.score(star["targets"][0], star["targets"], fields) == 1  # its own target is right


@pytest.mark.slow
@pytest.mark.parametrize("kind", qwen_checkpoints.QWEN)
def test_a_family_is_scored_in_its_own_form(kind, monkeypatch, tmp_path):
    """Thousandths, or pixels of what its model sees of the image; so are the targets of the report."""
    qwen_checkpoints.save_hf(kind, tmp_path / "model")
    size, box = (1000, 600), (250, 150, 500, 450)
    Image.new("RGB", size, "white").save(tmp_path / "image.png")
    row = {"image": "image.png", "ref": "the car", "bbox": [250, 150, 250, 300]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    processor = Processor.from_pretrained(tmp_path / "model", max_pixels=50_000)
    seen = processor.images.plan(*size).parts.shape[:1:-1]
    steps = seen if kind == "qwen2_5_vl" else (1000, 1000)
    own = json.dumps([{"bbox_2d": [round(one * steps[at % 2] / size[at % 2]) for at, one in enumerate(box)]}])
    monkeypatch.setattr(eval.answers, "read_answer", lambda *_: ("", own))
    data = ["--data", str(tmp_path / "rows.jsonl"), "--metric", "boxes", "--max-new-tokens", "4"]
    more = ["--model", str(tmp_path / "model"), "--compile", "off", "--output", str(tmp_path / "run")]
    more += ["--max-pixels", "50000"]
    assert command.main(data + more) == 0
    figures_ = json.loads((tmp_path / "run" / "results.json").read_text())["figures"]
    assert figures_["acc_90"] == figures_["point_in_box"] == 1
    (sample,) = map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines())
    assert json.loads(own)[0].items() <= json.loads(sample["targets"][0])[0].items()


@pytest.mark.parametrize("row", [{"question": "How?", "answer": "so"}, {"ref": "x", "bbox": [1, 2, 300, 4]}])
def test_rows_without_good_boxes_are_refused(row, tmp_path, capsys):
    Image.new("RGB", (12, 9), "white").save(tmp_path / "image.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"image": "image.png"}) + "\n")
    status = command.main(
        ["--data", str(tmp_path / "rows.jsonl"), "--metric", "boxes", "--output", str(tmp_path / "x")]
    )
    assert status == 2 and len(capsys.readouterr().err.strip().splitlines()) == 1
