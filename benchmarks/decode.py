"""Decode speed against the memory's, against transformers and against llama.cpp.

    python -m benchmarks.decode                                     # SmolVLM-256M's shape on this CPU
    python -m benchmarks.decode --device cuda --precisions bfloat16 --contexts 2000,8000
    python -m benchmarks.decode --device cuda --precisions bfloat16 --batch 256 --systems ours-fast
    python -m benchmarks.decode --quick --systems ours-fast,transformers

At batch 1 a decode step reads every weight and the whole cache once. The floor of its time is those bytes at
the speed at which this machine reads, measured in several ways of which the fastest counts. Weights are
random, shapes real, prompts of one image of 1 or 17 tiles. Each system runs in a process of its own, all in
turn, medians are shown, the last line is JSON. llama.cpp takes part if requirements-bench.txt is installed.
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
from benchmarks.shapes import SHAPES, parameters, prompt_tokens
from benchmarks.systems import SYSTEMS, read_bandwidth
from generation.memory import available_bytes
from inference.cli import positive

PEERS = ("transformers", "transformers-static", "llama.cpp", "ours-eager", "ours-no-cache")
INT8_SYSTEMS = ("ours-fast", "llama.cpp")
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, None: 0}
PROCESS_BYTES = 4e8  # of a child besides its weights
BUFFER = {"cpu": 2**29, "cuda": 2**32}  # bytes that the bandwidth is measured over
COLUMNS = {
    "system": "system",
    "precision": "precision",
    "prompt_tokens": "prompt:,",
    "context": "context:,",
    "vision_seconds": "vision s:.3f",
    "prefill_seconds": "prefill s:.3f",
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
    add("--systems", type=names(*SYSTEMS), metavar="S,S", help=f"out of {', '.join(SYSTEMS)}")
    add("--prompts", type=integers, default=[1, 17], metavar="N,N", help="tiles of the prompt (default 1,17)")
    add("--contexts", type=integers, default=[8000], metavar="N,N", help="further contexts (default 8000)")
    add("--tokens", type=positive, default=64, metavar="N", help="decode steps that are timed (default 64)")
    add("--batch", type=positive, default=1, metavar="N", help="rows decoded together (default 1)")
    add("--prefill-rounds", type=positive, metavar="N", help="rounds of the first token (default --rounds)")
    add("--compile", action=argparse.BooleanOptionalAction, help="transformers-static (default: on CUDA)")
    settings = parser.parse_args(arguments)
    if settings.quick:
        settings.rounds, settings.tokens, settings.prompts = 1, 16, settings.prompts[:1]
        settings.contexts = []
    cpu = settings.device == "cpu"
    settings.precisions = settings.precisions or ["float32", "bfloat16", *(["int8"] if cpu else [])]
    if not cpu and "int8" in settings.precisions:
        parser.error("--precisions: int8 runs on a CPU only")
    settings.compile = not cpu if settings.compile is None else settings.compile
    if settings.systems is None:
        left_out = {"ours-no-cache"} if settings.quick else set()
        left_out |= set() if settings.compile else {"transformers-static"}
        settings.systems = [name for name in SYSTEMS if name not in left_out]
    limit = SHAPES[settings.shape].text.max_position_embeddings
    longest = max([prompt_tokens(settings.shape, tiles) for tiles in settings.prompts] + settings.contexts)
    if longest + settings.tokens + 8 > limit:
        parser.error(f"--contexts: {longest} and {settings.tokens + 8} tokens more exceed {limit} positions")
    return settings


def make_setups(settings: argparse.Namespace, folder: str) -> list[dict]:
    """One for each child: the one that measures bandwidth, and each system in each precision that it has."""
    shared = shared_setup(settings)
    shared |= {"prefill_rounds": settings.prefill_rounds or settings.rounds}
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
    """Decoding first: what prefill leaves in the allocator would count as memory of decoding."""
    points = make_points(settings)
    if setup["system"] == "bandwidth":
        size = 2**23 if setup["shape"] == "tiny" else BUFFER[setup["device"]]
        return [{"size": size}] * len(points)  # beside each of them
    job = {"tokens": settings.tokens, "batch": settings.batch}
    decoding = [job | {"tiles": tiles, "context": context} for tiles, context in points]
    return decoding + [{"first_token": True, "tiles": tiles} for tiles in settings.prompts]


def make_handler(setup: dict) -> Handler:
    """The child's side: answers jobs with one system, and with the memory that they took."""
    torch.set_num_threads(setup["threads"])
    device = setup["device"]
    if setup["system"] == "bandwidth":
        return lambda job: read_bandwidth(device, job["size"])
    before = memory_now(device)
    system = SYSTEMS[setup["system"]](setup)
    trim()

    def handle(job: dict) -> dict | None:
        first_token = "first_token" in job
        if first_token and job["round"] >= setup["prefill_rounds"]:
            return None
        if setup["system"] == "ours-no-cache" and job["round"]:  # slow: one round says enough
            return None
        reset_peak(device)
        if first_token:
            reply = system.first_token(job["tiles"])
        else:
            reply = system.decode(job["context"], job["tokens"], job["batch"], job["tiles"])
            if reply is None:
                return None
            positions = job["context"] + job["tokens"] // 2
            reply |= {"cache_bytes": system.cache_bytes(positions) * job["batch"]}
        return {
            **reply,
            "peak_bytes": memory_peak(device),
            "before_model_bytes": before,
            "weight_bytes": system.weight_bytes,
            "model_bytes": system.model_bytes,
            "info": system.info,
        }

    return handle


