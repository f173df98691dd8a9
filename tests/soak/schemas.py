"""Ten thousand answers that are held to schemas, each checked by the jsonschema library.

    python -m tests.soak.schemas                              # the embedded model: some minutes
    python -m tests.soak.schemas --answers 1000 --first 500

Schemas of all kinds and free questions share the slots of one scheduler, greedy and sampled, in C where there
is a compiler. Some of the answers are asked for again alone: they must be the same tokens. Prints how many
there were of each kind; the exit status is 1 if an answer does not fit or differs, or if too many were cut at
their limit.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from jsonschema import ValidationError

from generation.options import GenerationOptions
from generation.prefix import FeatureCache
from generation.requests import LazyRequest, Request, RequestOutput
from generation.scheduler import Scheduler
from inference.answer import answer_text, ask, encode, requests_for
from inference.checkpoint import Checkpoint, open_checkpoint
from inference.cli import positive
from inference.grammar import json_grammar
from tests.schemas import GROWING, SCHEMAS, assert_fits

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGES = ("example", "three", "cup")
QUESTIONS = ("What is in the picture?", "How many shapes are there?", "What colour is the star?")
SAMPLINGS = ({}, {"temperature": 0.8}, {"temperature": 1.5, "top_p": 0.9}, {"repetition_penalty": 1.2})
LIMIT = 160  # new tokens


def asked(number: int, checkpoint: Checkpoint) -> tuple[str, str, GenerationOptions]:
    """The image, the question and the options of an answer; every tenth one is free."""
    rng = random.Random(number)
    options = GenerationOptions(max_new_tokens=LIMIT, seed=number, **rng.choice(SAMPLINGS))
    if number % 10:
        grammar = json_grammar(SCHEMAS[schema_of(number)])
        options = replace(options, constraint=checkpoint.constraint(grammar))
    return str(ROOT / "assets" / f"{rng.choice(IMAGES)}.png"), rng.choice(QUESTIONS), options


def schema_of(number: int) -> str:
    return list(SCHEMAS)[number % len(SCHEMAS)]


def requests(numbers: range, checkpoint: Checkpoint) -> Iterator[LazyRequest]:
    for number in numbers:

        def prepare(number: int = number) -> Request:
            image, question, options = asked(number, checkpoint)
            row = encode(checkpoint, [image], question)
            return requests_for(checkpoint, row, LIMIT, options)[0]

        yield LazyRequest(number, prepare)


def wrong_with(output: RequestOutput, checkpoint: Checkpoint) -> str | None:
    """What is wrong with an answer, or None."""
    if output.error is not None:
        return repr(output.error)
    if output.key % 10 and output.stop_reason == "stop":
        try:
            *_, options = asked(output.key, checkpoint)
            text = answer_text(checkpoint, output.token_ids, options)
            assert_fits(text, SCHEMAS[schema_of(output.key)])
        except (ValueError, ValidationError) as error:  # no JSON, or another value
            return f"{schema_of(output.key)}: {error}"
    if output.key % 50 == 1:
        image, question, options = asked(output.key, checkpoint)
        (alone,) = ask(checkpoint, [image], question, options).finish()["token_ids"]
        if alone != output.token_ids:
            return "other tokens than alone"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=positive, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--model", default=str(ROOT / "checkpoints" / "ocelli-shapes"))
    args = parser.parse_args(arguments)
    checkpoint = open_checkpoint(args.model).compiled()
    counts: Counter[str] = Counter()
    scheduler = Scheduler(checkpoint.model, 8, checkpoint.decode_step, FeatureCache(checkpoint.model))
    began = time.perf_counter()
    for output in scheduler.run(requests(range(args.first, args.first + args.answers), checkpoint)):
        wrong = wrong_with(output, checkpoint)
        counts["wrong"] += wrong is not None
        counts["free" if output.key % 10 == 0 else f"held, ended by {output.stop_reason}"] += 1
        cut = output.key % 10 and output.stop_reason == "length" and schema_of(output.key) not in GROWING
        counts["cut, though short enough"] += bool(cut)
        if wrong is not None:
            print(f"answer {output.key}: {wrong}", file=sys.stderr)
    seconds = time.perf_counter() - began
    print(f"{dict(counts)}; {scheduler.stats.new_tokens} tokens in {seconds:.0f} s")
    return 1 if counts["wrong"] or counts["cut, though short enough"] > args.answers / 1000 else 0


if __name__ == "__main__":
    sys.exit(main())
