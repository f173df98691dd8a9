"""Attention for training in bfloat16 on a CPU, by products of matrices that keep the probabilities: the
backward pass of torch's own takes a third of a small model's step there."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MOST_KEPT = 2**27  # bytes of probabilities of one call: beyond, memory is worth more than time
AT_ONCE = 2**22  # scores that are computed at a time: what stays in a CPU's cache


class KeptProbabilities(torch.autograd.Function):
    """q (B, H, T, D), k and v (B, H_kv, S, D), an additive mask (B, 1, T, S) or None -> (B, H, T, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, length, dim = q.shape
        out, kept = torch.empty_like(q), []
        step = max(1, AT_ONCE // (heads * length * k.shape[2]))
        for at in range(0, batch, step):
            rows = slice(at, at + step)
            queries, keys, values = grouped(q[rows], k), k[rows].flatten(0, 1), v[rows].flatten(0, 1)
            scores = torch.bmm(queries * dim**-0.5, keys.transpose(1, 2))
            if mask is not None:
                scores.view(-1, heads, length, k.shape[2]).add_(mask[rows])
            probabilities = scores.softmax(-1)
            kept.append(probabilities)
            out[rows] = torch.bmm(probabilities, values).view(-1, heads, length, dim)
        ctx.step = step
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        (gradient,) = gradients
        scale = q.shape[-1] ** -0.5
        to_q, to_k, to_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for number, probabilities in enumerate(kept):
            rows = slice(number * ctx.step, (number + 1) * ctx.step)
            queries, keys, values = grouped(q[rows], k), k[rows].flatten(0, 1), v[rows].flatten(0, 1)
            above = grouped(gradient[rows], k)
            to_v[rows] = torch.bmm(probabilities.transpose(1, 2), above).view_as(v[rows])
            to_probabilities = torch.bmm(above, values.transpose(1, 2))
            to_scores = torch._softmax_backward_data(to_probabilities, probabilities, -1, q.dtype)
            to_scores *= scale
            to_q[rows] = torch.bmm(to_scores, keys).view_as(q[rows])
            to_k[rows] = torch.bmm(to_scores.transpose(1, 2), queries).view_as(k[rows])
        return to_q, to_k, to_v, None


def grouped(x: Tensor, k: Tensor) -> Tensor:
    """(B, H, T, D) -> (B · H_kv, H / H_kv · T, D): the heads that share keys as more queries."""
    return x.reshape(len(x) * k.shape[1], -1, x.shape[-1])


class AttentionOnCPU(TorchFunctionMode):
    """While it is active, attention with gradients is computed by `KeptProbabilities` where that is faster:
    in bfloat16 on a CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and torch.is_grad_enabled():
            q, k, v = args
            if torch.is_autocast_enabled(q.device.type):
                q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in args)
            mask, size = kwargs.get("attn_mask"), q.numel() // q.shape[-1] * k.shape[2] * q.element_size()
            faster = q.device.type == "cpu" and q.dtype == torch.bfloat16 and size <= MOST_KEPT
            additive = mask is None or (mask.is_floating_point() and mask.shape[:2] == (len(q), 1))
            if faster and additive and not kwargs.get("is_causal"):
                return KeptProbabilities.apply(q, k, v, mask)
        return function(*args, **kwargs)
