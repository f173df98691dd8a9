"""A decode step of one to eight rows in Triton: the buffers and launches of `kernels`.

    decoder = TritonDecoder(model.language_model)
    logits = decoder(token, kv_cache, position)     # (B, V); the cache gains one position in each row

Positions are read on the device, so that one CUDA graph of these launches serves every length. They take the
model's own weights: nothing is copied or joined.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from generation.fast.cuda import kernels
from generation.fast.native.step import DECODER
from generation.fast.quantized import PackedLinear
from generation.kv_cache import KVCache, even, geometry

MOST_ROWS: int = kernels.MANY.value
MOST_PROGRAMS = 1024  # of a kernel
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
# The tensors that the kernels of a block read, in this order.
FIELDS = (
    *("input_norm", *PROJECTIONS, "post_norm"),
    *(f"{name}_scale" for name in PROJECTIONS),
    *(f"{name}_bias" for name in PROJECTIONS),
    *("q_norm", "k_norm"),
)


def unsupported(language_model, rows: int = 1) -> str | None:
    """Why `TritonDecoder` cannot run this model, or that many rows of it; None where it can."""
    if reason := DECODER.strange(language_model):
        return reason
    config, norm = language_model.config, language_model.norm.weight
    if "conv" in config.layer_types:
        return "it has short convolutions"
    if rows > MOST_ROWS:
        return f"{rows} rows (up to {MOST_ROWS} are supported)"
    if not triton.knobs.runtime.interpret:
        if norm.device.type != "cuda":
            return f"the weights are on {norm.device.type}"
        if torch.cuda.get_device_capability(norm.device) < (8, 0):
            return "the GPU is older than Ampere"
    width = max(config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim)
    if width > 16_384:
        return f"a layer is {width} wide (up to 16384 are supported)"
    if config.head_dim not in (16, 32, 64, 128, 256):
        return f"heads are {config.head_dim} wide (16, 32, 64, 128 and 256 are supported)"
    linear = [part for layer in language_model.layers for part in projections(layer).values()]
    matrices = [*linear, language_model.lm_head, language_model.embed_tokens]
    kinds = {type(part) for part in (*linear, language_model.lm_head)}
    if kinds not in ({nn.Linear}, {PackedLinear}):
        return f"weights in {', '.join(sorted(kind.__name__ for kind in kinds))}"
    types = {part.weight.dtype for part in matrices}
    if norm.dtype not in TYPES or types != ({norm.dtype} if kinds == {nn.Linear} else {torch.int8}):
        return f"weights in {', '.join(sorted(map(str, types)))} with norms in {norm.dtype}"
    read = [part.weight for part in (*matrices, language_model.norm)]
    read += [tensor for layer in language_model.layers for tensor in fields_of(layer).values()]
    if not all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in read):
        return "a weight is a view that is not contiguous or not aligned"
    return None


def projections(layer) -> dict[str, Any]:
    """The linear layers of a block, by their names in `PROJECTIONS`."""
    parts = {name: layer.self_attn if name in ("q", "k", "v", "o") else layer.mlp for name in PROJECTIONS}
    return {name: getattr(part, f"{name}_proj") for name, part in parts.items()}


def fields_of(layer) -> dict[str, Tensor]:
    """Every tensor of a block that a phase reads, by its name in `FIELDS`. In place of those that it has not
    stands its first norm, which is not read there."""
    attention, filler = layer.self_attn, layer.input_layernorm.weight.detach()
    found = {"input_norm": filler, "post_norm": layer.post_attention_layernorm.weight}
    for name, part in projections(layer).items():
        parts = {name: part.weight, f"{name}_scale": getattr(part, "scale", None), f"{name}_bias": part.bias}
        found |= {name: tensor for name, tensor in parts.items() if tensor is not None}
    if attention.q_norm:
        found |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
    return {name: found.get(name, filler).detach() for name in FIELDS}


class TritonDecoder:
    """One token of up to `MOST_ROWS` rows through the decoder.

    Args:
        language_model: one that `unsupported` has no reason against; else a ValueError.
        programs: how many run at once; the device's multiprocessors by default.
    """

    def __init__(self, language_model, programs: int | None = None):
        if reason := unsupported(language_model):
            raise ValueError(f"the Triton decode step cannot run this model: {reason}")
        self.model = language_model
        config, norm = language_model.config, language_model.norm.weight
        self._device = norm.device
        # In the interpreter programs run one after another, and none may wait for a later one.
        self._programs = programs or (multiprocessors(self._device) if self._device.type == "cuda" else 1)
        self._layers = [fields_of(layer) for layer in language_model.layers]

        self._heads, self._kv, self._width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        group = triton.next_power_of_2(self._heads // self._kv)
        self._lines, self._group = group, max(16, group)

        def new(*shape: int, dtype=norm.dtype) -> Tensor:
            return torch.zeros(MOST_ROWS, *shape, dtype=dtype, device=self._device)

        splits = max(self._splits(rows) * rows for rows in range(1, MOST_ROWS + 1))
        floats = {"dtype": torch.float32}
        self._x, self._h = new(config.hidden_size), new(config.intermediate_size)
        self._cos, self._sin = new(self._width // 2), new(self._width // 2)
        self._qkv = new((self._heads + 2 * self._kv) * self._width)
        self._attended = new(self._heads * self._width)
        self._logits = new(config.vocab_size)
        shares = (-(-splits // MOST_ROWS), self._heads)
        self._shares = new(*shares, self._width, **floats)
        self._maxima, self._sums = new(*shares, **floats), new(*shares, **floats)
        self._arrived = new(self._kv, dtype=torch.int32)

    def sizes(self, rows: int) -> kernels.Sizes:
        """What the kernels for that many rows are compiled for."""
        config, layer = self.model.config, self.model.layers[0]
        kind = TYPES[self.model.norm.weight.dtype]
        return kernels.Sizes(
            *(config.hidden_size, self._heads, self._kv, self._width),
            *(config.intermediate_size, config.vocab_size, kind),
            # The interpreter multiplies the bits of bfloat16 as integers.
            DOT=tl.float32 if triton.knobs.runtime.interpret else kind,
            ONE=rows == 1,
            INT8=layer.mlp.up_proj.weight.dtype == torch.int8,
            QKV_BIAS=layer.self_attn.q_proj.bias is not None,
            O_BIAS=layer.self_attn.o_proj.bias is not None,
            MLP_BIAS=layer.mlp.up_proj.bias is not None,
            QK_NORM=layer.self_attn.q_norm is not None,
        )

    def _splits(self, rows: int) -> int:
        """Shares of a head's keys at most: enough for every multiprocessor, as few as can be put together in
        registers."""
        fitting = min(self._programs // (rows * self._kv), 8192 // (self._lines * self._width), 64)
        return 1 << max(fitting, 1).bit_length() - 1

    def __call__(
        self, token: Tensor, kv_cache: KVCache, position: Tensor, offset: Tensor | None = None
    ) -> Tensor:
        """Logits (B, V) in the type of the activations, in a buffer that the next call overwrites.

        Args:
            token: (B, 1) int64 ids, on the device.
            kv_cache: {"key", "value"} (B, H_kv, S, D_h) for each layer, which gains a position in each row.
                Its layers are laid out alike, and positions lie side by side.
            position: (B,) int64, on the device. A row past the end of the cache writes nothing.
            offset: (B,) int64, on the device: what is added to it for rotary places; None for nothing.

        Nothing is read back, and a CUDA graph of it serves every position in the same cache.
        """
        rows, strides = len(token), geometry(kv_cache).strides
        assert rows <= MOST_ROWS, f"{rows} rows, expected up to {MOST_ROWS}"
        assert strides[2:] == (self._width, 1), f"positions side by side, got strides {strides}"
        if not even(kv_cache):
            raise ValueError(f"kv_cache: expected layers alike, strides {strides}, got others")
        device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with device:
            self._launch(token, kv_cache, position, offset, rows)
        return self._logits[:rows]

    def _launch(
        self, token: Tensor, kv_cache: KVCache, position: Tensor, offset: Tensor | None, rows: int
    ) -> None:
        S, config, eps = self.sizes(rows), self.model.config, self.model.config.rms_norm_eps
        splits, warps = self._splits(rows), {"num_warps": 8 if rows == 1 else 4}
        x, qkv, attended, h = self._x, self._qkv, self._attended, self._h
        most = 8 * self._programs
        held = geometry(kv_cache)
        at = held.capacity, *held.strides[:2]

        def grid(height: int, block: int) -> tuple[int]:
            return (min(-(-height // block), most, MOST_PROGRAMS),)

        kernels.begin[(rows,)](
            *self._inputs(token, position, offset),
            x,
            self._cos,
            self._sin,
            rows,
            S,
            triton.next_power_of_2(S.D),
            S.HD // 2,
        )
        for layer, cache in zip(self._layers, kv_cache, strict=True):
            norm, q, k, v, o, gate, up, down, post = (layer[name] for name in FIELDS[:9])
            q_scale, k_scale, v_scale, o_scale, *mlp_scales = (layer[name] for name in FIELDS[9:16])
            q_bias, k_bias, v_bias, o_bias, *mlp_biases = (layer[name] for name in FIELDS[16:23])
            kernels.project[grid(self._qkv.shape[1], S.BN_D)](
                *(x, norm, q, k, v, q_scale, k_scale, v_scale, q_bias, k_bias, v_bias, qkv, rows, eps),
                *(S, S.BN_D, S.BK_D),
                **warps,
            )
            kernels.attend[(rows * self._kv * splits,)](
                *(qkv, layer["q_norm"], layer["k_norm"], cache["key"], cache["value"], self._cos, self._sin),
                *(position, self._shares, self._maxima, self._sums, self._arrived, attended, rows, *at, eps),
                *(1 / math.sqrt(self._width), S, splits, self._group, self._lines),
                num_warps=4,
            )
            kernels.add_product[grid(config.hidden_size, S.BN_A)](
                attended, o, o_scale, o_bias, x, rows, S.A, S, S.O_BIAS, S.BN_A, S.BK_A, **warps
            )
            kernels.gate_up[grid(config.intermediate_size, S.BN_G)](
                *(x, post, gate, up, *mlp_scales[:2], *mlp_biases[:2], h, rows, eps, S, S.BN_G, S.BK_G),
                **warps,
            )
            kernels.add_product[grid(config.hidden_size, S.BN_F)](
                *(h, down, mlp_scales[2], mlp_biases[2], x, rows, S.F, S, S.MLP_BIAS, S.BN_F, S.BK_F),
                **warps,
            )
        # Else the assembler spills a few, for some sizes, to have more programs at once.
        registers = {"maxnreg": 96} if S.ONE and S.INT8 else {}
        kernels.head[grid(config.vocab_size, S.BN_D)](
            *(x, *self._outputs(), self._logits, rows, eps, S, S.BN_D, S.BK_D),
            **(warps | registers),
        )

    def _inputs(self, token: Tensor, position: Tensor, offset: Tensor | None) -> tuple[Tensor | None, ...]:
        table = self.model.embed_tokens
        scale = getattr(table, "scale", None)
        scale = self._cos if scale is None else scale  # not read
        return token, position, offset, table.weight.detach(), scale, self.model.inv_freq(self._device)

    def _outputs(self) -> tuple[Tensor, ...]:
        last = self.model.lm_head
        scale = getattr(last, "scale", None)
        return (
            self.model.norm.weight.detach(),
            last.weight.detach(),
            self._cos if scale is None else scale,
        )


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
