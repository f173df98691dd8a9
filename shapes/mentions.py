"""What a question's nouns mean in a scene: where the thing is and how large, or how many there are.

A training target for the noun itself: a language model that has looked its nouns up can compare them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from shapes.world import COLOURS, SHAPES, Scene

_NAMES = {name + ("es" if name == "cross" else "s"): name for name in SHAPES} | {"shapes": None}
_COLOUR = f"(?:({'|'.join(COLOURS)}) )?"
_MANY = re.compile(rf"\b{_COLOUR}({'|'.join(_NAMES)})\b")
_ONE = re.compile(rf"\b[Tt]he {_COLOUR}({'|'.join(SHAPES)}|word|digit)\b")
UNKNOWN = (math.nan,) * 4


@dataclass(frozen=True)
class Mention:
    """A noun in a text: its last character, the colour in front of it, what it names (None: any shape) and
    whether it asks for all of them."""

    end: int
    colour: str | None
    name: str | None
    plural: bool


def mentions(text: str) -> list[Mention]:
    """The nouns of a question that mean something in the image, in no particular order."""
    many = [Mention(m.end() - 1, m[1], _NAMES[m[2]], True) for m in _MANY.finditer(text)]
    return many + [Mention(m.end() - 1, m[1], m[2], False) for m in _ONE.finditer(text)]


def facts(scene: Scene, mention: Mention) -> tuple[float, float, float, float]:
    """(x, y, log size, how many) in steps of about one; NaN where the noun does not say, or fits several.

    x and y run from -2 to 2, log size is shifted by 1.3, counts are halved.
    """
    found = [
        t
        for t in (scene.shapes() if mention.plural else scene.things)
        if mention.name in (None, t.name if t.kind == "shape" else t.kind)
        and mention.colour in (None, t.colour)
    ]
    if mention.plural:
        return (math.nan, math.nan, math.nan, len(found) / 2)
    if len(found) != 1:
        return UNKNOWN
    thing = found[0]
    return (4 * thing.x - 2, 4 * thing.y - 2, math.log(thing.size) + 1.3, math.nan)
