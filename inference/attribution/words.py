"""Tokens of an answer joined to words, as people read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inference.answer import TextStream
from inference.checkpoint import Checkpoint


@dataclass(frozen=True)
class Word:
    """`text` between spaces, and the places in the answer of the tokens that spell it."""

    text: str
    tokens: tuple[int, ...]


def answer_words(checkpoint: Checkpoint, token_ids: Sequence[int]) -> list[Word]:
    """The words of an answer up to its stop token.

    A token belongs to each word that it spells a character of; several that make one character only together
    belong to the same word.
    """
    stream, stops = TextStream(checkpoint.processor.tokenizer), frozenset(checkpoint.stop_token_ids)
    text, waiting = "", []
    spans: list[tuple[int, int, int]] = []  # (token, begin, end) in the text
    for place, token_id in enumerate(token_ids):
        if token_id in stops:
            break
        waiting.append(place)
        if piece := stream.put(token_id):
            spans += [(token, len(text), len(text) + len(piece)) for token in waiting]
            text, waiting = text + piece, []
    rest = stream.finish()
    spans += [(token, len(text), len(text) + len(rest)) for token in waiting]
    text += rest
    words = []
    for found in re.finditer(r"\S+", text):
        touching = [token for token, begin, end in spans if begin < found.end() and end > found.start()]
        words.append(Word(found[0], tuple(touching)))
    return words
