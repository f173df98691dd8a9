"""How many threads work, what they wait for, and that nobody's results depend on it."""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from generation import kv_cache as kv
from generation import threads
from generation.fast.native import build
from generation.fast.native import step as native_step
from generation.fast.native.step import NativeStep
from generation.fast.quantized import pack
from generation.fast.tower import FastTower
from generation.threads import Crowd, Pace, Paces, choose, processors, quota, watch
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
        ([V2], "0::/../other", {"cpu.max": "100000 100000"}, 1.0),
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
        ([V2], "0::/", {"cpu.max": "1000 0"}, math.inf),
        ([], "0::/", {}, math.inf),
        (["broken"], "broken", {}, math.inf),
    ],
)
def test_quotas_of_made_up_machines(tmp_path, mounts, cgroups, files, expected):
    assert quota(tree(tmp_path, mounts, cgroups, files)) == expected


def test_a_quota_limits_what_the_affinity_allows(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3), raising=False)
    assert processors(tree(tmp_path, [V2], "0::/", {"cpu.max": "80000 100000"})) == 0.8
    assert processors(tree(tmp_path, [V2], "0::/", {"cpu.max": "max 100000"})) == 3
    assert processors(tmp_path / "nothing") == 3


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


def test_a_thread_that_worked_before_changes_nobody_s_number(monkeypatch):
    """OpenMP's number is each thread's own: one that had it when others wanted the processors keeps it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    crowd, begun, go, seen = Crowd(), threading.Event(), threading.Event(), []
    assert crowd.choose(2) == 2
    crowd.set_torch(1)

    def work() -> None:
        torch.ones(300, 300).sum(1)
        begun.set()
        go.wait(PATIENCE)
        seen.append((crowd.most(), torch.get_num_threads()))

    other = threading.Thread(target=work)
    other.start()
    begun.wait(PATIENCE)
    crowd.set_torch(2)
    go.set()
    other.join(PATIENCE)
    assert seen == [(2, 2)] and crowd.most() == 2


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


def test_it_goes_on_for_days():
    """What was seen long ago is not outdated without end."""
    machine = Machine()
    machine.run(0.2)
    machine.pace._passes += 10**9
    assert machine.run(0.1).count(2) > 50


@pytest.mark.parametrize("one", [1e-3, 16e-3])
def test_a_first_pass_under_load_is_soon_forgotten(one):
    """A leader without a processor waits for helpers with open eyes: both are counted, at the same time."""
    machine = Machine(one=one, several=0.6 * one)
    count, _ = machine.pace.plan(2, machine.now)
    seconds = 0.6 * one + 0.02
    machine.now += seconds
    machine.pace.settle(count, 1, seconds, machine.now, waited=0.02, off=0.02)
    machine.run(0.5)
    assert machine.run(60 * one).count(2) > 50


def test_it_comes_back_when_it_is_quiet():
    machine = Machine()
    machine.run(0.1)
    machine.late = lambda now: 4e-3
    assert machine.run(5.0)[-1] == 1
    machine.late = lambda now: 0.0
    machine.run(Crowd.LONGEST_PAUSE)
    assert set(machine.run(0.5)) == {2}


def test_where_not_even_one_thread_has_its_processor_there_is_none_for_a_second():
    machine = Machine()
    machine.late, machine.off = lambda now: 3e-3, 0.5
    machine.run(0.5)
    assert set(machine.run(5.0)) == {1}, "no try is worth it"
    machine.late, machine.off = lambda now: 0.0, 0.0
    machine.run(Crowd.LONGEST_PAUSE)
    assert set(machine.run(0.5)) == {2}


@pytest.mark.parametrize("several", [0.3e-3, 0.21e-3, 0.2e-3])
def test_small_work_takes_one_thread_where_that_is_as_fast(several):
    machine = Machine(one=0.2e-3, several=several)
    machine.run(0.2)
    began, counts = machine.now, machine.run(5.0)
    assert machine.now - began < 1.02 * len(counts) * machine.one


def test_rare_trouble_changes_little():
    """A hiccup of a millisecond, ten times a second, costs less than it would to go on with one thread."""
    machine, next_one = Machine(), [0.0]

    def hiccup(now):
        if now < next_one[0]:
            return 0.0
        next_one[0] = now + 0.1
        return 1e-3

    machine.late = hiccup
    counts = machine.run(5.0)
    assert counts.count(2) > 0.9 * len(counts)


def test_contexts_that_grow_are_no_trouble():
    machine = Machine()
    for step in range(3000):
        machine.one, machine.several = 1e-3 + step * 1e-6, 0.6e-3 + step * 0.6e-6
        machine.step()
    assert machine.run(0.5).count(1) <= 1


def test_of_many_threads_half_go_on_and_come_back_step_by_step():
    machine = Machine(most=16, one=16e-3, several=1e-3)
    machine.run(0.2)
    machine.late = lambda now: 3e-3
    counts = machine.run(0.2)
    assert counts[0] == 16 and 8 in counts
    machine.late = lambda now: 0.0
    machine.run(5.0)
    assert set(machine.run(0.5)) == {16}


def test_what_others_took_holds_for_all_kinds_of_work():
    machine = Machine()
    machine.run(0.1)
    machine.late = lambda now: 4e-3
    machine.run(2.0)
    assert Pace(machine.crowd).plan(2, machine.now)[0] == machine.pace.plan(2, machine.now)[0]


def test_work_of_one_size_has_one_pace():
    paces = Paces(Crowd())
    assert [paces.of(amount) is paces.of(amount + 1) for amount in (1, 5, 7)] == [False] * 3
    assert paces.of(200) is paces.of(210) and paces.of(200) is not paces.of(256)


# ------------------------------------------------------------------------------------ the same results
def leaving(after: float):
    """`build.make_pass`, in which half of the threads leave so many seconds after a pass began, and half of
    the rest after as many more."""

    def make_pass(paces, amount, call):
        made = build.Pass(torch.get_num_threads(), after, -1.0)
        call(made)
        left.append(made.kept)

    left: list[int] = []
    return make_pass, left


@torch.no_grad()
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_threads_may_leave_at_any_layer(compiler, precision, monkeypatch):
    """Tokens, prompts and tiles have the same bits, whoever goes wherever."""
    lm, tower = make_model().language_model, make_tower("heads of 64")
    if precision != "float32":
        pack(lm, precision), pack(tower, precision)
    step, fast, (pixels, _) = NativeStep(lm), FastTower(tower), tiles(tower)
    embeddings = torch.randn(1, 70, lm.config.hidden_size, generator=torch.manual_seed(0))

    def everything():
        cache = kv.allocate_for(lm.config, 1, 80, torch.empty(0), lm.cache_dtype)
        prompt = step.prefill(embeddings, [70], cache)
        return [prompt, step(torch.tensor([[5]]), cache, 70), fast(pixels), *cache[-1].values()]

    choose(1)
    expected, seen = everything(), set()
    torch.set_num_threads(4)
    for after in (-1.0, 0.0, 2e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1.0):
        make_pass, left = leaving(after)
        monkeypatch.setattr("generation.fast.native.step.make_pass", make_pass)
        monkeypatch.setattr("generation.fast.tower.make_pass", make_pass)
        for one, other in zip(everything(), expected, strict=True):
            assert torch.equal(one, other), f"after {after} s"
        seen |= set(left)
    assert 1 in seen, "somebody left"


def alone_on_one_processor(say) -> None:
    """Of a process of its own: whether tokens are those of one thread where helpers come too late to help."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before there are other threads
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # who is woken waits for its turn
    lm = make_model().language_model
    step = NativeStep(lm)

    def tokens() -> list[torch.Tensor]:
        cache = kv.allocate_for(lm.config, 1, 40, torch.empty(0))
        return [step(torch.tensor([[token]]), cache, token) for token in range(40)]

    with torch.no_grad():
        choose(1)
        expected = tokens()
        torch.set_num_threads(4)
        native_step.make_pass, _ = leaving(0.0)
        say.send(all(map(torch.equal, tokens(), expected)))


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


