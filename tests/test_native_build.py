"""The compiled step in its cache: what is damaged is compiled anew; what cannot be leaves the eager step."""

from __future__ import annotations

import hashlib
import os
import shutil
from types import SimpleNamespace

import pytest

from generation.fast.native import build
from generation.fast.native.build import load_library
from inference.fast import fast_step
from tests.test_fast_decode import make_model, needs_compiler  # noqa: F401  (for every test here)


@pytest.fixture(scope="module")
def language_model():
    return make_model().language_model


@pytest.fixture
def library(tmp_path, monkeypatch):
    """(where a cache of its own keeps the compiled step, what was compiled): sound, and copied there again
    where it would be compiled."""
    build.load_library.cache_clear()
    load_library("decode.c", 32)
    *_, compiled = build.library_file("decode.c", 32, 32)
    monkeypatch.setenv("OCELLI_CACHE", str(tmp_path / "cache"))
    *_, target = build.library_file("decode.c", 32, 32)
    target.parent.mkdir()
    shutil.copy(compiled, target)
    made = []

    def compile_again(command, source, where):
        made.append(where)
        shutil.copy(compiled, where.with_name("draft"))
        where.with_name("draft").replace(where)

    monkeypatch.setattr(build, "_compile", compile_again)
    build.load_library.cache_clear()
    yield target, made
    build.load_library.cache_clear()


DAMAGES = {
    "emptied": lambda content: b"",
    "cut short": lambda content: content[:9000],
    "longer": lambda content: content.ljust(200_000, b"\0"),
    "one bit": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "no library": lambda content: b"words" + hashlib.sha256(b"words").digest(),
    "removed": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_anew(library, language_model, damage):
    target, made = library
    content = target.read_bytes()
    target.unlink()  # its pages may be in use
    if DAMAGES[damage]:
        target.write_bytes(DAMAGES[damage](content))
    if damage != "no library":
        assert (
            fast_step(language_model, compiling=False)[0] is None and not made
        )  # where compiling does not pay
    step, name = fast_step(language_model)
    assert step is not None and name == "native C step"
    assert made == [target] and target.read_bytes() == content


def test_somebody_elses_library_is_not_opened(library, monkeypatch):
    target, _ = library
    owner = target.stat().st_uid
    if owner == 0:
        os.chown(target, 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert not build.is_sound(target)


def test_what_cannot_be_opened_even_when_new_leaves_the_eager_step(library, language_model, monkeypatch):
    def fail(path):
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(build.ctypes, "CDLL", fail)
    step, why = fast_step(language_model)
    assert step is None and "failed to map segment" in why and len(library[1]) == 1


def test_a_cache_that_may_not_hold_programs_is_named_before_anything_is_compiled(
    tmp_path, monkeypatch, language_model
):
    monkeypatch.setenv("OCELLI_CACHE", str(tmp_path))
    monkeypatch.setattr(build.os, "statvfs", lambda folder: SimpleNamespace(f_flag=os.ST_NOEXEC))
    monkeypatch.setattr(build.subprocess, "run", lambda *command, **options: pytest.fail("was compiled"))
    build.load_library.cache_clear()
    step, why = fast_step(language_model)
    assert step is None and "noexec" in why and str(tmp_path) in why


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path, monkeypatch, language_model):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCELLI_CACHE", str(tmp_path / "file" / "cache"))
    build.load_library.cache_clear()
    step, why = fast_step(language_model)
    assert step is None and str(tmp_path / "file" / "cache") in why
