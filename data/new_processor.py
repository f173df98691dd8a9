"""A processor for a new model, in transformers' Idefics3 form, and the tokens that it needs.

processor = make_processor(tokenizer, image_size=224, image_seq_len=49)
"""

from __future__ import annotations

from data.processor import Processor
from data.templates import IMAGES_FIRST, SMOLVLM_CHAT_TEMPLATE
from data.tokenizer import END, FAKE, GLOBAL, IMAGE, AnyTokenizer
from families import NEW
from models.config import VLMConfig

MAX_GRID = 6  # <row_1_col_1> ... <row_6_col_6>: as many tiles a side as Idefics3 can name
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    END,
    FAKE,
    IMAGE,
    GLOBAL,
    *(f"<row_{r}_col_{c}>" for r in range(1, MAX_GRID + 1) for c in range(1, MAX_GRID + 1)),
)


def make_processor(
    tokenizer: AnyTokenizer,
    *,
    image_size: int,
    image_seq_len: int,
    longest_edge: int | None = None,
    split: bool = False,
    chat_template: str | None = None,
    images_first: bool = False,
    config: VLMConfig | None = None,
) -> Processor:
    """A processor for a new model, in transformers' Idefics3 form.

    Args:
        tokenizer: has SmolVLM's special tokens.
        image_size: side of a tile in pixels, the vision model's.
        image_seq_len: positions that a tile takes in a prompt.
        longest_edge: what an image is resized to before it is split, or, unsplit, squashed into a tile; one
            tile by default, four with `split`.
        chat_template: SmolVLM's by default; with `images_first` it puts a message's images before its text.
    """
    images = NEW.new_images(tokenizer, image_size, image_seq_len, longest_edge, split)
    template = chat_template or (IMAGES_FIRST if images_first else SMOLVLM_CHAT_TEMPLATE)
    return Processor(images, tokenizer, template, config)
