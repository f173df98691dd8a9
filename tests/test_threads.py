"""How many threads work, what they wait for, and that nobody's results depend on it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from generation import kv_cache as kv
from generation import processors
from generation.fast.native import build, passes
from generation.fast.native.panels import round_layer
from generation.fast.native.passes import Pass, Passes
from generation.fast.native.step import NativeStep
from generation.fast.quantized import pack
from generation.fast.tower import FastTower
from generation.processors import limit_threads, quota
from tests.test_fast_decode import make_model
from tests.test_fast_tower import make_tower, tiles
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def one_thread_afterwards():
    yield
    limit_threads(1)


@pytest.fixture
def compiler():
    try:
        build.find_compiler()
    except build.NoCompiler:
        pytest.skip("no C compiler on this machine")


# -------------------------------------------------------------------------------- what a process may use
def tree(root: Path, cgroups: str, files: dict[str, str]) -> Path:
    """A made-up machine: the cgroups of the process, and files below sys/fs/cgroup."""
    own = {"proc/self/cgroup": cgroups} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in own.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    "cgroups, files, expected",
    [
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/a/b", {"a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, 2.0),
        # A container whose own cgroup is mounted, while /proc names the path outside.
        ("0::/docker/1234", {"cpu.max": "100000 100000"}, 1.0),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        (
            "5:memory:/x\n4:cpu,cpuacct:/a\n0::/",
            {"cpu/a/cpu.cfs_quota_us": "25000", "cpu/a/cpu.cfs_period_us": "50000"},
            0.5,
        ),
        ("0::/", {"cpu.max": "nonsense"}, math.inf),
        ("broken", {}, math.inf),
    ],
)
def test_quotas_of_made_up_machines(tmp_path, cgroups, files, expected):
    assert quota(tree(tmp_path, cgroups, files)) == expected


def test_who_says_how_many_threads(monkeypatch):
    """The option, then the variable, then what the process may use; whatever PyTorch's default is."""
    torch.set_num_threads(4)
    monkeypatch.setattr(processors, "processors", lambda: 1.5)
    monkeypatch.setattr(processors, "_most", 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert limit_threads() == 2 == torch.get_num_threads()
    monkeypatch.setattr(processors, "_most", 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    torch.set_num_threads(4)
    assert limit_threads() == 4
    assert limit_threads(3) == 3 == torch.get_num_threads() == limit_threads()


# ------------------------------------------------------------------------------------- beside other work
LARGE = 100 * passes.EACH


class Machine:
    """Passes of 10 ms, in which several threads lose some, on a clock that is made up."""

    def __init__(self, monkeypatch, most: int):
        self.now, self.lost, self.counts = 100.0, 0.0, list[int]()
        monkeypatch.setattr(passes.time, "perf_counter", lambda: self.now)
        self.shared = Passes()
        limit_threads(most)

    def work(self, made: Pass) -> None:
        self.counts.append(made.threads)
        made.lost = self.lost if made.threads > 1 else 0.0
        self.now += 0.01 + made.lost

    def run(self, products: float = LARGE) -> int:
        self.shared.run(self.work, products)
        return self.counts[-1]


def test_beside_other_work_half_of_the_threads_go_on(monkeypatch):
    machine = Machine(monkeypatch, 4)
    assert machine.run() == 4
    machine.lost = 0.05
    assert [machine.run(), machine.run(), machine.run()] == [4, 2, 1] and torch.get_num_threads() == 1
    machine.now += 0.2
    machine.lost = 0.0
    assert machine.run() == 4 == torch.get_num_threads()


def test_what_tries_cost_is_bounded_and_all_come_back(monkeypatch):
    """Where others stay, all threads are tried about once a second."""
    machine = Machine(monkeypatch, 2)
    machine.lost = 0.03
    while machine.now < 120:
        machine.run()
    assert machine.counts.count(2) < 30
    machine.lost = 0.0
    machine.now += passes.LONGEST_PAUSE
    assert {machine.run() for _ in range(20)} == {2}
    machine.lost = 0.001  # a small share of a pass, and then a larger one
    assert machine.run() == 2 == machine.run()
    machine.lost = 0.002
    assert machine.run() == 2
    machine.lost = 0.0
    assert machine.run() == 1 and machine.run() == 2


def test_small_work_takes_few_threads(monkeypatch):
    machine = Machine(monkeypatch, 4)
    each = passes.EACH
    assert [machine.run(products) for products in (1, each, 3.5 * each, 1000 * each)] == [1, 1, 3, 4]


# ------------------------------------------------------------------------------------ the same results
def leaving(stake: float):
    """`run_pass`, in which half of the threads leave as soon as they have waited for so many seconds, and
    half of the rest after as many more; with less than nothing, wherever they meet."""

    def run_pass(call, products):
        call(Pass(torch.get_num_threads(), stake))

    return run_pass


@pytest.mark.slow(but=2)
@torch.no_grad()
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_threads_may_leave_at_any_layer(compiler, precision, monkeypatch):
    """Tokens, prompts and tiles have the same bits, whoever goes wherever."""
    lm, tower = make_model().language_model, make_tower("heads of 64")
    if precision != "float32":
        pack(lm, precision, round_layer), pack(tower, precision if precision != "int4" else "int8")
    step, fast, pixels = NativeStep(lm), FastTower(tower), tiles(tower)
    embeddings = torch.randn(1, 70, lm.config.hidden_size, generator=torch.manual_seed(0))

    def everything():
        cache = kv.allocate_for(lm, 1, 80)
        prompt = step.prefill(embeddings, [70], cache)
        return [prompt, step(torch.tensor([[5]]), cache, 70), fast(pixels), *cache[-1].values()]

    limit_threads(1)
    expected = everything()
    torch.set_num_threads(4)
    for stake in (-1.0, 0.0, 2e-6, 1e-5, 3e-5, 1e-4, 1.0):
        monkeypatch.setattr("generation.fast.native.step.run_pass", leaving(stake))
        monkeypatch.setattr("generation.fast.tower.run_pass", leaving(stake))
        for one, other in zip(everything(), expected, strict=True):
            assert torch.equal(one, other), f"after {stake} s"


# ------------------------------------------------------------- forks, models and threads at once, odd sizes
def in_a_process(script: str) -> str:
    """What a program prints that has two threads and compiled steps of the tests' models."""
    opening = """
import copy, os, threading, torch
from generation import kv_cache as kv
from generation.fast.native import passes
from generation.fast.native.step import NativeStep
from generation.processors import limit_threads
from generation.steps import Step
from models.config import TextConfig
from models.language_model import LanguageModel
from tests.test_fast_decode import make_model
limit_threads(2)
passes.EACH = 1  # small models take several as well
torch.set_grad_enabled(False)
def logits(step, lm, count=30):
    with torch.no_grad():
        cache = kv.allocate_for(lm, 1, 40)
        return torch.cat([step(torch.tensor([[t % 7]]), cache, t) for t in range(count)])
"""
    environment = {**os.environ, "OCELLI_CACHE": str(build.cache_folder())}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-c", opening + script]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_child_of_a_fork_answers_with_one_thread(compiler):
    """Though its parent has threads."""
    script = """
lm = make_model().language_model
step = NativeStep(lm)
expected = logits(step, lm)
torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # PyTorch has threads as well
children = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        same = torch.equal(logits(step, lm), expected) and limit_threads() == limit_threads(2) == 1
        (torch.ones(1000, 1000) @ torch.ones(1000, 1000)).sum()
        os._exit(0 if same else 1)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
assert torch.equal(logits(step, lm), expected) and limit_threads() == 2
"""
    assert in_a_process(script).split() == str([0] * 10).split()


@pytest.mark.slow
def test_models_share_threads_and_any_size_fits(compiler):
    """One model that two threads share, one of its own for each of two others, and PyTorch's own step. Then
    65,536 query heads over one key head: their queries and sums do not fit on a thread's stack."""
    script = """
models = [make_model().language_model for _ in range(3)]
steps = [NativeStep(lm) for lm in models]
eager = make_model().language_model
pairs = [(steps[0], models[0]), (steps[0], models[0]), *zip(steps[1:], models[1:]), (Step(eager), eager)]
expected, wrong = logits(steps[0], models[0]), []
def ask(step, lm):
    tolerance = 1e-4 if lm is eager else 0
    for _ in range(20):
        if not torch.allclose(logits(step, lm), expected, rtol=0, atol=tolerance):
            wrong.append(step)
asking = [threading.Thread(target=ask, args=pair) for pair in pairs]
for thread in asking: thread.start()
for thread in asking: thread.join()
print(len(wrong))
torch.manual_seed(0)
text = TextConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
                  num_attention_heads=65536, num_key_value_heads=1, head_dim=2, max_position_embeddings=32)
lm = LanguageModel(text).eval()
eager, step = copy.deepcopy(lm), NativeStep(lm)
x = torch.randn(1, 16, 4)
cache = kv.allocate_for(lm, 1, 16)
got, hidden = step.prefill(x, [16], cache), eager(x)[0]
print((got - eager.logits(hidden[:, -1])).abs().max().item() < 1e-3)
"""
    assert in_a_process(script) == "0\nTrue\n"
