"""A decode step of one to 64 rows in Triton: the buffers and launches of `kernels`.

    decoder = TritonDecoder(model.language_model)
    logits = decoder(token, kv_cache, position)     # (B, V); the cache gains one position in each row

Positions are read on the device, so that one CUDA graph of these launches serves every length. They take the
model's own weights: nothing is copied or joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from generation.fast.cuda import kernels
from generation.fast.network import GEMMA4, MIXERS, MLP, decoder_of
from generation.fast.quantized import PackedLinear
from generation.kv_cache import STATE_WINDOW, KVCache, even, geometry

MOST_ROWS = 64
MOST_PROGRAMS = 1024  # of a kernel
CONVOLVED = 256  # numbers that a program of `kernels.convolve` takes
COLUMNS = 16  # of a matrix that a program of `kernels.delta` takes
WIDE = 1024  # numbers of an embedding that a program of `kernels.look_up` takes
PER_LAYER = ("per_layer_input_gate", "per_layer_projection")
# The norms of a block: one before each part, and in Gemma 4 one after it, too.
NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
ALL_NORMS = NORMS | {
    "mixed_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "fed_norm": "post_feedforward_layernorm",
    "own_norm": "post_per_layer_input_norm",
}
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def unsupported(language_model, rows: int = 1) -> str | None:
    """The reason why `TritonDecoder` cannot run this model, or that many rows of it; None where it can."""
    if reason := decoder_of(language_model).unknown(language_model):
        return reason
    config, norm = language_model.config, language_model.norm.weight
    if strange := {*config.layer_types} - {*KERNELS}:
        return f"it has layers of {min(strange)}"
    if rows > MOST_ROWS:
        return f"{rows} rows (up to {MOST_ROWS} are supported)"
    if not triton.knobs.runtime.interpret and (reason := unfit(norm.device)):
        return reason
    of_head = max(config.delta_key_dim, config.delta_value_dim) if "delta" in config.layer_types else 0
    if of_head > 256:
        return f"heads of its gated delta rules are {of_head} wide (up to 256 are supported)"
    for width in {head_dim(config, kind) for kind in kinds_of(config)} - {16, 32, 64, 128, 256, 512}:
        return f"heads are {width} wide (16, 32, 64, 128, 256 and 512 are supported)"
    layers = list(zip(kinds_of(config), language_model.layers, strict=True))
    linear = [part for layer in layers for part in projections(*layer).values()]
    tables = [language_model.embed_tokens]
    if GEMMA4.made(language_model) and config.per_layer_width:
        linear.append(language_model.per_layer_model_projection)
        tables.append(language_model.embed_tokens_per_layer)
    matrices = [*linear, language_model.lm_head, *tables]
    kinds = {type(part) for part in (*linear, language_model.lm_head)}
    if kinds not in ({nn.Linear}, {PackedLinear}):
        return f"weights in {', '.join(sorted(kind.__name__ for kind in kinds))}"
    if (width := max(part.in_features for part in linear)) > 16_384:
        return f"a layer is {width} wide (up to 16384 are supported)"
    types = {part.weight.dtype for part in matrices}
    expected = [{norm.dtype}] if kinds == {nn.Linear} else [{torch.int8}, {torch.int32}]
    if norm.dtype not in TYPES or types not in expected:
        return f"weights in {', '.join(sorted(map(str, types)))} with norms in {norm.dtype}"
    read = [part.weight for part in (*matrices, language_model.norm)]
    read += [tensor for layer in layers for tensor in Layer.of(*layer).tensors.values()]
    if not all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in read):
        return "a weight is a view that is not contiguous or not aligned"
    return None


def unfit(device: torch.device) -> str | None:
    """The reason why a device does not run the kernels, or None."""
    if device.type != "cuda":
        return f"the weights are on {device.type}"
    return "the GPU is older than Ampere" if torch.cuda.get_device_capability(device) < (8, 0) else None


def kinds_of(config) -> list[str]:
    """The kind of mixer of each layer."""
    return [config.mixer(at) for at in range(config.num_hidden_layers)]


def head_dim(config, kind: str) -> int:
    """The width of heads in layers of a kind, which Gemma 4 has two of."""
    return config.full_head_dim if kind.startswith("full") else config.head_dim


def projections(kind: str, block) -> dict[str, Any]:
    """The linear layers of a block, by their names."""
    mixer, names = MIXERS[kind]
    found = {name: getattr(getattr(block, mixer), name) for name in names}
    found |= {name: getattr(block.mlp, name) for name in MLP}
    return found | {name: part for name, part in block.named_children() if name in PER_LAYER}


@dataclass(frozen=True)
class Layer:
    """A block of the decoder as phases read it.

    kind: of its mixer.
    tensors: every tensor that a phase reads, by its name: "q_proj", "q_proj_scale", "q_proj_bias". In place
        of those that its linear layers and its mixer have not stands its first norm, which is not read there.
    """

    kind: str
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, kind: str, block) -> Layer:
        parts, first = dict(block.named_children()), block.input_layernorm.weight.detach()
        norms = ALL_NORMS if "pre_feedforward_layernorm" in parts else NORMS
        found: dict[str, Any] = {
            name: parts[own].weight for name, own in norms.items() if own in parts
        } | dict(block.named_parameters(recurse=False))
        for name, part in projections(kind, block).items():
            scale = getattr(part, "scale", None)
            found |= {name: part.weight, f"{name}_scale": scale, f"{name}_bias": part.bias}
        for name in KERNELS[kind].tensors:
            own = getattr(getattr(block, MIXERS[kind][0]), name, None)
            found[name] = own.weight if isinstance(own, nn.Module) else own
        tensors = {name: first if one is None else one.detach() for name, one in found.items()}
        return cls(kind, tensors | {"input_norm": first})

    def products(self, *names: str) -> tuple[list[Tensor], bool]:
        """Weights of linear layers, then their scales, then their biases; whether they have biases."""
        parts = [self.tensors[f"{name}{what}"] for what in ("", "_scale", "_bias") for name in names]
        return parts, parts[-1] is not self.tensors["input_norm"]


class Pass(NamedTuple):
    """A token of each row: sizes and tensors that the kernels of all layers have in common."""

    S: kernels.Sizes
    rows: int
    position: Tensor
    capacity: int


class Mixer(NamedTuple):
    """A kind of mixer, between two products: from `_mixed` to `_attended`.

    heights: (config, kind) -> those of the matrices that it is made by, and last the width of its result.
    tensors: names of what its kernel reads beside linear layers: norms and tensors of its module, or None.
    launch: (decoder, pass, layer, the layer's cache): its kernel.
    """

    heights: Callable[[Any, str], tuple[int, ...]]
    tensors: tuple[str, ...]
    launch: Callable[[TritonDecoder, Pass, Layer, dict[str, Tensor]], None]


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
        self._layers = list(map(Layer.of, kinds_of(config), language_model.layers))

        self._heads, self._kv = config.num_attention_heads, config.num_key_value_heads
        self._gemma, kinds = GEMMA4.made(language_model), kinds_of(config)
        self._group = triton.next_power_of_2(self._heads // self._kv)

        def new(*shape: int, dtype=norm.dtype) -> Tensor:
            return torch.zeros(MOST_ROWS, *shape, dtype=dtype, device=self._device)

        floats = {"dtype": torch.float32}
        self._x, self._made = new(config.hidden_size), new(config.hidden_size)
        inner = [len(layer.tensors["gate_proj"]) for layer in self._layers]
        # Of both kinds of attention, side by side.
        turns = [language_model.inv_freq(self._device)]
        if self._gemma:
            turns = [language_model.frequencies(kind, self._device) for kind in ("sliding", "full")]
            self._each, self._context = (new(len(kinds), config.per_layer_width) for _ in range(2))
            inner.append(config.per_layer_width)
        self._h = new(max(inner))
        self._frequencies, self._first = torch.cat(turns), {"full": len(turns[0])}
        self._cos, self._sin = new(len(self._frequencies)), new(len(self._frequencies))
        # What a mixer reads and writes between its products.
        heights = [KERNELS[kind].heights(config, kind) for kind in {*kinds}]
        self._mixed = new(max(sum(made) for *made, _ in heights))
        self._attended = new(max(width for *_, width in heights))
        self._logits: dict[int, Tensor] = {}  # (ROWS, V) by ROWS, made when they are needed: they are large
        self._widths, rows = sorted({head_dim(config, kind) for kind in kinds}), range(1, MOST_ROWS + 1)
        splits = max(self._splits(count, width) * count for count in rows for width in self._widths)
        shares = (-(-splits // MOST_ROWS), self._heads)
        self._shares = new(*shares, self._widths[-1], **floats)
        self._maxima, self._sums = new(*shares, **floats), new(*shares, **floats)
        self._outs = new(config.delta_value_heads * config.delta_value_dim, **floats)  # of gated delta rules
        self._arrived = new(max(self._kv, config.delta_value_heads), dtype=torch.int32)

    def sizes(self, rows: int) -> kernels.Sizes:
        """The sizes that the kernels for that many rows are compiled for."""
        config = self.model.config
        gemma: dict[str, Any] = {}
        if self._gemma:
            gemma = {
                "VALUE_NORM": True, "GELU": True, "SOFT": tuple(self.model.soft_ids),
                "PLACEHOLDER": config.placeholder_id, "P": config.per_layer_width,
                "LAYERS": config.num_hidden_layers,
            }  # fmt: skip
        kind, weights = TYPES[self.model.norm.weight.dtype], self.model.embed_tokens.weight.dtype
        return kernels.Sizes(
            *(config.hidden_size, self._heads, self._kv, config.head_dim, config.vocab_size, kind),
            # The interpreter multiplies the bits of bfloat16 as integers.
            DOT=tl.float32 if triton.knobs.runtime.interpret else kind,
            ROWS=1 if rows == 1 else max(8, triton.next_power_of_2(rows)),
            EARLY=starts_early(self._device),
            BITS=4 if weights == torch.int32 else 8 * weights.itemsize,
            MLP_BIAS=config.mlp_bias,
            QK_NORM=config.qk_norm or self._gemma,
            TAPS=config.conv_kernel,
            CONV_BIAS=config.conv_bias,
            ROTARY=config.rotary_dim,
            GATED=config.attention_gate,
            CENTRED=config.zero_centered_norms,
            DELTA_KEYS=config.delta_key_heads,
            DELTA_VALUES=config.delta_value_heads,
            DK=config.delta_key_dim,
            DV=config.delta_value_dim,
            WINDOW=STATE_WINDOW,
            PAIRS=len(self._frequencies),
            **gemma,
        )

    def alike(self) -> list[list[int]]:
        """The numbers of rows that it decodes, those together that the same kernels decode."""
        groups: dict[Any, list[int]] = {}
        for rows in range(1, MOST_ROWS + 1):
            # Triton compiles anew for a number that 16 divides.
            splits = [self._splits(rows, width) for width in self._widths]
            kernels_of = self.sizes(rows), *splits, rows % 16 == 0
            groups.setdefault(kernels_of, []).append(rows)
        return list(groups.values())

    def _splits(self, rows: int, width: int, near: int = 0) -> int:
        """Shares of a head's keys at most: enough for every multiprocessor, as few as can be put together in
        registers, four parts of a group one after the other, and as are in the `near` ones."""
        most = 8192 // width
        fitting = min(self._programs // (rows * self._kv), most, 4 * most // self._group, 64)
        if near:
            fitting = min(fitting, -(-near // kernels.SHARE.value))
        return 1 << max(fitting, 1).bit_length() - 1

    def __call__(
        self, token: Tensor, kv_cache: KVCache, position: Tensor, offset: Tensor | None = None
    ) -> Tensor:
        """Logits (B, V) in the type of the activations, in a buffer that the next call overwrites.

        Args:
            token: (B, 1) int64 ids, on the device.
            kv_cache: of each layer {"key", "value"} (B, H_kv, S, D_h), {"conv"} (B, 1, S, D) or a gated delta
                rule's, which gains a position in each row. Layers of a kind are laid out alike, and positions
                lie side by side.
            position: (B,) int64, on the device. A row past the end of the cache writes nothing.
            offset: (B,) int64, on the device: what is added to it for rotary places; None for nothing.

        Nothing is read back, and a CUDA graph of it serves every position in the same cache.
        """
        rows = len(token)
        assert rows <= MOST_ROWS, f"{rows} rows, expected up to {MOST_ROWS}"
        for tensor in (tensor for layer in kv_cache for tensor in layer.values()):
            assert tensor.stride()[2:] == (tensor.shape[3], 1), f"positions side by side, {tensor.stride()}"
        if not even(kv_cache):
            strides = geometry(kv_cache).strides
            raise ValueError(f"kv_cache: expected layers alike, strides {strides}, got others")
        device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with device:
            return self._launch(token, kv_cache, position, offset, rows)

    def _launch(
        self, token: Tensor, kv_cache: KVCache, position: Tensor, offset: Tensor | None, rows: int
    ) -> Tensor:
        S, model, eps = self.sizes(rows), self.model, self.model.config.rms_norm_eps
        warps = {"num_warps": 8 if S.ONE or S.ROWS >= 32 else 4, **S.launch}
        two = registers(128) if S.BITS == 4 and not S.ONE else {}
        last = registers(96) if S.BITS == 8 and S.ONE else {}
        added = registers(128) if S.BITS == 32 else {}
        x, h, made = self._x, self._h, self._made
        at = Pass(S, rows, position, geometry(kv_cache).capacity)

        def project(
            norm, parts: list[Tensor], out: Tensor, heights, bias=False, normed=True, cap=None, **more
        ) -> None:
            """`kernels.project` of up to four matrices, with `parts`, their weights, scales and biases."""
            tile, count, none = S.tile(S.D), len(heights), 4 - len(heights)
            four = [parts[n + min(i, count - 1)] for n in range(0, 3 * count, count) for i in range(4)]
            kernels.project[self._grid(sum(heights), tile[0])](
                *(x, norm, *four, out, rows, eps, *heights, *[0] * none, S, bias, normed, cap, *tile),
                **(warps | more),
            )

        def add_product(
            y: Tensor, parts: list[Tensor], bias: bool, width: int, norm=None, scalar=None
        ) -> None:
            """x gains a product, or what a `norm` makes of it, and all is multiplied with a `scalar`."""
            tile, to = S.tile(width), x if norm is None else made
            kernels.add_product[self._grid(S.D, tile[0])](
                *(y, *parts, to, rows, width, S, bias, norm is None, *tile), **(warps | added)
            )
            if norm is not None:
                factor = norm if scalar is None else scalar
                columns = triton.next_power_of_2(S.D)
                kernels.settle[(rows,)](
                    made, norm, factor, x, rows, eps, S, scalar is not None, columns, **S.launch
                )

        def all_of(part: Any) -> list[Tensor]:
            """Weight and scale of a layer, and what stands in place of a bias."""
            scale = getattr(part, "scale", None)
            return [part.weight.detach(), norm if scale is None else scale, norm]

        norm, table = model.norm.weight.detach(), model.embed_tokens
        columns, pairs = max(64, triton.next_power_of_2(S.D)), triton.next_power_of_2(S.PAIRS)
        root = root_of(S.D, norm.dtype) if self._gemma else 1.0
        kernels.begin[(rows,)](
            *(token, position, offset, *all_of(table)[:2], self._frequencies, x, self._cos, self._sin),
            *(rows, root, S, columns, pairs),
        )
        if S.P:
            width, root = S.LAYERS * S.P, root_of(S.P, norm.dtype)
            table, of_context = model.embed_tokens_per_layer, model.per_layer_projection_norm.weight.detach()
            kernels.look_up[self._grid(rows * width, WIDE)](
                *(token, *all_of(table)[:2], self._each, rows, root, width, S, WIDE), **S.launch
            )
            project(norm, all_of(model.per_layer_model_projection), self._context, (width,), normed=False)
            kernels.join[self._grid(rows * S.LAYERS, 1)](
                *(
                    self._context,
                    of_context,
                    self._each,
                    rows,
                    S.D**-0.5,
                    eps,
                    S,
                    triton.next_power_of_2(S.P),
                ),
                **S.launch,
            )
        read: dict[str, dict[str, Tensor]] = {}  # what shared layers read: that of the last of their kind
        for index, (layer, own) in enumerate(zip(self._layers, kv_cache, strict=True)):
            mixer, (*made_by, out) = KERNELS[layer.kind], MIXERS[layer.kind][1]
            *heights, width = mixer.heights(model.config, layer.kind)
            kind, _, shared = layer.kind.partition(" ")
            read[kind] = read[kind] if shared else own
            tensors, (parts, bias) = layer.tensors, layer.products(*made_by)
            scalar = tensors.get("layer_scalar")
            project(tensors["input_norm"], parts, self._mixed, heights, bias)
            mixer.launch(self, at, layer, read[kind])
            add_product(self._attended, *layer.products(out), width, tensors.get("mixed_norm"))
            tile, inner = S.tile(S.D, pair=True), len(tensors["gate_proj"])
            kernels.gate_up[self._grid(inner, tile[0])](
                *(x, tensors["mlp_norm"], *layer.products("gate_proj", "up_proj")[0], h, rows, eps, inner),
                *(S, *tile),
                **(warps | two),
            )
            fed_norm, after = tensors.get("fed_norm"), None if S.P else scalar
            add_product(h, *layer.products("down_proj"), inner, fed_norm, after)
            if S.P:
                tile, (gate, scale, _) = S.tile(S.D), layer.products("per_layer_input_gate")[0]
                kernels.let_through[self._grid(S.P, tile[0])](
                    *(x, gate, scale, self._each[:, index], h, rows, S, *tile), **warps
                )
                projection = layer.products("per_layer_projection")
                add_product(h, *projection, S.P, tensors["own_norm"], scalar)
        if S.ROWS not in self._logits:
            self._logits[S.ROWS] = x.new_zeros(S.ROWS, S.V)
        logits, cap = self._logits[S.ROWS], model.config.logit_cap if self._gemma else None
        project(norm, all_of(model.lm_head), logits, (S.V,), cap=cap, **last)
        return logits[:rows]

    def _grid(self, height: int, block: int) -> tuple[int]:
        """Programs for so many rows of a matrix, `block` at a time."""
        return (min(-(-height // block), 8 * self._programs, MOST_PROGRAMS),)


def root_of(width: int, dtype: torch.dtype) -> float:
    """√width as a number of that type."""
    return torch.tensor(width**0.5, dtype=dtype).item()


def registers(most: int) -> dict[str, int]:
    """The option of a launch without which NVIDIA's assembler spills a few registers, for some sizes, to have
    more programs at once. AMD's compiler has none."""
    return {} if torch.version.hip else {"maxnreg": most}


def starts_early(device: torch.device) -> bool:
    """Whether the GPU has programmatic dependent launch: from Hopper on."""
    if triton.knobs.runtime.interpret or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _attention_heights(config, kind: str) -> tuple[int, ...]:
    heads = config.num_attention_heads, config.num_key_value_heads
    queries, keys = (count * head_dim(config, kind) for count in heads)
    if kind.endswith("shared"):
        return queries, queries
    return queries * (1 + config.attention_gate), keys, keys, queries


def _attend(decoder: TritonDecoder, at: Pass, layer: Layer, cache: dict[str, Tensor]) -> None:
    config, (kind, *shared) = decoder.model.config, layer.kind.split()
    S, width, key, first = at.S, head_dim(config, kind), cache["key"], decoder._first.get(kind, 0)
    scale = 1 / math.sqrt(width)
    if decoder._gemma:
        near = config.sliding_window if kind == "sliding" else 0
        S, scale = replace(S, HD=width, ROTARY=width, NEAR=near, SHARED=bool(shared)), 1.0
    splits, group = decoder._splits(at.rows, width, S.NEAR), decoder._group
    lines = max(1, min(group, 8192 // (splits * width)))
    most = 168 if width < 512 and S.DT.primitive_bitwidth == 16 and not S.VALUE_NORM else 255
    # Heads of 512 in float32 would spill in four warps, or with a limit.
    options = (
        {"num_warps": 8} if width * S.DT.primitive_bitwidth > 8192 else registers(most) | {"num_warps": 4}
    )
    kernels.attend[(at.rows * S.KV * splits,)](
        *(decoder._mixed, layer.tensors["q_norm"], layer.tensors["k_norm"], key, cache["value"]),
        *(decoder._cos[:, first:], decoder._sin[:, first:], at.position, decoder._shares, decoder._maxima),
        *(decoder._sums, decoder._arrived, decoder._attended, at.rows, at.capacity, *key.stride()[:2]),
        *(config.rms_norm_eps, scale, S, splits, max(16, group), lines),
        **(options | S.launch),
    )


def _convolve(decoder: TritonDecoder, at: Pass, layer: Layer, cache: dict[str, Tensor]) -> None:
    weight, bias, inputs = layer.tensors["weight"], layer.tensors["bias"], cache["conv"]
    kernels.convolve[decoder._grid(at.rows * at.S.D, CONVOLVED)](
        *(decoder._mixed, weight, bias, inputs, at.position, decoder._attended, at.rows, at.capacity),
        *(inputs.stride(0), at.S, CONVOLVED),
        num_warps=4,
        **at.S.launch,
    )


def _delta_heights(config, kind: str) -> tuple[int, ...]:
    heads, values = config.delta_value_heads, config.delta_value_heads * config.delta_value_dim
    return 2 * config.delta_key_heads * config.delta_key_dim + values, values, heads, heads, values


def _delta(decoder: TritonDecoder, at: Pass, layer: Layer, cache: dict[str, Tensor]) -> None:
    S, held = at.S, [cache[name] for name in ("state", "recent", "inputs")]
    kernels.delta[(at.rows * S.DELTA_VALUES * -(-S.DV // COLUMNS),)](
        *(decoder._mixed, *(layer.tensors[name] for name in ("conv_weight", "dt_bias", "A_log", "norm"))),
        *(*held, at.position, decoder._outs, decoder._arrived, decoder._attended, at.rows, at.capacity),
        *(*(tensor.stride(0) for tensor in held), decoder.model.config.rms_norm_eps, S),
        *(max(16, triton.next_power_of_2(max(S.DK, S.DV))), COLUMNS),
        num_warps=4,
        **at.S.launch,
    )


KERNELS = {
    **dict.fromkeys(
        ("attention", "sliding", "full", "sliding shared", "full shared"),
        Mixer(_attention_heights, ("q_norm", "k_norm"), _attend),
    ),
    "conv": Mixer(
        lambda config, _: (3 * config.hidden_size, config.hidden_size), ("weight", "bias"), _convolve
    ),
    "delta": Mixer(_delta_heights, ("conv_weight", "dt_bias", "A_log", "norm"), _delta),
}
