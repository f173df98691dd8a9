"""Gemma 4's decoder as transformers has it: sliding-window attention in most layers and full attention in
some, norms before and after each part, per-layer embeddings, and last layers that read the keys of earlier
ones.

It is called as `LanguageModel` is. Its embeddings are wider: after the D numbers of a position come the
`per_layer_width` numbers of its token for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask

from generation.kv_cache import Kept, KVCache
from models.config import TextConfig, require
from models.language_model import (
    MLP,
    At,
    LanguageModel,
    apply_rope,
    attend,
    in_training,
    rope_frequencies,
    rope_tables,
    through_cache,
)


@dataclass(frozen=True)
class Gemma4TextConfig(TextConfig):
    """Gemma 4's decoder. "sliding" layers attend to the last `sliding_window` positions with heads of
    `head_dim`, "full" ones to all with heads of `full_head_dim`. "shared" layers have no keys of their own
    and read those of the last layer of their kind before them. `layer_types` has one for each layer."""

    kinds: ClassVar[tuple[str, ...]] = ("sliding", "full", "sliding shared", "full shared")
    choices: ClassVar = {"hidden_act": ("gelu_pytorch_tanh",)}
    may_be_zero: ClassVar = ("per_layer_width", "per_layer_count", "placeholder_id")
    block_norms: ClassVar[int] = 5

    hidden_act: str = "gelu_pytorch_tanh"
    sliding_window: int = 512
    full_head_dim: int = 512
    full_rotary_factor: float = 0.25
    full_rope_theta: float = 1e6
    shared_mlp_factor: int = 1  # factor of the inner width of shared layers
    per_layer_width: int = 0  # width of per-layer embeddings, which have a table of their own; 0: none
    per_layer_vocab: int = 262_144
    per_layer_count: int = 0  # layers that the table has embeddings for
    logit_cap: float | None = None
    # Of padding, which learns nothing; in the table for each layer an image's positions are padding, too.
    placeholder_id: int = 0

    def __post_init__(self):
        super().__post_init__()
        require(self, self.layer_types != (), "layer_types", "one for each layer")
        require(self, self.full_rotary_factor <= 1, "full_rotary_factor", "at most 1")
        most = min(self.vocab_size, self.per_layer_vocab) - 1
        require(self, self.placeholder_id <= most, "placeholder_id", f"at most {most}")

    def head_dim_of(self, kind: str) -> int:
        return self.full_head_dim if kind.startswith("full") else self.head_dim


def scaled(x: Tensor, width: int) -> Tensor:
    """x · √width, with the root rounded to the dtype of x."""
    return x * x.new_full((), width**0.5)  # nothing is copied from the host, which no graph does


class Gemma4Attention(nn.Module):
    def __init__(self, config: Gemma4TextConfig, kind: str):
        super().__init__()
        width, dim, eps = config.hidden_size, config.head_dim_of(kind), config.rms_norm_eps
        self.head_dim, self.shared, self.eps = dim, kind.endswith("shared"), eps
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(dim, eps)
        if not self.shared:
            keys = config.num_key_value_heads * dim
            self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
            self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
            self.k_norm = nn.RMSNorm(dim, eps)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=config.attention_bias)
        kept = Kept(config.num_key_value_heads, dim)
        self.keeps = {} if self.shared else {"key": kept, "value": kept}

    def forward(
        self,
        x: Tensor,
        layer_cache: dict[str, Tensor] | None,
        at: At,
        read: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x (B, T, D) -> (B, T, D), and the keys and values (B, H_kv, S, D_h) that it attended to. A shared
        layer gets those as `read`."""
        by_head = (*x.shape[:2], -1, self.head_dim)
        q = apply_rope(self.q_norm(self.q_proj(x).view(by_head)).transpose(1, 2), *at.rope)
        if read is None:
            k = apply_rope(self.k_norm(self.k_proj(x).view(by_head)).transpose(1, 2), *at.rope)
            v = F.rms_norm(self.v_proj(x).view(by_head), (self.head_dim,), eps=self.eps).transpose(1, 2)
            if layer_cache is not None:
                k, v = through_cache(layer_cache, k, v, at)
            read = k, v
        out = attend(q, *read, at.mask, scale=1.0)
        return self.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1)), read


