"""Triton's interpreter, made faster; without Triton nothing is collected here."""

import os
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def language_patched_once():
    """The interpreter puts itself in place of Triton's language at every call of a function inside a kernel,
    which takes most of its time. Once in each launch, for the functions of a module, is enough."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    patch_language, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(function):
        if id(function.__globals__) in patched:
            return None  # only a launch, which comes first, asks for what undoes it
        patched.add(id(function.__globals__))
        return patch_language(function)

    def launched(*arguments, **named):
        patched.clear()
        return launch(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        yield
