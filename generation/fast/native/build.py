"""Compile decode.c for this machine, once, into a cache folder.

The compiler is `$CC`, or the first of cc, gcc and clang on the path. A library's name carries a hash of the
source, the flags, the compiler and the processor: a changed one is compiled anew, a known one opens at once.
Behind it stand the SHA-256 of its bytes: a file that was cut short ends the process that runs it, so one that
is not as it was written, or is somebody else's, is compiled anew, too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("decode.c")
_SOURCES = (SOURCE, *sorted(SOURCE.parent.glob("*.h")))
# Sums are vectorised by hand and stay as they are written: a row's result is the same in any batch. NaN and
# infinity keep their meaning.
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=gnu11", "-fno-math-errno",
         "-fno-trapping-math", "-Wno-psabi")  # fmt: skip


_DIGEST, _LARGEST = hashlib.sha256().digest_size, 2**26  # bytes; a library has some fifty thousand


class NoCompiler(RuntimeError):
    """The step cannot be compiled here; the eager one runs instead."""


def cache_folder() -> Path:
    """Where compiled libraries are kept: $OCELLI_CACHE, or ocelli/ in the user's cache folder."""
    if own := os.environ.get("OCELLI_CACHE"):
        return Path(own).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")  # empty or relative is as good as unset, says its standard
    try:
        return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "ocelli"
    except RuntimeError:
        raise NoCompiler("there is no home folder to keep the compiled step in: set OCELLI_CACHE") from None


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
        NoCompiler: no compiler, it fails, or what it makes cannot be kept or opened.
    """
    compiler, defines, target = library_file(weight_bits, cache_bits)
    if is_sound(target):
        with suppress(OSError, AttributeError):  # made against another C library, say
            return _open(target)
    _compile(compiler, defines, target)
    try:
        return _open(target)
    except (OSError, AttributeError) as error:
        raise NoCompiler(f"what {compiler} made of {SOURCE.name} cannot be opened: {error}") from error


def is_sound(library: Path) -> bool:
    """Whether a library is there, with the bytes that were written, and ours or the system's."""
    try:
        if not library.is_file():  # a pipe of that name would be waited for
            return False
        with library.open("rb") as file:
            owner, content = os.fstat(file.fileno()).st_uid, file.read(_LARGEST)
    except OSError:
        return False
    return owner in (0, os.geteuid()) and content[-_DIGEST:] == hashlib.sha256(content[:-_DIGEST]).digest()


def _open(library: Path) -> ctypes.CDLL:
    """Raises OSError: the system does not open it. AttributeError: it is something else."""
    opened = ctypes.CDLL(str(library))
    _ = opened.ocelli_decode, opened.ocelli_scratch_floats
    return opened


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
            if os.statvfs(folder).f_flag & os.ST_NOEXEC:
                raise NoCompiler(
                    f"{target.parent} may not hold programs (noexec): set OCELLI_CACHE to another"
                )
            draft = Path(folder) / target.name
            command = [compiler, *FLAGS, *defines, str(SOURCE), "-o", str(draft), *_openmp_library(), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                reason = next(
                    (line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200]
                )
                raise NoCompiler(f"{compiler} could not compile {SOURCE.name}: {reason.strip()}")
            content = draft.read_bytes()
            draft.write_bytes(content + hashlib.sha256(content).digest())
            draft.replace(target)
    except subprocess.SubprocessError as error:
        raise NoCompiler(f"{compiler} could not compile {SOURCE.name}: {error}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise NoCompiler(
            f"the compiled step cannot be kept in {target.parent} ({reason}): set OCELLI_CACHE to another"
        ) from error
