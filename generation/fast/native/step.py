"""A language model's forward pass in C: decode.c, compiled once for this machine and called with addresses.

step = NativeStep(language_model)                                # its weights are put into panels, in place
logits = step(token_ids, kv_cache, start_pos)                    # a token of each row: (B, V)
logits = step.chunk(token_ids, kv_cache, start_pos)              # several tokens of each row: (B, T, V)
logits = step.prefill(embeddings, lengths, kv_cache, start_pos)  # prompts: (B, V) of each row's last position

A token's logits have the same bits in all three, whatever is computed beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from operator import add
from threading import Lock

import torch
from torch import Tensor, nn

from generation.fast.native import build
from generation.fast.native.build import load_library, structure
from generation.fast.native.panels import BITS, PanelWeight, to_panels, unreadable
from generation.fast.native.passes import run_pass
from generation.fast.network import DECODER, MIXERS
from generation.kv_cache import STATES, KVCache, geometry
from generation.steps import Step

MOST_TOKENS = 256  # of a pass: a longer prompt takes several, whose memory stays small
# The names that decode.c has for matrices, where it is not the layer's without "_proj".
_NAMES = {"in_proj": "mix", "in_proj_qkv": "mix", "out_proj": "o"} | {f"in_proj_{x}": x for x in "zba"}


def _longs(numbers: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _each(number: int | Tensor, rows: int) -> list[int]:
    """A start or an offset of each row."""
    return [number] * rows if isinstance(number, int) else number.expand(rows).tolist()


def _positions(lengths: Sequence[int], starts: Sequence[int]) -> list[int]:
    """The positions of all tokens, row by row."""
    return [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]


def unsupported(language_model) -> str | None:
    """The reason why decode.c cannot run this model, or None."""
    config = language_model.config
    if reason := DECODER.unknown(language_model) or unreadable(language_model):
        return reason
    if "delta" in config.layer_types and (config.delta_key_dim % 16 or config.delta_value_dim % 32):
        sizes = f"{config.delta_key_dim} and {config.delta_value_dim}"
        return f"heads of its gated delta rules are {sizes} wide (multiples of 16 and 32 are supported)"
    return None


def is_compiled(language_model) -> bool:
    """Whether the library for this model exists already. Raises NoCompiler."""
    weight = language_model.layers[0].mlp.gate_proj.weight
    return build.is_compiled("decode.c", BITS[weight.dtype], BITS[language_model.cache_dtype])


class NativeStep(Step):
    """A step in C. The model's weights are put into panels, which its eager code multiplies with from then
    on. A step serves one thread at a time.

    Raises NoCompiler, and ValueError for a model that it does not support (`unsupported` says why).
    """

    same_bits = alone = True

    def __init__(self, language_model):
        if reason := unsupported(language_model):
            raise ValueError(f"the native decode step cannot run this model: {reason}")
        # Without `Step.__init__`: nothing here is eager.
        model, config, cache_bits = language_model, language_model.config, BITS[language_model.cache_dtype]
        self._weight_bits = BITS[model.layers[0].mlp.gate_proj.weight.dtype]
        self.library = load_library("decode.c", self._weight_bits, cache_bits)
        to_panels(model)
        self._vocab = config.vocab_size
        self._kept: list[Tensor] = []  # decode.c points to these, so they must live as long as this object
        self._layers = (structure("Layer") * config.num_hidden_layers)()
        for slot, layer in zip(self._layers, model.layers, strict=True):
            self._describe(slot, layer)
        self._turns = bool(config.rope_sections)  # tokens have three places
        axis = model.turns(torch.arange(3)[:, None, None]).flatten().tolist() if self._turns else []
        self._description = structure("Model")(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            rotated=config.rotary_dim,
            gated=config.attention_gate,
            mixed=max(slot.mix.rows for slot in self._layers),
            delta_keys=config.delta_key_heads,
            delta_heads=config.delta_value_heads if "delta" in config.layer_types else 0,
            key_dim=config.delta_key_dim,
            value_dim=config.delta_value_dim,
            eps=config.rms_norm_eps,
            embedding=self._matrix(model.embed_tokens),
            head=self._matrix(model.lm_head),
            final_norm=self._norm(model.norm),
            inv_freq=self._float(model.inv_freq(torch.device("cpu"))),
            axis=_longs(axis),
            layer=self._layers,
        )
        self._products = sum(one.numel() * (8 if one.dtype == torch.int32 else 1) for one in {*self._kept})
        self._scratch = torch.empty(0)
        self._lock = Lock()  # for the cache's addresses and the scratch memory

    def _describe(self, slot: ctypes.Structure, layer) -> None:
        mixer = getattr(layer, MIXERS[layer.mixer][0])
        for name, part in (*mixer.named_children(), *layer.mlp.named_children()):
            if isinstance(part, PanelWeight):
                setattr(slot, _NAMES.get(name, name.removesuffix("_proj")), self._matrix(part))
        slot.input_norm = self._norm(layer.input_layernorm)
        slot.post_norm = self._norm(layer.post_attention_layernorm)
        if layer.mixer == "attention":
            slot.q_norm, slot.k_norm = self._norm(mixer.q_norm), self._norm(mixer.k_norm)
            return
        taps = mixer.weight if layer.mixer == "conv" else mixer.conv_weight
        slot.taps, slot.convolution = taps.shape[2], self._float(taps[:, 0].T)
        if layer.mixer == "conv":
            slot.conv_bias = self._float(mixer.bias)
        else:
            slot.a_scale, slot.a_bias = self._float(-mixer.A_log.float().exp()), self._float(mixer.dt_bias)
            slot.value_norm = self._norm(mixer.norm)

    def _norm(self, norm: nn.RMSNorm | None) -> int | None:
        """The address of the factors of a norm."""
        if norm is None:
            return None
        around_one = type(norm) is not nn.RMSNorm
        return self._float(1 + norm.weight.float() if around_one else norm.weight)

    def _float(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _matrix(self, module: PanelWeight) -> ctypes.Structure:
        assert BITS[module.weight.dtype] == self._weight_bits, f"mixed weight types: {module.weight.dtype}"
        self._kept.extend(module.buffers())
        return module.matrix

    def chunk(
        self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor, offset: int | Tensor = 0
    ) -> Tensor:
        """(B, T) token ids -> (B, T, V) float32 logits; the cache gains T positions in each row."""
        batch, length = token_ids.shape
        starts, offsets = _each(start_pos, batch), _each(offset, batch)
        return self._logits(token_ids.tolist(), kv_cache, starts, offsets).view(batch, length, self._vocab)

    def ragged(
        self,
        token_ids: Sequence[Sequence[int]],
        kv_cache: KVCache,
        starts: Sequence[int],
        offsets: Sequence[int],
    ) -> list[Tensor]:
        """Nothing is padded here."""
        return list(self._logits(token_ids, kv_cache, starts, offsets).split(list(map(len, token_ids))))

    def _logits(self, token_ids, kv_cache: KVCache, starts: Sequence[int], offsets: Sequence[int]) -> Tensor:
        """Ids of each row, which it has from its start on -> (T, V) of all tokens, row by row."""
        lengths, ids = list(map(len, token_ids)), [one for own in token_ids for one in own]
        places = _positions(lengths, list(map(add, starts, offsets))) if any(offsets) else None
        return self._run(ids, lengths, list(starts), range(len(ids)), kv_cache, places)

    def prefill(
        self,
        embeddings: Tensor,
        lengths: Sequence[int],
        kv_cache: KVCache,
        start_pos: int | Tensor = 0,
        places: Tensor | None = None,
    ) -> Tensor:
        """See `Step`: logits are float32."""
        batch, longest, width = len(lengths), *embeddings.shape[1:]
        if min(lengths) < 0 or not 1 <= max(lengths) <= longest:
            raise ValueError(f"lengths: expected up to {longest} for each row, got {list(lengths)}")
        if not width or width % self._description.width:
            raise ValueError(f"embeddings: expected width {self._description.width}, got {width}")
        expected = (3, batch, longest) if self._turns else None
        if places is not None and places.shape != expected:
            raise ValueError(f"places: expected {expected}, got {tuple(places.shape)}")

        def real(rows: Tensor) -> Tensor:
            """(B, L, n) -> (T, n): all but padding."""
            return torch.cat([row[:length] for row, length in zip(rows, lengths)]).contiguous()

        turned_by = None if places is None else real(places.permute(1, 2, 0)).flatten().tolist()
        rows = [row for row, length in enumerate(lengths) if length]
        ends, starts = list(accumulate(lengths)), _each(start_pos, batch)
        wanted = [ends[row] - 1 for row in rows]
        logits = self._run(real(embeddings.float()), lengths, starts, wanted, kv_cache, turned_by)
        if len(rows) == batch:
            return logits
        return logits.new_zeros(batch, self._vocab).index_copy_(0, torch.tensor(rows), logits)

    def _run(
        self,
        tokens: list[int] | Tensor,
        lengths: Sequence[int],
        starts: list[int],
        wanted: Sequence[int],
        kv_cache: KVCache,
        places: list[int] | None,
    ) -> Tensor:
        """The logits (n, V) of the tokens that are `wanted`, in order. Tokens, T ids or embeddings
        (T, (1 + n) · D), belong to the cache's rows, `lengths` of them to each, from a position on. `places`:
        one or three of each token, where they are rotated by other numbers than their positions. Lists,
        because a tensor's every operation takes as long as a small model's layer."""
        held = geometry(kv_cache)
        capacity, head_stride = held.capacity, held.strides[1] // held.strides[2]
        # C reads and writes where it is told to.
        if isinstance(tokens, list) and (min(tokens) < 0 or max(tokens) >= self._vocab):
            got = f"{min(tokens)} to {max(tokens)}"
            raise ValueError(f"token_ids: expected 0 to {self._vocab - 1}, got {got}")
        if (last := max(map(add, starts, lengths)) - 1) >= capacity:
            raise ValueError(f"kv_cache: expected room for position {last}, got {capacity} positions")
        if min(starts) < 0:
            raise ValueError(f"start_pos: expected 0 or more, got {min(starts)}")
        if len(lengths) > held.rows:
            raise ValueError(f"kv_cache: expected {len(lengths)} rows, got {held.rows}")
        library = load_library("decode.c", self._weight_bits, BITS[held.dtype])
        rows = [row for row, length in enumerate(lengths) for _ in range(length)]
        positions = _positions(lengths, starts)
        axes = 1 if places is None else len(places) // len(rows)
        with self._lock:
            # Of all layers, each time: a new cache may reuse part of an old one's freed memory.
            for slot, layer in zip(self._layers, kv_cache, strict=True):
                for name, own in layer.items():
                    _, heads, count, width = own.shape
                    count = count if name in STATES else head_stride  # slots of the buffer, if it is a view
                    if own.stride() != (expected := (heads * count * width, count * width, width, 1)):
                        raise ValueError(f"kv_cache: expected strides {expected}, got {own.stride()}")
                    setattr(slot, name, own.data_ptr())
            logits, done = torch.empty(len(wanted), self._vocab), 0  # done: so many logits
            for first in range(0, len(rows), MOST_TOKENS):
                end = min(first + MOST_TOKENS, len(rows))
                here = [token - first for token in wanted if first <= token < end]
                given, at = tokens[first:end], _longs(positions[first:end])
                part = structure("Tokens")(
                    count=end - first,
                    row=_longs(rows[first:end]),
                    position=at,
                    axes=axes,
                    place=at if places is None else _longs(places[first * axes : end * axes]),
                    outputs=len(here),
                    output=_longs(here),
                )
                if isinstance(given, Tensor):
                    part.embedding, part.deep = (
                        given.data_ptr(),
                        given.shape[1] // self._description.width - 1,
                    )
                else:
                    part.id = _longs(given)
                call = partial(self._pass, library, part, head_stride, logits[done:].data_ptr())
                run_pass(call, part.count * self._products)
                done += len(here)
        return logits

    def _pass(self, library: ctypes.CDLL, part: ctypes.Structure, capacity: int, logits: int, made) -> None:
        needed = library.ocelli_scratch_floats(self._description, part, made.threads)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        library.ocelli_forward(self._description, part, capacity, made, self._scratch.data_ptr(), logits)
