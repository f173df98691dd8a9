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
