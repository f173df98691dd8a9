"""The sizes of a model, and the names of devices: all that is checked before PyTorch is imported.

Configs are frozen, checked when they are made, and named as on the Hub. The modules of families/ make
them from a checkpoint's config.json; nothing else interprets it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


def require(config: object, holds: bool, name: str, expected: str) -> None:
    """Raise ValueError about a field of a config unless what is expected of it holds."""
    if not holds:
        said = f"{type(config).__name__}.{name}: expected {expected}, got {getattr(config, name)!r}"
        raise ValueError(said)


def require_multiple(config: object, name: str, divisor: str) -> None:
    by = getattr(config, divisor)
    require(config, getattr(config, name) % by == 0, name, f"a multiple of {divisor} ({by})")


class Checked:
    """A config whose fields are checked by their types: whole numbers are 1 or more, or 0 or more where they
    `may_be_zero`; other numbers are positive and become floats; words are one of their `choices`."""

    may_be_zero: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __post_init__(self):
        for one in fields(self):  # type: ignore[arg-type]
            name, value = one.name, getattr(self, one.name)
            if one.type == "int":
                least = int(name not in self.may_be_zero)
                require(self, type(value) is int and value >= least, name, f"a whole number from {least} on")
            elif one.type == "float":
                require(self, type(value) in (int, float) and 0 < value < math.inf, name, "a positive number")
                object.__setattr__(self, name, float(value))
        for name, words in self.choices.items():
            require(self, getattr(self, name) in words, name, " or ".join(words))


@dataclass(frozen=True)
class VisionConfig(Checked):
    """A vision transformer over square tiles of `image_size` pixels: SigLIP's unless fields say otherwise."""

    choices: ClassVar = {
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "norm_type": ("layer_norm", "rms_norm"),
    }

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
    qk_norm: bool = False  # queries and keys are normed, all heads together
    class_token: bool = False  # a learnt vector before the patches; its output is dropped
    layer_scale: bool = False  # a learnt vector scales the output of each half of a block
    last_norm: bool = True  # after the last block

    def __post_init__(self):
        super().__post_init__()
        require_multiple(self, "hidden_size", "num_attention_heads")
        require(self, self.grid > 0, "patch_size", f"at most image_size ({self.image_size})")

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
class RopeScaling(Checked):
    """Rotary-embedding scaling: `linear` divides every frequency; `llama3` smooths between bands, with the
    fields of Llama 3.1's config."""

    choices: ClassVar = {"rope_type": ("linear", "llama3")}

    rope_type: str = "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self):
        super().__post_init__()
        fits = self.rope_type == "linear" or self.high_freq_factor > self.low_freq_factor
        require(self, fits, "high_freq_factor", f"more than low_freq_factor ({self.low_freq_factor})")


@dataclass(frozen=True)
class TextConfig(Checked):
    """A Llama-style decoder. `num_key_value_heads` and `head_dim` default from the other fields."""

    kinds: ClassVar[tuple[str, ...]] = ("attention", "conv", "delta")
    choices: ClassVar = {"hidden_act": ("silu",)}
    block_norms: ClassVar[int] = 2  # norms of hidden states in a block
    rotary_dim: ClassVar[int]  # numbers of a head that are rotated, which follows from the fields

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
    # Numbers of rotary frequencies that turn by a token's place in time, by its row and by its column
    # (Qwen-VL); () where all turn by its position. Interleaved: the three alternate.
    rope_sections: tuple[int, ...] = ()
    rope_interleaved: bool = False

    partial_rotary_factor: float = 1.0  # share of a head's numbers that are rotated: the first ones
    attention_gate: bool = False  # a sigmoid gate scales the output of attention (Qwen3.5)
    zero_centered_norms: bool = False  # norms scale by 1 + weight (Qwen3.5)

    # The mixer of each layer: "attention", "conv" or "delta"; () where all have attention.
    layer_types: tuple[str, ...] = ()
    conv_kernel: int = 3
    conv_bias: bool = False
    delta_key_heads: int = 16
    delta_value_heads: int = 16
    delta_key_dim: int = 128
    delta_value_dim: int = 128

    def mixer(self, layer: int) -> str:
        """The kind of mixer that a layer has."""
        return self.layer_types[layer] if self.layer_types else "attention"

    def __post_init__(self):
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        super().__post_init__()
        require_multiple(self, "num_attention_heads", "num_key_value_heads")
        require_multiple(self, "delta_value_heads", "delta_key_heads")
        object.__setattr__(self, "rotary_dim", int(self.head_dim * self.partial_rotary_factor))
        even = not self.rotary_dim % 2 and 2 <= self.rotary_dim <= self.head_dim
        require(self, even, "partial_rotary_factor", f"an even number of {self.head_dim} to be rotated")
        types, sections, half = self.layer_types, self.rope_sections, self.rotary_dim // 2
        layers = f"one for each of {self.num_hidden_layers} layers, of {', '.join(self.kinds)}"
        fits = not types or (len(types) == self.num_hidden_layers and {*types} <= {*self.kinds})
        require(self, fits, "layer_types", layers)
        fits = not sections or (len(sections) == 3 and min(sections) >= 0 and sum(sections) == half)
        require(self, fits, "rope_sections", f"three numbers whose sum is {half}")
        # At most half of the cache's `STATE_WINDOW`.
        require(self, self.conv_kernel <= 8 or "delta" not in types, "conv_kernel", "at most 8")


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
    marker_token_ids: tuple[int | None, ...] = ()  # further ids that a family's config.json names

    def __post_init__(self):
        scale, grid = self.scale_factor, getattr(self.vision, "grid", self.scale_factor)
        fits = type(scale) is int and 1 <= scale <= grid and not grid % scale
        require(self, fits, "scale_factor", f"a divisor of the vision grid ({grid} patches a side)")
        most = self.text.vocab_size
        fits = type(self.image_token_id) is int and 0 <= self.image_token_id <= most
        require(self, fits, "image_token_id", f"a whole number from 0 to {most}")

    @property
    def feature_width(self) -> int:
        """Numbers of an image's features in a position, with those for further layers (DeepStack)."""
        return self.text.hidden_size * (1 + len(getattr(self.vision, "taps", ())))


def check_device(name: str) -> str:
    """Refuse what is no name of a device, before PyTorch is imported for it."""
    if re.fullmatch(r"auto|(cpu|cuda|mps)(:\d+)?", name) is None:
        raise ValueError(f"device: expected auto, cpu, cuda, mps or cuda:N, got {name!r}")
    return name
