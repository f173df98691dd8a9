"""What rules of images and videos of several families share: CLIP's pixels, the grid of tiles that is nearest
to an image's shape, torchvision's resizing, and the settings of videos.

Frames, sizes, pixels and prompts of `families.qwen_videos` and `families.idefics3_videos` are those of
transformers' video processors. One thing differs: a placeholder is the image's, since the model sees features
in place of either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from data.errors import ProcessorError
from data.tiles import byte_values

# torch's names of Pillow's ways to resample.
MODES = {
    Image.Resampling.BILINEAR: "bilinear",
    Image.Resampling.BICUBIC: "bicubic",
    Image.Resampling.LANCZOS: "lanczos",
}
# How transformers' image processors that resample bicubically, with CLIP's mean and deviation, make numbers
# of pixels where a file does not say.
CLIP_PIXELS: dict[str, Any] = {
    "do_resize": True, "resample": int(Image.Resampling.BICUBIC), "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip


class TileGrids:
    """The grids of `least` to `most` square tiles of a side, as InternVL's rule has them."""

    def __init__(self, least: int, most: int, side: int):
        grids = ((rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1))
        self._grids = sorted((one for one in grids if math.prod(one) >= least), key=math.prod)
        self._tile = side * side

    def nearest(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) that relate most like the image's sides. Of two that do alike, and here only then,
        the one of more tiles is taken unless they would be more than twice the image."""
        best, nearest = (1, 1), math.inf
        for rows, columns in self._grids:  # those of few tiles first
            distance = abs(width / height - columns / rows)
            large = width * height > 0.5 * self._tile * columns * rows
            if distance < nearest or (distance == nearest and large):
                best, nearest = (rows, columns), distance
        return best


def resized(pixels: Tensor, width: int, height: int, mode: str) -> Tensor:
    """(3, H, W) uint8 in another size, as torchvision resizes, which calls the same operator."""
    if pixels.shape[1:] == (height, width):
        return pixels
    return F.interpolate(pixels[None], (height, width), mode=mode, antialias=True)[0]


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
