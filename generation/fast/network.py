"""The networks that fast steps compute.

reason = decoder_of(language_model).unknown(language_model)    # None, or what there is no code for

A fast step reads weights where it expects them. Of another network it would miss some, and leave others out
without a word. So a `Network` lists the modules that a step has code for and the values of its config, and
whatever else there is, today or in a later version of the network, is left to PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import nn

_OURS = ("codes.Coded", "fast.quantized.Packed", "fast.native.panels.Panel")
LINEAR: tuple[type | str, ...] = (nn.Linear, *(f"generation.{ours}Linear" for ours in _OURS))
EMBEDDING: tuple[type | str, ...] = (nn.Embedding, *(f"generation.{ours}Embedding" for ours in _OURS))
NORMS = (nn.RMSNorm, nn.LayerNorm)


@dataclass(frozen=True)
class Network:
    """A network as a step has code for it.

    modules: the types of its modules, with the tensors that one owns beside those of its layers. Types of
        this repository are full names, because this file imports none of them. The first is the network.
    layers: the types that consist of their weights.
    config: the full name of its config's type. known: the names of fields whose every value the step
        computes; values: of others those that it does. A field in neither must have its default.
    eps: the field that all norms have theirs from.
    """

    modules: Mapping[str, tuple[str, ...]]
    layers: tuple[type | str, ...]
    config: str
    known: str
    eps: str
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def unknown(self, network: nn.Module) -> str | None:
        """The first thing in a network that there is no code for, in words; or None."""
        found = next(self._unknown(network), None)
        return None if found is None else f"{found}, which only PyTorch computes"

    def _unknown(self, network: nn.Module) -> Iterator[str]:
        """Each such thing; a check may rely on those before it."""
        config: Any = network.config
        if not self.made(network):
            yield f"the network is a {full_name(type(network))}"
        if full_name(type(config)) != self.config:
            yield f"its config is a {full_name(type(config))}"
        for name, value, default in _fields(config):
            if name not in self.known.split() and value not in self.values.get(name, (default,)):
                yield f"its {name} is {value!r}"
        if len(network.get_submodule("layers")._modules) != config.num_hidden_layers:
            yield f"it does not have the {config.num_hidden_layers} layers of its config"
        for name, module in network.named_modules():
            kind, where = type(module), name or "the network"
            tensors = {**module._parameters, **module._buffers}
            if module._forward_hooks or module._forward_pre_hooks:
                yield f"{where} has hooks"
            if isinstance(module, NORMS):
                if None in tensors.values():
                    yield f"{where} is a norm without weights or without biases"
                if module.eps != getattr(config, self.eps):
                    yield f"{where} has an epsilon of its own"
            if kind in self.layers or full_name(kind) in self.layers or kind is nn.ModuleList:
                continue
            if (own := self.modules.get(full_name(kind))) is None:
                yield f"{where} is a {full_name(kind)}"
            elif more := tensors.keys() - {*own}:
                yield f"{where} has {', '.join(sorted(more))} of its own"

    def made(self, network: nn.Module) -> bool:
        """Whether a network is of this type."""
        return full_name(type(network)) == next(iter(self.modules))


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _fields(config: Any, front: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, value, default) of each field of a dataclass, and of those within it."""
    for own in fields(config):
        value = getattr(config, own.name)
        yield f"{front}{own.name}", value, own.default
        if is_dataclass(value):
            yield from _fields(value, f"{front}{own.name}.")


