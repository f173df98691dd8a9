"""The C code gives the same answers whichever compiler makes it, for this processor, for any of its kind, and
for ARM, which an emulator plays. What is not installed is left out."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from generation.fast.native import build

TESTS = Path(__file__).parent
# Without the instruction that multiplies bfloat16, which rounds the other factor first.
ROUNDS = torch.cpu._is_avx512_bf16_supported()
NATIVE = (build.FLAGS[1], *(["-mno-avx512bf16"] if ROUNDS else []))
ARM, EMULATOR = ("aarch64-linux-gnu-gcc", "-static"), ("qemu-aarch64",)
# A compiler and its flags, and what runs the program.
TARGETS = {
    "clang": (("clang", *NATIVE), ()),
    "clang, plain": (("clang",), ()),
    "gcc, plain": (("gcc",), ()),
    "gcc, products of bfloat16": (("gcc", build.FLAGS[1]), ()),
    "AVX-512 with VNNI, emulated": (("gcc", "-include", str(TESTS / "emulated_avx512.h")), ()),
    "ARM": (ARM, EMULATOR),
    "ARM with dot products": ((*ARM, "-march=armv8.2-a+dotprod"), EMULATOR),
}
ONLY = {"gcc, products of bfloat16": (16,), "AVX-512 with VNNI, emulated": (8, 4)}  # bits: else the same
CASES = [(target, bits) for target in TARGETS for bits in ONLY.get(target, (32, 16, 8, 4))]
ALONE = 50 * 21  # the numbers of a matrix by itself
COMPILED_ONLY = ("sandybridge", "bdver2", "skylake-avx512", "cascadelake", "sapphirerapids")


def compiled(command: tuple[str, ...], bits: int, *more: str) -> subprocess.CompletedProcess:
    flags = [flag for flag in build.FLAGS[2:] if flag not in ("-fPIC", "-shared")]
    options = [*flags, f"-DWEIGHT_BITS={bits}", f"-DCACHE_BITS={max(16, bits)}", f"-I{build.FOLDER}", *more]
    source = str(TESTS / "native_answers.c")
    return subprocess.run([*command, *options, source, "-lm"], capture_output=True, text=True, timeout=300)


def program(command: tuple[str, ...], bits: int) -> Path:
    """Built once, and kept by the digest of what it is made of."""
    texts = [path.read_bytes() for path in sorted((*TESTS.glob("*.[ch]"), *build.FOLDER.glob("*.[ch]")))]
    made_of = (texts, build.FLAGS, command, shutil.which(command[0]), bits, build.processor())
    kept = build.cache_folder() / f"test-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]}"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            done = compiled(command, bits, "-O0", "-o", f"{folder}/answers")
            if "omp" in done.stderr and done.returncode:
                pytest.skip(f"{command[0]} has no OpenMP here")
            assert done.returncode == 0, done.stderr
            os.replace(f"{folder}/answers", kept)
    return kept


def answers(command: tuple[str, ...], run: tuple[str, ...], bits: int) -> list[float]:
    if missing := [name for name in (command[0], *run) if not shutil.which(name)]:
        pytest.skip(f"needs {', '.join(missing)}")
    ran = subprocess.run([*run, str(program(command, bits))], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return [float(line) for line in ran.stdout.split()]


@cache
def expected(bits: int) -> list[float]:
    return answers((build.find_compiler(), *NATIVE), (), bits)


@pytest.mark.slow(but=13)
@pytest.mark.parametrize(("target", "bits"), CASES)
def test_every_compiler_gives_the_same_answers(target, bits):
    """To what products rounded once or twice differ by; after layers, to a step of rounded activations."""
    if (products := target == "gcc, products of bfloat16") and not ROUNDS:
        pytest.skip("the same build")
    try:
        reference = expected(bits)
    except build.NoCompiler as error:
        pytest.skip(str(error))
    got = answers(*TARGETS[target], bits)
    off = [abs(one - other) for one, other in zip(got, reference, strict=True)]
    assert len(off) == ALONE + 3 * 90 and max(map(abs, reference)) > 4
    assert max(off[:ALONE]) < (2e-2 if products else 2e-4)
    bound = 4e-2 if products else {32: 1e-4, 16: 2e-3, 8: 1e-2, 4: 0.1}[bits]
    assert sum(off[ALONE:]) / len(off[ALONE:]) < bound


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", COMPILED_ONLY)
def test_it_compiles_for_processors_that_are_not_here(kind):
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    for bits in (8, 4):
        assert compiled(("gcc", f"-march={kind}", "-Wall", "-Werror"), bits, "-fsyntax-only").returncode == 0
