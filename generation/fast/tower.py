"""A vision tower's forward pass in C: tower.c, compiled once for this machine and called with addresses.

    tower, how = fast_tower(model.vision_model)       # or None, and why there is none
    features = tower(pixel_values)                    # as the eager tower: (N, C, M, M) -> (N, P, D_v)

Parts are encoded one after the other, each by all threads, so that a tile's features have the same bits in
any company. Activations meet int8 weights as 8-bit numbers with one scale a patch where the processor has dot
products of bytes (VNNI), else as 16-bit ones. They meet bfloat16 weights, and each other in the attention of
both, as bfloat16 where there are dot products of it (AVX512_BF16), else as float32.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generation.fast.native.build import (
    ANY,
    BITS,
    LINEAR,
    NORMS,
    Matrix,
    Network,
    NoCompiler,
    PanelLinear,
    PanelWeight,
    Pass,
    is_sound,
    library_file,
    load_library,
    load_panels,
    make_pass,
    refuse_change,
    to_panels,
    unfit,
)
from generation.fast.quantized import quantize_rows
from generation.threads import CROWD, Paces, Turns

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER))


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "out", "fc1", "fc2")),
        *((name, _Norm) for name in ("before_attention", "before_mlp")),
        *((name, _POINTER) for name in ("attention_scale", "mlp_scale")),
    )


class _Tower(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("layers", "width", "heads", "inner", "channels", "patch", "exact_gelu")),
        ("eps", ctypes.c_float),
        ("embedding", Matrix),
        *((name, _POINTER) for name in ("positions", "class_row")),
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
    opened.ocelli_tower.argtypes = (tower, tile, ctypes.POINTER(Pass), _POINTER, _POINTER)


def _library_parts(weight_bits: int) -> tuple[str, tuple[str, ...]]:
    return "tower.c", (f"-DWEIGHT_BITS={weight_bits}",)


def unsupported(tower) -> str | None:
    """Why tower.c cannot run this vision tower, or None where it can."""
    return TOWER.strange(tower) or unfit(tower)


def _weight_bits(tower) -> int:
    return BITS[tower.layers[0].self_attn.q_proj.weight.dtype]


def is_compiled(tower) -> bool:
    """Whether the library for this tower exists already. Raises NoCompiler."""
    return is_sound(library_file(*_library_parts(_weight_bits(tower)))[1])


def fast_tower(tower, compiling: bool = True) -> tuple[nn.Module | None, str]:
    """(a faster tower that took this one's weights over, what it is), or (None, why there is none).

    Args:
        compiling: else the C tower is used only where it was compiled before.
    """
    if reason := unsupported(tower):
        return None, f"eager: {reason}"
    try:
        if compiling or is_compiled(tower):
            return FastTower(tower), FastTower.NAME
        why = "compiling does not pay for a few images and a small model"
    except NoCompiler as error:
        why = str(error)
    if _weight_bits(tower) == 32 and torch.backends.mkldnn.is_available():
        return use_onednn(tower), f"oneDNN linear layers: {why}"
    return None, f"eager: {why}"


class OneDNNLinear(nn.Linear):
    """A float32 linear layer by oneDNN, without gradients. PyTorch itself takes MKL, which reaches half of
    that speed on AMD's processors."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


LINEARS = (*LINEAR, OneDNNLinear)
TOWER = Network(
    parts={
        "": ("models.vision_transformer.VisionTransformer",),
        "patch_embedding": (nn.Conv2d,),
        "position_embedding": (nn.Embedding,),
        "layers": (nn.ModuleList,),
        "layers.*": ("models.vision_transformer.VisionBlock",),
        "layers.*.layer_norm1": NORMS,
        "layers.*.self_attn": ("models.vision_transformer.VisionAttention",),
        **{f"layers.*.self_attn.{name}_proj": LINEARS for name in ("q", "k", "v", "out")},
        "layers.*.layer_norm2": NORMS,
        "layers.*.mlp": ("models.vision_transformer.VisionMLP",),
        **{f"layers.*.mlp.fc{number}": LINEARS for number in (1, 2)},
        "post_layernorm": NORMS,
    },
    tensors={"": ("class_token",), "layers.*": ("layer_scale1", "layer_scale2")},
    config="models.config.VisionConfig",
    fields={
        **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers"), ANY),
        **dict.fromkeys(("num_attention_heads", "num_channels", "image_size", "patch_size"), ANY),
        "layer_norm_eps": ANY,
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "norm_type": ("layer_norm", "rms_norm"),
        **dict.fromkeys(("attention_bias", "class_token", "layer_scale", "last_norm"), (False, True)),
    },
    eps="layer_norm_eps",
)


def use_onednn(tower: nn.Module) -> nn.Module:
    """Replace the linear layers of a float32 tower on a CPU, in place."""
    for parent in list(tower.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, OneDNNLinear(child))
    return tower


class FastTower(nn.Module):
    """A `models.vision_transformer.VisionTransformer` in C, without gradients. It takes the tower's weights
    over: they are put into panels, and the tower's own layers multiply with these from then on. Threads that
    share one take turns.

    Raises NoCompiler, and ValueError for a tower that it does not support (`unsupported` says why).
    """

    NAME = "native C tower"

    def __init__(self, tower):
        super().__init__()
        if reason := unsupported(tower):
            raise ValueError(f"the native vision tower cannot run this one: {reason}")
        self.config, config = tower.config, tower.config
        bits = _weight_bits(tower)
        self.library = load_library(*_library_parts(bits), _declare)
        to_panels(tower)
        self.tower = tower
        self.patch_embedding = _linear_of_patches(tower.patch_embedding, bits)
        self._kept: list[Tensor] = []  # tower.c points to these, so they must live as long as this object
        self._blocks = (_Block * config.num_hidden_layers)()
        for slot, layer in zip(self._blocks, tower.layers, strict=True):
            for name in ("q", "k", "v"):
                setattr(slot, name, _matrix(getattr(layer.self_attn, f"{name}_proj")))
            slot.out, slot.fc1, slot.fc2 = map(
                _matrix, (layer.self_attn.out_proj, layer.mlp.fc1, layer.mlp.fc2)
            )
            slot.before_attention, slot.before_mlp = _norm(layer.layer_norm1), _norm(layer.layer_norm2)
            slot.attention_scale = self._padded(layer.layer_scale1)
            slot.mlp_scale = self._padded(layer.layer_scale2)
        places = tower.position_embedding.weight
        token = None if tower.class_token is None else tower.class_token[0] + places[0]
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
            positions=places[config.class_token :].data_ptr(),
            class_row=self._padded(token),
            last=_norm(tower.post_layernorm),
            block=self._blocks,
        )
        self._scratch = torch.empty(0)
        self._turns = Turns()
        self._paces = Paces(CROWD)
        tower.patch_embedding = None  # its weights are in panels now

    def _padded(self, row: Tensor | None) -> int | None:
        """The address of a copy of a row of numbers that ends with a whole panel; None for none."""
        if row is None:
            return None
        missing = -len(row) % load_panels(_weight_bits(self.tower)).ocelli_panel()
        self._kept.append(F.pad(row.detach().float(), (0, missing)))
        return self._kept[-1].data_ptr()

    def _apply(self, fn, recurse: bool = True):
        refuse_change(fn)
        return self

    def state_dict(self, *arguments, destination=None, prefix="", keep_vars=False):
        """That of the tower which it has taken the place of."""
        made = self.tower.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        channels, side = self.config.num_channels, self.config.patch_size
        patches = self.patch_embedding.state_dict(keep_vars=keep_vars)
        if patches["weight"].is_floating_point():  # else it stays in panels
            patches["weight"] = patches["weight"].unflatten(-1, (channels, side, side))
        made.update((f"{prefix}patch_embedding.{name}", tensor) for name, tensor in patches.items())
        return made

    def __getstate__(self) -> object:
        """What copying and pickling ask for."""
        raise TypeError("a vision tower in C can be neither copied nor pickled: load the checkpoint again")

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(N, C, M, M) normalised tiles -> (N, P, D_v) float32 features; see the eager tower."""
        side, patches = self.config.image_size, self.config.num_patches
        if pixel_values.shape[1:] != (self.config.num_channels, side, side):
            expected = f"(N, {self.config.num_channels}, {side}, {side})"
            raise ValueError(f"pixel_values: expected {expected}, got {tuple(pixel_values.shape)}")
        pixels = pixel_values.detach().float().contiguous()
        features = torch.empty(len(pixels), patches, self.config.hidden_size)
        every = torch.arange(patches + self.config.class_token)  # rows of the table, and keys
        with self._turns:
            for one, own in zip(pixels, features):
                tile = _Tile(one.data_ptr(), side, side, every.data_ptr(), len(every), every.data_ptr())
                make_pass(self._paces, patches, partial(self._encode, tile, own))
        return features

    def _encode(self, tile: _Tile, features: Tensor, made: Pass) -> None:
        needed = self.library.ocelli_tower_floats(self._description, tile, made.threads)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        self.library.ocelli_tower(
            self._description, tile, made, self._scratch.data_ptr(), features.data_ptr()
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


def _norm(norm: nn.LayerNorm | nn.RMSNorm | None) -> _Norm:
    if norm is None:
        return _Norm()
    return _Norm(norm.weight.data_ptr(), norm.bias.data_ptr() if isinstance(norm, nn.LayerNorm) else None)
