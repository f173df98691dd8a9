"""How fast this machine reads memory: the floor under a decode step's time.

A core is given more by memory when it reads in several places at once, so several ways of reading are tried
and the fastest counts; each is the median of some passes, as decode speeds are medians.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import now
from generation.native.build import NoCompiler, find_compiler

SOURCE = Path(__file__).with_name("read_memory.c")
STREAMS = (1, 2, 4, 8)
PASSES = 8


def read_bandwidth(device: str, size: int) -> float:
    """Bytes a second that all threads read.

    Args:
        device: "cpu" or "cuda".
        size: bytes of the buffer: more than any cache holds.
    """
    buffer = torch.ones(64, size // 256, device=device)
    with reader() if device == "cpu" else no_reader() as read:
        ways: list[Callable[[], object]] = [lambda: buffer.sum(1)]
        if read is not None:
            ways += [lambda streams=streams: read(buffer, streams) for streams in STREAMS]
        return max(speed(way, buffer, device) for way in ways)


def speed(way: Callable[[], object], buffer: Tensor, device: str) -> float:
    """Bytes a second of one way of reading."""
    seconds = []
    for _ in range(PASSES):
        start = now(device)
        way()
        seconds.append(now(device) - start)
    return buffer.nbytes / statistics.median(seconds)


@contextmanager
def no_reader() -> Iterator[None]:
    yield None


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
