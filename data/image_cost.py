"""What an image of some size takes in a prompt, found without an image: how it is cut, and how many tokens.

cost = image_cost(processor, width=1024, height=768, question="What is in the image?")
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from data.images import check_sides
from data.inputs import TiledImage
from data.processor import Processor


@dataclass(frozen=True)
class ImageCost:
    """`rows` x `columns` of tiles (0 or 1 where the image is not cut), `tiles` with the whole image as
    one more; `prompt_tokens` is the whole prompt of one question, image included."""

    width: int
    height: int
    rows: int
    columns: int
    tiles: int
    image_tokens: int
    prompt_tokens: int
    question: str


def image_cost(processor: Processor, width: int, height: int, question: str) -> ImageCost:
    """The cost of an image of width x height pixels with a question, through the processor's own rules.

    Raises:
        ImageError: sides that no image has, or that none which is opened here may have.
        PromptError: the tokenizer has no names for that many tiles, or the question is empty.
    """
    check_sides(width, height)
    count, rows, columns = processor.images.grid(width, height)
    side = processor.images.tile_size
    # Tiles of shape alone: the prompt depends on how many there are, not on what they show.
    tiles = torch.empty(count, 3, side, side, device="meta")
    blank = TiledImage(tiles, rows, columns, f"an image of {width} x {height}")
    encoded = processor.encode_conversation(processor.conversation(blank, question), True)
    in_front = encoded.image_tokens if processor.image_token_id is None else 0
    return ImageCost(
        width,
        height,
        rows,
        columns,
        count,
        encoded.image_tokens,
        len(encoded.input_ids) + in_front,
        question,
    )
