"""Videos: the rate and the number of the frames that a model sees, and how they are resized.

Frames, sizes, pixels and prompts of `families.qwen_videos` and `families.idefics3_videos` are those of
transformers' video processors. One thing differs: a placeholder is the image's, since the model sees features
in place of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from data.errors import ProcessorError
from data.tiles import byte_values
from data.video import Clip
from families.resizing import MODES


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
        self.mode = MODES[settings["resample"]]
        if not torch.equal(byte_values({**of_images, **settings}), values):
            raise ProcessorError("image_mean and image_std of videos: expected those of images, got others")

    def rate(self, clip: Clip) -> float:
        """Frames a second; those of a folder stand for the ones that the model would take."""
        return self.fps if clip.rate is None else clip.rate
