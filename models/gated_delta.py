"""The gated delta rule over the positions of a row (arXiv:2412.06464), as Qwen3.5 has it.

The rule: each head has a matrix S (D_k, D_v), zero before the first position. One position at a time,

    S = e^decay · S                  forget
    u = rate · (value - key S)       the part of the value that S does not give for this key yet
    S = S + keyᵀ u                   remember
    out = query S                    read

with vectors as rows, keys and queries of length 1, `decay` (a logarithm) and `rate` one number a head.
`delta_rule` computes many positions at once, and gives the u of each. From an earlier matrix and the key, u
and decay of the positions since, the matrix after any of these follows (`advance`).

The cache: the matrix at the last two multiples of `STATE_WINDOW`, and rings with the key, u and decay of the
latest positions. Going back within a window is a smaller `start_pos`, as with attention; further back, a kept
copy is restored (`generation.states.snapshot`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generation.kv_cache import STATE_WINDOW, Kept, to_device
from models.config import TextConfig
from models.short_convolution import causal_convolution

CHUNK = 64  # positions that `delta_rule` solves together


class GatedDeltaRule(nn.Module):
    """Projections, a short convolution, the rule, and a gated norm over each head's result.

    The cache of a row, in float32 and of one size whatever its capacity, with W = `STATE_WINDOW`:

    state (H, 2, D_k · D_v): entry m % 2 is the matrix before slot m W, written with slot m W - 1.
    recent (H, 2 W, D_k + D_v + 1): entry s % 2 W is the key, u and decay of slot s.
    inputs (1, 2 W, C): entry s % 2 W is the convolution's input of slot s.

    Rewinding to `start_pos` is safe: later slots wrote to other entries of the rings, for up to
    W - kernel + 1 slots that are taken back.
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
        self.keeps = {
            "state": Kept(self.num_heads, self.key_dim * self.value_dim, 2),
            "recent": Kept(self.num_heads, self.key_dim + self.value_dim + 1, 2 * STATE_WINDOW),
            "inputs": Kept(1, 2 * keys + values, 2 * STATE_WINDOW),
        }

    def forward(self, x: Tensor, layer_cache: dict[str, Tensor] | None, at: Any) -> Tensor:
        """x (B, T, D) -> (B, T, D); `at` is a `models.language_model.At`. Positions beyond a row's length
        leave no trace in the cache."""
        inputs = self.in_proj_qkv(x)
        rate = self.in_proj_b(x).sigmoid().float()  # (B, T, H)
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        with torch.autocast(x.device.type, enabled=False):
            if layer_cache is None:
                past = inputs.new_zeros(len(x), self.conv_weight.shape[2] - 1, inputs.shape[2])
                parts = self.heads(inputs, past, at.before)
                begins = torch.arange(x.shape[1], device=x.device) - at.before
                out, *_ = delta_rule(*parts, decay, rate, begins=begins)
            elif x.shape[1] == 1 and (at.lengths is None or min(at.lengths) == 1):
                out = self._one(inputs, decay, rate, layer_cache, at)
            else:
                out = self._several(inputs, decay, rate, layer_cache, at)
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

    def _one(self, inputs, decay, rate, layer_cache, at) -> Tensor:
        """A position of each row: (B, H, 1, D_v). Nothing is read back from the device."""
        rows = torch.arange(len(inputs), device=inputs.device)
        slot = (
            at.start_pos if isinstance(at.start_pos, Tensor) else torch.full_like(rows, at.start_pos)
        )  # (B,)
        state, recent, kept = (layer_cache[name] for name in ("state", "recent", "inputs"))
        entry = slot % recent.shape[2]
        query, key, value = self.heads(inputs, self._past(kept, slot), at.before)
        kept[rows, 0, entry] = inputs[:, 0].float()

        decay, rate = (part.transpose(1, 2)[..., None] for part in (decay, rate))  # (B, H, 1, 1)
        matrix = self._matrix(layer_cache, slot) * decay.exp()
        new = rate * (value - key @ matrix)
        matrix = matrix + key.transpose(2, 3) @ new
        recent[rows, :, entry] = torch.cat((key, new, decay), -1)[:, :, 0]
        following, ends = (slot // STATE_WINDOW + 1) % 2, slot % STATE_WINDOW == STATE_WINDOW - 1
        old = state[rows, :, following]
        state[rows, :, following] = torch.where(ends[:, None, None], matrix.flatten(-2), old)
        return query @ matrix

    def _several(self, inputs, decay, rate, layer_cache, at) -> Tensor:
        """Positions of each row: (B, H, T, D_v). Rows that begin and end at different slots go together, and
        nothing is read back from the device."""
        rows, length = torch.arange(len(inputs), device=inputs.device), inputs.shape[1]
        start = at.start_pos if isinstance(at.start_pos, Tensor) else torch.full_like(rows, at.start_pos)
        count = torch.full_like(rows, length)
        if at.lengths is not None:  # the others decay and add nothing
            count = to_device(torch.tensor(at.lengths), inputs.device)
            padding = (torch.arange(length, device=rows.device) >= count[:, None])[..., None]
            decay, rate = decay.masked_fill(padding, 0), rate.masked_fill(padding, 0)
        state, recent, kept = (layer_cache[name] for name in ("state", "recent", "inputs"))
        query, key, value = self.heads(inputs, self._past(kept, start), at.before)
        out, added, matrices = delta_rule(query, key, value, decay, rate, self._matrix(layer_cache, start))

        # Of each entry, how many positions before the row's last one its slot is.
        size = recent.shape[2]
        back = ((start + count)[:, None] - 1 - torch.arange(size, device=rows.device)) % size
        index = count[:, None] - 1 - back
        for ring, new in ((recent, added), (kept, inputs[:, None].float())):
            taken = new[rows[:, None], :, index.clamp(min=0)].transpose(1, 2)
            ring.copy_(torch.where((index >= 0)[:, None, :, None], taken, ring))
        # The matrix is kept where the last two windows begin: that before a chunk, and what was added since.
        size, begins = min(CHUNK, length), (start + count) // STATE_WINDOW * STATE_WINDOW
        begins = begins[:, None] - torch.arange(0, 2 * STATE_WINDOW, STATE_WINDOW, device=rows.device)
        passed = (begins - start[:, None]).clamp(min=0)  # (B, 2)
        since = (passed // size * size)[..., None] + torch.arange(size, device=rows.device)
        held = added[rows[:, None, None], :, since.clamp(max=length - 1)]  # (B, 2, size, H, …)
        held = held.masked_fill((since >= passed[..., None])[..., None, None], 0).transpose(2, 3)
        chunk = torch.stack(matrices, 1)[rows[:, None], passed // size]  # (B, 2, H, D_k, D_v)
        new = advance(chunk.flatten(0, 1), held.flatten(0, 1)).view(*chunk.shape[:3], -1)
        entry = rows[:, None], slice(None), begins // STATE_WINDOW % 2
        state[entry] = torch.where((begins > start[:, None])[..., None, None], new, state[entry])
        return out

    def _past(self, kept: Tensor, slot: Tensor) -> Tensor:
        """The inputs (B, k - 1, C) of the slots before one of each row."""
        earlier = slot[:, None] + torch.arange(1 - self.conv_weight.shape[2], 0, device=slot.device)
        return kept[torch.arange(len(slot), device=slot.device)[:, None], 0, earlier % kept.shape[2]]

    def _matrix(self, layer_cache, slot: Tensor) -> Tensor:
        """The matrix (B, H, D_k, D_v) before a slot of each row: its window's, and what was added since."""
        state, recent = layer_cache["state"], layer_cache["recent"]
        rows, since = (torch.arange(n, device=slot.device) for n in (len(slot), STATE_WINDOW))
        window, place = slot // STATE_WINDOW, slot % STATE_WINDOW
        held = recent[rows[:, None], :, ((window * STATE_WINDOW)[:, None] + since) % recent.shape[2]]
        held = held.masked_fill((since >= place[:, None])[..., None, None], 0).transpose(1, 2)  # (B, H, W, …)
        matrix = state[rows, :, window % 2].masked_fill((window == 0)[:, None, None], 0)
        return advance(matrix.unflatten(-1, (self.key_dim, self.value_dim)), held)


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
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The rule over T positions, `CHUNK` at a time, in float32.

    Args:
        query, key: (B, H, T, D_k).
        value: (B, H, T, D_v).
        decay, rate: (B, T, H), in logarithms, and as they are.
        matrix: (B, H, D_k, D_v) before the first position; None for zeros.
        begins: index of the first position of each one's segment, (T,) or (B, T): what is before that is
            nothing to it. None where all belong to one.

    Returns:
        (out (B, H, T, D_v), what each position added (B, H, T, D_k + D_v + 1), the matrices (B, H, D_k, D_v)
        before each chunk and after the last).
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
        carried = starts < 0
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
    outs, news, matrices = list[Tensor](), list[Tensor](), [matrix]
    # Unbound, not indexed: the gradient of an index is as large as what it was taken from.
    parts = (solved, known, read, attention, of_matrix[..., -1, None, None], kept)
    for added, seen, reads, attends, decays, keeps in zip(*(part.unbind(2) for part in parts), strict=True):
        new = added - seen @ matrix
        outs.append(reads @ matrix + attends @ new)
        matrix = torch.addcmul(keeps @ new, matrix, decays)
        news.append(new)
        matrices.append(matrix)
    out, new = (torch.stack(parts, 2).flatten(2, 3)[:, :, :length] for parts in (outs, news))
    return out, torch.cat((key, new, decay[..., None]), -1), matrices
