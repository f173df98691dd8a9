"""A byte-level BPE tokenizer for a new model, with SmolVLM's special tokens.

    tokenizer = build_tokenizer(["how many circles are there?", "two", ...], vocab_size=1024)

Any text can be typed: all 256 bytes are in the vocabulary. Digits stand alone, so counts are read digit by
digit. The special tokens and their roles are SmolVLM's, so the saved folder opens as an Idefics3 processor.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

IMAGE_TOKEN = "<image>"
FAKE_IMAGE_TOKEN = "<fake_token_around_image>"
GLOBAL_IMAGE_TOKEN = "<global-img>"
END_OF_UTTERANCE = "<end_of_utterance>"
MAX_GRID = 6  # <row_1_col_1> ... <row_6_col_6>: as many tiles a side as Idefics3 can name

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    END_OF_UTTERANCE,
    FAKE_IMAGE_TOKEN,
    IMAGE_TOKEN,
    GLOBAL_IMAGE_TOKEN,
    *(f"<row_{r}_col_{c}>" for r in range(1, MAX_GRID + 1) for c in range(1, MAX_GRID + 1)),
)


def build_tokenizer(
    texts: Iterable[str], vocab_size: int = 1024, model_max_length: int = 8192
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` entries on `texts`; ids depend on the texts alone.

    A small corpus may not fill the vocabulary: size the embedding by `len(tokenizer)`.

    Raises:
        ValueError: `vocab_size` cannot hold the 256 bytes and the special tokens.
    """
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size: expected at least {smallest} (256 bytes and {len(SPECIAL_TOKENS)} special tokens), "
            f"got {vocab_size}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        bos_token="<|im_start|>",
        eos_token=END_OF_UTTERANCE,
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        # A dictionary rather than a list: transformers 4.57 opens only this form.
        extra_special_tokens={
            "end_of_utterance_token": END_OF_UTTERANCE,
            "fake_image_token": FAKE_IMAGE_TOKEN,
            "image_token": IMAGE_TOKEN,
            "global_image_token": GLOBAL_IMAGE_TOKEN,
        },
    )
