"""The sizes of a model, and the names of devices: all that is checked before PyTorch is imported.

Configs are frozen, checked when they are made, and named as on the Hub. The modules of families/ make
them from a checkpoint's config.json, which is a stranger's file; nothing else interprets it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

# Far beyond any real model: a config past these is refused before anything is allocated.
_MAX_WIDTH = 65_536
_MAX_LAYERS = 1_024
_MAX_VOCAB = 4_194_304
_MAX_POSITIONS = 16_777_216


def _check_range(config, low: int, high: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(
                f"{type(config).__name__}.{name}: expected an integer from {low} to {high}, got {value!r}"
            )


def _check_choice(config, name: str, *choices: str) -> None:
    if (value := getattr(config, name)) not in choices:
        raise ValueError(f"{type(config).__name__}.{name}: expected {' or '.join(choices)}, got {value!r}")


def _check_multiple(config, name: str, divisor: str) -> None:
    value, by = getattr(config, name), getattr(config, divisor)
    if value % by:
        raise ValueError(f"{type(config).__name__}.{name} ({value}) must be a multiple of {divisor} ({by})")


def _make_positive(config, *names: str) -> None:
    """Check fields and make floats of them: 10**30 is saved as the float that it is used as."""
    for name in names:
        value = getattr(config, name)
        # The range of float32: beyond it eps would be zero, and a frequency infinite.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-38 <= value <= 1e38:
            raise ValueError(f"{type(config).__name__}.{name}: expected a positive number, got {value!r}")
        object.__setattr__(config, name, float(value))


@dataclass(frozen=True)
class VisionConfig:
    """A vision transformer over square tiles of `image_size` pixels: SigLIP's unless fields say otherwise."""

    hidden_size: int = 1152
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    layer_norm_eps: float = 1e-6
    hidden_act: str = "gelu_pytorch_tanh"
    norm_type: str = "layer_norm"
    attention_bias: bool = True  # of queries, keys and values; the output's projection always has one
    qk_norm: bool = False  # queries and keys are normed, all heads together, before they meet
    class_token: bool = False  # stands in front of the patches, with a position of its own, and is dropped
    layer_scale: bool = False  # what a block adds is scaled, feature by feature
    last_norm: bool = True  # after the last block

    def __post_init__(self):
        _check_range(self, 1, _MAX_WIDTH, "hidden_size", "intermediate_size", "image_size")
        _check_range(self, 1, _MAX_LAYERS, "num_hidden_layers")
        _check_range(self, 1, self.hidden_size, "num_attention_heads")
        _check_range(self, 1, 16, "num_channels")
        _check_range(self, 1, self.image_size, "patch_size")
        _check_multiple(self, "hidden_size", "num_attention_heads")
        _check_choice(self, "hidden_act", "gelu_pytorch_tanh", "gelu")
        _check_choice(self, "norm_type", "layer_norm", "rms_norm")
        _make_positive(self, "layer_norm_eps")

    @property
    def grid(self) -> int:
        """Patches along one side of a tile."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.grid**2

    def images(self, scale: int) -> str:
        """In words, how images are cut; `scale`² patches become a token."""
        tokens = (self.grid // scale) ** 2
        return f"tiles of {self.image_size} px in patches of {self.patch_size} px, {tokens} tokens a tile"

    @property
    def least_side(self) -> int:
        """Pixels along a side of the smallest image that the tower takes."""
        return self.image_size


@dataclass(frozen=True)
class PackedVisionConfig:
    """A vision transformer over images of their own grids: patches of several stand one after another."""

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    patch_size: int = 16
    merge_size: int = 2  # merge_size² patches, a square, become one position among the text
    temporal_patch_size: int = 2  # pictures that one patch spans; a still is repeated
    norm: str = "layer"
    norm_eps: float = 1e-6
    gated_mlp: bool = False
    patch_bias: bool = True
    channels_last: bool = False  # a patch's numbers are colour by colour of each pixel (SigLIP2)
    table_side: int = 48  # of the square table of learned positions; 0: there is none
    table_antialias: bool = False  # stretched as a picture is, edge on edge; else corner on corner
    rope_theta: float = 10_000.0
    rotary: bool = True  # queries and keys are rotated by row and column
    last_norm: bool = False
    window: int = 0  # patches a side; 0: every layer attends to the whole image
    whole_layers: tuple[int, ...] = ()  # which do nevertheless
    taps: tuple[int, ...] = ()  # layers whose output is taken, too, for the first layers of the text part
    tokens_per_second: int = 4  # places in time that a video takes (Qwen2.5-VL); kept for saving
    # Of the projector: its norm is over a whole block, or there is none; its inner width; its biases.
    merger_norm: str = "patch"
    merger_norm_eps: float = 1e-6
    merger_width: int | None = None  # None: as wide as a block
    merger_bias: bool = True

    def __post_init__(self):
        _check_range(self, 1, _MAX_WIDTH, "hidden_size", "intermediate_size")
        _check_range(self, 1, _MAX_LAYERS, "num_hidden_layers")
        _check_range(self, 1, self.hidden_size, "num_attention_heads")
        _check_range(self, 1, 16, "num_channels", "merge_size", "temporal_patch_size")
        _check_range(self, 1, 1_024, "patch_size")
        _check_range(self, 0, 4_096, "window")
        _check_range(self, 0, _MAX_WIDTH, "table_side")
        _check_multiple(self, "hidden_size", "num_attention_heads")
        if (dim := self.hidden_size // self.num_attention_heads) % 4:
            raise ValueError(f"PackedVisionConfig: heads of {dim} numbers, expected a multiple of 4")
        _check_choice(self, "norm", "layer", "rms")
        _check_choice(self, "merger_norm", "patch", "block", "none")
        if self.merger_width is not None:
            _check_range(self, 1, _MAX_WIDTH, "merger_width")
        _make_positive(self, "norm_eps", "rope_theta")
        _check_multiple(self, "window", "merge_size")
        if list(self.taps) != sorted({*self.taps}) or min(self.taps, default=0) < 0:
            raise ValueError(f"PackedVisionConfig.taps: expected layers in ascending order, got {self.taps}")

    def images(self, scale: int) -> str:
        """As of `VisionConfig`; the scale is `merge_size`."""
        side = self.patch_size * self.merge_size
        return f"in patches of {self.patch_size} px, a token for each {side} x {side} px"

    @property
    def least_side(self) -> int:
        """Pixels along a side of the smallest image, which takes one position."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True)