def test_a_block_that_fails_does_not_stop_the_next_one():
    lm = make_model().language_model
    watch(lm.layers, Crowd())
    with pytest.raises((RuntimeError, ValueError)):
        lm(torch.zeros(1, 3, 7))
    lm(torch.zeros(1, 3, 56))


# ------------------------------------------------------------- forks, children, models and threads at once
def in_a_process(script: str) -> str:
    """What a program prints that has two threads and compiled steps of the tests' models."""
    opening = (
        "import copy, os, sys, threading, multiprocessing, torch\n"
        "from generation import kv_cache as kv\n"
        "from generation.fast.native.step import NativeStep\n"
        "from generation.threads import CROWD, choose\n"
        "from tests.test_fast_decode import make_model\n"
        "choose(2)\n"
        "def logits(step, lm, count=30):\n"
        "    with torch.no_grad():\n"
        "        cache = kv.allocate_for(lm.config, 1, 40, torch.empty(0), lm.cache_dtype)\n"
        "        return torch.cat([step(torch.tensor([[t % 7]]), cache, t) for t in range(count)])\n"
    )
    environment = {**os.environ, "OCELLI_CACHE": str(build.cache_folder())}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", opening + script], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def spawned(queue) -> None:
    choose(2)
    lm = make_model().language_model
    step, cache = NativeStep(lm), kv.allocate_for(lm.config, 1, 8, torch.empty(0), lm.cache_dtype)
    queue.put(step(torch.tensor([[5]]), cache, 0).tolist())


