"""Maps of a question with a given answer, without the steps in which a server makes them."""

from __future__ import annotations

from typing import Any

from inference.attribution.attention import AttentionMaps, attention_steps, drained


def attention_maps(*question: Any) -> AttentionMaps:
    return drained(attention_steps(*question))
