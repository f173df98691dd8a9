"""The networks that fast steps compute, described module by module.

reason = DECODER.unknown(language_model)      # None, or what there is no code for

A fast step reads weights where it expects them. Of another network it would miss some, and leave others out
without a word. So a `Network` lists all that a step computes, and whatever else there is, today or in a later
version of the network, is left to PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import nn

_PANELS, _QUANTIZED = "generation.fast.native.panels", "generation.fast.quantized"
LINEAR = (nn.Linear, f"{_QUANTIZED}.PackedLinear", f"{_PANELS}.PanelLinear")
EMBEDDING = (nn.Embedding, f"{_QUANTIZED}.PackedEmbedding", f"{_PANELS}.PanelEmbedding")
ONEDNN = (*LINEAR, "generation.fast.tower.OneDNNLinear")
NORMS = (nn.RMSNorm, nn.LayerNorm)
WEIGHTED = (*ONEDNN, *EMBEDDING, *NORMS, nn.Conv2d)  # layers that consist of their weights
ANY = ()  # values of a field


@dataclass(frozen=True)
class Network:
    """A network as a step has code for it.

    modules: the types that may stand at each path ("layers.*.mlp"). Those of this repository are written as
        full names, because this file imports none of them.
    config: the full name of its config's type, and fields: the values that the step computes, ANY for all. A
        field that is not here must have its default.
    eps: the field that all norms have theirs from.
    tensors: by path, the tensors that a module there may own beside those of its layers.
    """

    modules: Mapping[str, tuple[type | str, ...]]
    config: str
    fields: Mapping[str, tuple[Any, ...]]
    eps: str
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def unknown(self, network: nn.Module) -> str | None:
        """The first thing in a network that there is no code for, in words; or None."""
        found = next(self._unknown(network), None)
        return None if found is None else f"{found}, which only PyTorch computes"

    def _unknown(self, network: nn.Module) -> Iterator[str]:
        """Each such thing; a check may rely on those before it."""
        for name, module in network.named_modules():
            kind, where = type(module), name or "the network"
            path = re.sub(r"\.\d+", ".*", name)
            if not is_one_of(kind, self.modules.get(path, ())):
                yield f"{where} is a {full_name(kind)}"
            if module._forward_hooks or module._forward_pre_hooks:
                yield f"{where} has hooks"
            tensors = {**module._parameters, **module._buffers}
            weighted = any(is_one_of(base, WEIGHTED) for base in kind.__mro__)
            if not weighted and (own := tensors.keys() - {*self.tensors.get(path, ())}):
                yield f"{where} has {', '.join(sorted(own))} of its own"
            if isinstance(module, NORMS):
                if None in tensors.values():
                    yield f"{where} is a norm without weights or without biases"
                if module.eps != getattr(network.config, self.eps):
                    yield f"{where} has an epsilon of its own"
        config: Any = network.config
        if full_name(type(config)) != self.config:
            yield f"its config is a {full_name(type(config))}"
        for name, value, default in _fields(config):
            if (values := self.fields.get(name, (default,))) != ANY and value not in values:
                yield f"its {name} is {value!r}"
        if len(network.get_submodule("layers")._modules) != config.num_hidden_layers:
            yield f"it does not have the {config.num_hidden_layers} layers of its config"


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_one_of(kind: type, kinds: tuple[type | str, ...]) -> bool:
    """Whether a type is among types and full names of types."""
    return kind in kinds or full_name(kind) in kinds


def _fields(config: Any, front: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, value, default) of each field of a dataclass, and of those within it."""
    for own in fields(config):
        value = getattr(config, own.name)
        yield f"{front}{own.name}", value, own.default
        if is_dataclass(value):
            yield from _fields(value, f"{front}{own.name}.")


