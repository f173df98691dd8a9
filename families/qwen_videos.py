"""Videos of Qwen2.5-VL, Qwen3-VL and Qwen3.5, as of transformers' Qwen2VLVideoProcessor and
Qwen3VLVideoProcessor: frames in pairs, each pair a part of the video."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from data.errors import ImageError, ProcessorError
from data.tiles import Part, Parts, Visual, pixels_of
from data.video import Clip
from families.resizing import VideoRule, resized


class QwenVideos(VideoRule):
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
        if known["temporal_patch_size"] != 2:
            got = known["temporal_patch_size"]
            raise ProcessorError(f"temporal_patch_size of videos: expected 2, got {got}")

    def indices(self, clip: Clip) -> list[int]:
        """The frames that are shown."""
        total = clip.count
        wanted = total / clip.rate * self.fps
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
        return fit(height, width, factor, least, most, counted)

    def plan(self, clip: Clip) -> Visual:
        indices, rate = self.indices(clip), clip.rate
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
        frames = [resized(pixels_of(one), width, height, self.mode) for one in clip.frames(indices)]
        frames += frames[-1:] * (len(frames) % 2)
        pairs = (torch.stack(pair, dim=1) for pair in zip(frames[::2], frames[1::2], strict=True))
        parts = (
            Part(pixels, self.values, one.time) for pixels, one in zip(pairs, planned.parts, strict=True)
        )
        return replace(planned, parts=Parts(tuple(parts)))

    def prompt(self, visual: Visual) -> str:
        if self.tokens_per_second is not None:
            return "<|image_pad|>" * visual.positions
        of_pair = "<|image_pad|>" * (visual.positions // len(visual.times))
        shown = f"<|vision_start|>{of_pair}<|vision_end|>"
        return "".join(f"<{time:.1f} seconds>{shown}" for time in visual.times)


def fit(
    height: int, width: int, factor: int, least: int, most: int, frames: int = 1, smallest: int = 0
) -> tuple[int, int]:
    """Rows and columns of positions of `factor` pixels a side: at least `smallest`, next to the image's
    sides, or those that keep its shape between the least and the most pixels, of all frames together."""
    sides = (height, width)
    rows, columns = (max(smallest, round(side / factor)) for side in sides)
    area = (round(frames / 2) * 2 if frames > 1 else 1) * rows * columns * factor**2
    if area > most:
        by = math.sqrt(frames * height * width / most)
        rows, columns = (max(1, math.floor(side / by / factor)) for side in sides)
    elif area < least:
        by = math.sqrt(least / (frames * height * width))
        rows, columns = (math.ceil(side * by / factor) for side in sides)
    return rows, columns
