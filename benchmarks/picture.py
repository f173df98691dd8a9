"""A result of benchmarks/decode.py as a picture: tokens a second by system, and the memory's limit.

python -m benchmarks.picture benchmarks/results/decode-cpu-zen3.json assets/decode.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path

COLOURS = {"ours-fast": "#0f766e", "llama.cpp": "#b45309", "transformers": "#64748b", "ours-eager": "#a8b8c8"}
LABELS = {"ours-fast": "Ocelli", "ours-eager": "Ocelli, eager", "ours-no-cache": "Ocelli, no cache"}
BAR, GAP, LEFT, WIDTH, TOP = 20, 14, 220, 760, 56  # pixels


def bars(rows: list[dict], context: int) -> list[list[dict]]:
    """The rows at a context, a list a precision, fastest first."""
    here = [row for row in rows if row["context"] == context and row["system"] != "ours-no-cache"]
    precisions = dict.fromkeys(row["precision"] for row in here)
    return [
        sorted(
            (row for row in here if row["precision"] == precision),
            key=lambda row: -row["decode_tokens_per_second"],
        )
        for precision in precisions
    ]


def draw(result: dict, context: int) -> str:
    """The picture as SVG text."""
    groups = bars(result["rows"], context)
    if not groups:
        known = sorted({row["context"] for row in result["rows"]})
        raise ValueError(f"no rows at a context of {context}; there are {known}")
    fastest = max(
        row["decode_tokens_per_second"] / row["floor_fraction"] for group in groups for row in group
    )
    scale, y, parts = (WIDTH - LEFT - 90) / fastest, TOP, []
    for group in groups:
        limit = LEFT + scale * group[0]["decode_tokens_per_second"] / group[0]["floor_fraction"]
        height = len(group) * (BAR + 4)
        for row in group:
            speed = row["decode_tokens_per_second"]
            name = f"{LABELS.get(row['system'], row['system'])}, {row['precision']}"
            parts += [
                f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
                f'<rect x="{LEFT}" y="{y}" width="{scale * speed:.1f}" height="{BAR}" '
                f'fill="{COLOURS.get(row["system"], "#94a3b8")}"/>',
                f'<text x="{LEFT + scale * speed + 6:.1f}" y="{y + 15}">{speed:.0f}</text>',
            ]
            y += BAR + 4
        parts.append(
            f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="{y - height - 3}" y2="{y - 1}" stroke="#dc2626" '
            'stroke-dasharray="4 3"/>'
        )
        y += GAP
    hardware, shape = result["hardware"], result["settings"]["shape"]
    title = f"Tokens a second behind {context:,} tokens of context, batch 1, {shape}'s shape"
    where = hardware["gpu"] or f"{hardware['cpu']}, {hardware['cores']} cores"
    note = f"{where}; dashed: every weight and the cache read once at this machine's read bandwidth"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
            'font-family="system-ui, sans-serif" font-size="13" fill="#1e293b">',
            f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>',
            f'<text x="12" y="22" font-size="15" font-weight="600">{escape(title)}</text>',
            f'<text x="12" y="42" font-size="12" fill="#475569">{escape(note)}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.picture", description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="JSON that benchmarks/decode.py ended with")
    parser.add_argument("picture", type=Path, help="SVG to write")
    parser.add_argument("--context", type=int, default=84, help="tokens of context (default 84)")
    options = parser.parse_args(arguments)
    try:
        options.picture.write_text(draw(json.loads(options.result.read_text()), options.context))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"benchmarks.picture: error: {options.result}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
