"""One token through the decoder in as few kernels as plain PyTorch allows.

    decoder = FusedDecoder(language_model)
    logits = decoder(token_ids, kv_cache, positions, reach)     # (B, 1) ids, (B,) positions -> (B, V)

At batch 1 a GPU's decode step is bound by the number of kernels before it is bound by bytes. So queries, keys
and values are one product, gate and up another; queries and keys are rotated together; and what lies between
two attentions is one function, which torch.compile makes a handful of kernels of, once for all layers.

The joined weights are no second copy: the model's own parameters become views of them. They keep their names
and values, and go on working in the eager path, in checkpoints and in training.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generation.kv_cache import KVCache


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


class Joined(NamedTuple):
    """Several linear layers of one input as one: weight (sum of outputs, in), bias (sum of outputs,)."""

    weight: Tensor
    bias: Tensor | None


class Layer(NamedTuple):
    input_norm: Tensor
    qkv: Joined
    o: Joined
    post_norm: Tensor
    gate_up: Joined
    down: Joined


class Rope(NamedTuple):
    """(B, 1, D_h) each; `sin` has the sign of the rotation in it: minus in its first half."""

    cos: Tensor
    sin: Tensor


def join(modules: Sequence[nn.Linear]) -> Joined:
    """The modules' weights in one buffer, of which their parameters are views from then on."""
    return Joined(
        _in_one_buffer([module.weight for module in modules]),
        _in_one_buffer([module.bias for module in modules]) if modules[0].bias is not None else None,
    )


def _in_one_buffer(parameters: Sequence[nn.Parameter]) -> Tensor:
    first = parameters[0].detach()
    end, joined = first.data_ptr(), True
    for parameter in parameters:
        joined = joined and parameter.is_contiguous() and parameter.data_ptr() == end
        joined = joined and parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        end += parameter.nbytes
    rows = [parameter.shape[0] for parameter in parameters]
    if joined:  # by an earlier decoder of this model
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride(), first.storage_offset())
    buffer = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, buffer.split(rows), strict=True):
        parameter.data = part
    return buffer


def unsupported(language_model) -> str | None:
    """Why this model's weights cannot be joined, or None where they can."""
    layer = language_model.layers[0]
    modules = [layer.self_attn.q_proj, layer.mlp.gate_proj, language_model.lm_head]
    others = {type(module).__name__ for module in modules if type(module) is not nn.Linear}
    return f"weights in {', '.join(sorted(others))}" if others else None


class FusedDecoder:
    """See the module's docstring.

    Args:
        language_model: a `LanguageModel` whose projections are plain linear layers.
        backend: of torch.compile, or None: no compilation.

    Raises:
        ValueError: weights of another kind (`unsupported` says which).
    """

    def __init__(self, language_model, backend: str | None = None):
        if reason := unsupported(language_model):
            raise ValueError(f"the fused decoder cannot run this model: {reason}")
        config = language_model.config
        self.model = language_model
        self.sizes = Sizes(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps
        )
        self._between, self._backend = between_attentions, backend
        if backend is not None:
            # coordinate_descent_tuning writes the products of a single row as multiply-and-sum, which moves
            # more bytes a second than a matrix product of one row, and chooses their block sizes.
            options = {"coordinate_descent_tuning": True} if backend == "inductor" else None
            self._between = torch.compile(
                between_attentions, backend=backend, options=options, fullgraph=True
            )
        self.layers: list[Layer] = []
        self._addresses: list[int] = []
        self.refresh()

    def refresh(self) -> bool:
        """Join the weights again where somebody has replaced any (`model.to`); whether that was so."""
        if [parameter.data_ptr() for parameter in self.model.parameters()] == self._addresses:
            return False
        self.layers = [self._join(block) for block in self.model.layers]
        self._addresses = [parameter.data_ptr() for parameter in self.model.parameters()]
        return True

    @staticmethod
    def _join(block) -> Layer:
        attention, mlp = block.self_attn, block.mlp
        return Layer(
            block.input_layernorm.weight.detach(),
            join([attention.q_proj, attention.k_proj, attention.v_proj]),
            join([attention.o_proj]),
            block.post_attention_layernorm.weight.detach(),
            join([mlp.gate_proj, mlp.up_proj]),
            join([mlp.down_proj]),
        )

    def __call__(self, token_ids: Tensor, kv_cache: KVCache, positions: Tensor, reach: int) -> Tensor:
        """(B, 1) ids at (B,) positions below `reach` -> (B, V) logits; the cache gains one position a row.

        The first `reach` slots of each row are read, and those behind its position masked.
        """
        model = self.model
        x = F.embedding(token_ids[:, 0], model.embed_tokens.weight)  # (B, D)
        rope = rope_at(positions, model.inv_freq(x.device), x.dtype)
        mask = mask_behind(positions, reach, x.dtype)
        slots = (torch.arange(len(x), device=x.device), positions)
        q = into_attention(x, self.layers[0], rope, kv_cache[0], slots, self.sizes)
        attended = attend(q, kv_cache[0], mask)
        for layer, following, layer_cache in zip(self.layers, self.layers[1:], kv_cache[1:]):
            x, q = self._run_between(x, attended, layer, following, rope, layer_cache, slots, self.sizes)
            attended = attend(q, layer_cache, mask)
        x = out_of_attention(x, attended, self.layers[-1], self.sizes)
        return F.linear(F.rms_norm(x, x.shape[-1:], model.norm.weight, model.norm.eps), model.lm_head.weight)

    @property
    def compiled(self) -> bool:
        return self._backend is not None

    def _run_between(self, *arguments) -> tuple[Tensor, Tensor]:
        if self._backend is None:
            return between_attentions(*arguments)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            return self._between(*arguments)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            # Nothing was run: running what was compiled raises other errors.
            self._backend = None
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"the decode step is not compiled: {reason}", RuntimeWarning, stacklevel=2)
            return between_attentions(*arguments)


