"""What benchmarks/decode.py times: Ocelli, transformers and llama.cpp, and how fast memory can be read.

A system answers `first_token(tiles)` with seconds, split into vision and prefill, and
`decode(context, tokens, batch, tiles)` with the seconds of that many steps after a cache of `context`
positions, whose values are random, because their content costs nothing. `weight_bytes` and
`cache_bytes(positions)` are what a step reads. A system that cannot do a job answers None.
"""

from __future__ import annotations

import ctypes
import importlib.util
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Unavailable, now
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
from generation import kv_cache as kv
from generation.decoding import CacheCursor, Chooser, DecodeStep, decode, eager_step
from generation.fast.choose_step import fast_step
from generation.fast.native.build import NoCompiler, find_compiler, load_library
from models.config import TextConfig

WARM_UP = 3  # steps before the clock starts: graphs are captured, libraries choose their kernels


def bytes_read(language_model) -> int:
    """Bytes of weights that a decode step reads: all but the embedding table, of which it needs one row."""
    tensors = {**dict(language_model.named_parameters()), **dict(language_model.named_buffers())}
    return sum(tensor.nbytes for name, tensor in tensors.items() if not name.startswith("embed_tokens"))


def all_bytes(model) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def cache_bytes(shape: str, positions: int, dtype: torch.dtype) -> int:
    text = SHAPES[shape].text
    per_token = kv.bytes_per_token(text.num_hidden_layers, text.num_key_value_heads, text.head_dim, dtype)
    return positions * per_token


class Ours:
    """Our model: the eager step, the fast one, or nothing kept at all."""

    def __init__(self, setup: dict):
        self.shape, self.device = setup["shape"], setup["device"]
        self.kind = setup["system"].removeprefix("ours-")
        self.model = build_precision(setup, packed=self.kind == "fast")
        self.info: dict[str, Any] = {}
        self.step: DecodeStep | None = None
        if self.kind == "fast":
            self._compile()
        self.weight_bytes = bytes_read(self.model.language_model)
        self.model_bytes = all_bytes(self.model)

    def _compile(self) -> None:
        """The fast step, made twice: compiled, and opened again."""
        for name in ("compile_seconds", "open_seconds"):
            load_library.cache_clear()
            start = now(self.device)
            self.step, how = fast_step(self.model.language_model)
            if self.step is not None and self.device == "cuda":  # compiled there when it is first used
                ids = words(self.shape, 1, 8)[None].to(self.device)
                self.model.generate(ids, max_new_tokens=2, stop_token_ids=(), decode_step=self.step)
            self.info |= {name: now(self.device) - start, "step": how}
        if self.step is None:
            raise Unavailable(how)

    def cache_bytes(self, positions: int) -> int:
        dtype = self.model.language_model.cache_dtype
        return 0 if self.kind == "no-cache" else cache_bytes(self.shape, positions, dtype)

    def _generate(self, tiles: int, tokens: int):
        cached = self.kind != "no-cache"
        return self.model.generate_detailed(
            **prompt(self.shape, tiles, device=self.device),
            max_new_tokens=tokens,
            stop_token_ids=(),
            use_cache=cached,
            decode_step=self.step if cached else None,
        )

    def first_token(self, tiles: int) -> dict:
        start = now(self.device)
        generated = self._generate(tiles, 1)
        total = now(self.device) - start
        return {"total": total, **{part: generated.seconds[part] for part in ("vision", "prefill")}}

    @torch.no_grad()
    def decode(self, context: int, tokens: int, batch: int, tiles: int | None) -> dict | None:
        if self.kind == "no-cache":
            if tiles is None or context != prompt_tokens(self.shape, tiles) or batch > 1:
                return None
            return {"seconds": self._generate(tiles, 2).seconds["decode"], "steps": 1}
        text, model = self.model.config.text, self.model
        like = torch.empty(0, dtype=model.language_model.cache_dtype, device=self.device)
        cache = kv.allocate_for(text, batch, context + WARM_UP + tokens, like=like)
        for layer in cache:
            fill(layer["key"], 1.0), fill(layer["value"], 1.0, start=7919)
        options = model.generation_options(max_new_tokens=WARM_UP + tokens + 1, stop_token_ids=())
        chooser = Chooser(options, batch, 0, self.device, None)
        cursor = CacheCursor(cache, (context,) * batch, self.device)
        logits = fill(torch.empty(batch, text.vocab_size, device=self.device), 1.0)
        step = self.step or eager_step(model.language_model)
        stream = decode(step, logits, chooser, cursor, options.max_new_tokens)
        for _ in range(WARM_UP + 1):
            next(stream)
        start = now(self.device)
        for _ in range(tokens):  # each one a step and the choice of a token
            next(stream)
        return {"seconds": now(self.device) - start, "steps": tokens}


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
        self.info: dict[str, Any] = {}
        self._marks: list[float] = []
        inner = self.model.model
        inner.vision_model.register_forward_pre_hook(lambda *_: self._marks.append(now(self.device)))
        inner.connector.register_forward_hook(lambda *_: self._marks.append(now(self.device)))
        self.weight_bytes = bytes_read(inner.text_model) + self.model.lm_head.weight.nbytes
        self.model_bytes = all_bytes(self.model)

    def cache_bytes(self, positions: int) -> int:
        return cache_bytes(self.shape, positions, self.dtype)

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

    @torch.no_grad()
    def decode(self, context: int, tokens: int, batch: int, tiles: int | None) -> dict:
        from transformers import DynamicCache

        text, cache = SHAPES[self.shape].text, DynamicCache(config=self.model.config)
        size = (batch, text.num_key_value_heads, context, text.head_dim)
        for layer in range(text.num_hidden_layers):
            random = [fill(torch.empty(size, dtype=self.dtype, device=self.device), 1.0) for _ in range(2)]
            cache.update(*random, layer)
        ids = words(self.shape, 1, context + 1).expand(batch, -1).to(self.device)
        clock = Clock()
        got = self.generate(WARM_UP + tokens + 1, input_ids=ids, past_key_values=cache, streamer=clock)
        assert got.shape[1] == context + 1 + WARM_UP + tokens + 1, "transformers stopped early"
        return {"seconds": clock.times[-1] - clock.times[-1 - tokens], "steps": tokens}


