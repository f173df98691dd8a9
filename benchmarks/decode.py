"""Decode speed against the memory's, against transformers and against llama.cpp.

    python -m benchmarks.decode                                     # SmolVLM-256M's shape on this CPU
    python -m benchmarks.decode --device cuda --precisions bfloat16 --contexts 2000,8000
    python -m benchmarks.decode --device cuda --precisions bfloat16 --batch 256 --systems ours-fast
    python -m benchmarks.decode --batch 1,8,16 --contexts "" --systems ours-fast,llama.cpp
    python -m benchmarks.decode --quick --systems ours-fast,transformers

At batch 1 a decode step reads every weight and the whole cache once. The floor of its time is those bytes at
the speed at which this machine reads, measured in several ways of which the fastest counts. Weights are
random, shapes real, prompts of one image of 1 or 17 tiles. Each system runs in a process of its own, all in
turn, medians are shown, the last line is JSON. llama.cpp takes part if requirements-bench.txt is installed.
The time before the first token is benchmarks/first_token.py's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch

from benchmarks.common import (
    PRECISIONS,
    Handler,
    base_parser,
    finish,
    fit_together,
    integers,
    median,
    memory_now,
    memory_peak,
    names,
    reset_peak,
    shared_setup,
    stop_without,
    take_turns,
    trim,
)
from benchmarks.shapes import SHAPES, prompt_tokens
from benchmarks.systems import DECODERS, read_bandwidth
from inference.cli import positive

PEERS = ("transformers", "transformers-static", "llama.cpp", "ours-eager", "ours-no-cache", "ours-compiled")
INT8_SYSTEMS = ("ours-fast", "llama.cpp")
BUFFER = {"cpu": 2**29, "cuda": 2**32}  # bytes that the bandwidth is measured over
COLUMNS = {
    "system": "system",
    "precision": "precision",
    "prompt_tokens": "prompt:,",
    "context": "context:,",
    "batch": "batch",
    "decode_tokens_per_second": "tokens/s:.1f",
    "ms_per_token": "ms/token:.2f",
    "gigabytes_per_second": "GB/s:.1f",
    "floor_fraction": "of floor:.0%",
    "peak_mebibytes": "peak MiB:,.0f",
    "over_transformers": "x transformers:.2f",
    "over_static": "x static:.2f",
    "over_llama": "x llama.cpp:.2f",
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = base_parser(__doc__)
    add = parser.add_argument
    add("--precisions", type=names(*PRECISIONS), metavar="P,P", help="of the weights (default all)")
    add("--systems", type=names(*DECODERS), metavar="S,S", help=f"out of {', '.join(DECODERS)}")
    add("--prompts", type=integers, default=[1, 17], metavar="N,N", help="tiles of the prompt (default 1,17)")
    add("--contexts", type=integers, default=[8000], metavar="N,N", help="further contexts (default 8000)")
    add("--tokens", type=positive, default=64, metavar="N", help="decode steps that are timed (default 64)")
    add("--batch", type=integers, default=[1], metavar="N,N", help="rows decoded together (default 1)")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="what is compiled by PyTorch (default: on CUDA)",
    )
    settings = parser.parse_args(arguments)
    if settings.quick:
        settings.rounds, settings.tokens, settings.prompts = 1, 16, settings.prompts[:1]
        settings.contexts = []
    cpu = settings.device == "cpu"
    settings.precisions = settings.precisions or ["float32", "bfloat16", *(["int8"] if cpu else [])]
    if not settings.batch or min(settings.batch) < 1:
        parser.error(f"--batch: expected numbers of rows, 1 or more, got {settings.batch}")
    settings.compile = not cpu if settings.compile is None else settings.compile
    if settings.systems is None:
        left_out = {"ours-no-cache"} if settings.quick else set()
        left_out |= set() if settings.compile else {"transformers-static", "ours-compiled"}
        settings.systems = [name for name in DECODERS if name not in left_out]
    limit = SHAPES[settings.shape].text.max_position_embeddings
    longest = max([prompt_tokens(settings.shape, tiles) for tiles in settings.prompts] + settings.contexts)
    if longest + settings.tokens + 8 > limit:
        parser.error(f"--contexts: {longest} and {settings.tokens + 8} tokens more exceed {limit} positions")
    return settings


def make_setups(settings: argparse.Namespace, folder: str) -> list[dict]:
    """One for each child: the one that measures bandwidth, and each system in each precision that it has."""
    shared = shared_setup(settings)
    shared |= {"folder": folder, "environment": {"OCELLI_CACHE": folder}}  # so that compiling is measured
    shared["longest"] = max(context for _, context in make_points(settings)) + settings.tokens + 8
    systems = [("bandwidth", None)] + [
        (system, precision)
        for precision in settings.precisions
        for system in settings.systems
        if precision != "int8" or system in INT8_SYSTEMS
    ]
    return [{"system": system, "precision": precision, **shared} for system, precision in systems]


def make_points(settings: argparse.Namespace) -> list[tuple[int, int]]:
    """(tiles of the prompt, context decoded at): every prompt, the longest one for longer contexts."""
    tokens = {tiles: prompt_tokens(settings.shape, tiles) for tiles in settings.prompts}
    points = list(tokens.items())
    for context in settings.contexts:
        fitting = [tiles for tiles in settings.prompts if tokens[tiles] <= context]
        if fitting and (max(fitting), context) not in points:
            points.append((max(fitting), context))
    return points


def make_jobs(settings: argparse.Namespace, setup: dict) -> list[dict]:
    """Every context with every number of rows, few rows first: what many leave in the allocator would count
    as memory of few."""
    jobs = [
        {"tokens": settings.tokens, "batch": batch, "tiles": tiles, "context": context}
        for batch in sorted(settings.batch)
        for tiles, context in make_points(settings)
    ]
    if setup["system"] == "bandwidth":
        size = 2**23 if setup["shape"] == "tiny" else BUFFER[setup["device"]]
        return [{"size": size}] * len(jobs)  # beside each of them
    return jobs


def make_handler(setup: dict) -> Handler:
    """The child's side: answers jobs with one system, and with the memory that they took."""
    torch.set_num_threads(setup["threads"])
    device = setup["device"]
    if setup["system"] == "bandwidth":
        return lambda job: read_bandwidth(device, job["size"])
    before = memory_now(device)
    system = DECODERS[setup["system"]](setup)
    trim()

    def handle(job: dict) -> dict | None:
        if setup["system"] == "ours-no-cache" and job["round"]:  # slow: one round says enough
            return None
        reset_peak(device)
        reply = system.decode(job["context"], job["tokens"], job["batch"], job["tiles"])
        if reply is None:
            return None
        positions = job["context"] + job["tokens"] // 2
        return {
            **reply,
            "cache_bytes": system.cache_bytes(positions) * job["batch"],
            "peak_bytes": memory_peak(device),
            "before_model_bytes": before,
            "weight_bytes": system.weight_bytes,
            "model_bytes": system.model_bytes,
            "info": system.info,
        }

    return handle


