"""A decode step as a CUDA graph: from a token through the decoder, and the choice of the next one where the
scheduler asks for both.

    step = GraphStep(model.language_model)
    Session(model).generate(**inputs, decode_step=step)

At batch 1 a GPU's decode step is bound by the number of kernels before it is bound by bytes. So the decoder
is a few kernels written in Triton (`decoder.TritonDecoder`). What these do not take, many rows for example,
is the eager step, recorded as it is.

A graph is bound to addresses. Tokens, positions and logits therefore live in buffers that stay, and a graph
serves the next answer where that has the same cache, as in a session or a scheduler. Positions are in device
memory, so that one graph of the Triton kernels serves every length. One of the eager step serves a bucket of
cache lengths and reads the cache up to the bucket's end, so that short contexts do not pay for long ones.

On a CPU, or where a graph cannot be recorded, the same functions run without one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from generation import kv_cache as kv
from generation.fast.network import decoder_of
from generation.kv_cache import KVCache
from generation.steps import Step

if TYPE_CHECKING:
    from generation.fast.cuda.decoder import TritonDecoder

BUCKET = 256  # cache positions: the shortest bucket
MAX_GRAPHS = 48  # the least recently used is given up first


def bucket_of(length: int) -> int:
    """Positions that a step reads to see `length`: at most a quarter more, from four buckets up."""
    step = max(BUCKET, 1 << max(0, (length - 1).bit_length() - 3))
    return kv.round_up(length, step)


def triton_module() -> Any:
    """`generation.fast.cuda.decoder`; None where Triton is not installed, as in a CPU build of PyTorch."""
    try:
        from generation.fast.cuda import decoder
    except ImportError:
        return None
    return decoder


def unsupported(language_model) -> str | None:
    """The reason why `GraphStep` cannot run this model, or None."""
    return decoder_of(language_model).unknown(language_model)


def no_triton(language_model, rows: int = 1) -> str | None:
    """The reason why the Triton kernels cannot run this model, or that many rows of it; or None."""
    module = triton_module()
    return "Triton is not installed" if module is None else module.unsupported(language_model, rows)


# ---------------------------------------------------------------------------------------- the graphs


class Graphs:
    """Functions of no arguments that are recorded once and replayed; all they touch must stay where it is."""

    def __init__(self, device: torch.device):
        self._device, self.capture = device, device.type == "cuda"
        self._replays: OrderedDict[tuple, Callable[[], None]] = OrderedDict()
        self._warm: set[tuple] = set()
        self._pool: Any = None  # memory that the graphs share: they hold nothing between replays
        self._stream: torch.cuda.Stream | None = None  # that all are recorded on
        self.failure: str | None = None  # why a graph could not be recorded; no other is tried after that

    def clear(self) -> None:
        self._replays.clear()
        self._pool = None  # the allocator gives up a pool whose last graph has gone

    def get(
        self, key: tuple, shape: tuple, make: Callable[[], Callable[[], None]], state: list[Tensor]
    ) -> Callable[[], None]:
        """A function that replays the one that `make` returns.

        Args:
            key: the function and every address in it.
            shape: what its kernels are chosen by; a new one is warmed up twice.
            state: tensors that it changes and recording must not. A cache is none of them: writing the same
                token twice changes nothing.
        """
        if key in self._replays:
            self._replays.move_to_end(key)
            return self._replays[key]
        replay = function = make()
        if self.capture:
            saved = [tensor.clone() for tensor in state]

            def restore() -> None:
                for tensor, value in zip(state, saved, strict=True):
                    tensor.copy_(value)

            try:
                replay = self._record(function, shape, restore)
            except torch.OutOfMemoryError:  # there may be room the next time
                restore()
                self._pool = None  # the allocator may not take up again what it holds no graph for
                return function
            except RuntimeError as error:  # of the driver, the allocator's bookkeeping, a kernel's compiler
                self.capture, self.failure = False, first_line(error)
                restore()
        self._replays[key] = replay
        if len(self._replays) > MAX_GRAPHS:
            self._replays.popitem(last=False)
        return replay

    def _record(self, function, shape: tuple, restore: Callable[[], None]) -> Callable[[], None]:
        """Warm up, so that kernels are compiled, loaded and chosen, then capture."""
        with torch.cuda.device(self._device):
            self._stream = self._stream or torch.cuda.Stream()
            current, stream = torch.cuda.current_stream(), self._stream
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    for _ in range(1 if shape in self._warm else 2):
                        function()
                        restore()
                graph = torch.cuda.CUDAGraph()
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                    function()
            except RuntimeError:
                with suppress(RuntimeError):  # a capture that fails may leave the allocator recording
                    torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                raise
            finally:
                current.wait_stream(stream)
        self._warm.add(shape)
        return graph.replay


class GraphStep(Step):
    """A step of one token of each row, alone or with its choice. Prompts, and several positions of a row, are
    the eager step's.

    Args:
        language_model: one that `unsupported` has no reason against; else a ValueError.
    """

    records = True

    def __init__(self, language_model):
        if reason := unsupported(language_model):
            raise ValueError(f"the recorded decode step cannot run this model: {reason}")
        super().__init__(language_model)
        self._language_model: Any
        self._start()

    def _start(self) -> None:
        """Forget what is bound to the addresses of replaced weights."""
        model = self._language_model
        self._addresses = addresses(model)
        self._device = model.norm.weight.device
        self.graphs = Graphs(self._device)
        self._triton: TritonDecoder | None = None
        self._reasons: dict[int, str | None] = {}  # of `no_triton`, by the number of rows
        self._buffers: tuple[Tensor, ...] | None = None  # token ids, positions, offsets, logits
        self._last: tuple | None = None  # batch, cache and weights of the last call

    def decoder(self, rows: int) -> TritonDecoder | None:
        """The Triton decoder of that many rows; None where the eager step decodes them."""
        if rows not in self._reasons:
            self._reasons[rows] = no_triton(self._language_model, rows)
        if self._reasons[rows] is not None:
            return None
        if self._triton is None:
            self._triton = triton_module().TritonDecoder(self._language_model)
        return self._triton

    @property
    def name(self) -> str:
        """The name of what decodes a single row."""
        if self.decoder(1) is None:
            return f"CUDA graph of the eager step: {self._reasons[1]}"
        return "CUDA graph of Triton kernels"

    @property
    def failure(self) -> str | None:
        """The reason why steps run without a graph from some point on, or None."""
        return self.graphs.failure

    @torch.no_grad()
    def rehearse(self) -> str | None:
        """Decode a token of one row, so that a failure is known before anyone waits for an answer: why it
        fails, or None."""
        model = self._language_model
        try:
            cache = kv.allocate_for(model, 1, 2)
            self(torch.zeros(1, 1, dtype=torch.int64, device=self._device), cache, 1)
        except RuntimeError as error:
            return first_line(error)
        return self.failure

    def _decode(self, token: Tensor, cache: KVCache, position: Tensor, offset: Tensor | None) -> Tensor:
        """(B, 1) ids at (B,) positions -> (B, V) logits; the eager step reads all of the cache."""
        if (decoder := self.decoder(len(token))) is not None:
            return decoder(token, cache, position, offset)
        # Flash attention takes no mask, and cuDNN plans its kernels anew for each length.
        kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(kernels) if self._device.type == "cuda" else nullcontext():
            return self.chunk(token, cache, position, 0 if offset is None else offset)[:, -1]

    def _read(self, rows: int, kv_cache: KVCache, longest: int | None = None) -> int:
        """Positions that a recording for some rows reads at most: the bucket of the `longest`, or all of a
        view of fitting length; in Triton all of the buffer, so that it serves every view of that."""
        if self.decoder(rows) is not None:
            _, head, position, _ = kv.geometry(kv_cache).strides
            return head // position
        capacity = kv.geometry(kv_cache).capacity
        return capacity if longest is None else min(bucket_of(longest), capacity)

    def _check_weights(self) -> None:
        """Start anew if any were replaced (`model.to`)."""
        if self._addresses != addresses(self._language_model):
            self._start()

    @torch.no_grad()
    def __call__(
        self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor, offset: int | Tensor = 0
    ) -> Tensor:
        """(B, 1) ids -> (B, V) logits, as the eager step gives them."""
        batch, places, model = len(token_ids), buffer_addresses(kv_cache), self._language_model
        # The weights may be others in a scheduler's next run.
        call = batch, places, model.norm.weight.data_ptr(), model.lm_head.weight.data_ptr()
        if call != self._last:
            self._check_weights()
            self._last = call
        if self._buffers is None or len(self._buffers[0]) < batch:
            self.graphs.clear()  # they are bound to the old buffers
            self._buffers = (
                torch.zeros(batch, 1, dtype=torch.int64, device=self._device),
                *(torch.zeros(batch, dtype=torch.int64, device=self._device) for _ in range(2)),
                model.norm.weight.new_zeros(batch, model.config.vocab_size),
            )
        token, position, offsets, logits = (buffer[:batch] for buffer in self._buffers)
        token[:], position[:] = token_ids, start_pos
        own = None
        if isinstance(offset, Tensor) or offset:
            own, offsets[:] = offsets, offset
        longest = start_pos + 1 if isinstance(start_pos, int) else None
        self._recorded(token, kv_cache, position, logits.copy_, [], (), own, longest)()
        return logits.clone()

    @torch.no_grad()
    def bind(
        self,
        token: Tensor,
        kv_cache: KVCache,
        positions: Tensor,
        choose: Callable[[Tensor], None],
        state: list[Tensor],
        key: tuple,
        offsets: Tensor | None = None,
    ) -> Callable[[], None]:
        """See `generation.steps.Step`."""
        self._check_weights()
        return self._recorded(token, kv_cache, positions, choose, state, key, offsets)

    def _recorded(
        self, token, kv_cache: KVCache, positions, choose, state, key, offsets, longest: int | None = None
    ) -> Callable[[], None]:
        """`bind`, for positions up to the `longest`."""
        kv_len = self._read(len(token), kv_cache, longest)

        def make() -> Callable[[], None]:
            cache = fixed(kv_cache, kv_len)
            return lambda: choose(self._decode(token, cache, positions, offsets))

        read = [tensor.data_ptr() for tensor in (token, positions, offsets) if tensor is not None]
        kind = len(token), kv_len, key, len(read)
        return self.graphs.get((*read, buffer_addresses(kv_cache), *kind), kind, make, state)


def fixed(kv_cache: KVCache, length: int) -> KVCache:
    """Tensors of its own for a graph, because the caller may put others into the list later: `length`
    positions of the buffers, even if the cache is a view of fewer."""
    own = [{name: tensor.detach() for name, tensor in layer.items()} for layer in kv_cache]
    for layer, name in kv.by_slot(own):
        rows, heads, _, width = layer[name].shape
        layer[name] = layer[name].as_strided((rows, heads, length, width), layer[name].stride())
    return own


def addresses(language_model) -> list[int]:
    """The addresses of its weights, and of the frequencies, which a stay on another device makes anew."""
    frequencies = language_model.inv_freq(language_model.norm.weight.device)
    read = (*language_model.parameters(), *language_model.buffers(), frequencies)
    return [tensor.data_ptr() for tensor in read]


def first_line(error: Exception) -> str:
    """The message without the C++ stack."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


def buffer_addresses(kv_cache: KVCache) -> tuple:
    """The addresses of all of a cache: a new one may reuse part of an old one's freed memory."""
    held = kv.geometry(kv_cache)
    addresses = tuple(tensor.data_ptr() for layer in kv_cache for tensor in layer.values())
    return addresses, held.strides, held.dtype
