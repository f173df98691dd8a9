"""What the benchmarks share: hardware in words, memory, options, processes, tables, results.

Each system runs in a process of its own, and all take turns, so that what one does to memory or threads
reaches no other. A process that dies takes only its own system out of the run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.shapes import SHAPES, parameters
from generation.memory import available_bytes
from inference.cli import positive

PRECISIONS = ("float32", "bfloat16", "int8")
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, None: 0}  # of a weight
PROCESS_BYTES = 4e8  # of a child besides its weights
RESULTS = Path(__file__).resolve().parent / "results"
ISA = "avx2 fma avx512f avx512_vnni avx512_bf16 amx_bf16 amx_int8 asimd bf16 i8mm"

Handler = Callable[[dict], dict | None]  # a job -> a reply, None where the system cannot do it


# -------------------------------------------------------------------------------------------- hardware
def hardware(device: str, threads: int) -> dict:
    """The machine in words."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text() if cpuinfo.is_file() else ""
    known = dict(re.findall(r"^([^\n\t:]+)\s*: (.*)$", lines, re.M))  # of the last core
    flags = (known.get("flags") or known.get("Features") or "").split()
    return {
        "cpu": known.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "isa": [flag for flag in ISA.split() if flag in flags],
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def now(device: str) -> float:
    """Seconds, after the device has done all its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def trim() -> None:
    """Give what the allocator keeps back to the system, so that loading does not count as decoding."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def memory_now(device: str) -> int:
    """Bytes this process has now, of the GPU or of main memory."""
    return torch.cuda.memory_allocated() if device == "cuda" else psutil.Process().memory_info().rss


def reset_peak(device: str) -> None:
    """Begin a new peak. Where the kernel does not allow that, the peak is the whole process's."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")


def memory_peak(device: str) -> int:
    """Most bytes since `reset_peak`: of the GPU's allocator, or of the whole process, Python included."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(peak) * 1024


# ------------------------------------------------------------------------------------------- processes
class Unavailable(RuntimeError):
    """This system cannot run here; the message says why."""


_systems: list[Handler] = []  # in a child: its own, from the first job on


def _answer(make: Callable[[dict], Handler], setup: dict, job: dict) -> dict | None:
    if not _systems:
        _systems.append(make(setup))
    return _systems[0](job)


def take_turns(
    make: Callable[[dict], Handler],
    setups: list[dict],
    jobs: Callable[[dict], list[dict]],
    rounds: int,
    together: bool,
) -> tuple[list[list[list[Any]]], dict[str, str]]:
    """Ask every system for its jobs, round after round, in turn.

    Args:
        make: a setup -> what answers jobs; a function of a module, as it is called in the child.
        setups: of the systems, each with "system", "threads" and possibly "precision" and "environment", in
            which None is a variable that is not set.
        jobs: a setup -> its jobs; each is sent with its "round", from 0.
        together: keep all children alive, change the system after each job, and do all rounds of a job before
            the next one, so that what a child has in its cache is there in the next round. Otherwise a child
            ends when its turn is over, and only one model is in memory.

    Returns:
        replies[system][job], one for each round; and by name of a system why it dropped out.
    """
    todo = [jobs(setup) for setup in setups]
    replies: list[list[list[Any]]] = [[[] for _ in own] for own in todo]
    failed: dict[str, str] = {}
    children: dict[int, ProcessPoolExecutor] = {}
    order = [
        (n, system, job) for n in range(rounds) for system, own in enumerate(todo) for job in range(len(own))
    ]
    if together:
        order.sort(key=lambda place: (place[2], place[0]))
    try:
        for place, (number, system, job) in enumerate(order):
            setup = setups[system]
            name = " ".join(filter(None, (setup["system"], setup.get("precision"))))
            if name in failed:
                continue
            print(f"round {number + 1}/{rounds}: {name}: {todo[system][job]}", file=sys.stderr)
            # A child reads these when it imports torch.
            for key, value in {
                "OMP_NUM_THREADS": str(setup["threads"]),
                **setup.get("environment", {}),
            }.items():
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value
            if system not in children:
                children[system] = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            try:
                asked = children[system].submit(_answer, make, setup, todo[system][job] | {"round": number})
                replies[system][job].append(asked.result())
            except Exception as error:  # whatever a system dies of, the others go on
                failed[name] = str(error) if isinstance(error, Unavailable) else repr(error)
                print(f"left out: {name}: {failed[name]}", flush=True)
            last = place + 1 == len(order) or order[place + 1][:2] != (number, system)
            if name in failed or (last and not together):
                children.pop(system).shutdown()
    finally:
        for child in children.values():
            child.shutdown()
    return replies, failed


def fit_together(setups: list[dict]) -> bool:
    """Whether the models of all children fit into memory at the same time."""
    free = available_bytes(torch.device("cpu"))
    needed = sum(parameters(setup["shape"]) * BYTES[setup["precision"]] + PROCESS_BYTES for setup in setups)
    return free is None or needed < 0.8 * free


# ------------------------------------------------------------------------------------- options, results
def base_parser(description: str, precision: bool = False, rounds: int = 3) -> argparse.ArgumentParser:
    """The options that all benchmarks have, and --precision for those that run in one at a time."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="SmolVLM-256M", help="model shape (default SmolVLM-256M)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device (default cpu)")
    rounds_help = f"repetitions; medians are shown (default {rounds})"
    add("--rounds", type=positive, default=rounds, metavar="N", help=rounds_help)
    add("--threads", type=positive, default=torch.get_num_threads(), metavar="N", help="CPU threads")
    add("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    add("--quick", action="store_true", help="one round of little work, to see whether it runs")
    if precision:
        add("--precision", choices=PRECISIONS, default="float32", help="weights (default float32)")
    return parser


def integers(text: str) -> list[int]:
    """ "1,17" -> [1, 17]; "" -> []."""
    return [int(part) for part in text.split(",") if part]


def names(*allowed: str) -> Callable[[str], list[str]]:
    """An argument type: comma-separated names out of `allowed`."""

    def parse(text: str) -> list[str]:
        for name in text.split(","):
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"expected some of {','.join(allowed)}, got {name!r}")
        return text.split(",")

    return parse


def shared_setup(settings: argparse.Namespace, *keys: str) -> dict:
    """What the setups of all systems have in common."""
    return {key: getattr(settings, key) for key in ("threads", "device", "shape", *keys)}


def stop_without(needed: Collection[str], failed: dict[str, str]) -> None:
    """End the program where a system that the others are compared with has dropped out."""
    for name in needed:
        if name in failed:
            sys.exit(f"error: {name}: {failed[name]}")


def median(values: Iterable[float | None]) -> Any:
    """Of the values that are not None; None where there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def table(columns: dict[str, str], rows: list[dict]) -> str:
    """Rows as text. `columns` is key -> "title:format", e.g. "ms:.2f"; None is shown as a dash."""
    formats = {key: title.partition(":")[::2] for key, title in columns.items()}
    lines = [[title for title, _ in formats.values()]]
    for row in rows:
        values = [(row.get(key), form) for key, (_, form) in formats.items()]
        lines.append(["-" if value is None else format(value, form) for value, form in values])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def finish(
    benchmark: str, settings: argparse.Namespace, columns: dict[str, str], rows: list[dict], **more
) -> None:
    """Show the table, save where requested, and end with the one JSON line."""
    print(table(columns, rows))
    result = {
        "benchmark": benchmark,
        "hardware": hardware(settings.device, settings.threads) | more,
        "settings": {key: value for key, value in vars(settings).items() if key != "save"},
        "rows": rows,
    }
    if settings.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{settings.save}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
