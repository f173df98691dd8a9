"""A few hundred inputs for each target of `tests/soak/fuzz.py`; and that the fuzzer sees faults."""

from __future__ import annotations

import pytest

from tests.soak.fuzz import fuzz, judge

INPUTS = {"images": 300, "checkpoints": 150, "gguf": 200, "processor": 150}


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_taken_or_refused_in_a_sentence(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kinds, findings = fuzz(name, range(INPUTS[name]))
    findings.pop("slow", None)  # on a busy machine
    assert not findings
    assert kinds["accepted"] > 10 and kinds["refused"] > 10, "the inputs are all alike"


class Refusal(ValueError):
    """An exception of a target's own."""


def test_what_is_no_refusal_is_a_finding():
    def raises(error):
        raise error

    for error, found in ((KeyError("a"), "KeyError@"), (Refusal(""), "sentence:")):
        outcome = judge(raises, error, (Refusal,))
        assert outcome.kind == "finding" and outcome.name.startswith(found) and "raises" in outcome.detail
    hidden = Refusal("too large")
    hidden.__cause__ = MemoryError()
    assert judge(raises, hidden, (Refusal,)).name.startswith("memory:")
    assert judge(raises, Refusal("expected a, got b"), (Refusal,)).name == "Refusal"
    assert judge(str, "fine", (Refusal,)).kind == "accepted"
