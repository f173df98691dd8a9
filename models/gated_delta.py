"""The gated delta rule over the positions of a row (arXiv:2412.06464), as Qwen3.5 has it.

A head keeps a matrix S (D_k, D_v), which a position decays, corrects and reads:

    u = rate · (value - e^decay · key S)        what the matrix does not say of this key yet
    S = e^decay · S + keyᵀ u
    out = query S

`delta_rule` computes many positions at once. From the matrix before them and their keys, decays and u, that
after any of them follows (`advance`). So a cache keeps two kinds of things: the matrix where a window of
`DELTA_WINDOW` positions begins, and of the positions since then what they add. Going back within that is a
smaller `start_pos`, as it is for attention; further back leads a kept copy (`generation.kv_cache.snapshot`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import DELTA_WINDOW, TextConfig
from models.short_convolution import causal_convolution

CHUNK = 64  # positions that `delta_rule` solves together


class GatedDeltaRule(nn.Module):
    """Projections, a short convolution, the rule, and a gated norm over each head's result.

    A cache holds, in float32 and whatever its capacity, {"state": (B, H, 2, D_k · D_v), "recent": (B, H, 2 W,
    D_k + D_v + 1), "inputs": (B, 1, 2 W, C)}, W = `DELTA_WINDOW`. Window m is slots m W … m W + W - 1: the
    matrix before it is entry m % 2 of "state", written with the last slot before it; slot s is entry s % 2 W
    of "recent" (key, u, decay) and of "inputs", those of the convolution. So whatever is written at slots
    from `start_pos` on leaves what a pass from there needs alone, as long as no pass writes more than
    W - kernel + 1 slots of a row in vain.
    """

    def __init__(self, config: TextConfig):
        super().__init__()
        self.num_heads, self.num_key_heads = config.delta_value_heads, config.delta_key_heads
        self.key_dim, self.value_dim = config.delta_key_dim, config.delta_value_dim
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        self.in_proj_qkv = nn.Linear(config.hidden_size, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(2 * keys + values, 1, config.conv_kernel))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.norm = nn.RMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, config.hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        layer_cache: dict[str, Tensor] | None,
        start_pos: int | Tensor,
        before: Tensor,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D). `before` as of `ShortConvolution`; of each row so many positions are real
        as `lengths` says, None for all: the others leave no trace in the cache."""
        inputs = self.in_proj_qkv(x)
        rate = self.in_proj_b(x).sigmoid().float()  # (B, T, H)
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        with torch.autocast(x.device.type, enabled=False):
            if layer_cache is None:
                past = inputs.new_zeros(len(x), self.conv_weight.shape[2] - 1, inputs.shape[2])
                parts = self.heads(inputs, past, before)
                begins = torch.arange(x.shape[1], device=x.device) - before
                out, *_ = delta_rule(*parts, decay, rate, begins=begins)
            elif x.shape[1] == 1 and (lengths is None or min(lengths) == 1):
                out = self._one(inputs, decay, rate, layer_cache, start_pos, before)
            else:
                out = self._several(inputs, decay, rate, layer_cache, start_pos, before, lengths)
        gate = F.silu(self.in_proj_z(x).float()).view(*x.shape[:2], self.num_heads, self.value_dim)
        normed = F.rms_norm(out.transpose(1, 2), (self.value_dim,), eps=self.norm.eps).to(x.dtype)
        out = (self.norm.weight * normed * gate).to(x.dtype)  # (B, T, H, D_v)
        return self.out_proj(out.flatten(2))

    def heads(self, inputs: Tensor, past: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs (B, T, C) with those of the slots before them -> queries, keys (B, H, T, D_k), values
        (B, H, T, D_v), in float32."""
        mixed = F.silu(causal_convolution(inputs, past.to(inputs.dtype), self.conv_weight, before)).float()
        keys = self.num_key_heads * self.key_dim
        query, key, value = mixed.split((keys, keys, self.num_heads * self.value_dim), dim=-1)
        query, key = (unit(part.unflatten(-1, (-1, self.key_dim))) for part in (query, key))
        each = self.num_heads // self.num_key_heads
        query, key = (part.repeat_interleave(each, 2).transpose(1, 2) for part in (query, key))
        value = value.unflatten(-1, (-1, self.value_dim)).transpose(1, 2)
        return query * self.key_dim**-0.5, key, value

    def _one(self, inputs, decay, rate, layer_cache, start_pos, before) -> Tensor:
        """A position of each row: (B, H, 1, D_v). Nothing is read back from the device."""
        rows, taps = torch.arange(len(inputs), device=inputs.device), self.conv_weight.shape[2]
        slot = start_pos if isinstance(start_pos, Tensor) else torch.full_like(rows, start_pos)  # (B,)
        state, recent, kept = (layer_cache[name] for name in ("state", "recent", "inputs"))
        ring, window, place = recent.shape[2], slot // DELTA_WINDOW, slot % DELTA_WINDOW
        earlier = (slot[:, None] + torch.arange(1 - taps, 0, device=slot.device)) % ring
        parts = self.heads(inputs, kept[rows[:, None], 0, earlier], before)
        kept[rows, 0, slot % ring] = inputs[:, 0].float()

        since = torch.arange(DELTA_WINDOW, device=slot.device)
        held = recent[rows[:, None], :, ((window * DELTA_WINDOW)[:, None] + since) % ring]  # (B, W, H, …)
        held = held.masked_fill((since >= place[:, None])[..., None, None], 0).transpose(1, 2)
        matrix = state[rows, :, window % 2].masked_fill((window == 0)[:, None, None], 0)
        matrix = advance(matrix.unflatten(-1, (self.key_dim, self.value_dim)), held)
        out, added, matrix = delta_rule(*parts, decay, rate, matrix)
        recent[rows, :, slot % ring] = added[:, :, 0]
        entry, ends = (window + 1) % 2, (place == DELTA_WINDOW - 1)[:, None, None]
        state[rows, :, entry] = torch.where(ends, matrix.flatten(-2), state[rows, :, entry])
        return out

    def _several(self, inputs, decay, rate, layer_cache, start_pos, before, lengths) -> Tensor:
        """Positions of each row: (B, H, T, D_v). Rows that begin or end at different slots go one by one."""
        batch, length = inputs.shape[:2]
        starts = [start_pos] * batch if isinstance(start_pos, int) else start_pos.tolist()
        spans = list(zip(starts, [length] * batch if lengths is None else lengths, strict=True))
        if spans.count(spans[0]) == batch:
            return self._span(inputs, decay, rate, layer_cache, *spans[0], before)
        before = before.expand(batch, length)
        out = []
        for row, span in enumerate(spans):
            one = slice(row, row + 1)
            own = {name: tensor[one] for name, tensor in layer_cache.items()}
            out.append(self._span(inputs[one], decay[one], rate[one], own, *span, before[one]))
        return torch.cat(out)

    def _span(self, inputs, decay, rate, layer_cache, start: int, length: int, before) -> Tensor:
        """The first `length` positions of all rows from slot `start` on; for the others the result is 0."""
        if not length:
            return inputs.new_zeros(len(inputs), self.num_heads, inputs.shape[1], self.value_dim).float()
        state, recent, kept = (layer_cache[name] for name in ("state", "recent", "inputs"))
        end, ring, taps = start + length, recent.shape[2], self.conv_weight.shape[2]
        slots = torch.arange(start - taps + 1, end, device=inputs.device)
        past = kept[:, 0, slots[: taps - 1] % ring]
        query, key, value = self.heads(inputs, past, before)
        last = slots[taps - 1 :][-ring:]
        kept[:, 0, last % ring] = inputs[:, length - len(last) : length].float()

        window = start // DELTA_WINDOW
        matrix = state[:, :, window % 2] if window else torch.zeros_like(state[:, :, 0])
        matrix = matrix.unflatten(-1, (self.key_dim, self.value_dim))
        held = torch.arange(window * DELTA_WINDOW, start, device=inputs.device) % ring
        matrix = advance(matrix, recent[:, :, held])
        # The matrix is kept where the last two windows begin.
        last_begin = end - end % DELTA_WINDOW
        ends = [at for at in (last_begin - DELTA_WINDOW, last_begin) if at > start]
        at, outs, added = start, list[Tensor](), recent[:, :, :0]
        for stop in [*ends, *[end] * (end not in ends)]:
            part = slice(at - start, stop - start)
            numbers = (query[:, :, part], key[:, :, part], value[:, :, part], decay[:, part], rate[:, part])
            out, new, matrix = delta_rule(*numbers, matrix)
            if stop in ends:
                state[:, :, stop // DELTA_WINDOW % 2] = matrix.flatten(-2)
            at, outs, added = stop, [*outs, out], torch.cat((added, new), 2)[:, :, -ring:]
        recent[:, :, last % ring] = added
        padding = inputs.shape[1] - length
        return F.pad(torch.cat(outs, 2), (0, 0, 0, padding))


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1, as flash-linear-attention makes them."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def advance(matrix: Tensor, added: Tensor) -> Tensor:
    """The matrix (B, H, D_k, D_v) after positions that added (B, H, T, D_k + D_v + 1): their keys, u and
    decays. Of a position that added zeros nothing is left."""
    key, new, decay = added.split((*matrix.shape[2:], 1), dim=-1)
    total = decay.cumsum(2)
    left = (total[:, :, -1:] - total).exp()  # (B, H, T, 1): of what each one added, at the end
    return matrix * decay.sum(2, keepdim=True).exp() + (key * left).transpose(2, 3) @ new


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    matrix: Tensor | None = None,
    begins: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rule over T positions, `CHUNK` at a time, in float32.

    Args:
        query, key: (B, H, T, D_k).
        value: (B, H, T, D_v).
        decay, rate: (B, T, H), in logarithms, and as they are.
        matrix: (B, H, D_k, D_v) before the first position; None for zeros.
        begins: index of the first position of each one's segment, (T,) or (B, T): what is before that is
            nothing to it. None where all belong to one.

    Returns:
        (out (B, H, T, D_v), what each position added (B, H, T, D_k + D_v + 1), the matrix after the last).
    """
    batch, heads, length, _ = key.shape
    size = min(CHUNK, length)
    count = -(-length // size)
    decay, rate = decay.transpose(1, 2), rate.transpose(1, 2)
    filled = count * size - length
    chunks = (batch, heads, count, size)
    keys, queries, values = (
        F.pad(part, (0, 0, 0, filled)).contiguous().view(*chunks, -1) for part in (key, query, value)
    )
    decays, rates = (F.pad(part, (0, filled)).view(chunks) for part in (decay, rate))
    total = decays.cumsum(-1)
    # (…, i, j): what is left at i of what j added; to the matrix before the chunk, and at its end.
    since = total[..., :, None] - total[..., None, :]
    order = torch.arange(size, device=key.device)
    seen = order <= order[:, None]
    carried = torch.ones(1, 1, count, size, dtype=torch.bool, device=key.device)
    if begins is not None:
        places = begins.expand(batch, length)
        places = F.pad(places, (0, filled), value=0)
        if filled:
            places[:, length:] = places[:, length - 1 : length]
        starts = places.view(batch, 1, count, size) - (torch.arange(count, device=key.device) * size)[:, None]
        seen = seen & (order >= starts[..., None])
        carried = starts <= 0
    left = since.masked_fill(~seen, -torch.inf).exp()
    of_matrix = total.exp() * carried
    system = rates[..., None] * (keys @ keys.transpose(-1, -2)) * left
    wanted = torch.cat((values, keys * of_matrix[..., None]), -1) * rates[..., None]
    # Only what is below the diagonal is read, which stands for ones.
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    solved, known = solved.split((value.shape[3], key.shape[3]), -1)
    attention = (queries @ keys.transpose(-1, -2)) * left
    read = queries * of_matrix[..., None]
    kept = (keys * left[..., -1, :, None]).transpose(-1, -2)
    if matrix is None:
        matrix = key.new_zeros(batch, heads, key.shape[3], value.shape[3])
    outs, news = [], []
    # Unbound, not indexed: the gradient of an index is as large as what it was taken from.
    parts = (solved, known, read, attention, of_matrix[..., -1, None, None], kept)
    for added, seen, reads, attends, decays, keeps in zip(*(part.unbind(2) for part in parts), strict=True):
        new = added - seen @ matrix
        outs.append(reads @ matrix + attends @ new)
        matrix = matrix * decays + keeps @ new
        news.append(new)
    out, new = (torch.stack(parts, 2).flatten(2, 3)[:, :, :length] for parts in (outs, news))
    return out, torch.cat((key, new, decay[..., None]), -1), matrix
