"""results.json to look at: one HTML file that holds its images and asks no network for anything."""

from __future__ import annotations

import base64
import io
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data.images import load_image
from data.video import Clip
from eval.results import CONTROLS, KINDS, Record, best_name, cut_off, part_text, write_text
from eval.tasks import EvalSample, EvalTask

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
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    environment.filters |= {"percent": "{:.1%}".format, "number": number, "counted": counted}
    worst, wrong = _worst_samples(task, records)
    note = f"{len(worst)} of the {wrong:,} below full score, one kind of question after another"
    some = random.Random(1).sample(list(task.samples), min(SHOWN, len(task.samples)))
    groups = [("Worst answers", note, worst), ("Random answers", "drawn from all, right or wrong", some)]
    tables = [
        ("By kind of question", "questions about", results["families"][:-1]),
        ("By class", "expected", results["classes"]),
    ]
    overall, speed = results["families"][-1], results["samples_per_second"]
    numbers = {"questions": f"{results['n']:,}", "samples/s": speed and number(speed)}
    numbers |= {title: f"{overall[name]:.1%}" for name, title in CONTROLS.items() if name in overall}
    numbers |= {name.replace("_", " "): f"{value:.1%}" for name, value in results["figures"].items()}
    numbers |= {name.replace("_", " "): part_text(part) for name, part in results["parts"].items()}
    for row in results["at_k"][-1:]:
        titles = best_name(results), "majority"
        numbers |= {f"{title}@{row['k']}": f"{row[name]['score']:.1%}" for title, name in zip(titles, KINDS)}
    if calibration := results["calibration"]:
        numbers |= {"calibration error": f"{calibration['ece']:.1%}"}
        bins = [one | {"name": f"{one['confidence']:.1%}", "parts": {}} for one in calibration["bins"]]
        tables.append(("By confidence", "mean confidence", bins))
    numbers |= {title: f"{cut:,} of {count:,}" for title, (cut, count) in cut_off(results).items()}
    numbers |= {"not answered": results["errors"]["count"] or None}
    page = environment.get_template("report.html.jinja").render(
        results=results,
        overall=overall,
        numbers=numbers,
        controls=CONTROLS,
        tables=[table for table in tables if len(table[-1]) > 1],
        groups=[(*told, [(one, _embedded(one)) for one in shown]) for *told, shown in groups if shown],
        records=records,
        blind=blind,
        best=best_name(results),
    )
    write_text(path, page)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def counted(answers: Sequence[str]) -> str:
    """["a", "b", "a"] -> "2 × a, 1 × b"."""
    return ", ".join(f"{count} × {answer or '—'}" for answer, count in Counter(answers).most_common(SHOWN))


def _worst_samples(task: EvalTask, records: Mapping[str, Record]) -> tuple[list[EvalSample], int]:
    """The lowest scores, families in turn among equals; and how many are below 1."""
    wrong = [sample for sample in task.samples if records[sample.id]["score"] < 1]
    random.Random(0).shuffle(wrong)
    turns: Counter[tuple[float, str]] = Counter()
    order = []
    for place, sample in enumerate(wrong):
        score = float(records[sample.id]["score"])
        order.append((score, turns[score, sample.family], place))
        turns[score, sample.family] += 1
    return [wrong[place] for *_, place in sorted(order)[:SHOWN]], len(wrong)


def _embedded(sample: EvalSample) -> list[str]:
    """A sample's images, and its videos' first frames, as small data: URLs; "" for one that does not open."""
    urls = []
    try:
        for source in list(sample.images())[:IMAGES]:
            first = next(source.frames([0])) if isinstance(source, Clip) else source
            image, file = load_image(first), io.BytesIO()
            image.thumbnail((SIDE, SIDE))
            image.save(file, "WEBP", quality=82, method=4)
            urls.append("data:image/webp;base64," + base64.b64encode(file.getvalue()).decode())
    except (ValueError, OSError):
        urls.append("")
    return urls
