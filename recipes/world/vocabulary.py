"""A tokenizer of whole words, in which whatever is not one is spelled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from data.new_processor import SPECIAL_TOKENS
from recipes.shapes.tokenizer import with_roles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# GPT-2's words; numbers and the commas between them stand apart, so that a list of numbers is short.
_WORDS_AND_NUMBERS = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\d+|, (?=\d)| ?[^\s\p{L}\d]+|\s+(?!\S)|\s+"
MOST_NUMBER = 1000  # of those that are one token


def count_words(texts: Iterable[str], split: pre_tokenizers.PreTokenizer) -> Counter[str]:
    """How often each word occurs, as `split` cuts texts into words."""
    return Counter(word for text in texts for word, _ in split.pre_tokenize_str(text))


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """At most `vocab_size` entries, by the texts alone. Their most frequent words are one token each, and
    every other word is spelled, letter by letter: a model that prints what it reads then learns letters and
    no parts of words. The numbers up to MOST_NUMBER are one token each as well: a coordinate is one choice,
    and one that is nearly right can be told from one that is far off. Any text can be typed: all 256 bytes
    are in the vocabulary.
    """
    numbers = [str(number) for number in range(10, MOST_NUMBER + 1)]
    smallest = len(SPECIAL_TOKENS) + 256 + len(numbers)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size: expected {smallest} or more for bytes, tags and numbers, got {vocab_size}"
        )
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS_AND_NUMBERS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words = count_words(texts, split)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    common = sorted(words.keys() - {*alphabet, *numbers}, key=lambda word: (-words[word], word))
    entries = [*SPECIAL_TOKENS, *alphabet, *numbers, *common][:vocab_size]
    vocab = {entry: i for i, entry in enumerate(entries)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = split
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return with_roles(backend)
