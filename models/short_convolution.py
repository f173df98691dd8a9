"""A gated short convolution over the positions of a row, as LFM2 has it (arXiv:2511.23404)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import TextConfig


class ShortConvolution(nn.Module):
    """Two gates around a causal depthwise convolution of a few positions.

    A cache keeps its inputs by slot, {"conv"} (B, 1, S, D), and not the window that is read next: going back,
    forking and cutting a prompt anywhere are then what they are for attention.
    """

    def __init__(self, config: TextConfig):
        super().__init__()
        width, bias = config.hidden_size, config.conv_bias
        self.in_proj = nn.Linear(width, 3 * width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)
        self.weight = nn.Parameter(torch.empty(width, 1, config.conv_kernel))  # as `Conv1d` has it
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(
        self, x: Tensor, layer_cache: dict[str, Tensor] | None, start_pos: int | Tensor, before: Tensor
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D). `before` (T,) or (B, T) says how many positions of its segment each one
        has before it; where there is a cache, that is its slot."""
        taps = self.weight.shape[2]
        first, second, value = self.in_proj(x).chunk(3, dim=-1)
        inputs = first * value
        past = F.pad(inputs, (0, 0, taps - 1, 0))  # (B, taps - 1 + T, D)
        if layer_cache is not None:
            kept = layer_cache["conv"]
            if isinstance(start_pos, int):
                count = min(start_pos, taps - 1)
                past[:, taps - 1 - count : taps - 1] = kept[:, 0, start_pos - count : start_pos]
                kept[:, 0, start_pos : start_pos + x.shape[1]] = inputs
            else:
                rows = torch.arange(len(x), device=x.device)[:, None]
                steps = torch.arange(1 - taps, x.shape[1], device=x.device)
                slots = start_pos[:, None] + steps  # (B, taps - 1 + T)
                past[:, : taps - 1] = kept[rows, 0, slots[:, : taps - 1].clamp(min=0)].to(x.dtype)
                kept[rows, 0, slots[:, taps - 1 :]] = inputs.to(kept.dtype)
        out = inputs * self.weight[:, 0, -1]
        for back in range(1, taps):  # what lies before the segment is nothing to it
            earlier = past[:, taps - 1 - back : past.shape[1] - back]
            out = out + (earlier * self.weight[:, 0, -1 - back]).masked_fill((before < back)[..., None], 0)
        if self.bias is not None:
            out = out + self.bias
        return self.out_proj(second * out)
