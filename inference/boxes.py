"""Boxes and points of answers: what to ask for them, what an answer locates, and the image with them drawn.

found = checkpoint.processor.form(image.size).read(answer, image.size)
save_signed(draw_things(image, found.boxes, found.points), Path("boxes.png"))
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw

from data.boxes import Box, CoordinateForm, Located, Point, form_of, lines_of
from data.errors import ImageError
from data.processor import coordinates_of
from data.tiles import Sizes
from data.video import Clip
from inference.attribution.draw import font, save_signed
from inference.checkpoint import Checkpoint
from inference.coordinates import ANY_SIZE, spoken_form
from inference.errors import RequestError
from messages import counted
from models.checkpoints.sources import open_files

# Dark enough for white letters; told apart by people who do not see red or green as others do.
COLOURS = ("#b4235a", "#1d4ed8", "#b45309", "#047857", "#7e22ce", "#0e7490", "#4d7c0f", "#9a3412")
_DECIMALS = 2


def located_fields(form: CoordinateForm, found: Located) -> dict[str, list[dict[str, Any]]]:
    """The things that an answer locates, as JSON: in pixels of the upright image, and in `raw` numbers, which
    are the model's."""

    def fields(kind: str, thing: Box | Point, numbers: Sequence[float]) -> dict[str, Any]:
        pixels = [round(one, _DECIMALS) for one in numbers]
        return {"label": thing.label, kind: pixels, "form": form.name, "raw": list(thing.raw)}

    return {
        "boxes": [fields("box", one, one.box) for one in found.boxes],
        "points": [fields("point", one, one.point) for one in found.points],
        "malformed": [{"text": one.text, "reason": one.reason} for one in found.malformed],
    }


def located(said: Any, sizes: Sizes | None, answer: str, thing: str = "") -> dict[str, list[dict[str, Any]]]:
    """`located_fields` of an answer, as the model (`Processor.coordinates`) wrote it, about an image of these
    sizes, where it was asked for `thing`; {} where the model's form is not known. Without sizes the pixels
    are None beside the `raw` numbers: there is no image, or it is open which of several is meant."""
    if (form := spoken_form(said, sizes)) is None:
        return {}
    fields = located_fields(form, form.read(answer, sizes[0] if sizes else ANY_SIZE, thing))
    for one in (*fields["boxes"], *fields["points"]) if sizes is None else ():
        one |= {name: None for name in ("box", "point") if name in one}
    return fields


def draw_things(image: Image.Image, boxes: Sequence[Box], points: Sequence[Point]) -> Image.Image:
    """A copy of an RGB image with boxes, points and their labels; each label has its colour."""
    drawn = image.copy()
    pen = ImageDraw.Draw(drawn)
    width, height = image.size
    line = max(2, round(min(image.size) / 200))
    letters = max(11, round(min(image.size) / 32))
    things: list[Box | Point] = [*boxes, *points]
    labels = list(dict.fromkeys(thing.label for thing in things))
    for thing in things:
        colour = COLOURS[labels.index(thing.label) % len(COLOURS)]
        if isinstance(thing, Box):
            x1, y1, x2, y2 = (round(one) for one in thing.box)
            # A white line on both sides keeps the colour apart from any background.
            pen.rectangle((x1 - 1, y1 - 1, x2 + 1, y2 + 1), outline="white", width=line + 2)
            pen.rectangle((x1, y1, x2, y2), outline=colour, width=line)
            corner = x1, y1
        else:
            x, y = thing.point
            for radius, fill in ((3 * line, "white"), (2 * line, colour)):
                pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
            corner = round(x) + 4 * line, round(y) - letters // 2
        if not thing.label:
            continue
        text = thing.label if len(thing.label) <= 40 else thing.label[:39] + "…"
        face = font(letters, text.isascii())
        left, top, right, bottom = (round(one) for one in pen.textbbox((0, 0), text, face))
        wide, high = right - left + 2 * line, bottom - top + 2 * line
        # Above a box, or inside of it where there is no room; always within the image.
        above = corner[1] - high if isinstance(thing, Box) and corner[1] >= high else corner[1]
        place = max(0, min(corner[0], width - wide)), max(0, min(above, height - high))
        pen.rectangle((*place, place[0] + wide, place[1] + high), fill=colour)
        pen.text((place[0] + line - left, place[1] + line - top), text, "white", face)
    return drawn


def asked_for(args: argparse.Namespace, needed: bool) -> tuple[CoordinateForm | None, list[tuple[str, str]]]:
    """The form that generate.py's arguments name, or else the model's, which need not be open; and (question,
    thing) for things to detect and to point to, and for everything. Raises RequestError where the form has
    no such question, and where it is `needed` and not known."""
    asked = [("detect", one) for one in args.detect] + [("point", one) for one in args.point]
    asked += [("describe", "")] * args.describe
    opened = open_files(args.model, args.revision)
    try:
        form = form_of(coordinates_of(opened.config, opened.generation_config), args.box_format)
        if form is None and (asked or needed):
            raise ValueError("the model does not say in which form it writes boxes: give --box-format")
        return form, [(form.question(kind, thing), thing) for kind, thing in asked] if form else []
    except ValueError as error:
        raise RequestError(error) from error


class Locator:
    """Reads the answers to generate.py's questions, one after another.

    questions: those given, and those of --detect, --point and --describe, which raise RequestError where they
    cannot be asked.
    asked: the number of such a question -> the thing.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        images: Sequence[Image.Image],
        questions: Sequence[str],
        log: Callable[[str], None],
    ):
        self.drawing, self.log = args.show_boxes, log
        needed = bool(args.detect or args.point or args.describe or args.show_boxes)
        self.image = images[0] if len(images) == 1 and args.num_answers == 1 else None
        self.questions = list(questions)
        self.asked: dict[int, str] = {}
        self.found: list[Located] = []
        if videos := [image.name for image in images if needed and isinstance(image, Clip)]:
            raise ImageError(f"boxes and points: expected images, got the video {videos[0]}")
        if needed and self.image is None:
            raise RequestError(f"boxes and points: expected one image, got {len(images)}")
        self.form, asked = asked_for(args, needed)
        for question, thing in asked:
            self.asked[len(self.questions)] = thing
            self.questions.append(question)

    def locate(self, checkpoint: Checkpoint, result: Mapping[str, Any]) -> dict[str, Any]:
        """The fields `boxes`, `points` and `malformed` of the next question's answer; {} where a model's form
        is not known, and where several images or answers leave open which is meant. With the last answer the
        drawing is written."""
        if self.form is None or self.image is None:
            return {}
        asked = self.asked.get(len(self.found), "")
        form = self.form.on(checkpoint.processor.images.plan(*self.image.size).sizes[1])
        self.found.append(form.read(result["answers"][0], self.image.size, asked))
        if self.drawing is not None and len(self.found) == max(1, len(self.questions)):
            boxes = [box for one in self.found for box in one.boxes]
            points = [point for one in self.found for point in one.points]
            save_signed(draw_things(self.image, boxes, points), self.drawing)
            drawn = counted(len(boxes), "box", "boxes"), counted(len(points), "point")
            self.log(f"{self.drawing}: {', '.join(drawn)}")
        return located_fields(self.form, self.found[-1])

    def text(self, answer: str) -> str:
        """The last answer for a person: a line for each thing, or the answer where it locates nothing."""
        thing = self.asked.get(len(self.found) - 1, "")
        nothing = f"{thing or 'boxes'}: none" if answer.strip() in ("", "[]") else answer
        return "\n".join(lines_of(self.found[-1])) or nothing
