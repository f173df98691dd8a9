"""Attention for training on a CPU, by products of matrices that keep the probabilities: the backward pass of
torch's own takes a third of a small model's step there in bfloat16. In float32 it is slower only where a mask
hides much: over 8 rows of packed questions 0.34 s a layer instead of 0.57 (one thread of a Zen 2 core)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MOST_KEPT = 2**28  # bytes of probabilities of one call: beyond, memory is worth more than time
AT_ONCE = 2**22  # scores that are computed at a time: what stays in a CPU's cache
QUERIES = 128  # of which the keys that none sees are left out


class KeptProbabilities(torch.autograd.Function):
    """q (B, H, T, D), k and v (B, H_kv, S, D), an additive mask (B, 1, T, S) or None -> (B, H, T, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        heads, dim = q.shape[1], q.shape[-1]
        out, kept = torch.empty_like(q), []
        for rows, asked, seen in parts(q, k, mask):
            keys, values = (x[rows][:, :, seen].flatten(0, 1) for x in (k, v))
            queries = grouped(q[rows, :, asked], k)
            scores = torch.bmm(queries * dim**-0.5, keys.transpose(1, 2))
            if mask is not None:
                hidden = mask[rows, :, asked][..., seen]
                scores.view(-1, heads, *hidden.shape[2:]).add_(hidden)
            probabilities = scores.softmax(-1)
            kept.append((rows, asked, seen, probabilities))
            out[rows, :, asked] = torch.bmm(probabilities, values).view_as(out[rows, :, asked])
        ctx.kept = [place for *place, _ in kept]
        ctx.save_for_backward(q, k, v, *(probabilities for *_, probabilities in kept))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        (gradient,) = gradients
        scale = q.shape[-1] ** -0.5
        to_q, to_k, to_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (rows, asked, seen), probabilities in zip(ctx.kept, kept):
            keys, values = (x[rows][:, :, seen].flatten(0, 1) for x in (k, v))
            queries, above = grouped(q[rows, :, asked], k), grouped(gradient[rows, :, asked], k)
            to_values = torch.bmm(probabilities.transpose(1, 2), above)
            to_probabilities = torch.bmm(above, values.transpose(1, 2))
            to_scores = torch._softmax_backward_data(to_probabilities, probabilities, -1, q.dtype)
            to_scores *= scale
            to_q[rows, :, asked] = torch.bmm(to_scores, keys).view_as(to_q[rows, :, asked])
            to_keys = torch.bmm(to_scores.transpose(1, 2), queries)
            for total, part in ((to_k, to_keys), (to_v, to_values)):
                total[rows][:, :, seen] += part.view(-1, k.shape[1], *part.shape[1:])
        return to_q, to_k, to_v, None


Part = tuple[slice, slice, Tensor | slice]


def parts(q: Tensor, k: Tensor, mask: Tensor | None) -> list[Part]:
    """What is computed at a time: rows, queries, and the keys that any of these queries sees. Where questions
    packed after an image do not see each other, that is half of the keys."""
    batch, heads, length, _ = q.shape
    asked: list[tuple[slice, Tensor | slice]] = [(slice(0, length), slice(None))]
    if mask is not None:
        blocks = [slice(at, at + QUERIES) for at in range(0, length, QUERIES)]
        open_to = [(mask[:, 0, block] > -math.inf).flatten(0, 1).any(0) for block in blocks]
        asked = [(block, seen.nonzero()[:, 0]) for block, seen in zip(blocks, open_to)]
    found: list[Part] = []
    for block, seen in asked:
        width = len(seen) if isinstance(seen, Tensor) else k.shape[2]
        step = max(1, AT_ONCE // (heads * (min(block.stop, length) - block.start) * max(width, 1)))
        found += [(slice(at, at + step), block, seen) for at in range(0, batch, step)]
    return found


def grouped(x: Tensor, k: Tensor) -> Tensor:
    """(B, H, T, D) -> (B · H_kv, H / H_kv · T, D): the heads that share keys as more queries."""
    return x.reshape(len(x) * k.shape[1], -1, x.shape[-1])


class AttentionOnCPU(TorchFunctionMode):
    """While it is active, attention with gradients is computed by `KeptProbabilities` where that is faster:
    on a CPU, in bfloat16 or under a mask."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and torch.is_grad_enabled():
            result = _kept(*args, **kwargs)
            if result is not None:
                return result
        return function(*args, **kwargs)


def _kept(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attention by `KeptProbabilities`, with the arguments of PyTorch's; None where that is not faster."""
    q, k, v, mask = query, key, value, attn_mask
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    size = q.numel() // q.shape[-1] * k.shape[2] * q.element_size()
    faster = q.device.type == "cpu" and (q.dtype == torch.bfloat16 or mask is not None) and size <= MOST_KEPT
    additive = mask is None or (mask.is_floating_point() and mask.shape[:2] == (len(q), 1))
    if not (faster and additive) or is_causal or dropout_p or scale is not None:
        return None
    return KeptProbabilities.apply(q, k, v, mask)
