"""How right an answer about a drawing is; `shapes/heldout.py` asks the questions."""

from __future__ import annotations

import json

from eval.boxes import Asked, iou, score_of
from shapes import score
from shapes.heldout import BY_QUESTION, DrawingQuestion, drawing_questions
from shapes.places import FORM
from shapes.world import FAMILIES, KNOWS, QA

__all__ = ["drawing_questions", "score_drawing"]


def score_drawing(asked: DrawingQuestion, answer: str) -> float:
    """1 or 0; for "describe" and "boxes" an F1, for "box" the IoU of the first box. See `eval.boxes`."""
    qa = asked.qa
    kind = qa.family if asked.family in BY_QUESTION else asked.family.partition(", ")[0]
    kind = "describe" if kind == "list" else kind
    if kind in FAMILIES:
        return score(QA(kind, qa.question, qa.answer, qa.accept), qa.answer, answer)
    if kind == "in JSON":
        return float(_value(answer) == json.loads(qa.answer))
    if kind == "absent":
        return float(answer.strip().lower() == qa.answer.lower())
    if kind in ("outside image", "outside question"):  # models say it with what can be asked, or without
        return float(answer.strip().lower().startswith(f"i only know {KNOWS}"))
    places = Asked("", asked.boxes, FORM.read(answer, (1000, 1000)))
    if kind == "box":
        return max((iou(box, asked.boxes[0]) for box in places.boxes[:1]), default=0.0)
    return score_of(places, points="point_2d" in qa.answer)


def _value(answer: str):
    try:
        return json.loads(answer)
    except ValueError:
        return None
