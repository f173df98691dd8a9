"""What no target may do, one way each: so that the fuzzer itself can be seen to catch it."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

from hypothesis import strategies as st


class Refusal(ValueError):
    """An exception of the target's own."""


REFUSALS = (Refusal,)
ENDS = ("fine", "memory", "spins", "crashes")  # what a worker is for


def inputs() -> st.SearchStrategy[str]:
    return st.sampled_from(ENDS)


def opened(folder: Path):
    return misbehave


def misbehave(way: str) -> str:
    if way == "refuses":
        raise Refusal("expected a, got b")
    if way == "foreign":
        raise KeyError("a")
    if way == "silent":
        raise Refusal("")
    if way == "hidden":
        try:
            raise MemoryError
        except MemoryError as error:
            raise Refusal("too large") from error
    if way == "memory":
        bytearray(3 * 2**30)
    while way == "spins":
        time.monotonic()
    if way == "crashes":
        ctypes.string_at(0)
    return way
