"""Many requests of uneven length: the scheduler against padded batches that wait for their longest row.

    python benchmarks/batching.py                                # 64 requests, 8 slots, text prompts
    python benchmarks/batching.py --pictures 8                   # ... about 8 images of one tile
    python benchmarks/batching.py --quick

Answers are 4 to 128 tokens, most of them short, of lengths fixed beforehand and the same for all. The padded
batches take the requests as they come, 8 at a time, and stop when all their rows have. The tokens of both
are compared with those of each request alone (identical in float32). All use the same decode step. Each
system runs in a process of its own, all in turn; the last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

if not __package__:  # run as a script: find the repository's packages, not this folder's files
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.common import base_parser, finish, median, now, positive, table
from benchmarks.shapes import SHAPES, build_precision, fill, words
from benchmarks.workers import interleave, serve

SHORTEST, LONGEST, MEAN = 4, 128, 20  # tokens of an answer
PROMPT_WORDS = (16, 64)
SYSTEMS = ("scheduler", "padded batches", "one by one")
COLUMNS = {
    "system": "system",
    "precision": "precision",
    "requests": "requests",
    "slots": "slots",
    "new_tokens": "tokens:,",
    "decode_steps": "steps:,",
    "seconds": "seconds:.2f",
    "tokens_per_second": "tokens/s:.1f",
    "over_padded": "x padded:.2f",
    "identical": "as alone",
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = base_parser(__doc__, one_precision=True)
    add = parser.add_argument
    add("--requests", type=positive, default=64, metavar="N", help="default 64")
    add("--slots", type=positive, default=8, metavar="N", help="rows at once (default 8)")
    add("--pictures", type=int, default=0, metavar="N", help="different ones; 0 (default): text only")
    add("--step", choices=("fast", "eager"), default="fast", help="the decode step (default fast)")
    settings = parser.parse_args(arguments)
    if settings.pictures < 0:
        parser.error(f"--pictures: expected 0 or more, got {settings.pictures}")
    if settings.quick:
        settings.rounds, settings.requests = 1, min(settings.requests, 12)
    return settings


def answer_lengths(count: int) -> list[int]:
    """Tokens of each answer: exponential, so that most are short, with a full-length one in every 16."""
    generator = random.Random(0)
    lengths = [
        min(LONGEST, SHORTEST + int(generator.expovariate(1 / (MEAN - SHORTEST)))) for _ in range(count)
    ]
    lengths[7::16] = [LONGEST] * len(lengths[7::16])
    return lengths


def make_prompts(shape: str, count: int, images: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """(ids (T,), tiles (1, 3, H, W) or None) of each request; the images take turns."""
    config, generator, prompts = SHAPES[shape], random.Random(1), []
    side = config.vision.image_size
    for number in range(count):
        ids, tiles = words(shape, number, generator.randint(*PROMPT_WORDS)), None
        if images:
            image = torch.full((config.tokens_per_tile,), config.image_token_id)
            ids = torch.cat((words(shape, 1000, 4), image, ids))
            pixels = torch.empty(1, config.vision.num_channels, side, side)
            tiles = fill(pixels, 1.0, start=104_729 * (number % images))
        prompts.append((ids, tiles))
    return prompts


# ------------------------------------------------------------------------------------------- the child


def make_handler(setup: dict):
    torch.set_num_threads(setup["threads"])
    return Requests(setup).handle


class Requests:
    """The same requests, answered in one of three ways."""

    def __init__(self, setup: dict):
        from generation.fast.choose_step import fast_step

        self.setup, self.device = setup, setup["device"]
        self.model = build_precision(setup, packed=True)
        self.step = fast_step(self.model.language_model)[0] if setup["step"] == "fast" else None
        self.prompts = make_prompts(setup["shape"], setup["requests"], setup["pictures"])
        self.lengths = answer_lengths(setup["requests"])

    def handle(self, job: dict) -> dict:
        run = {"scheduler": self.scheduled, "padded batches": self.padded, "one by one": self.alone}
        start = now(self.device)
        tokens, steps = run[self.setup["system"]]()
        return {"seconds": now(self.device) - start, "token_ids": tokens, "decode_steps": steps}

    def scheduled(self) -> tuple[list[list[int]], int]:
        from generation.decoding import GenerationOptions
        from generation.scheduler import Request, Scheduler

        scheduler = Scheduler(self.model, slots=self.setup["slots"], decode_step=self.step)
        requests = (
            Request(
                ids, tiles, options=GenerationOptions(max_new_tokens=length, stop_token_ids=()), key=number
            )
            for number, ((ids, tiles), length) in enumerate(zip(self.prompts, self.lengths))
        )
        done = {}
        for completed in scheduler.run(requests):
            if completed.error is not None:
                raise completed.error
            done[completed.key] = completed.token_ids
        return [done[number] for number in range(len(self.prompts))], scheduler.stats.decode_steps

    def _generate(self, prompts, lengths: list[int]) -> tuple[list[list[int]], int]:
        """Rows padded on the left to one length; each answer cut where it was to end."""
        longest = max(len(ids) for ids, _ in prompts)
        ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.int64)
        for row, (own, _) in enumerate(prompts):
            ids[row, longest - len(own) :] = own
            mask[row, longest - len(own) :] = 1
        tiles = [tiles for _, tiles in prompts if tiles is not None]
        made = self.model.generate_detailed(
            ids,
            torch.cat(tiles) if tiles else None,
            attention_mask=mask,
            max_new_tokens=max(lengths),
            stop_token_ids=(),
            decode_step=self.step,
        )
        rows = [row[:length] for row, length in zip(made.token_ids.tolist(), lengths, strict=True)]
        return rows, made.decode_steps

    def _in_groups(self, size: int) -> tuple[list[list[int]], int]:
        tokens, steps = [], 0
        for first in range(0, len(self.prompts), size):
            part = slice(first, first + size)
            rows, taken = self._generate(self.prompts[part], self.lengths[part])
            tokens, steps = tokens + rows, steps + taken
        return tokens, steps

    def padded(self) -> tuple[list[list[int]], int]:
        return self._in_groups(self.setup["slots"])

    def alone(self) -> tuple[list[list[int]], int]:
        return self._in_groups(1)


# -------------------------------------------------------------------------------------------- the table


def make_rows(settings: argparse.Namespace, replies) -> list[dict]:
    seconds = [median(reply["seconds"] for reply in own[0]) for own in replies]
    reference = replies[SYSTEMS.index("one by one")][0][0]["token_ids"]
    rows = []
    for system, own, taken in zip(SYSTEMS, replies, seconds, strict=True):
        tokens = own[0][0]["token_ids"]
        total = sum(map(len, tokens))
        same = sum(first == second for first, second in zip(tokens, reference, strict=True))
        rows.append(
            {
                "system": system,
                "precision": settings.precision,
                "device": settings.device,
                "shape": settings.shape,
                "requests": settings.requests,
                "pictures": settings.pictures,
                "slots": 1 if system == "one by one" else settings.slots,
                "step": settings.step,
                "new_tokens": total,
                "decode_steps": own[0][0]["decode_steps"],
                "seconds": taken,
                "tokens_per_second": total / taken,
                "over_padded": seconds[SYSTEMS.index("padded batches")] / taken,
                "identical": f"{same}/{len(tokens)}",
                "identical_to_alone": same == len(tokens),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    if settings.child:
        serve(settings.child, make_handler)
        return 0
    keys = ("threads", "device", "shape", "precision", "slots", "requests", "pictures", "step")
    shared = {key: getattr(settings, key) for key in keys}
    setups = [{"name": system, "system": system, **shared} for system in SYSTEMS]
    replies, failed = interleave(
        __file__, setups, lambda setup: [{"what": "run"}], settings.rounds, together=True
    )
    if failed:
        print(f"benchmarks/batching.py: error: {next(iter(failed.values()))}", file=sys.stderr)
        return 1
    rows = make_rows(settings, replies)
    print(f"{settings.shape} on {settings.device}: {settings.requests} requests, {settings.pictures} images")
    print(table(COLUMNS, rows))
    finish("batching", settings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
