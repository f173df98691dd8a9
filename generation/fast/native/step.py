"""A language model's forward pass in C: decode.c, compiled once for this machine and called with addresses.

step = NativeStep(language_model)                                # its weights are put into panels, in place
logits = step(token_ids, kv_cache, start_pos)                    # a token of each row: (B, V)
logits = step.chunk(token_ids, kv_cache, start_pos)              # several tokens of each row: (B, T, V)
logits = step.prefill(embeddings, lengths, kv_cache, start_pos)  # prompts: (B, V) of each row's last position

A token's logits have the same bits in all three, whatever is computed beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import add
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from generation.fast.native import build
from generation.fast.native.build import load_library, structure
from generation.fast.native.panels import BITS, PanelWeight, to_panels, unreadable
from generation.fast.native.passes import run_pass
from generation.fast.network import GEMMA4, MIXERS, MLP, decoder_of
from generation.kv_cache import STATES, KVCache, geometry
from generation.steps import Step

MOST_TOKENS = 256  # of a pass: a longer prompt takes several, whose memory stays small
# The names that C has for matrices, where it is not the layer's without "_proj".
_NAMES = {"in_proj": "mix", "in_proj_qkv": "mix", "out_proj": "o"} | {f"in_proj_{x}": x for x in "zba"}


def _attention(step: NativeStep, mixer, kind: str) -> dict[str, Any]:
    config, dim, (base, *_) = step.config, mixer.head_dim, kind.split()
    fields = step.turned[base] | {
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": dim,
        "gated": config.attention_gate,
        "k_norm": step.norm(getattr(mixer, "k_norm", None)),
    }
    if base == "attention":
        return fields | {"q_norm": step.norm(mixer.q_norm)}
    # Gemma 4's scores are not divided by √D_h, as C does.
    fields["q_norm"] = step.floats(mixer.q_norm.weight.float() * dim**0.5)
    return fields | {
        "v_norm": step.floats(torch.ones(dim)),
        "window": config.sliding_window if base == "sliding" else 0,
    }


def _convolution(step: NativeStep, mixer, kind: str) -> dict[str, Any]:
    taps = mixer.weight
    return {
        "taps": taps.shape[2],
        "convolution": step.floats(taps[:, 0].T),
        "conv_bias": step.floats(mixer.bias),
    }


def _delta(step: NativeStep, mixer, kind: str) -> dict[str, Any]:
    config, taps = step.config, mixer.conv_weight
    return {
        "taps": taps.shape[2],
        "convolution": step.floats(taps[:, 0].T),
        "a_scale": step.floats(-mixer.A_log.float().exp()),
        "a_bias": step.floats(mixer.dt_bias),
        "value_norm": step.norm(mixer.norm),
        "keys": config.delta_key_heads,
        "heads": config.delta_value_heads,
        "key_dim": config.delta_key_dim,
        "value_dim": config.delta_value_dim,
    }


# Kinds of mixers by their names in layers, in the order of `mixers` in decode.c: the C struct, and its fields
# beside matrices (`MIXERS`) and what lies in the cache, which have the same names there.
_MIXERS: dict[str, tuple[str, Callable[[NativeStep, Any, str], dict[str, Any]]]] = {
    "self_attn": ("Attention", _attention),
    "conv": ("Convolution", _convolution),
    "linear_attn": ("Delta", _delta),
}


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
    if reason := decoder_of(language_model).unknown(language_model) or unreadable(language_model):
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
        self.config, self._vocab, gemma = config, config.vocab_size, decoder_of(model) is GEMMA4
        self._kept: list[Tensor] = []  # C points to these, so they must live as long as this object
        self._turns = bool(config.rope_sections)  # tokens have three places
        axis = model.turns(torch.arange(3)[:, None, None]).flatten().tolist() if self._turns else []
        cpu, kinds = torch.device("cpu"), ("sliding", "full") if gemma else ("attention",)
        self.turned: dict[str, dict[str, int]] = {}
        found = torch.empty(0)
        for kind in kinds:
            own = model.frequencies(kind, cpu) if gemma else model.inv_freq(cpu)
            turned = own[own != 0]  # what is not rotated comes last
            self.turned[kind] = {"first": len(found), "pairs": len(turned), "apart": len(own)}
            found = torch.cat((found, turned))
        self._layers = (structure("Layer") * config.num_hidden_layers)()
        # Of each layer the mixers that read what it keeps: its own, and those that share it.
        self._readers: list[list[ctypes.Structure]] = []
        keeper: dict[str, list[ctypes.Structure]] = {}
        for index, (slot, layer) in enumerate(zip(self._layers, model.layers, strict=True)):
            kind, _, shared = config.mixer(index).partition(" ")
            self._readers.append([])
            if not shared:
                keeper[kind] = self._readers[-1]
            keeper[kind].append(self._describe(slot, layer, config.mixer(index)))
        self._description = structure("Model")(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            vocab=config.vocab_size,
            gelu=config.hidden_act != "silu",
            eps=config.rms_norm_eps,
            embedding=self._matrix(model.embed_tokens),
            head=self._matrix(model.lm_head),
            final_norm=self.norm(model.norm),
            frequencies=len(found),
            inv_freq=self.floats(found),
            axis=_longs(axis),
            layer=self._layers,
        )
        # Gemma 4 makes its embeddings itself: rows of a second table, not in panels, give a token numbers
        # beside them.
        self._embed, self._cap = (model.embed, config.logit_cap) if gemma else (None, None)
        self._own = config.per_layer_width * config.num_hidden_layers if gemma else 0
        if self._own:
            self._description.own = config.per_layer_width
            self._description.own_projection = self._matrix(model.per_layer_model_projection)
            self._description.own_norm = self.norm(model.per_layer_projection_norm)
        self._products = sum(one.numel() * (8 if one.dtype == torch.int32 else 1) for one in {*self._kept})
        self._scratch = torch.empty(0)
        self._lock = Lock()  # for the cache's addresses and the scratch memory

    def _describe(self, slot: ctypes.Structure, layer, kind: str) -> ctypes.Structure:
        """The struct of a layer's mixer, to which that of the layer points."""
        module, names = MIXERS[kind]
        struct, fields_of = _MIXERS[module]
        mixer = getattr(layer, module)
        described = structure(struct)(**fields_of(self, mixer, kind))
        matrices = {name: getattr(mixer, name) for name in names}
        for name, part in (matrices | {name: getattr(layer.mlp, name) for name in MLP}).items():
            own = _NAMES.get(name, name.removesuffix("_proj"))
            setattr(slot if own == "o" or name in MLP else described, own, self._matrix(part))
        slot.kind, slot.mixer, slot.scale = [*_MIXERS].index(module), ctypes.addressof(described), 1
        slot.input_norm, after = self.norm(layer.input_layernorm), self.norm(layer.post_attention_layernorm)
        if self.config.block_norms == 2:
            slot.mlp_norm = after
            return described
        slot.mixed_norm, slot.mlp_norm = after, self.norm(layer.pre_feedforward_layernorm)
        slot.fed_norm, slot.scale = self.norm(layer.post_feedforward_layernorm), layer.layer_scalar.item()
        if self.config.per_layer_width:
            slot.own_gate = self._matrix(layer.per_layer_input_gate)
            slot.own_projection = self._matrix(layer.per_layer_projection)
            slot.own_norm = self.norm(layer.post_per_layer_input_norm)
        return described

    def norm(self, norm: nn.RMSNorm | None) -> int | None:
        """The address of the factors of a norm, or None."""
        if norm is None:
            return None
        around_one = type(norm) is not nn.RMSNorm
        return self.floats(1 + norm.weight.float() if around_one else norm.weight)

    def floats(self, tensor: Tensor | None) -> int | None:
        """The address of a tensor in float32, or None."""
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
        parts, rest = divmod(width - self._own, self._description.width)
        if parts < 1 or rest or (self._own and parts > 1):
            expected = self._description.width + self._own
            raise ValueError(f"embeddings: expected width {expected}, got {width}")
        three = (3, batch, longest) if self._turns else None
        if places is not None and places.shape != three:
            raise ValueError(f"places: expected {three}, got {tuple(places.shape)}")

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
        (T, D and more: `layers.h`), belong to the cache's rows, `lengths` of them to each, from a position
        on. `places`: one or three of each token, where they are rotated by other numbers than their
        positions. Lists, because a tensor's every operation takes as long as a small model's layer."""
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
        if isinstance(tokens, list) and self._embed is not None:
            with torch.no_grad():
                tokens = self._embed(torch.tensor([tokens]))[0]
        library = load_library("decode.c", self._weight_bits, BITS[held.dtype])
        rows = [row for row, length in enumerate(lengths) for _ in range(length)]
        positions = _positions(lengths, starts)
        axes = 1 if places is None else len(places) // len(rows)
        with self._lock:
            # Of all layers, each time: a new cache may reuse part of an old one's freed memory.
            for readers, layer in zip(self._readers, kv_cache, strict=True):
                for name, own in layer.items():
                    _, heads, count, width = own.shape
                    count = count if name in STATES else head_stride  # slots of the buffer, if it is a view
                    if own.stride() != (expected := (heads * count * width, count * width, width, 1)):
                        raise ValueError(f"kv_cache: expected strides {expected}, got {own.stride()}")
                    for reader in readers:
                        setattr(reader, name, own.data_ptr())
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
                    part.embedding = given.data_ptr()
                    part.deep = (given.shape[1] - self._own) // self._description.width - 1
                else:
                    part.id = _longs(given)
                call = partial(self._pass, library, part, head_stride, logits[done:].data_ptr())
                run_pass(call, part.count * self._products)
                done += len(here)
        return logits if self._cap is None else logits.div_(self._cap).tanh_().mul_(self._cap)

    def _pass(self, library: ctypes.CDLL, part: ctypes.Structure, capacity: int, logits: int, made) -> None:
        needed = library.ocelli_scratch_floats(self._description, part, made.threads)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed)
        library.ocelli_forward(self._description, part, capacity, made, self._scratch.data_ptr(), logits)
