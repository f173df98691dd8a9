"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention (or, in some layers, what else
`TextConfig.layer_types` says), SwiGLU.

The cache is a list with one dict per layer, of attention {"key", "value"} (B, H_kv, S, D_h), made by whoever
decodes (`generation/kv_cache.py`). Slot s of a row holds token s of that row: `start_pos` says where keys are
written, and how they are rotated, unless a family has rotary places of its own (`position_ids`, `offset`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from generation.kv_cache import Kept, KVCache, Layout, geometry
from models.config import TextConfig
from models.gated_delta import GatedDeltaRule
from models.packed_rows import additive, attend_blocks, rope_axes, scaled_frequencies, segment_places
from models.short_convolution import ShortConvolution


def rope_frequencies(config: TextConfig, device=None) -> Tensor:
    """Inverse rotary frequencies, (D_r / 2,) float32 for D_r rotated numbers of a head."""
    dim = config.rotary_dim
    exponent = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    inv_freq = 1.0 / (config.rope_theta**exponent)
    return inv_freq if config.rope_scaling is None else scaled_frequencies(inv_freq, config.rope_scaling)


def rope_tables(inv_freq: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for absolute positions (T,), (B, T) or, frequency by frequency, (B, T, D_h / 2): each
    (1 or B, 1, T, D_h), computed in float32."""
    positions = positions if positions.dim() == 3 else positions[..., None]
    angles = positions.to(torch.float32) * inv_freq  # (..., T, D_h / 2)
    angles = torch.cat((angles, angles), dim=-1)
    if angles.dim() == 2:
        angles = angles[None]
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, H, T, D_h) by half-splitting, the layout of Llama checkpoints on the Hub; what is beyond the
    tables' width stays."""
    x, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    rotated = x * cos + torch.cat((-second, first), dim=-1) * sin
    if not rest.shape[-1]:
        return rotated
    # In the order (B, T, H, D_h) of memory, as `Attention.project` has it.
    return torch.cat((rotated.transpose(1, 2), rest.transpose(1, 2)), dim=-1).transpose(1, 2)


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """Scales by 1 + weight. Not folded into the weight: what is saved would lose bits."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


def rms_norm(config: TextConfig, width: int | None = None) -> nn.RMSNorm:
    """A norm of hidden states, or of `width` numbers."""
    kind = ZeroCenteredRMSNorm if config.zero_centered_norms else nn.RMSNorm
    return kind(width or config.hidden_size, config.rms_norm_eps)


class At(NamedTuple):
    """The positions of a pass: all that its layers need besides hidden states and caches.

    rope: cos and sin of their rotary places, each (1 or B, 1, T, D_r).
    mask: the keys that each position may attend to, as `attention_mask_for` makes it.
    start_pos: the slot of the first position, an int, or (B,) where rows differ.
    kv_length: number of slots that may be attended to.
    before: number of positions before each one in its segment, (T,) or (B, T); with a cache, its slot.
    real: (B, T, 1), 0 on padding; None where all are real.
    lengths: with a cache, the number of real positions of each row, the first ones; None for all.
    """

    rope: Any
    mask: Any
    start_pos: int | Tensor
    kv_length: int
    before: Tensor
    real: Tensor | None = None
    lengths: Sequence[int] | None = None


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with its three cases spelled out in `attend`."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        width, bias = config.hidden_size, config.attention_bias
        self.gated = config.attention_gate  # head by head queries and, after them, their gates
        queries = self.num_heads * self.head_dim * (2 if self.gated else 1)
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, width, bias=bias and not config.qkv_bias_only)
        self.q_norm = rms_norm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = rms_norm(config, self.head_dim) if config.qk_norm else None
        self.keeps = dict.fromkeys(("key", "value"), Kept(self.num_kv_heads, self.head_dim))

    def forward(self, x: Tensor, layer_cache: dict[str, Tensor] | None, at: At) -> Tensor:
        batch, length, _ = x.shape
        q, k, v, gate = self.project(x, at.rope)
        if layer_cache is not None:
            k, v = through_cache(layer_cache, k, v, at)
        out = attend(q, k, v, at.mask)
        out = out.transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(out if gate is None else out * gate.sigmoid())

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(B, T, D) -> queries (B, H, T, D_h), keys and values (B, H_kv, T, D_h), rotated as they are cached,
        and the gates before their sigmoid (B, T, H · D_h), or None.

        Attribution calls this, too. The fast steps compute their own, and refuse attention that they do not
        know.
        """
        by_head = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (part(x).view(by_head) for part in (self.q_proj, self.k_proj, self.v_proj))
        gate = None
        if self.gated:
            q, gate = (part.reshape(by_head) for part in q.view(*x.shape[:2], -1, 2, self.head_dim).unbind(3))
            gate = gate.flatten(2)
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        # Both at once: on a GPU a short prompt takes as long as its kernels are many. Memory keeps the order
        # (B, T, H, D_h), and so does attention's result: `o_proj` reads it without a copy.
        both = apply_rope(torch.cat((q, k), dim=2).transpose(1, 2), *rope)
        q, k = both.split((self.num_heads, self.num_kv_heads), dim=1)
        return q, k, v.transpose(1, 2), gate


def write_cache(layer_cache: dict[str, Tensor], key: Tensor, value: Tensor, start_pos: int | Tensor) -> None:
    """Write (B, H_kv, T, D_h) in place at slots start_pos … start_pos + T - 1 of each row."""
    length = key.shape[2]
    if isinstance(start_pos, int):
        layer_cache["key"][:, :, start_pos : start_pos + length] = key
        layer_cache["value"][:, :, start_pos : start_pos + length] = value
        return
    rows = torch.arange(key.shape[0], device=key.device)[:, None]  # (B, 1)
    slots = start_pos[:, None] + torch.arange(length, device=key.device)  # (B, T)
    # Advanced indexing puts the indexed axes in front: (B, T, H_kv, D_h).
    # Unlike a slice above, it does not convert to the cache's dtype.
    layer_cache["key"][rows, :, slots] = key.transpose(1, 2).to(layer_cache["key"].dtype)
    layer_cache["value"][rows, :, slots] = value.transpose(1, 2).to(layer_cache["value"].dtype)


def through_cache(
    layer_cache: dict[str, Tensor], key: Tensor, value: Tensor, at: At
) -> tuple[Tensor, Tensor]:
    """`write_cache`, and keys and values (B, H_kv, kv_length, D_h) to look at."""
    write_cache(layer_cache, key, value, at.start_pos)
    if at.kv_length == key.shape[2]:
        return key, value
    # There is a prefix: read it back with what was just written. `to` does nothing unless the cache is kept
    # in fewer bits than the activations.
    key, value = (layer_cache[name][:, :, : at.kv_length].to(key.dtype) for name in ("key", "value"))
    return key, value


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Attention of q (B, H, T, D_h) over k, v (B, H_kv, S, D_h), scores scaled by D_h^-0.5 unless a scale is
    given: returns (B, H, T, D_h).

    Never a mask together with is_causal: what that means depends on the backend.
    """
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    if length == 1:
        # Decode: one query sees every key, so no causal mask; `mask` only hides slots that a shorter row
        # has not filled. The heads of a group share their keys: fold them into the query axis
        # instead of repeating the keys.
        q = q.reshape(batch, kv_heads, heads // kv_heads, dim)
        # `reshape`: some kernels give their result in the memory order (B, T, H, D_h), which no view merges.
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return out.reshape(batch, heads, 1, dim)
    grouped = heads != kv_heads
    if mask is None:
        # Training and full prefill: as many queries as keys, plain causal.
        assert length == k.shape[2], f"causal attention needs T == S, got {length} and {k.shape[2]}"
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, scale=scale)
    if isinstance(mask, BlockMask):  # packed segments on a GPU
        return attend_blocks(q, k, v, mask, scale)
    # A chunk on a cached prefix, padding, or packed segments: the mask says all.
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped, scale=scale)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202), or with the tanh GELU in place of Swish."""

    def __init__(self, width: int, inner: int, bias: bool = False, act: str = "silu"):
        super().__init__()
        self.swish = act == "silu"
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.silu(gate) if self.swish else F.gelu(gate, approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


# A layer's mixer -> its name in the block, and its type.
MIXERS: dict[str, tuple[str, Callable[[TextConfig], Any]]] = {
    "attention": ("self_attn", Attention),
    "conv": ("conv", ShortConvolution),
    "delta": ("linear_attn", GatedDeltaRule),
}


class DecoderBlock(nn.Module):
    self_attn: Attention  # this, `conv` or `linear_attn`

    def __init__(self, config: TextConfig, index: int):
        super().__init__()
        self.input_layernorm = rms_norm(config)
        self.mixer = config.mixer(index)
        self.mixed_by, kind = MIXERS[self.mixer]
        mixer = kind(config)
        self.add_module(self.mixed_by, mixer)
        self.keeps = mixer.keeps
        self.post_attention_layernorm = rms_norm(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, layer_cache: dict[str, Tensor] | None, at: At) -> Tensor:
        normed = self.input_layernorm(x)
        if self.mixer != "attention" and at.real is not None:
            normed = normed * at.real
        x = x + getattr(self, self.mixed_by)(normed, layer_cache, at)
        return x + self.mlp(self.post_attention_layernorm(x))


class LanguageModel(nn.Module):
    """Embeddings in, hidden states out; `logits` is a call of its own."""

    block: ClassVar[Callable[..., nn.Module]] = DecoderBlock

    def __init__(self, config: TextConfig, tie_word_embeddings: bool = False):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.block(config, i) for i in range(config.num_hidden_layers))
        self.norm = rms_norm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tied = tie_word_embeddings
        if tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self._inv_freq: Tensor | None = None

    @property
    def cache_layout(self) -> Layout:
        """The cache's tensors of each layer, by name."""
        return [layer.keeps for layer in self.layers]  # type: ignore[misc]

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of keys and values: that of activations; bfloat16 for float32 around packed weights."""
        own, stored = self.norm.weight.dtype, self.embed_tokens.weight.dtype
        return torch.bfloat16 if own == torch.float32 and stored != own else own

    def inv_freq(self, device: torch.device) -> Tensor:
        """(D_h / 2,) float32 rotary frequencies; computed once, and never stored with the weights."""
        if self._inv_freq is None or self._inv_freq.device != device:
            self._inv_freq = rope_frequencies(self.config, device)
        return self._inv_freq

    def turns(self, positions: Tensor) -> Tensor:
        """The position that turns each frequency: (…, T) for all alike, or (B, T, D_h / 2) of (3, B, T)."""
        if positions.dim() < 3:
            return positions
        return positions.movedim(0, -1)[..., rope_axes(self.config).to(positions.device)]

    @property
    def loss_head(self) -> Callable[[Tensor], Tensor]:
        """Hidden states -> logits for `models.losses`: the matrix, where that is all."""
        return self.lm_head

    def embed(self, input_ids: Tensor) -> Tensor:
        """Ids (B, T) -> embeddings (B, T, D)."""
        return self.embed_tokens(input_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, D) hidden states -> (…, V) logits."""
        return self.lm_head(hidden)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | BlockMask | None = None,
        kv_cache: KVCache | None = None,
        start_pos: int | Tensor = 0,
        position_ids: Tensor | None = None,
        offset: int | Tensor = 0,
        lengths: Sequence[int] | None = None,
    ) -> tuple[Tensor, KVCache | None]:
        """Run the decoder.

        Args:
            x: (B, T, D) embeddings; (B, T, (1 + n) · D) with what is added after layers 0 … n - 1
                (DeepStack, arXiv:2406.04334).
            attention_mask: None; or (B, S) with 0 on padding, S = start_pos + T; or (B, T, S) bool, True
                where a query may look, which then has the whole say (packed segments, shared prefixes),
                as has a `BlockMask` of flex_attention. Short convolutions read what lies before a position
                in its segment, so a prefix that several share is not for them.
            kv_cache: a dict per layer, written in place at start_pos; None keeps nothing.
            start_pos: position of the first token, an int, or (B,) int64 where rows differ.
            position_ids: rotary places where they are not the slots: (B, T), or (3, B, T) by time, row and
                column for a model with `rope_sections`.
            offset: rotary place less slot where that is one number for each row: an int, or (B,) int64.
            lengths: with a cache, the number of real positions among the T of each row, the first ones; None
                for all. Keys of the others are overwritten later, but a state could not forget them.

        Returns:
            (hidden states (B, T, D), the cache that was given).
        """
        batch, length, _ = x.shape
        steps = torch.arange(length, device=x.device)
        padding: Tensor | None = None
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            padding = attention_mask
        if isinstance(start_pos, int):
            slots = start_pos + steps  # (T,): where the queries stand
            kv_length = start_pos + length  # the keys that they may look at
        else:
            if kv_cache is None:
                raise ValueError("a start_pos for each row needs a kv_cache")
            slots = start_pos[:, None] + steps  # (B, T)
            # Reading the longest row back would stop the device: whoever decodes hands in a buffer (or a view
            # of one) of fitting length, and the mask hides what a row has not filled.
            kv_length = geometry(kv_cache).capacity
        positions = slots + (offset[:, None] if isinstance(offset, Tensor) else offset)
        if position_ids is not None:
            positions = position_ids
        elif padding is not None and kv_cache is None:
            # Padding takes no position: the first real token of a row stands at 0.
            positions = (padding.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        if kv_cache is not None:
            rows, capacity, *_ = geometry(kv_cache)
            if rows != batch or capacity < kv_length:
                raise ValueError(
                    f"kv_cache holds {rows} rows of {capacity} positions; "
                    f"this call needs {batch} rows of {kv_length}"
                )
        before, real = slots, None if padding is None else padding[:, -length:, None].to(x.dtype)
        if kv_cache is None and {"conv", "delta"} & {*self.config.layer_types}:
            if position_ids is None and attention_mask is not padding:
                raise ValueError("packed segments need position_ids, of which each begins with 0")
            before = segment_places(positions)
        mask = attention_mask_for(length, kv_length, attention_mask, slots)
        at = At(None, mask, start_pos, kv_length, before, real, lengths)
        return self.norm(self.through_layers(x, kv_cache, positions, slots, at)), kv_cache

    def through_layers(
        self, x: Tensor, kv_cache: KVCache | None, positions: Tensor, slots: Tensor, at: At
    ) -> Tensor:
        """Hidden states (B, T, D) after the last layer. `at` has no rotary places yet, which `positions`
        are."""
        rope = rope_tables(self.inv_freq(x.device), self.turns(positions), x.dtype)
        at = at._replace(rope=rope, mask=in_training(at.mask, x, kv_cache))
        x, *deep = x.split(self.config.hidden_size, dim=-1)
        for index, layer in enumerate(self.layers):
            x = layer(x, None if kv_cache is None else kv_cache[index], at)
            if index < len(deep):
                x = x + deep[index]
        return x


def in_training(mask: Any, x: Tensor, kv_cache: KVCache | None) -> Any:
    """The mask of a pass over x; where there are gradients, what is added to scores (`additive`)."""
    learns = isinstance(mask, Tensor) and kv_cache is None and torch.is_grad_enabled()
    return additive(mask, x) if learns else mask


def attention_mask_for(
    length: int, kv_length: int, attention_mask: Tensor | BlockMask | None, slots: Tensor
) -> Tensor | BlockMask | None:
    """The one mask of T queries at `slots` (T,) or (B, T) over S keys: (B or 1, 1, T, S) bool, or None where
    plain causal or full attention is right; a flex_attention mask stays what it is, and on CUDA that of a
    chunk on a prefix is named, not written out, because flash attention takes no mask.

    `attention_mask` is as in `LanguageModel.forward`.
    """
    if isinstance(attention_mask, BlockMask):
        return attention_mask
    if attention_mask is not None and attention_mask.dim() == 3:
        return attention_mask[:, None]
    shared = slots.dim() == 1
    if attention_mask is None and shared and length in (1, kv_length):
        return None
    if attention_mask is None and shared and slots.device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: seconds

        return causal_lower_right(length, kv_length)
    keys = torch.arange(kv_length, device=slots.device)
    mask = keys <= slots[..., None]  # (T, S) or (B, T, S)
    mask = mask[None] if shared else mask
    if attention_mask is not None:
        # A padded query may look at itself, so that no softmax runs over nothing.
        real = attention_mask.bool()[:, None, :]  # (B, 1, S)
        mask = mask & (real | (keys == slots[..., None]))
    return mask[:, None]