_NORM = (nn.RMSNorm, "models.language_model.ZeroCenteredRMSNorm")
DECODER = Network(
    modules={
        "": ("models.language_model.LanguageModel",),
        "embed_tokens": EMBEDDING,
        "layers": (nn.ModuleList,),
        "layers.*": ("models.language_model.DecoderBlock",),
        "layers.*.input_layernorm": _NORM,
        "layers.*.self_attn": ("models.language_model.Attention",),
        **{f"layers.*.self_attn.{name}_proj": LINEAR for name in ("q", "k", "v", "o")},
        **{f"layers.*.self_attn.{name}_norm": _NORM for name in ("q", "k")},
        "layers.*.conv": ("models.short_convolution.ShortConvolution",),
        **{f"layers.*.conv.{name}_proj": LINEAR for name in ("in", "out")},
        "layers.*.linear_attn": ("models.gated_delta.GatedDeltaRule",),
        **{f"layers.*.linear_attn.in_proj_{name}": LINEAR for name in ("qkv", "z", "b", "a")},
        "layers.*.linear_attn.norm": (nn.RMSNorm,),
        "layers.*.linear_attn.out_proj": LINEAR,
        "layers.*.post_attention_layernorm": _NORM,
        "layers.*.mlp": ("models.language_model.MLP",),
        **{f"layers.*.mlp.{name}_proj": LINEAR for name in ("gate", "up", "down")},
        "norm": _NORM,
        "lm_head": LINEAR,
    },
    config="models.config.TextConfig",
    fields=dict.fromkeys(
        (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types"),
            *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "qkv_bias_only"),
            *("attention_gate", "qk_norm", "mlp_bias", "rms_norm_eps", "zero_centered_norms", "rope_theta"),
            *("rope_sections", "rope_interleaved", "partial_rotary_factor", "max_position_embeddings"),
            *("conv_kernel", "conv_bias"),
            *(f"delta_{name}" for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
            "rope_scaling",  # the network itself makes frequencies of these
            *(f"rope_scaling.{name}" for name in ("factor", "low_freq_factor", "high_freq_factor")),
            "rope_scaling.original_max_position_embeddings",
        ),
        ANY,
    )
    | {"rope_scaling.rope_type": ("linear", "llama3"), "hidden_act": ("silu",)},
    eps="rms_norm_eps",
    tensors={
        "layers.*.conv": ("weight", "bias"),
        "layers.*.linear_attn": ("conv_weight", "dt_bias", "A_log"),
    },
)
TOWER = Network(
    modules={
        "": ("models.vision_transformer.VisionTransformer",),
        "patch_embedding": (nn.Conv2d,),
        "position_embedding": (nn.Embedding,),
        "layers": (nn.ModuleList,),
        "layers.*": ("models.vision_transformer.VisionBlock",),
        "layers.*.layer_norm1": NORMS,
        "layers.*.self_attn": ("models.vision_transformer.VisionAttention",),
        **{f"layers.*.self_attn.{name}_proj": ONEDNN for name in ("q", "k", "v", "out")},
        "layers.*.layer_norm2": NORMS,
        "layers.*.mlp": ("models.vision_transformer.VisionMLP",),
        **{f"layers.*.mlp.fc{number}": ONEDNN for number in (1, 2)},
        "post_layernorm": NORMS,
    },
    tensors={"": ("class_token",), "layers.*": ("layer_scale1", "layer_scale2")},
    config="models.config.VisionConfig",
    fields=dict.fromkeys(
        (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels"),
            *("image_size", "patch_size", "layer_norm_eps", "attention_bias", "class_token", "layer_scale"),
            "last_norm",
        ),
        ANY,
    )
    | {"hidden_act": ("gelu_pytorch_tanh", "gelu"), "norm_type": ("layer_norm", "rms_norm")},
    eps="layer_norm_eps",
)
_PACKED = "models.packed_vision_transformer"
PACKED_TOWER = Network(
    modules={
        "": (f"{_PACKED}.PackedVisionTransformer",),
        "patch_embedding": (f"{_PACKED}.PatchEmbedding",),
        "position_embedding": (nn.Embedding,),
        "norm": NORMS,
        "layers": (nn.ModuleList,),
        "layers.*": (f"{_PACKED}.PackedBlock",),
        **{f"layers.*.norm{number}": NORMS for number in (1, 2)},
        "layers.*.self_attn": (f"{_PACKED}.PackedAttention",),
        **{f"layers.*.self_attn.{name}_proj": ONEDNN for name in ("q", "k", "v", "out")},
        "layers.*.mlp": ("models.language_model.MLP", "models.vision_transformer.VisionMLP"),
        **{f"layers.*.mlp.{name}": ONEDNN for name in ("fc1", "fc2", "gate_proj", "up_proj", "down_proj")},
    },
    tensors={"patch_embedding": ("weight", "bias")},
    config=f"{_PACKED}.PackedVisionConfig",
    fields=dict.fromkeys(
        (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels"),
            *("patch_size", "merge_size", "temporal_patch_size", "norm", "norm_eps", "gated_mlp"),
            *("patch_bias", "table_side", "rope_theta", "window", "whole_layers", "taps", "channels_last"),
            *("table_antialias", "rotary", "last_norm", "tokens_per_second"),
            *("merger_norm", "merger_norm_eps", "merger_width", "merger_bias"),  # of the projector
        ),
        ANY,
    ),
    eps="norm_eps",
)
