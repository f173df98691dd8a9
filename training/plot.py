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
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, GAP = 380, 230, 46, 14, 46, 30, 10  # pixels of a panel
_MOST = 300  # points of a line: more are averaged in groups


def lines_of(rows: Sequence[dict[str, Any]], names: Sequence[str], positive: bool) -> dict[str, Points]:
    """The points (step, value) of each key that has any, finite ones only."""
    lines: dict[str, Points] = {}
    for row in rows:
        for name in names:
            value = row.get(name)
            if isinstance(value, int | float) and math.isfinite(value) and (value > 0 or not positive):
                lines.setdefault(name, []).append((row["step"], value))
    return {name: _thinned(lines[name]) for name in names if name in lines}


def _thinned(points: Points) -> Points:
    size = math.ceil(len(points) / _MOST)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def draw(rows: Sequence[dict[str, Any]], title: str) -> str:
    """The image as SVG text: losses on a logarithmic axis, scores from 0 to 1 where there are any."""
    losses, scores = lines_of(rows, list(LOSSES), True), lines_of(rows, list(SCORES), False)
    panels = [_panel(losses, LOSSES, 0, logarithmic=True)] if losses else []
    if scores:
        panels.append(_panel(scores, SCORES, len(panels) * (WIDTH + GAP), logarithmic=False))
    width = max(1, len(panels)) * (WIDTH + GAP) - GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
            'font-family="system-ui, sans-serif" font-size="11" fill="#1e293b">',
            f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>',
            f'<text x="10" y="18" font-size="13" font-weight="600">{escape(title)}</text>',
            *(panels or ['<text x="10" y="40">nothing has been logged yet</text>']),
            "</svg>",
            "",
        ]
    )


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

    parts = []
    ticks = _decades(10**low, 10**high) if logarithmic else [0, 0.25, 0.5, 0.75, 1]
    for tick in ticks:
        _, y = place(first, tick)
        parts += [
            f'<line x1="{left + LEFT}" x2="{left + WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="#e2e8f0"/>',
            f'<text x="{left + LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>',
        ]
    for step in (first, (first + last) / 2, last):
        x, _ = place(step, 10**low if logarithmic else 0)
        anchor = {first: "start", last: "end"}.get(step, "middle")
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="{anchor}">{step:,.0f}</text>')
    name_at = left + LEFT
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


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from low to high; the ends themselves where there is none."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{m}e{p}") for p in powers for m in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high] or [low, high]


def write_plot(output: Path) -> Path:
    """Draw a run's metrics into its folder.

    Raises:
        OSError: there are none, or the image cannot be written.
    """
    with replacing(output / PLOT) as temporary:
        temporary.write_text(draw(read_metrics(output / METRICS), output.name), encoding="utf-8")
    return output / PLOT


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="training.plot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder with metrics.jsonl")
    parser.add_argument("picture", type=Path, nargs="?", help=f"SVG to write (default: {PLOT} in the folder)")
    options = parser.parse_args(arguments)
    try:
        image = draw(read_metrics(options.run / METRICS), options.run.resolve().name)
        (options.image or options.run / PLOT).write_text(image, encoding="utf-8")
    except OSError as error:
        print(f"training.plot: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
