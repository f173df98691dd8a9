"""How the tokens of an image's tiles lie on the image.

A processor stretches an image to whole tiles, cuts it into rows and columns of them, and often adds the
whole image squeezed into one more tile. Nothing is cropped or padded, so that tiles, and the cells of
tokens within them, divide the image evenly: cell (i, j) of a map (h, w) covers the image's pixels from
i / h to (i + 1) / h of its height and from j / w to (j + 1) / w of its width.

(Where patches do not fill a tile, as 27 of 14 pixels in SmolVLM-2.2B's 384, the network does not see the last
pixels of it; the cells are drawn as if it did, at most 1.6 % of a tile further out.)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from data.inputs import TiledImage


@dataclass(frozen=True)
class TileLayout:
    """Of one image.

    rows, columns: of tiles; 1 and 1 where it is not cut.
    side: tokens along each side of a tile, after pixel shuffle.
    has_whole: whether the image as a whole is one more tile, and whole_first: in front of the others.
    """

    rows: int
    columns: int
    side: int
    has_whole: bool
    whole_first: bool

    @classmethod
    def of(cls, image: TiledImage, side: int, whole_first: bool) -> TileLayout:
        rows, columns = max(1, image.rows), max(1, image.columns)
        return cls(rows, columns, side, len(image.tiles) > rows * columns, whole_first)

    @property
    def tiles(self) -> int:
        return self.rows * self.columns + self.has_whole

    @property
    def shape(self) -> tuple[int, int]:
        """(h, w) cells of a map."""
        return self.rows * self.side, self.columns * self.side

    def place(self, weights: Tensor) -> Tensor:
        """Put what each token weighs back in place: (T, tiles · side²) → (T, h, w), with the same sum.

        A token of a tile of the grid has one cell; a token of the whole image's tile is shared out evenly
        among the rows · columns cells that it covers.
        """
        weights = weights.reshape(len(weights), self.tiles, self.side, self.side)
        whole, grid = None, weights
        if self.has_whole:
            whole = weights[:, 0 if self.whole_first else -1]
            grid = weights[:, 1:] if self.whole_first else weights[:, :-1]
        # (T, rows · columns, side, side) → (T, rows, side, columns, side) → (T, h, w)
        grid = grid.unflatten(1, (self.rows, self.columns)).transpose(2, 3)
        placed = grid.reshape(len(weights), *self.shape)
        if whole is not None:
            spread = whole.repeat_interleave(self.rows, 1).repeat_interleave(self.columns, 2)
            placed = placed + spread / (self.rows * self.columns)
        return placed
