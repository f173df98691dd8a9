"""How much less likely an answer becomes when a part of an image is greyed.

    found = occlusion_maps(checkpoint, ["photo.jpg"], "What is it?", answer_ids)
    found.of([0, 1])[0]                 # (h, w): fall of the first two tokens' probability, first image

A grey window slides over each image. The answer is held fixed, and its probability is read each time (Zeiler
and Fergus, arXiv:1311.2901, section 4.2). A grey patch is itself something to see, and what two places both
show falls with neither: a place without a fall may have been looked at.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from inference.attribution.settings import MIN_WINDOW, WINDOW
from inference.attribution.teacher_forcing import ForcedAnswer
from inference.checkpoint import Checkpoint, RequestError

GREY = (127, 127, 127)
_STEPS = 2  # in one window: it slides by half of itself
_POSITIONS_AT_ONCE = 2048  # of the decoder, over all windows of one pass


@dataclass(frozen=True)
class Region:
    """A rectangle of cells of one image: rows top … bottom - 1, columns left … right - 1."""

    image: int
    top: int
    left: int
    bottom: int
    right: int


@dataclass(frozen=True)
class OcclusionMaps:
    """What greying each of R regions does to an answer of T tokens.

    images: N of them, upright RGB.
    shapes: (h, w) of each image's maps.
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

    @property
    def maps(self) -> list[np.ndarray]:
        """For each image (T, h, w): by how many nats a token's log-probability falls, the mean over the
        windows that cover a cell; negative where greying makes the token likelier."""
        return self._spread(self.base[:, None] - self.occluded.T)

    def of(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """For each image (h, w): by how much the joint probability of these tokens falls, from -1 to 1, the
        mean over the windows that cover a cell."""
        falls = self.probability(tokens) - self.occluded_probability(tokens)
        return [spread[0] for spread in self._spread(falls[None])]

    def probability(self, tokens: Sequence[int]) -> float:
        """The joint probability of these tokens, each given all before it, with nothing greyed."""
        return float(np.exp(self.base[list(tokens)].sum()))

    def occluded_probability(self, tokens: Sequence[int]) -> np.ndarray:
        """(R,): the same with each of the regions greyed."""
        return np.exp(self.occluded[:, list(tokens)].sum(1))

    def _spread(self, values: np.ndarray) -> list[np.ndarray]:
        """Values of regions, (K, R) → for each image (K, h, w): the mean over the regions on a cell."""
        sums = [np.zeros((len(values), *shape)) for shape in self.shapes]
        counts = [np.zeros(shape) for shape in self.shapes]
        for number, region in enumerate(self.regions):
            cells = np.s_[region.top : region.bottom, region.left : region.right]
            sums[region.image][:, *cells] += values[:, number, None, None]
            counts[region.image][cells] += 1
        return [(total / count).astype(np.float32) for total, count in zip(sums, counts, strict=True)]


def occlusion_maps(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    question: str,
    answer_ids: Sequence[int],
    window: float = WINDOW,
    system: str | None = None,
    progress: bool = False,
) -> OcclusionMaps:
    """How much the answer's probability falls when a window is greyed, for windows all over the images.

    Args:
        images: at least one, anything that `load_image` takes.
        answer_ids: T token ids of the answer.
        window: side of the window, a share of the image's longer side; 1 greys the whole image. It slides
            by half of it. Only the tiles that a window changes are encoded again.
        progress: show a bar on stderr if that is a terminal.
    """
    steps = occlusion_steps(checkpoint, images, question, answer_ids, window, system)
    with tqdm(unit="window", disable=None if progress else True, leave=False) as bar:
        while True:
            try:
                done, bar.total = next(steps)
                bar.update(done - bar.n)
            except StopIteration as end:
                return end.value


def occlusion_steps(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    question: str,
    answer_ids: Sequence[int],
    window: float = WINDOW,
    system: str | None = None,
) -> Generator[tuple[int, int], None, OcclusionMaps]:
    """`occlusion_maps` a few windows at a time: yields (windows done, all windows), returns the maps."""
    if not MIN_WINDOW <= window <= 1:
        raise RequestError(f"window: expected a share from {MIN_WINDOW:g} to 1, got {window:g}")
    forced = ForcedAnswer(checkpoint, images, question, answer_ids, system)
    features = forced.features(torch.cat([image.tiles for image in forced.tiled]))  # (n, S, D)
    base = forced.log_probabilities(features[None])[0]
    shapes = [_cells(image, window) for image in forced.images]
    regions = [region for number, shape in enumerate(shapes) for region in _windows(number, *shape)]
    at_once = max(1, _POSITIONS_AT_ONCE // forced.queries.stop)
    occluded: list[Tensor] = []
    for begin in range(0, len(regions), at_once):
        yield begin, len(regions)
        part = regions[begin : begin + at_once]
        occluded.append(forced.log_probabilities(_without(forced, features, part, shapes)))
    return OcclusionMaps(
        forced.images,
        shapes,
        regions,
        base.double().cpu().numpy(),
        torch.cat(occluded).double().cpu().numpy(),
        _in_words(forced.images, shapes),
    )


def greyed(image: Image.Image, region: Region, shape: tuple[int, int]) -> Image.Image:
    """The image with a region, in cells of a map (h, w), in grey."""
    out = image.copy()
    out.paste(GREY, _box(image, region, shape))
    return out


def _without(
    forced: ForcedAnswer, features: Tensor, regions: list[Region], shapes: list[tuple[int, int]]
) -> Tensor:
    """Features with each of the regions greyed, (R, n, S, D), from those of the images (n, S, D)."""
    starts = [0]
    for tiled in forced.tiled:
        starts.append(starts[-1] + len(tiled.tiles))
    versions = features.repeat(len(regions), 1, 1, 1)
    changed, places = [], []
    for version, region in enumerate(regions):
        number = region.image
        image = greyed(forced.images[number], region, shapes[number])
        tiles, before = forced.checkpoint.processor.tile(image).tiles, forced.tiled[number].tiles
        differs = (tiles != before).flatten(1).any(1)
        changed.append(tiles[differs])
        places += [(version, starts[number] + int(tile)) for tile in differs.nonzero()[:, 0]]
    if places:
        rows, columns = (torch.tensor(axis, device=features.device) for axis in zip(*places, strict=True))
        versions[rows, columns] = forced.features(torch.cat(changed))
    return versions


def _cells(image: Image.Image, window: float) -> tuple[int, int]:
    """(h, w): steps of the window over an image."""
    longest, cells = max(image.size), max(_STEPS, round(_STEPS / window))
    width, height = (max(1, min(side, round(cells * side / longest))) for side in image.size)
    return height, width


def _windows(image: int, height: int, width: int) -> Iterator[Region]:
    """All windows of an image of so many cells. The first and last hang over its edges by a step, so that as
    many cover a cell at the edge as any other."""
    for top in range(1 - _STEPS, height):
        for left in range(1 - _STEPS, width):
            bottom, right = min(top + _STEPS, height), min(left + _STEPS, width)
            yield Region(image, max(0, top), max(0, left), bottom, right)


def _box(image: Image.Image, region: Region, shape: tuple[int, int]) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) in pixels; neighbouring cells share no pixel and leave none out."""
    (width, height), (rows, columns) = image.size, shape
    across = (round(column * width / columns) for column in (region.left, region.right))
    down = (round(row * height / rows) for row in (region.top, region.bottom))
    (left, right), (top, bottom) = across, down
    return left, top, right, bottom


def _in_words(images: list[Image.Image], shapes: list[tuple[int, int]]) -> str:
    parts = []
    for image, shape in zip(images, shapes, strict=True):
        _, _, width, height = _box(image, Region(0, 0, 0, *(min(_STEPS, cells) for cells in shape)), shape)
        parts.append(f"{width} x {height} of {image.width} x {image.height} pixels")
    return f"grey window of {' and '.join(dict.fromkeys(parts))}, moved by half of it"
