"""The whole decode step as a CUDA graph: from a token through the decoder and the sampler to the next one.

    step = GraphStep(model.language_model)
    model.generate(**inputs, decode_step=step)

At batch 1 a GPU's decode step is bound by the number of kernels before it is bound by bytes. So the step is
written in as few kernels as plain PyTorch allows (`FusedDecoder`): queries, keys and values are one product,
gate and up another, queries and keys are rotated together, and what lies between two attentions is one
function, which torch.compile makes a handful of kernels of, once for all layers.

A graph is bound to addresses. Tokens, positions, the sampler's state and the stop flags therefore live in
buffers that stay (`_Run`), and a small cache in one that is kept between answers (`StaticCache`). Positions
are in device memory, so that one graph serves every step of a bucket of cache lengths; it reads the cache up
to the bucket's end, so that short contexts do not pay for long ones.

The host never waits for the step that it has just launched. It launches `LAG` steps ahead and reads the
tokens and flags of the one before those, which were copied to it meanwhile; what a row got after its stop is
thrown away before anyone sees it. What such steps write lies in the cache after the answer's end, where the
next one to fill it overwrites it.

On a CPU, or where a graph cannot be recorded, the same functions run without one.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from generation import kv_cache as kv
from generation.fast.native.step import unknown_parts
from generation.kv_cache import CachePosition, KVCache
from generation.options import GenerationOptions, NotFiniteError
from generation.sampling import Sampler

BUCKET = 256  # cache positions: the shortest bucket
LAG = 3  # steps launched before the tokens of one are read
MAX_SIGNATURES = 32  # of runs that are remembered: batch width, sampling, stop ids
MAX_GRAPHS = 48  # the least recently used is given up first
STATIC_SHARE = 0.1  # size limit of the static cache, relative to the weights


def bucket_of(length: int) -> int:
    """Positions that a step reads to see `length`: at most a quarter more, from four buckets up."""
    step = max(BUCKET, 1 << max(0, (length - 1).bit_length() - 3))
    return kv.round_up(length, step)


# -------------------------------------------------------------------------------------- the decoder

Joined = tuple[Tensor, Tensor | None]  # weight (sum of outputs, in) and bias (sum of outputs,) of `join`


class Layer(NamedTuple):
    input_norm: Tensor
    qkv: Joined
    o: Joined
    post_norm: Tensor
    gate_up: Joined
    down: Joined


class Step(NamedTuple):
    """What all layers of one step share: sizes of the heads, and where in the sequence each row stands.

    cos, sin: (B, 1, D_h); `sin` has the sign of the rotation in it: minus in its first half.
    rows, positions: (B,) each, the places in the cache that keys and values go to.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    cos: Tensor
    sin: Tensor
    rows: Tensor
    positions: Tensor


def join(*modules: nn.Linear) -> Joined:
    """Several linear layers of one input as one. Their parameters become views of what is returned."""
    weight = _in_one_buffer([module.weight for module in modules])
    return weight, None if modules[0].bias is None else _in_one_buffer([module.bias for module in modules])


def _in_one_buffer(parameters: Sequence[Tensor]) -> Tensor:
    first = parameters[0].detach()
    end, joined = first.data_ptr(), True
    for parameter in parameters:
        joined = joined and parameter.is_contiguous() and parameter.data_ptr() == end
        joined = joined and parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        end += parameter.nbytes
    rows = [parameter.shape[0] for parameter in parameters]
    if joined:  # by an earlier decoder of this model
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride(), first.storage_offset())
    buffer = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, buffer.split(rows), strict=True):
        parameter.data = part
    return buffer


def unsupported(language_model) -> str | None:
    """Why `GraphStep` cannot run this model, or None."""
    layer = language_model.layers[0]
    modules = [layer.self_attn.q_proj, layer.mlp.gate_proj, language_model.lm_head]
    others = {type(module).__name__ for module in modules if type(module) is not nn.Linear}
    return f"weights in {', '.join(sorted(others))}" if others else unknown_parts(language_model)


