"""Videos for a model: as its family has them, or some of their frames as images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.errors import ImageError
from data.tiles import Images
from data.video import Clip

FRAMES_AS_IMAGES = 8  # of a video, for a model that takes images alone


def few_images(generation_config: Mapping[str, Any], images: Images) -> bool:
    """Whether a model that sees videos as images learnt from fewer images at a time than stand for one."""
    most = generation_config.get("most_images")
    return isinstance(most, int) and most < FRAMES_AS_IMAGES and images.videos is None


def shown_as(processor: Any, clip: Clip) -> list[tuple[str, Any]]:
    """A clip as parts of a message: itself, or some of its frames; a model of few images sees the first frame
    of an image that moves. Raises ImageError as `check_video` does."""
    processor.check_video(clip.name, clip.animated)
    if processor.images.videos is not None:
        return [("video", clip)]
    count = 1 if processor.few_images else min(FRAMES_AS_IMAGES, clip.count)
    indices = [round(number * (clip.count - 1) / max(count - 1, 1)) for number in range(count)]
    return [("image", frame) for frame in clip.frames(indices)]


def check_video(processor: Any, name: str, animated: bool) -> None:
    """Raises ImageError for a video, which may not be open yet, if the model takes none but images that move,
    or its chat template writes none."""
    if processor.images.videos is not None and not processor.chat.writes_videos:
        raise ImageError(f"{name}: this model's chat template has no place for it; take another model")
    if processor.few_images and not animated:
        raise ImageError(
            f"{name}: this model has learned from few images at a time, and takes no video; ask about one of "
            "its frames, or take another model (--model list)"
        )
