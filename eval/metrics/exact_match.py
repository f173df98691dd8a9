"""Exact match of texts."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from eval.metrics.base import Metric, checked_targets, mean_score

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(
    answer: str,
    targets: Sequence[str],
    fields: Mapping[str, Any],
    *,
    strip: bool = True,
    ignore_case: bool = True,
    ignore_punctuation: bool = False,
) -> float:
    """1 where the answer is one of the targets."""

    def plain(text: str) -> str:
        text = text.strip() if strip else text
        text = text.lower() if ignore_case else text
        return text.translate(_NO_PUNCTUATION) if ignore_punctuation else text

    return float(plain(answer) in {plain(target) for target in checked_targets(targets)})


def exact_match_metric(
    strip: bool = True, ignore_case: bool = True, ignore_punctuation: bool = False
) -> Metric:
    """`exact_match`; `strip` removes space at both ends, `ignore_punctuation` the ASCII marks."""
    ignored = {
        "space at the ends": strip,
        "case": ignore_case,
        "punctuation": ignore_punctuation,
    }
    but_for = " and ".join(name for name, is_ignored in ignored.items() if is_ignored) or "nothing"
    return Metric(
        "exact_match",
        f"Exact match: 1 where the answer equals one of the targets but for {but_for} (after exact_match in "
        f"lmms-eval and Hugging Face's evaluate{', which keep space at the ends' if strip else ''}).",
        lambda answer, targets, fields: exact_match(
            answer,
            targets,
            fields,
            strip=strip,
            ignore_case=ignore_case,
            ignore_punctuation=ignore_punctuation,
        ),
        mean_score,
    )
