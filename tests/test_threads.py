"""How many threads work, what they wait for, and that nobody's results depend on it."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import app
import serve
from eval import __main__ as evaluate
from generation import kv_cache as kv
from generation import threads
from generation.fast.native import build
from generation.fast.native import step as native_step
from generation.fast.native.panels import round_layer
from generation.fast.native.step import NativeStep
from generation.fast.quantized import pack
from generation.fast.tower import FastTower
from generation.threads import Crowd, Pace, Paces, choose, quota, watch, with_threads
from inference.ask import parser as ask_parser
from inference.checkpoint import open_checkpoint
from tests.test_fast_decode import make_model
from tests.test_fast_tower import make_tower, tiles
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def one_thread_afterwards():
    yield
    choose(1)


@pytest.fixture
def compiler():
    try:
        build.find_compiler()
    except build.NoCompiler:
        pytest.skip("no C compiler on this machine")


# -------------------------------------------------------------------------------- what a process may use
V1 = "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
MEMORY = "32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V2 = "33 23 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
HYBRID = "34 23 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"


def tree(root: Path, mounts: list[str], cgroups: str, files: dict[str, str]) -> Path:
    """A made-up machine: its mounts, the cgroups of the process, and files below sys/fs/cgroup."""
    own = {"proc/self/mountinfo": "\n".join(["21 1 8:1 / / rw - ext4 /dev/root rw", *mounts])}
    own["proc/self/cgroup"] = cgroups
    for name, text in {**own, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    "mounts, cgroups, files, expected",
    [
        ([V2], "0::/", {"cpu.max": "max 100000"}, math.inf),
        ([V2], "0::/a/b", {"a/b/cpu.max": "50000 100000"}, 0.5),
        ([V2], "0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ([V2], "0::/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, 2.0),
        # A container whose own cgroup is mounted, while /proc names the path outside.
        ([V2], "0::/docker/1234", {"cpu.max": "100000 100000"}, 1.0),
        ([V1], "4:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "-1"}, math.inf),
        (
            [V1, MEMORY],
            "5:memory:/x\n4:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "25000", "cpu,cpuacct/a/cpu.cfs_period_us": "50000"},
            0.5,
        ),
        (
            [V1, HYBRID],
            "4:cpu,cpuacct:/docker/1\n0::/docker/1",
            {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3.0,
        ),
        ([V2], "0::/", {"cpu.max": "nonsense"}, math.inf),
        ([], "0::/", {}, math.inf),
        (["broken"], "broken", {}, math.inf),
    ],
)
def test_quotas_of_made_up_machines(tmp_path, mounts, cgroups, files, expected):
    assert quota(tree(tmp_path, mounts, cgroups, files)) == expected


def test_who_says_how_many_threads(monkeypatch):
    """The option, then the variable, then what the process may use; whatever PyTorch's default is."""
    torch.set_num_threads(4)
    monkeypatch.setattr(threads, "processors", lambda: 1.5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert Crowd().most() == 2 == torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    torch.set_num_threads(4)
    crowd = Crowd()
    assert crowd.most() == 4
    assert crowd.choose(3) == 3 == torch.get_num_threads() == crowd.most()
    torch.set_num_threads(2)  # as other libraries have it
    assert crowd.most() == 2
    crowd.set_torch(1)  # as long as others want the processors
    assert crowd.most() == 2
    elsewhere = []
    other = threading.Thread(target=lambda: elsewhere.append((torch.get_num_threads(), crowd.most())))
    other.start()
    other.join(PATIENCE)
    assert elsewhere == [(1, 2)]
    crowd.set_torch(2)


# ----------------------------------------------------------------------- the pace, by times that are made up
class Machine:
    """A clock, a processor for each thread, and work that takes `one` second on a single thread and `several`
    on all."""

    def __init__(self, most=2, one=1e-3, several=0.6e-3, learn=Pace.LEARN):
        self.crowd, self.now, self.most = Crowd(), 100.0, most
        self.pace = Pace(self.crowd, learn)
        self.one, self.several = one, several
        self.late = lambda now: 0.0  # seconds that somebody waits for a helper in a pass
        self.off = 0.0  # share of the time in which others have the leader's processor

    def seconds(self, threads: int) -> float:
        return self.one if threads == 1 else self.several * self.most / threads

    def step(self, waits_known=True) -> int:
        count, worth = self.pace.plan(self.most, self.now)
        assert 1 <= count <= self.most and worth >= 0
        seconds = self.seconds(count)
        waited = self.late(self.now) if count > 1 else 0.0
        off = (seconds + waited) * self.off / (1 - self.off)
        self.now += seconds + waited + off
        known = (waited, off) if waits_known else (0.0, off if count == 1 else 0.0)
        self.pace.settle(count, 1, seconds + waited + off, self.now, *known)
        return count

    def run(self, seconds: float, **how) -> list[int]:
        end, counts = self.now + seconds, []
        while self.now < end:
            counts.append(self.step(**how))
        return counts


@pytest.mark.parametrize("waits_known", [True, False])
def test_alone_on_the_machine_all_threads_work(waits_known):
    machine = Machine(learn=Pace.LEARN if waits_known else 2)
    counts = machine.run(1.0, waits_known=waits_known)
    assert counts.count(1) <= 1, "one pass finds out how long it takes with fewer"


@pytest.mark.parametrize("known", ["at first", "later"])
@pytest.mark.parametrize("waits_known", [True, False])
@pytest.mark.parametrize("one", [1e-3, 30e-3])
def test_others_are_noticed_within_a_few_passes_and_cost_little(known, waits_known, one):
    """Each pass of several threads waits for a helper that has lost its processor."""
    machine = Machine(one=one, several=0.6 * one, learn=Pace.LEARN if waits_known else 2)
    if known == "later":
        machine.run(100 * one, waits_known=waits_known)
    machine.late = lambda now: 3e-3 + one
    assert 1 in [machine.step(waits_known) for _ in range(8)]
    began, count = machine.now, len(machine.run(5.0, waits_known=waits_known))
    assert machine.now - began < 1.1 * count * one


def test_what_tries_cost_is_bounded_where_stalls_are_long():
    """A quota that nobody sees: after 50 ms of two threads, the process is held for 50."""
    machine = Machine(one=1e-3, several=0.6e-3)
    used = [0.0, 0.0]  # of a period that ends at

    def throttled(now):
        if now > used[1]:
            used[:] = 0.0, now + 0.1
        used[0] += machine.several
        return 0.05 if used[0] > 0.05 else 0.0

    machine.late = throttled
    machine.run(5.0)
    began, count = machine.now, len(machine.run(10.0))
    assert machine.now - began < 1.1 * count * machine.one


@pytest.mark.parametrize("off", [0.0, 0.5])
def test_it_comes_back_when_it_is_quiet(off):
    """Where not even one thread has its processor, no try is worth it meanwhile."""
    machine = Machine()
    machine.run(0.1)
    machine.late, machine.off = lambda now: 4e-3, off
    counts = machine.run(5.0)
    assert counts[-1] == 1 and (not off or set(counts[-500:]) == {1})
    machine.late, machine.off = lambda now: 0.0, 0.0
    machine.run(Crowd.LONGEST_PAUSE)
    assert set(machine.run(0.5)) == {2}


@pytest.mark.parametrize("several", [0.3e-3, 0.21e-3, 0.2e-3])
def test_small_work_takes_one_thread_where_that_is_as_fast(several):
    machine = Machine(one=0.2e-3, several=several)
    machine.run(0.2)
    began, counts = machine.now, machine.run(5.0)
    assert machine.now - began < 1.02 * len(counts) * machine.one


def test_of_many_threads_half_go_on_and_come_back_step_by_step():
    machine = Machine(most=16, one=16e-3, several=1e-3)
    machine.run(0.2)
    machine.late = lambda now: 3e-3
    counts = machine.run(0.2)
    assert counts[0] == 16 and 8 in counts
    machine.late = lambda now: 0.0
    machine.run(5.0)
    assert set(machine.run(0.5)) == {16}


def test_a_pass_that_has_more_to_do_is_not_one_that_others_have_held_up():
    """Long contexts after short ones: a step at 8,000 positions took one thread, 1.7 times as long as two."""
    crowd, counts = Crowd(), []
    crowd.choose(2)
    paces = Paces(crowd)
    for passed in range(64):
        each = 1.0 if passed < 32 else 5.0

        def run(threads, worth, each=each):
            counts.append(threads)
            return each * 0.03 / threads, 0.0, 0.0

        with_threads(paces, 1, run, each)
    assert counts.count(1) <= 1, "one pass finds out how long it takes with fewer"


# ------------------------------------------------------------------------------------ the same results
def leaving(stake: float):
    """`build.make_pass`, in which half of the threads leave as soon as they have waited for so many seconds,
    and half of the rest after as many more; with less than nothing, wherever they meet."""

    def make_pass(paces, amount, call, each=1.0):
        call(build.Pass(torch.get_num_threads(), stake, 0.0))

    return make_pass


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

    choose(1)
    expected = everything()
    torch.set_num_threads(4)
    for stake in (-1.0, 0.0, 2e-6, 1e-5, 3e-5, 1e-4, 1.0):
        monkeypatch.setattr("generation.fast.native.step.make_pass", leaving(stake))
        monkeypatch.setattr("generation.fast.tower.make_pass", leaving(stake))
        for one, other in zip(everything(), expected, strict=True):
            assert torch.equal(one, other), f"after {stake} s"


def test_a_step_says_how_much_more_it_reads_in_longer_contexts_and_of_more_rows(compiler, monkeypatch):
    """Weights once, and the cache of each row."""
    lm, said = make_model().language_model, []
    step, make_pass = NativeStep(lm), build.make_pass

    def noted(paces, amount, call, each):
        said.append(each - 1)
        make_pass(paces, amount, call, each)

    monkeypatch.setattr(native_step, "make_pass", noted)
    for rows, position in ((1, 20), (1, 40), (3, 40)):
        cache = kv.allocate_for(lm, rows, 80)
        step(torch.full((rows, 1), 5), cache, position)
    step.prefill(torch.zeros(1, 41, lm.config.hidden_size), [41], cache[:], 20)  # 20 ... 60
    once, longer, rows, prompt = said
    assert longer == pytest.approx(2 * once) and rows == pytest.approx(3 * longer) and prompt == longer


def alone_on_one_processor(say) -> None:
    """Of a process of its own: whether tokens are those of one thread where helpers come too late to help."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before there are other threads
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # who is woken waits for its turn
    lm = make_model().language_model
    step = NativeStep(lm)

    def tokens() -> list[torch.Tensor]:
        cache = kv.allocate_for(lm, 1, 40)
        return [step(torch.tensor([[token]]), cache, token) for token in range(40)]

    with torch.no_grad():
        choose(1)
        expected = tokens()
        torch.set_num_threads(4)
        native_step.make_pass = leaving(0.0)
        say.send(all(map(torch.equal, tokens(), expected)))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="not on Linux")
def test_the_thread_that_leads_stays_where_nobody_comes_to_help(compiler):
    context = multiprocessing.get_context("spawn")
    hear, say = context.Pipe(duplex=False)
    process = context.Process(target=alone_on_one_processor, args=(say,))
    process.start()
    say.close()
    assert hear.poll(PATIENCE) and hear.recv()
    process.join()


@torch.no_grad()
def test_blocks_of_pytorch_take_the_threads_that_pay_and_compute_the_same():
    model = make_model()
    blocks = model.language_model.layers
    x = torch.randn(2, 9, 56, generator=torch.manual_seed(0))
    expected, _ = model.language_model(x)
    crowd = Crowd()
    crowd.choose(2)
    watch(blocks, crowd)
    for _ in range(4):
        assert torch.allclose(model.language_model(x)[0], expected, atol=1e-6)
    now = threads.time.perf_counter()
    crowd.lost(2, 1e3, now)
    model.language_model(x)
    assert torch.get_num_threads() == 1 and crowd.most() == 2
    copied = copy.deepcopy(model).language_model  # goes its own way
    assert torch.allclose(copied(x)[0], expected, atol=1e-6)


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="not told by this system")
def test_who_waits_for_something_else_is_not_kept_from_a_processor():
    """As one that waits for Python's lock in a busy server: it need not work with fewer threads for that."""
    before = threads.queued()
    time.sleep(0.3)
    assert threads.queued() - before < 0.15


# ------------------------------------------------------------- forks, models and threads at once, odd sizes
def in_a_process(script: str) -> str:
    """What a program prints that has two threads and compiled steps of the tests' models."""
    opening = """
import copy, os, threading, torch
from generation import kv_cache as kv
from generation.fast.native.step import NativeStep
from generation.steps import Step
from generation.threads import CROWD, choose
from models.config import TextConfig
from models.language_model import LanguageModel
from tests.test_fast_decode import make_model
choose(2)
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
    """Though its parent has threads, and is in the middle of a pass."""
    script = """
lm = make_model().language_model
step = NativeStep(lm)
expected = logits(step, lm)
torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # PyTorch has threads as well
stop = threading.Event()
def ask():
    while not stop.is_set():
        logits(step, lm)
busy = threading.Thread(target=ask)
busy.start()
children = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        same = torch.equal(logits(step, lm), expected) and CROWD.most() == 1 and choose(2) == 1
        (torch.ones(1000, 1000) @ torch.ones(1000, 1000)).sum()
        os._exit(0 if same else 1)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
stop.set()
busy.join()
assert torch.equal(logits(step, lm), expected) and CROWD.most() == 2
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


# ------------------------------------------------------------------------------------------ the entry points
@pytest.mark.parametrize(
    "parser",
    [ask_parser(""), serve.build_parser(), app.build_parser(), evaluate.build_parser()],
    ids=["generate", "serve", "app", "eval"],
)
def test_every_program_takes_threads(parser, capsys):
    assert parser.parse_args(["--threads", "3"]).threads == 3
    for number in ("0", "-1", "two", "513"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--threads", number])
        assert "--threads" in capsys.readouterr().err


def test_a_checkpoint_is_opened_with_as_many(model_folder):
    checkpoint = open_checkpoint(model_folder, device="cpu", threads=2)
    assert threads.CROWD.most() == 2 and checkpoint.compiled().decode_step is not None