class TransformersStatic(Transformers):
    """transformers' decoder with its static cache, the decode step compiled as one graph."""

    def __init__(self, setup: dict):
        super().__init__(setup)
        mode = "reduce-overhead" if self.device == "cuda" else "default"
        self._step = torch.compile(self._one_token, mode=mode, fullgraph=True)
        self._caches: dict = {}  # kept, as another cache would be compiled for anew

    def _one_token(self, ids: Tensor, cache, positions: Tensor) -> Tensor:
        """(B, 1) ids -> (B, 1) ids."""
        out = self.model.model.text_model(input_ids=ids, past_key_values=cache, position_ids=positions)
        return self.model.lm_head(out.last_hidden_state[:, -1]).argmax(-1, keepdim=True)

    def _cache(self, context: int, batch: int, room: int):
        from transformers import StaticCache

        if (room, batch) not in self._caches:
            text = SHAPES[self.shape].text
            cache = StaticCache(config=self.model.config, max_cache_len=room)
            device = torch.device(self.device)
            cache.early_initialization(batch, text.num_key_value_heads, text.head_dim, self.dtype, device)
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


# ------------------------------------------------------------------------------------------- llama.cpp
FORMATS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}  # llama.cpp's names of our precisions


class LlamaCpp:
    """llama.cpp on a GGUF file of the text part's shape. It sees no image, so its first token is one of text
    alone; choosing a token is not counted, in its favour; its cache is in 16 bits, its default."""

    def __init__(self, setup: dict):
        for package in ("gguf", "llama_cpp"):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"{package} is not installed (requirements-bench.txt)")
        import llama_cpp

        if setup["device"] == "cuda" and not llama_cpp.llama_supports_gpu_offload():
            raise Unavailable("llama-cpp-python is built without CUDA")
        self.shape, self.info = setup["shape"], {"format": FORMATS[setup["precision"]]}
        path = Path(setup["folder"]) / f"{self.info['format']}.gguf"
        self.weight_bytes = write_gguf(SHAPES[self.shape].text, self.info["format"], path)
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

    def cache_bytes(self, positions: int) -> int:
        return cache_bytes(self.shape, positions, torch.float16)

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


