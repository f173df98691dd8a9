"""How fast this machine reads memory: the floor under a decode step's time.

A core is given more by memory when it reads in several places at once, so several ways of reading are tried.
Each is the median of some passes, as decode speeds are medians; over all rounds, the fastest way counts.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import now
from generation.fast.native.step import NoCompiler, find_compiler

SOURCE = Path(__file__).with_name("read_memory.c")
STREAMS = (1, 2, 4, 8)
PASSES = 8


def read_bandwidth(device: str, size: int) -> dict[str, float]:
    """Bytes a second that all threads read, by way of reading: PyTorch's sum, and 1 to 8 streams a thread.

    Args:
        device: "cpu" or "cuda".
        size: bytes of the buffer: more than any cache holds.
    """
    buffer = torch.ones(64, size // 256, device=device)
    speeds = {"sum": speed(lambda: buffer.sum(1), buffer, device)}
    if device == "cpu":
        with reader() as read:
            for streams in STREAMS if read is not None else ():
                speeds[f"{streams} streams"] = speed(partial(read, buffer, streams), buffer, device)
    return speeds


def speed(way: Callable[[], object], buffer: Tensor, device: str) -> float:
    """Bytes a second of one `way` of reading all of `buffer`."""
    seconds = []
    for _ in range(PASSES):
        start = now(device)
        way()
        seconds.append(now(device) - start)
    return buffer.nbytes / statistics.median(seconds)


@contextmanager
def reader() -> Iterator[Callable[[Tensor, int], int] | None]:
    """A function (buffer, streams) that reads in C; None where nothing compiles."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "read_memory.so"
        flags = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
        try:
            subprocess.run([find_compiler(), *flags, SOURCE, "-o", library], check=True, capture_output=True)
            function = ctypes.CDLL(str(library)).read_memory
        except (NoCompiler, OSError, subprocess.CalledProcessError):
            yield None
            return
        function.restype = ctypes.c_uint64
        function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)

        def read(buffer: Tensor, streams: int) -> int:
            return function(buffer.data_ptr(), buffer.nbytes // 32, streams, torch.get_num_threads())

        yield read
