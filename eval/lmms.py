"""Standard benchmarks through lmms-eval: its tasks, prompts and scorers, our batched answers.

    python -m eval --tasks mmstar,docvqa_val --model HuggingFaceTB/SmolVLM-256M-Instruct
    torchrun --nproc-per-node 8 -m eval --tasks chartqa --model runs/mine

    for result in run_lmms(["mmstar"], checkpoint, limit=100):
        print(table_text(result))

lmms-eval is optional: pip install -r requirements-eval.txt. Nothing of it is changed: our model is registered
with it from outside, under the name ocelli.
"""

from __future__ import annotations

import argparse
import difflib
import json
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from data.errors import one_line
from data.files import replacing
from eval.records import RESULTS, SAMPLES
from eval.results import describe_model, environment
from eval.statistics import score_interval
from eval.tasks import TRIED
from inference.checkpoint import Checkpoint, RequestError

NAME = "ocelli"
OUTPUT = Path("runs/eval")
ERRORS_LISTED = 100
_SAME = 1e-9
_OF_A_SAMPLE = {
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "token_counts", "doc_hash"),
    "input_media",
}


class LmmsError(RequestError):
    """lmms-eval is missing, or a task cannot be run; the message is one sentence to show to a person."""


def check_installed() -> None:
    """Raises LmmsError where lmms-eval is not here."""
    if find_spec("lmms_eval") is None:
        raise LmmsError("official tasks need lmms-eval: pip install -r requirements-eval.txt")


def register() -> None:
    """Make our model known to lmms-eval as `ocelli`, in this process. Raises LmmsError: it is not here."""
    check_installed()
    from lmms_eval.models import MODEL_REGISTRY_V2
    from lmms_eval.models.registry_v2 import ModelManifest

    manifest = ModelManifest(NAME, chat_class_path="eval.lmms_model.Ocelli")
    MODEL_REGISTRY_V2.register_manifest(manifest, overwrite=True)


def check_tasks(names: Sequence[str]) -> None:
    """Raises LmmsError: lmms-eval is missing, or a task that it does not know."""
    register()
    from lmms_eval.tasks import TaskManager

    check_names(names, TaskManager("WARNING", model_name=NAME).all_tasks)


