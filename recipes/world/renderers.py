"""Scenes drawn by other programs: as SVG, and by matplotlib. Training uses neither; they are for evaluation.

Digits of UCI are images and cannot be drawn so: `drawable` says which scenes can.
"""

from __future__ import annotations

import io

import resvg_py
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Circle, PathPatch, Polygon
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D
from PIL import Image

from recipes.world.scene import Thing
from shapes.drawing import corners, scales_of
from shapes.world import Scene


def drawable(scene: Scene) -> bool:
    """Whether all its things are shapes, or words and digits of a font."""
    return all(thing.kind == "shape" or thing.font for thing in scene.things)


def render_matplotlib(scene: Scene, size: int = 256) -> Image.Image:
    """The scene on a flat ground by matplotlib's Agg, `size` pixels on the shorter side."""

    width, height, scales = _canvas(scene, size)
    figure = Figure((width / 100, height / 100), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    figure.set_facecolor(_share(scene.background.first))
    for thing in scene.things:
        line, border = _line(thing, scales[2])
        ink = _share(thing.rgb)
        edge = ink if thing.hollow else _share(border) if border else "none"
        how = {"facecolor": "none" if thing.hollow else ink, "edgecolor": edge, "linewidth": line * 0.72}
        if thing.kind != "shape":
            axes.add_patch(PathPatch(_text_path(thing, scales), facecolor=ink, linewidth=0))
        elif thing.name == "circle":
            centre = thing.x * scales[0], thing.y * scales[1]
            axes.add_patch(Circle(centre, thing.size * scales[2] / 2, **how))
        else:
            axes.add_patch(Polygon(corners(thing, scales), **how))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB")


def svg(scene: Scene, size: int = 256) -> str:
    """The scene on a flat ground as SVG, its words as outlines."""
    width, height, scales = _canvas(scene, size)
    parts = [f'<rect width="{width}" height="{height}" fill="{_hex(scene.background.first)}"/>']
    for thing in scene.things:
        line, border = _line(thing, scales[2])
        ink = _hex(thing.rgb)
        edge = ink if thing.hollow else _hex(border) if border else "none"
        how = f'fill="{"none" if thing.hollow else ink}" stroke="{edge}" stroke-width="{line:.2f}"'
        if thing.kind != "shape":
            parts.append(f'<path d="{_svg_path(_text_path(thing, scales))}" fill="{ink}"/>')
        elif thing.name == "circle":
            x, y, r = thing.x * scales[0], thing.y * scales[1], thing.size * scales[2] / 2
            parts.append(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{r:.2f}" {how}/>')
        else:
            places = " ".join(f"{x:.2f},{y:.2f}" for x, y in corners(thing, scales))
            parts.append(f'<polygon points="{places}" {how}/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
    return head + "".join(parts) + "</svg>"


def render_svg(scene: Scene, size: int = 256) -> Image.Image:
    """`svg` by resvg."""
    return Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=svg(scene, size))))).convert("RGB")


def _canvas(scene: Scene, size: int):
    width, height = (round(size * max(1.0, a)) for a in (scene.aspect, 1 / scene.aspect))
    return width, height, scales_of((width, height))


def _line(thing: Thing, side: float):
    """(width of the line in pixels, the border's colour or None)"""
    if thing.hollow:
        return max(1.0, thing.hollow * side), None
    return (max(1.0, 0.05 * thing.size * side), thing.border) if thing.border else (0.0, None)


def _text_path(thing: Thing, scales):
    """The outlines of a word or digit, put into its box."""

    path = TextPath((0, 0), thing.text, size=100, prop=FontProperties(fname=thing.font.partition("@")[0]))
    box, width, height = path.get_extents(), thing.width * scales[2], thing.height * scales[3]
    place = Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2)
    place = place.scale(width / box.width, -height / box.height)
    return place.translate(thing.x * scales[0], thing.y * scales[1]).transform_path(path)


def _svg_path(path) -> str:
    said, letters = [], {1: "M", 2: "L", 3: "Q", 4: "C"}
    for vertices, code in path.iter_segments(simplify=False):
        said.append("Z" if code == 79 else letters[int(code)] + " ".join(f"{one:.2f}" for one in vertices))
    return " ".join(said)


def _share(rgb) -> tuple[float, float, float]:
    red, green, blue = rgb
    return red / 255, green / 255, blue / 255


def _hex(rgb) -> str:
    return "#" + bytes(rgb).hex()
