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
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES

PRECISIONS = ("float32", "bfloat16", "int8")
RESULTS = Path(__file__).resolve().parent / "results"
ISA = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
)

Handler = Callable[[dict], dict | None]  # a job -> a reply, None where the system cannot do it


# -------------------------------------------------------------------------------------------- hardware
def hardware(device: str, threads: int) -> dict:
    """The machine in words."""
    name, flags = platform.processor() or platform.machine(), set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                flags.update(value.split())
            elif key.strip() == "model name":
                name = value.strip()
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": threads,
        "isa": [flag for flag in ISA if flag in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
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


def _status_bytes(field: str) -> int | None:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)


def memory_now(device: str) -> int:
    """Bytes this process has now, of the GPU or of main memory."""
    return torch.cuda.memory_allocated() if device == "cuda" else _status_bytes("VmRSS") or memory_peak("cpu")


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
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ------------------------------------------------------------------------------------------- processes
class Unavailable(RuntimeError):
    """This system cannot run here; the message says why."""


def _serve(connection, make: Callable[[dict], Handler], setup: dict) -> None:
    """The child's side: make a system of the setup, then answer jobs until the parent hangs up."""
    try:
        handle = make(setup)
    except Unavailable as error:
        connection.send(str(error))
        return
    connection.send(None)
    while (job := connection.recv()) is not None:
        connection.send(handle(job))


class Worker:
    """The parent's side of one child. It starts with the first job, and again after `close`."""

    def __init__(self, make: Callable[[dict], Handler], setup: dict):
        self.make, self.setup = make, setup
        self.process: Any = None
        self.connection: Any = None

    def ask(self, job: dict) -> dict:
        """Raises Unavailable: the child cannot make its system, or has died."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            # A child reads these when it imports torch.
            os.environ |= {"OMP_NUM_THREADS": str(self.setup["threads"]), **self.setup.get("environment", {})}
            self.process = context.Process(target=_serve, args=(theirs, self.make, self.setup))
            self.process.start()
            theirs.close()
            if (problem := self._receive()) is not None:
                raise Unavailable(problem)
        self.connection.send(job)
        return self._receive()

    def _receive(self):
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            raise Unavailable(f"its process ended with status {self.process.exitcode}") from None

    def close(self) -> None:
        if self.process is not None:
            if self.process.is_alive():
                self.connection.send(None)
            self.process.join()
            self.connection.close()
            self.process = self.connection = None


def take_turns(
    make: Callable[[dict], Handler],
    setups: Iterable[dict],
    jobs: Callable[[dict], list[dict]],
    rounds: int,
    together: bool,
) -> tuple[list[list[list[dict]]], dict[int, str]]:
    """Ask every system for its jobs, round after round, in turn.

    Args:
        make: a setup -> what answers jobs; a function of a module, as it is called in the child.
        setups: of the systems, each with "name" and "threads".
        jobs: a setup -> its jobs; each is sent with its "round", from 0.
        together: keep all children alive, change the system after each job, and do all rounds of a job before
            the next one, so that what a child has in its cache is there in the next round. Otherwise a child
            ends when its turn is over, and only one model is in memory.

    Returns:
        replies[system][job], one for each round; and by system why it dropped out.
    """
    workers = [Worker(make, setup) for setup in setups]
    todo = [jobs(worker.setup) for worker in workers]
    replies: list[list[list[dict]]] = [[[] for _ in own] for own in todo]
    failed: dict[int, str] = {}
    order = [
        (n, system, job) for n in range(rounds) for system, own in enumerate(todo) for job in range(len(own))
    ]
    if together:
        order.sort(key=lambda place: (place[2], place[0]))
    try:
        for place, (number, system, job) in enumerate(order):
            if system in failed:
                continue
            name = workers[system].setup["name"]
            print(f"round {number + 1}/{rounds}: {name}: {todo[system][job]}", file=sys.stderr)
            try:
                replies[system][job].append(workers[system].ask(todo[system][job] | {"round": number}))
            except Unavailable as error:
                failed[system] = str(error)
                print(f"left out: {name}: {error}", flush=True)
            last = place + 1 == len(order) or order[place + 1][:2] != (number, system)
            if system in failed or (last and not together):
                workers[system].close()
    finally:
        for worker in workers:
            worker.close()
    return replies, failed


# ------------------------------------------------------------------------------------- options, results
def base_parser(description: str, precision: bool = False) -> argparse.ArgumentParser:
    """The options that all benchmarks have, and --precision for those that run in one at a time."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="SmolVLM-256M", help="model shape (default SmolVLM-256M)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="device (default cpu)")
    add("--rounds", type=positive, default=3, metavar="N", help="repetitions; medians are shown (default 3)")
    add("--threads", type=positive, default=torch.get_num_threads(), metavar="N", help="CPU threads")
    add("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    add("--quick", action="store_true", help="one round of little work, to see whether it runs")
    if precision:
        add("--precision", choices=PRECISIONS, default="float32", help="weights (default float32)")
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


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


def median(values: Iterable[float | None]) -> Any:
    """Of the values that are not None; None where there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def table(columns: dict[str, str], rows: list[dict]) -> str:
    """Rows as text. `columns` is key -> "title:format", e.g. "ms:.2f"; None is shown as a dash."""
    lines = [[title.partition(":")[0] for title in columns.values()]]
    for row in rows:
        cells = [(row.get(key), title.partition(":")[2]) for key, title in columns.items()]
        lines.append(["-" if value is None else format(value, form) for value, form in cells])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


def finish(benchmark: str, settings: argparse.Namespace, rows: list[dict], **more) -> None:
    """Save where requested, and end with the one JSON line."""
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
