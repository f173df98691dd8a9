"""GPU kernels return attention in the memory order (B, T, H, D_h), the CPU's in (B, H, T, D_h): nothing may
depend on it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from generation.fast.cuda_graph import GraphStep
from generation.scheduler import Scheduler
from generation.session import Session
from tests.batches import uneven
from tests.graph_cases import batch
from tests.prompts import NO_STOP, ImageBlock, inputs_of, tiny_vlm, words


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def vlm(request):
    return tiny_vlm(max_position_embeddings=2000).to(getattr(torch, request.param))


@pytest.fixture
def gpu_layout(monkeypatch):
    """From here on, attention returns what the memory-efficient kernel on CUDA does: the same numbers, in its
    memory order. Gives the list of calls."""
    attention, calls = F.scaled_dot_product_attention, []

    def laid_out(*arguments, **named):
        out = attention(*arguments, **named)
        calls.append(out.shape)
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    def start() -> list:
        monkeypatch.setattr(F, "scaled_dot_product_attention", laid_out)
        return calls

    return start


@pytest.mark.parametrize("rows", [1, 4])
def test_generate(vlm, gpu_layout, rows):
    options = {"max_new_tokens": 12, **NO_STOP}
    expected = vlm.generate(**batch(rows), **options)
    calls = gpu_layout()
    assert torch.equal(vlm.generate(**batch(rows), **options), expected)
    assert calls
    graph = GraphStep(vlm.language_model, capture=False)
    if vlm.dtype == torch.float32:  # in 16 bits it rounds elsewhere
        assert torch.equal(vlm.generate(**batch(rows), decode_step=graph, **options), expected)
    else:
        vlm.generate(**batch(rows), decode_step=graph, **options)


def test_session_with_a_chunk_and_a_single_token_behind_its_prefix(vlm, gpu_layout):
    first = [*words(1, 9), ImageBlock(1)]
    prompts = [first, [*first, *words(3, 9)], [*first, *words(3, 9), 7]]
    alone, options = Session(vlm), {"max_new_tokens": 5, **NO_STOP}
    expected = [alone.generate(**inputs_of(prompt), **options) for prompt in prompts]
    gpu_layout()
    talk = Session(vlm)
    for prompt, answer in zip(prompts, expected, strict=True):
        assert torch.equal(talk.generate(**inputs_of(prompt), **options), answer)


def test_scheduler(vlm, gpu_layout):
    requests = uneven()
    expected = {done.key: done.token_ids for done in Scheduler(vlm, 3).run(requests)}
    gpu_layout()
    got = list(Scheduler(vlm, 3).run(uneven()))
    assert {done.key: done.token_ids for done in got} == expected and not any(done.error for done in got)


def test_a_training_step(vlm, gpu_layout):
    inputs = batch(2)
    labels = inputs["input_ids"].clone()

    def step() -> tuple[torch.Tensor, list[torch.Tensor]]:
        vlm.zero_grad()
        loss = vlm(**inputs, labels=labels).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in vlm.parameters() if p.grad is not None]

    expected, gradients = step()
    gpu_layout()
    loss, got = step()
    assert torch.equal(loss, expected)
    assert len(got) == len(gradients) and all(map(torch.equal, got, gradients))
