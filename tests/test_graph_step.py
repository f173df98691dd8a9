"""`GraphStep` without CUDA: buffers, buckets, late stop flags and the kept cache give the eager tokens.

Mostly with a tape for a graph, which is bound to addresses as a graph is.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from generation import kv_cache as kv
from generation.decoding import GenerationOptions, eager_step
from generation.fast.choose_step import fast_step, graph_step
from generation.fast.cuda_graph import AsyncStopFlags, FusedDecoder, Graphs, GraphStep, StaticCache, bucket_of
from generation.options import NotFiniteError
from generation.scheduler import Scheduler
from generation.session import Session
from inference.answer import ask
from inference.checkpoint import Checkpoint, open_checkpoint
from models.checkpoints.load import meta_init
from models.language_model import LanguageModel
from tests.batches import assert_as_alone, uneven
from tests.graph_cases import SAMPLINGS, assert_as_eager, batch, record_on_tape, rows, stops_for
from tests.prompts import NO_STOP, ImageBlock, assert_holds, inputs_of, tiny_vlm, words

MANY = 2**30  # bytes: every cache is kept


@pytest.fixture(scope="module")
def vlm():
    return tiny_vlm()


@pytest.fixture(autouse=True)
def short_buckets(monkeypatch):
    monkeypatch.setattr("generation.fast.cuda_graph.BUCKET", 16)
    monkeypatch.setattr("generation.fast.cuda_graph.STATIC_MULTIPLE", 16)


@pytest.fixture(autouse=True)
def tape(monkeypatch):
    """Graphs are tapes, for all steps that are made by `make_step`."""
    monkeypatch.setattr(Graphs, "_record", record_on_tape)


def make_step(vlm, taped: bool = True, **options) -> GraphStep:
    step = GraphStep(vlm.language_model, capture=False, **{"static_bytes": MANY} | options)
    step._capture = step.graphs._capture = taped
    return step


# --- the tokens of the eager step


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("taped", [False, True])
def test_tokens_are_those_of_the_eager_step(vlm, count, sampling, taped):
    inputs, options = batch(count), {"max_new_tokens": 40, **sampling}
    step = make_step(vlm, taped)
    assert_as_eager(vlm, step, inputs, **NO_STOP, **options)  # crosses two buckets
    assert_as_eager(vlm, step, inputs, stop_token_ids=stops_for(vlm, inputs, **options), **options)


@pytest.mark.parametrize("lag", range(5))
@pytest.mark.parametrize("end", [1, 2, 3, 9])
def test_late_flags_yield_nothing_behind_the_last_stop(vlm, monkeypatch, lag, end):
    pushed, push = [], AsyncStopFlags.push
    monkeypatch.setattr(
        AsyncStopFlags, "push", lambda self, number: pushed.append(number) or push(self, number)
    )
    inputs = batch(1)
    free = vlm.generate(**inputs, max_new_tokens=9, **NO_STOP)[0].tolist()
    step = make_step(vlm, lag=lag)
    (taken,) = assert_as_eager(vlm, step, inputs, max_new_tokens=9, stop_token_ids=(free[end - 1],)).lengths
    assert taken <= end and pushed == list(range(min(taken + lag, 9)))  # never more than `lag` in vain


@pytest.mark.parametrize("static_bytes", [0, MANY])
def test_a_cache_that_is_outlived(static_bytes, monkeypatch):
    """Rows end in a buffer of one step's length, and stop before, at and behind its end."""
    monkeypatch.setattr(kv, "STEP", 32)
    model = tiny_vlm()
    inputs = batch(2)
    free = model.generate(**inputs, max_new_tokens=70, **NO_STOP)
    for place in (0, 8, 9, 10, 11, 50):
        stop = (int(free[0, place]), int(free[1, place]))
        step = make_step(model, static_bytes=static_bytes)
        got = assert_as_eager(model, step, inputs, max_new_tokens=70, stop_token_ids=stop)
        if not static_bytes:  # not grown for a step in vain
            eager = model.generate_detailed(**inputs, max_new_tokens=70, stop_token_ids=stop)
            assert got.kv_cache_bytes == eager.kv_cache_bytes


