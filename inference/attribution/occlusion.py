"""Maps of how much less likely an answer becomes when a part of an image is greyed.

    found = drained(occlusion_steps(ForcedAnswer(checkpoint, ["photo.jpg"], "What is it?", answer_ids)))
    found.of([0, 1])[0]                 # (h, w): fall of the first two tokens' probability, first image

A grey window slides over each image. The answer is held fixed, and its probability is read each time (Zeiler
and Fergus, arXiv:1311.2901, section 4.2). A grey patch is itself something to see, and what two places both
show falls with neither: a place without a fall may have been looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data.tiles import Parts
from inference.attribution.teacher_forcing import ForcedAnswer, Steps

GREY = (127, 127, 127)
WINDOW = 0.33  # of the longer side: hides most objects whole, and what shows beside less is not missed
_STEPS = 2  # in one window: it slides by half of itself
_POSITIONS_AT_ONCE = 2048  # of the decoder, over all windows of one pass


class Region(NamedTuple):
    """A rectangle of cells of one image: rows top … bottom - 1, columns left … right - 1."""

    image: int
    top: int
    left: int
    bottom: int
    right: int


@dataclass(frozen=True)
class OcclusionMaps:
    """The log-probabilities of an answer of T tokens, with each of R regions greyed.

    images: N of them, upright RGB. shapes: (h, w) of each image's maps.
    regions: R windows, in cells.
    base: (T,) log-probability of each token with the images as they are.
    occluded: (R, T) the same with a region greyed.
    setting: the window in words.
    """

    images: list[Image.Image]
    shapes: list[tuple[int, int]]
    regions: list[Region]
    base: np.ndarray
    occluded: np.ndarray
    setting: str

    title = "How greying each place changes the answer"
    scale = ("no fall in probability", "the largest fall")
    note = (
        "Under a word: its probability, and the lowest one with a window greyed. "
        "Dark does not mean unseen: what shows in two places is not missed when one is grey."
    )
    full_heat = 0.25  # full heat is at least this fall, so that small differences stay dark

    def of(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """For each image (h, w): by how much the joint probability of these tokens falls, from -1 to 1, the
        mean over the windows that cover a cell."""
        probability, occluded = self.probabilities(tokens)
        sums = [np.zeros((2, *shape)) for shape in self.shapes]  # of falls, and of windows
        for (image, top, left, bottom, right), fall in zip(self.regions, probability - occluded):
            sums[image][:, top:bottom, left:right] += [[[fall]], [[1]]]
        return [(falls / windows).astype(np.float32) for falls, windows in sums]

    def caption(self, tokens: Sequence[int]) -> str:
        probability, occluded = self.probabilities(tokens)
        return f"{probability:.0%}, greyed {occluded.min():.0%}"

    def probabilities(self, tokens: Sequence[int]) -> tuple[float, np.ndarray]:
        """The joint probability of these tokens, each given all before it: with nothing greyed, and with each
        of the regions (R,)."""
        chosen = list(tokens)
        return float(np.exp(self.base[chosen].sum())), np.exp(self.occluded[:, chosen].sum(1))


def occlusion_steps(forced: ForcedAnswer) -> Steps[OcclusionMaps]:
    """The fall of the answer's probability when a window is greyed, for windows all over the images. Only
    the tiles that a window changes are encoded again."""
    shapes, regions, sizes, cells = [], [], [], max(_STEPS, round(_STEPS / WINDOW))
    for number, image in enumerate(forced.images):
        width, height = (max(1, min(side, round(cells * side / max(image.size)))) for side in image.size)
        shapes.append((height, width))
        # The first and last windows hang over the edges by a step, so that as many cover a cell at the edge
        # as any other.
        regions += [
            Region(number, max(0, top), max(0, left), min(top + _STEPS, height), min(left + _STEPS, width))
            for top in range(1 - _STEPS, height)
            for left in range(1 - _STEPS, width)
        ]
        box = _box(image, Region(number, 0, 0, min(_STEPS, height), min(_STEPS, width)), shapes[-1])
        sizes.append(f"{box[2]} x {box[3]} of {image.width} x {image.height} pixels")
    at_once = max(1, _POSITIONS_AT_ONCE // forced.queries.stop)
    features = yield from forced.features()
    (base,) = yield from forced.log_probabilities(torch.cat(features)[None])
    occluded: list[Tensor] = []
    for begin in range(0, len(regions), at_once):
        part = yield from _without(forced, features, regions[begin : begin + at_once], shapes)
        occluded.append((yield from forced.log_probabilities(part)))
    setting = f"grey window of {' and '.join(dict.fromkeys(sizes))}, moved by half its side"
    falls = (base.double().cpu().numpy(), torch.cat(occluded).double().cpu().numpy())
    return OcclusionMaps(forced.images, shapes, regions, *falls, setting)


def greyed(image: Image.Image, region: Region, shape: tuple[int, int]) -> Image.Image:
    """The image with a region, in cells of a map (h, w), in grey."""
    out = image.copy()
    out.paste(GREY, _box(image, region, shape))
    return out


def _without(
    forced: ForcedAnswer, features: list[Tensor], regions: list[Region], shapes: list[tuple[int, int]]
) -> Steps[Tensor]:
    """Features with each of the regions greyed, (R, P, D), from those of the images' parts."""
    versions = torch.cat(features).repeat(len(regions), 1, 1)
    ends = list(accumulate(map(len, features)))
    changed: list[Parts] = []
    places: list[tuple[int, int]] = []
    for version, region in enumerate(regions):
        image = greyed(forced.images[region.image], region, shapes[region.image])
        parts = forced.checkpoint.processor.cut(image).parts
        pairs = zip(parts.digests, forced.tiled[region.image].parts.digests, strict=True)
        differs = [place for place, (new, old) in enumerate(pairs) if new != old]
        changed.append(parts[differs])
        before = sum(len(visual.parts) for visual in forced.tiled[: region.image])
        places += [(version, before + part) for part in differs]
        yield
    if places:
        new = yield from forced.encode(changed)
        for (version, part), own in zip(places, new, strict=True):
            versions[version, ends[part] - len(own) : ends[part]] = own
    return versions


def _box(image: Image.Image, region: Region, shape: tuple[int, int]) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) in pixels; neighbouring cells share no pixel and leave none out."""
    (width, height), (rows, columns) = image.size, shape
    left, right = (round(column * width / columns) for column in (region.left, region.right))
    top, bottom = (round(row * height / rows) for row in (region.top, region.bottom))
    return left, top, right, bottom