def gguf_shapes(config: TextConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes (rows, columns) of llama.cpp's tensors for an untied Llama."""
    width, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (width,),
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_output": (width, queries),
        "ffn_norm": (width,),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes | {"output_norm.weight": (width,), "output.weight": (config.vocab_size, width)}


def write_gguf(config: TextConfig, kind: str, path: Path) -> int:
    """Write random weights; returns the bytes that one token reads. All layers get the same numbers, which
    keeps memory small; speed does not depend on them. The tokens have names and no meaning."""
    import gguf

    if config.vocab_size < 3 + 256:
        raise ValueError(
            f"a GGUF vocabulary needs 256 bytes and 3 control tokens, got {config.vocab_size} ids"
        )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    # A sentencepiece vocabulary: three control tokens, the 256 bytes that it must have, and names.
    more, types = config.vocab_size - 259, gguf.TokenType
    pieces = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces + [f"token{number}".encode() for number in range(more)])
    writer.add_token_scores([0.0] * 3 + [-float(number) for number in range(config.vocab_size - 3)])
    kinds = [types.UNKNOWN, types.CONTROL, types.CONTROL, *[types.BYTE] * 256, *[types.NORMAL] * more]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])

    plain, wanted = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType[kind]
    random, kept, read = np.random.default_rng(0), {}, 0
    for name, shape in gguf_shapes(config).items():
        part = name.split(".")[-2], shape  # the same in all layers
        if part not in kept and len(shape) == 1:
            kept[part] = np.ones(shape, np.float32), plain
        elif part not in kept:
            numbers = random.standard_normal(shape, np.float32) * shape[1] ** -0.5
            kept[part] = gguf.quants.quantize(numbers, wanted), wanted
        data, raw_type = kept[part]
        writer.add_tensor(name, data, raw_dtype=raw_type)
        read += data.nbytes if name != "token_embd.weight" else 0
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


# --------------------------------------------------------------------------------------- memory's speed
def read_bandwidth(device: str, size: int) -> dict[str, float]:
    """Bytes a second that all threads read, by way of reading: torch's sum, and 1 to 8 streams a thread in C,
    where a compiler is there. Memory gives a core more when it reads in several places at once.

    Args:
        size: bytes of the buffer: more than any cache holds.
    """
    buffer = torch.ones(64, size // 256, device=device)

    def speed(way) -> float:
        seconds = []
        for _ in range(8):
            start = now(device)
            way()
            seconds.append(now(device) - start)
        return buffer.nbytes / statistics.median(seconds)

    speeds = {"sum": speed(lambda: buffer.sum(1))}
    if device != "cpu":
        return speeds
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(__file__).with_name("read_memory.c"), Path(folder) / "read_memory.so"
        flags = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
        try:
            subprocess.run([find_compiler(), *flags, source, "-o", library], check=True, capture_output=True)
        except (NoCompiler, subprocess.CalledProcessError):
            return speeds
        read = ctypes.CDLL(str(library)).read_memory
        read.restype = ctypes.c_uint64
        read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        place, vectors = buffer.data_ptr(), buffer.nbytes // 32
        for streams in (1, 2, 4, 8):
            speeds[f"{streams} streams"] = speed(
                lambda streams=streams: read(place, vectors, streams, torch.get_num_threads())
            )
    return speeds


SYSTEMS: dict[str, Callable[[dict], Any]] = {
    "ours-fast": Ours,
    "ours-eager": Ours,
    "ours-no-cache": Ours,
    "transformers": Transformers,
    "transformers-static": TransformersStatic,
    "llama.cpp": LlamaCpp,
}
