"""An image with the boxes and points of an answer over it, and their names below. page.js lights up a thing
and its name together, under the mouse and the keyboard."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

from data.coordinates import Box, Located, Point, form_of
from data.errors import ImageError
from data.images import load_image
from inference.boxes import COLOURS
from web.models import Models
from web.service import Exchange

LONGEST_SIDE = 768  # of the copy that is shown


def overlay(log: Sequence[Exchange], models: Models) -> str:
    """HTML of the last question's image with what its answer locates, or "" where that is nothing, or where
    several images or answers leave open which is meant. Nothing that was asked or answered is HTML here."""
    last = log[-1] if log else None
    if last is None or not last.stop_reasons or len(last.answers) != 1 or len(last.request.images) != 1:
        return ""
    checkpoint = models.held(last.request.model or models.default)
    try:
        form = form_of(checkpoint.model.generation_config) if checkpoint is not None else None
        if form is None or form.read(last.answers[0], (1, 1)) == Located():
            return ""
        image = load_image(last.request.images[0])
    except (ValueError, ImageError, OSError):  # the file has been deleted, or the model's file says nonsense
        return ""
    width, height = image.size
    found = form.read(last.answers[0], (width, height))
    things: list[Box | Point] = [*found.boxes, *found.points]
    broken = "".join(
        f'<p class="notice failed">Malformed: {escape(one.reason)}: <code>{escape(one.text)}</code></p>'
        for one in found.malformed
    )
    if not things:
        return broken
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    source = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    labels = list(dict.fromkeys(thing.label for thing in things))
    shapes, names = [], []
    for number, thing in enumerate(things):
        label = escape(thing.label or "something")
        mark = f'data-thing="{number}" style="--ink: {COLOURS[labels.index(thing.label) % len(COLOURS)]}"'
        if isinstance(thing, Box):
            x, y, right, bottom = thing.box
            area = (right - x) * (bottom - y)
            shape = f'<rect x="{x:g}" y="{y:g}" width="{right - x:g}" height="{bottom - y:g}"/>'
        else:
            (x, y), area = thing.point, 0.0
            shape = f'<circle cx="{x:g}" cy="{y:g}" r="{max(width, height) / 80:g}"/>'
        shapes.append((area, f"<g {mark}><title>{label}</title>{shape}</g>"))
        names.append(f'<button type="button" {mark}>{label}</button>')
    # Small things lie over large ones, so that the mouse reaches both.
    over = "".join(shape for _, shape in sorted(shapes, key=lambda one: -one[0]))
    return (
        f'<div class="located"><svg viewBox="0 0 {width} {height}" role="img" '
        'aria-label="The image, with what the answer locates">'
        f'<image href="{source}" width="{width}" height="{height}"/>{over}</svg>'
        f"{''.join(names)}</div>{broken}"
    )
