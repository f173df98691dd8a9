"""A trained model with more whole words in its vocabulary: the words that the recipe asks with by now.

    python -m recipes.world.grow checkpoints/ocelli-shapes runs/grown --words 300

The most frequent words that the model spells so far become one token each, behind the entries that there
are: the numbers of these stay, and so do their rows in the embedding and in the head, byte for byte. A new
word begins as the one that it differs from in its first space or its capitals alone, or else as the mean of
its letters; `train.py recipes/world/world.yaml --init-from runs/grown` then teaches the model to use it. What
pictures print is spelled, and stays so: training prints no word that is one token (`WorldStream`).
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from data.processor import Processor
from eval.__main__ import guarded
from inference.flags import Parser, positive
from messages import for_terminal
from models import VisionLanguageModel
from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.load import empty_model
from models.checkpoints.save import CARD
from recipes.world.training import _texts_of_drawings
from recipes.world.vocabulary import count_words

SPACE = "Ġ"  # how a space at a word's front is written in the vocabulary
TEXTS = "tokenizer:0"  # the seed of the texts, that of `training.build_processor`
TOKENIZER = "tokenizer.json"
_WORD = re.compile(rf"{SPACE}?[A-Za-z]{{2,}}|'[a-z]+")
EMBEDDINGS, HEAD = "language_model.embed_tokens.weight", "language_model.lm_head.weight"


def new_words(vocab: dict[str, int], tokenizer: Tokenizer, texts: Iterable[str], most: int) -> list[str]:
    """The up to `most` words that these texts use most often and that are no entries yet, the most frequent
    first. A single letter stays what words are spelled with, and marks stay as they are: where the things of
    an answer end is told by them (`WorldStream._mark_items`)."""
    words = count_words(texts, tokenizer.pre_tokenizer)
    missing = {word for word in words.keys() - vocab.keys() if _WORD.fullmatch(word)}
    return sorted(missing, key=lambda word: (-words[word], word))[:most]


def with_words(described: dict[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """What tokenizer.json says, with these words behind the entries that there are."""
    model = described["model"]
    if model.get("merges") or not model.get("ignore_merges"):
        raise CheckpointError(f"{TOKENIZER}: expected whole words, as vocabulary.py makes it, got merges")
    size = len(model["vocab"])
    if sorted(model["vocab"].values()) != list(range(size)):
        raise CheckpointError(f"{TOKENIZER}: expected entries with the numbers 0 to {size - 1}, got others")
    more = {word: size + i for i, word in enumerate(words)}
    return described | {"model": model | {"vocab": model["vocab"] | more}}


def sources_of(word: str, vocab: dict[str, int]) -> list[int]:
    """The entries whose mean a new word's embedding begins as: the same word with or without a space in
    front, in small letters or in capitals, or else its letters."""
    bare = word.removeprefix(SPACE)
    for front in (SPACE, "") if word.startswith(SPACE) else ("", SPACE):
        for written in (bare, bare.lower(), bare.capitalize(), bare.upper()):
            if front + written in vocab and len(front + written) > 1:
                return [vocab[front + written]]
    return [vocab[letter] for letter in word]


def grow_tables(tensors: dict[str, Tensor], words: list[str], vocab: dict[str, int]) -> dict[str, Tensor]:
    """A model's tensors with a row more for each word. In the head it is the mean of all rows: the word is
    never the likeliest before it is learnt. As a copy of "circle", "CIRCLE" would be as likely."""
    embeddings, head = tensors[EMBEDDINGS], tensors[HEAD]
    known = embeddings.float()
    read = torch.stack([known[sources_of(word, vocab)].mean(0) for word in words])
    said = head.float().mean(0).expand(len(words), -1)
    return tensors | {
        EMBEDDINGS: torch.cat([embeddings, read.to(embeddings.dtype)]),
        HEAD: torch.cat([head, said.to(head.dtype)]),
    }


def grow(source: Path, folder: Path, most: int) -> list[str]:
    """Write `folder`, the model of `source` with up to `most` new words; returns these."""
    described = read_json(source / TOKENIZER)
    vocab, tokenizer = described["model"]["vocab"], Tokenizer.from_str(json.dumps(described))
    model = VisionLanguageModel.from_pretrained(source, dtype="stored")
    if len(vocab) != model.config.text.vocab_size or model.config.tie_word_embeddings:
        raise CheckpointError(f"{source}: expected a row for each entry, and a head of its own")
    words = new_words(vocab, tokenizer, _texts_of_drawings(random.Random(TEXTS)), most)
    if not words:
        raise CheckpointError(f"{source}: all words that the recipe asks with are in its vocabulary already")
    larger = with_words(described, words)

    text = replace(model.config.text, vocab_size=len(larger["model"]["vocab"]))
    new = empty_model(VisionLanguageModel, replace(model.config, text=text))
    new.load_state_dict(grow_tables(model.state_dict(), words, vocab), assign=True)
    new.generation_config = model.generation_config
    processor = Processor.from_pretrained(source, config=model.config)
    card = source / CARD
    new.save_pretrained(
        folder,
        processor,
        card=card.read_text(encoding="utf-8") if card.is_file() else None,
        extra_files=lambda made: write_json_as_it_is(made / TOKENIZER, larger),
    )
    return words


def write_json_as_it_is(path: Path, value: dict[str, Any]) -> None:
    """In the order of its keys, as the tokenizers library writes it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m recipes.world.grow", description=__doc__)
    add = parser.add_argument
    add("model", type=Path, help="folder of the checkpoint")
    add("folder", type=Path, help="folder for the one with more words")
    add("--words", type=positive, default=300, help="number of new words at most (default 300)")
    options = parser.parse_args(arguments)

    def run() -> None:
        words = grow(options.model, options.folder, options.words)
        print(for_terminal(f"{len(words)} new words: {' '.join(words).replace(SPACE, '_')}"))

    return guarded(parser.prog, run)


if __name__ == "__main__":
    sys.exit(main())
