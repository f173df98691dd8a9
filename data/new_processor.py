"""A processor for a new model, in transformers' Idefics3 form, and a tokenizer for it: byte-level BPE,
trained on texts, with the tokens that such a processor needs.

    tokenizer = build_tokenizer(["how many circles are there?", "two", ...], vocab_size=1024)
    processor = make_processor(tokenizer, image_size=224, image_seq_len=49)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.processor import Processor
from data.templates import IMAGES_FIRST, SMOLVLM_CHAT_TEMPLATE
from data.tokenizer import END, FAKE, GLOBAL, IMAGE, AnyTokenizer
from families import NEW
from models.config import VLMConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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


def build_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` entries on `texts`; ids depend on the texts alone.

    Any text can be typed: all 256 bytes are in the vocabulary. Digits stand alone, so that counts are read
    digit by digit. A small corpus may not fill the vocabulary: size the embedding by `len(tokenizer)`.
    """
    if vocab_size < (smallest := len(SPECIAL_TOKENS) + 256):
        raise ValueError(f"vocab_size: expected {smallest} or more for bytes and tags, got {vocab_size}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return with_roles(backend)


def with_roles(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that has the special tokens, with SmolVLM's roles for them: its saved folder opens
    as an Idefics3 processor."""
    from transformers import PreTrainedTokenizerFast

    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        bos_token="<|im_start|>",
        eos_token=END,
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        # A dictionary rather than a list: transformers 4.57 opens only this form.
        extra_special_tokens={
            "end_of_utterance_token": END,
            "fake_image_token": FAKE,
            "image_token": IMAGE,
            "global_image_token": GLOBAL,
        },
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
        tokenizer: has SmolVLM's special tokens, as what `build_tokenizer` gives.
        image_size: side of a tile in pixels, the vision model's.
        image_seq_len: positions that a tile takes in a prompt.
        longest_edge: what an image is resized to before it is split, or, unsplit, squashed into a tile; one
            tile by default, four with `split`.
        chat_template: SmolVLM's by default; with `images_first` it puts a message's images before its text.
    """
    images = NEW.new_images(tokenizer, image_size, image_seq_len, longest_edge, split)
    template = chat_template or (IMAGES_FIRST if images_first else SMOLVLM_CHAT_TEMPLATE)
    return Processor(images, tokenizer, template, config)
