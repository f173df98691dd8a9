"""Compare two runs on the same questions: whether the second model is better, and where.

    python -m eval compare runs/eval/a runs/eval/b
    python -m eval compare runs/eval/a runs/eval/b --json

Scores are paired question by question, which shows far smaller differences than two separate intervals do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.results import OVERALL, RUN, SAMPLES, Record, by_family, interval_text, read_samples
from eval.statistics import compare_paired
from eval.tasks import TaskError
from inference.flags import Parser
from inference.results import to_json
from messages import for_terminal

_CHANCE = 0.05  # a smaller p-value is taken for a difference of the models
_MAY_DIFFER = ("prompt", "system", "max_new_tokens", "samples_sha256", "data", "decoding")


def read_run(folder: Path) -> tuple[dict[str, Any], dict[str, Record]]:
    """(run.json, samples by id) of a finished run. Raises TaskError where there is none."""
    folder = folder.parent if folder.is_file() else folder
    if not (folder / RUN).is_file():
        raise TaskError(f"{folder}: expected the output folder of a run, found no {RUN} there")
    run = json.loads((folder / RUN).read_text(encoding="utf-8"))
    records, expected = read_samples(folder / SAMPLES), run["task"]["samples"]
    if len(records) != expected:
        raise TaskError(
            f"{folder}: expected {expected} answered questions, got {len(records)}: finish the run first"
        )
    return run, records


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Both models, and for each family and overall what `paired_row` says."""
    (run_a, a), (run_b, b) = read_run(first), read_run(second)
    for key in ("metric", "scoring"):
        if run_a["task"][key] != run_b["task"][key]:
            raise TaskError(
                f"expected two runs scored alike, got {key} {run_a['task'][key]!r} and {run_b['task'][key]!r}"
            )
    asked = ("question", "targets", "family")
    a_asked, b_asked = ({n: [one.get(key) for key in asked] for n, one in run.items()} for run in (a, b))
    if a_asked != b_asked:
        raise TaskError(f"expected two runs on the same questions, got others in {first} than in {second}")
    rows = []
    for name, own in by_family(list(a), lambda one: a[one].get("family", "")).items():
        rows.append({"name": name, **paired_row(*([run[one]["score"] for one in own] for run in (a, b)))})
    differs = [key for key in _MAY_DIFFER if run_a["task"].get(key) != run_b["task"].get(key)]
    models = [run["model"] for run in (run_a, run_b)]
    return {"models": models, "metric": run_a["task"]["metric"], "differs": differs, "rows": rows}


def paired_row(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    difference, interval, p_value = compare_paired(a, b)
    return {
        "first": sum(a) / len(a),
        "second": sum(b) / len(b),
        "difference": difference,
        "interval": list(interval),
        "p_value": p_value,
        "better": sum(y > x for x, y in zip(a, b, strict=True)),
        "worse": sum(y < x for x, y in zip(a, b, strict=True)),
        "n": len(a),
    }


def text(result: Mapping[str, Any]) -> str:
    """The comparison as a Markdown table with a sentence."""
    names = [f"{model['name']} ({model['revision'][:14]}, {model['dtype']})" for model in result["models"]]
    lines = [f"A: {names[0]}", f"B: {names[1]}"]
    if result["differs"]:
        lines.append(f"The runs differ in their {', '.join(result['differs'])}.")
    lines += ["", "| questions about | A | B | B - A | 95% interval | p | better | worse | n |"]
    lines.append("|---" * 9 + "|")
    for row in result["rows"]:
        name = f"**{row['name']}**" if row["name"] == OVERALL else row["name"]
        lines.append(
            f"| {name} | {row['first']:.1%} | {row['second']:.1%} | {row['difference']:+.1%} | "
            f"{interval_text(row['interval'])} | {row['p_value']:.2g} | {row['better']} | {row['worse']} | "
            f"{row['n']} |"
        )
    row = result["rows"][-1]
    chance = row["p_value"] >= _CHANCE or row["interval"][0] <= 0 <= row["interval"][1]
    better = "B is better than A" if row["difference"] > 0 else "A is better than B"
    verdict = "the difference may be chance" if chance else better
    lines += ["", f"Mean scores by {result['metric']}; on these {row['n']} questions {verdict}."]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m eval compare", description=__doc__)
    parser.add_argument("first", type=Path, help="output folder of run A")
    parser.add_argument("second", type=Path, help="output folder of run B")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)
    result = compare(options.first, options.second)
    print(to_json(result) if options.json else for_terminal(text(result)))
