"""Images of Qwen-VL: whole, in their own shape, within a budget of pixels.

The rule is bit for bit that of transformers' Qwen2VLImageProcessor (its PIL backend).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from PIL import Image

from data.chat import chat_template
from data.conversation import Message
from data.errors import ImageError, ProcessorError
from data.image_rules import Videos
from data.tiles import Cell, Parts, Visual, pixel_rule, pixels_of, reading_settings
from data.tokenizer import AnyTokenizer, image_settings, open_with
from families.keys import section
from families.qwen_videos import QwenVideos, fit
from families.resizing import CLIP_PIXELS
from families.saving import SavedProcessor
from models.checkpoints.files import Opened

IMAGE = "<|image_pad|>"
# Qwen2VLImageProcessor's own, where a file does not say.
_DEFAULTS: dict[str, Any] = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    **CLIP_PIXELS,
    "patch_size": 14,
    "merge_size": 2,
}
_MOST_OBLONG = 200  # times as long as wide, transformers refuses more
_LEAST_PICTURE = 48  # positions of a picture to draft an answer from


class QwenImages:
    """The rule of transformers' Qwen2VLImageProcessor: an image is resized, whole, within a budget of pixels.
    `settings` are those of preprocessor_config.json; those of `video` are kept for saving.

    least, budget: pixels of a resized image. The budget may be made smaller than `limit`, the checkpoint's.
    """

    image_token = IMAGE
    defaults: Mapping[str, Any] = _DEFAULTS
    string_content = False
    add_special_tokens = True
    videos: Videos | None = None
    flat = own_sizes = True

    def __init__(self, settings: Mapping[str, Any], video: Mapping[str, Any] | None = None):
        self.settings, self.video = dict(settings), video
        known: dict[str, Any] = {**self.defaults, **self.settings}
        self.known = known
        with reading_settings(known):
            size = {**self.defaults["size"], **(known["size"] or {})}
            self.least = known.get("min_pixels") or size["shortest_edge"]
            self.limit: int = known.get("max_pixels") or size["longest_edge"]
            self.budget = self.limit
            self.factor = known["patch_size"] * known["merge_size"]
            self._resample, self.values = pixel_rule(known)
        self.longest_side = math.isqrt(self.budget * _MOST_OBLONG)

    def within(self, positions: int) -> QwenImages:
        if positions < 1:
            raise ProcessorError(f"expected at least one position, got {positions}")
        most = positions * self.factor**2
        # Enlarged sides are rounded up, so what is enlarged must begin well below the budget.
        size = {"shortest_edge": min(self.least, most // 2), "longest_edge": most}
        others = {key: self.settings[key] for key in self.settings if key not in ("min_pixels", "max_pixels")}
        other = type(self)(others | {"size": size}, self.video)
        other.videos = self.videos
        return other

    def transformers(self, tokenizer: Any, chat_template: str) -> SavedProcessor:
        settings: dict[str, Any] = {"image_processor": self.settings}
        if self.video:
            settings["video_processor"] = self.video
        return SavedProcessor(tokenizer, chat_template, self.image_token, settings)

    def plan(self, width: int, height: int) -> Visual:
        rows, columns = self._grid(width, height)
        parts = Parts.planned(1, rows * self.factor, columns * self.factor)
        return Visual(parts, rows * columns, (rows, columns), (width, height))

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of positions within the budget."""
        if max(width, height) > _MOST_OBLONG * min(width, height):
            raise ImageError(
                f"expected an image at most {_MOST_OBLONG} times as long as wide, "
                f"got {width} x {height} pixels"
            )
        return fit(height, width, self.factor, min(self.least, self.budget), self.budget)

    def cut(self, image: Image.Image) -> Visual:
        """One part: the whole image in its own shape."""
        rows, columns = self._grid(*image.size)
        resized = image.resize((columns * self.factor, rows * self.factor), self._resample)
        parts = Parts.of(pixels_of(resized)[None], self.values)
        return Visual(parts, rows * columns, (rows, columns), image.size)

    def prompt(self, visual: Visual, index: int, count: int) -> str:
        if visual.times and self.videos:
            return self.videos.prompt(visual)
        return self.image_token * visual.positions  # what stands around it is in the chat template

    def whole(self, visual: Visual) -> Visual | None:
        """The same picture of an eighth of the pixels."""
        if visual.times:
            return None
        positions = max(visual.positions // 8, _LEAST_PICTURE)
        if visual.positions <= 3 * positions:
            return visual
        smaller = copy(self)
        smaller.budget = positions * self.factor**2
        picture = Image.fromarray(visual.parts.parts[0].pixels.permute(1, 2, 0).numpy())
        return replace(smaller.cut(picture), size=visual.size, name=visual.name)

    def cells(self, visual: Visual) -> list[Cell]:
        return [(0, 0, 1, 1)]

    def normalise_messages(self, messages: list[Message], label: str) -> list[Message]:
        """Images stay where the conversation has them."""
        return messages


image_rule = lambda settings, config: QwenImages(settings)  # where there is no folder


def open_images(opened: Opened) -> tuple[QwenImages, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint."""
    tokenizer = open_with(opened, (IMAGE,))
    video = opened.json("processor_config.json").get("video_processor")
    video = video or opened.json("video_preprocessor_config.json")
    images = QwenImages(image_settings(opened), video)
    second = None
    if opened.config.get("model_type") == "qwen2_5_vl":
        second = section(opened.config, "vision_config").get("tokens_per_second", 4)
    images.videos = QwenVideos(video or images.settings, images.known, images, second)
    return images, tokenizer, chat_template(opened)