class Gemma4Block(nn.Module):
    def __init__(self, config: Gemma4TextConfig, index: int):
        super().__init__()
        kind, width, eps = config.mixer(index), config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = Gemma4Attention(config, kind)
        self.keeps = self.self_attn.keeps
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(width, eps)
        factor = config.shared_mlp_factor if kind.endswith("shared") else 1
        inner = config.intermediate_size * factor
        self.mlp = MLP(width, inner, config.mlp_bias, config.hidden_act)
        self.post_feedforward_layernorm = nn.RMSNorm(width, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)
        if config.per_layer_width:
            self.per_layer_input_gate = nn.Linear(width, config.per_layer_width, bias=False)
            self.per_layer_projection = nn.Linear(config.per_layer_width, width, bias=False)
            self.post_per_layer_input_norm = nn.RMSNorm(width, eps)

    def forward(self, x: Tensor, own: Tensor | None, *attention) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`own` (B, T, P) are the embeddings for this layer; for the rest see `Gemma4Attention`."""
        mixed, read = self.self_attn(self.input_layernorm(x), *attention)
        x = x + self.post_attention_layernorm(mixed)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if own is not None:
            gated = F.gelu(self.per_layer_input_gate(x), approximate="tanh") * own
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar.detach(), read


class Gemma4LanguageModel(LanguageModel):
    """Embeddings in, hidden states out; `logits` is a call of its own."""

    config: Gemma4TextConfig
    block = Gemma4Block

    def __init__(self, config: Gemma4TextConfig, tie_word_embeddings: bool, soft_ids: Sequence[int]):
        """`soft_ids` stand for images, videos and sounds, and have no embedding of their own."""
        super().__init__(config, tie_word_embeddings)
        self.soft_ids, self.embed_tokens.padding_idx = soft_ids, config.placeholder_id
        if config.per_layer_width:
            width = config.per_layer_count * config.per_layer_width
            self.embed_tokens_per_layer = nn.Embedding(config.per_layer_vocab, width, config.placeholder_id)
            self.per_layer_model_projection = nn.Linear(config.hidden_size, width, bias=False)
            self.per_layer_projection_norm = nn.RMSNorm(config.per_layer_width, config.rms_norm_eps)

    @property
    def loss_head(self) -> Callable[[Tensor], Tensor]:
        return self.lm_head if self.config.logit_cap is None else self.logits

    def embed(self, input_ids: Tensor) -> Tensor:
        """Ids (B, T) -> (B, T, D + layers · P): embeddings, and those for each layer."""
        config = self.config
        for soft_id in self.soft_ids:  # a model may write one itself, which no image then replaces
            input_ids = input_ids.masked_fill(input_ids == soft_id, config.placeholder_id)
        x = scaled(self.embed_tokens(input_ids), config.hidden_size)
        if not config.per_layer_width:
            return x
        each = scaled(self.embed_tokens_per_layer(input_ids), config.per_layer_width)
        return torch.cat((x, each), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, D) hidden states -> (…, V) logits, which a tanh keeps within ± `logit_cap`."""
        logits, cap = self.lm_head(hidden), self.config.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def frequencies(self, kind: str, device: torch.device) -> Tensor:
        """(D_h / 2,) float32. Layers with full attention rotate a share of a head's numbers, by the first
        frequencies of the whole head."""
        if kind == "sliding":
            return rope_frequencies(self.config, device)
        dim = self.config.full_head_dim
        turned = int(self.config.full_rotary_factor * dim // 2)
        steps = torch.arange(0, 2 * turned, 2, dtype=torch.int64, device=device).float()
        return F.pad(1.0 / self.config.full_rope_theta ** (steps / dim), (0, dim // 2 - turned))

    def through_layers(
        self, x: Tensor, kv_cache: KVCache | None, positions: Tensor, slots: Tensor, at: At
    ) -> Tensor:
        config, ats = self.config, {}
        near = windowed(at.mask, config.sliding_window, x.shape[1], at.kv_length, slots)
        for kind, mask in (("full", at.mask), ("sliding", near)):
            rope = rope_tables(self.frequencies(kind, x.device), positions, x.dtype)
            ats[kind] = at._replace(rope=rope, mask=in_training(mask, x, kv_cache))
        owns = None
        x, identity = x.split((config.hidden_size, x.shape[2] - config.hidden_size), dim=-1)
        if config.per_layer_width:
            context = self.per_layer_model_projection(x) * config.hidden_size**-0.5
            by_layer = (config.num_hidden_layers, config.per_layer_width)
            context = self.per_layer_projection_norm(context.unflatten(-1, by_layer))
            owns = (context + identity.unflatten(-1, by_layer)) * 2**-0.5  # (B, T, layers, P)
        read: dict[str, tuple[Tensor, Tensor]] = {}
        for index, layer in enumerate(self.layers):
            kind, _, shared = config.mixer(index).partition(" ")
            own = None if owns is None else owns[:, :, index]
            layer_cache = None if kv_cache is None or shared else kv_cache[index]
            x, read[kind] = layer(x, own, layer_cache, ats[kind], read[kind] if shared else None)
        return x


def windowed(
    mask: Tensor | BlockMask | None, window: int, length: int, kv_length: int, slots: Tensor
) -> Tensor | BlockMask | None:
    """`attention_mask_for`'s mask for queries that see at most `window` positions, themselves included."""
    if kv_length <= window:
        return mask
    if isinstance(mask, BlockMask):
        both = and_masks(mask.mask_mod, lambda batch, head, query, key: query - key < window)
        return create_block_mask(both, mask.shape[0], None, length, kv_length, device=slots.device)
    keys = torch.arange(kv_length, device=slots.device)
    near = (keys <= slots[..., None]) & (keys > slots[..., None] - window)  # (T, S) or (B, T, S)
    near = near[None, None] if near.dim() == 2 else near[:, None]
    return near & mask if isinstance(mask, Tensor) and mask.dtype == torch.bool else near