class FusedDecoder:
    """One token through the decoder: (B, 1) ids, (B,) positions -> (B, V) logits.

    The joined weights are no second copy: the model's own parameters become views of them. They keep their
    names and values, and go on working in the eager path, in checkpoints and in training.
    """

    def __init__(self, language_model, backend: str | None = None):
        if reason := unsupported(language_model):
            raise ValueError(f"the fused decoder cannot run this model: {reason}")
        self.model, self.compiled, self._between = language_model, backend is not None, between_attentions
        if backend is not None:
            # coordinate_descent_tuning writes the products of a single row as multiply-and-sum, which moves
            # more bytes a second than a matrix product of one row, and chooses their block sizes.
            tuning: dict[str, Any] = {"coordinate_descent_tuning": True}
            options = tuning if backend == "inductor" else None
            self._between = torch.compile(
                between_attentions, backend=backend, options=options, fullgraph=True
            )
        self._addresses: list[int] = []
        self.refresh()

    def refresh(self) -> bool:
        """Join the weights again if any were replaced (`model.to`); returns whether they were."""
        if [parameter.data_ptr() for parameter in self.model.parameters()] == self._addresses:
            return False
        self.layers = [
            Layer(
                block.input_layernorm.weight.detach(),
                join(block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj),
                join(block.self_attn.o_proj),
                block.post_attention_layernorm.weight.detach(),
                join(block.mlp.gate_proj, block.mlp.up_proj),
                join(block.mlp.down_proj),
            )
            for block in self.model.layers
        ]
        self._addresses = [parameter.data_ptr() for parameter in self.model.parameters()]
        return True

    def __call__(self, token_ids: Tensor, kv_cache: KVCache, positions: Tensor, kv_len: int) -> Tensor:
        """The first `kv_len` slots of each row are read, those after its position masked; the cache gains one
        position in each row."""
        model, config = self.model, self.model.config
        x = F.embedding(token_ids[:, 0], model.embed_tokens.weight)  # (B, D)
        angles = positions.float()[:, None, None] * model.inv_freq(x.device)  # (B, 1, D_h / 2), in float32
        cos, sin = angles.cos(), angles.sin()
        step = Step(
            *(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps),
            torch.cat((cos, cos), -1).to(x.dtype),
            torch.cat((-sin, sin), -1).to(x.dtype),
            torch.arange(len(x), device=x.device),
            positions,
        )
        mask = mask_after(positions, kv_len, x.dtype)
        q = into_attention(x, self.layers[0], kv_cache[0], step)
        attended = attend(q, kv_cache[0], mask)
        for layer, following, layer_cache in zip(self.layers, self.layers[1:], kv_cache[1:]):
            x, q = self._run_between(x, attended, layer, following, layer_cache, step)
            attended = attend(q, layer_cache, mask)
        x = out_of_attention(x, attended, self.layers[-1], step)
        return F.linear(F.rms_norm(x, x.shape[-1:], model.norm.weight, model.norm.eps), model.lm_head.weight)

    def _run_between(self, *arguments) -> tuple[Tensor, Tensor]:
        if not self.compiled:
            return between_attentions(*arguments)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            return self._between(*arguments)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            # Nothing was run: running what was compiled raises other errors.
            self.compiled = False
            warnings.warn(
                f"the decode step is not compiled: {first_line(error)}", RuntimeWarning, stacklevel=2
            )
            return between_attentions(*arguments)


def mask_after(positions: Tensor, kv_len: int, dtype: torch.dtype) -> Tensor:
    """(B, 1, 1, S) to be added to scores, S = kv_len: 0 up to each row's position, -inf after it.

    Not bool, which would be turned into this in every layer; and cut from rows of a multiple of 16, without
    which fused attention would copy it in every layer.
    """
    keys = torch.arange(kv.round_up(kv_len, 16), device=positions.device)
    after = keys > positions[:, None, None, None]
    mask = torch.zeros(after.shape, dtype=dtype, device=keys.device)
    return mask.masked_fill_(after, -torch.inf)[..., :kv_len]