def test_streams_in_turn_and_broken_off(vlm):
    """Two answers of one kind at the same time have buffers and caches of their own."""
    step, options = make_step(vlm), {"max_new_tokens": 12, "stop_token_ids": (VOCAB_END,)}
    inputs = rows(2)
    expected = [vlm.generate(**one, **options)[0].tolist() for one in inputs]
    for _ in range(2):
        streams = [vlm.generate_stream(**one, decode_step=step, **options) for one in inputs]
        left_alone = vlm.generate_stream(**inputs[0], decode_step=step, **options)
        next(iter(left_alone))
        got = [[], []]
        for _ in range(12):
            for tokens, stream in zip(got, streams, strict=True):
                tokens.append(next(iter(stream)).item())
        assert got == expected
        assert [stream.drain().lengths for stream in streams] == [[12], [12]]


VOCAB_END = 10**6  # an id that no token has: flags are read, and nothing stops


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("stops", [(VOCAB_END,), ()])
def test_logits_that_are_not_finite_are_an_error_and_leave_nothing(value, stops):
    model = tiny_vlm()
    step, inputs = make_step(model), batch(1)
    table = model.language_model.embed_tokens.weight
    first = int(model.generate(**inputs, max_new_tokens=1)[0, 0])
    was = table[first].detach().clone()
    with torch.no_grad():
        table[first] = value
    seen = []
    with pytest.raises(NotFiniteError):
        for column in model.generate_stream(
            **inputs, max_new_tokens=6, stop_token_ids=stops, decode_step=step
        ):
            seen.append(column)
    if stops:
        assert len(seen) == 1  # drawn before the weight was met
    with torch.no_grad():
        table[first] = was
    assert_as_eager(model, step, inputs, max_new_tokens=6, stop_token_ids=stops)


# --- sessions and schedulers


@pytest.mark.parametrize("static_bytes", [0, MANY])
@pytest.mark.parametrize("anew", [False, True])
def test_an_answer_left_alone_does_not_touch_the_next_one(static_bytes, anew):
    """Its steps ahead have met NaN, and its stream is let go of when the session has long gone on."""
    model = tiny_vlm()
    session, step, prompt = Session(model), make_step(model, static_bytes=static_bytes), words(1, 8)
    options = {"max_new_tokens": 10, "stop_token_ids": (VOCAB_END,), "decode_step": step}
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
    assert_holds(session, model, prompt + expected[0].tolist())
    follow = [*prompt, *expected[0].tolist(), *words(2, 4)]
    again = model.generate(**inputs_of(follow), max_new_tokens=10, **NO_STOP)
    made = session.generate_detailed(**inputs_of(follow), **options)
    assert torch.equal(made.token_ids, again) and made.reused == len(prompt) + 9


def test_a_session_goes_on_behind_a_stop(vlm):
    eager, fast, step = Session(vlm), Session(vlm), make_step(vlm)
    history = [*words(1, 5), ImageBlock(1), *words(2, 4)]
    for turn in range(5):
        options = {"max_new_tokens": 14}
        free = vlm.generate(**inputs_of(history), **options, **NO_STOP)[0].tolist()
        options["stop_token_ids"] = (free[2 * turn],)
        expected = eager.generate_detailed(**inputs_of(history), **options)
        got = fast.generate_detailed(**inputs_of(history), decode_step=step, **options)
        assert got.rows() == expected.rows() and got.stop_reasons == ["stop"]
        assert (got.reused, fast.held) == (expected.reused, eager.held)
        assert_holds(fast, vlm, history + got.rows()[0])
        # Another one's cache cannot take the memory that this session's lies in.
        assert_as_eager(vlm, step, inputs_of(words(turn, 9)), max_new_tokens=5, **NO_STOP)
        assert_holds(fast, vlm, history + got.rows()[0])
        history += [*got.rows()[0], *words(turn, 3)]


def test_the_scheduler_takes_it_as_a_step(vlm):
    requests = uneven()
    scheduler = Scheduler(vlm, 3, decode_step=make_step(vlm))
    assert_as_alone(vlm, requests, {done.key: done for done in scheduler.run(requests)})


# --- what is kept, and what is recorded


