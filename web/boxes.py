"""An image with the boxes and points of an answer over it, which light up under the mouse."""

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
    line = max(width, height) / 250
    shapes = []
    for thing in things:
        colour, label = COLOURS[labels.index(thing.label) % len(COLOURS)], escape(thing.label)
        if isinstance(thing, Box):
            x, y, right, bottom = thing.box
            shape = f'<rect x="{x:g}" y="{y:g}" width="{right - x:g}" height="{bottom - y:g}"/>'
        else:
            x, y = thing.point
            shape = f'<circle cx="{x:g}" cy="{y:g}" r="{3 * line:g}"/>'
        # The name stands inside of the image, whatever edge the thing is at.
        at = f'x="{min(x, 0.8 * width):g}" y="{max(y - 2 * line, 8 * line):g}" font-size="{7 * line:g}"'
        shapes.append(
            f'<g class="thing" tabindex="0" style="--ink: {colour}; stroke-width: {line:g}">'
            f"<title>{label}</title>{shape}<text {at}>{label}</text></g>"
        )
    said = escape(", ".join(label or "something" for label in labels))
    return (
        f'<svg class="located" viewBox="0 0 {width} {height}" role="group" aria-label="Located: {said}">'
        f'<image href="{source}" width="{width}" height="{height}"/>{"".join(shapes)}</svg>{broken}'
    )
