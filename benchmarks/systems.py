"""What decode.py times: ours, transformers and llama.cpp, each behind the same two questions.

A system answers `first_token(tiles)` with seconds, split into vision and prefill, and
`decode(context, tokens, batch, tiles)` with the seconds of that many decode steps behind a cache of `context`
positions, whose values are random: what is in them costs nothing. `weight_bytes` and `cache_bytes(positions)`
are what a step reads. A system that cannot do a job answers None.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import now
from benchmarks.gguf_file import FORMATS, write_gguf
from benchmarks.shapes import (
    DTYPES,
    SHAPES,
    build_precision,
    build_transformers,
    fill,
    prompt,
    prompt_tokens,
    words,
)
from benchmarks.workers import Unavailable
from generation import kv_cache as kv
from generation.decoding import CachePosition, Sampler, decode, eager_step
from generation.fast.choose_step import fast_step
from generation.fast.native.step import load_library

WARM_UP = 3  # steps before the clock starts: graphs are captured, libraries choose their kernels
NO_CACHE_TOKENS = 1


def bytes_read(language_model, embedding: str) -> int:
    """Bytes of weights that a decode step reads: all but the embedding table, of which it needs one row."""
    tensors = {**dict(language_model.named_parameters()), **dict(language_model.named_buffers())}
    return sum(tensor.nbytes for name, tensor in tensors.items() if not name.startswith(embedding))


def all_bytes(model) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


class Ours:
    """Our model: the eager step, the fast one, or nothing kept at all."""

    def __init__(self, setup: dict, kind: str):
        self.shape, self.device, self.kind = setup["shape"], setup["device"], kind
        self.model = build_precision(setup, packed=kind == "fast")
        self.info, self.step = {}, None
        if kind == "fast":
            self._compile()
        self.weight_bytes = bytes_read(self.model.language_model, "embed_tokens")
        self.model_bytes = all_bytes(self.model)

    def _compile(self) -> None:
        """The fast step, made twice: compiled, and opened again."""
        for name in ("compile_seconds", "open_seconds"):
            load_library.cache_clear()
            start = now(self.device)
            self.step, how = fast_step(self.model.language_model)
            if self.step is not None and self.device == "cuda":  # there, compiled when first used
                ids = words(self.shape, 1, 8)[None].to(self.device)
                self.model.generate(ids, max_new_tokens=2, stop_token_ids=(), decode_step=self.step)
            self.info |= {name: now(self.device) - start, "step": how}
        if self.step is None:
            raise Unavailable(how)

    def cache_bytes(self, positions: int) -> int:
        if self.kind == "no-cache":
            return 0
        text, dtype = self.model.config.text, self.model.language_model.cache_dtype
        return positions * kv.bytes_per_token(
            text.num_hidden_layers, text.num_key_value_heads, text.head_dim, dtype
        )

    def _options(self, tokens: int) -> dict:
        cached = self.kind != "no-cache"
        return {
            "max_new_tokens": tokens,
            "stop_token_ids": (),
            "use_cache": cached,
            "decode_step": self.step if cached else None,
        }

    def first_token(self, tiles: int) -> dict:
        inputs = prompt(self.shape, tiles, device=self.device)
        start = now(self.device)
        made = self.model.generate_detailed(**inputs, **self._options(1))
        total = now(self.device) - start
        return {"total": total, "vision": made.seconds["vision"], "prefill": made.seconds["prefill"]}

    @torch.no_grad()
    def decode(self, context: int, tokens: int, batch: int, tiles: int | None) -> dict | None:
        if self.kind == "no-cache":
            return self._decode_without_cache(context, batch, tiles)
        text, model = self.model.config.text, self.model
        like = torch.empty(0, dtype=model.language_model.cache_dtype, device=self.device)
        cache = kv.allocate_for(text, batch, context + WARM_UP + tokens, like=like)
        for layer in cache:
            fill(layer["key"], 1.0), fill(layer["value"], 1.0, start=7919)
        options = model.generation_options(max_new_tokens=WARM_UP + tokens + 1, stop_token_ids=())
        chooser = Sampler(options, batch, 0, self.device, None)
        cursor = CachePosition(cache, (context,) * batch, self.device)
        logits = fill(torch.empty(batch, text.vocab_size, device=self.device), 1.0)
        step = self.step or eager_step(model.language_model)
        stream = decode(step, logits, chooser, cursor, options.max_new_tokens)
        for _ in range(WARM_UP + 1):
            next(stream)
        start = now(self.device)
        for _ in range(tokens):  # each one a step and the choice of a token
            next(stream)
        return {"seconds": now(self.device) - start, "steps": tokens}

    def _decode_without_cache(self, context: int, batch: int, tiles: int | None) -> dict | None:
        if tiles is None or context != prompt_tokens(self.shape, tiles) or batch > 1:
            return None
        inputs = prompt(self.shape, tiles, device=self.device)
        made = self.model.generate_detailed(**inputs, **self._options(1 + NO_CACHE_TOKENS))
        return {"seconds": made.seconds["decode"], "steps": NO_CACHE_TOKENS}


class Clock:
    """A streamer for transformers' generate that notes when each token came."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    """transformers' own generate with its dynamic cache; first tokens are timed at its modules."""

    def __init__(self, setup: dict):
        if setup["precision"] not in DTYPES:
            raise Unavailable(f"transformers has no {setup['precision']} weights without further packages")
        self.shape, self.device = setup["shape"], setup["device"]
        self.dtype = DTYPES[setup["precision"]]
        self.model = build_transformers(self.shape, self.dtype, self.device)
        self.info, self._marks = {}, []
        inner = self.model.model
        inner.vision_model.register_forward_pre_hook(lambda *_: self._marks.append(now(self.device)))
        inner.connector.register_forward_hook(lambda *_: self._marks.append(now(self.device)))
        self.weight_bytes = bytes_read(inner.text_model, "embed_tokens") + self.model.lm_head.weight.nbytes
        self.model_bytes = all_bytes(self.model)

    def cache_bytes(self, positions: int) -> int:
        text = SHAPES[self.shape].text
        return positions * kv.bytes_per_token(
            text.num_hidden_layers, text.num_key_value_heads, text.head_dim, self.dtype
        )

    def generate(self, tokens: int, **inputs) -> Tensor:
        mask = torch.ones_like(inputs["input_ids"])
        return self.model.generate(**inputs, attention_mask=mask, max_new_tokens=tokens, do_sample=False)

    def first_token(self, tiles: int) -> dict:
        inputs = prompt(self.shape, tiles, device=self.device)
        self._marks.clear()
        start = now(self.device)
        self.generate(1, **inputs)
        total = now(self.device) - start
        vision = self._marks[1] - self._marks[0] if tiles else 0.0
        return {"total": total, "vision": vision, "prefill": total - vision}

    def _random(self, batch: int, positions: int) -> Tensor:
        """Keys or values (B, H_kv, S, D_h)."""
        text = SHAPES[self.shape].text
        shape = (batch, text.num_key_value_heads, positions, text.head_dim)
        return fill(torch.empty(shape, dtype=self.dtype, device=self.device), 1.0)

    @torch.no_grad()
    def decode(self, context: int, tokens: int, batch: int, tiles: int | None) -> dict:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        for layer in range(SHAPES[self.shape].text.num_hidden_layers):
            cache.update(self._random(batch, context), self._random(batch, context), layer)
        ids = words(self.shape, 1, context + 1).expand(batch, -1).to(self.device)
        clock = Clock()
        made = self.generate(WARM_UP + tokens + 1, input_ids=ids, past_key_values=cache, streamer=clock)
        assert made.shape[1] == context + 1 + WARM_UP + tokens + 1, "transformers stopped early"
        return {"seconds": clock.times[-1] - clock.times[-1 - tokens], "steps": tokens}


class TransformersStatic(Transformers):
    """transformers' decoder with its static cache, the decode step compiled as one graph."""

    def __init__(self, setup: dict):
        super().__init__(setup)
        mode = "reduce-overhead" if self.device == "cuda" else "default"
        self._step = torch.compile(self._one_token, mode=mode, fullgraph=True)
        self._caches: dict[tuple[int, int], object] = {}  # kept: another one would be compiled anew

    def _one_token(self, ids: Tensor, cache, positions: Tensor) -> Tensor:
        """(B, 1) ids -> (B, 1) ids."""
        out = self.model.model.text_model(input_ids=ids, past_key_values=cache, position_ids=positions)
        return self.model.lm_head(out.last_hidden_state[:, -1]).argmax(-1, keepdim=True)

    def _cache(self, context: int, batch: int, room: int):
        from transformers import StaticCache

        if (room, batch) not in self._caches:
            text = SHAPES[self.shape].text
            cache = StaticCache(config=self.model.config, max_cache_len=room)
            cache.early_initialization(
                batch, text.num_key_value_heads, text.head_dim, self.dtype, torch.device(self.device)
            )
            for layer in cache.layers:
                fill(layer.keys, 1.0), fill(layer.values, 1.0)
            self._caches[room, batch] = cache
        for layer in self._caches[room, batch].layers:
            layer.cumulative_length.fill_(context)
        return self._caches[room, batch]

    @torch.no_grad()
    def decode(self, context: int, tokens: int, batch: int, tiles: int | None) -> dict:
        cache = self._cache(context, batch, context + WARM_UP + tokens)
        ids = words(self.shape, 1, 1).expand(batch, 1).to(self.device)
        start = 0.0
        for number in range(WARM_UP + tokens):
            if number == WARM_UP:
                start = now(self.device)
            positions = torch.full((batch, 1), context + number, device=self.device)
            torch.compiler.cudagraph_mark_step_begin()
            ids = self._step(ids, cache, positions).clone()
        return {"seconds": now(self.device) - start, "steps": tokens}