def run_lmms(
    tasks: Sequence[str | Mapping[str, Any]],
    model: str | Checkpoint,
    limit: int | None = None,
    batch_size: int = 32,
    output: Path | None = None,
    include_path: Path | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Answer and score official tasks; results.json and samples.jsonl of each go into a folder of its name,
    when all are done, in place of an earlier run's: nothing of a run that was stopped is kept.

    Under torchrun every rank answers its share.

    Args:
        tasks: names of lmms-eval's tasks, groups or tags; {"task": name, "dataset_path": ...} replaces
            settings of a task, to take its data from elsewhere for instance.
        model: an opened checkpoint, or what `open_checkpoint` takes.
        limit: only the first so many documents of each task.
        batch_size: answers in work at the same time; no answer depends on it (in float32).
        output: folder for a folder of each task; default runs/eval.
        include_path: folder with more tasks (YAML files).

    Returns:
        what results.json says of each task, on the first rank; nothing on the others.

    Raises:
        LmmsError: lmms-eval is missing, a task that it does not know, whose data cannot be had, or of which
            no question could be answered.
        RequestError: a generation setting that is not here, not enough memory.
    """
    register()
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.models import get_model
    from lmms_eval.tasks import TaskManager

    manager = TaskManager("WARNING", include_path=include_path and str(include_path), model_name=NAME)
    check_names(tasks, manager.all_tasks)
    ours = get_model(NAME)(model, batch_size=batch_size, progress=progress)
    output = OUTPUT if output is None else output
    loaded = _load(tasks, manager)
    began = time.perf_counter()
    said = simple_evaluate(
        ours,
        tasks=loaded,
        limit=limit,
        batch_size=batch_size,
        task_manager=manager,
        bootstrap_iters=0,
        distributed_executor_backend="torchrun",
        # In one thread: where an answer has no letter, MMMU's scorer draws one, and draws in order.
        process_docs_parallel=1,
        cli_args=argparse.Namespace(output_path=str(output), process_with_media=False),
    )
    took = time.perf_counter() - began
    errors = _of_all_ranks(ours.errors)
    if said is None:
        return []
    results = [_result(name, said, errors, ours.checkpoint) for name in said["samples"]]
    count = sum(result["n"] for result in results)
    run = {"seconds": took, "samples_per_second": count / took, "batch_size": batch_size, "ranks": _ranks()}
    for result in results:
        result |= run
        _write(output / result["task"]["name"], result, said["samples"][result["task"]["name"]])
    return results


def check_names(tasks: Sequence[str | Mapping[str, Any]], known: Sequence[str]) -> None:
    """Raises LmmsError naming the nearest ones where a task is not known."""
    if not tasks:
        raise LmmsError("expected at least one task, got none")
    for name in map(_name, tasks):
        if name not in known:
            near = difflib.get_close_matches(name, [*TRIED, *known], n=3, cutoff=0.6)
            some = " or ".join(dict.fromkeys(near)) or f"one such as {', '.join(TRIED[:4])}"
            raise LmmsError(f"lmms-eval has no task {name!r}; expected {some}")


def _name(task: str | Mapping[str, Any]) -> str:
    return task if isinstance(task, str) else task["task"]


def _load(asked: Sequence[str | Mapping[str, Any]], manager) -> list:
    """Tasks as objects, with their data: the first rank's before the others', who then find it in the cache.

    Raises:
        LmmsError: the data of a task cannot be had.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    if not first:
        dist.barrier()
    tasks = []
    for task in asked:
        try:
            found = manager.load_task_or_group(task if isinstance(task, str) else [dict(task)], "chat")
        except Exception as error:  # datasets and the Hub raise anything
            cause = error.__cause__ or error  # lmms-eval tries again, and then says no more than that it did
            reason = f"{type(cause).__name__}: {one_line(cause, 300)}"
            raise LmmsError(f"task {_name(task)}: its data cannot be loaded ({reason})") from error
        tasks += _leaves(found)
    if first and dist.is_initialized():
        dist.barrier()
    return tasks


def _leaves(tree: Mapping[Any, Any]) -> list:
    return [
        leaf
        for branch in tree.values()
        for leaf in (_leaves(branch) if isinstance(branch, Mapping) else [branch])
    ]


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _of_all_ranks(errors: Sequence[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """The errors of every rank, each once: where shares are uneven, a rank answers some question twice."""
    every: list[Any] = [list(errors)]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, list(errors))
    return sorted({error for one in every for error in one})


def _result(name: str, said: Mapping[str, Any], errors: Sequence, checkpoint: Checkpoint) -> dict[str, Any]:
    """What lmms-eval says of a task, with intervals where a figure is the mean of its samples' scores."""
    samples, config = said["samples"][name], said["configs"][name]
    own = [{"id": document, "error": message} for task, document, message in errors if task == name]
    if own and len(own) >= len(samples):
        raise LmmsError(f"task {name}: none of {len(own)} questions could be answered: {own[0]['error']}")
    figures = {
        metric.removesuffix(",none"): number
        for metric, value in said["results"][name].items()
        if (number := _number(value)) is not None and "_stderr" not in metric
    }
    return {
        "task": {
            "name": name,
            "harness": f"lmms-eval {version('lmms_eval')}",
            "version": said["versions"].get(name),
            "generation": config.get("generation_kwargs"),
            "prompts": config.get("lmms_eval_specific_kwargs"),
            "example": samples[0]["arguments"][0] if samples and samples[0]["arguments"] else None,
        },
        "model": describe_model(checkpoint),
        "figures": figures,
        "intervals": _intervals(figures, samples),
        "n": len(samples),
        "errors": {"count": len(own), "samples": own[:ERRORS_LISTED]},
    } | _where(checkpoint)


def _where(checkpoint: Checkpoint) -> dict[str, Any]:
    """`environment`, with lmms-eval among the versions."""
    found = environment(checkpoint)
    return found | {"versions": found["versions"] | {"lmms_eval": version("lmms_eval")}}


def _intervals(figures: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Of the figures that are the mean of their samples' scores.

    Scores that came with one figure are not taken for another's: POPE's five figures all come with the same.
    """
    found: dict[str, list[float]] = {}
    seen: list[list[float]] = []
    for metric, figure in figures.items():
        scores = _scores(samples, metric.partition(",")[0])
        if scores and scores not in seen and abs(sum(scores) / len(scores) - figure) < _SAME:
            seen.append(scores)
            found[metric] = list(score_interval(scores))
    return found


def _scores(samples: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """The samples' scores by a metric, or [] where not every sample has a number."""
    values = [sample.get(metric) for sample in samples]
    values = [_number(value.get("score") if isinstance(value, Mapping) else value) for value in values]
    scores = [value for value in values if value is not None]
    return scores if len(scores) == len(samples) else []


def _number(value: Any) -> float | None:
    """A number of Python's or numpy's as a float; None for anything else."""
    return float(value) if isinstance(value, int | float | np.integer | np.floating) else None


def _write(folder: Path, result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / SAMPLES).open("w", encoding="utf-8") as file:
        for sample in samples:
            record = {
                "id": sample["doc_id"],
                "prompt": sample["arguments"][0] if sample["arguments"] else None,
                "targets": sample["target"],
                "answer": sample["resps"][0],
                "scored": sample["filtered_resps"][0],
                "doc": sample["doc"],
            }
            record |= {key: value for key, value in sample.items() if key not in _OF_A_SAMPLE}
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
    text = json.dumps(result, indent=1, ensure_ascii=False, default=str)
    with replacing(folder / RESULTS) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def table_text(result: Mapping[str, Any]) -> str:
    """Figures of a task as a Markdown table, and what could not be answered."""
    lines = [f"| {result['task']['name']} | figure | 95% interval |", "|---|---|---|"]
    for metric, value in result["figures"].items():
        interval = result["intervals"].get(metric)
        told = f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else ""
        lines.append(f"| {metric} | {value:.4f} | {told} |")
    errors = result["errors"]
    if errors["count"]:
        first = errors["samples"][0]
        lines.append(
            f"{errors['count']} of {result['n']} could not be answered and count as an empty answer "
            f"(document {first['id']}: {first['error']})"
        )
    return "\n".join(lines)