class RopeScaling:
    """Rotary-embedding scaling: `linear` divides every frequency; `llama3` smooths between bands, with the
    fields of Llama 3.1's config."""

    rope_type: str = "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self):
        _check_choice(self, "rope_type", "linear", "llama3")
        _make_positive(self, "factor", "low_freq_factor", "high_freq_factor")
        _check_range(self, 1, _MAX_POSITIONS, "original_max_position_embeddings")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"RopeScaling.high_freq_factor ({self.high_freq_factor}) must exceed "
                f"low_freq_factor ({self.low_freq_factor})"
            )


@dataclass(frozen=True)
class TextConfig:
    """A Llama-style decoder. `num_key_value_heads` and `head_dim` default from the other fields."""

    vocab_size: int = 32_000
    hidden_size: int = 4096
    intermediate_size: int = 11_008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    # None is filled in below: from there on they are numbers.
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normed, head by head, before they are rotated (Qwen3)
    qkv_bias_only: bool = False  # attention_bias is not about the output's projection (Qwen2)
    # Of the rotary frequencies so many turn by a token's place in time, in a column, in a row of an image
    # (Qwen-VL); () where all turn by one place. Interleaved: the three take turns, frequency by frequency.
    rope_sections: tuple[int, ...] = ()
    rope_interleaved: bool = False

    partial_rotary_factor: float = 1.0  # share of a head's numbers that are rotated, the first ones
    attention_gate: bool = False  # what a head attends to is weighed, number by number (Qwen3.5)
    zero_centered_norms: bool = False  # a norm's weight is what differs from 1 (Qwen3.5)

    # What mixes a layer's positions: "attention", "conv" or "delta"; () where it is attention everywhere.
    layer_types: tuple[str, ...] = ()
    conv_kernel: int = 3
    conv_bias: bool = False
    delta_key_heads: int = 16
    delta_value_heads: int = 16
    delta_key_dim: int = 128
    delta_value_dim: int = 128

    rotary_dim: ClassVar[int]  # numbers of a head that are rotated, which follows from the fields
    act: ClassVar[str] = "silu"
    kinds: ClassVar[tuple[str, ...]] = ("attention", "conv", "delta")

    def mixer(self, layer: int) -> str:
        """What mixes the positions of a layer."""
        return self.layer_types[layer] if self.layer_types else "attention"

    def __post_init__(self):
        _check_range(self, 1, _MAX_WIDTH, "hidden_size", "intermediate_size", "num_attention_heads")
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        _check_range(self, 1, _MAX_WIDTH, "num_key_value_heads", "head_dim")
        _check_range(self, 1, _MAX_VOCAB, "vocab_size")
        _check_range(self, 1, _MAX_LAYERS, "num_hidden_layers")
        _check_range(self, 1, _MAX_POSITIONS, "max_position_embeddings")
        _check_multiple(self, "num_attention_heads", "num_key_value_heads")
        _make_positive(self, "partial_rotary_factor")
        object.__setattr__(self, "rotary_dim", int(self.head_dim * self.partial_rotary_factor))
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"TextConfig.partial_rotary_factor: expected to rotate an even number of {self.head_dim} "
                f"numbers, got {self.partial_rotary_factor}"
            )
        _check_choice(self, "hidden_act", self.act)
        _make_positive(self, "rms_norm_eps", "rope_theta")
        # Before a delta rule, at most half of the cache's `STATE_WINDOW`.
        _check_range(self, 1, 8 if "delta" in self.layer_types else 64, "conv_kernel")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"TextConfig.layer_types: expected one for each of {self.num_hidden_layers} layers, "
                f"got {len(self.layer_types)}"
            )
        if strange := set(self.layer_types) - {*self.kinds}:
            raise ValueError(
                f"TextConfig.layer_types: expected {', '.join(self.kinds)}, got {sorted(strange)[0]!r}"
            )
        sizes = ("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim")
        _check_range(self, 1, 4_096, *sizes)
        _check_multiple(self, "delta_value_heads", "delta_key_heads")
        sections = self.rope_sections
        if sections and (len(sections) != 3 or min(sections) < 0 or sum(sections) != self.rotary_dim // 2):
            raise ValueError(
                f"TextConfig.rope_sections: expected three numbers whose sum is {self.rotary_dim // 2}, "
                f"got {sections}"
            )


@dataclass(frozen=True)
class Gemma4TextConfig(TextConfig):
    """Gemma 4's decoder. Of its layers some look back `sliding_window` positions, with heads of `head_dim`,
    and some at all, with heads of `full_head_dim`; those that are "shared" have no keys of their own and read
    what the last layer of their kind before them keeps. `layer_types` has one for each."""

    kinds: ClassVar[tuple[str, ...]] = ("sliding", "full", "sliding shared", "full shared")
    act: ClassVar[str] = "gelu_pytorch_tanh"

    hidden_act: str = "gelu_pytorch_tanh"
    sliding_window: int = 512
    full_head_dim: int = 512
    full_rotary_factor: float = 0.25
    full_rope_theta: float = 1e6
    shared_mlp_factor: int = 1  # by which the inner width of a shared layer is larger
    per_layer_width: int = 0  # numbers of a token for each layer, from a table of their own; 0: none
    per_layer_vocab: int = 262_144
    per_layer_count: int = 0  # layers that the table has numbers for
    logit_cap: float | None = None
    # Of padding, which learns nothing; in the table for each layer an image's positions are padding, too.
    placeholder_id: int = 0

    def __post_init__(self):
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError("Gemma4TextConfig.layer_types: expected one for each layer")
        _check_range(self, 1, _MAX_POSITIONS, "sliding_window")
        _check_range(self, 2, _MAX_WIDTH, "full_head_dim")
        _check_range(self, 1, 8, "shared_mlp_factor")
        _check_range(self, 0, 4_096, "per_layer_width")
        _check_range(self, 1, _MAX_VOCAB, "per_layer_vocab")
        _check_range(self, 0, min(self.vocab_size, self.per_layer_vocab) - 1, "placeholder_id")
        _make_positive(self, "full_rotary_factor", "full_rope_theta")
        if self.full_rotary_factor > 1:
            raise ValueError(
                f"Gemma4TextConfig.full_rotary_factor: expected up to 1, got {self.full_rotary_factor}"
            )
        if self.logit_cap is not None:
            _make_positive(self, "logit_cap")
        super().__post_init__()

    def head_dim_of(self, kind: str) -> int:
        return self.full_head_dim if kind.startswith("full") else self.head_dim


@dataclass(frozen=True)
class Gemma4VisionConfig(PackedVisionConfig):
    """Gemma 4's tower: learned positions of rows and of columns, `merge_size`² patches pooled to one."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    merge_size: int = 3
    temporal_patch_size: int = 1
    norm: str = "rms"
    gated_mlp: bool = True
    patch_bias: bool = False
    channels_last: bool = True
    table_side: int = 10_240
    rope_theta: float = 100.0
    clips: bool = False  # what goes into and out of each matrix is clipped
    standardizes: bool = False  # what is pooled is shifted and scaled


@dataclass(frozen=True)
class VLMConfig:
    """The whole model: its family's name (a module of families/), vision, projector, text, and the id that a
    prompt holds once for each position of an image. It may follow the vocabulary, having no embedding."""

    vision: Any = field(  # VisionConfig, or PackedVisionConfig where the family says so
        default_factory=VisionConfig
    )
    text: TextConfig = field(default_factory=TextConfig)
    scale_factor: int = 2
    image_token_id: int = 128_257
    tie_word_embeddings: bool = False
    projector_bias: bool = False
    family: str = "idefics3"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    marker_token_ids: tuple[int | None, ...] = ()  # further ones that a family's config.json names

    def __post_init__(self):
        if isinstance(self.vision, VisionConfig):
            _check_range(self, 1, self.vision.grid, "scale_factor")
        if isinstance(self.vision, VisionConfig) and self.vision.grid % self.scale_factor:
            raise ValueError(
                f"VLMConfig.scale_factor ({self.scale_factor}) must divide the vision grid "
                f"({self.vision.grid} patches a side)"
            )
        _check_range(self, 0, self.text.vocab_size, "image_token_id")

    @property
    def feature_width(self) -> int:
        """Numbers of an image's features in a position, with those for further layers (DeepStack)."""
        return self.text.hidden_size * (1 + len(getattr(self.vision, "taps", ())))


def check_device(name: str) -> str:
    """Refuse the name of a device that this machine cannot have, before PyTorch is imported for it."""
    if re.fullmatch(r"auto|(cpu|cuda|mps)(:\d+)?", name) is None:
        raise ValueError(f"device: expected auto, cpu, cuda, mps or cuda:N, got {name!r}")
    if name.startswith("cuda"):
        from importlib.metadata import version  # slow to import, and hardly ever needed

        if (torch := version("torch")).endswith("+cpu"):
            raise ValueError(f"device {name}: PyTorch {torch} is built for CPUs only; use auto or cpu")
    if name.startswith("mps") and sys.platform != "darwin":
        raise ValueError(f"device {name}: only Macs have one; use auto or cpu")
    return name
