"""The rules of a family of checkpoints for images and videos: how they become parts, and what stands in a
prompt for them."""

from __future__ import annotations

from typing import Any, Protocol

from PIL import Image

from data.tiles import Cell, Visual
from data.video import Clip


class Videos(Protocol):
    """A family's way to choose frames of a video, to make parts of them, and to write them into a prompt."""

    token: str  # what its template writes for a video, special to the tokenizer or not
    template: str | None  # for conversations with videos, where it is not the checkpoint's own
    fps: float  # frames that are shown of a second
    most: int  # and of a video

    def plan(self, clip: Clip) -> Visual:
        """The result of `cut`, with pixels on the meta device."""

    def cut(self, clip: Clip) -> Visual:
        """The frames that are shown, in parts."""

    def prompt(self, visual: Visual) -> str:
        """Its text in a prompt."""


class Images(Protocol):
    """A family's way to cut images into parts, and to write them into a prompt."""

    image_token: str  # what stands in a prompt once for each position of an image
    string_content: bool  # the chat template takes a message's content as one string
    add_special_tokens: bool  # let the tokenizer add its own (a BOS) around what the template wrote
    flat: bool  # parts go to the model as (N, 3, M, M), not padded per row with a pixel mask
    own_sizes: bool  # or as `Parts`, because their sizes differ
    longest_side: int  # pixels of an image that it makes something of
    budget: int | None  # most pixels of an image that is taken whole; None where images are cut into tiles
    videos: Videos | None  # how it takes videos; None where their frames are images to it

    def plan(self, width: int, height: int) -> Visual:
        """The result of `cut` for an image of this size, with pixels on the meta device."""

    def cut(self, image: Image.Image) -> Visual:
        """An RGB image in its parts."""

    def prompt(self, visual: Visual, index: int, count: int) -> str:
        """The text in a prompt of image `index` of `count`."""

    def whole(self, visual: Visual) -> Visual | None:
        """A small picture of all of it, made of this one: as if it were not cut, or of fewer pixels. The same
        object where it is small already; None where no part shows all of it."""

    def cells(self, visual: Visual) -> list[Cell]:
        """The place of each part in the image: (top, left, bottom, right) in cells of its grid."""

    def within(self, positions: int) -> Images:
        """This rule for images that take at most so many positions, but for those far longer than wide, as it
        is saved. Raises ProcessorError where there is none."""

    def normalise_messages(self, messages: list[Any], label: str) -> list[Any]:
        """Messages with their images where the family has them."""

    def transformers(self, tokenizer: Any, chat_template: str) -> Any:
        """transformers' processor, for saving; None where it has none for this family."""
