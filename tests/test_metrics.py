"""Metrics equal the benchmarks' official scorers, case by case, and say what they need.

tests/fixtures/metrics.json.gz has answers and what lmms-eval's own scorers gave them; where lmms-eval is
installed, they are asked again.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys

import pytest

from eval.metrics import MetricError, Scored, find_metric
from tests.metric_cases import Case, cases
from tests.official_scores import FIXTURE, SCORERS, groups, official_scores, official_summaries

NEEDS_ROUGE = pytest.mark.skipif(
    importlib.util.find_spec("rouge_score") is None, reason="needs rouge-score (requirements-eval.txt)"
)
HAS_LMMS_EVAL = importlib.util.find_spec("lmms_eval") is not None
NEEDS_LMMS_EVAL = pytest.mark.skipif(not HAS_LMMS_EVAL, reason="needs lmms-eval (requirements-eval.txt)")
EACH = [pytest.param(name, marks=[NEEDS_ROUGE] if name == "rouge_l" else []) for name in SCORERS]


@pytest.fixture(scope="module")
def official() -> dict:
    return json.loads(gzip.decompress(FIXTURE.read_bytes()))


def ours(name: str, asked: list[Case]) -> list[float]:
    metric_name, options, _, _ = SCORERS[name]
    metric = find_metric(metric_name, **options)
    return [metric.score(case.answer, case.targets, case.fields) for case in asked]


def differences(asked: list[Case], got: list[float], wanted: list[float]) -> list:
    return [(case, *pair) for case, *pair in zip(asked, got, wanted, strict=True) if pair[0] != pair[1]]


@pytest.mark.parametrize("name", EACH)
def test_scores_are_the_official_ones(name, official):
    asked = [Case(*case) for case in official["cases"][SCORERS[name][2]]]
    wanted = official["scores"][name]
    assert len(asked) >= 1000 and 0.05 < sum(wanted) / len(wanted) < 0.95, "cases that tell scorers apart"
    assert differences(asked, ours(name, asked), wanted) == []


@NEEDS_LMMS_EVAL
@pytest.mark.parametrize("name", EACH)
def test_lmms_eval_gives_these_scores(name):
    asked = cases(SCORERS[name][2])
    assert differences(asked, ours(name, asked), official_scores(name)) == []


def test_pope_figures_are_the_official_ones(official):
    pope, found = find_metric("pope"), []
    for group in groups():
        scores = [pope.score(case.answer, case.targets, {}) for case in group]
        scored = [Scored(case.answer, tuple(case.targets), one) for case, one in zip(group, scores)]
        found.append(pope.summarise(scored))
        del found[-1]["yes_rate"]  # which lmms-eval does not have
    assert found == official["pope_summaries"]
    if HAS_LMMS_EVAL:
        assert found == official_summaries()


def score(name: str, answer: str, targets: list[str], fields: dict | None = None, **options) -> float:
    return find_metric(name, **options).score(answer, targets, fields or {})


CHOICES = {"choices": ["a cat", "two dogs"]}
MMMU, POPE, EXACT_YEARS = {"style": "mmmu"}, {"style": "pope"}, {"years_exact": True}
UNANIMOUS = {"skip_unanimous": True}


@pytest.mark.parametrize(
    ("name", "answer", "targets", "more", "expected"),
    [
        # POPE's own scorer reads the first sentence.
        ("pope", "Yes, there is. No doubt.", ["yes"], POPE, 1),
        ("pope", "There is not", ["no"], POPE, 1),
        ("pope", "Yes.", ["yes"], {}, 0),
        # Years are a trap that can be closed.
        ("relaxed_accuracy", "1950", ["2020"], {}, 1),
        ("relaxed_accuracy", "1950", ["2020"], EXACT_YEARS, 0),
        ("relaxed_accuracy", "2020.0", ["2020"], EXACT_YEARS, 1),
        ("relaxed_accuracy", "2000", ["2019.5"], EXACT_YEARS, 1),  # no years
        ("relaxed_accuracy", "2099", ["2100"], EXACT_YEARS, 1),
        ("relaxed_accuracy", "1000", ["999"], EXACT_YEARS, 1),
        ("relaxed_accuracy", "12000", ["12020"], EXACT_YEARS, 1),
        ("relaxed_accuracy", "10.6", ["10"], {"tolerance": 0.06}, 1),
        # The VQA challenge's script leaves everything as it is where all people agree.
        ("vqa_accuracy", "two", ["2"] * 10, {}, 1),
        ("vqa_accuracy", "two", ["2"] * 10, UNANIMOUS, 0),
        ("vqa_accuracy", "two", [*["2"] * 9, "3"], UNANIMOUS, 1),
        # 3 of 10 agree: left out, each of them has 2 others.
        ("vqa_accuracy", "red", ["red"] * 3 + ["blue"] * 7, {}, 0.9),
        ("vqa_accuracy", "red", ["red"], {}, 0),
        # A target may be the text of a choice; a guess of MMMU's scorer is worth its average.
        ("multiple_choice", "(B)", ["two dogs"], {"fields": CHOICES}, 1),
        ("multiple_choice", "B", ["b"], {"fields": CHOICES}, 1),
        ("multiple_choice", "?", ["B"], {"fields": CHOICES, **MMMU}, 0.5),
        ("multiple_choice", "?", ["B"], {"fields": CHOICES}, 0),
        pytest.param(
            "rouge_l", "a cat on a mat", ["a dog", "a cat sat on a mat"], {}, 10 / 11, marks=NEEDS_ROUGE
        ),
        pytest.param("rouge_l", "dogs running", ["dog runs"], {}, 0, marks=NEEDS_ROUGE),
        pytest.param("rouge_l", "dogs running", ["dog runs"], {"stem": True}, 1, marks=NEEDS_ROUGE),
    ],
)
def test_what_options_change(name, answer, targets, more, expected):
    assert score(name, answer, targets, **more) == pytest.approx(expected)


def test_pope_counts_what_the_model_says():
    """lmms-eval's yes ratio is that of the targets; POPE's own is that of the answers."""
    said = [("yes", "yes", 1.0), ("yes", "no", 0.0), ("no", "no", 1.0), ("dunno", "no", 0.0)]
    got = find_metric("pope").summarise([Scored(answer, (target,), value) for answer, target, value in said])
    assert (got["score"], got["yes_rate"], got["target_yes_rate"]) == (0.5, 0.5, 0.25)
    assert (got["precision"], got["recall"], got["f1"]) == (0.5, 1.0, pytest.approx(2 / 3))


def test_a_mean_does_not_depend_on_the_order():
    samples = [Scored("", ("",), value) for value in (0.1, 0.2, 0.3, 0.7, 1e-9, 1.0)]
    summarise = find_metric("anls").summarise
    assert summarise(samples) == summarise(samples[::-1]) == {"score": pytest.approx(2.300000001 / 6)}


@pytest.mark.parametrize(
    ("name", "targets", "options", "named"),
    [
        ("anl", ["a"], {}, "anls"),
        ("vqa", ["a"], {}, "vqa_accuracy"),
        ("anls", ["a"], {"years": True}, "threshold"),
        ("anls", ["a"], {"threshold": 50}, "threshold"),
        ("pope", ["a"], {"style": "x"}, "lmms_eval"),
        ("pope", ["maybe"], {}, "maybe"),
        ("multiple_choice", ["A"], {"style": ["letter"]}, "mmmu"),
        ("multiple_choice", ["C"], {"fields": CHOICES}, "'C'"),
        ("multiple_choice", ["C"], MMMU, "choices"),
        ("relaxed_accuracy", ["1"], {"years_exact": "False"}, "years_exact"),
        ("rouge_l", ["a"], {}, "requirements-eval.txt"),
    ],
)
def test_what_cannot_be_scored_is_refused(monkeypatch, name, targets, options, named):
    monkeypatch.setitem(sys.modules, "rouge_score", None)  # as if it were not installed
    with pytest.raises(MetricError, match=named):
        score(name, "a", targets, **options)
