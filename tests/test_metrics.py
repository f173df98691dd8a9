"""Metrics equal the benchmarks' official scorers, case by case, and say what they need.

tests/fixtures/metrics.json.gz has answers and what lmms-eval's own scorers gave them; where lmms-eval is
installed, they are asked again.
"""

from __future__ import annotations

import gzip
import importlib.util
import json

import pytest

from eval import metrics
from eval.metrics import METRICS, MetricError, Scored, find_metric
from tests.metric_cases import Case, cases
from tests.official_scores import FIXTURE, SCORERS, groups, official_scores, official_summaries

NEEDS_ROUGE = pytest.mark.skipif(
    importlib.util.find_spec("rouge_score") is None, reason="needs rouge-score (requirements-eval.txt)"
)
NEEDS_LMMS_EVAL = pytest.mark.skipif(
    importlib.util.find_spec("lmms_eval") is None, reason="needs lmms-eval (requirements-eval.txt)"
)
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


def summaries() -> list[dict[str, float]]:
    pope = find_metric("pope")
    return [
        pope.summarise(
            [
                Scored(case.answer, tuple(case.targets), pope.score(case.answer, case.targets, {}))
                for case in group
            ]
        )
        for group in groups()
    ]


def without_yes_rate(figures: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "yes_rate"} for row in figures]


def test_pope_figures_are_the_official_ones(official):
    assert without_yes_rate(summaries()) == official["pope_summaries"]


@NEEDS_LMMS_EVAL
def test_lmms_eval_gives_these_pope_figures():
    assert without_yes_rate(summaries()) == official_summaries()


def score(name: str, answer: str, *targets: str, fields: dict | None = None, **options) -> float:
    return find_metric(name, **options).score(answer, targets, fields or {})


def test_pope_counts_what_the_model_says():
    """lmms-eval's yes ratio is that of the targets; POPE's own is that of the answers."""
    samples = [
        Scored("yes", ("yes",), 1.0),
        Scored("yes", ("no",), 0.0),
        Scored("no", ("no",), 1.0),
        Scored("dunno", ("no",), 0.0),
    ]
    got = find_metric("pope").summarise(samples)
    assert (got["score"], got["yes_rate"], got["target_yes_rate"]) == (0.5, 0.5, 0.25)
    assert (got["precision"], got["recall"], got["f1"]) == (0.5, 1.0, pytest.approx(2 / 3))


def test_popes_own_scorer_reads_the_first_sentence():
    lenient = {"style": "pope"}
    assert score("pope", "Yes, there is. No doubt.", "yes", **lenient) == 1
    assert score("pope", "There is not", "no", **lenient) == 1
    assert score("pope", "Yes.", "yes") == 0


def test_years_are_a_trap_that_can_be_closed():
    assert score("relaxed_accuracy", "1950", "2020") == 1
    assert score("relaxed_accuracy", "1950", "2020", years_exact=True) == 0
    assert score("relaxed_accuracy", "2020.0", "2020", years_exact=True) == 1
    for target, near in (("2019.5", "2000"), ("2100", "2099"), ("999", "1000"), ("12020", "12000")):
        assert score("relaxed_accuracy", near, target, years_exact=True) == 1, "no year"
    assert score("relaxed_accuracy", "10.6", "10", tolerance=0.06) == 1


def test_unanimous_targets_may_stay_as_they_are():
    """The VQA challenge's script leaves everything as it is where all people agree."""
    assert score("vqa_accuracy", "two", *["2"] * 10) == 1
    assert score("vqa_accuracy", "two", *["2"] * 10, skip_unanimous=True) == 0
    assert score("vqa_accuracy", "two", *["2"] * 9, "3", skip_unanimous=True) == 1


def test_leaving_one_out_is_not_the_plain_rule():
    """3 of 10 agree: left out, each of them has 2 others."""
    assert score("vqa_accuracy", "red", *["red"] * 3, *["blue"] * 7) == pytest.approx(0.9)
    assert score("vqa_accuracy", "red", "red") == 0, "nobody else says so"


def test_a_target_may_be_the_text_of_a_choice():
    choices = {"choices": ["a cat", "two dogs"]}
    assert score("multiple_choice", "(B)", "two dogs", fields=choices) == 1
    assert score("multiple_choice", "B", "b", fields=choices) == 1
    with pytest.raises(MetricError, match="'C'"):
        score("multiple_choice", "B", "C", fields=choices)
    with pytest.raises(MetricError, match="choices"):
        score("multiple_choice", "B", "C", style="mmmu")


def test_mmmu_guesses_are_worth_their_average():
    fields = {"choices": ["one", "two", "three", "four"]}
    assert score("multiple_choice", "?", "B", fields=fields, style="mmmu") == 0.25
    assert score("multiple_choice", "?", "B", fields=fields) == 0


@NEEDS_ROUGE
def test_rouge_of_a_caption():
    assert score("rouge_l", "a cat on a mat", "a dog", "a cat sat on a mat") == pytest.approx(10 / 11)
    assert score("rouge_l", "dogs running", "dog runs") == 0
    assert score("rouge_l", "dogs running", "dog runs", stem=True) == 1


def test_rouge_says_what_to_install(monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    metrics._rouge_scorer.cache_clear()
    with pytest.raises(MetricError, match=r"requirements-eval\.txt"):
        score("rouge_l", "a", "a")


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_describes_itself_and_needs_targets(name):
    metric = find_metric(name)
    assert metric.name == name and metric.description.endswith(".") and len(metric.description) > 40
    with pytest.raises(MetricError, match="target"):
        metric.score("yes", [], {"choices": ["a", "b"]})
    with pytest.raises(MetricError):
        metric.summarise([])


def test_a_mean_does_not_depend_on_the_order():
    samples = [Scored("", ("",), value) for value in (0.1, 0.2, 0.3, 0.7, 1e-9, 1.0)]
    summarise = find_metric("anls").summarise
    assert summarise(samples) == summarise(samples[::-1]) == {"score": pytest.approx(2.300000001 / 6)}


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("anl", {}, "anls"),
        ("vqa", {}, "vqa_accuracy"),
        ("anls", {"years": True}, "threshold"),
        ("anls", {"threshold": 2}, "threshold"),
        ("pope", {"style": "x"}, "lmms_eval"),
        ("vqa_accuracy", {"style": "x"}, "textvqa"),
        ("multiple_choice", {"style": "x"}, "mmmu"),
        ("relaxed_accuracy", {"tolerance": -1}, "tolerance"),
        ("relaxed_accuracy", {"years_exact": "False"}, "years_exact"),
    ],
)
def test_what_is_not_there_is_refused(name, options, named):
    with pytest.raises(MetricError, match=named):
        find_metric(name, **options)
