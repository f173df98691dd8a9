"""Some hundred inputs for each target of `fuzz.py`, the same ones each time; and that it sees faults."""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.robustness.fuzz import Supervisor
from tests.robustness.fuzz_misbehaving import REFUSALS, misbehave
from tests.robustness.judging import TARGETS, judge, target

INPUTS = {"images": 300, "checkpoints": 120, "processor": 150, "rows": 250, "batch": 150, "recipes": 30}


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_are_taken_or_refused_in_a_sentence(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as a target sets it: so that it is taken back
    module, kinds = target(name), set()
    run = module.opened(tmp_path)

    @settings(
        max_examples=INPUTS[name],
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(value=module.inputs())
    def check(value):
        outcome = judge(run, value, module.REFUSALS)
        kinds.add(outcome.kind)
        assert outcome.kind != "finding" or outcome.name == "slow", f"{outcome.name}\n{outcome.detail}"

    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        check()
    assert kinds >= {"accepted", "refused"}, "the inputs are all alike"


@pytest.mark.parametrize(
    "way, found", [("foreign", "KeyError@"), ("silent", "sentence:"), ("hidden", "memory:")]
)
def test_what_is_no_refusal_is_found(way, found):
    outcome = judge(misbehave, way, REFUSALS)
    assert outcome.kind == "finding" and outcome.name.startswith(found) and "misbehave" in outcome.detail
    assert judge(misbehave, "refuses", REFUSALS).name == "Refusal"
    assert judge(misbehave, "fine", REFUSALS).kind == "accepted"


def test_a_worker_that_dies_hangs_or_takes_too_much_is_found_and_replaced(tmp_path):
    supervisor = Supervisor("tests.robustness.fuzz_misbehaving", tmp_path, seconds=0.3)
    wanted = {"memory", "spins", "crashes"}
    for seed in range(9):
        report = supervisor.run(supervisor.report.inputs + 3, seed)
        kept = {path: pickle.loads(path.read_bytes()) for path in tmp_path.glob("*.pickle")}
        if set(kept.values()) == wanted:
            break
    assert set(kept.values()) == wanted and report.accepted["fine"]
    texts = {way: path.with_suffix(".txt").read_text() for path, way in kept.items()}
    assert "hang" in texts["spins"] and "misbehave" in texts["spins"], "where it hung is told"
    assert "died" in texts["crashes"] and "Segmentation fault" in texts["crashes"]
    assert "MemoryError" in texts["memory"]
