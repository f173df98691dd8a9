"""What generate.py prints beside plain answers: figures, what is shown of an image; and grey text on a
terminal, which a draft and thinking are. None of it controls the terminal, whatever a model says.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from inference.flags import log, say
from inference.results import to_json
from messages import counted, for_terminal

MOST_SHOWN = 5  # failures of a batch on stderr
MANY_POSITIONS = 1024  # of one image: some seconds to minutes on a CPU
GREY, PLAIN = "\033[90m", "\033[0m"


def seen_at(rule: Any, visual: Any) -> str:
    """What an image takes that is shown whole: where that is much, or the image is made much smaller; and
    what is shown of a video."""
    height, width = visual.parts.shape[-2:]
    if visual.times:
        times = f"{visual.times[0]:.1f} to {visual.times[-1]:.1f} of {visual.seconds:.1f} s"
        nouns = ("pair of frames", "pairs of frames") if len(visual.parts.shape) == 5 else ("frame",)
        parts = counted(len(visual.times), *nouns)
        return f"{parts}, {times}, seen at {width} x {height} pixels ({visual.positions} positions)"
    if rule.budget is None:
        return ""
    if visual.positions <= MANY_POSITIONS and 4 * width * height >= math.prod(visual.size):
        return ""
    more = "; a larger --max-pixels shows more" if rule.budget < rule.limit else ""
    return f"seen at {width} x {height} pixels ({visual.positions} positions){more}"


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


def print_result(
    result: dict[str, Any],
    about: dict[str, Any],
    args: argparse.Namespace,
    locator: Any,
    pixels: Callable[[], Any],
    checkpoint: Any,
) -> None:
    """Print answers that were not printed while they were made: as JSON with what they are `about`, several
    of them, or boxes and points; and complete their `result`."""
    if locator is not None:
        result |= locator.locate(checkpoint, result)
    result["answers"] = [pixels().whole(answer) for answer in result["answers"]]
    if draft := result.get("draft"):
        draft["text"] = pixels().whole(draft["text"])
    if args.json:
        print(to_json(about | result), flush=True)
    elif locator is not None:
        say([locator.text(result["answers"][0])])
    for number in range(args.num_answers) if args.num_answers > 1 and not args.json else ():
        if thought := "".join(result.get("thinking", ())[number : number + 1]):
            log(f"generate.py: thinking {number + 1}: {thought}")
        say([f"{number + 1}. {result['answers'][number]}"])


class Aside:
    """What comes before an answer, thinking or a draft, on stderr while it is made: in grey at a terminal."""

    def __init__(self, name: str = "thinking"):
        self._name, self._begun = name, False

    def put(self, piece: str) -> None:
        """More of it."""
        if piece:
            self._print(piece if self._begun else f"[{self._name}] {piece}")
            self._begun = True

    def before(self, pieces: Iterable[tuple[int, str]]) -> Iterator[str]:
        """The pieces of the answer that comes after it."""
        try:
            for _, piece in pieces:
                self.end()
                yield piece
        finally:
            self.end()

    def end(self) -> None:
        if self._begun:
            self._print("\n\n")
        self._begun = False

    def _print(self, text: str) -> None:
        grey, plain = (GREY, PLAIN) if sys.stderr.isatty() else ("", "")
        print(grey + for_terminal(text) + plain, end="", file=sys.stderr, flush=True)
