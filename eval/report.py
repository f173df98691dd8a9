"""results.json to look at: one HTML file that holds its images and asks no network for anything."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data.files import replacing
from data.images import load_image
from eval.results import OVERALL, Record
from eval.tasks import EvalSample, EvalTask

TEMPLATE = "report.html.jinja"
SHOWN = 12  # samples of each kind
SIDE = 320  # pixels that an embedded image has at most
IMAGES = 4  # of one sample


def write_report(
    path: Path,
    task: EvalTask,
    results: Mapping[str, Any],
    records: Mapping[str, Record],
    blind: Mapping[str, Record] | None = None,
) -> None:
    """Write the report of a results.json; the task's images are opened once more for the samples shown.

    Args:
        records: the lines of samples.jsonl by id; `blind` those with images blanked.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": "{:.1%}".format, "number": number}
    worst, wrong = worst_samples(task, records)
    groups = [
        {
            "title": "Worst answers",
            "note": f"{len(worst)} of the {wrong:,} below full score, one kind of question after another",
            "cards": [_card(sample, records, blind) for sample in worst],
        },
        {
            "title": "Random answers",
            "note": "drawn from all, right or wrong",
            "cards": [_card(sample, records, blind) for sample in random_samples(task)],
        },
    ]
    page = environment.get_template(TEMPLATE).render(
        results=results,
        tables=_tables(results),
        groups=[group for group in groups if group["cards"]],
        overall=results["families"][-1],
    )
    with replacing(path) as temporary:
        temporary.write_bytes(page.encode("utf-8", "backslashreplace"))


def number(value: float) -> str:
    """Three digits, with a comma between thousands."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def worst_samples(task: EvalTask, records: Mapping[str, Record]) -> tuple[list[EvalSample], int]:
    """The lowest scores, families in turn among equals; and how many are below 1."""
    wrong = [sample for sample in task.samples if records[sample.id]["score"] < 1]
    random.Random(0).shuffle(wrong)
    turns: dict[tuple[float, str], int] = {}
    order: list[tuple[float, int, int]] = []
    for sample in wrong:
        score = float(records[sample.id]["score"])
        turn = turns[score, sample.family] = turns.get((score, sample.family), -1) + 1
        order.append((score, turn, len(order)))
    return [wrong[place] for *_, place in sorted(order)[:SHOWN]], len(wrong)


def random_samples(task: EvalTask) -> list[EvalSample]:
    samples = list(task.samples)
    return random.Random(1).sample(samples, min(SHOWN, len(samples)))


def _tables(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sortable tables: by family, and by length of the answer."""
    families = [row for row in results["families"] if row["name"] != OVERALL]
    tables = []
    if families:
        tables.append({"title": "By kind of question", "first": "questions about", "rows": families})
    if len(results["answer_lengths"]) > 1:
        lengths = {"title": "By length of the expected answer", "first": "length"}
        tables.append(lengths | {"rows": results["answer_lengths"]})
    return tables


def _card(
    sample: EvalSample, records: Mapping[str, Record], blind: Mapping[str, Record] | None
) -> dict[str, Any]:
    record = records[sample.id]
    try:
        images = [_embedded(source) for source in list(sample.images())[:IMAGES]]
    except (ValueError, OSError):
        images = [""]
    return {
        "id": sample.id,
        "family": sample.family,
        "images": images,
        "question": sample.question,
        "answer": record["answer"],
        "targets": list(dict.fromkeys(sample.targets)),
        "score": record["score"],
        "error": record.get("error", ""),
        "blind": blind[sample.id]["answer"] if blind is not None else None,
    }


def _embedded(source: Any) -> str:
    """An image as a small data: URL; "" for one that does not open."""
    try:
        image = load_image(source)
    except (ValueError, OSError):
        return ""
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "WEBP", quality=82, method=4)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
