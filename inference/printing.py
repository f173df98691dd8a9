"""What generate.py prints: answers while they are made, what is thought before them, and their figures."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from inference.terminal import GREY, PLAIN, Lines, columns, wrapped
from messages import counted, for_terminal, printable

MOST_SHOWN = 5  # failures of a batch, or different answers, on stderr


def shown(pieces: Iterable[str]) -> Iterator[str]:
    """The pieces of an answer as stdout is to show them."""
    return wrapped(pieces) if sys.stdout.isatty() else map(for_terminal, pieces)


def say(pieces: Iterable[str]) -> None:
    """Print an answer while it is made."""
    for piece in shown(pieces):
        print(piece, end="", flush=True)
    print(flush=True)


class Aside:
    """What a model thinks before it answers, on stderr while it is made: in grey at a terminal."""

    def __init__(self, wanted: bool = True) -> None:
        self._wanted, self._begun = wanted, False
        self._lines = Lines(columns()) if sys.stderr.isatty() else None

    def put(self, piece: str) -> None:
        """More of it."""
        self._print(piece if self._begun else f"[thinking] {piece}")
        self._begun = True

    def end(self) -> None:
        """It has come to its end, if it had begun."""
        if self._begun:
            self._print("\n\n")
        self._begun = False

    def _print(self, text: str) -> None:
        text = for_terminal(text)
        if self._lines is not None:
            text = GREY + "".join(map(self._lines.take, text)) + PLAIN
        if self._wanted:
            print(text, end="", file=sys.stderr, flush=True)

    def before(self, pieces: Iterable[tuple[int, str]]) -> Iterator[str]:
        """The pieces of an answer, which it stands before."""
        try:
            for _, piece in pieces:
                self.end()
                yield piece
        finally:
            self.end()


def stats_table(result: dict[str, Any], model: str, **more: str) -> str:
    """The size and speed of an answer, from the fields of `Reply.finish`: a line for each figure."""
    lengths = " + ".join(str(len(ids)) for ids in result["token_ids"])
    lengths += " token" if lengths == "1" else " tokens"
    reused = f", {result['reused_tokens']} kept from before" if result["reused_tokens"] else ""
    confidences = "".join(f", confidence {one:.1%}" for one in result["confidences"])
    thought = "".join(f"{counted(n, 'token')} of thinking, " for n in result.get("thinking_tokens", ()))
    ended = ", ".join(sorted(set(result["stop_reasons"])))
    rows = {
        "model": f"{model}, {result['dtype']} on {result['device']}",
        "prompt": f"{result['prompt_tokens']} tokens, {result['image_tokens']} of them image{reused}",
        "answer": f"{thought}{lengths}, ended by {ended}{confidences}",
        **{name.replace("_", " "): f"{value:.3f} s" for name, value in result["seconds"].items()},
        "kv cache": f"{result['kv_cache_bytes'] / 2**20:.2f} MiB",
        "step": result["decode_step"],
        "tower": result["vision_tower"],
    }
    if result["decode_tokens_per_second"] is not None:
        rows["decode"] += f", {result['decode_tokens_per_second']:.1f} tokens/s"
    if draft := result.get("draft"):
        seconds, first = draft["draft_seconds"], draft["first_token_seconds"]
        right = f"{draft['accepted']} of {counted(draft['tokens'], 'token')} right"
        rows["draft"] = f"{seconds:.3f} s, {first:.3f} s to the first token; {right}"
    if result.get("proposed_tokens"):
        rows["verified"] = (
            f"{result['accepted_tokens']} of {counted(result['proposed_tokens'], 'proposed token')} accepted"
        )
    for probabilities in result.get("probabilities", ()):
        rows["choices"] = ", ".join(f"{text} {share:.1%}" for text, share in probabilities.items())
    rows |= more
    width = max(map(len, rows))
    return "\n".join(f"{name:>{width}}  {value}" for name, value in rows.items())


def votes_line(picked: dict[str, Any]) -> str:
    """How many answers say what, and how sure the model was of these."""
    votes, most = picked["votes"], MOST_SHOWN
    said = [f"{one['count']} x {printable(one['answer'], 60)} ({one['confidence']:.1%})" for one in votes]
    more = f", and {len(votes) - most} others" if len(votes) > most else ""
    return f"{sum(one['count'] for one in votes)} answers, by {picked['by']}: {', '.join(said[:most])}{more}"
