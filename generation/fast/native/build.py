"""C files of this folder, compiled once for this machine and opened; their structs and functions for Python.

Tokens = structure("Tokens")                    # a ctypes.Structure with the fields that the C struct has
library = load_library("decode.c", 32)          # with 32-bit weights; its functions know their arguments

The compiler is `$CC`, or the first of cc, gcc and clang on the path. Libraries are kept in a cache folder. A
library's name carries a hash of the source, the flags, the compiler and the processor, so that a change in
any of them compiles anew. The SHA-256 of its bytes is appended to the file: a library that was cut short
would end the process that runs it, so one that is damaged, or belongs to another user, is compiled anew too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

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


def library_file(source: str, weight_bits: int, cache_bits: int | None) -> tuple[str, list[str], Path]:
    """(the compiler, its options, where the library of a C file is or will be). Raises NoCompiler."""
    compiler = find_compiler()
    options = [*FLAGS, f"-DWEIGHT_BITS={weight_bits}", f"-DCACHE_BITS={cache_bits or max(16, weight_bits)}"]
    texts = [path.read_bytes() for path in (FOLDER / source, *sorted(FOLDER.glob("*.h")))]
    parts = (texts, options, compiler, torch.__version__, processor())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    return compiler, options, cache_folder() / f"{Path(source).stem}-{key[:24]}.so"


@cache
def load_library(source: str, weight_bits: int, cache_bits: int | None = None) -> ctypes.CDLL:
    """The library of a C file in this folder, opened once.

    Args:
        weight_bits: 32, 16, 8 or 4.
        cache_bits: 32 or 16. None: those of the cache that a model with these weights has.

    Raises NoCompiler if there is no compiler, it fails, or the library cannot be kept or opened.
    """
    compiler, options, target = library_file(source, weight_bits, cache_bits)
    if is_sound(target):
        with suppress(OSError):  # made against another C library, say
            return _open(target)
    try:
        _compile([compiler, *options], source, target)
    except subprocess.SubprocessError as error:
        raise NoCompiler(f"{compiler} could not compile {source}: {error}") from error
    except OSError as error:
        raise NoCompiler(
            f"the compiled library cannot be kept in {target.parent} ({error.strerror or error}): "
            "set OCELLI_CACHE to another folder"
        ) from error
    try:
        return _open(target)
    except OSError as error:
        raise NoCompiler(f"the library that {compiler} made cannot be opened: {error}") from error


def is_compiled(source: str, weight_bits: int, cache_bits: int | None = None) -> bool:
    """Whether the library of a C file exists already. Raises NoCompiler."""
    return is_sound(library_file(source, weight_bits, cache_bits)[-1])


def is_sound(library: Path) -> bool:
    """Whether a library is there with the bytes that were written, and belongs to this user or to root."""
    try:
        with library.open("rb") as file:
            owner, content = os.fstat(file.fileno()).st_uid, file.read()
    except OSError:
        return False
    return owner in (0, os.geteuid()) and content[-32:] == hashlib.sha256(content[:-32]).digest()


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


def _compile(command: list[str], source: str, target: Path) -> None:
    """Under a temporary name first: two processes may compile the same library at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:  # said at once, not after each compilation
            raise PermissionError("noexec: it may not hold programs")
        draft = Path(folder) / target.name
        inputs = [str(FOLDER / source), *_openmp_library(), "-lm"]
        done = subprocess.run(
            [*command, "-o", str(draft), *inputs], capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            reason = errors[0] if errors else done.stderr[:200]
            raise NoCompiler(f"{command[0]} could not compile {source}: {reason.strip()}")
        content = draft.read_bytes()
        draft.write_bytes(content + hashlib.sha256(content).digest())
        draft.replace(target)


# ---------------------------------------------------------------------------- structs and functions of C

_TEXT = re.sub(
    r"/\*.*?\*/", "", "".join(path.read_text() for path in sorted(FOLDER.glob("*.[ch]"))), flags=re.DOTALL
)
_NUMBERS = {"int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}


@cache
def structure(name: str) -> type[ctypes.Structure]:
    """A struct of the C files, with the fields that it has there. A field that points to structs or int64_t
    takes an array of them, every other pointer an address."""
    (body,) = re.findall(rf"typedef struct {{([^}}]*)}} {name};", _TEXT)
    fields = [
        (field.strip(" *\n"), _type_of(kind, "*" in field, {"int64_t"}))
        for kind, declared in re.findall(r"(?:const )?(\w+) ([^;]+);", body)
        for field in declared.split(",")
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _type_of(kind: str, pointer: bool, arrays: set[str]) -> Any:
    if kind not in _NUMBERS and f"}} {kind};" in _TEXT:
        return ctypes.POINTER(structure(kind)) if pointer else structure(kind)
    if pointer and kind not in arrays:
        return ctypes.c_void_p
    return ctypes.POINTER(_NUMBERS[kind]) if pointer else _NUMBERS[kind]


def _open(library: Path) -> ctypes.CDLL:
    """Raises OSError for what is no library."""
    opened = ctypes.CDLL(str(library))
    for result, name, given in re.findall(r"^(\w+) (ocelli_\w+)\(([^)]*)\)", _TEXT, re.MULTILINE):
        if function := getattr(opened, name, None):
            declared = re.findall(r"(?:const )?(\w+) (\*?)\w+", given)
            function.argtypes = [_type_of(kind, bool(star), set()) for kind, star in declared]
            function.restype = _NUMBERS.get(result)
    return opened
