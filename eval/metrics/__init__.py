"""Scores of answers by name, each equal to the benchmark's official scorer.

metric = find_metric("relaxed_accuracy", years_exact=True)
score = metric.score("24.5 %", ["25"], {})
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable

from eval.metrics.anls import anls_metric
from eval.metrics.base import Metric, MetricError, Scored
from eval.metrics.choice import choice_metric
from eval.metrics.exact_match import exact_match_metric
from eval.metrics.pope import pope_metric
from eval.metrics.relaxed import relaxed_metric
from eval.metrics.rouge import rouge_metric
from eval.metrics.vqa import vqa_metric

__all__ = ["METRICS", "Metric", "MetricError", "Scored", "find_metric"]

_MAKERS: dict[str, Callable[..., Metric]] = {
    "exact_match": exact_match_metric,
    "vqa_accuracy": vqa_metric,
    "anls": anls_metric,
    "relaxed_accuracy": relaxed_metric,
    "multiple_choice": choice_metric,
    "pope": pope_metric,
    "rouge_l": rouge_metric,
}
_KINDS = {bool: "true or false", float: "a number", str: "a text"}  # types of the makers' defaults
METRICS: dict[str, Metric] = {name: make() for name, make in _MAKERS.items()}


def find_metric(name: str, **options) -> Metric:
    """The metric of this name; `options` are its own, such as years_exact=True for relaxed_accuracy.

    Raises:
        MetricError: no metric has this name, it does not have this option, or not with such a value.
    """
    if name not in _MAKERS:
        near = difflib.get_close_matches(name, _MAKERS, cutoff=0.4) or sorted(_MAKERS)
        raise MetricError(f"unknown metric {name!r}; expected {' or '.join(near)}")
    known = inspect.signature(_MAKERS[name]).parameters
    for option, value in options.items():
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise MetricError(f"metric {name} has no option {option!r}; {has}")
        kind = type(known[option].default)
        right = isinstance(value, kind) or (kind is float and type(value) is int)
        if not right:
            raise MetricError(f"metric {name}: expected {option} as {_KINDS[kind]}, got {value!r}")
    return _MAKERS[name](**options)
