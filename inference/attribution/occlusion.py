"""What an answer loses when a part of an image is greyed: evidence that needs no look inside the model.

    found = occlusion_maps(checkpoint, ["photo.jpg"], "What is it?", answer_ids)
    found.of([0, 1])[0]                 # (h, w): fall of the first two tokens' probability, first image

A grey window slides over each image; the answer is held fixed, and its probability read each time (Zeiler
and Fergus, arXiv:1311.2901, section 4.2). A grey patch is itself something to see, and what two places both
show falls with neither: no fall does not mean no look.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from inference.attribution.asked import Asked
from inference.attribution.maps import OcclusionMaps, Region
from inference.attribution.options import LEAST_WINDOW, WINDOW
from inference.checkpoint import Checkpoint, RequestError

GREY = (127, 127, 127)
_STEPS = 2  # in one window: it slides by half of itself
_POSITIONS_AT_ONCE = 2048  # of the decoder, over all windows of one pass


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
            by half of it. The vision tower sees again only the tiles that a window changes.
        progress: a bar on stderr, where that is a terminal.

    Returns:
        maps of (T, h, w) for each image, h and w steps of the window.

    Raises:
        RequestError: no image, no answer, a window out of bounds, too long for the context.
        PromptError, ImageError: question or image cannot be used.
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
    if not LEAST_WINDOW <= window <= 1:
        raise RequestError(f"window: expected a share from {LEAST_WINDOW:g} to 1, got {window:g}")
    asked = Asked(checkpoint, images, question, answer_ids, system)
    features = asked.features(torch.cat([image.tiles for image in asked.tiled]))  # (n, S, D)
    base = asked.log_probabilities(features[None])[0]
    shapes = [_cells(image, window) for image in asked.images]
    regions = [region for number, shape in enumerate(shapes) for region in _windows(number, *shape)]
    at_once = max(1, _POSITIONS_AT_ONCE // asked.queries.stop)
    hidden: list[Tensor] = []
    for begin in range(0, len(regions), at_once):
        yield begin, len(regions)
        part = regions[begin : begin + at_once]
        hidden.append(asked.log_probabilities(_without(asked, features, part, shapes)))
    return OcclusionMaps(
        asked.images,
        asked.answer,
        shapes,
        regions,
        base.double().cpu().numpy(),
        torch.cat(hidden).double().cpu().numpy(),
        _in_words(asked.images, shapes),
    )


def greyed(image: Image.Image, region: Region, shape: tuple[int, int]) -> Image.Image:
    """The image with a region, in cells of a map (h, w), in grey."""
    out = image.copy()
    out.paste(GREY, _box(image, region, shape))
    return out


def _without(asked: Asked, features: Tensor, regions: list[Region], shapes: list[tuple[int, int]]) -> Tensor:
    """Features with each of the regions greyed, (R, n, S, D), from those of the images (n, S, D)."""
    starts = [0]
    for tiled in asked.tiled:
        starts.append(starts[-1] + len(tiled.tiles))
    versions = features.repeat(len(regions), 1, 1, 1)
    changed, places = [], []
    for version, region in enumerate(regions):
        number = region.image
        image = greyed(asked.images[number], region, shapes[number])
        tiles, before = asked.checkpoint.processor.tile(image).tiles, asked.tiled[number].tiles
        differs = (tiles != before).flatten(1).any(1)
        changed.append(tiles[differs])
        places += [(version, starts[number] + int(tile)) for tile in differs.nonzero()[:, 0]]
    if places:
        rows, columns = (torch.tensor(axis, device=features.device) for axis in zip(*places, strict=True))
        versions[rows, columns] = asked.features(torch.cat(changed))
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
