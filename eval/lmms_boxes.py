"""RefCOCO's tasks of lmms-eval, asked in a model's own form of coordinates and answered in theirs.

Their prompt asks for shares of the image from 0 to 1 in square brackets, which few models write. Nothing here
imports lmms-eval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from data.boxes import CoordinateForm


def asks_for_box(task: str, document: Mapping[str, Any], form: CoordinateForm | None) -> bool:
    """Whether a task wants the box of what a document names, and the model has a form for it."""
    named = isinstance(document.get("answer"), str) and hasattr(document.get("image"), "size")
    return "_bbox_rec" in task and named and form is not None and bool(form.detect)


def in_our_form(
    messages: Sequence[Mapping[str, Any]], document: Mapping[str, Any], form: CoordinateForm
) -> list[dict[str, Any]]:
    """The messages with the question in the model's words; the image stays."""
    question = {"type": "text", "text": form.question("detect", document["answer"])}
    return [
        {**one, "content": [*(part for part in one["content"] if part["type"] != "text"), question]}
        for one in messages
    ]


def in_their_form(answer: str, document: Mapping[str, Any], form: CoordinateForm) -> str:
    """The first box as [x1, y1, x2, y2] from 0 to 1; the answer as it is where it holds none."""
    width, height = document["image"].size
    boxes = form.read(answer, (width, height)).boxes
    if not boxes:
        return answer
    x1, y1, x2, y2 = boxes[0].box
    return f"[{x1 / width:.5f}, {y1 / height:.5f}, {x2 / width:.5f}, {y2 / height:.5f}]"
