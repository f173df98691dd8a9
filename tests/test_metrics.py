"""Metrics equal the benchmarks' official scorers, case by case.

    python -m tests.test_metrics      # scores the cases of the fixture anew; needs requirements-eval.txt

tests/fixtures/metrics.json.gz has answers and what lmms-eval's own scorers gave them; where lmms-eval is
installed, they are asked again.
"""

from __future__ import annotations

import gzip
import importlib.util
import inspect
import json
import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eval.metrics import METRICS, MetricError, Scored, find_metric

FIXTURE = Path(__file__).resolve().parent / "fixtures" / "metrics.json.gz"
STORED = json.loads(gzip.decompress(FIXTURE.read_bytes()))
LETTERS = "ABCDEFGH"


class Case(NamedTuple):
    answer: str
    targets: list[str]
    fields: dict[str, Any]


def cases(kind: str) -> list[Case]:
    return [Case(*case) for case in STORED["cases"][kind]]


# ------------------------------------------------------------------------------ what lmms-eval says to a case
def scorer(task: str, function: str, figure: str, document: Callable[[Case], dict]) -> Callable[[Case], Any]:
    """The `process_results` of a task, which takes a document of the benchmark's."""

    def score(case: Case) -> Any:
        process = getattr(import_module(f"lmms_eval.tasks.{task}.utils"), function)
        return process(document(case), [case.answer])[figure]

    return score


def exact_match(case: Case, **options) -> float:
    """As `Task.process_results` scores a generated answer with several targets."""
    score = import_module("lmms_eval.api.metrics").exact_match_hf_evaluate
    matches = [score(predictions=[case.answer], references=[target], **options) for target in case.targets]
    return float(any(match["exact_match"] for match in matches))


def anls(case: Case) -> float:
    return import_module("lmms_eval.api.metrics").anls(case.targets, [case.answer])["anls"]


def mmstar(case: Case) -> float:
    """With as many letters as the case has choices; MMStar itself always has four."""
    extract = import_module("lmms_eval.tasks._task_utils.mcq_extract").extract_mcq_answer
    return float(extract(case.answer, list(LETTERS[: len(case.fields["choices"])])) == case.targets[0])


def people(case: Case) -> dict:
    return {
        "answers": [{"answer": said, "answer_id": n} for n, said in enumerate(case.targets)],
        "question_id": 0,
    }


def target(case: Case) -> dict:
    return {"answer": case.targets[0], "question_id": 0, "type": "human_test"}


IGNORED = {"ignore_case": True, "ignore_punctuation": True}
# (metric, its options) of ours -> the kind of cases, and what they officially score
SCORERS: dict[str, tuple[str, dict, str, Callable[[Case], float]]] = {
    "exact_match": ("exact_match", {"strip": False, "ignore_case": False}, "text", exact_match),
    "exact_match, case ignored": (
        "exact_match", {"strip": False} | IGNORED, "text", lambda case: exact_match(case, **IGNORED),
    ),
    "vqa_accuracy": (
        "vqa_accuracy", {}, "vqa", scorer("vqav2", "vqav2_process_results", "exact_match", people),
    ),
    "vqa_accuracy, textvqa": (
        "vqa_accuracy", {"style": "textvqa"}, "vqa",
        scorer("textvqa", "textvqa_process_results", "exact_match",
               lambda case: {"answers": list(case.targets), "question_id": 0}),
    ),
    "anls": ("anls", {}, "text", anls),
    "relaxed_accuracy": (
        "relaxed_accuracy", {}, "number",
        scorer("chartqa", "chartqa_process_results", "relaxed_overall", target),
    ),
    "multiple_choice": ("multiple_choice", {}, "choice", mmstar),
}  # fmt: skip


def official_scores(name: str) -> list[float]:
    """What the cases of one of `SCORERS` score."""
    _, _, kind, score = SCORERS[name]
    return [float(score(case)) for case in cases(kind)]


# ------------------------------------------------------------------------------------------------- the tests
HAS_LMMS_EVAL = importlib.util.find_spec("lmms_eval") is not None