def make_row(setup: dict, job: dict, replies: list[dict], reading: dict[str, float]) -> dict:
    """One line of the table: medians of what a system replied to one job.

    Of "peak_bytes", "before_model_bytes" were there before there was a model (Python and PyTorch, 230 MB on a
    CPU). "over_weights_and_cache" is the rest over "model_bytes" and "cache_bytes", below which it cannot be.
    """
    one = replies[0]
    rounds = [reply["seconds"] / reply["steps"] for reply in replies]
    seconds = median(rounds)
    read = one["weight_bytes"] + one["cache_bytes"]
    peak = min(reply["peak_bytes"] for reply in replies)  # later on the allocator keeps more than is needed
    return {
        **{key: setup[key] for key in ("system", "precision", "device", "shape")},
        "prompt_tokens": prompt_tokens(setup["shape"], job["tiles"]),
        **{key: job[key] for key in ("tiles", "context", "batch")},
        "decode_tokens_per_second": job["batch"] / seconds,
        "ms_per_token": seconds * 1000,
        **{key: one[key] for key in ("weight_bytes", "cache_bytes", "model_bytes", "before_model_bytes")},
        "gigabytes_per_second": read / seconds / 1e9,
        "floor_fraction": read / max(reading.values()) / seconds,
        "fraction_of_sum": read / reading["sum"] / seconds,
        "read_bytes_per_second": reading,
        "peak_bytes": peak,
        "peak_mebibytes": peak / 2**20,
        "over_weights_and_cache": (peak - one["before_model_bytes"])
        / (one["model_bytes"] + one["cache_bytes"]),
        "seconds_of_rounds": rounds,
        **one["info"],
    }


def make_rows(settings: argparse.Namespace, setups: list[dict], replies) -> list[dict]:
    rows = []
    for setup, own in list(zip(setups, replies, strict=True))[1:]:
        for job, answers, beside in zip(make_jobs(settings, setup), own, replies[0], strict=True):
            known = [reply for reply in answers if reply is not None]
            if known:  # the system can do this, and is still there
                reading = {way: median(reply[way] for reply in beside) for way in beside[0]}
                rows.append(make_row(setup, job, known, reading))
    for row in rows:
        compare(row, rows)
    return rows


def compare(row: dict, rows: list[dict]) -> None:
    """Add how a row's speed compares with that of every peer."""
    keys = ("precision", "prompt_tokens", "context", "batch")
    row["speed_over"] = {
        other["system"]: row["decode_tokens_per_second"] / other["decode_tokens_per_second"]
        for other in rows
        if other is not row and other["system"] in PEERS and all(row[key] == other[key] for key in keys)
    }
    for short, peer in (("transformers", "transformers"), ("static", "transformers-static")):
        row[f"over_{short}"] = row["speed_over"].get(peer)
    row["over_llama"] = row["speed_over"].get("llama.cpp")


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="ocelli-bench-") as folder:
        setups = make_setups(settings, folder)
        replies, failed = take_turns(
            make_handler,
            setups,
            lambda setup: make_jobs(settings, setup),
            settings.rounds,
            fit_together(setups),
        )
    stop_without(["bandwidth"], failed)
    reading = {way: median(reply[way] for reply in replies[0][0]) for way in replies[0][0][0]}
    by_way = ", ".join(f"{way} {speed / 1e9:.1f}" for way, speed in reading.items())
    print(f"{settings.shape} on {settings.device}: GB/s read beside the first context: {by_way}")
    rows = make_rows(settings, setups, replies)
    fastest = max(reading.values())
    finish("decode", settings, COLUMNS, rows, read_bytes_per_second=fastest, left_out=failed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
