"""A gated short convolution over the positions of a row, as LFM2 has it (arXiv:2511.23404)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from generation.kv_cache import Kept
from models.config import TextConfig


class ShortConvolution(nn.Module):
    """Two gates around a causal depthwise convolution over a few positions.

    Its cache {"conv"} (B, 1, S, D) holds the inputs of all slots, not only of the last few: so rewinding,
    forking and cutting a prompt anywhere work as they do with attention.
    """

    def __init__(self, config: TextConfig):
        super().__init__()
        width, bias = config.hidden_size, config.conv_bias
        self.in_proj = nn.Linear(width, 3 * width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)
        self.weight = nn.Parameter(torch.empty(width, 1, config.conv_kernel))  # as `Conv1d` has it
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.keeps = {"conv": Kept(1, width)}

    def forward(self, x: Tensor, layer_cache: dict[str, Tensor] | None, at: Any) -> Tensor:
        """x (B, T, D) -> (B, T, D); `at` is a `models.language_model.At`."""
        taps = self.weight.shape[2]
        first, second, value = self.in_proj(x).chunk(3, dim=-1)
        inputs = first * value
        past = inputs.new_zeros(len(x), taps - 1, inputs.shape[2])
        if layer_cache is not None:
            kept = layer_cache["conv"]
            rows = torch.arange(len(x), device=x.device)[:, None]
            steps = torch.arange(1 - taps, x.shape[1], device=x.device)
            slots = (at.start_pos if isinstance(at.start_pos, int) else at.start_pos[:, None]) + steps
            past = kept[rows, 0, slots[..., : taps - 1].clamp(min=0)].to(x.dtype)  # (B, taps - 1, D)
            kept[rows, 0, slots[..., taps - 1 :]] = inputs.to(kept.dtype)
        out = causal_convolution(inputs, past, self.weight, at.before)
        if self.bias is not None:
            out = out + self.bias
        return self.out_proj(second * out)


def causal_convolution(inputs: Tensor, past: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """The convolution (B, T, C) of inputs (B, T, C) and of the k - 1 positions before them with a kernel
    (C, 1, k). Positions before the start of a segment count as zero: `before` (T,) or (B, T) is the number of
    positions before each one in its segment."""
    taps = weight.shape[2]
    past = torch.cat((past, inputs), 1)  # (B, k - 1 + T, C)
    out = inputs * weight[:, 0, -1]
    for back in range(1, taps):
        earlier = past[:, taps - 1 - back : past.shape[1] - back]
        out = out + (earlier * weight[:, 0, -1 - back]).masked_fill((before < back)[..., None], 0)
    return out
