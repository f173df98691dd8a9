"""Many requests at once: the scheduler against padded batches that wait for their longest row.

    python -m benchmarks.batching                                # 64 requests, 8 slots, text prompts
    python -m benchmarks.batching --pictures 8                   # ... about 8 images of one tile
    python -m benchmarks.batching --pictures 20 --requests 400 --slots 32 --tokens 8 --peers transformers
    python -m benchmarks.batching --quick

Answers are 4 to 128 tokens, most of them short, of lengths fixed beforehand and the same for all; --tokens
gives all the same length. Requests about one image stand one after another, as in an evaluation. The padded
batches take the requests as they come, as many as there are slots, and stop when all their rows have. The
tokens of both are compared with those of each request alone (identical in float32); all use the same decode
step. --peers transformers adds padded batches of transformers' model with the same weights, of which
--peer-requests may be measured and scaled up. Each system runs in a process of its own, all in turn; the last
line is JSON.
"""

from __future__ import annotations

import argparse
import random
import sys

import torch

from benchmarks.common import (
    Handler,
    base_parser,
    finish,
    median,
    names,
    now,
    shared_setup,
    stop_without,
    take_turns,
)
from benchmarks.peers import build_transformers
from benchmarks.shapes import DTYPES, SHAPES, build_checkpoint, fill, image_tokens, words
from generation.decoding import GenerationOptions
from generation.requests import Request
from generation.scheduler import Scheduler
from inference.cli import positive
from models.checkpoints.idefics3 import stored_name

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
    parser = base_parser(__doc__, precision=True)
    add = parser.add_argument
    add("--requests", type=positive, default=64, metavar="N", help="number of requests (default 64)")
    add("--slots", type=positive, default=8, metavar="N", help="rows at once (default 8)")
    add("--pictures", type=int, default=0, metavar="N", help="different images; 0 (default): text only")
    add("--tokens", type=positive, metavar="N", help="tokens of each answer (default: 4 to 128)")
    add("--step", choices=("fast", "eager"), default="fast", help="decode step (default fast)")
    add("--peers", type=names("transformers"), default=[], metavar="P", help="transformers (default: none)")
    add("--peer-requests", type=positive, metavar="N", help="requests of peers' that count (default all)")
    settings = parser.parse_args(arguments)
    if settings.pictures < 0:
        parser.error(f"--pictures: expected 0 or more, got {settings.pictures}")
    if settings.peers and settings.precision not in DTYPES:
        parser.error(f"--peers: transformers has no {settings.precision} weights")
    if settings.quick:
        settings.rounds, settings.requests = 1, min(settings.requests, 12)
    settings.peer_requests = min(settings.peer_requests or settings.requests, settings.requests)
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
    """(ids (T,), tiles (1, 3, H, W) or None) of each request; those about one image follow one another."""
    config, generator, prompts = SHAPES[shape], random.Random(1), []
    side, each = config.vision.image_size, -(-count // max(1, images))
    for number in range(count):
        ids, tiles = words(shape, number, generator.randint(*PROMPT_WORDS)), None
        if images:
            ids = torch.cat((words(shape, 1000, 4), image_tokens(shape, 1), ids))
            pixels = torch.empty(1, config.vision.num_channels, side, side)
            tiles = fill(pixels, 1.0, start=104_729 * (number // each))
        prompts.append((ids, tiles))
    return prompts


def make_handler(setup: dict) -> Handler:
    """The child's side: the requests of a setup, answered in one of the ways."""
    torch.set_num_threads(setup["threads"])
    system, device, slots = setup["system"], setup["device"], setup["slots"]
    prompts = make_prompts(setup["shape"], setup["requests"], setup["pictures"])[: setup["measured"]]
    tokens = setup["tokens"]
    lengths = [tokens] * len(prompts) if tokens else answer_lengths(len(prompts))
    theirs = None
    checkpoint = build_checkpoint(setup, fast=setup["step"] == "fast" and system != "transformers")
    model, step = checkpoint.model, checkpoint.decode_step
    if system == "transformers":
        theirs = build_transformers(setup["shape"], DTYPES[setup["precision"]], device)
        weights = {stored_name(name): tensor for name, tensor in model.state_dict().items()}
        theirs.load_state_dict(weights, strict=True)

    def scheduled() -> tuple[list[list[int]], int]:
        scheduler = Scheduler(model, slots=slots, decode_step=step)
        options = [GenerationOptions(max_new_tokens=length, stop_token_ids=()) for length in lengths]
        requests = (
            Request(ids, tiles, options=options[number], key=number)
            for number, (ids, tiles) in enumerate(prompts)
        )
        done = {completed.key: completed for completed in scheduler.run(requests)}
        if errors := [completed.error for completed in done.values() if completed.error is not None]:
            raise errors[0]
        return [done[number].token_ids for number in range(len(prompts))], scheduler.stats.decode_steps

    def batch(part: slice) -> tuple[list[list[int]], int]:
        """Rows padded on the left to one length; each answer cut where it was to end."""
        rows, ends = prompts[part], lengths[part]
        longest = max(len(ids) for ids, _ in rows)
        ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.int64)
        for row, (own, _) in enumerate(rows):
            ids[row, longest - len(own) :] = own
            mask[row, longest - len(own) :] = 1
        tiles = [tiles for _, tiles in rows if tiles is not None]
        pixels = torch.cat(tiles) if tiles else None
        if theirs is not None:
            inputs = {"input_ids": ids, "attention_mask": mask}
            inputs |= {"pixel_values": pixels[:, None]} if pixels is not None else {}
            inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
            found = theirs.generate(**inputs, max_new_tokens=max(ends), do_sample=False)[:, longest:]
            return [row[:end] for row, end in zip(found.tolist(), ends, strict=True)], max(ends) - 1
        found = model.generate_detailed(
            ids,
            pixels,
            attention_mask=mask,
            max_new_tokens=max(ends),
            stop_token_ids=(),
            decode_step=step,
        )
        answers = [row[:end] for row, end in zip(found.token_ids.tolist(), ends, strict=True)]
        return answers, found.decode_steps

    def handle(job: dict) -> dict:
        start = now(device)
        if system == "scheduler":
            tokens, steps = scheduled()
        else:
            size = 1 if system == "one by one" else slots
            parts = [batch(slice(first, first + size)) for first in range(0, len(prompts), size)]
            tokens, steps = [row for rows, _ in parts for row in rows], sum(taken for _, taken in parts)
        return {"seconds": now(device) - start, "token_ids": tokens, "decode_steps": steps}

    return handle


def make_rows(settings: argparse.Namespace, by_system: dict[str, list[dict]]) -> list[dict]:
    reference, rows = by_system["one by one"][0]["token_ids"], []
    for system, replies in by_system.items():
        tokens = replies[0]["token_ids"]
        total, same = sum(map(len, tokens)), sum(a == b for a, b in zip(tokens, reference))
        seconds = median(reply["seconds"] for reply in replies)
        keys = ("precision", "device", "shape", "pictures", "step", "requests")
        rows.append(
            {
                "system": system,
                **{key: getattr(settings, key) for key in keys},
                "slots": 1 if system == "one by one" else settings.slots,
                "measured_requests": len(tokens),
                "new_tokens": total,
                "decode_steps": replies[0]["decode_steps"],
                "seconds": seconds * settings.requests / len(tokens),
                "tokens_per_second": total / seconds,
                "identical": f"{same}/{len(tokens)}",
                "identical_to_alone": same == len(tokens),
            }
        )
    padded = rows[SYSTEMS.index("padded batches")]["tokens_per_second"]
    return [row | {"over_padded": row["tokens_per_second"] / padded} for row in rows]


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    shared = shared_setup(settings, "precision", "slots", "requests", "pictures", "step", "tokens")
    counts = dict.fromkeys(SYSTEMS, settings.requests) | dict.fromkeys(settings.peers, settings.peer_requests)
    setups = [{"system": system, "measured": count, **shared} for system, count in counts.items()]
    replies, failed = take_turns(make_handler, setups, lambda setup: [{}], settings.rounds, together=True)
    stop_without(failed, failed)
    print(f"{settings.shape} on {settings.device}: {settings.requests} requests, {settings.pictures} images")
    by_system = {system: own[0] for system, own in zip(counts, replies, strict=True)}
    finish("batching", settings, COLUMNS, make_rows(settings, by_system))
    return 0


if __name__ == "__main__":
    sys.exit(main())
