"""A vision tower's forward pass in C: tower.c, compiled once for this machine and called with addresses.

    tower, how = fast_tower(model.vision_model)       # or None, and why there is none
    features = tower(pixel_values)                    # as the eager tower, of tiles or of images

Parts are encoded one after the other, each by all threads, so that a part's features have the same bits in
any company, and memory is that of the largest one. Activations meet int8 weights as 8-bit numbers with one
scale a patch where the processor has dot products of bytes (VNNI), else as 16-bit ones. They meet bfloat16
weights, and each other in the attention of both, as bfloat16 where there are dot products of it
(AVX512_BF16), else as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generation.fast.native.build import NoCompiler, is_compiled, load_library, structure
from generation.fast.native.panels import BITS, PanelLinear, load_panels, refuse_change, to_panels, unreadable
from generation.fast.native.passes import run_pass
from generation.fast.network import GEMMA4_TOWER, PACKED_TOWER, TOWER, full_name
from generation.fast.quantized import quantize_rows

KEPT_FLOATS = 33_554_432  # of scratch, 128 MiB: what a larger image takes is given back
_CURVES = {"gelu_pytorch_tanh": 1, "gelu": 2, "silu": 3}  # as activations.h numbers them
# Where the parts of a layer are, by the fields of a `Block` in tower.c.
_ATTENTION = {name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")}
_MLP = {"fc1": "mlp.fc1", "fc2": "mlp.fc2"}
_GATED_MLP = {"gate": "mlp.gate_proj", "fc1": "mlp.up_proj", "fc2": "mlp.down_proj"}
_TILES = {"before_attention": "layer_norm1", "before_mlp": "layer_norm2"}
_TILES |= {"attention_scale": "layer_scale1", "mlp_scale": "layer_scale2"}
_PACKED = {"before_attention": "norm1", "before_mlp": "norm2"}
_GEMMA4 = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj",
    "gate": "gate_proj", "fc1": "up_proj", "fc2": "down_proj", "of_q": "q_norm", "of_k": "k_norm",
    "before_attention": "input_layernorm", "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm", "after_mlp": "post_feedforward_layernorm",
}  # fmt: skip


def unsupported(tower) -> str | None:
    """The reason why tower.c cannot run this vision tower, or None."""
    return _kind_of(tower).network.unknown(tower) or unreadable(tower)


def _kind_of(tower) -> type[FastTower]:
    kinds = (kind for kind in (FastPackedTower, FastGemma4Tower) if kind.network.made(tower))
    return next(kinds, FastTower)


def _weight_bits(tower) -> int:
    return BITS[next(part for part in tower.layers.modules() if hasattr(part, "in_features")).weight.dtype]


def fast_tower(tower, compiling: bool = True) -> tuple[FastTower | None, str]:
    """(a faster tower that took this one's weights over, what it is), or (None, why there is none).

    Args:
        compiling: else the C tower is used only where it was compiled before.
    """
    if reason := unsupported(tower):
        return None, f"eager: {reason}"
    try:
        if compiling or is_compiled("tower.c", _weight_bits(tower)):
            return _kind_of(tower)(tower), FastTower.NAME
    except NoCompiler as error:
        return None, f"eager: {error}"
    return None, "eager: compiling does not pay for a few images and a small model"


class PatchPanels(PanelLinear):
    """A convolution whose steps are as long as its kernel is wide, as a linear layer of a patch's numbers, in
    the precision of the other layers."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int):
        matrix, scale = weight.detach().flatten(1), None
        if bits == 8:
            matrix, scale = quantize_rows(matrix)
        elif bits == 16:
            matrix = matrix.to(torch.bfloat16)
        super().__init__(matrix, scale, bias)
        self.kernel = weight.shape[1:]

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        name = f"{prefix}weight"
        if destination[name].is_floating_point():  # else it stays in panels
            destination[name] = destination[name].unflatten(-1, self.kernel)


class FastTower(nn.Module):
    """A `models.vision_transformer.VisionTransformer` in C, without gradients. It takes the tower's layers
    over: their weights are put into panels, and they multiply with these from then on. It serves one thread
    at a time.

    Raises NoCompiler, and ValueError for a tower that it does not support (`unsupported` says why).
    """

    NAME = "native C tower"
    network = TOWER
    position_embedding: nn.Embedding
    patch_embedding: PatchPanels

    def __init__(self, tower):
        super().__init__()
        if reason := unsupported(tower):
            raise ValueError(f"the native vision tower cannot run this one: {reason}")
        self.config, bits = tower.config, _weight_bits(tower)
        self.library = load_library("tower.c", bits)
        self._panel = load_panels(bits).ocelli_panel()
        to_panels(tower)
        patches = tower.patch_embedding
        if not isinstance(patches, PanelLinear):
            tower.patch_embedding = PatchPanels(patches.weight, patches.bias, bits)
        for name, child in tower.named_children():
            self.add_module(name, child)
        for name, tensor in tower.named_parameters(recurse=False):
            self.register_parameter(name, tensor)
        self._kept: list[Tensor] = []  # tower.c points to these, so they must live as long as this object
        blocks = [structure("Block")(**self._block(layer, index)) for index, layer in enumerate(tower.layers)]
        described = {
            "layers": len(blocks),
            "width": (width := self.config.hidden_size),
            "heads": (heads := self.config.num_attention_heads),
            "inner": self.config.intermediate_size,
            "outputs": 1,
            "axes": 1,
            "curve": _CURVES["gelu_pytorch_tanh"],
            "scale": (width // heads) ** -0.5,
            "embedding": tower.patch_embedding.matrix,
            "block": (structure("Block") * len(blocks))(*blocks),
        }
        self._described = described | self._own(tower)
        self._description = structure("Tower")(**self._described)
        self._products = sum(tensor.numel() for tensor in tower.buffers())
        self._scratch = torch.empty(0)
        self._lock = Lock()

    def _block(self, layer, index: int) -> dict[str, Any]:
        """The fields of a `Block`."""
        return self._fields(layer, _ATTENTION | _MLP | _TILES)

    def _own(self, tower) -> dict[str, Any]:
        """The fields of a `Tower` that not all kinds have alike."""
        token, first = tower.class_token, self.position_embedding.weight[0]
        return {
            "class_row": None if token is None else self._field(token[0] + first),
            "curve": _CURVES[self.config.hidden_act],
            "eps": self.config.layer_norm_eps,
            **self._fields(tower, {"last": "post_layernorm"}),
        }

    def _fields(self, owner: nn.Module, paths: dict[str, str]) -> dict[str, Any]:
        parts = {field: attrgetter(path)(owner) for field, path in paths.items()}
        return {field: self._field(part) for field, part in parts.items() if part is not None}

    def _field(self, part: Any) -> Any:
        """What C reads of a part; of a row of numbers the address of a copy that ends with a whole panel."""
        if isinstance(part, PanelLinear):
            return structure("Linear")(part.matrix)
        if isinstance(part, nn.LayerNorm | nn.RMSNorm):
            weights = (part.weight, getattr(part, "bias", None))
            return structure("Norm")(*(None if one is None else one.data_ptr() for one in weights))
        self._kept.append(F.pad(part.detach().float(), (0, -len(part) % self._panel)))
        return self._kept[-1].data_ptr()

    def _apply(self, fn, recurse: bool = True):
        refuse_change(fn)
        return self

    def __getstate__(self) -> object:
        """Refuse copying and pickling."""
        raise TypeError("a vision tower in C can be neither copied nor pickled: load the checkpoint again")

    @torch.no_grad()
    def forward(self, pixel_values: Any) -> Tensor:
        """(N, C, M, M) normalised tiles -> (N, P, D_v) float32 features; see the eager tower."""
        config, side = self.config, self.config.patch_size
        expected = (config.num_channels, config.image_size, config.image_size)
        if pixel_values.shape[1:] != expected:
            raise ValueError(f"pixel_values: expected (N, *{expected}), got {tuple(pixel_values.shape)}")
        places = self.position_embedding.weight[config.class_token :]
        features = torch.empty(len(pixel_values), config.num_patches, config.hidden_size)
        for pixels, out in zip(pixel_values.float(), features):
            rows = F.unfold(pixels[None], side, stride=side)[0].T  # (P, C · side · side), as a conv cuts
            self._encode(rows, places, out)
        return features

    def _encode(
        self,
        patches: Tensor | None,
        places: Tensor | None,
        out: Tensor,
        rope: tuple[Tensor | None, Tensor | None] = (None, None),
        windows: Sequence[int] = (),
        tower: Any = None,
    ) -> None:
        """Patches (P, C · side · side) of one part, what is added to their embeddings (P, D), cos and sin
        (P, 1, D_h), and the windows' lengths -> out (P, D) or (P, outputs, D). `tower`: one after the first
        layers, for which `places` are their output."""
        tower = self._description if tower is None else tower
        segments = (structure("Segment") * len(windows))(
            *map(structure("Segment"), accumulate(windows, initial=0), windows)
        )
        given = [None if part is None else part.float().contiguous() for part in (patches, places, *rope)]
        addresses = (None if part is None else part.data_ptr() for part in given)
        longest = max(windows, default=0)
        image = structure("Image")(len(out), *addresses, len(windows), longest, segments)

        def call(made) -> None:
            needed = self.library.ocelli_tower_floats(tower, image, made.threads)
            if self._scratch.numel() < needed:
                self._scratch = torch.empty(needed)
            self.library.ocelli_tower(tower, image, made, self._scratch.data_ptr(), out.data_ptr())

        with self._lock:
            run_pass(call, len(out) * self._products)
            if self._scratch.numel() > KEPT_FLOATS:
                self._scratch = torch.empty(0)


class FastPackedTower(FastTower):
    """A `models.packed_vision_transformer.PackedVisionTransformer` in C. Where a window merger runs, it is
    PyTorch's, with layers in panels, between two parts of the tower."""

    network = PACKED_TOWER
    window_merger: nn.Module

    def __init__(self, tower):
        super().__init__(tower)
        self._after, at = None, self.config.insert_layer
        if at is not None and self.config.inserts:
            made, blocks = self._described, [*self._described["block"]]
            before, after = (
                {"layers": len(some), "block": (structure("Block") * len(some))(*some)}
                for some in (blocks[: at + 1], blocks[at + 1 :])
            )
            self._description = structure("Tower")(**made | before | {"last": structure("Norm")()})
            self._after = structure("Tower")(**made | after | {"embedding": structure("Matrix")()})

    def _block(self, layer, index: int) -> dict[str, Any]:
        config = self.config
        return {
            **self._fields(layer, _ATTENTION | _PACKED | (_GATED_MLP if config.gated_mlp else _MLP)),
            "windowed": bool(config.window) and index not in config.whole_layers,
            "tapped": index in config.taps,
        }

    def _own(self, tower) -> dict[str, Any]:
        self._arrange, config = tower.arrange, self.config
        curve = _CURVES["silu" if config.gated_mlp else "gelu_pytorch_tanh"]
        last = self._fields(tower, {"last": "norm"})
        return {"eps": config.norm_eps, "outputs": len(config.taps) + 1, "curve": curve, **last}

    @torch.no_grad()
    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Normalised images (C, H, W) or frames (C, F, H, W) -> (P, 1 + taps, D) float32; see the eager
        tower."""
        config, made = self.config, []
        block = config.patch_size * config.merge_size
        for image in images:
            channels, *frames, height, width = image.shape
            sides = (height, width)
            if channels != config.num_channels or any(side % block or not side for side in sides):
                raise ValueError(
                    f"images: expected {config.num_channels} channels and sides that are multiples of "
                    f"{block} pixels, got {tuple(image.shape)}"
                )
            given = self._arrange([image.float()])
            rows = given.patches
            if not (config.channels_last or frames):  # a still is a pair of itself
                # (P, C · side²) -> (P, C · pictures · side²)
                rows = rows.view(len(rows), channels, 1, -1)
                rows = rows.expand(-1, -1, config.temporal_patch_size, -1).flatten(1)
            out = torch.empty(len(rows), len(config.taps) + 1, config.hidden_size)
            self._encode(rows, given.places, out, given.rope or (None, None), given.windows)
            if self._after is not None:
                squares = self.window_merger(out[:, 0])
                out = torch.empty(len(squares), 1, config.hidden_size)
                self._encode(None, squares, out, tower=self._after)
            made.append(out if given.order is None else out[given.order.argsort()])
        return torch.cat(made)


class FastGemma4Tower(FastPackedTower):
    """A `models.gemma4_vision.Gemma4VisionTransformer` in C; patches are pooled in PyTorch."""

    network = GEMMA4_TOWER

    def _block(self, layer, index: int) -> dict[str, Any]:
        ones = self._field(torch.ones(layer.head_dim))
        return {**self._fields(layer, _GEMMA4), "of_v": structure("Norm")(ones)}

    def _own(self, tower) -> dict[str, Any]:
        self._arrange, self._pool = tower.arrange, tower.pool
        return {"eps": self.config.norm_eps, "axes": 2, "scale": 1}

    def _field(self, part: Any) -> Any:
        if full_name(type(part)) != "models.gemma4_vision.ClippedLinear":
            return super()._field(part)
        bounds = [part.input_min, part.input_max, part.output_min, part.output_max] if part.clips else None
        return structure("Linear")(part.linear.matrix, bounds and self._field(torch.stack(bounds)))

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Images (3, H, W), values in 0 … 1 -> (positions, D) float32; see the eager tower."""
        encode = super().forward
        return torch.cat([self._pool(encode([image])[:, 0]) for image in images])
