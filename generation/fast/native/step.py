"""The decode step in C: decode.c, compiled once for this machine and called with addresses.

step = NativeStep(language_model)              # float32, bfloat16 or packed weights
logits = step(token_ids, kv_cache, start_pos)  # (B, V) float32, as the eager step gives
"""

from __future__ import annotations

import ctypes
from threading import Lock

import torch
from torch import Tensor

from generation.fast.native.build import is_sound, library_file, load_library
from generation.kv_cache import KVCache

_BITS = {torch.float32: 32, torch.bfloat16: 16, torch.int8: 8}
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Matrix(ctypes.Structure):
    _fields_ = (("data", _POINTER), ("scale", _POINTER))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, _POINTER) for name in ("input_norm", "post_norm", "key", "value")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("layers", "width", "heads", "kv_heads", "head_dim", "inner", "vocab")),
        ("eps", ctypes.c_float),
        ("embedding", _Matrix),
        ("head", _Matrix),
        ("final_norm", _POINTER),
        ("inv_freq", _POINTER),
        ("layer", ctypes.POINTER(_Layer)),
    )


def library_parts(weight_bits: int, cache_bits: int) -> tuple[str, tuple[str, ...]]:
    """The C file of the step for one weight type (32, 16 or 8 bits) and one cache type (32 or 16 bits), and
    the options that it is compiled with."""
    return "decode.c", (f"-DWEIGHT_BITS={weight_bits}", f"-DCACHE_BITS={cache_bits}")


def _declare(opened: ctypes.CDLL) -> None:
    opened.ocelli_scratch_floats.restype = _LONG
    opened.ocelli_scratch_floats.argtypes = (ctypes.POINTER(_Model), *(_LONG,) * 3)
    opened.ocelli_decode.restype = None
    opened.ocelli_decode.argtypes = (
        ctypes.POINTER(_Model), _POINTER, _POINTER, *(_LONG,) * 3, _POINTER, _POINTER
    )  # fmt: skip


def load_step(weight_bits: int, cache_bits: int) -> ctypes.CDLL:
    """The compiled step. Raises NoCompiler."""
    return load_library(*library_parts(weight_bits, cache_bits), _declare)


def unsupported(language_model) -> str | None:
    """Why decode.c cannot run this model, or None where it can."""
    config, weight = language_model.config, language_model.layers[0].self_attn.q_proj.weight
    if weight.device.type != "cpu":
        return f"the weights are on {weight.device.type}"
    if weight.dtype not in _BITS:
        return f"{weight.dtype} weights (float32, bfloat16 and int8 are supported)"
    if config.attention_bias or config.mlp_bias:
        return "the model's projections have biases"
    return unknown_parts(language_model)


def unknown_parts(language_model) -> str | None:
    """What this model's attention has that the fast steps do not compute (norms of queries, say), or None."""
    known = {"q_proj", "k_proj", "v_proj", "o_proj"}
    parts = {name for name, _ in language_model.layers[0].self_attn.named_children()} - known
    return f"the model's attention has {', '.join(sorted(parts))}" if parts else None


def is_compiled(language_model) -> bool:
    """Whether the library for this model exists already. Raises NoCompiler."""
    weight = language_model.layers[0].self_attn.q_proj.weight
    parts = library_parts(_BITS[weight.dtype], _BITS[language_model.cache_dtype])
    return is_sound(library_file(*parts)[1])


class NativeStep:
    """A `generation.decoding.DecodeStep` in C. It uses the weights where they are; nothing is copied. Threads
    that share one take turns.

    Raises NoCompiler, and ValueError for a model that it does not support (`unsupported` says why).
    """

    def __init__(self, language_model):
        if reason := unsupported(language_model):
            raise ValueError(f"the native decode step cannot run this model: {reason}")
        model, config = language_model, language_model.config
        self._vocab = config.vocab_size
        self._kept: list[Tensor] = []  # decode.c points to these, so they must live as long as this object
        self._weight_bits = _BITS[model.layers[0].self_attn.q_proj.weight.dtype]
        load_step(self._weight_bits, _BITS[model.cache_dtype])
        self._layers = (_Layer * config.num_hidden_layers)()
        for slot, layer in zip(self._layers, model.layers, strict=True):
            for name in ("q", "k", "v", "o"):
                setattr(slot, name, self._matrix(getattr(layer.self_attn, f"{name}_proj")))
            for name in ("gate", "up", "down"):
                setattr(slot, name, self._matrix(getattr(layer.mlp, f"{name}_proj")))
            slot.input_norm = self._float(layer.input_layernorm.weight)
            slot.post_norm = self._float(layer.post_attention_layernorm.weight)
        self._description = _Model(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            eps=config.rms_norm_eps,
            embedding=self._matrix(model.embed_tokens),
            head=self._matrix(model.lm_head),
            final_norm=self._float(model.norm.weight),
            inv_freq=self._float(model.inv_freq(torch.device("cpu"))),
            layer=self._layers,
        )
        self._scratch = torch.empty(0)
        self._lock = Lock()  # for the cache's addresses and the scratch memory

    def _keep(self, tensor: Tensor) -> int:
        assert tensor.is_contiguous(), "decode.c reads contiguous tensors"
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _float(self, tensor: Tensor) -> int:
        return self._keep(tensor.detach().float().contiguous())

    def _matrix(self, module) -> _Matrix:
        weight = module.weight.detach()
        assert _BITS[weight.dtype] == self._weight_bits, f"mixed weight types: {weight.dtype}"
        scale = self._keep(module.scale) if weight.dtype == torch.int8 else None
        return _Matrix(self._keep(weight.contiguous()), scale)

    def __call__(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        """(B, 1) token ids -> (B, V) float32 logits; the cache gains one position in each row."""
        batch, key = len(token_ids), kv_cache[0]["key"]
        capacity, head_stride = key.shape[2], key.stride(1) // key.shape[3]
        library = load_step(self._weight_bits, _BITS[key.dtype])
        positions = torch.full((batch,), start_pos) if isinstance(start_pos, int) else start_pos.contiguous()
        if (last := int(positions.max())) >= capacity:
            raise ValueError(f"kv_cache: expected room for position {last}, got {capacity} positions")
        logits = torch.empty(batch, self._vocab)
        tokens, threads = token_ids.contiguous(), torch.get_num_threads()
        with self._lock:
            # Of all layers, each time: a new cache may reuse part of an old one's freed memory.
            for slot, layer in zip(self._layers, kv_cache, strict=True):
                slot.key, slot.value = layer["key"].data_ptr(), layer["value"].data_ptr()
            needed = library.ocelli_scratch_floats(self._description, batch, head_stride, threads)
            if self._scratch.numel() < needed:
                self._scratch = torch.empty(needed)
            library.ocelli_decode(
                self._description, tokens.data_ptr(), positions.data_ptr(), batch, head_stride,
                threads, self._scratch.data_ptr(), logits.data_ptr(),
            )  # fmt: skip
        return logits
