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
from typing import Any

from data.files import replacing
from training.metrics import METRICS, read_metrics

PLOT = "plot.svg"
Points = list[tuple[float, float]]
# The keys of metrics.jsonl that are drawn, by panel, with their colours.
LOSSES = {"loss": "#64748b", "eval_loss": "#0f766e", "dense_loss": "#d6a35c"}
SCORES = {"eval_accuracy": "#0f766e", "eval_token_accuracy": "#64748b", "eval_exact_match": "#b45309"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 390, 230, 46, 24, 46, 30  # pixels of a panel
_MOST = 300  # points of a line: more are averaged in groups


def draw(rows: Sequence[dict[str, Any]], title: str) -> str:
    """The image as SVG text: losses on a logarithmic axis, scores from 0 to 1 where there are any."""
    panels: list[str] = []
    for colours, logarithmic in ((LOSSES, True), (SCORES, False)):
        if lines := _lines(rows, colours, positive=logarithmic):
            panels.append(_panel(lines, colours, len(panels) * WIDTH, logarithmic))
    width = max(1, len(panels)) * WIDTH
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
            'font-family="system-ui, sans-serif" font-size="11" fill="#1e293b">',
            f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<text x="10" y="18" font-size="13" font-weight="600">{escape(title)}</text>',
            *(panels or ['<text x="10" y="40">nothing has been logged yet</text>']),
            "</svg>\n",
        ]
    )


def _lines(rows: Sequence[dict[str, Any]], names: dict[str, str], positive: bool) -> dict[str, Points]:
    """The points (step, value) of each key that has any: finite ones, averaged in groups if they are many."""
    lines: dict[str, Points] = {}
    for name in names:
        points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
        points = [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not positive)]
        size = math.ceil(len(points) / _MOST)
        groups = [points[at : at + size] for at in range(0, len(points), size)] if points else []
        if groups:
            lines[name] = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return lines


def _panel(lines: dict[str, Points], colours: dict[str, str], left: float, logarithmic: bool) -> str:
    """One pair of axes with its lines, and their names above."""
    steps = [x for points in lines.values() for x, _ in points]
    values = [y for points in lines.values() for _, y in points]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    low, high = (math.log10(min(values)), math.log10(max(values))) if logarithmic else (0.0, 1.0)
    high = max(high, low + 0.1)

    def place(step: float, value: float) -> tuple[float, float]:
        share = ((math.log10(value) if logarithmic else value) - low) / (high - low)
        x = left + LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    ticks = [0, 0.25, 0.5, 0.75, 1]
    if logarithmic:  # 1, 2 and 5 times powers of ten; the ends where there is none between them
        powers = range(math.floor(low), math.ceil(high) + 1)
        round_numbers = [float(f"{m}e{p}") for p in powers for m in (1, 2, 5)]
        ticks = [tick for tick in round_numbers if low <= math.log10(tick) <= high] or [10**low, 10**high]
    parts, start, end = [], left + LEFT, left + WIDTH - RIGHT
    for tick in ticks:
        _, y = place(first, tick)
        parts.append(f'<line x1="{start}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{start - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for step, anchor in ((first, "start"), ((first + last) / 2, "middle"), (last, "end")):
        x, _ = place(step, ticks[0])
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="{anchor}">{step:,.0f}</text>')
    name_at = start
    for name, points in lines.items():
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        colour, label = colours[name], name.replace("_", " ").replace("eval", "held-out")
        if len(points) == 1:
            x, y = place(*points[0])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>')
        else:
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{name_at}" y="36" fill="{colour}">{escape(label)}</text>')
        name_at += 7 * len(label) + 14
    return "\n".join(parts)


def write_plot(run: Path, image: Path | None = None) -> None:
    """Draw a run's metrics, into its folder by default.

    Raises:
        OSError: there are none, or the image cannot be written.
    """
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
        print(f"training.plot: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
