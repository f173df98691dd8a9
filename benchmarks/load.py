"""Speed where others want the processors, too: beside a busy process on each, and in a quota of a cgroup.

    python -m benchmarks.load                                        # SmolVLM-256M's shape
    python -m benchmarks.load --shape ocelli-shapes --tokens 400 --precisions float32,int8
    python -m benchmarks.load --systems ours-fast,ours-one-thread --quotas ""

Every system has as many threads as it takes by itself, one for each processor, but for "ours-one-thread".
"ours-never-loaded" is measured only while nothing else runs: what the others had to do before shall not
show afterwards. Quotas need a cgroup that may be written, as root has it. All systems take turns, medians are
shown, the last line is JSON. llama.cpp takes part if requirements-bench.txt is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import (
    PRECISIONS,
    Handler,
    Unavailable,
    base_parser,
    finish,
    fit_together,
    median,
    names,
    shared_setup,
    take_turns,
)
from benchmarks.peers import LlamaCpp, Transformers
from benchmarks.shapes import prompt_tokens
from benchmarks.systems import Ours
from generation import threads
from inference.cli import positive

SYSTEMS = {
    "ours-fast": Ours,
    "ours-never-loaded": Ours,
    "ours-one-thread": Ours,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}
CONDITIONS = ("quiet", "busy", "quiet again")
SETTLE = 0.3  # seconds from the start of other processes until the clock starts
COLUMNS = {
    "condition": "condition",
    "precision": "precision",
    "system": "system",
    "decode_tokens_per_second": "tokens/s:.1f",
    "first_token_seconds": "first token s:.3f",
    "over_one_thread": "x one thread:.2f",
    "over_never_loaded": "x never loaded:.3f",
    "over_transformers": "x transformers:.2f",
    "over_llama": "x llama.cpp:.2f",
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = base_parser(__doc__)
    add = parser.add_argument
    default = ["float32", "int8"]
    add("--precisions", type=names(*PRECISIONS), default=default, metavar="P,P", help="of the weights")
    add("--systems", type=names(*SYSTEMS), default=list(SYSTEMS), metavar="S,S", help="default all")
    add("--tokens", type=positive, default=48, metavar="N", help="decode steps that are timed (default 48)")
    quotas = [1.0, 0.5]
    add("--quotas", type=numbers, default=quotas, metavar="Q,Q", help="in processors (default 1,0.5)")
    settings = parser.parse_args(arguments)
    if settings.device != "cpu":
        parser.error(f"--device: expected cpu, got {settings.device}: a GPU does not share its threads")
    if settings.quick:
        settings.rounds, settings.tokens, settings.quotas = 1, 8, []
    return settings


def numbers(text: str) -> list[float]:
    """ "1,0.5" -> [1.0, 0.5]; "" -> []."""
    return [float(part) for part in text.split(",") if part]


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that do nothing but take time."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        time.sleep(SETTLE)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def enter_quota(processors: float) -> None:
    """From now on this process has so much time in each 0.1 s, all its threads together.

    Raises Unavailable where no cgroup may be written.
    """
    root, allowed = Path("/sys/fs/cgroup"), int(processors * 100_000)
    folder = root / "cpu" if (root / "cpu").is_dir() else root
    folder = folder / f"ocelli-benchmark-{processors:g}"
    try:
        folder.mkdir(exist_ok=True)
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{allowed} 100000")
        else:
            (folder / "cpu.cfs_quota_us").write_text(str(allowed))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise Unavailable(f"no quota here: {error}") from None


def make_setups(settings: argparse.Namespace, folder: str) -> list[dict]:
    """Each system in each precision, without a quota and in each one."""
    shared = shared_setup(settings) | {"folder": folder}
    shared["longest"] = prompt_tokens(settings.shape, 1) + settings.tokens + 8
    shared["environment"] = {"OMP_NUM_THREADS": None}  # as who starts it without further thought
    return [
        {"system": system, "precision": precision, "quota": quota, **shared}
        for quota in (None, *settings.quotas)
        for precision in settings.precisions
        for system in settings.systems
        if (precision != "int8" or system != "transformers") and (not quota or system != "ours-never-loaded")
    ]


def make_jobs(settings: argparse.Namespace, setup: dict) -> list[dict]:
    conditions = (f"quota {setup['quota']:g}",) if setup["quota"] else CONDITIONS
    return [
        {"condition": condition, "tokens": settings.tokens}
        for condition in conditions
        if condition != "busy" or setup["system"] != "ours-never-loaded"
    ]


def make_handler(setup: dict) -> Handler:
    """The child's side: a system that chooses its threads as it does for its users."""
    if setup["quota"]:
        enter_quota(setup["quota"])
    if setup["system"].startswith("ours"):
        threads.choose(1 if setup["system"] == "ours-one-thread" else None)
    else:
        torch.set_num_threads(setup["threads"])
    ours = setup["system"].startswith("ours")
    system: Any = SYSTEMS[setup["system"]](setup | ({"system": "ours-fast"} if ours else {}))
    image = iter(range(1_000_000))

    def measure(tokens: int) -> dict:
        decoded = system.decode(prompt_tokens(setup["shape"], 1), tokens, 1, 1)
        first = system.first_token(1, next(image))
        return {**decoded, "first": first.get("total")}

    measure(8)

    def handle(job: dict) -> dict:
        with busy(os.cpu_count() or 1) if job["condition"] == "busy" else contextlib.nullcontext():
            return measure(job["tokens"])

    return handle


def make_rows(settings: argparse.Namespace, setups: list[dict], replies) -> list[dict]:
    rows: list[dict] = []
    for setup, own in zip(setups, replies, strict=True):
        for job, answers in zip(make_jobs(settings, setup), own, strict=True):
            if not answers:  # it dropped out
                continue
            seconds = [one["seconds"] / one["steps"] for one in answers]
            row = {key: setup[key] for key in ("system", "precision", "shape")}
            row |= {"condition": job["condition"], "decode_tokens_per_second": 1 / median(seconds)}
            row |= {"first_token_seconds": median(one["first"] for one in answers)}
            rows.append(row | {"seconds_of_rounds": seconds})
    peers = {
        "one_thread": "ours-one-thread",
        "never_loaded": "ours-never-loaded",
        "transformers": "transformers",
        "llama": "llama.cpp",
    }
    speed = {
        (row["condition"], row["precision"], row["system"]): row["decode_tokens_per_second"] for row in rows
    }
    for row in rows:
        for short, peer in peers.items():
            other = speed.get((row["condition"], row["precision"], peer))
            other = None if peer == row["system"] else other
            row[f"over_{short}"] = row["decode_tokens_per_second"] / other if other else None
    order = {condition: number for number, condition in enumerate(CONDITIONS)}
    return sorted(rows, key=lambda row: (order.get(row["condition"], 9), row["condition"], row["precision"]))


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
    finish("load", settings, COLUMNS, make_rows(settings, setups, replies), left_out=failed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
