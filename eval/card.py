"""Write results.json into a model's card: a table to read, and the `model-index` that the Hub reads.

    python -m eval card runs/mine runs/eval/chartqa-mine runs/eval/docvqa-mine

Nothing else in the card changes but the section "Evaluation".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from eval.results import (
    KINDS,
    RESULTS,
    at_k_text,
    best_name,
    calibration_text,
    cut_off_text,
    interval_text,
    official_table,
    table_text,
)
from eval.tasks import TaskError
from inference.flags import Parser
from messages import counted

LMMS_EVAL = "https://github.com/EvolvingLMMs-Lab/lmms-eval"


def read_results(path: Path) -> dict[str, Any]:
    """The content of a results.json, or of the one in a folder. Raises TaskError where there is none."""
    path = path / RESULTS if path.is_dir() else path
    if not path.is_file():
        raise TaskError(f"{path}: expected a {RESULTS}, found none: run python -m eval first")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        return results | {"task": dict(results["task"])}
    except (ValueError, KeyError, TypeError):
        raise TaskError(f"{path}: expected the results of python -m eval, got something else") from None


def evaluation_text(several: Sequence[Mapping[str, Any]]) -> str:
    """The card's section in Markdown: a table for each result, and how it was measured."""
    parts = []
    for results in several:
        task = results["task"]
        if "harness" in task:
            heading = f"**{task['name']}** by {task['harness']}, {counted(results['n'], 'question')}."
            parts += [heading, official_table(results)]
            continue
        interval = f"{results['confidence']:.0%} interval {interval_text(results['interval'])}"
        on = f"{counted(results['n'], 'question')}, {results['model']['dtype']}"
        prompt = json.dumps(task["prompt"], ensure_ascii=False)
        parts.append(f"**{task['name']}**: {results['score']:.1%} ({interval}) on {on}.")
        parts.append(table_text(results["families"]))
        if results.get("at_k"):
            parts += [f"With {task['decoding'].partition(';')[0]}:", at_k_text(results)]
        cut = f"Answers {cut}." if (cut := cut_off_text(results)) else ""
        said = (calibration_text(results), cut, f"Scoring: {task['scoring']} Prompt: `{prompt}`.")
        parts.append(" ".join(filter(None, said)))
    return "\n\n".join(parts)


def eval_results(several: Sequence[Mapping[str, Any]]) -> list[EvalResult]:
    """The entries of the Hub's `model-index`: one for each result, or for each figure of an official task."""
    entries: list[dict[str, Any]] = []
    for results in several:
        task, figures = results["task"], {"n": results["n"]}
        if "harness" in task:
            harness = {"source_name": task["harness"], "source_url": LMMS_EVAL}
            for figure, value in results["figures"].items():
                args = figures | {"interval": results["intervals"].get(figure)}
                one = {"dataset_type": task["name"], "dataset_name": task["name"], "metric_type": figure}
                entries.append(one | {"metric_value": value, "metric_args": args} | harness)
            continue
        data = task["data"]
        figures["confidence"] = results["confidence"]
        figures["interval"] = [round(value, 6) for value in results["interval"]]
        figures |= {name: round(one["score"], 6) for name, one in results["controls"].items()}
        for row in results.get("at_k", ()):
            for title, name in zip((best_name(results), "majority"), KINDS):
                figures[f"{title}@{row['k']}"] = round(row[name]["score"], 6)
        if "stop_reasons" in results:
            figures["cut_off"] = results["stop_reasons"].get("length", 0)
        if calibration := results.get("calibration"):
            figures["calibration_error"] = round(calibration["ece"], 6)
        entries.append(
            {
                "dataset_type": re.sub(r"[^\w./-]+", "-", task["name"]).strip("-"),
                "dataset_name": data.get("path") or data.get("name") or task["name"],
                **{f"dataset_{key}": data.get(key) for key in ("split", "revision")},
                "dataset_config": data.get("subset"),
                "metric_type": task["metric"],
                "metric_value": round(results["score"], 6),
                "metric_args": figures,
            }
        )
    common: dict[str, Any] = {"task_type": "image-text-to-text", "task_name": "Visual question answering"}
    return [EvalResult(**common, metric_name=one["metric_type"].replace("_", " "), **one) for one in entries]


def open_card(folder: Path) -> ModelCard:
    """The card of a checkpoint's folder. Raises TaskError where it has none."""
    if not (path := folder / "README.md").is_file():
        raise TaskError(f"{folder}: expected a checkpoint with its card README.md, found none")
    return ModelCard.load(path)


def put_section(card: ModelCard, title: str, text: str) -> None:
    """Write a section, in place of the one of this title."""
    section = re.compile(rf"(^## {title}[ \t]*\n)(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if not section.search(card.text):
        card.text = f"{card.text.rstrip()}\n\n## {title}\n\n"
    card.text = section.sub(lambda found: f"{found[1]}\n{text}\n\n", card.text).rstrip() + "\n"


def update_card(folder: Path, several: Sequence[Mapping[str, Any]]) -> Path:
    """Write results into the README.md of a checkpoint's folder. Raises TaskError where it has no card."""
    card = open_card(folder)
    data: Any = card.data
    data.model_name = data.model_name or folder.resolve().name
    data.eval_results = eval_results(several)
    put_section(card, "Evaluation", evaluation_text(several))
    card.save(folder / "README.md")
    return folder / "README.md"


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m eval card", description=__doc__)
    parser.add_argument("model", type=Path, help="checkpoint folder whose README.md is updated")
    parser.add_argument("results", type=Path, nargs="+", help="output folders of runs, or results.json files")
    options = parser.parse_args(arguments)
    print(update_card(options.model, [read_results(path) for path in options.results]))