@pytest.mark.parametrize(("static_bytes", "again"), [(MANY, 0), (0, None)])
def test_graphs_serve_the_next_answer_where_the_cache_is_kept(vlm, static_bytes, again):
    step = make_step(vlm, static_bytes=static_bytes)
    vlm.generate(**batch(1), max_new_tokens=30, decode_step=step, **NO_STOP)
    recorded = step.graphs.recorded
    assert recorded == len({bucket_of(length) for length in range(13, 13 + 29)})
    vlm.generate(**inputs_of(words(5, 20)), max_new_tokens=20, decode_step=step, temperature=0.0, **NO_STOP)
    if again is not None:
        assert step.graphs.recorded == recorded + again
    vlm.generate(**batch(1), max_new_tokens=30, decode_step=step, temperature=1.0, **NO_STOP)
    assert step.graphs.recorded > recorded  # another sampler


def test_buckets_are_at_most_a_quarter_too_long(monkeypatch):
    monkeypatch.setattr("generation.fast.cuda_graph.BUCKET", 256)
    buckets = [bucket_of(length) for length in range(1, 9000)]
    assert buckets == sorted(buckets) and len(set(buckets)) < 20
    for length, bucket in enumerate(buckets, start=1):
        assert length <= bucket <= max(1.25 * length, length + 255) and bucket % 256 == 0


def test_the_kept_cache_is_for_one_at_a_time(vlm):
    config = vlm.config.text
    kept, like = StaticCache(config, 10**6), torch.empty(0)
    first = kv.allocate_for(config, 1, 20, like)
    first[1]["value"][:, :, :7] = 3.0
    held = first[1]
    assert kept.adopt(first, 7, 60) and kv.capacity(first) >= 60
    assert held is first[1] and (held["value"][:, :, :7] == 3).all()
    address = first[0]["key"].data_ptr()
    assert kept.adopt(first, 9, 61), "it is there already"
    assert not kept.adopt(kv.allocate_for(config, 1, 20, like), 3, 30), "it is in use"
    assert not kept.adopt(first, 9, 10**6)
    del first, held
    second = kv.allocate_for(config, 1, 20, like)
    assert kept.adopt(second, 3, 30) and second[0]["key"].data_ptr() == address
    assert not StaticCache(config, 100).adopt(kv.allocate_for(config, 1, 20, like), 3, 30), "too large"


# --- joined weights


