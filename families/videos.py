"""Videos: which frames Qwen-VL and SmolVLM2 show, of which size, and how their prompts name them.

Frames, sizes, pixels and prompts are those of transformers' Qwen2VLVideoProcessor, Qwen3VLVideoProcessor and
SmolVLMVideoProcessor with their processors. One thing differs: a placeholder is the image's, since the model
sees features in place of either.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data.chat import SMOLVLM_VIDEO_TEMPLATE
from data.errors import ImageError, ProcessorError
from data.tiles import (
    MOST_TILE_SIDE,
    Part,
    Parts,
    Visual,
    byte_values,
    check_numbers,
    pixels_of,
    resized,
    shape_within,
)
from data.tokenizer import FAKE, GLOBAL, IMAGE
from data.video import Clip

_MODES = {Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}
_MODES[Image.Resampling.LANCZOS] = "lanczos"
_MOST_FRAMES = 65_536


class _Videos:
    """What these rules share. `settings` are those of videos, where a file has some, else those of images;
    `of_images` what counts for images, and `values` what their bytes stand for: the same as those of videos.

    fps: frames that are shown of a second; most: frames of a video.
    """

    def __init__(
        self, settings: Mapping[str, Any], of_images: Mapping[str, Any], values: Tensor, fps: Any, most: Any
    ):
        self.fps, self.most, self._values = fps, most, values
        if not torch.equal(byte_values({**of_images, **settings}), values):
            raise ProcessorError("image_mean and image_std of videos: expected those of images, got others")
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 1000:
            raise ProcessorError(f"fps: expected a number of frames a second up to 1000, got {str(fps)[:80]}")
        check_numbers(("most frames of a video", most, _MOST_FRAMES))
        if (mode := _MODES.get(settings["resample"])) is None:
            raise ProcessorError(
                f"resample of videos: expected 1, 2 or 3, got {str(settings['resample'])[:80]}"
            )
        self._mode = mode

    def _rate(self, clip: Clip) -> float:
        """Frames a second; those of a folder stand for the ones that the model would take."""
        return self.fps if clip.rate is None else clip.rate


class QwenVideos(_Videos):
    """Frames in pairs, each a part.

    Qwen3-VL names the time of each pair in the prompt; Qwen2.5-VL's rotary places have it,
    `tokens_per_second` of them; None is Qwen3-VL. `images` is the model's rule of images: where their budget
    was made smaller, a frame has no more.
    """

    token = "<|video_pad|>"
    template: str | None = None

    def __init__(
        self,
        settings: Mapping[str, Any],
        of_images: Mapping[str, Any],
        images: Any,
        tokens_per_second: int | None,
    ):
        third, area = tokens_per_second is None, (32 if tokens_per_second is None else 28) ** 2
        size = {"shortest_edge": 128 * area, "longest_edge": 768 * area} | (settings.get("size") or {})
        known: dict[str, Any] = {"resample": 3, "min_frames": 4, "max_frames": 768, "fps": 2}
        known |= {"max_video_tokens": 768 if third else 128_000, "temporal_patch_size": 2}
        known |= {name: value for name, value in settings.items() if value is not None}
        super().__init__(known, of_images, images.values, known["fps"], known["max_frames"])
        self.factor, self.tokens_per_second, self._images = images.factor, tokens_per_second, images
        self.fewest, self.most_tokens = known["min_frames"], known["max_video_tokens"]
        self.capped = bool(known.get("cap_pixels_per_frame"))
        legacy = {} if third else known  # Qwen2VLVideoProcessor reads the older keys
        self.least = legacy.get("min_pixels") or size["shortest_edge"]
        self.limit = legacy.get("max_pixels") or size["longest_edge"]
        check_numbers(
            ("least frames of a video", self.fewest, _MOST_FRAMES),
            ("max_video_tokens", self.most_tokens, 2**31),
            ("least pixels of a video", self.least, 2**40),
            ("most pixels of a video", self.limit, 2**40),
        )
        if known["temporal_patch_size"] != 2:
            got = str(known["temporal_patch_size"])[:80]
            raise ProcessorError(f"temporal_patch_size of videos: expected 2, got {got}")

    def indices(self, clip: Clip) -> list[int]:
        """The frames that are shown."""
        total, rate = clip.count, self._rate(clip)
        wanted = total if clip.rate is None else total / rate * self.fps
        if self.tokens_per_second is None:
            count = min(max(int(wanted), self.fewest), self.most, total)
            return np.linspace(0, total - 1, count).round().astype(int).tolist()
        even = min(self.most, total) // 2 * 2
        count = math.floor(min(max(wanted, self.fewest), even, total) / 2) * 2
        if not count:
            return [0]
        return torch.arange(0, total, total / count).int().tolist()[:count]

    def _sides(self, clip: Clip, frames: int) -> tuple[int, int]:
        """Rows and columns of positions of a frame."""
        (width, height), factor = clip.size, self.factor
        counted, most, least = 1, self.limit, self.least
        if self.tokens_per_second is None:  # the limits are of all frames together
            counted = max(frames, 2)
            if self.capped:
                of_frame = min(self.most_tokens * factor**2, most // frames)
                most = max(of_frame, int(least * 1.05)) * frames
            if min(width, height) < factor:
                scale = max(factor / height, factor / width)
                width, height = int(width * scale), int(height * scale)
        elif self.capped:
            of_frame = int(self.most_tokens * factor**2 * 0.9) * 2 // frames
            most = max(min(most, of_frame), int(least * 1.05))
        if self._images.budget < self._images.limit:
            most = min(most, self._images.budget * counted)
            least = min(least, most)
        if max(width, height) > 200 * min(width, height):
            raise ImageError(
                f"{clip.name}: expected frames at most 200 times as long as wide, got {clip.size}"
            )
        sides = (height, width)
        rows, columns = (round(side / factor) for side in sides)
        area = (round(counted / 2) * 2 if counted > 1 else 1) * rows * columns * factor**2
        if area > most:
            by = math.sqrt(counted * height * width / most)
            rows, columns = (max(1, math.floor(side / by / factor)) for side in sides)
        elif area < least:
            by = math.sqrt(least / (counted * height * width))
            rows, columns = (math.ceil(side * by / factor) for side in sides)
        return rows, columns

    def plan(self, clip: Clip) -> Visual:
        indices, rate = self.indices(clip), self._rate(clip)
        rows, columns = self._sides(clip, len(indices))
        seconds = [index / rate for index in indices + indices[-1:] * (len(indices) % 2)]
        times = [(first + second) / 2 for first, second in zip(seconds[::2], seconds[1::2])]
        parts = Parts.planned(len(times), rows * self.factor, columns * self.factor, frames=2)
        if self.tokens_per_second is not None:  # in the precision of transformers' model
            every = self.tokens_per_second * torch.tensor(2 / (len(indices) / clip.count * rate))
            places = (torch.arange(len(times)) * every).long().tolist()
            shown = zip(parts, [None, *places[1:]], strict=True)
            parts = Parts(tuple(replace(part, time=place) for part, place in shown))
        positions = len(times) * rows * columns
        return Visual(
            parts, positions, (rows, columns), clip.size, clip.name, tuple(times), clip.count / rate
        )

    def cut(self, clip: Clip) -> Visual:
        planned, indices = self.plan(clip), self.indices(clip)
        height, width = planned.parts.shape[-2:]
        frames = [resized(pixels_of(one), width, height, self._mode) for one in clip.frames(indices)]
        frames += frames[-1:] * (len(frames) % 2)
        pairs = (torch.stack(pair, dim=1) for pair in zip(frames[::2], frames[1::2], strict=True))
        parts = (
            Part(pixels, self._values, one.time) for pixels, one in zip(pairs, planned.parts, strict=True)
        )
        return replace(planned, parts=Parts(tuple(parts)))

    def prompt(self, visual: Visual) -> str:
        if self.tokens_per_second is not None:
            return "<|image_pad|>" * visual.positions
        of_pair = "<|image_pad|>" * (visual.positions // len(visual.times))
        shown = f"<|vision_start|>{of_pair}<|vision_end|>"
        return "".join(f"<{time:.1f} seconds>{shown}" for time in visual.times)


class SmolVideos(_Videos):
    """Frames as images that are not cut, each with its time in the prompt."""

    token = "<video>"
    template: str | None = SMOLVLM_VIDEO_TEMPLATE

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
        check_numbers(("pixels of a frame's longest side", self.longest_side, MOST_TILE_SIDE))
        side = (settings.get("max_image_size") or {"longest_edge": 364}).get("longest_edge")
        if side != tile_size:
            raise ProcessorError(f"max_image_size of videos: expected {tile_size}, got {str(side)[:80]}")

    def indices(self, clip: Clip) -> list[int]:
        """The frames that are shown: not those of the first and last second of a long video."""
        rate, last = self._rate(clip), clip.count - 1
        seconds = clip.count / rate
        count = max(1, min(clip.count if clip.rate is None else round(self.fps * seconds), self.most))
        begin, end = 0, last
        if clip.rate is not None and seconds - 2 > self.most * self.fps:
            begin, end = int(rate), min(int(clip.count - rate), last)
        if begin >= end:
            begin, end = 0, last
        return np.unique(np.linspace(begin, end, count, dtype=int)).tolist()

    def plan(self, clip: Clip) -> Visual:
        indices, rate = self.indices(clip), self._rate(clip)
        times, parts = tuple(index / rate for index in indices), Parts.planned(len(indices), self.tile_size)
        seconds, positions = clip.count / rate, len(indices) * self.tile_positions
        return Visual(parts, positions, (0, 0), clip.size, clip.name, times, seconds)

    def cut(self, clip: Clip) -> Visual:
        """A frame is resized twice, as transformers does."""
        planned, side = self.plan(clip), self.tile_size
        width, height = shape_within(*clip.size, self.longest_side)
        frames = (
            resized(pixels_of(one), width, height, self._mode) for one in clip.frames(self.indices(clip))
        )
        parts = tuple(Part(resized(frame, side, side, self._mode), self._values) for frame in frames)
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
