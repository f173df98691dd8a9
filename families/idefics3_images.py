"""Images of Idefics3, SmolVLM and SmolVLM2: a large one in tiles, and all of it as one more.

The rule is bit for bit that of transformers' own image processor (its PIL backend), which takes seconds to
import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from PIL import Image

from data.chat import chat_template
from data.errors import PromptError
from data.tiles import (
    MOST_TILE_SIDE,
    Parts,
    TiledImages,
    Visual,
    pixel_rule,
    reading_settings,
    shape_within,
    tiles_of,
)
from data.tokenizer import END, FAKE, GLOBAL, IMAGE, AnyTokenizer, image_settings, open_with
from families.idefics3_videos import SmolVideos
from models.checkpoints.files import Opened
from models.config import VLMConfig

# transformers' settings where a file does not say.
DEFAULTS = {
    "do_resize": True,
    "size": {"longest_edge": 4 * 364},
    "resample": int(Image.Resampling.LANCZOS),
    "do_image_splitting": True,
    "max_image_size": {"longest_edge": 364},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# Idefics3Processor marks these as special in any tokenizer.
SPECIAL = {"additional_special_tokens": [FAKE, IMAGE, END]}


def positions(config: VLMConfig, *size: int) -> int:
    """Positions in the language model that a part of (height, width) pixels takes. Tiles are squares of one
    size, which is meant where none is given; others are a ValueError."""
    side = config.vision.image_size
    if size and size != (side, side):
        got = " x ".join(map(str, size))
        raise ValueError(f"expected tiles of {side} x {side} pixels, as the processor cuts them, got {got}")
    return (config.vision.grid // config.scale_factor) ** 2


class IdeficsImages(TiledImages):
    """The rule of transformers' Idefics3Processor. `settings` are those of preprocessor_config.json,
    `tile_positions` is its `image_seq_len`."""

    image_token = IMAGE
    uncut = (0, 0)

    def __init__(self, settings: Mapping[str, Any], tile_positions: int = 169):
        self.settings = dict(settings)
        known: dict[str, Any] = DEFAULTS | self.settings
        self.known = known
        self.tile_positions = tile_positions
        self.splits = bool(known["do_image_splitting"])
        with reading_settings(known):
            self.tile_size: int = known["max_image_size"]["longest_edge"]
            self.longest_side: int = known["size"]["longest_edge"]
            self._resample, self.values = pixel_rule(known)

    def transformers(self, tokenizer: Any, chat_template: str) -> Any:
        from transformers.models.idefics3 import Idefics3ImageProcessorPil, Idefics3Processor  # takes seconds

        pictures, seen = Idefics3ImageProcessorPil(**self.settings), self.tile_positions
        return Idefics3Processor(pictures, tokenizer, image_seq_len=seen, chat_template=chat_template)

    def resized(self, longest_side: int) -> IdeficsImages:
        """This rule for images whose longer side has so many pixels, which are tiles where it is longer."""
        size = {"size": {"longest_edge": longest_side}, "do_image_splitting": longest_side > self.tile_size}
        other = IdeficsImages(self.settings | size, self.tile_positions)
        other.videos = self.videos
        return other

    def within(self, positions: int) -> IdeficsImages:
        side = max(1, math.isqrt(self._tiles_within(positions) - 1))
        return self.resized(min(side, MOST_TILE_SIDE // self.tile_size) * self.tile_size)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        if not self.splits:
            return self.uncut
        width, height = self._cut_size(*shape_within(width, height, self.longest_side))
        rows, cols = height // self.tile_size, width // self.tile_size
        return (rows, cols) if max(rows, cols) > 1 else self.uncut

    def _cut_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in whole tiles."""
        tile, aspect = self.tile_size, width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            return width, math.ceil(int(width / aspect) / tile) * tile
        height = math.ceil(height / tile) * tile
        return math.ceil(int(height * aspect) / tile) * tile, height

    def cut(self, image: Image.Image) -> Visual:
        """The image is resampled up to three times, each time rounded to bytes: so transformers does."""
        tile, planned = self.tile_size, self.plan(*image.size)
        image = image.resize(shape_within(*image.size, self.longest_side), self._resample)
        if self.splits:
            image = image.resize(self._cut_size(*image.size), self._resample)
        parts = tiles_of(image.resize((tile, tile), self._resample), tile, self.values)
        if planned.grid != self.uncut:
            parts = Parts.cat((tiles_of(image, tile, self.values), parts))
        return replace(planned, parts=parts)

    def prompt(self, visual: Visual, index: int, count: int) -> str:
        """Of a video, what its rule says. A tag that the tokenizer does not have (in Idefics3-8B,
        `<global-img>` and all of `<row_r_col_c>`) is read as text, as in transformers."""
        if visual.times and self.videos:
            return self.videos.prompt(visual)
        tile, prompt, (rows, cols) = IMAGE * self.tile_positions, "", visual.grid
        for r in range(1, rows + 1):
            prompt += "".join(f"{FAKE}<row_{r}_col_{c}>{tile}" for c in range(1, cols + 1)) + "\n"
        return (prompt + "\n" if prompt else "") + FAKE + GLOBAL + tile + FAKE


def image_rule(settings: Mapping[str, Any], config: VLMConfig) -> IdeficsImages:
    """The rule of a model with these settings, where there is no folder."""
    return IdeficsImages(settings, positions(config))


def new_images(
    tokenizer: AnyTokenizer, image_size: int, image_seq_len: int, longest_edge: int | None, split: bool
) -> IdeficsImages:
    """The rule of a new model (see `data.processor.make_processor`), whose tokens the tokenizer gets."""
    needed = [IMAGE, FAKE, GLOBAL, END, *(["<row_1_col_1>"] if split else [])]
    if missing := [token for token in needed if token not in tokenizer.get_added_vocab()]:
        raise PromptError(f"tokenizer: expected the special tokens {', '.join(needed)}; {missing} are absent")
    tokenizer.add_special_tokens(SPECIAL)
    settings = DEFAULTS | {
        "size": {"longest_edge": longest_edge or image_size * (4 if split else 1)},
        "do_image_splitting": split,
        "max_image_size": {"longest_edge": image_size},
    }
    return IdeficsImages(settings, image_seq_len)


def open_images(opened: Opened) -> tuple[IdeficsImages, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint, in today's layout or the older."""
    if not any(map(opened.file, ("processor_config.json", "preprocessor_config.json"))):
        raise PromptError("expected processor_config.json or preprocessor_config.json, found neither")
    tokenizer = open_with(opened, (IMAGE, FAKE))
    tokenizer.add_special_tokens(SPECIAL)
    seen = opened.json("processor_config.json").get("image_seq_len", 169)
    images = IdeficsImages(image_settings(opened), seen)
    video = opened.json("processor_config.json").get("video_processor")
    video = video or opened.json("video_preprocessor_config.json") or images.settings
    sampling = {"max_frames": video.get("num_frames"), "fps": video.get("fps")}
    if None not in (sampling | (video.get("video_sampling") or {})).values():  # which SmolVLM2 has
        images.videos = SmolVideos(video, images.known, images.values, images.tile_size, seen)
    return images, tokenizer, chat_template(opened)
