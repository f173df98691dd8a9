"""A run's metrics.jsonl as an image: losses and held-out scores over steps.

    python -m training.plot runs/shapes                    # runs/shapes/plot.svg
    python -m training.plot runs/shapes assets/run.svg

train.py draws it at each evaluation.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

from data.errors import replacing
from messages import one_line
from training.metrics import METRICS, read_metrics

PLOT = "plot.svg"
Points = list[tuple[float, float]]
# The keys of metrics.jsonl that are drawn, by panel, with their colours.
LOSSES = {"loss": "#64748b", "eval_loss": "#0f766e", "dense_loss": "#d6a35c"}
SCORES = {"eval_accuracy": "#0f766e", "eval_token_accuracy": "#64748b", "eval_exact_match": "#b45309"}
REWARDS = {"reward": "#64748b", "eval_reward": "#0f766e", "unvaried": "#d6a35c"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 390, 230, 46, 24, 46, 30  # pixels of a panel
_MOST = 300  # points of a line: more are averaged in groups


def draw(rows: Sequence[dict[str, Any]], title: str) -> str:
    """The image as SVG text: losses on a logarithmic axis, scores and rewards from 0 to 1, or as far as they
    go, where there are any."""
    panels: list[str] = []
    for colours, logarithmic in ((LOSSES, True), (REWARDS, False), (SCORES, False)):
        lines = {name: points for name in colours if (points := _points(rows, name, logarithmic))}
        if lines:
            panels.append(_panel(lines, colours, len(panels) * WIDTH, logarithmic))
    width = max(1, len(panels)) * WIDTH
    return svg(width, HEIGHT, title, panels or [text(10, 40, "nothing has been logged yet")])


def svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """A picture of so many pixels on white, with its title and what else is drawn."""
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    font = 'font-family="system-ui, sans-serif" font-size="11" fill="#1e293b"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    heading = text(10, 18, title, "start", 'font-size="13" font-weight="600"')
    return "\n".join([head, ground, heading, *parts, "</svg>\n"])


def _points(rows: Sequence[dict[str, Any]], name: str, positive: bool) -> Points:
    """(step, value) wherever it is finite, averaged in groups if they are many."""
    values = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
    values = [(x, y) for x, y in values if math.isfinite(y) and (y > 0 or not positive)]
    size = max(1, math.ceil(len(values) / _MOST))
    groups = [values[at : at + size] for at in range(0, len(values), size)]
    return [(mean(x for x, _ in group), mean(y for _, y in group)) for group in groups]


def _panel(lines: dict[str, Points], colours: dict[str, str], left: float, logarithmic: bool) -> str:
    """One pair of axes with its lines, and their names above."""
    steps, values = zip(*(point for points in lines.values() for point in points), strict=True)
    first, last = min(steps), max(max(steps), min(steps) + 1)
    low, high = min(0.0, *values), max(1.0, *values)
    if logarithmic:
        low, high = math.log10(min(values)), math.log10(max(values))
    high = max(high, low + 0.1)
    start, end = left + LEFT, left + WIDTH - RIGHT

    def place(step: float, value: float) -> tuple[float, float]:
        share = ((math.log10(value) if logarithmic else value) - low) / (high - low)
        x = start + (step - first) / (last - first) * (end - start)
        return x, HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    ticks = [low + share * (high - low) for share in (0, 0.25, 0.5, 0.75, 1)]
    if logarithmic:  # 1, 2 and 5 times powers of ten; the ends where there is none between them
        powers = range(math.floor(low), math.ceil(high) + 1)
        round_numbers = [float(f"{m}e{p}") for p in powers for m in (1, 2, 5)]
        ticks = [tick for tick in round_numbers if low <= math.log10(tick) <= high] or [10**low, 10**high]
    parts = []
    for tick in ticks:
        _, y = place(first, tick)
        parts.append(f'<line x1="{start}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        parts.append(text(start - 6, y + 4, f"{tick:g}", "end"))
    for step, anchor in ((first, "start"), ((first + last) / 2, "middle"), (last, "end")):
        parts.append(text(place(step, ticks[0])[0], HEIGHT - 10, f"{step:,.0f}", anchor))
    for number, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        # A single point is a line from itself to itself, which a round end makes a dot.
        path, stroke = (f"{path} {path}", 5) if len(points) == 1 else (path, 1.5)
        style = f'stroke="{colours[name]}" stroke-width="{stroke}" stroke-linecap="round"'
        parts.append(f'<polyline points="{path}" fill="none" {style}/>')
        label = name.replace("_", " ").replace("eval", "held-out")
        parts.append(text(start + 120 * number, 36, label, "start", f'fill="{colours[name]}"'))
    return "\n".join(parts)


def text(x: float, y: float, words: str, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(words)}</text>'


def write_plot(run: Path, image: Path | None = None) -> None:
    """Draw a run's metrics, into its folder by default."""
    with replacing(image or run / PLOT) as temporary:
        temporary.write_text(draw(read_metrics(run / METRICS), run.resolve().name), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="training.plot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder with metrics.jsonl")
    parser.add_argument("image", type=Path, nargs="?", help=f"SVG to write (default: {PLOT} in the folder)")
    options = parser.parse_args(arguments)
    try:
        write_plot(options.run, options.image)
    except OSError as error:
        print(f"training.plot: error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
