"""The native decode step: a model's weights and a cache handed to decode.c by address.

step = NativeStep(language_model)            # float32 or bfloat16 weights, or quantized ones
logits = step(token_ids, kv_cache, start_pos)  # (B, V) float32, as the eager step gives
"""

from __future__ import annotations

import ctypes
from threading import Lock

import torch
from torch import Tensor, nn

from generation.fast.native.build import is_sound, library_file, load_library

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


def unsupported(language_model) -> str | None:
    """Why decode.c cannot run this model, or None where it can."""
    config, weight = language_model.config, language_model.layers[0].self_attn.q_proj.weight
    if weight.device.type != "cpu":
        return f"the weights are on {weight.device.type}"
    if weight.dtype not in _BITS:
        return f"{weight.dtype} weights (float32, bfloat16 and int8 are supported)"
    if config.attention_bias or config.mlp_bias:
        return "the model's projections have biases"
    return None


def _weight_and_cache_bits(language_model) -> tuple[int, int]:
    weight = _BITS[language_model.layers[0].self_attn.q_proj.weight.dtype]
    return weight, _BITS[language_model.cache_dtype]


def is_compiled(language_model) -> bool:
    """Whether the library for this model is there already. Raises NoCompiler."""
    return is_sound(library_file(*_weight_and_cache_bits(language_model))[2])


class NativeStep:
    """A `generation.decoding.DecodeStep` in C. Weights are used where they lie; nothing is copied. Several
    threads may share one: their steps are made one after another.

    Raises:
        NoCompiler: decode.c cannot be compiled here.
        ValueError: a model that it does not support (`unsupported` says why).
    """

    def __init__(self, language_model):
        reason = unsupported(language_model)
        if reason:
            raise ValueError(f"the native decode step cannot run this model: {reason}")
        self._model, self._config = language_model, language_model.config
        self._kept: list[Tensor] = []  # what decode.c points to lives as long as this
        self._weight_bits, _ = _weight_and_cache_bits(language_model)
        self._layers = (_Layer * self._config.num_hidden_layers)()
        for slot, layer in zip(self._layers, language_model.layers, strict=True):
            for name in ("q", "k", "v", "o"):
                setattr(slot, name, self._matrix(getattr(layer.self_attn, f"{name}_proj")))
            for name in ("gate", "up", "down"):
                setattr(slot, name, self._matrix(getattr(layer.mlp, f"{name}_proj")))
            slot.input_norm = self._float(layer.input_layernorm.weight)
            slot.post_norm = self._float(layer.post_attention_layernorm.weight)
        self._description = self._describe()
        self._libraries: dict[torch.dtype, ctypes.CDLL] = {}
        self._cache_addresses: list[tuple[int, int]] = []
        self._scratch = torch.empty(0)
        self._lock = Lock()  # the cache's addresses and the scratch memory are of one call at a time
        self._library(language_model.cache_dtype)

    def _describe(self) -> _Model:
        config, model = self._config, self._model
        return _Model(
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

    def _keep(self, tensor: Tensor) -> int:
        assert tensor.is_contiguous(), "decode.c reads contiguous tensors"
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _float(self, tensor: Tensor) -> int:
        return self._keep(tensor.detach().float().contiguous())

    def _matrix(self, module: nn.Module) -> _Matrix:
        weight = module.weight.detach()
        assert _BITS[weight.dtype] == self._weight_bits, f"mixed weight types: {weight.dtype}"
        scale = self._keep(module.scale) if weight.dtype == torch.int8 else None
        return _Matrix(self._keep(weight.contiguous()), scale)

    def _library(self, cache_dtype: torch.dtype) -> ctypes.CDLL:
        if cache_dtype not in self._libraries:
            library = load_library(self._weight_bits, _BITS[cache_dtype])
            library.ocelli_scratch_floats.restype = _LONG
            library.ocelli_scratch_floats.argtypes = (ctypes.POINTER(_Model), _LONG, _LONG, _LONG)
            library.ocelli_decode.restype = None
            numbers = (_LONG,) * 3
            library.ocelli_decode.argtypes = (
                ctypes.POINTER(_Model), _POINTER, _POINTER, *numbers, _POINTER, _POINTER
            )  # fmt: skip
            self._libraries[cache_dtype] = library
        return self._libraries[cache_dtype]

    def __call__(self, token_ids: Tensor, kv_cache, start_pos: int | Tensor) -> Tensor:
        """(B, 1) token ids -> (B, V) float32 logits; the cache gains one position in each row."""
        batch = token_ids.shape[0]
        key = kv_cache[0]["key"]
        capacity, head_stride = key.shape[2], key.stride(1) // key.shape[3]
        library = self._library(key.dtype)
        if isinstance(start_pos, int):
            positions = torch.full((batch,), start_pos, dtype=torch.int64)
        else:
            positions = start_pos.contiguous()
        if int(positions.max()) >= capacity:
            raise ValueError(
                f"kv_cache holds {capacity} positions, position {int(positions.max())} was asked for"
            )
        logits = torch.empty(batch, self._config.vocab_size)
        tokens, threads = token_ids.contiguous(), torch.get_num_threads()
        with self._lock:
            self._point_at(kv_cache)
            needed = library.ocelli_scratch_floats(self._description, batch, head_stride, threads)
            if self._scratch.numel() < needed:
                self._scratch = torch.empty(needed)
            library.ocelli_decode(
                self._description, tokens.data_ptr(), positions.data_ptr(), batch, head_stride,
                threads, self._scratch.data_ptr(), logits.data_ptr(),
            )  # fmt: skip
        return logits

    def _point_at(self, kv_cache) -> None:
        """Note the cache's addresses, all of them: freed memory of an old cache is reused in part."""
        addresses = [(layer["key"].data_ptr(), layer["value"].data_ptr()) for layer in kv_cache]
        if addresses == self._cache_addresses:
            return
        for slot, (key, value) in zip(self._layers, addresses, strict=True):
            slot.key, slot.value = key, value
        self._cache_addresses = addresses
