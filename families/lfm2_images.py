"""Images of LFM2-VL: tiles of a large one, and all of it in its own shape.

Sizes, grids and pixels are those of transformers' Lfm2VlImageProcessor. It resizes with torchvision, which
calls the operator of PyTorch that is called here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from PIL import Image

from data import tiles
from data.chat import chat_template
from data.errors import ProcessorError
from data.tokenizer import IMAGE, AnyTokenizer, image_settings, open_with
from families.qwen_videos import fit
from families.resizing import CLIP_PIXELS, MODES, TileGrids, resized
from families.saving import SavedProcessor
from models.checkpoints.files import Opened

START, END, THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
# Lfm2VlImageProcessor's own, where a file does not say.
_DEFAULTS: dict[str, Any] = {
    "downsample_factor": 2, "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10,
    "use_thumbnail": True, "min_image_tokens": 64, "max_image_tokens": 256, "encoder_patch_size": 16,
    "tile_size": 512, "max_pixels_tolerance": 2.0, **CLIP_PIXELS,
    "resample": int(Image.Resampling.BILINEAR), "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


class Lfm2Images(tiles.TiledImages):
    """The rule of transformers' Lfm2VlProcessor: a large image becomes a grid of tiles, and all of it in its
    own shape follows. `settings` are those of preprocessor_config.json."""

    image_token = IMAGE
    flat = own_sizes = True

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = _DEFAULTS | {key: settings[key] for key in _DEFAULTS if settings.get(key) is not None}
        with tiles.reading_settings(self.settings):
            known = SimpleNamespace(**self.settings)
            resample, self._values = tiles.pixel_rule(self.settings)
            self.patch, self.tile_size = known.encoder_patch_size, known.tile_size
            self.factor = self.patch * known.downsample_factor
            tokens = (known.min_image_tokens, known.max_image_tokens)
            self.least, self.most = (count * self.factor**2 for count in tokens)
            self._largest = self.most * float(known.max_pixels_tolerance)
            self._mode = MODES[resample]
        self.tile_positions, self.with_whole = (self.tile_size // self.factor) ** 2, bool(known.use_thumbnail)
        fewest, most = (known.min_tiles, known.max_tiles) if known.do_image_splitting else (1, 1)
        self._grids = TileGrids(fewest, most, self.tile_size)
        self._splits, self.longest_side = most > 1, self.tile_size * most  # an image of one row

    def within(self, positions: int) -> Lfm2Images:
        if positions < 1:
            raise ProcessorError(f"expected at least one position, got {positions}")
        own, settings = self.settings["max_image_tokens"], dict(self.settings)
        rest = positions - own * self.with_whole
        most = min(rest // self.tile_positions, settings["max_tiles"])
        if self._splits and most > 1:
            settings |= {"max_tiles": most, "min_tiles": min(settings["min_tiles"], most)}
        else:
            whole = min(own, positions) if self._splits else positions
            least = min(settings["min_image_tokens"], max(1, whole // 2))  # enlarged sides are rounded up
            settings |= {"min_image_tokens": least, "max_image_tokens": whole, "do_image_splitting": False}
        return Lfm2Images(settings)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        near = max(self.patch, self._round(height)) * max(self.patch, self._round(width))
        if not self._splits or near <= self._largest:
            return self.uncut
        return self._grids.nearest(width, height)

    def _round(self, side: float) -> int:
        return round(side / self.factor) * self.factor

    def _whole_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the image in its own shape, between the least and the most pixels."""
        rows, columns = fit(height, width, self.factor, self.least, self.most, smallest=1)
        return columns * self.factor, rows * self.factor

    def plan(self, width: int, height: int) -> tiles.Visual:
        grid, (wide, high) = self.grid(width, height), self._whole_size(width, height)
        parts = tiles.Parts.planned(0 if grid == self.uncut else math.prod(grid), self.tile_size)
        if grid == self.uncut or self.with_whole:
            parts = tiles.Parts.cat([parts, tiles.Parts.planned(1, high, wide)])
        return tiles.Visual(parts, self.positions(parts), grid, (width, height))

    def positions(self, parts: tiles.Parts) -> int:
        return sum(math.prod(part.pixels.shape[1:]) for part in parts) // self.factor**2

    def cut(self, image: Image.Image) -> tiles.Visual:
        planned, side, parts = self.plan(*image.size), self.tile_size, list[tiles.Parts]()
        (rows, columns), pixels = planned.grid, tiles.pixels_of(image)
        if planned.grid != self.uncut:
            grown = resized(pixels, columns * side, rows * side, self._mode)
            cut = grown.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4)
            parts.append(tiles.Parts.of(cut.reshape(-1, 3, side, side), self._values))
        if planned.grid == self.uncut or self.with_whole:
            whole = resized(pixels, *self._whole_size(*image.size), self._mode)
            parts.append(tiles.Parts.of(whole[None], self._values))
        return replace(planned, parts=tiles.Parts.cat(parts))

    def prompt(self, visual: tiles.Visual, index: int, count: int) -> str:
        rows, columns = visual.grid
        cut = rows * columns if visual.grid != self.uncut else 0
        names = [f"<|img_row_{at // columns + 1}_col_{at % columns + 1}|>" for at in range(cut)]
        text = "".join(name + IMAGE * self.tile_positions for name in names)
        rest = visual.positions - cut * self.tile_positions
        return START + text + (THUMBNAIL if cut and rest else "") + IMAGE * rest + END

    def transformers(self, tokenizer: Any, chat_template: str) -> SavedProcessor:
        described = {"image_processor": self.settings | {"image_processor_type": "Lfm2VlImageProcessor"}}
        return SavedProcessor(tokenizer, chat_template, IMAGE, described)


image_rule = lambda settings, config: Lfm2Images(settings)  # where there is no folder


def open_images(opened: Opened) -> tuple[Lfm2Images, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint. Those of 2025 have the settings of
    tiles at the top of processor_config.json, and a Siglip2ImageProcessor that knows none of them."""
    tokenizer = open_with(opened, (IMAGE, START, END, THUMBNAIL))
    settings = opened.json("processor_config.json") | image_settings(opened)
    return Lfm2Images(settings), tokenizer, chat_template(opened)
