"""Whether a map of where a model looked agrees with a box: as `eval.boxes` says whether an answer does.

looked_at(checkpoint, image, "Where is the star?", answer_ids, [(20, 10, 90, 60)])[0]["energy"]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from inference.attribution.attention import Indices, attention_maps
from inference.checkpoint import Checkpoint

Corners = tuple[float, float, float, float]


def looked_at(
    checkpoint: Checkpoint,
    image: Any,
    question: str,
    answer_ids: Sequence[int],
    boxes: Sequence[Corners],
    layers: Indices = None,
    heads: Indices = None,
    system: str | None = None,
) -> list[dict[str, float]]:
    """`agreement` of each box, in pixels of the image, with the attention of the whole answer, but for its
    stop token. Raises as `attention_maps` does."""
    ids = [one for one in answer_ids if one not in checkpoint.stop_token_ids] or answer_ids
    found = attention_maps(checkpoint, [image], question, ids, layers, heads, system)
    heat = found.of(range(len(ids)))[0]
    return [agreement(heat, box, found.images[0].size) for box in boxes]


def agreement(heat: np.ndarray, box: Sequence[float], size: tuple[int, int]) -> dict[str, float]:
    """Of a map (h, w) that divides an image of `size` evenly, and a box (x1, y1, x2, y2) in its pixels.

    Returns:
        energy: the share of the map's (positive) heat that lies in the box; a cell counts by the share of it
            that does. Without any heat 0.
        chance: the box's share of the image, which an even map would score.
        pointing: 1 where the centre of a hottest cell lies in the box, or the box's own in that cell, if it
            is smaller than a cell; else 0 (the pointing game of Zhang et al. 2016).
    """
    heat = np.clip(np.asarray(heat, dtype=float), 0, None)
    (height, width), (x1, y1, x2, y2) = heat.shape, box
    edges_x = np.linspace(0, size[0], width + 1)
    edges_y = np.linspace(0, size[1], height + 1)
    covered_x = np.clip(np.minimum(edges_x[1:], x2) - np.maximum(edges_x[:-1], x1), 0, None) / (
        size[0] / width
    )
    covered_y = np.clip(np.minimum(edges_y[1:], y2) - np.maximum(edges_y[:-1], y1), 0, None) / (
        size[1] / height
    )
    total = float(heat.sum())
    row, column = np.unravel_index(int(heat.argmax()), heat.shape)
    left, right, top, bottom = edges_x[column], edges_x[column + 1], edges_y[row], edges_y[row + 1]
    centre = ((left + right) / 2, (top + bottom) / 2)
    middle = ((x1 + x2) / 2, (y1 + y2) / 2)
    hit = x1 <= centre[0] <= x2 and y1 <= centre[1] <= y2
    hit = hit or (left <= middle[0] <= right and top <= middle[1] <= bottom)
    return {
        "energy": float((heat * covered_y[:, None] * covered_x).sum()) / total if total else 0.0,
        "chance": (x2 - x1) * (y2 - y1) / (size[0] * size[1]),
        "pointing": float(hit and total > 0),
    }