def test_joined_weights_are_the_models_own():
    model = tiny_vlm(attention_bias=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    first, second = FusedDecoder(model.language_model), FusedDecoder(model.language_model)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    block = model.language_model.layers[1]
    for decoder in (first, second):  # one copy for both, and for the model
        qkv, gate_up = decoder.layers[1].qkv, decoder.layers[1].gate_up
        assert qkv.weight.data_ptr() == block.self_attn.q_proj.weight.data_ptr()
        assert qkv.bias.data_ptr() == block.self_attn.q_proj.bias.data_ptr()
        assert gate_up.weight.data_ptr() == block.mlp.gate_proj.weight.data_ptr()
        block.mlp.up_proj.weight.data[0, 0] = 5.0
        assert gate_up.weight[len(gate_up.weight) // 2, 0] == 5


def test_weights_that_are_replaced_are_joined_again():
    model = tiny_vlm()
    step, inputs, options = make_step(model), batch(1), {"max_new_tokens": 8, **NO_STOP}
    assert_as_eager(model, step, inputs, **options)
    other = {name: tensor * 1.1 for name, tensor in copy.deepcopy(model).state_dict().items()}
    model.load_state_dict(other)  # in place
    assert_as_eager(model, step, inputs, **options)
    model.double()
    assert_as_eager(model, step, inputs, **options)
    model.float().load_state_dict({name: tensor * 0.9 for name, tensor in other.items()}, assign=True)
    assert_as_eager(model, step, inputs, **options)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_logits_and_cache_are_the_eager_ones(bias):
    lm = tiny_vlm(attention_bias=bias, mlp_bias=bias, head_dim=20).language_model
    caches = [kv.allocate_for(lm.config, 3, 40, like=lm.norm.weight) for _ in range(2)]
    decoder, eager, position = FusedDecoder(lm), eager_step(lm), torch.tensor([0, 4, 30])
    for number in range(9):
        ids = torch.tensor([[number], [number + 1], [50 - number]])
        got, expected = decoder(ids, caches[0], position, 39), eager(ids, caches[1], position)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        position = position + 1
    for got, expected in zip(*caches, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_what_lies_between_attentions_compiles_as_one_graph(vlm):
    """Traced and made functional as inductor would have it, in as few versions as there are widths."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = make_step(vlm, backend="aot_eager", taped=False, static_bytes=0)
    for count, new in ((1, 30), (1, 60), (2, 40), (4, 20)):
        assert_as_eager(vlm, step, batch(count), max_new_tokens=new, **NO_STOP)
    counters = torch._dynamo.utils.counters
    assert step._decoder.compiled, "it fell back"
    assert not counters["graph_break"] and 1 <= counters["stats"]["unique_graphs"] <= 2


def test_a_backend_that_fails_is_said_once(vlm):
    def broken(*_):
        raise RuntimeError("no such compiler")

    step = make_step(vlm, taped=False, backend=broken)
    with pytest.warns(RuntimeWarning, match="not compiled.*"):
        assert_as_eager(vlm, step, batch(1), max_new_tokens=6, **NO_STOP)


# --- where a graph cannot be recorded


def refuse(*_):
    raise RuntimeError("operation not permitted when stream is capturing\nat CUDAGraph.cpp:17")


WHY = "operation not permitted when stream is capturing"


def test_a_graph_that_cannot_be_recorded_leaves_the_eager_step_and_says_why(vlm, monkeypatch):
    monkeypatch.setattr(Graphs, "_record", refuse)
    assert graph_step(vlm.language_model, compiled=False) == (None, f"eager: no CUDA graph: {WHY}")


def test_recording_that_fails_later_goes_on_without_and_is_told(vlm, monkeypatch):
    """In the middle of an answer, with the sampler's state half changed by a warm-up."""
    step, inputs = make_step(vlm), batch(2)
    options = {"max_new_tokens": 40, "temperature": 0.9, "seed": 3, "repetition_penalty": 1.3, **NO_STOP}
    expected = vlm.generate(**inputs, **options)
    recorded = []

    def refuse_the_second(self, function, shape, state):
        if recorded:
            function()
            refuse()
        recorded.append(shape)
        return record_on_tape(self, function, shape, state)

    monkeypatch.setattr(Graphs, "_record", refuse_the_second)
    checkpoint = Checkpoint("tiny", vlm, None, 0.0, decode_step=step, decode_step_chosen="CUDA graph")
    assert checkpoint.decode_step_name == "CUDA graph"
    for _ in range(2):
        assert torch.equal(vlm.generate(**inputs, decode_step=step, **options), expected)
    assert len(recorded) == 1 and step.failure == WHY
    assert checkpoint.decode_step_name == f"CUDA graph, eager since: {WHY}"


@pytest.mark.parametrize(
    ("steps", "backend"), [(1, None), (256, None), (10**7, "inductor"), (None, "inductor")]
)
def test_on_cuda_every_answer_has_a_graph_and_long_work_a_compiler(vlm, monkeypatch, steps, backend):
    made = []

    class Recorder(GraphStep):
        def __init__(self, language_model, backend=None):
            made.append(backend)

        def rehearse(self):
            return None

    monkeypatch.setattr("generation.fast.choose_step.GraphStep", Recorder)
    with meta_init():
        language_model = LanguageModel(vlm.config.text)
    with FakeTensorMode():
        language_model.norm.weight = nn.Parameter(torch.empty(48, device="cuda"))
    step, name = fast_step(language_model, steps)
    assert made == [backend] and isinstance(step, Recorder)
    assert name == ("compiled CUDA graph" if backend else "CUDA graph")


def test_while_text_streams_only_late_copies_are_read(model_folder, photo, monkeypatch):
    """Anything else that is read would be waited for on a GPU, once a token."""
    checkpoint = open_checkpoint(model_folder, device="cpu")
    checkpoint = replace(checkpoint, decode_step=make_step(checkpoint.model))
    late, reads = set(), []
    read_late = AsyncStopFlags.read

    def note_late(self, number):
        told = read_late(self, number)
        late.add(told.untyped_storage().data_ptr())
        return told

    monkeypatch.setattr(AsyncStopFlags, "read", note_late)

    def noting(name: str):
        function = getattr(torch.Tensor, name)

        def note(tensor, *arguments, **named):
            if tensor.untyped_storage().data_ptr() not in late:
                reads.append(name)
            return function(tensor, *arguments, **named)

        return note

    for name in ("tolist", "item", "cpu", "numpy", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, noting(name))
    reply = ask(checkpoint, [photo], "how many?", GenerationOptions(max_new_tokens=24))
    pieces = iter(reply)
    counts = [len(reads) for _ in pieces]
    assert len(counts) > 10 and counts[-1] == counts[0], reads[counts[0] :]
