"""What the benchmarks share: the hardware in words, memory, options, tables, results."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.shapes import SHAPES

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


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def now(device: str) -> float:
    """Seconds, after everything that was asked of the device is done."""
    synchronize(device)
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
    """Bytes this process has now: of the GPU, or of main memory."""
    return torch.cuda.memory_allocated() if device == "cuda" else _status_bytes("VmRSS") or memory_peak("cpu")


def reset_peak(device: str) -> None:
    """Begin a new peak. Where the kernel does not allow that, the peak is the whole process's."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")


def memory_peak(device: str) -> int:
    """Most bytes since `reset_peak`."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ------------------------------------------------------------------------------------- options, results


def base_parser(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="SmolVLM-256M", help="default SmolVLM-256M")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--rounds", type=positive, default=3, metavar="N", help="repetitions, medians are shown (default 3)")
    add("--threads", type=positive, default=torch.get_num_threads(), metavar="N", help="of the CPU")
    add("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    add("--quick", action="store_true", help="one round of little work: does it run?")
    add("--child", metavar="JSON", help=argparse.SUPPRESS)
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def integers(text: str) -> list[int]:
    """ "1,17" -> [1, 17]; "" -> []."""
    return [int(part) for part in text.split(",") if part]


def names(*allowed: str):
    """An argument type: comma-separated names, each one of `allowed`."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"expected some of {','.join(allowed)}, got {name!r}")
        return chosen

    return parse


def median(values) -> float | None:
    """Of the values that are there; None of none."""
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def table(header: dict[str, str], rows: list[dict]) -> str:
    """Rows of values as text. Args: header: key -> "title:format", e.g. "ms:.2f"; None is shown as a dash."""
    lines = [[title.partition(":")[0] for title in header.values()]]
    for row in rows:
        cells = []
        for key, title in header.items():
            value, form = row.get(key), title.partition(":")[2]
            cells.append("-" if value is None else format(value, form))
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column < 2 else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines
    )  # fmt: skip


def finish(benchmark: str, settings: argparse.Namespace, rows: list[dict], **more) -> None:
    """Save where asked to, and end with the one JSON line."""
    asked = {key: value for key, value in vars(settings).items() if key not in ("child", "save")}
    result = {
        "benchmark": benchmark,
        "hardware": hardware(settings.device, settings.threads) | more,
        "settings": asked,
        "rows": rows,
    }
    if settings.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{settings.save}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result), flush=True)
