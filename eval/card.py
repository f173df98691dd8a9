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

from eval.results import RESULTS, interval_text, official_table, table_text
from eval.tasks import TaskError
from inference.cli import Parser

_SECTION = re.compile(r"(^## Evaluation[ \t]*\n)(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)


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
    return "\n\n".join(_text(results) for results in several)


def _text(results: Mapping[str, Any]) -> str:
    task = results["task"]
    if "harness" in task:
        heading = f"**{task['name']}** by {task['harness']}, {results['n']:,} questions."
        return f"{heading}\n\n{official_table(results)}"
    heading = (
        f"**{task['name']}**: {results['score']:.1%} ({results['confidence']:.0%} interval "
        f"{interval_text(results['interval'])}) on {results['n']:,} questions, {results['model']['dtype']}."
    )
    how = f"Scoring: {task['scoring']} Prompt: `{json.dumps(task['prompt'], ensure_ascii=False)}`."
    return f"{heading}\n\n{table_text(results['families'])}\n\n{how}"


def eval_results(several: Sequence[Mapping[str, Any]]) -> list[EvalResult]:
    """The entries of the Hub's `model-index`: one for each result, or for each figure of an official task."""
    common: dict[str, Any] = {"task_type": "image-text-to-text", "task_name": "Visual question answering"}
    entries = []
    for results in several:
        task = results["task"]
        if "harness" in task:
            entries += [
                EvalResult(
                    **common,
                    dataset_type=task["name"],
                    dataset_name=task["name"],
                    metric_type=figure,
                    metric_name=figure.replace("_", " "),
                    metric_value=value,
                    metric_args={"n": results["n"], "interval": results["intervals"].get(figure)},
                    source_name=task["harness"],
                    source_url="https://github.com/EvolvingLMMs-Lab/lmms-eval",
                )
                for figure, value in results["figures"].items()
            ]
            continue
        data = task["data"]
        controls = {name: round(one["score"], 6) for name, one in results["controls"].items()}
        interval = [round(value, 6) for value in results["interval"]]
        entries.append(
            EvalResult(
                **common,
                dataset_type=re.sub(r"[^\w./-]+", "-", task["name"]).strip("-"),
                dataset_name=data.get("path") or data.get("name") or task["name"],
                dataset_config=data.get("subset"),
                dataset_split=data.get("split"),
                dataset_revision=data.get("revision"),
                metric_type=task["metric"],
                metric_name=task["metric"].replace("_", " "),
                metric_value=round(results["score"], 6),
                metric_args={
                    "n": results["n"],
                    "confidence": results["confidence"],
                    "interval": interval,
                    **controls,
                },
            )
        )
    return entries


def update_card(folder: Path, several: Sequence[Mapping[str, Any]]) -> Path:
    """Write results into the README.md of a checkpoint's folder. Raises TaskError where it has no card."""
    path = folder / "README.md"
    if not path.is_file():
        raise TaskError(f"{folder}: expected a checkpoint with its card README.md, found none")
    card = ModelCard.load(path)
    card.data.model_name = card.data.model_name or folder.resolve().name
    card.data.eval_results = eval_results(several)
    section = evaluation_text(several)
    if not _SECTION.search(card.text):
        card.text = f"{card.text.rstrip()}\n\n## Evaluation\n\n"
    card.text = _SECTION.sub(lambda found: f"{found[1]}\n{section}\n\n", card.text).rstrip() + "\n"
    card.save(path)
    return path


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m eval card", description=__doc__)
    parser.add_argument("model", type=Path, help="checkpoint folder whose README.md is updated")
    parser.add_argument("results", type=Path, nargs="+", help="output folders of runs, or results.json files")
    options = parser.parse_args(arguments)
    print(update_card(options.model, [read_results(path) for path in options.results]))
