"""`GraphStep` on the Triton kernels, in Triton's interpreter: the tokens of the eager step, in every respect.

TRITON_INTERPRET=1 python -m pytest tests/cuda_check/test_triton_step.py     # numpy < 2.4
"""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from generation import kv_cache as kv  # noqa: E402
from generation.fast.cuda import decoder, graph  # noqa: E402
from generation.fast.cuda.graph import GraphStep  # noqa: E402
from generation.options import NotFiniteError  # noqa: E402
from generation.steps import Step  # noqa: E402
from tests.graph_cases import SAMPLINGS, assert_as_eager, batch, stops_for  # noqa: E402
from tests.invariants import MODELS  # noqa: E402
from tests.prompts import NO_STOP, tiny_vlm  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 is not set")


def small(**parts):
    """As little as has heads that the kernels take: the interpreter is slow."""
    return tiny_vlm(head_dim=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, **parts)


@pytest.fixture(scope="module")
def vlm():
    return small()


@pytest.fixture
def step(vlm):
    return GraphStep(vlm.language_model)


@pytest.mark.parametrize(("count", "sampling"), [(1, SAMPLINGS[0]), (3, SAMPLINGS[0]), (2, SAMPLINGS[4])])
def test_tokens_are_those_of_the_eager_step(vlm, step, count, sampling):
    inputs, options = batch(count), {"max_new_tokens": 6, **sampling}
    assert_as_eager(vlm, step, inputs, stop_token_ids=stops_for(vlm, inputs, **options), **options)
    assert step.decoder(count) is not None


def test_tokens_after_images_are_turned_by_their_places():
    vlm = small(family="qwen_vl", rope_sections=(4, 2, 2), rope_interleaved=True, qk_norm=True)
    step = GraphStep(vlm.language_model)
    assert_as_eager(vlm, step, batch(3), max_new_tokens=5, **NO_STOP)
    assert_as_eager(vlm, step, batch(1), max_new_tokens=5, **NO_STOP)
    assert step.decoder(3) is not None


@pytest.mark.parametrize("model", ["short convolutions", "gated delta rules", "Gemma 4"])
def test_tokens_of_layers_that_differ(model):
    vlm = tiny_vlm(**MODELS[model] | {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1})
    step = GraphStep(vlm.language_model)
    assert_as_eager(vlm, step, batch(3), max_new_tokens=5, **NO_STOP)
    assert_as_eager(vlm, step, batch(1), max_new_tokens=5, **NO_STOP)
    assert step.decoder(3) is not None


def test_more_rows_than_the_kernels_take_are_the_eager_step_s(vlm, monkeypatch):
    monkeypatch.setattr(decoder, "MOST_ROWS", 8)
    step, inputs = GraphStep(vlm.language_model), batch(4)
    options = {"max_new_tokens": 3, "num_return_sequences": 3, "temperature": 0.9, "seed": 4, **NO_STOP}
    assert_as_eager(vlm, step, inputs, **options)
    assert step.decoder(12) is None and step.decoder(4) is not None


def test_one_recording_serves_every_view_of_a_cache(vlm, monkeypatch):
    """Slots of different lengths read a view of their cache, which becomes longer and narrower."""
    made, get = [], graph.Graphs.get

    def noted(self, key, shape, make, state):
        return get(self, key, shape, lambda: made.append(key) or make(), state)

    monkeypatch.setattr(graph.Graphs, "get", noted)
    lm, step = vlm.language_model, GraphStep(vlm.language_model)
    cache, expected_cache = (kv.allocate_for(lm, 3, 40) for _ in range(2))
    token = torch.tensor([[3], [5]])
    for position, length in ((0, 8), (1, 8), (8, 16), (16, 32)):
        positions = torch.tensor([position, position + 3])
        got, expected = (
            one(token, kv.view(whole, length, 1, 2), positions)
            for one, whole in ((step, cache), (Step(lm), expected_cache))
        )
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert len(made) == 1
    for layer, expected_layer in zip(cache, expected_cache, strict=True):
        for name, tensor in layer.items():  # row 0 is not theirs
            torch.testing.assert_close(tensor, expected_layer[name], atol=1e-4, rtol=1e-4)


def test_logits_that_are_not_finite_are_an_error():
    vlm = small()
    vlm.language_model.norm.weight.data[0] = torch.nan
    with pytest.raises(NotFiniteError):
        vlm.generate(**batch(1), decode_step=GraphStep(vlm.language_model), max_new_tokens=3, **NO_STOP)
