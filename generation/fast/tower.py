"""A vision tower's forward pass in C: tower.c, compiled once for this machine and called with addresses.

    tower, how = fast_tower(model.vision_model)       # or None, and why there is none
    features = tower(pixel_values, patch_mask)        # as the eager tower: (N, C, H, W) -> (N, P, D_v)

Tiles are encoded one after the other, each by all threads, so that a tile's features have the same bits in any
company. With int8 weights, activations are rounded to 8 bits with one scale a patch where the processor has dot
products of bytes (VNNI), else to 16; attention is in bfloat16 where there are dot products of that, else float32.
"""

from __future__ import annotations

import ctypes
from threading import Lock

import torch
from torch import Tensor, nn

from generation.fast.native.build import NoCompiler, is_sound, library_file, load_library
from generation.fast.panels import BITS, Matrix, PanelLinear, PanelWeight, to_panels
from generation.fast.quantized import quantize_rows

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER))


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "out", "fc1", "fc2")),
        *((name, _Norm) for name in ("before_attention", "before_mlp")),
    )


class _Tower(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("layers", "width", "heads", "inner", "channels", "patch", "exact_gelu")),
        ("eps", ctypes.c_float),
        ("embedding", Matrix),
        ("positions", _POINTER),
        ("last", _Norm),
        ("block", ctypes.POINTER(_Block)),
    )


class _Tile(ctypes.Structure):
    _fields_ = (
        ("pixels", _POINTER),
        *((name, _LONG) for name in ("height", "width")),
        ("position", _POINTER),
        ("keys", _LONG),
        ("key", _POINTER),
    )


def _declare(opened: ctypes.CDLL) -> None:
    tower, tile = ctypes.POINTER(_Tower), ctypes.POINTER(_Tile)
    opened.ocelli_tower_floats.restype = _LONG
    opened.ocelli_tower_floats.argtypes = (tower, tile, _LONG)
    opened.ocelli_tower.restype = None
    opened.ocelli_tower.argtypes = (tower, tile, _LONG, _POINTER, _POINTER)


def _library_parts(weight_bits: int) -> tuple[str, tuple[str, ...]]:
    return "tower.c", (f"-DWEIGHT_BITS={weight_bits}",)


def unsupported(tower) -> str | None:
    """Why tower.c cannot run this vision tower, or None where it can."""
    weight = tower.layers[0].self_attn.q_proj.weight
    if weight.device.type != "cpu":
        return f"the vision tower is on {weight.device.type}"
    if weight.dtype not in BITS:
        return f"{weight.dtype} weights (float32, bfloat16 and int8 are supported)"
    return None


def is_compiled(tower) -> bool:
    """Whether the library for this tower exists already. Raises NoCompiler."""
    bits = BITS[tower.layers[0].self_attn.q_proj.weight.dtype]
    return is_sound(library_file(*_library_parts(bits))[1])


class FastTower(nn.Module):
    """A `models.vision_transformer.VisionTransformer` in C, without gradients. It takes the tower's weights
    over: they are put into panels, and the tower's own layers multiply with these from then on. Threads that
    share one take turns.

    Raises NoCompiler, and ValueError for a tower that it does not support (`unsupported` says why).
    """

    def __init__(self, tower):
        super().__init__()
        if reason := unsupported(tower):
            raise ValueError(f"the native vision tower cannot run this one: {reason}")
        self.config, config = tower.config, tower.config
        bits = BITS[tower.layers[0].self_attn.q_proj.weight.dtype]
        self._library = load_library(*_library_parts(bits), _declare)
        to_panels(tower)
        self.tower = tower
        self.patch_embedding = _linear_of_patches(tower.patch_embedding, bits)
        tower.patch_embedding = None  # its weights are in panels now
        self._blocks = (_Block * config.num_hidden_layers)()
        for slot, layer in zip(self._blocks, tower.layers, strict=True):
            for name in ("q", "k", "v"):
                setattr(slot, name, _matrix(getattr(layer.self_attn, f"{name}_proj")))
            slot.out, slot.fc1, slot.fc2 = map(
                _matrix, (layer.self_attn.out_proj, layer.mlp.fc1, layer.mlp.fc2)
            )
            slot.before_attention, slot.before_mlp = _norm(layer.layer_norm1), _norm(layer.layer_norm2)
        self._description = _Tower(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            inner=config.intermediate_size,
            channels=config.num_channels,
            patch=config.patch_size,
            exact_gelu=config.hidden_act == "gelu",
            eps=config.layer_norm_eps,
            embedding=_matrix(self.patch_embedding),
            positions=tower.position_embedding.weight.data_ptr(),
            last=_norm(tower.post_layernorm),
            block=self._blocks,
        )
        self._scratch = torch.empty(0)
        self._lock = Lock()

    def forward(self, pixel_values: Tensor, patch_mask: Tensor | None = None) -> Tensor:
        """(N, C, H, W) normalised tiles -> (N, P, D_v) float32 features; see the eager tower."""
        count, channels, height, width = pixel_values.shape
        side, places = self.config.patch_size, self.tower.position_ids((height, width), patch_mask, "cpu")
        grid = (height // side, width // side)
        if channels != self.config.num_channels or not min(grid):
            expected = f"(N, {self.config.num_channels}, H, W) with H and W of at least {side}"
            raise ValueError(f"pixel_values: expected {expected}, got {tuple(pixel_values.shape)}")
        if patch_mask is not None and tuple(patch_mask.shape) != (count, *grid):
            raise ValueError(f"patch_mask: expected {(count, *grid)}, got {tuple(patch_mask.shape)}")
        pixels = pixel_values.detach().float().contiguous()
        places = places.expand(count, -1).contiguous()
        features = torch.empty(count, grid[0] * grid[1], self.config.hidden_size)
        everything = torch.arange(features.shape[1])
        with self._lock:
            for i in range(count):
                real = everything if patch_mask is None else patch_mask[i].flatten().nonzero().flatten()
                keys = real if len(real) else everything  # padding alone looks at all of itself
                tile = _Tile(
                    pixels[i].data_ptr(), height, width, places[i].data_ptr(), len(keys), keys.data_ptr()
                )
                self._encode(tile, features[i])
        return features

    def _encode(self, tile: _Tile, features: Tensor) -> None:
        threads = torch.get_num_threads()
        needed = self._library.ocelli_tower_floats(self._description, tile, threads)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        self._library.ocelli_tower(
            self._description, tile, threads, self._scratch.data_ptr(), features.data_ptr()
        )


def _linear_of_patches(convolution: nn.Conv2d, bits: int) -> PanelLinear:
    """The convolution as a linear layer of a patch's pixels, in the precision of the other layers."""
    weight, scale = convolution.weight.detach().flatten(1), None
    if bits == 8:
        weight, scale = quantize_rows(weight)
    elif bits == 16:
        weight = weight.to(torch.bfloat16)
    return PanelLinear(weight, scale, convolution.bias)


def _matrix(layer: PanelWeight) -> Matrix:
    return layer.matrix


def _norm(norm: nn.LayerNorm) -> _Norm:
    return _Norm(norm.weight.data_ptr(), norm.bias.data_ptr())
