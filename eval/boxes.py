"""How well boxes and points agree with those of the data: accuracies, F1, COCO's mean average precision.

| figure | is |
|---|---|
| `acc_50`, `acc_90`, `mean_iou` | of the first box, where one thing is asked for; Acc@0.5 is RefCOCO's |
| `f1_50` | over all boxes of all questions; a box counts once, at an IoU of 0.5 and more |
| `point_in_box` | where one thing is asked for: the first point, or the first box's centre, lies in its box |
| `absent_refused` | the share of things that are not there for which no box and nothing malformed came |
| `parse_failures` | the share of answers that hold something malformed |
| `map`, `map_50` | average precision as pycocotools takes it; the order of boxes stands for confidence |

A figure whose questions the data do not have is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from data.boxes import Located, centre

Corners = tuple[float, float, float, float]
MOST_DETECTIONS = 100  # of an image and category, as COCO's maxDets
# Spaced as NumPy spaces pycocotools' own: a recall that equals one must fall on the same side of it.
_RECALLS = [number * 0.01 for number in range(100)] + [1.0]
_THRESHOLDS = [0.5 + number * ((0.95 - 0.5) / 9) for number in range(9)] + [0.95]


@dataclass(frozen=True)
class Asked:
    """What was asked for, where it is, and what was found."""

    name: str
    targets: tuple[Corners, ...]
    found: Located

    @property
    def boxes(self) -> tuple[Corners, ...]:
        return tuple(box.box for box in self.found.boxes)

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """Points, or the centres of boxes."""
        if self.found.points:
            return tuple(point.point for point in self.found.points)
        return tuple(centre(box).point for box in self.found.boxes)

    @property
    def refused(self) -> bool:
        return not (self.found.boxes or self.found.points or self.found.malformed)


def iou(one: Corners, other: Corners) -> float:
    """Area in common / area together; 0 for boxes without area."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (one, other)]
    return width * height / (sum(areas) - width * height)


def contains(box: Corners, point: tuple[float, float]) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def most_pairs(fits: Sequence[Sequence[bool]]) -> int:
    """The largest number of pairs (row, column) that fit, each row and column in one pair at most."""
    partner: dict[int, int] = {}  # column -> row

    def place(row: int, tried: set[int]) -> bool:
        for column, does in enumerate(fits[row]):
            if does and column not in tried:
                tried.add(column)
                if column not in partner or place(partner[column], tried):
                    partner[column] = row
                    return True
        return False

    return sum(place(row, set()) for row in range(len(fits)))


def hits(asked: Asked, points: bool = False) -> int:
    """How many of what was found have a target of their own: IoU of at least 0.5, or a point in its box."""
    if points:
        return most_pairs([[contains(box, point) for box in asked.targets] for point in asked.points])
    return most_pairs([[iou(box, target) >= 0.5 for target in asked.targets] for box in asked.boxes])


def score_of(asked: Asked, points: bool = False) -> float:
    """One question, 0 to 1: nothing there, whether it was refused; one thing, whether the first box (or
    point) hits it; several, F1 of the hits."""
    found = asked.points if points else asked.boxes
    if not asked.targets:
        return float(asked.refused)
    if len(asked.targets) == 1:
        if not found:
            return 0.0
        if points:
            return float(contains(asked.targets[0], asked.points[0]))
        return float(iou(asked.boxes[0], asked.targets[0]) >= 0.5)
    return 2 * hits(asked, points) / (len(found) + len(asked.targets))


def figures(questions: Sequence[Asked], points: bool = False) -> dict[str, float]:
    """The module's table."""

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    present = [one for one in questions if one.targets]
    single = [one for one in present if len(one.targets) == 1]
    absent = [one for one in questions if not one.targets]
    result = {"parse_failures": mean([float(bool(one.found.malformed)) for one in questions])}
    if absent:
        result["absent_refused"] = mean([float(one.refused) for one in absent])
    if single:
        inside = [any(contains(one.targets[0], point) for point in one.points[:1]) for one in single]
        result["point_in_box"] = mean(inside)
    if points:
        return result
    if single:
        best = [iou(one.boxes[0], one.targets[0]) if one.boxes else 0.0 for one in single]
        result["acc_50"], result["acc_90"] = (mean([value >= at for value in best]) for at in (0.5, 0.9))
        result["mean_iou"] = mean(best)
    if present:
        right = sum(hits(one) for one in questions)
        every = sum(len(one.boxes) + len(one.targets) for one in questions)
        result["f1_50"] = 2 * right / every
        result["map"], result["map_50"] = mean_average_precision(questions)
    return result


def mean_average_precision(questions: Sequence[Asked]) -> tuple[float, float]:
    """(over IoUs of 0.5 to 0.95, at 0.5), averaged over names; each question is about an image of its own."""
    names = dict.fromkeys(one.name for one in questions if one.targets)
    by_name = [[one for one in questions if one.name == name] for name in names]
    precisions = [[_average_precision(own, at) for at in _THRESHOLDS] for own in by_name]
    every = [value for own in precisions for value in own]
    return math.fsum(every) / len(every), math.fsum(own[0] for own in precisions) / len(precisions)


def _average_precision(questions: Sequence[Asked], threshold: float) -> float:
    """Precision at 101 recalls. Boxes are taken in their order, all first ones before all second ones."""
    ranked: list[tuple[int, bool]] = []  # (place in its answer, whether it hits)
    for one in questions:
        free = list(one.targets)
        for place, box in enumerate(one.boxes[:MOST_DETECTIONS]):
            # Of equal targets the last, as pycocotools does.
            best, which = max(((iou(box, target), at) for at, target in enumerate(free)), default=(-1.0, 0))
            ranked.append((place, best >= min(threshold, 1 - 1e-10)))
            if ranked[-1][1]:
                free.pop(which)
    ranked.sort(key=lambda pair: pair[0])
    right = list(accumulate(hit for _, hit in ranked))
    count = sum(len(one.targets) for one in questions)
    precision = [hit / (number + 1) for number, hit in enumerate(right)]
    for at in range(len(precision) - 2, -1, -1):
        precision[at] = max(precision[at], precision[at + 1])
    total, place = 0.0, 0
    for recall in _RECALLS:
        while place < len(right) and right[place] / count < recall:
            place += 1
        total += precision[place] if place < len(right) else 0.0
    return total / len(_RECALLS)
