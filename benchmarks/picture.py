"""A result of decode.py or first_token.py as a picture, and as the table that the pages show.

    python -m benchmarks.picture benchmarks/results/decode-cpu-zen4.json assets/decode.svg
    python -m benchmarks.picture benchmarks/results/first-token-cpu-zen4.json assets/first-token.svg

The picture is written; the table is printed, in Markdown. Decoding is drawn at the shortest context and one
row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

COLOURS = {"ours-fast": "#0f766e", "llama.cpp": "#b45309", "transformers": "#64748b", "openvino": "#6d28d9"}
LIGHTER = {"ours-fast": "#5eb8ae", "transformers": "#b3bfcc"}  # of prefill, after the tower
LABELS = {"ours-fast": "Ocelli", "openvino": "OpenVINO (tower)", "llama.cpp": "llama.cpp (language model)"}
LINE = "#dc2626"
BAR, STEP, GAP, LEFT, WIDTH, TOP = 20, 24, 14, 260, 820, 68  # pixels
NUMBER = 60  # pixels that the number at the end of a bar has


def by_precision(rows: list[dict], speed: Callable[[dict], float]) -> list[list[dict]]:
    """The rows of systems that are drawn, in a list for each precision, fastest first."""
    known = [row for row in rows if row["system"] in COLOURS and row["precision"]]
    precisions = dict.fromkeys(row["precision"] for row in known)
    return [
        sorted((row for row in known if row["precision"] == one), key=speed, reverse=True)
        for one in precisions
    ]


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def rect(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'


def dashed(x: float, top: float, bottom: float) -> str:
    place = f'x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"'
    return f'<line {place} stroke="{LINE}" stroke-dasharray="4 3"/>'


def labels(groups: list[list[dict]]) -> tuple[list[str], dict[tuple[str, str], int], int]:
    """The names of all bars; the top of each, by system and precision; where the last one ends."""
    parts, tops, y = [], {}, TOP
    for group in groups:
        for row in group:
            name = f"{LABELS.get(row['system'], row['system'])}, {row['precision']}"
            parts.append(text(LEFT - 8, y + 15, name, 'text-anchor="end"'))
            tops[row["system"], row["precision"]] = y
            y += STEP
        y += GAP
    return parts, tops, y


def page(result: dict, height: float, title: str, note: str, parts: list[str]) -> str:
    hardware = result["hardware"]
    where = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} threads"
    font = 'font-family="system-ui, sans-serif" font-size="13" fill="#1e293b"'
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            text(
                12, 22, f"{title}, {result['settings']['shape']}'s shape", 'font-size="15" font-weight="600"'
            ),
            text(12, 42, f"{where}; {note}", 'font-size="12" fill="#475569"'),
            *parts,
            "</svg>\n",
        ]
    )


def markdown(heads: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(heads)
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, rule, *lines])


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# -------------------------------------------------------------------------------------------- decoding
def draw_decode(result: dict) -> str:
    """Tokens a second, and the memory's limit."""
    rows = [row for row in result["rows"] if row["batch"] == 1]
    context = min(row["context"] for row in rows)
    rows = [row for row in rows if row["context"] == context]
    groups = by_precision(rows, lambda row: row["decode_tokens_per_second"])
    parts, tops, height = labels(groups)
    limits = [group[0]["decode_tokens_per_second"] / group[0]["floor_fraction"] for group in groups]
    scale = (WIDTH - LEFT - NUMBER) / max(limits)
    for group, limit in zip(groups, limits, strict=True):
        for row in group:
            y, speed = tops[row["system"], row["precision"]], row["decode_tokens_per_second"]
            parts.append(rect(LEFT, y, scale * speed, COLOURS[row["system"]]))
            parts.append(text(LEFT + scale * speed + 6, y + 15, f"{speed:.0f}"))
        first, last = (tops[row["system"], row["precision"]] for row in (group[0], group[-1]))
        parts.append(dashed(LEFT + scale * limit, first - 3, last + BAR + 3))
    note = "dashed: every weight and the cache read once at this machine's read bandwidth"
    return page(result, height, f"Tokens a second after {context:,} tokens, batch 1", note, parts)