@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_the_official_ones(name):
    metric_name, options, kind, _ = SCORERS[name]
    metric, asked, wanted = find_metric(metric_name, **options), cases(kind), STORED["scores"][name]
    assert len(asked) >= 1000 and 0.05 < sum(wanted) / len(wanted) < 0.95, "cases that tell scorers apart"
    got = [metric.score(case.answer, case.targets, case.fields) for case in asked]
    assert not [(*case, *pair) for case, *pair in zip(asked, got, wanted, strict=True) if pair[0] != pair[1]]
    if HAS_LMMS_EVAL:
        assert wanted == official_scores(name)


CHOICES = {"choices": ["a cat", "two dogs"]}
EXACT_YEARS = {"years_exact": True}


@pytest.mark.parametrize(
    ("name", "answer", "targets", "fields", "options", "expected"),
    [
        # Years are a trap that can be closed.
        ("relaxed_accuracy", "1950", ["2020"], {}, {}, 1),
        ("relaxed_accuracy", "1950", ["2020"], {}, EXACT_YEARS, 0),
        ("relaxed_accuracy", "2020.0", ["2020"], {}, EXACT_YEARS, 1),
        *(("relaxed_accuracy", *pair, {}, EXACT_YEARS, 1)  # no years
          for pair in [("2000", ["2019.5"]), ("2099", ["2100"]), ("1000", ["999"]), ("12000", ["12020"])]),
        ("relaxed_accuracy", "10.6", ["10"], {}, {"tolerance": 0.06}, 1),
        # 3 of 10 agree: left out, each of them has 2 others.
        ("vqa_accuracy", "red", ["red"] * 3 + ["blue"] * 7, {}, {}, 0.9),
        # A target may be the text of a choice.
        ("multiple_choice", "(B)", ["two dogs"], CHOICES, {}, 1),
        ("multiple_choice", "B", ["b"], CHOICES, {}, 1),
    ],
)  # fmt: skip
def test_what_options_change(name, answer, targets, fields, options, expected):
    assert find_metric(name, **options).score(answer, targets, fields) == pytest.approx(expected)


def test_a_mean_does_not_depend_on_the_order():
    samples = [Scored("", ("",), value) for value in (0.1, 0.2, 0.3, 0.7, 1e-9, 1.0)]
    summarise = find_metric("anls").summarise
    assert summarise(samples) == summarise(samples[::-1]) == {"score": pytest.approx(2.300000001 / 6)}


@pytest.mark.parametrize(
    ("name", "targets", "fields", "options", "named"),
    [
        ("vqa", ["a"], {}, {}, "vqa_accuracy"),
        ("anls", ["a"], {}, {"years": True}, "option years"),
        ("anls", ["a"], {}, {"threshold": 50}, "threshold"),
        ("vqa_accuracy", ["a"], {}, {"style": ["textvqa"]}, "vqav2"),
        ("relaxed_accuracy", ["1"], {}, {"years_exact": "False"}, "years_exact"),
        ("multiple_choice", ["C"], CHOICES, {}, "'C'"),
    ],
)
def test_what_cannot_be_scored_is_refused(name, targets, fields, options, named):
    with pytest.raises(MetricError, match=named):
        find_metric(name, **options).score("a", targets, fields)


def test_the_page_names_every_metric_with_its_options():
    page = (Path(__file__).parent.parent / "docs" / "evaluate.md").read_text(encoding="utf-8")
    table = page[page.index("| `--metric` ") :].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", table, re.M)
    named = {metric: re.findall(r"`(\w+)`", options) for metric, options in rows}
    assert named == {name: [*inspect.signature(make).parameters] for name, make in METRICS.items()}


if __name__ == "__main__":
    STORED |= {
        "source": f"lmms-eval {version('lmms_eval')}",
        "scores": {name: official_scores(name) for name in SCORERS},
    }
    text = json.dumps(STORED, ensure_ascii=False, separators=(",", ":"))
    FIXTURE.write_bytes(gzip.compress(text.encode(), mtime=0))
