"""Maps of a question with a given answer, without the steps in which a server makes them."""

from __future__ import annotations

from typing import Any

from inference.attribution.attention import AttentionMaps, attention_steps
from inference.attribution.occlusion import OcclusionMaps, occlusion_steps
from inference.attribution.teacher_forcing import ForcedAnswer, drained


def attention_maps(*question: Any) -> AttentionMaps:
    return drained(attention_steps(ForcedAnswer(*question)))


def occlusion_maps(*question: Any) -> OcclusionMaps:
    return drained(occlusion_steps(ForcedAnswer(*question)))
