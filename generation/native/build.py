"""Compile decode.c for this machine, once, into a cache folder.

The compiler is `$CC`, or the first of cc, gcc and clang on the path. A library's name carries a hash of the
source, the flags, the compiler and the processor: a changed one is compiled anew, a known one opens at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("decode.c")
_SOURCES = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
# Sums are vectorised by hand and stay as they are written: a row's result is the same in any batch. NaN and
# infinity keep their meaning.
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=gnu11", "-fno-math-errno",
         "-fno-trapping-math", "-Wno-psabi")  # fmt: skip


class NoCompiler(RuntimeError):
    """The step cannot be compiled here; the eager one runs instead."""


def cache_folder() -> Path:
    """Where compiled libraries are kept: $OCELLI_CACHE, or ocelli/ in the user's cache folder."""
    if "OCELLI_CACHE" in os.environ:
        return Path(os.environ["OCELLI_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ocelli"


def find_compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    raise NoCompiler("no C compiler found (tried $CC, cc, gcc, clang)")


def _openmp_library() -> list[str]:
    """PyTorch's own OpenMP runtime, so that both share one set of threads instead of two that fight."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(found[0]), f"-Wl,-rpath,{found[0].parent}"] if found else []


def library_file(weight_bits: int, cache_bits: int) -> tuple[str, tuple[str, ...], Path]:
    """(compiler, its defines, where the library is or will be). Raises NoCompiler."""
    compiler = find_compiler()
    defines = (f"-DWEIGHT_BITS={weight_bits}", f"-DCACHE_BITS={cache_bits}")
    key = hashlib.sha256()
    sources = [path.read_bytes() for path in _SOURCES]
    for part in (sources, FLAGS, defines, compiler, torch.__version__, _processor()):
        key.update(repr(part).encode())
    return compiler, defines, cache_folder() / f"decode-{key.hexdigest()[:24]}.so"


@cache
def load_library(weight_bits: int, cache_bits: int) -> ctypes.CDLL:
    """The compiled step for one weight type (32, 16 or 8 bits) and one cache type (32 or 16).

    Raises:
        NoCompiler: no compiler, or it fails.
    """
    compiler, defines, target = library_file(weight_bits, cache_bits)
    if not target.is_file():
        _compile(compiler, defines, target)
    return ctypes.CDLL(str(target))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(compiler: str, defines: tuple[str, ...], target: Path) -> None:
    """Under a temporary name first: two processes may compile the same library at once."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            draft = Path(folder) / target.name
            command = [compiler, *FLAGS, *defines, str(SOURCE), "-o", str(draft), *_openmp_library(), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                reason = next(
                    (line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200]
                )
                raise NoCompiler(f"{compiler} could not compile {SOURCE.name}: {reason.strip()}")
            draft.replace(target)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoCompiler(f"{compiler} could not compile {SOURCE.name}: {error}") from error