class LlamaCpp:
    """llama.cpp on a GGUF file of the text part's shape. It has no image, so no time to first token of one;
    choosing the token is not counted, in its favour; its cache is in 16 bits, as it is by default."""

    def __init__(self, setup: dict):
        for package in ("gguf", "llama_cpp"):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"{package} is not installed (requirements-bench.txt)")
        import llama_cpp

        if setup["device"] == "cuda" and not llama_cpp.llama_supports_gpu_offload():
            raise Unavailable("llama-cpp-python is built without CUDA")
        self.shape, text = setup["shape"], SHAPES[setup["shape"]].text
        path = Path(setup["folder"]) / f"{FORMATS[setup['precision']]}.gguf"
        self.weight_bytes = write_gguf(text, FORMATS[setup["precision"]], path)
        self.model_bytes = path.stat().st_size
        self.llm = llama_cpp.Llama(
            str(path),
            n_ctx=setup["longest"],
            n_threads=setup["threads"],
            n_threads_batch=setup["threads"],
            n_batch=512,
            n_gpu_layers=-1 if setup["device"] == "cuda" else 0,
            logits_all=False,
            verbose=False,
        )
        self.info = {"format": FORMATS[setup["precision"]]}

    def cache_bytes(self, positions: int) -> int:
        text = SHAPES[self.shape].text
        return positions * kv.bytes_per_token(
            text.num_hidden_layers, text.num_key_value_heads, text.head_dim, torch.float16
        )

    def first_token(self, tiles: int) -> dict:
        ids = words(self.shape, 1, prompt_tokens(self.shape, tiles)).tolist()
        self.llm.n_tokens = 0  # forgets; eval then clears the cache from there on
        start = time.perf_counter()
        self.llm.eval(ids)
        return {"total": None, "vision": None, "prefill": time.perf_counter() - start}

    def decode(self, context: int, tokens: int, batch: int, tiles: int | None) -> dict | None:
        if batch > 1:
            return None
        self.llm.n_tokens = min(self.llm.n_tokens, context)
        ids = words(self.shape, 1, context + WARM_UP + tokens).tolist()
        if self.llm.n_tokens < context:
            self.llm.eval(ids[self.llm.n_tokens : context])
        for token in ids[context : context + WARM_UP]:
            self.llm.eval([token])
        start = time.perf_counter()
        for token in ids[context + WARM_UP :]:
            self.llm.eval([token])
        return {"seconds": time.perf_counter() - start, "steps": tokens}


SYSTEMS = {
    "ours-fast": lambda setup: Ours(setup, "fast"),
    "ours-eager": lambda setup: Ours(setup, "eager"),
    "ours-no-cache": lambda setup: Ours(setup, "no-cache"),
    "transformers": Transformers,
    "transformers-static": TransformersStatic,
    "llama.cpp": LlamaCpp,
}