def into_attention(x: Tensor, layer: Layer, layer_cache: dict[str, Tensor], step: Step) -> Tensor:
    """Hidden states (B, D) to rotated queries (B, H_kv, G, D_h); keys and values go into the cache."""
    heads, kv_heads, head_dim = step.heads, step.kv_heads, step.head_dim
    normed = F.rms_norm(x, x.shape[-1:], layer.input_norm, step.eps)
    qkv = F.linear(normed, *layer.qkv).view(len(x), heads + 2 * kv_heads, head_dim)
    qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
    qk = qk * step.cos + qk.roll(head_dim // 2, -1) * step.sin
    q, k = qk.split((heads, kv_heads), dim=1)
    layer_cache["key"][step.rows, :, step.positions] = k.to(layer_cache["key"].dtype)
    layer_cache["value"][step.rows, :, step.positions] = v.to(layer_cache["value"].dtype)
    # The heads of a group share their keys: they become several queries, and keys are not repeated.
    return q.view(len(x), kv_heads, heads // kv_heads, head_dim)


def attend(q: Tensor, layer_cache: dict[str, Tensor], mask: Tensor) -> Tensor:
    """(B, H_kv, G, D_h) queries over the first S slots, mask (B, 1, 1, S) -> (B, H_kv, G, D_h)."""
    k, v = (layer_cache[name][:, :, : mask.shape[-1]].to(q.dtype) for name in ("key", "value"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def out_of_attention(x: Tensor, attended: Tensor, layer: Layer, step: Step) -> Tensor:
    """The rest of a layer: x (B, D) and what was attended to (B, H_kv, G, D_h) -> (B, D)."""
    x = x + F.linear(attended.reshape(len(x), -1), *layer.o)
    gate, up = F.linear(F.rms_norm(x, x.shape[-1:], layer.post_norm, step.eps), *layer.gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, *layer.down)


def between_attentions(
    x: Tensor, attended: Tensor, layer: Layer, following: Layer, layer_cache: dict[str, Tensor], step: Step
) -> tuple[Tensor, Tensor]:
    """From one layer's attention to the next one's queries: (x (B, D), q (B, H_kv, G, D_h))."""
    x = out_of_attention(x, attended, layer, step)
    return x, into_attention(x, following, layer_cache, step)


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
            except RuntimeError as error:  # of the driver, the allocator, a kernel's compiler
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
                    # Not `torch.cuda.graph`, which waits for the device and empties the allocator's caches.
                    graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                    try:
                        function()
                    except BaseException:
                        with suppress(RuntimeError):  # the first error is the one to report
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


class StaticCache:
    """A small cache whose memory stays between answers, so that graphs recorded on it serve the next one too.

    It is as wide as the last batch; what needs more than `max_bytes` stays where it is.
    """

    def __init__(self, text_config, max_bytes: int):
        self._config, self._max_bytes = text_config, max_bytes
        self.cache: KVCache | None = None
        self._user: weakref.ref[Tensor] | None = None  # a tensor of the cache that was adopted last

    def adopt(self, kv_cache: KVCache, filled: int, needed: int) -> None:
        """Move a cache's first `filled` positions into the static memory, unless `needed` do not fit there or
        another cache is in it.

        The list and its dicts stay the same objects and get other tensors, so nobody else may hold on to
        the old ones.
        """
        config, like, rows = self._config, kv_cache[0]["key"], kv.rows(kv_cache)
        each = kv.bytes_per_token(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, like.dtype
        )
        positions = min(self._max_bytes // (each * rows) // BUCKET * BUCKET, config.max_position_embeddings)
        if needed > positions or (self._user is not None and self._user() is not None):
            return
        if self.cache is None or kv.rows(self.cache) != rows or self.cache[0]["key"].dtype != like.dtype:
            self.cache = None  # the old memory is freed before the new one is taken
            self.cache = kv.allocate_for(config, rows, positions, like=like)
        # Tensors of their own, which live as long as the user's cache.
        for layer, target in zip(kv_cache, kv.view(self.cache, positions), strict=True):
            for name, tensor in target.items():
                tensor[:, :, :filled] = layer[name][:, :, :filled]
            layer.update(target)
        self._user = weakref.ref(kv_cache[0]["key"])

    def forget(self) -> None:
        """Leave the memory to its user."""
        self.cache = self._user = None


class _Run:
    """Buffers of one answer at a time: rows that are sampled in one way and stop at the same ids."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler.clone()
        rows, device = len(sampler.stopped), sampler.stopped.device
        self.token = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        # (B + 2,): the tokens, whether all rows have stopped, whether all logits were finite.
        self.flags = torch.zeros(rows + 2, dtype=torch.int64, device=device)
        self._cuda = device.type == "cuda"
        self._on_host = torch.zeros(LAG + 1, rows + 2, dtype=torch.int64, pin_memory=self._cuda)
        self._copied = [torch.cuda.Event() for _ in self._on_host] if self._cuda else []

    @property
    def state(self) -> list[Tensor]:
        return [self.token, self.position, self.flags, *self.sampler.state]

    def sample(self, logits: Tensor) -> None:
        """Logits (B, V) to `token` and `flags`."""
        token = self.sampler.sample(logits)
        self.token.copy_(token)
        flags = torch.stack((self.sampler.stopped.all(), self.sampler.finite))
        torch.cat((token[:, 0], flags.long()), out=self.flags)

    def push(self, number: int) -> None:
        """Copy the flags to the host as they will be after everything launched so far."""
        slot = number % len(self._on_host)
        self._on_host[slot].copy_(self.flags, non_blocking=True)
        if self._cuda:
            self._copied[slot].record(torch.cuda.current_stream(self.flags.device))

    def read(self, number: int) -> Tensor:
        """The flags of `push(number)`, after which at most `LAG` others were pushed."""
        slot = number % len(self._on_host)
        if self._cuda:
            self._copied[slot].synchronize()
        return self._on_host[slot].clone()


class GraphStep:
    """A decode step that runs the loop itself (`generation.steps.DecodeLoop`), or one token at a time.

    Args:
        language_model: a `LanguageModel` that `unsupported` has nothing against.
        backend: of torch.compile, or None.
    """

    def __init__(self, language_model, backend: str | None = None):
        self._decoder = FusedDecoder(language_model, backend)
        self._start()

    def _start(self) -> None:
        """Forget what is bound to the addresses of replaced weights."""
        model = self._decoder.model
        weights = sum(parameter.nbytes for parameter in model.parameters())
        self._device = model.norm.weight.device
        self.graphs = Graphs(self._device)
        self.static = StaticCache(model.config, int(STATIC_SHARE * weights))
        self._runs: dict[tuple, list[_Run]] = {}  # those that are free, by rows and signature
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None  # token ids, positions, logits
        self._last: tuple | None = None  # batch, cache and weights of the last call

    @property
    def failure(self) -> str | None:
        """Why steps run without a graph from some point on, or None."""
        return self.graphs.failure

    @torch.no_grad()
    def rehearse(self) -> str | None:
        """Decode two tokens of one row, so that a failure is known before anyone waits for an answer: why it
        fails, or None."""
        model = self._decoder.model
        options = GenerationOptions(max_new_tokens=2, stop_token_ids=())
        try:
            cache = kv.allocate_for(model.config, 1, 2, model.norm.weight, model.cache_dtype)
            sampler = Sampler(options, 1, 0, self._device, None)
            position = CachePosition(cache, (1,), self._device)
            logits = model.norm.weight.new_zeros(1, model.config.vocab_size)
            with suppress(NotFiniteError):  # reported with the answer
                for _ in self.decode(logits, sampler, position, options.max_new_tokens):
                    pass
        except RuntimeError as error:
            return first_line(error)
        return self.failure

    def _decode(self, token: Tensor, cache: KVCache, position: Tensor, kv_len: int) -> Tensor:
        """(B, 1) ids at (B,) positions -> (B, V) logits; `kv_len` positions of the cache are read."""
        if self._device.type != "cuda":
            return self._decoder(token, cache, position, kv_len)
        # Flash attention takes no mask, and cuDNN plans its kernels anew for each length.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return self._decoder(token, cache, position, kv_len)

    def _fixed(self, kv_cache: KVCache) -> KVCache:
        """Tensors of its own for a graph, because the caller may put others into the list later. Their length
        counts as dynamic, so that nothing is compiled for one length."""
        cache = kv.view(kv_cache, kv.capacity(kv_cache))
        if self._decoder.compiled:
            for layer in cache:
                for tensor in layer.values():
                    torch._dynamo.maybe_mark_dynamic(tensor, 2)
        return cache

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        """(B, 1) ids -> (B, V) logits, as the eager step gives them."""
        batch, addresses, model = len(token_ids), buffer_addresses(kv_cache), self._decoder.model
        # The weights may be others in a scheduler's next run.
        call = batch, addresses, model.norm.weight.data_ptr(), model.lm_head.weight.data_ptr()
        if call != self._last:
            if self._decoder.refresh():
                self._start()
            self._last = call
        if self._buffers is None or len(self._buffers[0]) < batch:
            self.graphs.clear()  # they are bound to the old buffers
            self._buffers = (
                torch.zeros(batch, 1, dtype=torch.int64, device=self._device),
                torch.zeros(batch, dtype=torch.int64, device=self._device),
                model.norm.weight.new_zeros(batch, model.config.vocab_size),
            )
        token, position, logits = (buffer[:batch] for buffer in self._buffers)
        token.copy_(token_ids)
        if isinstance(start_pos, int):
            position.fill_(start_pos)
            kv_len = min(bucket_of(start_pos + 1), kv.capacity(kv_cache))
        else:
            position.copy_(start_pos)
            kv_len = kv.capacity(kv_cache)  # a view of fitting length, see CachePosition

        def make() -> Callable[[], None]:
            cache = self._fixed(kv_cache)

            def step() -> None:
                logits.copy_(self._decode(token, cache, position, kv_len))

            return step

        self.graphs.get((batch, addresses, kv_len), (batch, kv_len), make, [])()
        return logits.clone()

    @torch.no_grad()
    def decode(
        self, logits: Tensor, sampler: Sampler, position: CachePosition, max_new_tokens: int
    ) -> Iterator[Tensor]:
        """`generation.decoding.decode`, with tokens on the host."""
        if self._decoder.refresh():
            self._start()
        filled, given = position.longest, 0
        self.static.adopt(position.kv_cache, filled, filled + max_new_tokens - 1)
        free = self._runs.setdefault((len(sampler.stopped), sampler.signature), [])
        if len(self._runs) > MAX_SIGNATURES:
            self._runs.pop(next(iter(self._runs)))
        run = free.pop() if free else _Run(sampler)
        try:
            for token in self._loop(run, logits, sampler, position, max_new_tokens):
                given += 1
                yield token
        finally:
            if not run.sampler.finite.item():  # even masked, NaN would reach the next answer
                self.static.forget()
                for layer in position.kv_cache:
                    for tensor in layer.values():
                        tensor[:, :, filled + max(0, given - 1) :] = 0  # the last token is not in it
            free.append(run)

    def _loop(
        self, run: _Run, logits: Tensor, sampler: Sampler, position: CachePosition, count: int
    ) -> Iterator[Tensor]:
        """`decode` in the run's buffers.

        While one token is waited for, up to `LAG` later steps have been launched. They are in vain only if
        that token, or one after it, turns out to be the last.
        """
        run.sampler.load(sampler)
        run.sample(logits)
        if isinstance(position.start_pos, int):
            run.position.fill_(position.start_pos)  # a copy from the host would wait for the device
        else:
            run.position.copy_(position.start_pos)
        run.push(0)
        launched, kv_len = 1, 0
        for number in range(count):
            ahead = min(number + 1 + LAG, count)
            # No cache is grown for a step that may be in vain.
            while launched <= number or (launched < ahead and not position.full):
                kv_len = 0 if position.full else kv_len  # a grown cache lies somewhere else
                position.reserve()
                if position.longest > kv_len:
                    kv_len = min(bucket_of(position.longest), kv.capacity(position.kv_cache))
                    replay = self.graph(run, position.kv_cache, kv_len)
                replay()
                run.push(launched)
                launched += 1
            copied = run.read(number)
            *_, all_stopped, finite = copied.tolist()
            if not finite:
                raise NotFiniteError(int(run.sampler.num_finite) + 1)
            yield copied[:-2, None]
            if all_stopped:
                break
        sampler.load(run.sampler)
        if all_stopped:
            sampler.finite.fill_(True)  # whatever the steps in vain made of it
        sampler.check_finite()

    def graph(self, run: _Run, kv_cache: KVCache, kv_len: int) -> Callable[[], None]:
        """What runs one step of a run, in a cache of which `kv_len` positions are read."""

        def make() -> Callable[[], None]:
            cache = self._fixed(kv_cache)

            def step() -> None:
                logits = self._decode(run.token, cache, run.position, kv_len)
                run.position += 1
                run.sample(logits)

            return step

        shape = len(run.token), kv_len, run.sampler.signature
        return self.graphs.get((run, buffer_addresses(kv_cache), kv_len), shape, make, run.state)


def first_line(error: Exception) -> str:
    """The message without the C++ stack."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


def buffer_addresses(kv_cache: KVCache) -> tuple:
    """The addresses of all of a cache: a new one may reuse part of an old one's freed memory."""
    key = kv_cache[0]["key"]
    addresses = tuple(tensor.data_ptr() for layer in kv_cache for tensor in layer.values())
    return addresses, key.stride(), key.dtype
