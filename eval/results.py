"""Answers to figures: score and interval, by family and by length of the answer, beside their controls."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.metrics.base import Metric, Scored, mean_score
from eval.statistics import figure_interval, score_interval
from eval.tasks import Task

if TYPE_CHECKING:
    from inference.checkpoint import Checkpoint

CONFIDENCE = 0.95
OVERALL = "overall"
ERRORS_LISTED = 100
LENGTHS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, None))  # words of an answer
_ROOT = Path(__file__).resolve().parent.parent
_PIECES, _PIECE = 16, 64 * 1024  # what is read of each file of weights


def figures(metric: Metric, scored: Sequence[Scored]) -> dict[str, Any]:
    """{"score", "interval": [low, high], "n"} and whatever else the metric tells."""
    said = metric.summarise(scored)
    if said["score"] == mean_score(scored)["score"]:
        interval = score_interval([one.score for one in scored], CONFIDENCE)
    else:
        interval = figure_interval(scored, lambda drawn: metric.summarise(drawn)["score"], CONFIDENCE)
    return {"score": said["score"], "interval": list(interval), "n": len(scored)} | {
        name: value for name, value in said.items() if name != "score"
    }


def controls_of(task: Task, blind: Mapping[str, Mapping[str, Any]] | None) -> dict[str, list[Scored]]:
    """What the majority answers score, and the answers to blanked images where there are some."""
    common = task.majority()
    majority = {sample.id: common[sample.family] for sample in task.samples}
    scores = {
        sample.id: task.metric.score(majority[sample.id], sample.targets, sample.fields)
        for sample in task.samples
    }
    found = {"majority": task.scored(majority, scores)}
    if blind is not None:
        found["blind"] = _scored(task, blind)
    return found


def _scored(task: Task, records: Mapping[str, Mapping[str, Any]]) -> list[Scored]:
    return task.scored(
        {name: record["answer"] for name, record in records.items()},
        {name: record["score"] for name, record in records.items()},
    )


def summarise(
    task: Task,
    records: Mapping[str, Mapping[str, Any]],
    controls: bool = False,
    blind: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """What results.json says of the answers, by sample id.

    Args:
        controls: also what the majority answer scores.
        blind: answers to blanked images.
    """
    scored = _scored(task, records)
    beside = controls_of(task, blind) if controls else {}
    families = sorted({sample.family for sample in task.samples}, key=_first(task))
    rows = []
    for family in [*(families if len(families) > 1 else []), None]:
        places = [i for i, s in enumerate(task.samples) if family is None or s.family == family]
        row: dict[str, Any] = {"name": OVERALL if family is None else family or "other"}
        row |= figures(task.metric, [scored[i] for i in places])
        for name, other in beside.items():
            row[name] = task.metric.summarise([other[i] for i in places])["score"]
        rows.append(row)
    overall = {name: value for name, value in rows[-1].items() if name != "name"}
    failed = [records[s.id] for s in task.samples if records[s.id].get("error")]
    return {
        "score": overall["score"],
        "interval": overall["interval"],
        "confidence": CONFIDENCE,
        "n": overall["n"],
        "figures": {k: v for k, v in overall.items() if k not in ("score", "interval", "n", *beside)},
        "controls": {name: figures(task.metric, other) for name, other in beside.items()},
        "majority_answers": task.majority() if controls else {},
        "families": rows,
        "answer_lengths": by_length(task, scored),
        "errors": {
            "count": len(failed),
            "samples": [{"id": one["id"], "error": one["error"]} for one in failed[:ERRORS_LISTED]],
        },
    }


def _first(task: Task):
    places: dict[str, int] = {}
    for place, sample in enumerate(task.samples):
        places.setdefault(sample.family, place)
    return places.__getitem__


def by_length(task: Task, scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """Figures by how many words the expected answer has."""
    words = [len(sample.likeliest_target.split()) for sample in task.samples]
    rows = []
    for least, most in LENGTHS:
        places = [i for i, count in enumerate(words) if least <= max(1, count) <= (most or count)]
        if places:
            span = str(least) if most == least else f"{least} to {most}" if most else f"{least} or more"
            row = figures(task.metric, [scored[i] for i in places])
            rows.append({"name": f"{span} word{'s' * (most != 1)}", **row})
    return rows


def table_text(rows: Sequence[Mapping[str, Any]], title: str = "questions about") -> str:
    """The rows of `summarise` as a Markdown table."""
    names = {"score": "score", "interval": f"{CONFIDENCE:.0%} interval"}
    names |= {"blind": "image blanked"} if "blind" in rows[0] else {}
    names |= {"majority": "majority answer"} if "majority" in rows[0] else {}
    lines = [f"| {title} | {' | '.join(names.values())} | n |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        name = f"**{row['name']}**" if row["name"] == OVERALL else row["name"]
        cells = [interval_text(row[key]) if key == "interval" else f"{row[key]:.1%}" for key in names]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['n']} |")
    return "\n".join(lines)


def interval_text(interval: Sequence[float]) -> str:
    return f"{interval[0]:.1%} to {interval[1]:.1%}"


# ----------------------------------------------------------------------------------------- where it ran
def describe_model(checkpoint: Checkpoint) -> dict[str, Any]:
    """Name, revision and precision of a model; the revision is the Hub's commit, or a digest of the files."""
    origin = checkpoint.model.origin
    assert origin is not None, "a loaded model knows where it came from"
    return {
        "name": Path(checkpoint.name).name if Path(checkpoint.name).exists() else checkpoint.name,
        "revision": origin.commit or files_digest(origin.folder),
        "dtype": checkpoint.dtype,
        "parameters": sum(parameter.numel() for parameter in checkpoint.model.parameters()),
    }


def files_digest(folder: Path) -> str:
    """Tells a folder's weights and settings from others: SHA-256 over sizes and pieces of its files."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.jinja")]):
        if path.name == "results.json":  # says what the files were measured to do
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek(size * piece // _PIECES)
                digest.update(file.read(_PIECE))
    return f"sha256:{digest.hexdigest()[:16]}"


def environment(checkpoint: Checkpoint) -> dict[str, Any]:
    """Versions, device and date."""
    import torch

    device = checkpoint.model.device
    names = ("torch", "transformers", "tokenizers", "Pillow", "numpy")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "decode_step": checkpoint.decode_step_name,
        "versions": {
            "ocelli": _commit(),
            "python": platform.python_version(),
            **{name: version(name) for name in names},
        },
    }


def _commit() -> str | None:
    """The commit of this repository; None outside of one."""
    if shutil.which("git") is None or not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
