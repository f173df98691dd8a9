"""Prompt lookup: how many times as fast answers come, repeating ones and others.

    python -m benchmarks.lookup                                   # SmolVLM-256M's shape on this CPU
    python -m benchmarks.lookup --precisions bfloat16 --tokens 400
    python -m benchmarks.lookup --quick --shape tiny

Each pass does all of its work with random weights, and then its logits are changed so that the answer is one
of these, whatever a model would have said:

    transcript   a copy of the prompt's text
    table        lines of 10 tokens, the first 6 of which are always the same
    prose        words as often as in a language: the n-th of 2,000 once for n times that the first is there
    misleading   drawn from 12 tokens: there is always something to look up, and it is mostly wrong

The same answers come without lookup and with `lookup="auto"` in turn, in one process for each precision. The
ratio is the median over the rounds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.common import (
    PRECISIONS,
    Handler,
    Unavailable,
    base_parser,
    finish,
    median,
    names,
    shared_setup,
    stop_without,
    take_turns,
)
from benchmarks.shapes import build_checkpoint, words
from generation.kv_cache import KVCache
from generation.steps import Step
from inference.cli import positive

COLUMNS = {
    "answer": "answer",
    "precision": "precision",
    "tokens_per_second_off": "tokens/s without:.1f",
    "tokens_per_second_auto": "with lookup:.1f",
    "ratio": "ratio:.2f",
    "proposed": "proposed",
    "accepted": "accepted",
}


class Scripted(Step):
    """A step whose answer is written beforehand: after `start` positions of the prompt come `ids`."""

    same_bits = True

    def __init__(self, step: Step, start: int, ids: list[int]):
        self._step, self._start, self._ids = step, start, torch.tensor(ids)

    def __call__(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        return self._write(self._step(token_ids, kv_cache, start_pos)[:, None], start_pos)[:, 0]

    def prefill(
        self, embeddings: Tensor, lengths: Sequence[int], kv_cache: KVCache, start_pos: int | Tensor = 0
    ) -> Tensor:
        return self._step.prefill(embeddings, lengths, kv_cache, start_pos)

    def chunk(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        return self._write(self._step.chunk(token_ids, kv_cache, start_pos), start_pos)

    def _write(self, logits: Tensor, start_pos: int | Tensor) -> Tensor:
        next_one = int(start_pos) + 1 - self._start  # the token that is fed at the prompt's end is number 0
        ids = self._ids[next_one : next_one + logits.shape[1]]
        logits[0, torch.arange(len(ids)), ids] = 1e30
        return logits


def make_answers(prompt: list[int], tokens: int, vocabulary: int) -> dict[str, list[int]]:
    """Answers of so many tokens, by name; those of prose are out of `vocabulary` ids."""
    chance = random.Random(0)
    table: list[int] = []
    while len(table) < tokens:
        table += [*prompt[:6], *chance.choices(prompt, k=4)]
    often = [1 / n for n in range(1, vocabulary + 1)]
    return {
        "transcript": (prompt * (1 + tokens // len(prompt)))[:tokens],
        "table": table[:tokens],
        "prose": chance.choices(range(vocabulary), often, k=tokens),
        "misleading": [chance.choice(prompt[:12]) for _ in range(tokens)],
    }


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = base_parser(__doc__)
    add = parser.add_argument
    add(
        "--precisions",
        type=names(*PRECISIONS),
        default=list(PRECISIONS),
        metavar="P,P",
        help="of the weights",
    )
    add("--tokens", type=positive, default=200, metavar="N", help="tokens of an answer (default 200)")
    settings = parser.parse_args(arguments)
    if settings.quick:
        settings.rounds, settings.tokens = 1, 40
    return settings


def make_handler(setup: dict) -> Handler:
    """The child's side: the answers of one precision, without lookup and with it."""
    torch.set_num_threads(setup["threads"])
    checkpoint = build_checkpoint(setup, fast=True)
    model, step = checkpoint.model, checkpoint.decode_step
    if not isinstance(step, Step):
        raise Unavailable(checkpoint.decode_step_name)
    ids = words(setup["shape"], 1, setup["tokens"])
    answers = make_answers(ids.tolist(), setup["tokens"], min(2000, model.config.text.vocab_size - 200))

    def handle(job: dict) -> dict:
        reply = {}
        for lookup in ("off", "auto") if job["round"] % 2 else ("auto", "off"):
            output = model.generate_detailed(
                ids[None],
                max_new_tokens=setup["tokens"],
                stop_token_ids=(),
                lookup=lookup,
                decode_step=Scripted(step, len(ids), answers[job["answer"]]),
            )
            assert output.rows()[0][1:] == answers[job["answer"]][1:], "lookup must not change the answer"
            reply[lookup] = (setup["tokens"] - 1) / output.seconds["decode"]
            if lookup == "auto":
                reply |= {"proposed": output.proposed_tokens, "accepted": output.accepted_tokens}
        return reply

    return handle


def make_row(settings: argparse.Namespace, precision: str, answer: str, replies: list[dict]) -> dict:
    return {
        "answer": answer,
        "precision": precision,
        "shape": settings.shape,
        "tokens": settings.tokens,
        **{f"tokens_per_second_{name}": median(reply[name] for reply in replies) for name in ("off", "auto")},
        "ratio": median(reply["auto"] / reply["off"] for reply in replies),
        "ratios": [reply["auto"] / reply["off"] for reply in replies],
        **{name: median(reply[name] for reply in replies) for name in ("proposed", "accepted")},
    }


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    shared = shared_setup(settings, "tokens")
    setups = [{"system": "ours", "precision": precision, **shared} for precision in settings.precisions]
    jobs = [{"answer": answer} for answer in make_answers([0], 1, 1)]
    replies, failed = take_turns(make_handler, setups, lambda _: jobs, settings.rounds, together=True)
    stop_without([f"ours {precision}" for precision in settings.precisions], failed)
    rows = [
        make_row(settings, setup["precision"], job["answer"], own)
        for setup, of_setup in zip(setups, replies, strict=True)
        for job, own in zip(jobs, of_setup, strict=True)
    ]
    finish("lookup", settings, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
