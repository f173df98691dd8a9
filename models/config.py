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
MAX_WIDTH = 65_536
MAX_LAYERS = 1_024
MAX_VOCAB = 4_194_304
MAX_POSITIONS = 16_777_216


def check_range(config, low: int, high: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(
                f"{type(config).__name__}.{name}: expected an integer from {low} to {high}, got {value!r}"
            )


def check_choice(config, name: str, *choices: str) -> None:
    if (value := getattr(config, name)) not in choices:
        raise ValueError(f"{type(config).__name__}.{name}: expected {' or '.join(choices)}, got {value!r}")


def check_multiple(config, name: str, divisor: str) -> None:
    value, by = getattr(config, name), getattr(config, divisor)
    if value % by:
        raise ValueError(f"{type(config).__name__}.{name} ({value}) must be a multiple of {divisor} ({by})")


def make_positive(config, *names: str) -> None:
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
    qk_norm: bool = False  # queries and keys are normed, all heads together
    class_token: bool = False  # a learnt vector before the patches; its output is dropped
    layer_scale: bool = False  # a learnt vector scales the output of each half of a block
    last_norm: bool = True  # after the last block

    def __post_init__(self):
        check_range(self, 1, MAX_WIDTH, "hidden_size", "intermediate_size", "image_size")
        check_range(self, 1, MAX_LAYERS, "num_hidden_layers")
        check_range(self, 1, self.hidden_size, "num_attention_heads")
        check_range(self, 1, 16, "num_channels")
        check_range(self, 1, self.image_size, "patch_size")
        check_multiple(self, "hidden_size", "num_attention_heads")
        check_choice(self, "hidden_act", "gelu_pytorch_tanh", "gelu")
        check_choice(self, "norm_type", "layer_norm", "rms_norm")
        make_positive(self, "layer_norm_eps")

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
class RopeScaling:
    """Rotary-embedding scaling: `linear` divides every frequency; `llama3` smooths between bands, with the
    fields of Llama 3.1's config."""

    rope_type: str = "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self):
        check_choice(self, "rope_type", "linear", "llama3")
        make_positive(self, "factor", "low_freq_factor", "high_freq_factor")
        check_range(self, 1, MAX_POSITIONS, "original_max_position_embeddings")
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

    rotary_dim: ClassVar[int]  # numbers of a head that are rotated, which follows from the fields
    act: ClassVar[str] = "silu"
    kinds: ClassVar[tuple[str, ...]] = ("attention", "conv", "delta")
    block_norms: ClassVar[int] = 2  # norms of hidden states in a block

    def mixer(self, layer: int) -> str:
        """The kind of mixer that a layer has."""
        return self.layer_types[layer] if self.layer_types else "attention"

    def __post_init__(self):
        check_range(self, 1, MAX_WIDTH, "hidden_size", "intermediate_size", "num_attention_heads")
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        check_range(self, 1, MAX_WIDTH, "num_key_value_heads", "head_dim")
        check_range(self, 1, MAX_VOCAB, "vocab_size")
        check_range(self, 1, MAX_LAYERS, "num_hidden_layers")
        check_range(self, 1, MAX_POSITIONS, "max_position_embeddings")
        check_multiple(self, "num_attention_heads", "num_key_value_heads")
        make_positive(self, "partial_rotary_factor")
        object.__setattr__(self, "rotary_dim", int(self.head_dim * self.partial_rotary_factor))
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"TextConfig.partial_rotary_factor: expected to rotate an even number of {self.head_dim} "
                f"numbers, got {self.partial_rotary_factor}"
            )
        check_choice(self, "hidden_act", self.act)
        make_positive(self, "rms_norm_eps", "rope_theta")
        # Before a delta rule, at most half of the cache's `STATE_WINDOW`.
        check_range(self, 1, 8 if "delta" in self.layer_types else 64, "conv_kernel")
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
        check_range(self, 1, 4_096, *sizes)
        check_multiple(self, "delta_value_heads", "delta_key_heads")
        sections = self.rope_sections
        if sections and (len(sections) != 3 or min(sections) < 0 or sum(sections) != self.rotary_dim // 2):
            raise ValueError(
                f"TextConfig.rope_sections: expected three numbers whose sum is {self.rotary_dim // 2}, "
                f"got {sections}"
            )


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
        if isinstance(self.vision, VisionConfig):
            check_range(self, 1, self.vision.grid, "scale_factor")
        if isinstance(self.vision, VisionConfig) and self.vision.grid % self.scale_factor:
            raise ValueError(
                f"VLMConfig.scale_factor ({self.scale_factor}) must divide the vision grid "
                f"({self.vision.grid} patches a side)"
            )
        check_range(self, 0, self.text.vocab_size, "image_token_id")

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
