"""`GraphStep` without CUDA or Triton: buffers and views give eager tokens.

With a tape for a graph, which is bound to addresses as a graph is. That the step gives the eager answers
without graphs, in batches, sessions and slots, is in test_generate.py.
"""

from __future__ import annotations

import copy
import subprocess
import time
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from generation import kv_cache as kv
from generation.fast.cuda import graph
from generation.fast.cuda.graph import Graphs, GraphStep
from generation.options import GenerationOptions, NotFiniteError, SamplingParams
from generation.requests import Request
from generation.sampling import keep
from generation.scheduler import Scheduler
from generation.session import Session
from generation.steps import Step
from inference.checkpoint import Fast
from inference.fast import fast_step
from models.checkpoints.load import meta_init
from models.language_model import LanguageModel
from tests.graph_cases import SAMPLINGS, assert_as_eager, batch, record_on_tape, stops_for, tape_graphs
from tests.invariants import MODELS, run_all, session_holds
from tests.prompts import NO_STOP, inputs_of, tiny_vlm, words
from tests.test_speculation import Guess, offer

NEVER = 10**6  # a stop id that no token has: flags are read, and nothing stops


@pytest.fixture(scope="module", params=["placeholder", "gated delta rules"])
def vlm(request):
    return tiny_vlm(**MODELS[request.param])


@pytest.fixture(autouse=True)
def small_and_taped(monkeypatch):
    """Short views, tapes for graphs, and the eager step even where Triton is."""
    monkeypatch.setattr(graph, "no_triton", lambda language_model, rows: "it is a test")
    monkeypatch.setattr("generation.recorded.VIEW_STEP", 16)
    tape_graphs(monkeypatch)


# --- the tokens of the eager step


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("model", ["placeholder", "Qwen3-VL", "gated delta rules", "Gemma 4"])
def test_tokens_are_those_of_the_eager_step(model, sampling):
    vlm, inputs, options = tiny_vlm(**MODELS[model]), batch(4), {"max_new_tokens": 40, **sampling}
    step = GraphStep(vlm.language_model)
    assert_as_eager(vlm, step, inputs, **NO_STOP, **options)  # crosses two views
    assert_as_eager(vlm, step, inputs, stop_token_ids=stops_for(vlm, inputs, **options), **options)


@pytest.mark.parametrize("stops", [(NEVER,), ()])
def test_logits_that_are_not_finite_are_an_error_and_leave_nothing(stops):
    model, inputs = tiny_vlm(), batch(1)
    options, table = {"max_new_tokens": 6, "stop_token_ids": stops}, model.language_model.embed_tokens.weight
    first, step = int(model.generate(**inputs, max_new_tokens=1)[0, 0]), GraphStep(model.language_model)
    was, seen = table[first].detach().clone(), []
    with torch.no_grad():
        table[first] = float("nan")
    with pytest.raises(NotFiniteError):
        seen.extend(model.generate_stream(**inputs, **options, decode_step=step))
    assert not stops or len(seen) <= 1  # drawn before the weight was met
    with torch.no_grad():
        table[first] = was
    assert_as_eager(model, step, inputs, **options)


# --- sessions


@pytest.mark.parametrize("anew", [False, True])
def test_an_answer_left_alone_does_not_touch_the_next_one(anew):
    """Its steps ahead have met NaN, and its stream is let go of when the session has long gone on."""
    model, prompt = tiny_vlm(), words(1, 8)
    session, step = Session(model), GraphStep(model.language_model)
    options = {"max_new_tokens": 10, "stop_token_ids": (NEVER,), "decode_step": step}
    expected = model.generate(**inputs_of(prompt), max_new_tokens=10, **NO_STOP)
    table, second = model.language_model.embed_tokens.weight, int(expected[0, 1])
    was = table[second].detach().clone()
    with torch.no_grad():
        table[second] = float("nan")
    abandoned = session.generate_stream(**inputs_of(prompt), **options)
    next(iter(abandoned))
    with torch.no_grad():
        table[second] = was
    if anew:
        session.reset()
    assert torch.equal(session.generate(**inputs_of(prompt), **options), expected)
    del abandoned
    session_holds(session, model, prompt + expected[0].tolist())


# --- what is kept, and what is recorded


@pytest.mark.slow
def test_graphs_serve_the_next_answer_where_the_cache_stays(vlm, monkeypatch):
    recorded, step, session = [], GraphStep(vlm.language_model), Session(vlm)
    monkeypatch.setattr(Graphs, "_record", lambda *a: recorded.append(1) or record_on_tape(*a))
    step.rehearse()
    rehearsed = len(recorded)
    session.generate(**batch(1), max_new_tokens=30, decode_step=step, **NO_STOP)
    assert (first := len(recorded)) == rehearsed + 1
    session.generate(**inputs_of(words(5, 20)), max_new_tokens=20, decode_step=step, **NO_STOP)
    assert len(recorded) == first


