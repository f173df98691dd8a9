"""Positions and masks that a plain prompt does not need: scaled rotary frequencies, places in time, row and
column, rows of several segments."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from models.config import RopeScaling, TextConfig


def scaled_frequencies(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies (D_r / 2,) of a context that was extended after training.

    The llama3 rule is the one published with Llama 3.1: long wavelengths are divided by `factor`, short ones
    kept, and those between blended linearly.
    """
    if scaling.rope_type == "linear":
        return inv_freq / scaling.factor
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    long_limit, short_limit = original / low, original / high
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * (inv_freq / scaling.factor) + blend * inv_freq
    scaled = torch.where(wavelength > long_limit, inv_freq / scaling.factor, inv_freq)
    between = (wavelength <= long_limit) & (wavelength >= short_limit)
    return torch.where(between, blended, scaled)


def rope_axes(config: TextConfig) -> Tensor:
    """(D_h / 2,) int64: the axis of a token's three places (time, row, column) that turns each frequency."""
    _, rows, columns = config.rope_sections
    axes = torch.zeros(config.rotary_dim // 2, dtype=torch.int64)
    if config.rope_interleaved:  # time, row, column, time, row, column, … and time again where the others end
        axes[1 : 3 * rows : 3] = 1
        axes[2 : 3 * columns : 3] = 2
    else:
        axes[config.rope_sections[0] :] = 1
        axes[len(axes) - columns :] = 2
    return axes


def segment_places(positions: Tensor) -> Tensor:
    """The index of each position in its segment, (T,) or (B, T), from rotary places (…, T): a segment begins
    where they are 0, and nowhere else are all three of (3, B, T)."""
    begins = positions == 0
    if positions.dim() == 3:
        begins = begins.all(0)
    steps = torch.arange(begins.shape[-1], device=positions.device).expand(begins.shape)
    return steps - steps.masked_fill(~begins, 0).cummax(-1).values


def additive(mask: Tensor, x: Tensor) -> Tensor:
    """A bool mask as what is added to scores of x: SDPA makes that of a bool mask, too, but anew in every
    block, and then autograd keeps T² numbers for each of them."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """`models.language_model.attend` with a mask of blocks: of packed segments on a GPU.

    Only compiled it is one kernel that skips blocks; else it keeps all T² scores. Within a block that is
    compiled as a whole it is compiled with it.
    """
    as_it_is = q.device.type != "cuda" or torch.compiler.is_compiling()
    flex: Any = flex_attention if as_it_is else _compiled_flex_attention()
    return flex(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1], scale=scale)


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)  # not at import: that would import the compiler
