"""What is judged without PyTorch: configurations, names of devices, and JSON that someone else wrote.

Configurations are frozen, validated, and have the Hub's field names. Readers in `models/checkpoints/` make
them of a checkpoint's config.json; nothing else interprets one.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Bounds that no real model comes near: a config past them is broken or hostile, and is refused before
# anything is allocated.
_MAX_WIDTH = 65_536
_MAX_LAYERS = 1_024
_MAX_VOCAB = 4_194_304
_MAX_POSITIONS = 16_777_216


def _check_range(owner: str, name: str, value, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{owner}.{name}: expected an integer from {low} to {high}, got {value!r}")


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
    """A SigLIP-style vision transformer over square tiles of `image_size` pixels."""

    hidden_size: int = 1152
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 32
    layer_norm_eps: float = 1e-6
    hidden_act: str = "gelu_pytorch_tanh"

    def __post_init__(self):
        for name in ("hidden_size", "intermediate_size", "image_size"):
            _check_range("VisionConfig", name, getattr(self, name), 1, _MAX_WIDTH)
        _check_range("VisionConfig", "num_hidden_layers", self.num_hidden_layers, 1, _MAX_LAYERS)
        _check_range("VisionConfig", "num_attention_heads", self.num_attention_heads, 1, self.hidden_size)
        _check_range("VisionConfig", "num_channels", self.num_channels, 1, 16)
        _check_range("VisionConfig", "patch_size", self.patch_size, 1, self.image_size)
        _make_positive(self, "layer_norm_eps")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"VisionConfig.hidden_size ({self.hidden_size}) must be a multiple of "
                f"num_attention_heads ({self.num_attention_heads})"
            )
        if self.hidden_act not in ("gelu_pytorch_tanh", "gelu"):
            raise ValueError(
                f"VisionConfig.hidden_act: expected gelu_pytorch_tanh or gelu, got {self.hidden_act!r}"
            )

    @property
    def grid(self) -> int:
        """Patches along one side of a tile."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.grid**2


@dataclass(frozen=True)
class RopeScaling:
    """Rotary-embedding scaling: `linear` divides every frequency; `llama3` smooths between bands.

    The llama3 fields are those of Llama 3.1's config ("rope_scaling" on the Hub).
    """

    rope_type: str = "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self):
        if self.rope_type not in ("linear", "llama3"):
            raise ValueError(f"RopeScaling.rope_type: expected linear or llama3, got {self.rope_type!r}")
        _make_positive(self, "factor", "low_freq_factor", "high_freq_factor")
        name = "original_max_position_embeddings"
        _check_range("RopeScaling", name, getattr(self, name), 1, _MAX_POSITIONS)
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

    def __post_init__(self):
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        _check_range("TextConfig", "num_attention_heads", self.num_attention_heads, 1, _MAX_WIDTH)
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        for name in ("hidden_size", "intermediate_size", "head_dim", "num_key_value_heads"):
            _check_range("TextConfig", name, getattr(self, name), 1, _MAX_WIDTH)
        _check_range("TextConfig", "vocab_size", self.vocab_size, 1, _MAX_VOCAB)
        _check_range("TextConfig", "num_hidden_layers", self.num_hidden_layers, 1, _MAX_LAYERS)
        _check_range("TextConfig", "max_position_embeddings", self.max_position_embeddings, 1, _MAX_POSITIONS)
        _make_positive(self, "rms_norm_eps", "rope_theta")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"TextConfig.num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"TextConfig.head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.hidden_act != "silu":
            raise ValueError(f"TextConfig.hidden_act: expected silu, got {self.hidden_act!r}")


@dataclass(frozen=True)
class VLMConfig:
    """The whole model: vision, projector, text and how images stand among the tokens.

    `image_placement` is "placeholder" where the prompt carries `image_token_id` once per image
    feature (Idefics3, SmolVLM, today's nanoVLM), and "prefix" where the features are put in front
    of the text (nanoVLM v0.1), one tile a row.
    """

    vision: VisionConfig = field(default_factory=VisionConfig)
    text: TextConfig = field(default_factory=TextConfig)
    scale_factor: int = 2
    image_token_id: int | None = 128_257
    tie_word_embeddings: bool = False
    projector_bias: bool = False
    image_placement: str = "placeholder"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        _check_range("VLMConfig", "scale_factor", self.scale_factor, 1, self.vision.grid)
        if self.vision.grid % self.scale_factor:
            raise ValueError(
                f"VLMConfig.scale_factor ({self.scale_factor}) must divide the vision grid "
                f"({self.vision.grid} patches a side)"
            )
        if self.image_placement not in ("placeholder", "prefix"):
            raise ValueError(
                f"VLMConfig.image_placement: expected placeholder or prefix, got {self.image_placement!r}"
            )
        if self.image_placement == "placeholder":
            if self.image_token_id is None:
                raise ValueError("VLMConfig.image_token_id is needed where images stand as placeholders")
            _check_range("VLMConfig", "image_token_id", self.image_token_id, 0, self.text.vocab_size - 1)

    @property
    def tokens_per_tile(self) -> int:
        """Language-model positions that one tile takes."""
        return (self.vision.grid // self.scale_factor) ** 2


# -------------------------------------------------------------------------------------------------- devices
_DEVICE = re.compile(r"auto|(cpu|cuda|mps)(:\d+)?")


def check_device(name: str) -> str:
    """Refuse the name of a device that this machine cannot have, before PyTorch is imported for it."""
    if _DEVICE.fullmatch(name) is None:
        raise ValueError(f"device: expected auto, cpu, cuda, mps or cuda:N, got {name!r}")
    torch = version("torch") if name.startswith("cuda") else ""
    if torch.endswith("+cpu"):
        raise ValueError(f"device {name}: PyTorch {torch} is built for CPUs only; use auto or cpu")
    if name.startswith("mps") and sys.platform != "darwin":
        raise ValueError(f"device {name}: only Macs have one; use auto or cpu")
    return name


# ----------------------------------------------------------------------------------------------------- JSON
# The largest config files are lists of a tokenizer's added tokens, a megabyte. An index lists at most the
# tensors of a thousand layers. tokenizer.json holds vocabulary and merges: Gemma's has 33 MB and two million
# values, and Python's objects take some twenty times a file's bytes.
MAX_CONFIG, MAX_INDEX, MAX_TOKENIZER = 4 * 2**20, 8 * 2**20, 32 * 2**20  # bytes
MAX_VALUES = 2_500_000  # of one file: commas and opening brackets


def read_object(path: Path, max_bytes: int = MAX_CONFIG) -> dict[str, Any]:
    """A JSON object from a file of a stranger, whose size is checked before it is read."""
    check_size(path, max_bytes)
    raw = path.read_bytes()
    check_values(raw)
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unambiguous)
    except RecursionError:
        raise ValueError("not valid JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def check_size(path: Path, max_bytes: int) -> None:
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"expected at most {max_bytes} bytes, got {size}")


def check_values(raw: bytes) -> None:
    """Refuse JSON that would become more objects than any real file does."""
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"expected at most {MAX_VALUES} values of JSON, got more")


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of which each key has one value: of two, one reader would see one, the next the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise ValueError(f"the key {name[:80]!r} stands twice, with different values")
    return found
