"""Training steps: ours packed and padded, transformers padded with its own loss, and the loader by itself.

    python benchmarks/training.py                                  # SmolVLM-256M's shape on this CPU, float32
    python benchmarks/training.py --precision bfloat16 --documents 8
    python benchmarks/training.py --device cuda --documents 128 --peak-flops 989e12
    python benchmarks/training.py --quick --shape tiny

All systems learn from the same documents, of uneven length, an image in every second one, with the same
optimizer, precision and clipping; weights are random, shapes real. Only what answers is supervised. Tokens
a second count documents, never padding: supervised ones, and all. MFU is the FLOPs that the documents need
(`training/flops.py`: no padding, each document by itself) a second, over --peak-flops or over what a product
of large matrices reaches here. Peak memory is the whole process's on a CPU. The loader's row is one worker's.
Each system runs in a process of its own, all in turn, medians are shown, the last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: find the repository's packages, not this folder's files
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.common import (
    base_parser,
    finish,
    integers,
    median,
    memory_now,
    memory_peak,
    names,
    positive,
    reset_peak,
    table,
    trim,
)
from benchmarks.shapes import SHAPES
from benchmarks.workers import interleave, serve

TRAINERS = ("ours-packed", "ours-padded", "transformers")
DEFAULTS = {  # by device: documents of a step, positions of a packed row, rows of a batch, packed rows of one
    "cpu": {"documents": 6, "row": 2048, "micro_batch": 6, "packed_micro_batch": 1, "steps": 2},
    "cuda": {"documents": 128, "row": 4096, "micro_batch": 16, "packed_micro_batch": 4, "steps": 10},
}
COLUMNS = {
    "system": "system",
    "precision": "precision",
    "supervised_tokens_per_second": "supervised/s:,.1f",
    "tokens_per_second": "tokens/s:,.1f",
    "fill": "fill:.0%",
    "seconds_per_step": "s/step:.2f",
    "mfu": "MFU:.1%",
    "peak_mebibytes": "peak MiB:,.0f",
    "speed_over": "x transformers:.2f",
    "memory_over": "x its memory:.2f",
    "samples_per_second": "samples/s:,.1f",
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = base_parser(__doc__)
    add = parser.add_argument
    add("--precision", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on CUDA")
    add("--systems", type=names(*TRAINERS, "loader"), metavar="S,S", help="default: all")
    add("--documents", type=positive, metavar="N", help="of one optimizer step (default 6; 128 on CUDA)")
    add("--tiles", type=integers, default=[1, 0], metavar="N,N", help="of their images (default 1,0)")
    add("--row", type=positive, metavar="N", help="positions of a packed row (default 2048; 4096 on CUDA)")
    add("--micro-batch", type=positive, metavar="N", help="padded rows of a batch (default 6; 16 on CUDA)")
    add("--packed-micro-batch", type=positive, metavar="N", help="packed rows of one (default 1; 4 on CUDA)")
    add("--steps", type=positive, metavar="N", help="timed, in each round (default 2; 10 on CUDA)")
    add("--workers", type=int, default=1, metavar="N", help="of the loader; 0: its own process (default 1)")
    add("--batches", type=positive, default=32, metavar="N", help="that the loader makes (default 32)")
    add("--peak-flops", type=float, metavar="F", help="of the device; default: measured by a matrix product")
    add("--compile", action=argparse.BooleanOptionalAction, help="our blocks (default: on CUDA)")
    settings = parser.parse_args(arguments)
    for name, value in DEFAULTS[settings.device].items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    cpu = settings.device == "cpu"
    settings.precision = settings.precision or ("float32" if cpu else "bfloat16")
    settings.compile = not cpu if settings.compile is None else settings.compile
    settings.systems = settings.systems or [*TRAINERS, "loader"]
    config = SHAPES[settings.shape]
    settings.row = min(settings.row, config.text.max_position_embeddings)
    if settings.quick:
        settings.rounds, settings.steps, settings.workers, settings.batches = 1, 1, 0, 2
        settings.documents = min(settings.documents, 4)
    if not settings.tiles or min(settings.tiles) < 0:
        parser.error(f"--tiles: expected numbers from 0 up, got {settings.tiles}")
    if max(settings.tiles) * config.tokens_per_tile + 16 > settings.row:
        parser.error(f"--tiles: {max(settings.tiles)} do not fit into a row of {settings.row} positions")
    if settings.workers < 0:
        parser.error(f"--workers: expected 0 or more, got {settings.workers}")
    return settings


def make_setups(settings: argparse.Namespace) -> list[dict]:
    keys = ("threads", "device", "shape", "precision", "row", "micro_batch", "packed_micro_batch", "compile")
    shared = {key: getattr(settings, key) for key in (*keys, "tiles")}
    shared["photo"] = (
        SHAPES[settings.shape].vision.image_size * 3 // 2
    )  # pixels that are read, then scaled down
    wanted = ["peak", *settings.systems] if settings.peak_flops is None else settings.systems
    return [{"name": system, "system": system, **shared} for system in wanted]


def make_jobs(settings: argparse.Namespace, setup: dict) -> list[dict]:
    if setup["system"] == "peak":
        return [{"side": 256 if settings.shape == "tiny" else {"cpu": 2048, "cuda": 8192}[settings.device]}]
    if setup["system"] == "loader":
        return [{"workers": settings.workers, "batches": settings.batches}]
    return [{"documents": settings.documents, "tiles": settings.tiles, "steps": settings.steps}]


# ------------------------------------------------------------------------------------------- the child


def make_handler(setup: dict):
    """Answers jobs with one system, with the memory that they took."""
    torch.set_num_threads(setup["threads"])
    from benchmarks.training_steps import SYSTEMS

    device = setup["device"]
    before = memory_now(device)
    system = SYSTEMS[setup["system"]](setup)
    trim()

    def handle(job: dict) -> dict:
        reset_peak(device)
        reply = system.run(job)
        return reply | {"peak_bytes": memory_peak(device), "before_bytes": before}

    return handle


# -------------------------------------------------------------------------------------------- the table


def make_row(settings: argparse.Namespace, system: str, replies: list[dict], peak: float) -> dict:
    """One line: medians over the rounds. Lower rounds of memory hold less of what an allocator keeps."""
    same = {"system": system, "precision": settings.precision, "device": settings.device}
    same |= {"shape": settings.shape, "rounds": len(replies)}

    def rate(name: str) -> float | None:
        return median(reply[name] / reply["seconds"] for reply in replies)

    if system == "loader":
        workers = max(1, settings.workers)
        return same | {
            "precision": None,
            "workers": settings.workers,
            "samples_per_second": rate("samples") / workers,
            "loader_tokens_per_second": rate("tokens") / workers,
            "tiles_per_second": rate("tiles") / workers,
            "fill": median(reply["fill"] for reply in replies),
        }
    memory = min(reply["peak_bytes"] for reply in replies)
    return same | {
        "documents_per_step": settings.documents,
        "steps": settings.steps,
        "labelled_tokens": [reply["labelled"] for reply in replies],
        "tokens": [reply["tokens"] for reply in replies],
        "tiles": [reply["tiles"] for reply in replies],
        "loss": [reply["loss"] for reply in replies],
        "supervised_tokens_per_second": rate("labelled"),
        "tokens_per_second": rate("tokens"),
        "documents_per_second": settings.documents * settings.steps / median(r["seconds"] for r in replies),
        "fill": median(reply["tokens"] / reply["positions"] for reply in replies),
        "seconds_per_step": median(reply["seconds"] / settings.steps for reply in replies),
        "seconds_of_rounds": [reply["seconds"] for reply in replies],
        "flops_per_second": rate("flops"),
        "mfu": rate("flops") / peak,
        "peak_bytes": memory,
        "peak_mebibytes": memory / 2**20,
        "before_model_bytes": min(reply["before_bytes"] for reply in replies),
    }


def compare(rows: list[dict]) -> None:
    """Add how speed and memory stand to transformers', and how many workers feed each trainer."""
    by_system = {row["system"]: row for row in rows}
    theirs, loader = by_system.get("transformers"), by_system.get("loader")
    for row in rows:
        if row["system"] == "loader":
            continue
        if theirs is not None and row is not theirs:
            # The same documents in each round: a ratio for each, then their median.
            pairs = zip(theirs["seconds_of_rounds"], row["seconds_of_rounds"])
            row["speed_over"] = median(other / own for other, own in pairs)
            row["memory_over"] = row["peak_bytes"] / theirs["peak_bytes"]
        if loader is not None:
            row["loader_workers_needed"] = row["documents_per_second"] / loader["samples_per_second"]


def main(arguments: list[str] | None = None) -> int:
    settings = parse_arguments(arguments)
    if settings.child:
        serve(settings.child, make_handler)
        return 0
    setups = make_setups(settings)
    # One model in memory at a time: training takes four times its weights, and activations.
    replies, failed = interleave(
        __file__, setups, lambda setup: make_jobs(settings, setup), settings.rounds, together=False
    )
    by_system = {setup["system"]: own[0] for setup, own in zip(setups, replies, strict=True)}
    measured = by_system.pop("peak", [])
    if settings.peak_flops is None and not measured:
        print(f"benchmarks/training.py: error: {failed[0]}", file=sys.stderr)
        return 1
    peak = settings.peak_flops or max(reply["flops_per_second"] for reply in measured)
    rows = [make_row(settings, system, own, peak) for system, own in by_system.items() if own]
    compare(rows)
    how = "given" if settings.peak_flops else "measured"
    print(f"{settings.shape} on {settings.device}: a peak of {peak / 1e12:.3g} TFLOP/s ({how})")
    print(table(COLUMNS, rows))
    left_out = {setups[system]["name"]: reason for system, reason in failed.items()}
    finish("training", settings, rows, peak_flops=peak, peak_is=how, left_out=left_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