DECODER = Network(
    modules={
        "models.language_model.LanguageModel": (),
        "models.language_model.DecoderBlock": (),
        "models.language_model.Attention": (),
        "models.language_model.MLP": (),
        "models.short_convolution.ShortConvolution": ("weight", "bias"),
        "models.gated_delta.GatedDeltaRule": ("conv_weight", "dt_bias", "A_log"),
    },
    layers=(*LINEAR, *EMBEDDING, nn.RMSNorm, "models.language_model.ZeroCenteredRMSNorm"),
    config="models.config.TextConfig",
    # The network itself makes frequencies of `rope_scaling`.
    known="""vocab_size hidden_size intermediate_size num_hidden_layers layer_types num_attention_heads
        num_key_value_heads head_dim attention_bias qkv_bias_only attention_gate qk_norm mlp_bias rms_norm_eps
        zero_centered_norms rope_theta rope_sections rope_interleaved partial_rotary_factor
        max_position_embeddings conv_kernel conv_bias delta_key_heads delta_value_heads delta_key_dim
        delta_value_dim rope_scaling rope_scaling.factor rope_scaling.low_freq_factor
        rope_scaling.high_freq_factor rope_scaling.original_max_position_embeddings""",
    values={"rope_scaling.rope_type": ("linear", "llama3"), "hidden_act": ("silu",)},
    eps="rms_norm_eps",
)
GEMMA4 = Network(
    modules={
        "models.gemma4_text.Gemma4LanguageModel": (),
        "models.gemma4_text.Gemma4Block": ("layer_scalar",),
        "models.gemma4_text.Gemma4Attention": (),
        "models.language_model.MLP": (),
    },
    layers=(*LINEAR, *EMBEDDING, nn.RMSNorm),
    config="models.gemma4_text.Gemma4TextConfig",
    known="""vocab_size hidden_size intermediate_size num_hidden_layers layer_types num_attention_heads
        num_key_value_heads head_dim attention_bias qk_norm mlp_bias rms_norm_eps rope_theta
        max_position_embeddings sliding_window full_head_dim full_rotary_factor full_rope_theta
        shared_mlp_factor per_layer_width per_layer_vocab per_layer_count logit_cap placeholder_id""",
    eps="rms_norm_eps",
)
TOWER = Network(
    modules={
        "models.vision_transformer.VisionTransformer": ("class_token",),
        "models.vision_transformer.VisionBlock": ("layer_scale1", "layer_scale2"),
        "models.vision_transformer.VisionAttention": (),
        "models.vision_transformer.VisionMLP": (),
    },
    layers=(*LINEAR, nn.Embedding, nn.Conv2d, *NORMS),
    config="models.config.VisionConfig",
    known="""hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels image_size
        patch_size layer_norm_eps attention_bias class_token layer_scale last_norm""",
    values={"hidden_act": ("gelu_pytorch_tanh", "gelu"), "norm_type": ("layer_norm", "rms_norm")},
    eps="layer_norm_eps",
)
_PACKED = "models.packed_vision_transformer"
PACKED_TOWER = Network(
    modules={
        f"{_PACKED}.PackedVisionTransformer": (),
        f"{_PACKED}.PatchEmbedding": ("weight", "bias"),
        f"{_PACKED}.PackedBlock": (),
        f"{_PACKED}.PackedAttention": (),
        f"{_PACKED}.WindowMerger": (),
        "models.language_model.MLP": (),
        "models.vision_transformer.VisionMLP": (),
    },
    layers=TOWER.layers,
    config=f"{_PACKED}.PackedVisionConfig",
    known="""hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels patch_size
        merge_size temporal_patch_size norm norm_eps gated_mlp patch_bias table_side rope_theta window
        whole_layers taps channels_last table_fit rotary last_norm insert_layer inserts kind tokens_per_second
        merger_norm merger_norm_eps merger_width merger_bias""",
    eps="norm_eps",
)
_GEMMA4 = "models.gemma4_vision.Gemma4Vision"
GEMMA4_TOWER = Network(
    modules={
        f"{_GEMMA4}Transformer": ("position_embedding_table", "std_bias", "std_scale"),
        f"{_GEMMA4}Block": (),
        "models.gemma4_vision.ClippedLinear": ("input_min", "input_max", "output_min", "output_max"),
    },
    layers=(*LINEAR, nn.RMSNorm),
    config=f"{_GEMMA4}Config",
    known="""hidden_size intermediate_size num_hidden_layers num_attention_heads num_channels patch_size
        merge_size norm_eps table_side rope_theta clips standardizes""",
    eps="norm_eps",
)
# Each kind of mixer: its name in a decoder's layer, and its linear layers, the last of which multiplies what
# was mixed. Layers of Gemma 4 that are shared have no keys of their own.
_ATTENTION = ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"))
MIXERS = {
    **dict.fromkeys(("attention", "sliding", "full"), _ATTENTION),
    **dict.fromkeys(("sliding shared", "full shared"), ("self_attn", ("q_proj", "o_proj"))),
    "conv": ("conv", ("in_proj", "out_proj")),
    "delta": ("linear_attn", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")),
}
MLP = ("gate_proj", "up_proj", "down_proj")


def decoder_of(language_model: nn.Module) -> Network:
    """The network that a language model is, or the one of most models."""
    return GEMMA4 if GEMMA4.made(language_model) else DECODER