@torch.no_grad()
def test_a_spawned_process_has_threads_of_its_own(compiler):
    lm = make_model().language_model
    step, cache = NativeStep(lm), kv.allocate_for(lm.config, 1, 8, torch.empty(0), lm.cache_dtype)
    expected = step(torch.tensor([[5]]), cache, 0).tolist()
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=spawned, args=(queue,))
    process.start()
    assert queue.get(timeout=PATIENCE) == expected
    process.join(PATIENCE)
    assert process.exitcode == 0


def test_several_models_answer_in_several_threads_at_once(compiler):
    """One model that two share, one of its own for each of two others, and PyTorch's own step."""
    script = """
from generation.steps import Step
models = [make_model().language_model for _ in range(3)]
steps = [NativeStep(lm) for lm in models]
eager = make_model().language_model
pairs = [(steps[0], models[0]), (steps[0], models[0]), *zip(steps[1:], models[1:])]
expected = logits(steps[0], models[0])
wrong = []
def ask(step, lm):
    for _ in range(20):
        if not torch.equal(logits(step, lm), expected):
            wrong.append(step)
def ask_pytorch():
    for _ in range(20):
        if not torch.allclose(logits(Step(eager), eager), expected, atol=1e-4):
            wrong.append(eager)
asking = [threading.Thread(target=ask, args=pair) for pair in pairs] + [threading.Thread(target=ask_pytorch)]
for thread in asking: thread.start()
for thread in asking: thread.join()
print(len(wrong))
"""
    assert in_a_process(script) == "0\n"


# ------------------------------------------------------------------------------- sizes that strangers choose
def test_a_config_with_very_many_heads_does_not_end_the_process(compiler):
    """65,536 query heads over one key head: their queries and sums do not fit on a thread's stack."""
    script = """
from generation.steps import Step
from models.config import TextConfig
from models.language_model import LanguageModel
torch.manual_seed(0)
text = TextConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
                  num_attention_heads=65536, num_key_value_heads=1, head_dim=2, max_position_embeddings=32)
lm = LanguageModel(text).eval()
eager, step = copy.deepcopy(lm), NativeStep(lm)
x = torch.randn(1, 16, 4)
with torch.no_grad():
    cache = kv.allocate_for(text, 1, 16, torch.empty(0), lm.cache_dtype)
    got, hidden = step.prefill(x, [16], cache), eager(x)[0]
    print((got - eager.logits(hidden[:, -1])).abs().max().item() < 1e-3)
"""
    assert in_a_process(script) == "True\n"


# ------------------------------------------------------------------------------------------ the entry points
def test_every_program_takes_threads(cli, photo, model_folder):
    status, _, err = cli(photo, "-q", "What is it?", "--threads", "2", "--max-new-tokens", "2")
    assert status == 0, err
    assert threads.CROWD.most() == 2
    for program in ("serve", "app", "eval.__main__"):
        parser = __import__(program, fromlist=["build_parser"]).build_parser()
        assert parser.parse_args(["--threads", "3"]).threads == 3
    checkpoint = open_checkpoint(model_folder, device="cpu", threads=1)
    assert threads.CROWD.most() == 1 and checkpoint.compiled().decode_step is not None


@pytest.mark.parametrize("number", ["0", "-1", "two", "513"])
def test_a_number_of_threads_that_cannot_be_is_refused(complaint, photo, number):
    assert "--threads" in complaint(photo, "--threads", number)