# --- recorded with what its caller does


@torch.no_grad()
@pytest.mark.parametrize("offsets", [None, torch.tensor([2, -3])])
def test_a_caller_s_choice_is_recorded_with_the_step(vlm, offsets):
    """Rows of different lengths in a view of the cache: one recording, which changes nothing by itself."""
    lm, step = vlm.language_model, GraphStep(vlm.language_model)
    assert step.records
    view, expected_view = (kv.view(kv.allocate_for(lm, 2, 40), 32) for _ in range(2))
    token, positions, total, made = torch.tensor([[3], [5]]), torch.tensor([0, 7]), torch.zeros(2), []
    expected_token, expected_total = token.clone(), total.clone()

    def choose(logits: torch.Tensor) -> None:
        made.append(1)
        token.copy_(logits.argmax(-1, keepdim=True))
        total.add_(logits.amax(-1))
        positions.add_(1)

    for number in range(6):
        replay = step.bind(token, view, positions, choose, [token, positions, total], ("greedy",), offsets)
        place = torch.tensor([number, 7 + number])
        assert torch.equal(positions, place) and torch.equal(token, expected_token)
        replay()
        logits = Step(lm)(expected_token, expected_view, place, 0 if offsets is None else offsets)
        expected_token, expected_total = logits.argmax(-1, keepdim=True), expected_total + logits.amax(-1)
    assert torch.equal(token, expected_token) and len(made) == 1
    torch.testing.assert_close(total, expected_total)


@torch.no_grad()
def test_a_recording_is_of_the_tensors_that_are_written():
    """A larger one may get the address of one that is gone."""
    lm = tiny_vlm().language_model
    step, cache, memory = GraphStep(lm), kv.allocate_for(lm, 1, 20), torch.zeros(5, 12, dtype=torch.int64)
    token, positions = torch.tensor([[3]]), torch.tensor([0])
    for slots in (8, 12):
        written = memory.view(-1)[: 5 * slots].view(5, slots)
        choose = partial(lambda to, _: to[4].fill_(7), written)
        step.bind(token, cache, positions, choose, [written], ("same",))()
        assert written[4].tolist() == [7] * slots


# --- a recording is of one way to choose


@pytest.mark.slow
@pytest.mark.parametrize("other", [field.name for field in fields(SamplingParams) if field.name != "seed"])
def test_no_option_of_sampling_is_forgotten_in_a_recording(vlm, other):
    """Requests that differ in one of them, one after another through one scheduler."""
    usual = {"temperature": 1.5, "seed": 3, "max_new_tokens": 12, **NO_STOP}
    values = {"temperature": 0.3, "top_k": 2, "top_p": 0.1, "min_p": 0.6, "repetition_penalty": 1.5}
    values |= {"frequency_penalty": 1.5, "presence_penalty": 2.0}
    requests = [
        Request(torch.tensor(words(1, 9)), options=GenerationOptions(**usual | own), key=key)
        for key, own in enumerate(({}, {other: values[other]}, {}))
    ]
    expected, _ = run_all(vlm, requests, 1)
    got, _ = run_all(vlm, requests, 1, decode_step=GraphStep(vlm.language_model))
    assert [got[key].token_ids for key in range(3)] == [expected[key].token_ids for key in range(3)]
    assert expected[0].token_ids == expected[2].token_ids != expected[1].token_ids


# --- replaced weights


@pytest.mark.slow
def test_graphs_of_replaced_weights_are_not_replayed():
    model = tiny_vlm()
    step, inputs, options = GraphStep(model.language_model), batch(1), {"max_new_tokens": 8, **NO_STOP}
    assert_as_eager(model, step, inputs, **options)
    other = {name: tensor * 1.1 for name, tensor in copy.deepcopy(model).state_dict().items()}
    model.load_state_dict(other)  # in place
    assert_as_eager(model, step, inputs, **options)
    model.double()
    assert_as_eager(model, step, inputs, **options)
    model.float().load_state_dict({name: tensor * 0.9 for name, tensor in other.items()}, assign=True)
    assert_as_eager(model, step, inputs, **options)
    frequencies, model.language_model._inv_freq = model.language_model._inv_freq, None
    frequencies.fill_(7)  # as whoever gets the freed memory may do
    assert_as_eager(model, step, inputs, **options)


