"""The whole decode step as a CUDA graph: from a token through the decoder and the sampler to the next one.

    step = GraphStep(model.language_model)
    model.generate(**inputs, decode_step=step)

A graph is bound to addresses. Tokens, positions, the sampler's state and the stop flags therefore live in
buffers that stay (`_Run`), and a small cache in one that is kept between answers (`KeptCache`). Positions
are in device memory, so that one graph serves every step of a bucket of cache lengths; it reads the cache up
to the bucket's end, so that short contexts do not pay for long ones.

The host never waits for the step that it has just launched. It launches `lag` steps ahead and reads the
tokens and flags of the one before those, which were copied to it meanwhile; what a row was given behind its
stop is thrown away before anyone sees it. What such steps write lies in the cache behind the answer's end,
where the next one to fill it overwrites it.

With `capture=False`, or where a graph cannot be recorded, the same functions run without one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from generation import kv_cache as kv
from generation.chooser import Chooser, NotFiniteError
from generation.decoding import CacheCursor, GenerationOptions
from generation.fast.fused_decoder import FusedDecoder
from generation.fast.static_cache import KeptCache
from generation.kv_cache import KVCache

BUCKET = 256  # cache positions: the shortest bucket
LAG = 3  # steps launched before the tokens of one are read
KINDS = 32  # of runs that are remembered: batch width, sampling, stop ids
GRAPHS = 48  # kept, the least recently used given up first
KEPT_SHARE = 0.1  # of the weights' bytes: what a cache that is kept between answers may take


def bucket_of(length: int) -> int:
    """Positions that a step reads to see `length`: at most a quarter too many, from four buckets up."""
    step = max(BUCKET, 1 << max(0, (length - 1).bit_length() - 3))
    return kv.round_up(length, step)


class Graphs:
    """Functions of no arguments that are recorded once and replayed; all they touch must stay where it is."""

    def __init__(self, device: torch.device, capture: bool):
        self._device, self._capture = device, capture
        self._replays: OrderedDict[tuple, Callable[[], None]] = OrderedDict()
        self._warm: set[tuple] = set()
        self._pool: tuple | None = None  # memory that the graphs share: none holds anything between replays
        self._stream: torch.cuda.Stream | None = None  # the one that all are recorded on
        self.recorded = 0
        self.failure: str | None = None  # why one could not be recorded; none is from then on

    def clear(self) -> None:
        self._replays.clear()
        self._pool = None  # the allocator gives up a pool whose last graph has gone

    def get(
        self, key: tuple, shape: tuple, make: Callable[[], Callable[[], None]], state: list[Tensor]
    ) -> Callable[[], None]:
        """What replays the function that `make` makes.

        Args:
            key: names the function and every address in it.
            shape: what its kernels are chosen by; a new one is warmed up twice.
            state: tensors that it changes, which recording must leave alone. A cache is none: writing the
                same token twice changes nothing.
        """
        if key in self._replays:
            self._replays.move_to_end(key)
            return self._replays[key]
        function = make()
        replay = function
        if self._capture:
            saved = [tensor.clone() for tensor in state]
            try:
                replay = self._record(function, shape, state)
            except RuntimeError as error:  # of the driver, the allocator, a kernel's compiler
                self._capture, self.failure = False, first_line(error)
                for tensor, value in zip(state, saved, strict=True):
                    tensor.copy_(value)
        self.recorded += 1
        self._replays[key] = replay
        if len(self._replays) > GRAPHS:
            self._replays.popitem(last=False)
        return replay

    def _record(self, function, shape: tuple, state: list[Tensor]) -> Callable[[], None]:
        """Warm up, so that kernels are compiled, loaded and chosen, then capture."""
        saved = [tensor.clone() for tensor in state]
        with torch.cuda.device(self._device):
            self._stream = self._stream or torch.cuda.Stream()
            current, stream = torch.cuda.current_stream(), self._stream
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    for _ in range(1 if shape in self._warm else 2):
                        function()
                        for tensor, value in zip(state, saved, strict=True):
                            tensor.copy_(value)
                    graph = torch.cuda.CUDAGraph()
                    self._pool = self._pool or torch.cuda.graph_pool_handle()
                    # Not `torch.cuda.graph`, which waits for the device and empties the allocator's caches.
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    try:
                        function()
                    except BaseException:
                        with suppress(RuntimeError):  # the first error is the one to tell
                            self._end(graph)
                        raise
                    self._end(graph)
            finally:
                current.wait_stream(stream)
        self._warm.add(shape)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):  # it has left the allocator recording
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            raise


class LateCopy:
    """A vector copied to the host behind each step, and read when later steps are on their way already."""

    def __init__(self, source: Tensor, slots: int):
        self._source, self._cuda = source, source.device.type == "cuda"
        self._host = torch.zeros(slots, len(source), dtype=source.dtype, pin_memory=self._cuda)
        self._events = [torch.cuda.Event() for _ in range(slots)] if self._cuda else []

    def push(self, number: int) -> None:
        """Copy the vector as it is behind what has been launched so far."""
        slot = number % len(self._host)
        self._host[slot].copy_(self._source, non_blocking=True)
        if self._cuda:
            self._events[slot].record(torch.cuda.current_stream(self._source.device))

    def read(self, number: int) -> Tensor:
        """The vector as it was at `push(number)`, which at most `slots` - 1 others have followed."""
        slot = number % len(self._host)
        if self._cuda:
            self._events[slot].synchronize()
        return self._host[slot].clone()


class _Run:
    """Buffers of one answer at a time: rows that are sampled in one way and stop at the same ids."""

    def __init__(self, chooser: Chooser, lag: int):
        self.chooser = chooser.like()
        stopped = chooser.stopped
        self.token = torch.zeros(len(stopped), 1, dtype=torch.int64, device=stopped.device)
        self.position = torch.zeros(len(stopped), dtype=torch.int64, device=stopped.device)
        # (B + 2,): the tokens, whether all rows have stopped, whether all logits were finite.
        self.told = torch.zeros(len(stopped) + 2, dtype=torch.int64, device=stopped.device)
        self.late = LateCopy(self.told, lag + 1)

    @property
    def state(self) -> list[Tensor]:
        return [self.token, self.position, self.told, *self.chooser.state]

    def choose(self, logits: Tensor) -> None:
        """Logits (B, V) to `token` and `told`."""
        token = self.chooser.choose(logits)
        self.token.copy_(token)
        flags = torch.stack((self.chooser.stopped.all(), self.chooser.finite))
        torch.cat((token[:, 0], flags.long()), out=self.told)


class GraphStep:
    """A decode step that runs the loop itself (`generation.decoding.OwnLoop`), and also one token at a time.

    Weights stay the model's: its projections become views of joined buffers (`FusedDecoder`).

    Args:
        language_model: a `LanguageModel` whose projections are plain linear layers.
        capture: False runs without graphs.
        backend: of torch.compile, or None.
        lag: steps launched before the tokens of one are read.
        kept_bytes: of the cache that is kept between answers; None is a share of the weights' bytes.

    Raises:
        ValueError: a model that the fused decoder cannot run.
    """

    def __init__(
        self,
        language_model,
        capture: bool = True,
        backend: str | None = None,
        lag: int = LAG,
        kept_bytes: int | None = None,
    ):
        self._decoder, self.lag = FusedDecoder(language_model, backend), lag
        self._capture = capture
        if kept_bytes is None:
            weights = sum(parameter.nbytes for parameter in language_model.parameters())
            kept_bytes = int(KEPT_SHARE * weights)
        self._kept_bytes = kept_bytes
        self._runs: dict[tuple, list[_Run]] = {}  # by what they are for; those that are free
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None
        self._last: tuple | None = None  # width and place of the last call's cache
        self._start()

    def _start(self) -> None:
        """Forget what is bound to weights at other addresses."""
        device = self._decoder.model.norm.weight.device
        self._device, self.graphs = device, Graphs(device, self._capture)
        self.kept = KeptCache(self._decoder.model.config, self._kept_bytes)
        self._runs.clear()
        self._buffers = self._last = None

    @property
    def failure(self) -> str | None:
        """Why steps are run without a graph from some point on, None where they are not."""
        return self.graphs.failure

    @torch.no_grad()
    def rehearse(self) -> str | None:
        """Decode two tokens of one row, so that what cannot work here is known before anyone waits for an
        answer: why it cannot, or None."""
        model = self._decoder.model
        options = GenerationOptions(max_new_tokens=2, stop_token_ids=())
        try:
            cache = kv.allocate_for(model.config, 1, 2, model.norm.weight, model.cache_dtype)
            chooser, cursor = (
                Chooser(options, 1, 0, self._device, None),
                CacheCursor(cache, (1,), self._device),
            )
            logits = model.norm.weight.new_zeros(1, model.config.vocab_size)
            with suppress(NotFiniteError):  # broken weights are told with the answer
                for _ in self.decode(logits, chooser, cursor, options.max_new_tokens):
                    pass
        except RuntimeError as error:
            return first_line(error)
        return self.failure

    def _refresh(self) -> None:
        if self._decoder.refresh():
            self._start()

    def _decode(self, token: Tensor, cache: KVCache, position: Tensor, reach: int) -> Tensor:
        """(B, 1) ids at (B,) positions -> (B, V) logits; `reach` positions of the cache are read."""
        if self._device.type != "cuda":
            return self._decoder(token, cache, position, reach)
        # Flash attention takes no mask, and cuDNN plans its kernels anew for each length.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return self._decoder(token, cache, position, reach)

    def _any_length(self, kv_cache: KVCache) -> KVCache:
        """A cache of whose length nothing is compiled for."""
        if self._decoder.compiled:
            for layer in kv_cache:
                for tensor in layer.values():
                    torch._dynamo.maybe_mark_dynamic(tensor, 2)
        return kv_cache

    # ------------------------------------------------------------------------------------- one token

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        """(B, 1) ids -> (B, V) logits, as the eager step gives them."""
        batch, place = len(token_ids), places(kv_cache)
        model = self._decoder.model  # whose weights may be others in a scheduler's next run
        call = batch, place, model.norm.weight.data_ptr(), model.lm_head.weight.data_ptr()
        if call != self._last:
            self._refresh()
            self._last = call
        token, position, logits = (buffer[:batch] for buffer in self._buffers_for(batch))
        token.copy_(token_ids)
        if isinstance(start_pos, int):
            position.fill_(start_pos)
            reach = min(bucket_of(start_pos + 1), kv.capacity(kv_cache))
        else:
            position.copy_(start_pos)
            reach = kv.capacity(kv_cache)  # a view of fitting length, see CacheCursor

        def make() -> Callable[[], None]:
            cache = self._any_length(kv.view(kv_cache, kv.capacity(kv_cache)))
            return lambda: logits.copy_(self._decode(token, cache, position, reach))

        self.graphs.get((batch, place, reach), (batch, reach), make, [])()
        return logits.clone()

    def _buffers_for(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, positions and logits, for the widest batch so far."""
        if self._buffers is None or len(self._buffers[0]) < batch:
            self.graphs.clear()  # they know where the old ones were
            vocab, dtype = self._decoder.model.config.vocab_size, self._decoder.model.norm.weight.dtype
            self._buffers = (
                torch.zeros(batch, 1, dtype=torch.int64, device=self._device),
                torch.zeros(batch, dtype=torch.int64, device=self._device),
                torch.zeros(batch, vocab, dtype=dtype, device=self._device),
            )
        return self._buffers

    # -------------------------------------------------------------------------------------- the loop

    @torch.no_grad()
    def decode(
        self, logits: Tensor, chooser: Chooser, cursor: CacheCursor, max_new_tokens: int
    ) -> Iterator[Tensor]:
        """`generation.decoding.decode`, with tokens on the host."""
        self._refresh()
        self.kept.take_in(cursor.kv_cache, cursor.longest, cursor.longest + max_new_tokens - 1)
        free = self._runs.setdefault((len(chooser.stopped), chooser.kind), [])
        if len(self._runs) > KINDS:
            self._runs.pop(next(iter(self._runs)))
        run = free.pop() if free else _Run(chooser, self.lag)
        filled, given = cursor.longest, 0
        try:
            for token in self._loop(run, logits, chooser, cursor, max_new_tokens):
                given += 1
                yield token
        finally:
            if not run.chooser.finite.item():  # even masked, NaN would reach the next answer
                self.kept.forget()
                for layer in cursor.kv_cache:
                    for tensor in layer.values():
                        tensor[:, :, filled + max(0, given - 1) :] = 0  # the last token is not in it
            free.append(run)

    def _loop(self, run: _Run, logits, chooser: Chooser, cursor: CacheCursor, count: int) -> Iterator[Tensor]:
        """`decode` in the run's buffers.

        While one token is waited for, up to `lag` steps behind it are on their way. They are in vain only
        where that token, or one of those behind it, turns out to be the last.
        """
        run.chooser.load(chooser)
        run.choose(logits)
        if isinstance(cursor.start_pos, int):
            run.position.fill_(cursor.start_pos)  # a copy from the host would wait for the device
        else:
            run.position.copy_(cursor.start_pos)
        launched, reach = 1, 0
        run.late.push(0)
        for number in range(count):
            ahead = min(number + 1 + self.lag, count)
            # No cache is grown for a step that may be in vain.
            while launched <= number or (launched < ahead and not cursor.full):
                reach = 0 if cursor.full else reach  # grown, it lies somewhere else
                cursor.make_room()
                if cursor.longest > reach:
                    reach, replay = self._graph(run, cursor)
                replay()
                run.late.push(launched)
                launched += 1
            told = run.late.read(number)
            *_, all_stopped, finite = told.tolist()
            if not finite:
                raise NotFiniteError(int(run.chooser.sound) + 1)
            yield told[:-2, None]
            if all_stopped:
                break
        chooser.load(run.chooser)
        if all_stopped:
            chooser.finite.fill_(True)  # whatever the steps in vain made of it
        chooser.check_finite()

    def _graph(self, run: _Run, cursor: CacheCursor) -> tuple[int, Callable[[], None]]:
        """(positions that it can reach, what replays the next step)."""
        kv_cache, batch = cursor.kv_cache, len(run.token)
        reach = min(bucket_of(cursor.longest), kv.capacity(kv_cache))

        def make() -> Callable[[], None]:
            # Tensors of its own: those that the caller puts into the list later are others.
            cache = self._any_length(kv.view(kv_cache, kv.capacity(kv_cache)))

            def step() -> None:
                logits = self._decode(run.token, cache, run.position, reach)
                run.position += 1
                run.choose(logits)

            return step

        key, shape = (run, places(kv_cache), reach), (batch, reach, run.chooser.kind)
        return reach, self.graphs.get(key, shape, make, run.state)


def first_line(error: RuntimeError) -> str:
    """Without where in C++ it was raised."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


def places(kv_cache: KVCache) -> tuple:
    """Where a cache lies, all of it: freed memory of an old cache is reused in part."""
    key = kv_cache[0]["key"]
    addresses = tuple(tensor.data_ptr() for layer in kv_cache for tensor in layer.values())
    return addresses, key.stride(), key.dtype