def table_decode(result: dict) -> str:
    """Of our fast step: its speed, and how many times that of the others."""
    heads = ["weights", "context", "rows", "tokens/s", "x transformers", "x llama.cpp", "of the floor"]
    lines = [
        [
            row["precision"],
            f"{row['context']:,}",
            str(row["batch"]),
            f"{row['decode_tokens_per_second']:.1f}",
            number(row["over_transformers"], ".2f"),
            number(row["over_llama"], ".2f"),
            f"{row['floor_fraction']:.0%}",
        ]
        for row in result["rows"]
        if row["system"] == "ours-fast"
    ]
    return markdown(heads, lines)


# ----------------------------------------------------------------------------------------- first tokens
def draw_first_token(result: dict) -> str:
    """Two columns of bars, for few tiles and many, with the tower's part and the language model's."""

    def seconds(row: dict) -> float:
        return (row["vision_seconds"] or 0) + (row["prefill_seconds"] or 0)

    counts = sorted({row["tiles"] for row in result["rows"]})
    most = [row for row in result["rows"] if row["tiles"] == counts[-1]]
    parts, tops, height = labels(by_precision(most, lambda row: -seconds(row)))
    width = (WIDTH - LEFT) / len(counts)
    for column, tiles in enumerate(counts):
        rows = [row for row in result["rows"] if row["tiles"] == tiles and row["system"] in COLOURS]
        left, scale = LEFT + column * width, (width - NUMBER) / max(map(seconds, rows))
        parts.append(text(left, TOP - 6, f"{tiles} tile{'s' * (tiles > 1)}", 'font-weight="600"'))
        for row in rows:
            y, system = tops[row["system"], row["precision"]], row["system"]
            vision, whole = scale * (row["vision_seconds"] or 0), scale * seconds(row)
            parts.append(rect(left, y, vision, COLOURS[system]))
            parts.append(rect(left + vision, y, whole - vision, LIGHTER.get(system, COLOURS[system])))
            parts.append(text(left + whole + 6, y + 15, f"{seconds(row):.2f}"))
            if row["draft_seconds"]:
                parts.append(dashed(left + scale * row["draft_seconds"], y - 2, y + BAR + 2))
    note = "dark: vision tower, light: language model; dashed: first word of a draft"
    return page(result, height, "Seconds to the first token", note, parts)


def table_first_token(result: dict) -> str:
    """Seconds of ours, and how they compare with what the others have."""
    heads = ["weights", "tiles", "Ocelli", "transformers", "first drafted word"]
    heads += ["tower: Ocelli / OpenVINO", "prefill: Ocelli / llama.cpp"]
    theirs = {
        (row["precision"], row["tiles"]): row["first_token_seconds"]
        for row in result["rows"]
        if row["system"] == "transformers"
    }
    lines = []
    for row in result["rows"]:
        if row["system"] != "ours-fast":
            continue
        values = [row["first_token_seconds"], theirs.get((row["precision"], row["tiles"]))]
        values += [row["draft_seconds"], row["vision_over_openvino"], row["prefill_over_llama"]]
        shown = [number(value, ".2f") for value in values]
        units = [f"{value} s" if value != "-" else value for value in shown[:3]]
        lines.append([row["precision"], str(row["tiles"]), *units, *shown[3:]])
    return markdown(heads, lines)


KINDS = {"decode": (draw_decode, table_decode), "first_token": (draw_first_token, table_first_token)}


def main(arguments: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("result", type=Path, help="JSON file that one of the two benchmarks has saved")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    options = parser.parse_args(arguments)
    try:
        result = json.loads(options.result.read_text())
        draw, table = KINDS[result["benchmark"]]
        drawn, shown = draw(result), table(result)
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "expected a result of benchmarks/decode.py or first_token.py"
        parser.error(f"{options.result}: {expected} ({type(error).__name__}: {error})")
    options.picture.write_text(drawn)
    print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
