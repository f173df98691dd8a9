"""An image with the boxes and points of an answer over it, and their names below. page.js lights up a thing
and its name together, under the mouse and the keyboard."""

from __future__ import annotations

import mimetypes
import os
from html import escape
from urllib.parse import quote

from data.boxes import Box, Located, Point
from inference.boxes import COLOURS
from inference.coordinates import spoken_form
from web.service import Exchange

HIGHEST = 320  # pixels of a page that an image takes, so that its question and the names are seen with it


def overlay(exchange: Exchange) -> str:
    """HTML of a question's image with what its answer locates, or "" where that is nothing, or where several
    images or answers leave open which is meant. Nothing that was asked or answered is HTML here."""
    request, sizes = exchange.request, exchange.sizes
    if not exchange.stop_reasons or sizes is None or len(exchange.answers) != 1 or len(request.images) != 1:
        return ""
    kind, _ = mimetypes.guess_type(request.images[0])  # a video is not drawn on
    # Its image may have been deleted meanwhile.
    if not os.path.isfile(request.images[0]) or (kind or "").startswith("video/"):
        return ""
    form = spoken_form(exchange.coordinates, sizes)
    found = Located() if form is None else form.read(exchange.answers[0], sizes[0])
    things: list[Box | Point] = [*found.boxes, *found.points]
    if not things:
        return ""
    width, height = sizes[0]
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
    # The file may be a smaller copy of the image: what is drawn over it is stretched to it.
    wide = f"width: min(100%, {HIGHEST * width / height:.0f}px); aspect-ratio: {width} / {height}"
    return (
        f'<div class="located"><div class="frame" style="{wide}">'
        f'<img src="gradio_api/file={quote(request.images[0])}" alt="The image">'
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="What the answer locates on the image">{over}</svg></div>{"".join(names)}</div>'
    )