@pytest.mark.slow(but=1)
def test_proposed_tokens_are_verified(vlm, monkeypatch):
    """By the eager step, several at once: where that is asked for."""
    inputs, options = inputs_of(words(1, 9)), {"max_new_tokens": 40, **NO_STOP}
    expected = vlm.generate(**inputs, **options)
    offer(monkeypatch, Guess(lambda ids: expected[0, len(ids) :][:6].tolist()))
    got = Session(vlm).generate_detailed(**inputs, decode_step=GraphStep(vlm.language_model), **options)
    assert torch.equal(got.token_ids, expected) and got.accepted_tokens > 30


# --- where a graph cannot be recorded

WHY = "operation not permitted when stream is capturing"


def refuse(*_):
    raise RuntimeError(f"{WHY}\nat CUDAGraph.cpp:17")


@pytest.mark.slow
def test_recording_that_fails_later_goes_on_without_and_is_told(vlm, monkeypatch):
    """In the middle of an answer, when its cache is read further."""
    step, inputs, recorded = GraphStep(vlm.language_model), batch(1), []
    options = {"max_new_tokens": 40, "temperature": 0.9, "seed": 3, **NO_STOP}
    expected = vlm.generate(**inputs, **options)

    def refuse_the_second(self, function, shape, restore):
        if recorded:
            function()
            refuse()
        recorded.append(shape)
        return record_on_tape(self, function, shape, restore)

    monkeypatch.setattr(Graphs, "_record", refuse_the_second)
    fast = Fast(step)
    assert fast.name == "CUDA graph of the eager step: it is a test"
    for _ in range(2):
        assert torch.equal(vlm.generate(**inputs, decode_step=step, **options), expected)
    assert len(recorded) == 1 and [*step.graphs.failures.values()] == [WHY]
    assert fast.name == f"CUDA graph of the eager step: it is a test, without a graph for 1 row: {WHY}"


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_on_cuda_every_answer_has_a_graph(vlm, monkeypatch, compiling, fails):
    class OnTheHost(GraphStep):
        def __init__(self, language_model):
            super().__init__(vlm.language_model)

    monkeypatch.setattr("inference.fast.GraphStep", OnTheHost)
    if fails:
        monkeypatch.setattr(Graphs, "_record", refuse)
    with meta_init():
        language_model = LanguageModel(vlm.config.text)
    with FakeTensorMode():
        language_model.norm.weight = nn.Parameter(torch.empty(48, device="cuda"))
    step, name = fast_step(language_model, compiling)
    assert (step is None) == fails
    eager = "CUDA graph of the eager step: it is a test"
    assert name == (f"eager: no CUDA graph: it is a test; {WHY}" if fails else eager)


# --- where Triton fails


class InTriton:
    """Stands in for a `TritonDecoder` of up to 8 rows: the eager step, which notes the rows that it is
    compiled for, and raises where it is `broken`."""

    broken: ClassVar[dict[int, Exception]] = {}

    def __init__(self, language_model):
        if 0 in self.broken:
            raise self.broken[0]
        self._step, self.compiled = Step(language_model), []

    def alike(self):
        return [[1], [2], [3, 4, 5], [6, 7, 8]]

    def __call__(self, token, kv_cache, position, offset=None):
        if (rows := len(token)) in self.broken:
            raise self.broken[rows]
        self.compiled.append(rows)
        return self._step(token, kv_cache, position, 0 if offset is None else offset)


class NoSharedMemory(Exception):
    """As Triton's errors are: of no type that Python has for it."""


ERRORS = [
    NoSharedMemory("out of resource: shared memory, Required: 143424, Hardware limit: 101376"),
    subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    KeyError("maxnreg"),
    RuntimeError("Failed to find C compiler\nat build.py"),
]


@pytest.fixture
def in_triton(monkeypatch):
    monkeypatch.setattr(graph, "triton_module", lambda: SimpleNamespace(TritonDecoder=InTriton))
    monkeypatch.setattr(graph, "no_triton", lambda language_model, rows: f"{rows} rows" * (rows > 8) or None)
    monkeypatch.setattr(InTriton, "broken", {})
    return InTriton.broken


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_an_error_of_any_type_leaves_the_recorded_eager_step(in_triton, rows, error):
    """When the step is made, in its rehearsal, and when more rows come."""
    vlm, options = tiny_vlm(), {"max_new_tokens": 12, "temperature": 0.9, "seed": 3, **NO_STOP}
    in_triton[rows] = error
    step = GraphStep(vlm.language_model)
    assert step.rehearse() is None
    reason = str(error).split("\n")[0]
    assert (reason in step.name) == (rows < 2)
    for count in (1, 2, 4):
        assert_as_eager(vlm, step, batch(count), **options)
    assert (step.decoder(1) is None) == (rows < 2)
    assert (step.decoder(2) is None) == (rows != 1) and (step.decoder(4) is None) == (rows == 0)
    assert reason in Fast(step).name


