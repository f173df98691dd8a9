"""A run's folder, and answers to figures: score and interval, by family and by class.

| file | holds |
|---|---|
| `run.json` | task and model, with which a later run must agree to resume here |
| `samples.jsonl` | every question, answer, target and score; `samples-blind.jsonl`: images blanked |
| `results.json` | score, interval, controls, prompts, versions, revision, seconds, samples/s |
| `report.html` | the same to look at, with images; it opens offline |
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import replacing
from eval.metrics import Metric, Scored, mean_score
from eval.statistics import BINS, CONFIDENCE, best_of, calibration, score_interval
from eval.tasks import EvalSample, EvalTask
from inference.results import ResultsFile
from inference.votes import winner
from messages import one_line

if TYPE_CHECKING:
    from inference.checkpoint import Checkpoint  # with PyTorch, which comparing runs does without

RUN, SAMPLES, BLIND = "run.json", "samples.jsonl", "samples-blind.jsonl"
RESULTS, REPORT = "results.json", "report.html"
OVERALL = "overall"
CONTROLS = {"blind": "image blanked", "majority": "majority answer"}
KINDS = ("best", "majority")  # of scores of k answers
ENDED = ("stop_reason", "thinking_stop_reason")  # of a record: why the answer ended, and the thinking before
ERRORS_LISTED = 100
ANSWERS_LISTED = 8  # to the questions of a class, the most common ones
_ROOT = Path(__file__).resolve().parent.parent
_PIECES, _PIECE = 16, 64 * 1024  # pieces that are read of each file of weights, and their bytes

Record = Mapping[str, Any]  # a line of samples.jsonl


def samples_file(path: Path) -> ResultsFile:
    return ResultsFile(path, "id", lambda record: {"answer", "score", "targets"} <= record.keys())


def read_samples(path: Path) -> dict[str, Record]:
    """id -> record. Raises RequestError where the file holds something else."""
    records: dict[str, Record] = {}
    for record in samples_file(path):
        records.setdefault(record["id"], record)
    return records


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))


# --------------------------------------------------------------------------------------------- figures
def mean_of(values: Sequence[float]) -> dict[str, Any]:
    """{"score": their mean, "interval": [low, high], "n": their number}."""
    interval = list(score_interval(values))
    return {"score": math.fsum(values) / len(values), "interval": interval, "n": len(values)}


def figures(metric: Metric, scored: Sequence[Sequence[Scored]]) -> dict[str, Any]:
    """`mean_of` the scores of the answers to each question, the same of the metric's "parts", and its other
    figures."""
    flat = [one for answers in scored for one in answers]
    parts = {name: mean_of(values) for name, values in metric.parts(flat).items()}
    own = mean_of([mean_score(answers)["score"] for answers in scored])
    return own | metric.summarise(flat) | {"parts": parts}


def at_k(task: EvalTask, asked: Sequence[tuple[EvalSample, Record]]) -> list[dict[str, Any]]:
    """For k = 1, 2, 4, ... and the number of answers: {"k", "best", "majority"}, each with score and interval
    over the questions. "best" is `best_of`; "majority" the score of the answer that wins the vote of k,
    the mean over as many separate votes as there are answers for."""
    assert task.draws is not None, "there are several answers to each"
    count, rows = task.draws.count, []

    def voted(sample: EvalSample, record: Record, k: int) -> float:
        scores, same = list[float](), task.same(sample)
        for start in range(0, count - k + 1, k):
            some = slice(start, start + k)
            won = winner(record["answers"][some], record["confidences"][some], same)
            scores.append(record["scores"][start + won])
        return sum(scores) / len(scores)

    for k in sorted({2**power for power in range(count.bit_length())} | {count}):
        best = [best_of(record["scores"], k) for _, record in asked]
        won = [voted(sample, record, k) for sample, record in asked]
        rows.append({"k": k, "best": mean_of(best), "majority": mean_of(won)})
    return rows


def by_family(items: Sequence[Any], family_of: Callable[[Any], str]) -> dict[str, Sequence[Any]]:
    """Name -> items, of each family where there are several, and of all."""
    families: dict[str, Any] = {}
    for item in items:
        families.setdefault(family_of(item) or "other", []).append(item)
    return (families if len(families) > 1 else {}) | {OVERALL: items}


def summarise(
    task: EvalTask, records: Mapping[str, Record], blind: Mapping[str, Record] | None = None
) -> dict[str, Any]:
    """The figures of results.json, from the records by sample id; with those of `blind` answers, also the
    controls: what they score, and what the most common answer of each family does."""

    def scored(by_id: Mapping[str, Record]) -> list[list[Scored]]:
        """The answers to each question."""
        return [
            [Scored(answer, one.targets, score, one.fields) for answer, score in _answers_of(by_id[one.id])]
            for one in task.samples
        ]

    own = scored(records)
    common, beside = {}, {}
    if blind is not None:
        common = {} if task.samples[0].page else task.majority()  # no two pages have one answer
        guesses = {}
        for one in task.samples if common else ():
            guess = common[one.family]
            score = task.metric.score(guess, one.targets, one.fields)
            guesses[one.id] = {"answer": guess, "score": score}
        beside = ({"majority": scored(guesses)} if common else {}) | {"blind": scored(blind)}
    rows = []
    for family, places in by_family(range(len(own)), lambda i: task.samples[i].family).items():
        row = {"name": family} | figures(task.metric, [own[i] for i in places])
        for name, other in beside.items():
            row[name] = task.metric.summarise([one for i in places for one in other[i]])["score"]
        if task.draws:
            row["at_k"] = at_k(task, [(task.samples[i], records[task.samples[i].id]) for i in places])
        rows.append(row)
    overall = rows[-1]
    failed = [records[s.id] for s in task.samples if records[s.id].get("error")]
    # Of several answers the first, so that there is one to each question.
    sure = [
        (one.get("confidences", [one["confidence"]])[0], next(_answers_of(one))[1])
        for one in (records[sample.id] for sample in task.samples)
        if "confidence" in one
    ]
    listed = [{"id": one["id"], "error": one["error"]} for one in failed[:ERRORS_LISTED]]
    named = ("name", "score", "interval", "n", "at_k", "parts", *beside)
    return {
        "score": overall["score"],
        "interval": overall["interval"],
        "confidence": CONFIDENCE,
        "n": overall["n"],
        "parts": overall["parts"],
        "figures": {key: value for key, value in overall.items() if key not in named},
        "calibration": calibration(*zip(*sure)) if sure else None,
        "controls": {name: figures(task.metric, other) for name, other in beside.items()},
        "majority_answers": common,
        "at_k": overall.get("at_k", []),
        "families": rows,
        "classes": by_class(task, own),
        "right_or_wrong": all(one.score in (0, 1) for answers in own for one in answers),
        "errors": {"count": len(failed), "samples": listed},
        **{f"{name}s": stop_reasons(records.values(), name) for name in ENDED},
    }


def by_class(task: EvalTask, scored: Sequence[Sequence[Scored]]) -> list[dict[str, Any]]:
    """The confusion table of a classification, where all samples ask one question with few answers: a row for
    each class, with its figures and how often which answer was given. [] for other tasks."""
    classes: dict[str, list[int]] = {}
    for i, sample in enumerate(task.samples):
        classes.setdefault(sample.likeliest_target, []).append(i)
    asked = {(one.question, one.choices) for one in task.samples}
    few = 1 < len(classes) <= len(scored) / 2
    if len(asked) > 1 or task.samples[0].choices or not few:
        return []
    same, rows = task.same(task.samples[0]), []
    known = {same(name): name for name in classes}
    for name in sorted(classes):
        own = [scored[i] for i in classes[name]]
        given = Counter(
            name if one.score == 1 else known.get(same(one.answer), one_line(one.answer, 40))
            for answers in own
            for one in answers
        )
        shown = dict(given.most_common(ANSWERS_LISTED))
        more = given.total() - sum(shown.values())
        shown |= {"(others)": more} if more else {}
        rows.append({"name": name, **figures(task.metric, own), "answers": shown})
    return rows


def stop_reasons(records: Iterable[Record], name: str = "stop_reason") -> dict[str, int]:
    """How many answers ended for which reason: "stop", "length", "guard" or "error". Records of earlier
    versions do not say, and are not counted."""
    found = (record[name] for record in records if name in record)
    return dict(Counter(one for each in found for one in ([each] if isinstance(each, str) else each) if one))


def cut_off(results: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """How many answers reached the limit of tokens, pages were closed by the guard against repetition, and
    thoughts reached their limit, and of how many; nothing where nobody knows, as of results of earlier
    versions."""
    own, thinking = (results.get(f"{name}s") or {} for name in ENDED)
    ends = {"cut off": (own, "length"), "closed by the guard": (own, "guard")}
    ends["thinking ended by force"] = thinking, "length"
    return {
        title: (counts.get(reason, 0), sum(counts.values()))
        for title, (counts, reason) in ends.items()
        if counts and (reason == "length" or reason in counts)
    }


def cut_off_text(results: Mapping[str, Any]) -> str:
    """ "cut off: 3 of 40" """
    return "; ".join(f"{title}: {cut:,} of {count:,}" for title, (cut, count) in cut_off(results).items())


def _answers_of(record: Record) -> Iterator[tuple[str, float]]:
    """The answers in a record, each with its score."""
    own = [record["answer"]], [record["score"]]
    return zip(record.get("answers", own[0]), record.get("scores", own[1]), strict=True)


# ---------------------------------------------------------------------------------------------- tables
def table_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The families of `summarise` as a Markdown table."""
    names = {"score": "score", "interval": f"{CONFIDENCE:.0%} interval"} | CONTROLS
    names = {key: title for key, title in names.items() if key in rows[0]}
    parts = rows[-1].get("parts", {})  # earlier versions have none
    titles = "questions about", *names.values(), *parts, "n"
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        name = f"**{row['name']}**" if row["name"] == OVERALL else row["name"]
        cells = [interval_text(row[key]) if key == "interval" else f"{row[key]:.1%}" for key in names]
        cells += [part_text(row["parts"].get(part)) for part in parts]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['n']} |")
    return "\n".join(lines)


