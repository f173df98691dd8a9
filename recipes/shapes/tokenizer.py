"""A tokenizer for a new model: byte-level BPE, trained on texts, with the tokens that a processor needs.

tokenizer = build_tokenizer(["how many circles are there?", "two", ...], vocab_size=1024)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data.new_processor import SPECIAL_TOKENS
from data.tokenizer import END, FAKE, GLOBAL, IMAGE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
