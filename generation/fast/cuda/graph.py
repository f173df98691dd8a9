"""A decode step as a CUDA graph: from a token through the decoder, and the choice of the next one where the
scheduler asks for both.

    step = GraphStep(model.language_model)
    Session(model).generate(**inputs, decode_step=step)

At batch 1 a GPU's decode step is bound by the number of kernels before it is bound by bytes. So the decoder
is a few kernels written in Triton (`decoder.TritonDecoder`). What these do not take, many rows for example,
or cannot be compiled for here, is the eager step, recorded as it is.

A graph is bound to addresses. Tokens, positions and logits therefore live in buffers that stay, and a graph
serves the next answer where that has the same cache, as in a session or a scheduler. Positions are in device
memory, so that one graph of the Triton kernels serves every length. One of the eager step reads all of the
view of the cache that it is given, which is longer by `generation.recorded.VIEW_STEP` from time to time.

On a CPU, or where a graph cannot be recorded, the same functions run without one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from generation import kv_cache as kv
from generation.kv_cache import KVCache
from generation.output import Stopwatch
from generation.steps import Step

if TYPE_CHECKING:
    from generation.fast.cuda.decoder import TritonDecoder

SEVERAL = 8  # positions of a pass that is measured
MAX_GRAPHS = 48  # the least recently used is given up first


def triton_module() -> Any:
    """`generation.fast.cuda.decoder`; None where Triton is not installed, as in a CPU build of PyTorch."""
    try:
        from generation.fast.cuda import decoder
    except ImportError:
        return None
    return decoder


def unsupported(language_model) -> str | None:
    """The reason why `GraphStep` cannot run this model, or None. Whether a network reads back what it
    computes, which no graph can, is found out by recording it."""
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in language_model.modules())
    return "it has hooks, which a graph does not call" if hooked else None


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
        """A function that replays the one that `make` returns; where there is no memory for a graph now, and
        after a failure, that one itself. Raises what recording raises, of any type, with `state` as it was.

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
        if self.capture and self.failure is None:
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
            except Exception:
                restore()
                raise
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
                with torch.cuda.stream(stream):  # also around the capture: one that fails does not leave it
                    for _ in range(1 if shape in self._warm else 2):
                        function()
                        restore()
                    graph = torch.cuda.CUDAGraph()
                    self._pool = self._pool or torch.cuda.graph_pool_handle()
                    with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
                        function()
            except Exception:
                with suppress(Exception):  # a capture that fails may leave the allocator recording
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
        self._reasons: dict[int, str | None] = {}  # why Triton does not decode that many rows, or None
        self._rehearsed: set[int] = set()  # numbers of rows
        self._notes: list[str] = []  # what has been given up beside single rows in Triton, and why
        self._buffers: tuple[Tensor, ...] | None = None  # token ids, positions, offsets, logits
        self._last: tuple | None = None  # batch, cache and weights of the last call

    def decoder(self, rows: int) -> TritonDecoder | None:
        """The Triton decoder of that many rows; None where the eager step decodes them."""
        if rows not in self._reasons:
            try:
                reason = no_triton(self._language_model, rows)
                if reason is None and self._triton is None:
                    self._triton = triton_module().TritonDecoder(self._language_model)
                self._reasons[rows] = reason
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._give_up(rows, error)
        return self._triton if self._reasons[rows] is None and self.graphs.failure is None else None

    def _give_up(self, rows: int, error: Exception) -> None:
        """After an error of any type, a compiler's or the driver's: decode that many rows, and others that
        the same kernels decode, with the eager step; where it was that step's, without graphs."""
        why = said(error)
        if rows in self._reasons and self.decoder(rows) is None:
            self.graphs.failure = why
            self._notes.append(f"eager since: {why}")
            return
        alike = [[rows]] if self._triton is None else self._triton.alike()
        self._reasons |= dict.fromkeys(next(group for group in alike if rows in group), why)
        self._notes += [f"of the eager step for {rows} rows: {why}"] * (rows > 1)

    @property
    def name(self) -> str:
        """What decodes a single row, and what has been given up since it was chosen."""
        reason = None if self.decoder(1) is not None else self._reasons[1]
        name = "CUDA graph of " + (f"the eager step: {reason}" if reason else "Triton kernels")
        return ", ".join([name, *self._notes])

    @torch.no_grad()
    def rehearse(self, rows: int = 1) -> str | None:
        """Decode a token of one row, and of the first of those numbers of rows up to `rows` that share their
        kernels: nobody who waits for an answer then waits for a compiler. Returns why there is no graph of
        any step, or None."""
        model, triton = self._language_model, self.decoder(1)
        counts = {1} if triton is None else {group[0] for group in triton.alike() if group[0] <= rows}
        counts, self._rehearsed = counts - self._rehearsed, counts | self._rehearsed
        try:
            for count in sorted(counts, reverse=True):  # the buffers of the most serve the others
                token = torch.zeros(count, 1, dtype=torch.int64, device=self._device)
                cache = kv.allocate_for(model, count, 2)
                for offset in range(1 + bool(model.config.rope_sections)):
                    self(token, cache, 1, offset)
        except Exception as error:  # no memory, or the eager step fails without a graph as well
            return said(error)
        return self.graphs.failure and f"{self._reasons[1]}; {self.graphs.failure}"

    @cached_property
    @torch.no_grad()
    def pass_steps(self) -> float:  # type: ignore[override]
        """How many steps of a row take as long as a pass over several of its positions, which launches each
        kernel by itself. Measured here, once, with few of them."""
        ids, watch = torch.zeros(1, SEVERAL, dtype=torch.int64, device=self._device), Stopwatch(self._device)
        cache = kv.allocate_for(self._language_model, 1, 2 * SEVERAL)
        for number in range(3):  # the first ones load their kernels
            self.chunk(ids, cache, torch.zeros(1, dtype=torch.int64, device=self._device))
            watch.lap(f"pass {number}")
            self(ids[:, :1], cache, SEVERAL)
            watch.lap(f"step {number}")
        seconds = [*watch.seconds.values()]
        return min(seconds[::2]) / min(seconds[1::2])

    def _decode(self, token: Tensor, cache: KVCache, position: Tensor, offset: Tensor | None) -> Tensor:
        """(B, 1) ids at (B,) positions -> (B, V) logits; the eager step reads all of the cache."""
        if (decoder := self.decoder(len(token))) is not None:
            return decoder(token, cache, position, offset)
        # Flash attention takes no mask, and cuDNN plans its kernels anew for each length.
        kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(kernels) if self._device.type == "cuda" else nullcontext():
            return self.chunk(token, cache, position, 0 if offset is None else offset)[:, -1]

    def _read(self, rows: int, kv_cache: KVCache) -> int:
        """Positions that a recording for some rows reads at most: those of a view of fitting length; in
        Triton all of the buffer, so that it serves every view of that."""
        held = kv.geometry(kv_cache)
        return held.capacity if self.decoder(rows) is None else held.strides[1] // held.strides[2]

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
        self._recorded(token, kv_cache, position, logits.copy_, [], (), own)()
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
        """A function that runs a step, and then `choose` with its logits (B, V), each time it is called.

        Args:
            token, positions: (B, 1) ids and where they go, (B,): buffers that stay, read anew by each run.
            kv_cache: whose buffers stay; a view of it must hold every position that is run.
            choose: operations on the device that read nothing back.
            state: every tensor that `choose` changes, which binding must not.
            key: equal only where `choose` does the same to the same tensors.
            offsets: (B,), a buffer as well: what is added to positions for rotary places; None for nothing.

        Ask again where any of these or the weights may have changed: it is recorded once.
        """
        self._check_weights()
        return self._recorded(token, kv_cache, positions, choose, state, key, offsets)

    def _recorded(self, token, kv_cache: KVCache, positions, choose, state, key, offsets):
        """`bind`, for weights that are the same."""
        rows, read = len(token), [one for one in (token, positions, offsets) if one is not None]
        # A buffer of another shape may get the address of one that is gone.
        places = tuple((one.data_ptr(), one.stride()) for one in (*read, *state))

        def make() -> Callable[[], None]:
            cache = fixed(kv_cache, kv_len)
            return lambda: choose(self._decode(token, cache, positions, offsets))

        while True:
            kv_len = self._read(rows, kv_cache)
            kind = rows, kv_len, key, len(read)
            try:
                return self.graphs.get((places, buffer_addresses(kv_cache), *kind), kind, make, state)
            except Exception as error:  # Triton's have no type in common
                self._give_up(rows, error)


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


def said(error: Exception) -> str:
    """An error in one line: a RuntimeError without the C++ stack, others with the name of their type."""
    text = str(error).strip()
    if isinstance(error, RuntimeError) and text:
        return text.split("\n")[0]
    return f"{type(error).__name__}: {' '.join(text.split())[:300]}"


def buffer_addresses(kv_cache: KVCache) -> tuple:
    """The addresses of all of a cache: a new one may reuse part of an old one's freed memory."""
    held = kv.geometry(kv_cache)
    addresses = tuple(tensor.data_ptr() for layer in kv_cache for tensor in layer.values())
    return addresses, held.strides, held.dtype
