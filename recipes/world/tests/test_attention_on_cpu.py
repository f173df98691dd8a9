"""Attention with kept probabilities against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from recipes.world import attention
from recipes.world.attention import AttentionOnCPU, KeptProbabilities


def made(heads: int, kv_heads: int, masked: bool, dtype: torch.dtype):
    """Queries, keys, values, a mask in which every query sees some keys, and a gradient."""
    drawn = torch.Generator().manual_seed(heads + kv_heads)
    shape = 3, heads, 37, 16
    q, gradient = (torch.randn(shape, generator=drawn) for _ in range(2))
    k, v = (torch.randn(3, kv_heads, 37, 16, generator=drawn) for _ in range(2))
    seen = (torch.rand(3, 1, 37, 37, generator=drawn) < 0.5).tril() | torch.eye(37, dtype=torch.bool)
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).to(dtype) if masked else None
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    return q, k, v, mask, gradient.to(dtype)


@pytest.mark.parametrize("rows_at_once", [1, 2, 8])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (7, 1)])
def test_as_torchs_own(heads, kv_heads, masked, rows_at_once, monkeypatch):
    monkeypatch.setattr(attention, "AT_ONCE", rows_at_once * heads * 37 * 37)
    monkeypatch.setattr(attention, "QUERIES", 10)  # at a time; the last keys are seen by few
    q, k, v, mask, gradient = made(heads, kv_heads, masked, torch.float64)
    ours = KeptProbabilities.apply(q, k, v, mask)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, (q, k, v), gradient) for out in (ours, expected)))


def test_arguments_may_be_named_and_what_is_not_computed_is_left_to_torch():
    q, k, v, mask, _ = made(4, 2, True, torch.bfloat16)
    with AttentionOnCPU():
        plain = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        named = F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask, enable_gqa=True)
        scaled = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.01, enable_gqa=True)
    assert torch.equal(plain, named) and "KeptProbabilities" in type(named.grad_fn).__name__
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.01, enable_gqa=True)
    assert torch.equal(scaled, expected) and not torch.equal(scaled, plain)


@pytest.mark.parametrize("autocast", [False, True])
def test_taken_in_bfloat16_and_under_a_mask(autocast):
    """Under autocast, too, whose dtype decides; and never for a causal pass or without gradients."""

    def attended(dtype, masked=False, **how):
        q, k, v, mask, _ = made(4, 2, masked, dtype)
        how |= {"enable_gqa": True}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), AttentionOnCPU():
            out = F.scaled_dot_product_attention(q, k, v, mask, **how)
        return out, F.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask, **how)

    def ours(out):
        return "KeptProbabilities" in type(out.grad_fn).__name__

    out, expected = attended(torch.bfloat16)
    assert ours(out)
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)
    assert ours(attended(torch.float32)[0]) == autocast
    assert ours(attended(torch.float32, masked=True)[0])
    assert not ours(attended(torch.bfloat16, is_causal=True)[0])
    with torch.no_grad():
        assert attended(torch.bfloat16)[0].grad_fn is None