def part_text(part: Mapping[str, Any] | None) -> str:
    """ "81.2% (70.0% to 88.9%)", or "-" where no question has it"""
    return f"{part['score']:.1%} ({interval_text(part['interval'])})" if part else "-"


def classes_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """`by_class` as a Markdown table."""
    lines = [f"| expected | n | right | {CONFIDENCE:.0%} interval | answers |", "|---" * 5 + "|"]
    for row in rows:
        given = ", ".join(f"{answer or '-'} {count}" for answer, count in row["answers"].items())
        cells = row["name"], str(row["n"]), f"{row['score']:.1%}", interval_text(row["interval"]), given
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def at_k_text(results: Mapping[str, Any]) -> str:
    """What several answers to each question are worth, as a Markdown table."""
    interval = f"{CONFIDENCE:.0%} interval"
    lines = [f"| k | {best_name(results)}@k | {interval} | majority@k | {interval} |", "|---" * 5 + "|"]
    for row in results["at_k"]:
        cells = (f"{row[name]['score']:.1%} | {interval_text(row[name]['interval'])}" for name in KINDS)
        lines.append(f"| {row['k']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def best_name(results: Mapping[str, Any]) -> str:
    """What the best of k answers scores is called pass@k where each is right or wrong."""
    return "pass" if results["right_or_wrong"] else "best"


def calibration_text(results: Mapping[str, Any]) -> str:
    """A sentence on the confidences of answers; "" where there are none."""
    if not (found := results.get("calibration")):  # of an earlier version
        return ""
    return f"Expected calibration error of confidences: {found['ece']:.1%} ({BINS} bins of equal mass)."


def official_table(result: Mapping[str, Any]) -> str:
    """The figures of a task of lmms-eval as a Markdown table, and how many questions failed."""
    lines = [f"| {result['task']['name']} | figure | 95% interval |", "|---|---|---|"]
    for metric, value in result["figures"].items():
        interval = " to ".join(f"{end:.4f}" for end in result["intervals"].get(metric, ()))
        lines.append(f"| {metric} | {value:.4f} | {interval} |")
    errors = result["errors"]
    if errors["count"]:
        first = errors["samples"][0]
        lines.append(
            f"{errors['count']} of {result['n']} could not be answered and count as an empty answer "
            f"(document {first['id']}: {first['error']})"
        )
    if cut := cut_off_text(result):
        lines += ["", cut]
    return "\n".join(lines)


def interval_text(interval: Sequence[float]) -> str:
    return f"{interval[0]:.1%} to {interval[1]:.1%}"


# --------------------------------------------------------------------------------- what it was measured with
def describe_model(checkpoint: Checkpoint) -> dict[str, Any]:
    """Name, revision and precision of a model; the revision is the Hub's commit, or a digest of the files,
    and a digest of an adapter's."""
    origin = checkpoint.model.origin
    assert origin is not None, "a loaded model knows where it came from"
    adapter = f"+{files_digest(origin.weights[-1].parent)}" if checkpoint.adapter else ""
    return {
        "name": Path(checkpoint.name).name if Path(checkpoint.name).exists() else checkpoint.name,
        "revision": (origin.commit or files_digest(origin.folder)) + adapter,
        "dtype": checkpoint.dtype,
        "parameters": checkpoint.num_parameters,
        "max_pixels": checkpoint.processor.images.budget,  # None: its images are cut into tiles
        "frames": None if (own := checkpoint.processor.images.videos) is None else [own.fps, own.most],
    }


def files_digest(folder: Path) -> str:
    """Tells a folder's weights and settings from others: SHA-256 over sizes and pieces of its files."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.jinja")]):
        if path.name == "results.json":  # figures of the model, not the model
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for piece in range(_PIECES):
                file.seek(size * piece // _PIECES)
                digest.update(file.read(_PIECE))
    return f"sha256:{digest.hexdigest()[:16]}"


def environment(checkpoint: Checkpoint, *more: str) -> dict[str, Any]:
    """Date, device, decode step and versions, those of the packages `more` among them."""
    names = ("torch", "transformers", "tokenizers", "Pillow", "numpy", *more)
    versions = {"ocelli": _commit(), "python": platform.python_version()}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": checkpoint.device_name,
        "decode_step": checkpoint.fast.name,
        "versions": versions | {name: version(name) for name in names},
    }


def _commit() -> str | None:
    """The commit of this repository; None in a copy without its history or without git."""
    if shutil.which("git") is None or not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
