"""C files of this folder, compiled once for this machine and opened.

library = load_library("decode.c", ("-DWEIGHT_BITS=32", "-DCACHE_BITS=32"), declare)

The compiler is `$CC`, or the first of cc, gcc and clang on the path. Libraries are kept in a cache folder. A
library's name carries a hash of the source, the flags, the compiler and the processor, so that a change in
any of them compiles anew. The SHA-256 of its bytes is appended to the file: a library that was cut short
would end the process that runs it, so one that is damaged, or belongs to another user, is compiled anew too.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
# Sums are vectorised by hand and stay as they are written, so that a row's result is the same in any batch.
# NaN and infinity keep their meaning.
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
FLAGS = ("-O3", _NATIVE, "-fopenmp", "-fPIC", "-shared", "-std=gnu11", "-fno-math-errno",
         "-fno-trapping-math", "-ffp-contract=off", "-Wno-psabi")  # fmt: skip


class NoCompiler(RuntimeError):
    """Nothing can be compiled here; eager code runs instead."""


def cache_folder() -> Path:
    """The folder of compiled libraries: $OCELLI_CACHE, or ocelli/ in your cache folder."""
    if own := os.environ.get("OCELLI_CACHE"):
        return Path(own).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")  # by its standard, empty or relative means unset
    try:
        return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "ocelli"
    except RuntimeError:
        raise NoCompiler("there is no home folder to keep compiled libraries in: set OCELLI_CACHE") from None


def find_compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    raise NoCompiler("no C compiler found (tried $CC, cc, gcc, clang)")


def _openmp_library() -> list[str]:
    """PyTorch's own OpenMP runtime, so that both share one set of threads instead of two that fight."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(found[0]), f"-Wl,-rpath,{found[0].parent}"] if found else []


def library_file(source: str, options: tuple[str, ...]) -> tuple[str, Path]:
    """(compiler, where the library of a C file and these options is or will be). Raises NoCompiler."""
    compiler = find_compiler()
    texts = [path.read_bytes() for path in (FOLDER / source, *sorted(FOLDER.glob("*.h")))]
    parts = (texts, FLAGS, options, compiler, torch.__version__, processor())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    return compiler, cache_folder() / f"{Path(source).stem}-{key[:24]}.so"


@cache
def load_library(
    source: str, options: tuple[str, ...], declare: Callable[[ctypes.CDLL], None]
) -> ctypes.CDLL:
    """The library of a C file in this folder, opened once.

    Args:
        options: the compiler's, after FLAGS.
        declare: gives the library's functions their argument types; AttributeError if it lacks one.

    Raises NoCompiler if there is no compiler, it fails, or the library cannot be kept or opened.
    """
    compiler, target = library_file(source, options)
    if is_sound(target):
        with suppress(OSError, AttributeError):  # made against another C library, say
            return _open(target, declare)
    try:
        _compile(compiler, source, options, target)
    except subprocess.SubprocessError as error:
        raise NoCompiler(f"{compiler} could not compile {source}: {error}") from error
    except OSError as error:
        raise NoCompiler(
            f"the compiled library cannot be kept in {target.parent} ({error.strerror or error}): "
            "set OCELLI_CACHE to another folder"
        ) from error
    try:
        return _open(target, declare)
    except (OSError, AttributeError) as error:
        raise NoCompiler(f"the library that {compiler} made cannot be opened: {error}") from error


def is_compiled(parts: tuple[str, tuple[str, ...]]) -> bool:
    """Whether the library of a C file and these options exists already. Raises NoCompiler."""
    return is_sound(library_file(*parts)[1])


def is_sound(library: Path) -> bool:
    """Whether a library is there with the bytes that were written, and belongs to this user or to root."""
    try:
        with library.open("rb") as file:
            owner, content = os.fstat(file.fileno()).st_uid, file.read()
    except OSError:
        return False
    return owner in (0, os.geteuid()) and content[-32:] == hashlib.sha256(content[:-32]).digest()


def _open(library: Path, declare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL:
    """Raises OSError for what is no library, AttributeError for one without our functions."""
    opened = ctypes.CDLL(str(library))
    declare(opened)
    return opened


def digest_of(library: ctypes.CDLL) -> str:
    """The SHA-256 of an opened library's bytes, which are what the compiler made of the source."""
    return Path(library._name).read_bytes()[-32:].hex()


def processor() -> str:
    """The processor's model and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _compile(compiler: str, source: str, options: tuple[str, ...], target: Path) -> None:
    """Under a temporary name first: two processes may compile the same library at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise PermissionError(errno.EACCES, "noexec: it may not hold programs")
        draft = Path(folder) / target.name
        inputs = [str(FOLDER / source), *_openmp_library(), "-lm"]
        command = [compiler, *FLAGS, *options, "-o", str(draft), *inputs]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            reason = errors[0] if errors else done.stderr[:200]
            raise NoCompiler(f"{compiler} could not compile {source}: {reason.strip()}")
        content = draft.read_bytes()
        draft.write_bytes(content + hashlib.sha256(content).digest())
        draft.replace(target)


def library_parts(weight_bits: int, cache_bits: int | None = None) -> tuple[str, tuple[str, ...]]:
    """The C file for weights of 32, 16, 8 or 4 bits and a cache of 32 or 16 bits, and the options that it is
    compiled with. None: the cache that a model with these weights has."""
    cache_bits = cache_bits or max(16, weight_bits)
    return "decode.c", (f"-DWEIGHT_BITS={weight_bits}", f"-DCACHE_BITS={cache_bits}")
