"""Faster decode steps behind the ordinary loop; the model's files do not know of them.

    step, how = fast_step(model.language_model)      # or None, and why there is none
    model.generate(**inputs, decode_step=step)

On a CPU: one C function for the whole step (`generation/native/`), compiled once for this machine. On CUDA:
the step captured as a graph over fixed buffers, one graph for each cache-length bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.decoding import DecodeStep, eager_step
from generation.kv_cache import KVCache
from generation.native.build import NoCompiler
from generation.native.step import NativeStep, is_compiled, unsupported
from generation.packed_weights import pack

BUCKET = 512  # cache positions a captured graph reads: the filled ones, rounded up to this


def fast_step(language_model, pays: bool = True) -> tuple[DecodeStep | None, str]:
    """(a decode step faster than the eager one, what it is), or (None, why there is none).

    Args:
        pays: whether more than one short answer is to come. If not, only what costs nothing is used: a step
            that has been compiled before.
    """
    device = language_model.norm.weight.device
    short = "eager: one short answer does not pay for compiling"
    if device.type == "cuda":
        return (GraphStep(language_model), "CUDA graph") if pays else (None, short)
    if device.type != "cpu":
        return None, f"eager: no fast decode step on {device.type}"
    reason = unsupported(language_model)
    if reason:
        return None, f"eager: {reason}"
    try:
        if not pays and not is_compiled(language_model):
            return None, short
        return NativeStep(language_model), "native C step"
    except NoCompiler as error:
        return None, f"eager: {error}"


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 at least as fast as float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def set_precision(model, precision: str) -> None:
    """Store a CPU model's weights in bfloat16 or int8, in place; the vision tower at most in bfloat16.

    Raises:
        ValueError: an unknown precision, or a model that is not on a CPU.
    """
    if precision == "int8":
        pack(model.vision_model, "bfloat16")
        pack(model.projector, "bfloat16")
        pack(model.language_model, "int8")
    else:
        pack(model, precision)


class GraphStep:
    """A `DecodeStep` replayed as a CUDA graph: one launch for a token instead of hundreds.

    Token ids and positions are copied into fixed buffers; the cache is read up to a bucket, so that short
    contexts do not pay for long ones. A graph belongs to the cache buffers that it was captured on; another
    cache or a grown one is captured anew. With `capture=False` the same step runs without a graph, which
    is how it is tested on a machine without CUDA.
    """

    def __init__(self, language_model, capture: bool = True):
        self._step, self._capture = eager_step(language_model), capture
        self._device = language_model.norm.weight.device
        self._address = None
        self._graphs: dict[int, tuple] = {}  # bucket -> (graph, logits)
        self._token = self._position = torch.empty(0)

    def __call__(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        """(B, 1) ids -> (B, V) logits, in a buffer that the next call overwrites."""
        key = kv_cache[0]["key"]
        places = tuple(tensor.data_ptr() for layer in kv_cache for tensor in layer.values())
        address = (places, tuple(key.shape), key.stride(), token_ids.shape[0])
        if address != self._address:
            self._address, self._graphs = address, {}
            self._token = torch.zeros_like(token_ids, device=self._device)
            self._position = torch.zeros(token_ids.shape[0], dtype=torch.int64, device=self._device)
        self._token.copy_(token_ids)
        if isinstance(start_pos, int):
            self._position.fill_(start_pos)
            longest = start_pos + 1
        else:
            self._position.copy_(start_pos)
            longest = kv.capacity(kv_cache)  # a view of fitting length, see CacheCursor
        bucket = min(kv.round_up(longest, BUCKET), kv.capacity(kv_cache))
        if bucket not in self._graphs:
            self._graphs[bucket] = self._record(kv.view(kv_cache, bucket))
        graph, logits = self._graphs[bucket]
        if graph is None:
            return self._step(self._token, kv.view(kv_cache, bucket), self._position)
        graph.replay()
        return logits

    def _record(self, cache: KVCache):
        """Warm up on a side stream, then capture. Writing a token into its slot twice changes nothing."""
        if not self._capture:
            return None, None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(self._token, cache, self._position)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._step(self._token, cache, self._position)
        return graph, logits
