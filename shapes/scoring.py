"""Scores and the held-out questions."""

from __future__ import annotations

import random
from collections import Counter

from shapes.questions import ask
from shapes.sampling import sample_scene
from shapes.world import COLOURS, FAMILIES, HELDOUT_SEED, QA, SHAPES


def score(qa_or_family, target, answer):
    """1.0 or 0.0 for an exact match after lower-casing, stripping and dropping a final dot.

    A QA's `accept` list counts as right as well. For "describe": F1 over the multiset of
    items (colour and shape, "word tree", "digit 7"); the words for size and region are
    not scored, since things near a border could be called either way.
    """
    family = qa_or_family.family if isinstance(qa_or_family, QA) else qa_or_family
    accept = qa_or_family.accept if isinstance(qa_or_family, QA) else ()
    if family not in FAMILIES:
        raise ValueError(f"expected a family in {FAMILIES}, got {family!r}")
    if family != "describe":
        return float(_clean(answer) in {_clean(target), *map(_clean, accept)})
    wanted, given = _items(target), _items(answer)
    hits = sum((wanted & given).values())
    return 2.0 * hits / max(1, sum(wanted.values()) + sum(given.values()))


def _clean(text):
    return text.strip().lower().removesuffix(".").strip()


def _items(text):
    """The multiset of things that a description names."""
    found = Counter()
    for item in _clean(text).split(","):
        tokens = item.split()
        if len(tokens) > 1 and tokens[0] in ("word", "digit"):
            found[tokens[0], tokens[1]] += 1
        elif tokens:
            found[
                next((t for t in tokens if t in COLOURS), None),
                next((t for t in tokens if t in SHAPES), None),
            ] += 1
    return found


def heldout_questions(n, seed=0):
    """n (Scene, QA), families in equal numbers, each from its own scene with held-out digits.

    Scene seeds start at HELDOUT_SEED, which training never reaches.
    """
    found = []
    for i in range(n):
        family, qa, attempt = FAMILIES[i % len(FAMILIES)], None, 0
        while qa is None:
            rng = random.Random(HELDOUT_SEED + (seed << 32) + i * 1000 + attempt)
            scene = sample_scene(rng, "heldout")
            qa, attempt = ask(scene, rng, family), attempt + 1
        found.append((scene, qa))
    return found
