"""What was found about an answer: for each of its tokens a map over each image.

Maps are numpy float32 (T, h, w) or (h, w), their cells divide the image evenly (see `layout.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class AttentionMaps:
    """Shares of attention.

    images: N of them, upright RGB.
    token_ids: T tokens of the answer.
    maps: for each image (T, h, w): the share of a token's attention, averaged over layers and heads, that
        goes to each cell. The sum over all images' cells is what images get; text gets the rest of 1.
    setting: layers and heads in words.
    """

    images: list[Image.Image]
    token_ids: list[int]
    maps: list[np.ndarray]
    setting: str

    def of(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """For each image (h, w): the mean over some of the answer's tokens, given by their places in it."""
        return [of_image[list(tokens)].mean(0) for of_image in self.maps]


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
    """What greying each of R regions does to the answer.

    images: N of them, upright RGB.
    token_ids: T tokens of the answer.
    shapes: (h, w) of each image's maps.
    regions: R windows, in cells.
    base: (T,) log-probability of each token with the images as they are.
    hidden: (R, T) the same with a region greyed.
    setting: the window in words.
    """

    images: list[Image.Image]
    token_ids: list[int]
    shapes: list[tuple[int, int]]
    regions: list[Region]
    base: np.ndarray
    hidden: np.ndarray
    setting: str

    @property
    def maps(self) -> list[np.ndarray]:
        """For each image (T, h, w): by how many nats a token's log-probability falls, the mean over the
        windows that cover a cell; negative where greying makes the token likelier."""
        return self._spread(self.base[:, None] - self.hidden.T)

    def of(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """For each image (h, w): by how much the probability of these tokens together falls, from -1 to 1,
        the mean over the windows that cover a cell."""
        return [spread[0] for spread in self._spread((self.certain(tokens) - self.doubted(tokens))[None])]

    def certain(self, tokens: Sequence[int]) -> float:
        """The probability of these tokens together, each given all before it, with nothing greyed."""
        return float(np.exp(self.base[list(tokens)].sum()))

    def doubted(self, tokens: Sequence[int]) -> np.ndarray:
        """(R,): the same with each of the regions greyed."""
        return np.exp(self.hidden[:, list(tokens)].sum(1))

    def _spread(self, values: np.ndarray) -> list[np.ndarray]:
        """Values of regions, (K, R) → for each image (K, h, w): the mean over the regions on a cell."""
        sums = [np.zeros((len(values), *shape)) for shape in self.shapes]
        counts = [np.zeros(shape) for shape in self.shapes]
        for number, region in enumerate(self.regions):
            cells = np.s_[region.top : region.bottom, region.left : region.right]
            sums[region.image][:, *cells] += values[:, number, None, None]
            counts[region.image][cells] += 1
        return [(total / count).astype(np.float32) for total, count in zip(sums, counts, strict=True)]


Maps = AttentionMaps | OcclusionMaps
