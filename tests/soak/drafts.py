"""A thousand questions about images of 5 to 17 tiles, answered with a draft and without: the same tokens.

    python -m tests.soak.drafts                            # some minutes
    python -m tests.soak.drafts --questions 4000 --first 1000

Eager, with verification by single steps, and in C; greedy and sampled; in sessions of three questions each;
with drafts that are left early, stop early, go on for too long, are right and are wrong. Prints how many of
each there were; the exit status is 1 if a token differs.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable

import torch

from generation.draft import DraftLimits, DraftStream
from generation.fast.native.build import NoCompiler
from generation.fast.native.step import NativeStep
from generation.options import GenerationOptions
from generation.prefix import FeatureCache
from generation.session import Session
from generation.speculation import MOST_DRAFTED
from generation.steps import DecodeStep, Step
from tests.prompts import NO_STOP, ImageBlock, inputs_of, tiny_vlm, words

ALWAYS = DraftLimits(share=math.inf, least_wait=0, most_prompt=math.inf)
SAMPLINGS = (
    {},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 3},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.3, "seed": 11},
    {"repetition_penalty": 1.2},
)


class OneByOne(Step):
    """A step whose chunks have the bits of single steps, because they are single steps."""

    same_bits = True

    def __call__(self, token_ids, kv_cache, start_pos):
        return super().chunk(token_ids, kv_cache, start_pos)[:, -1]

    def chunk(self, token_ids, kv_cache, start_pos):
        ids = enumerate(token_ids.split(1, dim=1))
        return torch.stack([self(one, kv_cache, start_pos + place) for place, one in ids], dim=1)


def hasty_vlm():
    """A tiny model that goes by its last token more than by its image: drafts are right now and then."""
    model = tiny_vlm()
    with torch.no_grad():
        for layer in model.language_model.layers:
            layer.self_attn.o_proj.weight *= 0.05
    return model


def prompts(seed: int, tiles: int, question: int = 4) -> tuple[dict, dict]:
    """Inputs of a prompt with all tiles of an image, the whole one last, and with that alone."""
    before, after = words(seed, 3), words(seed + 1, question)
    cut = [part for n in range(tiles - 1) for part in (ImageBlock(100 * seed + n), *words(n, 1))]
    whole = ImageBlock(100 * seed + 99)
    return inputs_of([*before, *cut, whole, *after]), inputs_of([*before, whole, *after])


def drafted(
    session: Session, full: dict, short: dict | None, most: int, limits: DraftLimits = ALWAYS, **options
) -> tuple[DraftStream, list[int]]:
    """A stream at its end, after a draft of at most so many tokens, and the answer's ids."""
    stream = session.draft_stream(full, short, GenerationOptions(**options), limits)
    for number, _ in enumerate(stream.draft(), 1):
        if number == most:
            break
    return stream, [int(ids) for ids in stream]


def check(vlm, seeds: Iterable[int], step: DecodeStep | None, sampling: dict) -> Counter[str]:
    """Ask the questions with these numbers: what their drafts were like. An AssertionError says where a draft
    shows in an answer."""
    session, kinds = new_session(vlm), Counter[str]()
    for seed in seeds:
        chance = random.Random(seed)
        full, short = prompts(seed, chance.randint(5, 17), chance.randint(1, 9))
        options = {"max_new_tokens": chance.randint(1, 24), "lookup": "off", "decode_step": step, **sampling}
        free = vlm.generate_detailed(**full, **options, **NO_STOP).rows()[0]
        stops = (chance.choice(free),) if chance.random() < 0.5 else ()
        expected = free[: free.index(stops[0]) + 1] if stops else free
        if seed % 3 == 0:
            session = new_session(vlm)
        most = chance.randint(1, 30)
        stream, answer = drafted(session, full, short, most, **options, stop_token_ids=stops)
        assert answer == expected == stream.result.rows()[0], f"question {seed}: {expected}, {answer}"
        ids, right = stream.drafted.token_ids, stream.accepted
        # Neither the prefill's token nor the last saves a pass, nor the one after a chunk that is all right.
        saved = max(0, min(right, len(answer) - 1) - 1)
        saved -= saved // (MOST_DRAFTED + 1)
        verified = step is not None and step.same_bits
        assert stream.result.accepted_tokens == saved * verified, f"question {seed}"
        kinds["questions"] += 1
        kinds["wrong at once"] += right == 0
        kinds["wrong later"] += 0 < right < min(len(ids), len(answer))
        kinds["right"] += right == len(answer)
        kinds["longer than the answer"] += len(ids) > len(answer)
        kinds["stopped"] += ids[-1] in stops
        kinds["left early"] += len(ids) == most
    return kinds


def new_session(vlm) -> Session:
    return Session(vlm, FeatureCache(vlm, 2**20))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default 0)")
    args = parser.parse_args()
    eager, native = hasty_vlm(), hasty_vlm()
    steps = [(eager, None), (eager, OneByOne(eager.language_model))]
    try:
        steps.append((native, NativeStep(native.language_model)))
    except NoCompiler as error:
        print(f"not in C: {error}")
    ways = [(*step, sampling) for sampling in SAMPLINGS for step in steps]
    kinds, last = Counter[str](), args.first + args.questions
    for place, (vlm, step, sampling) in enumerate(ways):
        try:
            kinds += check(vlm, range(args.first + place, last, len(ways)), step, sampling)
        except AssertionError as error:
            print(f"{type(step).__name__}, {sampling}: {error}")
            return 1
    print(", ".join(f"{kind}: {count}" for kind, count in kinds.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
