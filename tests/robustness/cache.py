"""Random sequences of cache operations, as many as wanted, each held against passes without a cache.

    python -m tests.robustness.cache --sequences 2000         # of each of three kinds; some minutes

`rows` does to a cache what can be done to one: allocate, prefill, decode (eager and in C), grow, rewind,
fork, chunks, rows that share and leave slots. `sessions` goes through `Session`, `batches` through
`Scheduler`. Prints a line of JSON for each kind, and leaves with status 1 at the first sequence that differs,
which is shown shortened.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test

from tests.robustness.cache_owners import Conversations, batches, check_batch
from tests.robustness.cache_rows import CacheRows

STEPS = 12  # of a sequence, at most


def profile(sequences: int, **changes) -> settings:
    """Hypothesis' settings for so many sequences; the same ones each time."""
    fixed = {"derandomize": True, "database": None, "deadline": None, "stateful_step_count": STEPS}
    fixed |= {"phases": (Phase.generate, Phase.shrink), "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=sequences, **fixed | changes)


def run_rows(chosen: settings, seed: int | None = None) -> tuple[Counter, float]:
    return _run_machine(CacheRows, chosen, seed)


def run_sessions(chosen: settings, seed: int | None = None) -> tuple[Counter, float]:
    return _run_machine(Conversations, chosen, seed)


def _run_machine(machine, chosen: settings, seed: int | None) -> tuple[Counter, float]:
    machine.done, machine.worst = Counter(), 0.0

    class Machine(machine):
        pass

    if seed is not None:
        Machine = seeded(seed)(Machine)
    run_state_machine_as_test(Machine, settings=chosen)
    return machine.done, machine.worst


def run_batches(chosen: settings, seed: int | None = None) -> tuple[Counter, float]:
    total, worst = Counter(), 0.0

    @chosen
    @given(case=batches())
    def check(case: dict) -> None:
        nonlocal worst
        done, error = check_batch(case)
        total.update(done)
        worst = max(worst, error)

    (check if seed is None else seeded(seed)(check))()
    return total, worst


KINDS = {"rows": run_rows, "sessions": run_sessions, "batches": run_batches}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.robustness.cache", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--sequences", type=int, default=2000, help="of each kind (default 2000)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for kind in asked.kinds:
        began = time.process_time()
        done, worst = KINDS[kind](profile(asked.sequences, derandomize=False), asked.seed)
        figures = {"kind": kind, "largest_difference": worst, "cpu_seconds": time.process_time() - began}
        print(json.dumps(figures | dict(done)), flush=True)


if __name__ == "__main__":
    main()
