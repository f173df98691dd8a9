"""Videos of SmolVLM2, as of transformers' SmolVLMVideoProcessor: frames as images that are not cut, each with
its time in the prompt."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from data.errors import ProcessorError
from data.templates import SMOLVLM_CHAT_TEMPLATE
from data.tiles import Part, Parts, Visual, pixels_of, shape_within
from data.tokenizer import FAKE, GLOBAL, IMAGE
from data.video import Clip
from families.resizing import VideoRule, resized

# transformers' for conversations with videos, whatever the checkpoint has
VIDEO_TEMPLATE = SMOLVLM_CHAT_TEMPLATE.replace(
    "{{ '<image>' }}{% endif %}",
    "{{ '<image>' }}{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}",
)


class SmolVideos(VideoRule):
    """Frames as images that are not cut, each with its time in the prompt."""

    token = "<video>"
    template: str | None = VIDEO_TEMPLATE

    def __init__(
        self,
        settings: Mapping[str, Any],
        of_images: Mapping[str, Any],
        values: Tensor,
        tile_size: int,
        tile_positions: int,
    ):
        sampling = settings.get("video_sampling") or {}
        most = sampling.get("max_frames") or settings.get("num_frames")
        known = {"resample": 1} | {name: value for name, value in settings.items() if value is not None}
        super().__init__(known, of_images, values, sampling.get("fps") or settings.get("fps"), most)
        size = settings.get("size") or sampling.get("video_size") or {"longest_edge": 4 * 364}
        self.longest_side: Any = size.get("longest_edge")
        self.tile_size, self.tile_positions = tile_size, tile_positions
        side = (settings.get("max_image_size") or {"longest_edge": 364}).get("longest_edge")
        if side != tile_size:
            raise ProcessorError(f"max_image_size of videos: expected {tile_size}, got {side}")

    def indices(self, clip: Clip) -> list[int]:
        """The frames that are shown: not those of the first and last second of a long video."""
        rate, last = clip.rate, clip.count - 1
        seconds = clip.count / rate
        count = max(1, min(round(self.fps * seconds), self.most))
        begin, end = 0, last
        if seconds - 2 > self.most * self.fps:
            begin, end = int(rate), min(int(clip.count - rate), last)
        if begin >= end:
            begin, end = 0, last
        return np.unique(np.linspace(begin, end, count, dtype=int)).tolist()

    def plan(self, clip: Clip) -> Visual:
        indices, rate = self.indices(clip), clip.rate
        times, parts = tuple(index / rate for index in indices), Parts.planned(len(indices), self.tile_size)
        seconds, positions = clip.count / rate, len(indices) * self.tile_positions
        return Visual(parts, positions, (0, 0), clip.size, clip.name, times, seconds)

    def cut(self, clip: Clip) -> Visual:
        """A frame is resized twice, as transformers does."""
        planned, side = self.plan(clip), self.tile_size
        width, height = shape_within(*clip.size, self.longest_side)
        frames = (
            resized(pixels_of(one), width, height, self.mode) for one in clip.frames(self.indices(clip))
        )
        parts = tuple(Part(resized(frame, side, side, self.mode), self.values) for frame in frames)
        return replace(planned, parts=Parts(parts))

    def prompt(self, visual: Visual) -> str:
        frame = FAKE + GLOBAL + IMAGE * self.tile_positions + FAKE
        begin = f"You are provided the following series of {number_words(len(visual.times))} frames from a "
        begin += f"{datetime.timedelta(seconds=int(visual.seconds))} [H:MM:SS] video.\n"
        stamps = (f"{int(time // 60):02d}:{int(time % 60):02d}" for time in visual.times)
        return begin + "".join(f"\nFrame from {stamp}:{frame}" for stamp in stamps) + "\n\n"


_ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
_TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def number_words(number: int) -> str:
    """A number from 0 to 999,999 in English, as num2words writes it."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10] + (f"-{_ONES[number % 10]}" if number % 10 else "")
    by, word = (100, "hundred") if number < 1000 else (1000, "thousand")
    joint = " and " if number % by < 100 else ", "
    return f"{number_words(number // by)} {word}" + (joint + number_words(number % by) if number % by else "")
