"""Summed cross-entropy of a head's logits, a chunk of positions at a time.

A vocabulary is wide: at SmolVLM's 49,280 tokens, 4,096 positions in float32 make 0.8 GB of logits, and
autograd would keep them, their softmax and their gradient at once. Here one chunk of logits exists. The
gradient of this loss with respect to logits needs nothing but the logits (softmax minus one-hot, times
whatever the sum is scaled by), so it is taken while they are there: backward runs no head again and only
scales what it finds. (torch.nn.functional.linear_cross_entropy does the same, with other rounding, more
memory, and for plain matrices only.)

    total, count = summed_cross_entropy(hidden, targets, head), len(targets)    # hidden (N, D), targets (N,)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# Bytes of float32 logits in a chunk. Each chunk adds to the gradient of the whole head, which costs its time
# in memory traffic: a GPU, which multiplies faster than it adds, wants more positions at once.
CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}
_MIN_POSITIONS = 16  # in a chunk, however wide the vocabulary


def chunk_positions(vocab_size: int, device: str) -> int:
    """The number of positions whose logits exist at once on a device (its type's name)."""
    return max(_MIN_POSITIONS, CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]) // (4 * vocab_size))


def summed_cross_entropy(
    hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], chunk: int | None = None
) -> Tensor:
    """Sum over positions of the cross-entropy of `head(hidden)`, accumulated in float32 (float64 in float64).

    Under autocast the head multiplies in autocast's dtype. No positions give a zero whose gradients are
    zeros: a rank that takes part in an exchange of gradients has some. A head that is not a plain linear
    layer (with an adapter, sharded, or compiled by itself) is called as it is, and again in backward.

    Args:
        hidden: (N, D), of labelled positions only.
        targets: (N,) int64, none of them ignored.
        head: (n, D) → (n, V) logits.
        chunk: positions whose logits exist at once; by default what `CHUNK_BYTES` allows.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"expected hidden (N, D) and targets (N,), got {tuple(hidden.shape)} and {tuple(targets.shape)}"
        )
    chunk = chunk or chunk_positions(getattr(head, "out_features", 2**16), hidden.device.type)
    if type(head) is nn.Linear and head.bias is None:
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
        return _LinearHeadLoss.apply(hidden, head.weight, targets, chunk, dtype)
    return -log_probabilities(hidden, targets, head, chunk).sum()


def log_probabilities(
    hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], chunk: int | None = None
) -> Tensor:
    """(N,) log-probabilities of targets, each of which may be weighted by itself; arguments, chunks and
    precision as of `summed_cross_entropy`. The head runs again in backward."""
    chunk = chunk or chunk_positions(getattr(head, "out_features", 2**16), hidden.device.type)
    parts = [
        checkpoint(_chunk_log_probabilities, head, rows, wanted, use_reentrant=False)
        for rows, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(parts)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunk_log_probabilities(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden)
    return -F.cross_entropy(logits.to(_wide(logits.dtype)), targets, reduction="none")


class _LinearHeadLoss(torch.autograd.Function):
    """The sum, and its gradients with respect to hidden states and weight, in one pass over the chunks."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk, dtype):
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        wide = _wide(dtype)
        matrix = weight.to(dtype)  # (V, D)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        # Chunks add up in float32, whatever the products are rounded to.
        weight_grad = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        for start in range(0, len(hidden), chunk):
            rows = hidden[start : start + chunk].to(dtype)  # (n, D)
            wanted = targets[start : start + chunk, None]
            logits = F.linear(rows, matrix).to(wide)  # (n, V): the only one
            logits -= logits.amax(-1, keepdim=True)
            picked = logits.gather(1, wanted)
            normalizer = logits.exp_().sum(-1, keepdim=True)
            total += (normalizer.log() - picked).sum()
            if not (wants_hidden or wants_weight):
                continue
            logits /= normalizer
            logits.scatter_add_(1, wanted, logits.new_full(wanted.shape, -1.0))
            gradient = logits.to(dtype)  # (n, V), of the logits
            if hidden_grad is not None:
                hidden_grad[start : start + chunk] = gradient @ matrix
            if weight_grad is None:
                continue
            if dtype == wide:
                weight_grad.addmm_(gradient.T, rows)
            else:
                weight_grad += gradient.T @ rows
        # Saved, not set on ctx: autograd then lets go of them as soon as backward has run.
        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        # In place: a second (V, D) would be the largest thing alive here. Going backward twice is refused by
        # autograd, which sees that what was saved has changed.
        gradients = [None if saved is None else saved.mul_(scale) for saved in ctx.saved_tensors]
        return *gradients, None, None, None
