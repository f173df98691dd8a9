"""Videos: the rate and the number of the frames that a model sees, and how they are resized.

Frames, sizes, pixels and prompts of `families.qwen_videos` and `families.idefics3_videos` are those of
transformers' video processors. One thing differs: a placeholder is the image's, since the model sees features
in place of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from data.errors import ProcessorError
from data.tiles import byte_values, check_numbers
from data.video import Clip

_MODES = {Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}
_MODES[Image.Resampling.LANCZOS] = "lanczos"
MOST_FRAMES = 65_536


class VideoRule:
    """The part of a rule that all families share.

    settings: of videos where a file has some, else of images; `of_images` are those of images.
    values: what bytes of images stand for, and so those of videos.
    fps: frames that are shown of a second; most: frames of a video.
    """

    def __init__(
        self, settings: Mapping[str, Any], of_images: Mapping[str, Any], values: Tensor, fps: Any, most: Any
    ):
        self.fps, self.most, self.values = fps, most, values
        if not torch.equal(byte_values({**of_images, **settings}), values):
            raise ProcessorError("image_mean and image_std of videos: expected those of images, got others")
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 1000:
            raise ProcessorError(f"fps: expected a number of frames a second up to 1000, got {str(fps)[:80]}")
        check_numbers(("most frames of a video", most, MOST_FRAMES))
        if (mode := _MODES.get(settings["resample"])) is None:
            raise ProcessorError(
                f"resample of videos: expected 1, 2 or 3, got {str(settings['resample'])[:80]}"
            )
        self.mode = mode

    def rate(self, clip: Clip) -> float:
        """Frames a second; those of a folder stand for the ones that the model would take."""
        return self.fps if clip.rate is None else clip.rate
