"""What a thing may look like in a drawing of any look, and how an answer refuses a picture or a question."""

from __future__ import annotations

from dataclasses import dataclass, replace

import shapes

ABSENT = "There is none."  # the answer to what a drawing does not show
KNOWS = "drawn shapes, words and digits"
ASKS = "how many there are, which colour or shape it is, where it is, how big it is or what is written"
REFUSAL = f"I only know {KNOWS}. Ask me {ASKS}."
NOT_UNDERSTOOD = f"I did not understand the question. I only know {KNOWS}."
NO_IMAGE = "There is no image."


@dataclass(frozen=True)
class Thing(shapes.Thing):
    """One object, in any look.

    hollow: thickness of the line that is drawn in place of a filled shape; 0: it is filled.
    border: the colour of a line around a filled shape.
    font: the file that a word or digit is printed with; "": Pillow's own font, or a digit of UCI's.
    strokes: the seed of a digit that is drawn with a mouse; -1: it is not.
    title: a word begins with a capital.
    outline: a shape's corners in place of that one's (see `forms`).
    fill: what is drawn inside of its line in place of nothing (see `forms.random_fill`).
    shadow: how far it throws one to the right and down.
    tint: the colour that its own fades to from left to right.
    wobble: how far its line strays, as a shaky hand draws it.
    """

    hollow: float = 0.0
    border: tuple | None = None
    strokes: int = -1
    title: bool = False
    outline: tuple[tuple[float, float], ...] = ()
    fill: tuple = ()
    shadow: float = 0.0
    tint: tuple | None = None
    wobble: float = 0.0

    @property
    def text(self) -> str:
        return self.name.capitalize() if self.title and not self.upper else super().text

    @property
    def corners(self) -> tuple[tuple[float, float], ...]:
        return self.outline or super().corners


def in_any_look(scene: shapes.Scene) -> shapes.Scene:
    """A plain scene with things that may get a look."""
    return replace(scene, things=tuple(Thing(**vars(thing)) for thing in scene.things))