def test_without_triton_and_without_graphs_it_is_the_eager_step(in_triton, monkeypatch):
    vlm, inputs, options = tiny_vlm(), batch(2), {"max_new_tokens": 12, **NO_STOP}
    in_triton[1] = ERRORS[0]
    monkeypatch.setattr(Graphs, "_record", lambda self, function, *_: (function(), refuse()))
    step = GraphStep(vlm.language_model)
    assert step.rehearse() == f"NoSharedMemory: {ERRORS[0]}; {WHY}"
    expected = vlm.generate(**inputs, **options)
    assert torch.equal(vlm.generate(**inputs, decode_step=step, **options), expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("no memory")])
def test_an_interrupt_and_a_lack_of_memory_are_no_failures(in_triton, error, monkeypatch):
    vlm, inputs, options = tiny_vlm(), batch(1), {"max_new_tokens": 12, **NO_STOP}
    expected, step = vlm.generate(**inputs, **options), GraphStep(vlm.language_model)
    with monkeypatch.context() as patch:
        patch.setattr(Graphs, "_record", lambda *_: throw(error))
        with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext():
            assert torch.equal(vlm.generate(**inputs, decode_step=step, **options), expected)
    assert torch.equal(vlm.generate(**inputs, decode_step=step, **options), expected)
    assert step.name == "CUDA graph of Triton kernels"


def throw(error: BaseException):
    raise error


def test_slots_are_rehearsed_before_a_request_comes(in_triton):
    vlm = tiny_vlm()
    step = GraphStep(vlm.language_model)
    scheduler = Scheduler(vlm, 7, decode_step=step)
    compiled = step.decoder(1).compiled
    assert {*compiled} == {1, 2, 3, 6} and scheduler.idle
    assert Scheduler(vlm, 2, decode_step=(two := GraphStep(vlm.language_model))).idle
    assert {*two.decoder(1).compiled} == {1, 2}


class Forcing:
    """A constraint that forces the ids of one answer, some at a time."""

    thinking = full = False
    choice = None

    def __init__(self, ids: list[int], at_a_time: int):
        self._ids, self._at_a_time, self._number = ids, at_a_time, 0

    def forced(self) -> list[int]:
        return self._ids[self._number :][: self._at_a_time]

    def allows(self, token_id: int) -> bool:
        return token_id == self._ids[self._number]

    def mask(self, scores: torch.Tensor) -> None:
        keep(scores, self._ids[self._number :][:1])

    def accept(self, token_id: int) -> None:
        self._number += 1

    def close(self, scores: torch.Tensor) -> None: ...


@pytest.mark.parametrize(("at_a_time", "passes"), [(1, False), (6, True)])
def test_forced_tokens_are_computed_together_where_that_is_faster(in_triton, at_a_time, passes, monkeypatch):
    """By what a pass and a step take; here as long as five steps."""
    vlm, ids = tiny_vlm(), words(4, 20)
    chunk, decode = Step.chunk, InTriton.__call__
    monkeypatch.setattr(GraphStep, "chunk", lambda *a: (time.sleep(0.1), chunk(*a))[1])
    monkeypatch.setattr(InTriton, "__call__", lambda *a: (time.sleep(0.02), decode(*a))[1])
    monkeypatch.setattr(Graphs, "_record", lambda self, function, *_: function)
    step = GraphStep(vlm.language_model)
    assert step.rehearse() is None and 2 < step.pass_steps < 7
    options = {"max_new_tokens": 20, "constraint": partial(Forcing, ids, at_a_time), **NO_STOP}
    output = Session(vlm).generate_detailed(**inputs_of(words(1, 9)), decode_step=step, **options)
    assert output.token_ids[0].tolist() == ids and (output.accepted_tokens > 0) == passes


def test_the_choice_is_recorded_too(in_triton, monkeypatch):
    """Also in `model.generate`, of several answers to prompts of different lengths."""
    vlm, options = tiny_vlm(), {"max_new_tokens": 20, "temperature": 0.9, "num_return_sequences": 2}
    monkeypatch.setattr(GraphStep, "__call__", None)
    assert_as_eager(vlm, GraphStep(vlm.language_model), batch(3), seed=1, **options, **NO_STOP)
