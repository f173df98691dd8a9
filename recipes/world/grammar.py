"""Sentences from a grammar: one pattern stands for all that its alternatives make."""

from __future__ import annotations

import random
import re

_CHOICE = re.compile(r"\(([^()]*)\)")


def say(pattern: str, rng: random.Random, **slots: str) -> str:
    """One sentence of a pattern such as "(How many|Count the) {t}( are there|)(?|)": each pair of brackets is
    one of its alternatives, which may hold brackets themselves; then `slots` fill the braces."""
    while _CHOICE.search(pattern):
        pattern = _CHOICE.sub(lambda found: rng.choice(found[1].split("|")), pattern)
    return re.sub(r" +(?=[ ?.,!])", "", pattern).strip().format(**slots)


def with_article(phrase: str) -> str:
    """The phrase with its article."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def capital(text: str) -> str:
    """The text with a capital at its front."""
    return text[0].upper() + text[1:]
