"""What a picture of some size takes in a prompt, found without a picture: how it is cut, and how many tokens.

cost = picture_cost(processor, width=1024, height=768, question="What is in the picture?")
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from data.images import check_sides
from data.inputs import TiledPicture
from data.processor import Processor


@dataclass(frozen=True)
class PictureCost:
    """`rows` x `columns` of tiles (0 or 1 where the picture is not cut), `tiles` with the whole picture as
    one more; `prompt_tokens` is the whole prompt of one question, picture included."""

    width: int
    height: int
    rows: int
    columns: int
    tiles: int
    image_tokens: int
    prompt_tokens: int
    question: str


def picture_cost(processor: Processor, width: int, height: int, question: str) -> PictureCost:
    """The cost of a picture of width x height pixels with a question, through the processor's own rules.

    Raises:
        ImageError: sides that no picture has, or that none which is opened here may have.
        PromptError: the tokenizer has no names for that many tiles, or the question is empty.
    """
    check_sides(width, height)
    count, rows, columns = processor.pictures.grid(width, height)
    side = processor.pictures.tile_size
    # Tiles of shape alone: the prompt depends on how many there are, not on what they show.
    tiles = torch.empty(count, 3, side, side, device="meta")
    blank = TiledPicture(tiles, rows, columns, f"a picture of {width} x {height}")
    encoded = processor.encode_conversation(processor.conversation(blank, question), True)
    in_front = encoded.image_tokens if processor.image_token_id is None else 0
    return PictureCost(
        width,
        height,
        rows,
        columns,
        count,
        encoded.image_tokens,
        len(encoded.input_ids) + in_front,
        question,
    )