def rope_at(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> Rope:
    """Rotary tables for (B,) positions, computed in float32."""
    angles = positions.float()[:, None, None] * inv_freq  # (B, 1, D_h / 2)
    cos, sin = angles.cos(), angles.sin()
    return Rope(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))


def mask_behind(positions: Tensor, reach: int, dtype: torch.dtype) -> Tensor:
    """(B, 1, 1, S) to be added to scores, S = reach: 0 up to each row's position, -inf behind it.

    Not bool, which would be turned into this in every layer; and cut from rows of a multiple of 16, without
    which fused attention would copy it in every layer.
    """
    keys = torch.arange(-(-reach // 16) * 16, device=positions.device)
    behind = keys > positions[:, None, None, None]
    mask = torch.zeros(behind.shape, dtype=dtype, device=keys.device)
    return mask.masked_fill_(behind, -torch.inf)[..., :reach]


def into_attention(
    x: Tensor, layer: Layer, rope: Rope, layer_cache: dict, slots: tuple[Tensor, Tensor], sizes: Sizes
) -> Tensor:
    """Hidden states (B, D) to rotated queries (B, H_kv, G, D_h); keys and values go into the cache.

    Args:
        slots: (B,) rows and (B,) positions that they are written at.
    """
    heads, kv_heads, head_dim, eps = sizes
    normed = F.rms_norm(x, x.shape[-1:], layer.input_norm, eps)
    qkv = F.linear(normed, *layer.qkv).view(len(x), heads + 2 * kv_heads, head_dim)
    qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
    qk = qk * rope.cos + qk.roll(head_dim // 2, -1) * rope.sin
    q, k = qk.split((heads, kv_heads), dim=1)
    rows, positions = slots
    layer_cache["key"][rows, :, positions] = k.to(layer_cache["key"].dtype)
    layer_cache["value"][rows, :, positions] = v.to(layer_cache["value"].dtype)
    # The heads of a group share their keys: they stand as several queries, and keys are not repeated.
    return q.view(len(x), kv_heads, heads // kv_heads, head_dim)


def attend(q: Tensor, layer_cache: dict[str, Tensor], mask: Tensor) -> Tensor:
    """(B, H_kv, G, D_h) queries over the first S slots, mask (B, 1, 1, S) -> (B, H_kv, G, D_h)."""
    k, v = (layer_cache[name][:, :, : mask.shape[-1]].to(q.dtype) for name in ("key", "value"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def out_of_attention(x: Tensor, attended: Tensor, layer: Layer, sizes: Sizes) -> Tensor:
    """The rest of a layer: x (B, D) and what was attended to (B, H_kv, G, D_h) -> (B, D)."""
    x = x + F.linear(attended.reshape(len(x), -1), *layer.o)
    gate, up = F.linear(F.rms_norm(x, x.shape[-1:], layer.post_norm, sizes.eps), *layer.gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, *layer.down)


def between_attentions(
    x: Tensor,
    attended: Tensor,
    layer: Layer,
    following: Layer,
    rope: Rope,
    layer_cache: dict[str, Tensor],
    slots: tuple[Tensor, Tensor],
    sizes: Sizes,
) -> tuple[Tensor, Tensor]:
    """From one layer's attention to the next one's queries: (x (B, D), q (B, H_kv, G, D_h))."""
    x = out_of_attention(x, attended, layer, sizes)
    return x, into_attention(x, following, rope, layer_cache, slots, sizes)
