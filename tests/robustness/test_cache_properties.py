"""Any sequence of cache operations gives what passes without a cache give; more of them in `cache.py`."""

from __future__ import annotations

import pytest

from tests.robustness.cache import KINDS, profile

SEQUENCES = {"rows": 60, "sessions": 30, "batches": 30}


OPERATIONS = {
    "rows": {"prefill", "chunk", "uneven prefill", "eager step", "grow", "rewind", "fork", "slot shared"},
    "sessions": {"answer", "fork", "grow", "rewind", "reset"},
    "batches": {"requests", "decode steps", "positions shared"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence_equals_no_cache(kind):
    done, _ = KINDS[kind](profile(SEQUENCES[kind]))
    assert done["sequences"] >= SEQUENCES[kind]
    assert all(done[operation] for operation in OPERATIONS[kind]), "the sequences leave something out"
