"""How well boxes and points agree with those of the data: accuracies, and F1.

| figure | is |
|---|---|
| `acc_50`, `acc_90`, `mean_iou` | of the first box, where one thing is asked for; Acc@0.5 is RefCOCO's |
| `f1_50` | over all boxes of all questions; a box counts once, at an IoU of 0.5 and more |
| `point_in_box` | where one thing is asked for: the first point, or the first box's centre, lies in its box |
| `absent_refused` | the share of things that are not there for which no box and nothing malformed came |
| `parse_failures` | the share of answers that hold something malformed |

A figure whose questions the data do not have is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.boxes import Located, centre

Corners = tuple[float, float, float, float]


@dataclass(frozen=True)
class Asked:
    """What was asked for, where it is, and what was found."""

    targets: tuple[Corners, ...]
    found: Located

    @property
    def boxes(self) -> tuple[Corners, ...]:
        return tuple(box.box for box in self.found.boxes)

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """Points, or the centres of boxes."""
        return tuple(one.point for one in self.found.points or map(centre, self.found.boxes))

    @property
    def refused(self) -> bool:
        return not (self.found.boxes or self.found.points or self.found.malformed)

    def fits(self, points: bool = False) -> np.ndarray:
        """(found, targets): whether each box has an IoU of at least 0.5, or each point lies in the box."""
        if not points:
            return ious(self.boxes, self.targets) >= 0.5
        x1, y1, x2, y2 = np.reshape(self.targets, (-1, 4)).T
        x, y = np.reshape(self.points, (-1, 2, 1)).swapaxes(0, 1)
        return (x1 <= x) & (x <= x2) & (y1 <= y) & (y <= y2)


def ious(boxes: Sequence[Corners], others: Sequence[Corners]) -> np.ndarray:
    """(boxes, others): area in common / area together; 0 for boxes without area."""
    one, other = (np.reshape(np.asarray(given, np.float64), (-1, 4)) for given in (boxes, others))
    sides = np.minimum(one[:, None, 2:], other[:, 2:]) - np.maximum(one[:, None, :2], other[:, :2])
    common = sides.clip(0).prod(-1)
    areas = [(corners[:, 2:] - corners[:, :2]).prod(-1) for corners in (one, other)]
    together = areas[0][:, None] + areas[1] - common
    return np.divide(common, together, out=np.zeros_like(common), where=common > 0)


def matched(worth: np.ndarray) -> float:
    """The most that pairs of (found, targets), one to one, are worth together."""
    from scipy.optimize import linear_sum_assignment  # half a second, which --help does without

    return float(worth[linear_sum_assignment(worth, maximize=True)].sum())


def hits(asked: Asked, points: bool = False) -> int:
    """How many of what was found have a target of their own, one to one, as many as can be."""
    return int(matched(asked.fits(points)))


def score_of(asked: Asked, points: bool = False) -> float:
    """One question, 0 to 1: nothing there, whether it was refused; one thing, whether the first box (or
    point) hits it; several, F1 of the hits."""
    found = len(asked.points if points else asked.boxes)
    if not asked.targets:
        return float(asked.refused)
    if len(asked.targets) == 1:
        return float(asked.fits(points)[:1].any())
    return 2 * hits(asked, points) / (found + len(asked.targets))


def figures(questions: Sequence[Asked], points: bool = False) -> dict[str, float]:
    """The module's table."""

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    present = [one for one in questions if one.targets]
    single = [one for one in present if len(one.targets) == 1]
    absent = [one for one in questions if not one.targets]
    result = {"parse_failures": mean([bool(one.found.malformed) for one in questions])}
    if absent:
        result["absent_refused"] = mean([one.refused for one in absent])
    if single:
        result["point_in_box"] = mean([bool(one.fits(points=True)[:1].any()) for one in single])
    if points:
        return result
    if single:
        best = [float(ious(one.boxes[:1], one.targets).sum()) for one in single]
        result["acc_50"], result["acc_90"] = (mean([value >= at for value in best]) for at in (0.5, 0.9))
        result["mean_iou"] = mean(best)
    if present:
        every = sum(len(one.boxes) + len(one.targets) for one in questions)
        result["f1_50"] = 2 * sum(map(hits, questions)) / every
    return result
