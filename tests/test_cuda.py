"""On a CUDA device: the graphs give the eager step's tokens, and nothing in the loop waits for the device."""

from __future__ import annotations

import copy

import pytest
import torch

from data.packing import dense_mask, segment_mask
from generation import kv_cache as kv
from generation.draws import uniforms
from generation.fast.cuda import graph
from generation.fast.cuda.graph import GraphStep
from generation.fast.native.build import NoCompiler
from generation.fast.native.panels import PanelWeight, round_layer, to_rows
from generation.fast.quantized import pack
from generation.steps import Step
from inference.fast import fast_step
from tests import invariants
from tests.graph_cases import SAMPLINGS, assert_as_eager, batch, stops_for
from tests.prompts import NO_STOP, inputs_of, tiny_vlm, words

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def vlm():
    # Head sizes of 16: fused attention wants rows of 16 bytes.
    return tiny_vlm(head_dim=16, max_position_embeddings=2000).cuda()


@pytest.fixture(scope="module", params=["Triton", "eager"])
def step(vlm, request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "eager":
            patch.setattr(graph, "no_triton", lambda *_: "it is a test")
        step = GraphStep(vlm.language_model)
        assert (step.decoder(1) is None) == (request.param == "eager")
        yield step


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("count", [1, 4])
def test_tokens_are_those_of_the_eager_step(vlm, step, count, sampling):
    inputs, options = batch(count, "cuda"), {"max_new_tokens": 60, **sampling}
    assert_as_eager(vlm, step, inputs, **NO_STOP, **options)
    assert_as_eager(vlm, step, inputs, stop_token_ids=stops_for(vlm, inputs, **options), **options)


def test_buckets_and_buffers_are_outlived(vlm, step):
    for length in (250, 1000):
        inputs = {name: tensor.cuda() for name, tensor in inputs_of(words(1, length)).items()}
        assert_as_eager(vlm, step, inputs, max_new_tokens=300, **NO_STOP)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("rows", [1, 3])
def test_logits_are_the_eager_ones(precision, rows):
    """Of four bits, those of a model with the numbers that C rounded to."""
    exact = torch.float32 if precision == "float32" else torch.bfloat16
    reference = model = tiny_vlm(head_dim=16)
    if precision == "int4":
        reference = copy.deepcopy(model)
        try:
            pack(model, precision, round_layer)
        except NoCompiler as error:
            pytest.skip(str(error))
        for name, part in model.language_model.named_modules():
            if isinstance(part, PanelWeight):
                reference.language_model.get_submodule(name).weight.copy_(part.unpacked())
        to_rows(model, torch.device("cuda"))
    eager, lm = reference.to("cuda", exact).language_model, model.language_model
    steps, position = (GraphStep(lm), Step(eager)), torch.arange(rows, device="cuda") * 7
    caches = [kv.allocate_for(lm, rows, 300) for _ in steps]
    tolerance = 1e-4 if exact == torch.float32 else 0.1
    for number in range(30):
        ids = torch.arange(rows, device="cuda")[:, None] + number
        got, expected = (one(ids, cache, position) for one, cache in zip(steps, caches, strict=True))
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
        position = position + 1


def test_nothing_in_the_loop_waits_for_the_device(vlm, step):
    """While the tokens are read, as whoever shows them does."""
    options = {"max_new_tokens": 60, "stop_token_ids": (10**6,), "decode_step": step}
    for sampling in ({}, {"temperature": 1.0, "top_p": 0.9, "seed": 0}):
        expected = vlm.generate(**batch(2, "cuda"), **options, **sampling).T.tolist()  # records
        stream = iter(vlm.generate_stream(**batch(2, "cuda"), **options, **sampling))
        tokens = [next(stream).tolist() for _ in range(5)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            tokens += [next(stream).tolist() for _ in range(40)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert tokens == expected[:45]


@pytest.mark.parametrize("sampling", invariants.SAMPLINGS)
@pytest.mark.parametrize(
    "entrance", ["session", "three slots", "graph", "graph padded", "graph session", "graph slots"]
)
def test_every_way_to_an_answer_gives_the_same_tokens(vlm, entrance, sampling):
    _, rows, options, _ = invariants.case("placeholder", sampling)
    options = options | {"stop_token_ids": (5, 9)}
    expected = invariants.answers(vlm, "recomputed", rows, **options)
    assert invariants.answers(vlm, entrance, rows, **options) == expected


def test_random_numbers_are_those_of_the_cpu():
    seeds, drawn = torch.arange(1000) * 2**50, torch.arange(1000)
    assert torch.equal(uniforms(seeds.cuda(), drawn.cuda()).cpu(), uniforms(seeds, drawn))


def test_weights_stay_where_they_are():
    model = tiny_vlm(head_dim=16, hidden_size=512, intermediate_size=2048).cuda()
    before = torch.cuda.memory_allocated()
    step, how = fast_step(model.language_model, compiling=False)
    assert isinstance(step, GraphStep) and how == "CUDA graph of Triton kernels"
    assert torch.cuda.memory_allocated() - before < 2 * 2**20


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])  # the first by itself
def test_one_question_is_answered_by_a_graph(as_json, photo, dtype):
    ask = (photo, "-q", "how many?", "--device", "cuda", "--max-new-tokens", 8)
    ask += ("--dtype", dtype) * (dtype != "bfloat16")
    (made,), (eager,) = as_json(*ask), as_json(*ask, "--compile", "off")
    assert made["decode_step"].startswith("CUDA graph") and made["dtype"] == dtype
    assert eager["decode_step"] == "eager" and eager["prompt_tokens"] == made["prompt_tokens"]


def test_a_graph_that_cannot_be_recorded_leaves_the_eager_step(vlm, monkeypatch):
    decode = GraphStep._decode

    def reading_back(self, *step):
        logits = decode(self, *step)
        assert logits.amax().item() is not None  # which a capture forbids
        return logits

    monkeypatch.setattr(GraphStep, "_decode", reading_back)
    monkeypatch.setattr(graph, "no_triton", lambda *_: "it is a test")
    step, why = fast_step(vlm.language_model, compiling=False)
    assert step is None and why.startswith("eager: no CUDA graph: ")
    monkeypatch.undo()
    inputs = batch(2, "cuda")  # the device, its allocator and its graphs go on
    assert_as_eager(vlm, GraphStep(vlm.language_model), inputs, max_new_tokens=20, **NO_STOP)


def test_packed_rows_train_as_with_a_dense_mask():
    """flex_attention, compiled, forward and backward, in what training computes in."""
    model = tiny_vlm(head_dim=16).cuda()
    documents = torch.tensor([[1] * 50 + [2] * 60 + [-1] * 18, [1] * 128], device="cuda")
    ids, places = torch.arange(256, device="cuda").view(2, 128) % 40, torch.arange(128, device="cuda")[None]
    losses, gradients = [], []
    for mask in (segment_mask(documents), dense_mask(documents)):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            hidden, _ = model.hidden_states(ids, attention_mask=mask, position_ids=places.expand(2, -1))
            loss = hidden[documents > 0].float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        gradients.append(model.language_model.layers[0].self_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(losses[0], losses[1], rtol=0.02, atol=0.02)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.1, atol=0.02)


@torch.no_grad()
def test_float32_is_float32():
    """TF32 would be a thousandth off."""
    model = tiny_vlm(head_dim=16)
    pixels = batch(1)["pixel_values"]
    expected = model.encode_images(pixels)
    got = model.cuda().encode_images(pixels)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)
