"""A few hundred inputs for each target of `tests/soak/fuzz.py`; and that the fuzzer sees faults."""

from __future__ import annotations

import ctypes
import random
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest

from tests.soak.fuzz import TARGETS, judge, supervise, target

INPUTS = {"images": 300, "checkpoints": 150, "processor": 150, "rows": 200}


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_are_taken_or_refused_in_a_sentence(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    module, kinds = target(name), Counter()
    run = module.opened(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(INPUTS[name]):
            outcome = judge(run, module.make(random.Random(number)), module.REFUSALS)
            kinds[outcome.kind] += 1
            message = f"{name} --replay {number}: {outcome.name}\n{outcome.detail}"
            assert outcome.kind != "finding" or outcome.name == "slow", message
    assert kinds["accepted"] > 10 and kinds["refused"] > 10, "the inputs are all alike"


# ------------------------------------------------------------------- this module as a target that misbehaves
class Refusal(ValueError):
    """An exception of the target's own."""


REFUSALS = (Refusal,)
WAYS = ("fine", "memory", "spins", "crashes")


def make(rng: random.Random) -> str:
    return rng.choice(WAYS)


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


def test_what_is_no_refusal_is_a_finding():
    for way, found in (("foreign", "KeyError@"), ("silent", "sentence:"), ("hidden", "memory:")):
        outcome = judge(misbehave, way, REFUSALS)
        assert outcome.kind == "finding" and outcome.name.startswith(found) and "misbehave" in outcome.detail
    assert judge(misbehave, "refuses", REFUSALS).name == "Refusal"
    assert judge(misbehave, "fine", REFUSALS).kind == "accepted"


def test_a_worker_that_dies_hangs_or_takes_too_much_is_found_and_replaced():
    ways = [make(random.Random(number)) for number in range(40)]
    last = max(ways.index(way) for way in WAYS)
    report = supervise("tests.test_fuzz", range(last + 1), seconds=0.3)
    assert report.inputs == last + 1 and report.accepted["fine"] == ways[: last + 1].count("fine")
    kinds = {name.partition(":")[0].partition("@")[0] for name in report.findings}
    assert kinds == {"hang", "died", "MemoryError"}
