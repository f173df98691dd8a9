"""What one question took, for people."""

from __future__ import annotations

from typing import Any


def stats_rows(made: dict[str, Any]) -> dict[str, str]:
    """Row names and texts from the fields of `Reply.finish` or `TurnReply.finish`, and "model"."""
    lengths = [len(ids) for ids in made["token_ids"]]
    ends = ", ".join(sorted(set(made["stop_reasons"])))
    kept = f", {made['reused_tokens']} kept from the last question" if made["reused_tokens"] else ""
    rows = {
        "model": f"{made['model']}, {made['dtype']} on {made['device']}",
        "prompt": f"{made['prompt_tokens']} tokens, {made['image_tokens']} of them image{kept}",
        "answer": f"{' + '.join(map(str, lengths))} tokens, ended by {ends}",
        **{name.replace("_", " "): f"{value:.3f} s" for name, value in made["seconds"].items()},
        "kv cache": f"{made['kv_cache_bytes'] / 2**20:.2f} MiB",
        "step": made["decode_step"],
    }
    if made["decode_tokens_per_second"] is not None:
        rows["decode"] += f", {made['decode_tokens_per_second']:.1f} tokens/s"
    return rows


def as_table(rows: dict[str, str]) -> str:
    """One line each, names to the right of their column."""
    width = max(map(len, rows))
    return "\n".join(f"{name:>{width}}  {value}" for name, value in rows.items())
