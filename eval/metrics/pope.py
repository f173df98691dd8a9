"""POPE: is an object in the image? Accuracy, and whether a model says yes too readily.

Li et al., "Evaluating Object Hallucination in Large Vision-Language Models" (2023), section 5: precision,
recall and F1 of "yes", and the share of "yes" among the answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from eval.metrics.base import Metric, MetricError, Scored, checked_targets, mean_score

STYLES = ("lmms_eval", "pope")


def spoken(answer: str, style: str) -> str:
    """What an answer says: in the style of POPE's scorer yes or no, in lmms-eval's the whole answer."""
    if style == "lmms_eval":
        return answer.lower().strip()
    words = answer.split(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "not", "no"} & set(words) else "yes"


def _target(targets: Sequence[str]) -> str:
    wanted = {target.lower().strip() for target in checked_targets(targets)}
    if len(wanted) != 1 or not wanted <= {"yes", "no"}:
        raise MetricError(f"pope: expected the target yes or no, got {', '.join(map(repr, targets))}")
    return wanted.pop()


def pope_summary(samples: Sequence[Scored], style: str) -> dict[str, float]:
    """score (accuracy), precision, recall, f1, yes_rate, and target_yes_rate.

    An answer that is neither yes nor no is wrong, and in no other count: lmms-eval's way. target_yes_rate is
    what lmms-eval calls pope_yes_ratio; it says nothing about the model.
    """
    pairs = [(spoken(sample.answer, style), _target(sample.targets)) for sample in samples]
    hits, false_yes = pairs.count(("yes", "yes")), pairs.count(("yes", "no"))
    missed = pairs.count(("no", "yes"))
    precision = hits / (hits + false_yes) if hits + false_yes else 0.0
    recall = hits / (hits + missed) if hits + missed else 0.0
    both = precision + recall
    return {
        **mean_score(samples),
        "precision": precision,
        "recall": recall,
        "f1": 2 * (precision * recall) / both if both else 0.0,
        "yes_rate": (hits + false_yes) / len(pairs),
        "target_yes_rate": sum(wanted == "yes" for _, wanted in pairs) / len(pairs),
    }


def pope_metric(style: str = "lmms_eval") -> Metric:
    """Accuracy, precision, recall, F1 and yes-rate.

    Args:
        style: lmms_eval: an answer is "yes" or "no" and nothing else; pope: its first sentence has the word
            no or not, or means yes, as in POPE's own scorer.
    """
    if style not in STYLES:
        raise MetricError(f"pope: expected style {' or '.join(STYLES)}, got {style!r}")
    read = (
        "the answer is yes or no and nothing else, in any case (lmms-eval)"
        if style == "lmms_eval"
        else "no where the first sentence has the word no or not, otherwise yes (POPE's own scorer)"
    )
    return Metric(
        "pope",
        f"POPE: accuracy, with precision, recall and F1 of yes, and the share of yes among answers; {read}; "
        "Li et al. 2023.",
        lambda answer, targets, fields: float(spoken(answer, style) == _target(targets)),
        lambda samples: pope_summary(samples, style),
    )
