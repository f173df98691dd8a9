"""What a page shows, as the values of Gradio's components: messages of a chat, figures, a notice."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from web.visitors import Exchange

_ENDED = {
    "length": "cut at the largest number of new tokens",
    "context": "cut where the model's context is full",
    "stopped": "stopped",
}


def messages(log: Sequence[Exchange]) -> list[dict[str, Any]]:
    """Questions and answers in the form of `gr.Chatbot`, which takes text for HTML: escaped, to be read as it
    was typed and answered."""
    shown: list[dict[str, Any]] = []
    for exchange in log:
        content = [{"path": image, "alt_text": "picture"} for image in exchange.images]
        shown += [{"role": "user", "content": part} for part in (*content, _as_text(exchange.question))]
        for number, answer in enumerate(exchange.answers):
            shown.append({"role": "assistant", "content": _as_text(_with_ending(exchange, number, answer))})
    return shown


def _as_text(text: str) -> str:
    return escape(text, quote=False)


def _with_ending(exchange: Exchange, number: int, answer: str) -> str:
    ended = exchange.ended[number] if exchange.ended else None
    if ended is None:
        return answer or "…"
    answer = answer.rstrip() or "(no words)"
    return f"{answer} [{_ENDED[ended]}]" if ended in _ENDED else answer


def notice(text: str, failed: bool) -> str:
    """HTML of a sentence under the question; "" of none."""
    if not text:
        return ""
    role, kind = ("alert", "failed") if failed else ("status", "waiting")
    return f'<p class="notice {kind}" role="{role}">{escape(text)}</p>'


def figures(made: dict[str, Any] | None) -> str:
    """HTML of what an answer took. Before there is one, the same table is empty: nothing moves."""
    made = made or {}
    seconds = made.get("first_words")
    speed, cache = made.get("decode_tokens_per_second"), made.get("kv_cache_bytes")
    reused, prompt = made.get("reused_tokens"), made.get("prompt_tokens")
    tokens = sum(len(ids) for ids in made.get("token_ids", ()))
    rows = {
        "first words": "–" if seconds is None else f"{seconds:.2f} s",
        "tokens a second": "–" if speed is None else f"{speed:,.0f}",
        "cache": "–" if cache is None else f"{cache / 2**20:,.1f} MiB",
        "tokens reused": "–" if reused is None else f"{reused:,} of {prompt:,}",
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in rows.items())
    below = ""
    if "device" in made:
        seed = f", seed {made['seed']}" if made["sampled"] else ""
        below = f"{tokens:,} new tokens, {made['dtype']} on {made['device']}, {made['decode_step']}{seed}"
    return f'<dl class="figures">{cells}</dl><p class="below">{escape(below)}</p>'