def make_row(
    settings: argparse.Namespace,
    setup: dict,
    point: tuple[int, int],
    decoded: list[dict],
    first: list[dict],
    reading: dict[str, float],
) -> dict:
    """One line of the table: medians of what a system replied for one prompt and context.

    Of "peak_bytes", "before_model_bytes" were there before there was a model (Python and PyTorch, 230 MB on a
    CPU). "over_weights_and_cache" is the rest over "model_bytes" and "cache_bytes", below which it cannot be.
    """
    tiles, context = point
    one = decoded[0]
    rounds = [reply["seconds"] / reply["steps"] for reply in decoded]
    seconds = median(rounds)
    read = one["weight_bytes"] + one["cache_bytes"]
    peak = min(reply["peak_bytes"] for reply in decoded)  # later on the allocator keeps more than is needed
    return {
        **{key: setup[key] for key in ("system", "precision", "device", "shape")},
        "prompt_tokens": prompt_tokens(setup["shape"], tiles),
        "tiles": tiles,
        "context": context,
        "batch": settings.batch,
        "first_token_seconds": median(reply["total"] for reply in first),
        "vision_seconds": median(reply["vision"] for reply in first),
        "prefill_seconds": median(reply["prefill"] for reply in first),
        "decode_tokens_per_second": settings.batch / seconds,
        "ms_per_token": seconds * 1000,
        **{key: one[key] for key in ("weight_bytes", "cache_bytes", "model_bytes", "before_model_bytes")},
        "gigabytes_per_second": read / seconds / 1e9,
        "floor_fraction": read / max(reading.values()) / seconds,
        "fraction_of_sum": read / reading["sum"] / seconds,
        "read_bytes_per_second": reading,
        "peak_bytes": peak,
        "peak_mebibytes": peak / 2**20,
        "first_token_peak_bytes": min((reply["peak_bytes"] for reply in first), default=None),
        "over_weights_and_cache": (peak - one["before_model_bytes"])
        / (one["model_bytes"] + one["cache_bytes"]),
        "seconds_of_rounds": rounds,
        **one["info"],
    }


def make_rows(settings: argparse.Namespace, setups: list[dict], replies) -> list[dict]:
    rows, points = [], make_points(settings)
    for setup, own in list(zip(setups, replies, strict=True))[1:]:
        own = [[reply for reply in job if reply is not None] for job in own]
        first = dict(zip(settings.prompts, own[len(points) :], strict=True))
        for place, point in enumerate(points):
            if decoded := own[place]:  # the system can do this, and is still there
                beside = replies[0][place]
                reading = {way: median(reply[way] for reply in beside) for way in beside[0]}
                rows.append(make_row(settings, setup, point, decoded, first[point[0]], reading))
    for row in rows:
        compare(row, rows)
    return rows


def compare(row: dict, rows: list[dict]) -> None:
    """Add how a row's speed, and its time to the first token, compare with those of every peer."""
    keys = ("precision", "prompt_tokens", "context")
    peers = [
        other
        for other in rows
        if other is not row and other["system"] in PEERS and all(row[key] == other[key] for key in keys)
    ]
    for name, key in (
        ("speed_over", "decode_tokens_per_second"),
        ("first_token_over", "first_token_seconds"),
    ):
        row[name] = {peer["system"]: row[key] / peer[key] for peer in peers if row[key] and peer[key]}
    for short, peer in (("transformers", "transformers"), ("static", "transformers-static")):
        row[f"over_{short}"] = row["speed_over"].get(peer)
    row["over_llama"] = row["speed_over"].get("llama.cpp")


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    with tempfile.TemporaryDirectory(prefix="ocelli-bench-") as folder:
        setups = make_setups(settings, folder)
        count, free = parameters(settings.shape), available_bytes(torch.device("cpu"))
        needed = sum(count * BYTES[setup["precision"]] + PROCESS_BYTES for setup in setups)
        together = free is None or needed < 0.8 * free  # all models fit into memory at the same time
        replies, failed = take_turns(
            make_handler, setups, lambda setup: make_jobs(settings, setup), settings.rounds, together
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
