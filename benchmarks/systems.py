"""What benchmarks/decode.py and first_token.py time: Ocelli beside its peers, and how fast memory is read."""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Unavailable, now
from benchmarks.peers import (
    WARM_UP,
    LlamaCpp,
    OpenVINO,
    Transformers,
    TransformersStatic,
    all_bytes,
    bytes_read,
    cache_bytes,
)
from benchmarks.shapes import build_checkpoint, fill, prompt, prompt_tokens
from generation import kv_cache as kv
from generation.decoding import GenerationOutput, Sampler, decode
from generation.draft import draft_stream
from generation.fast.native.build import NoCompiler, find_compiler
from generation.kv_cache import CachePosition
from generation.prefix import FeatureCache
from generation.session import Session
from generation.steps import step_of

DRAFT_TOKENS = 64  # at most: a draft ends by itself when it has taken its share of the time


class CompiledStep:
    """The eager step as one graph of torch.compile, its cache of a fixed length and positions on the device:
    what PyTorch makes of a decode step without kernels of one's own."""

    def __init__(self, language_model, device: str):
        self._step = step_of(None, language_model)
        options: dict[str, Any] = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "eager"}
        self._compiled = torch.compile(self._step, fullgraph=True, **options)
        self._cache: kv.KVCache | None = None

    def __call__(self, token_ids: Tensor, kv_cache: kv.KVCache, start_pos: int | Tensor) -> Tensor:
        if kv_cache is not self._cache:  # a graph writes to memory that stays
            self._cache = kv_cache
            for tensor in (tensor for layer in kv_cache for tensor in layer.values()):
                torch._dynamo.mark_static_address(tensor)
        if isinstance(start_pos, int):
            start_pos = torch.full((len(token_ids),), start_pos, device=token_ids.device)
        torch.compiler.cudagraph_mark_step_begin()
        return self._compiled(token_ids, kv_cache, start_pos).clone()


class Ours:
    """Our model: the eager step, the fast one, the eager one compiled, or nothing kept at all."""

    def __init__(self, setup: dict):
        self.shape, self.device = setup["shape"], setup["device"]
        self.kind = setup["system"].removeprefix("ours-")
        checkpoint = build_checkpoint(setup, fast=self.kind == "fast")
        self.model, self.step = checkpoint.model, checkpoint.decode_step
        self.info: dict[str, Any] = {"step": checkpoint.decode_step_name}
        if self.kind == "compiled":
            self.step = CompiledStep(self.model.language_model, self.device)
        if self.kind == "fast":
            if self.step is None:
                raise Unavailable(self.info["step"])
            start = now(self.device)
            if self.device == "cuda":  # compiled there when it is first used
                self._answer(prompt(self.shape, 0, device=self.device), 2)
            self.info["compile_seconds"] = checkpoint.load_seconds + now(self.device) - start
        self.weight_bytes = bytes_read(self.model.language_model)
        self.model_bytes = all_bytes(self.model)

    def cache_bytes(self, positions: int) -> int:
        dtype = self.model.language_model.cache_dtype
        return 0 if self.kind == "no-cache" else cache_bytes(self.shape, positions, dtype)

    def _answer(self, inputs: dict[str, Tensor], tokens: int) -> GenerationOutput:
        cached = self.kind != "no-cache"
        return self.model.generate_detailed(
            **inputs,
            max_new_tokens=tokens,
            stop_token_ids=(),
            use_cache=cached,
            decode_step=self.step if cached else None,
        )

    def first_token(self, tiles: int, image: int) -> dict:
        inputs = prompt(self.shape, tiles, device=self.device, image=image)
        start = now(self.device)
        generated = self._answer(inputs, 1)
        reply = {"total": now(self.device) - start}
        reply |= {part: generated.seconds[part] for part in ("vision", "prefill")}
        return reply | (self._drafted(inputs) if self.kind == "fast" and tiles > 1 else {})

    def _drafted(self, inputs: dict[str, Tensor]) -> dict:
        """The same prompt with a draft from its last tile: seconds to the first word of the draft, where one
        is made, and to the first token of the answer after it."""
        whole = prompt(self.shape, 1, device=self.device) | {"pixel_values": inputs["pixel_values"][:, -1:]}
        options = self.model.generation_options(
            max_new_tokens=DRAFT_TOKENS, stop_token_ids=(), decode_step=self.step
        )
        start = now(self.device)
        session = Session(self.model, FeatureCache(self.model))
        stream = draft_stream(session, inputs, whole, options)
        times = [now(self.device) - start for _ in stream.draft()]
        if not times:
            return {}
        next(iter(stream))
        return {"draft": times[0], "with_draft": now(self.device) - start}

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        return self.model.encode_images(pixels)

    @torch.no_grad()
    def decode(self, context: int, tokens: int, batch: int, tiles: int | None) -> dict | None:
        if self.kind == "no-cache":
            if tiles is None or context != prompt_tokens(self.shape, tiles) or batch > 1:
                return None
            generated = self._answer(prompt(self.shape, tiles, device=self.device), 2)
            return {"seconds": generated.seconds["decode"], "steps": 1}
        text, model = self.model.config.text, self.model
        like = torch.empty(0, dtype=model.language_model.cache_dtype, device=self.device)
        cache = kv.allocate_for(text, batch, context + WARM_UP + tokens, like=like)
        for layer in cache:
            fill(layer["key"], 1.0), fill(layer["value"], 1.0, start=7919)
        options = model.generation_options(max_new_tokens=WARM_UP + tokens + 1, stop_token_ids=())
        chooser = Sampler(options, batch, 0, self.device, None)
        cursor = CachePosition(cache, (context,) * batch, self.device)
        logits = fill(torch.empty(batch, text.vocab_size, device=self.device), 1.0)
        step = step_of(self.step, model.language_model)
        stream = decode(step, logits, chooser, cursor, options.max_new_tokens)
        for _ in range(WARM_UP + 1):
            next(stream)
        start = now(self.device)
        for _ in range(tokens):  # each one a step and the choice of a token
            next(stream)
        return {"seconds": now(self.device) - start, "steps": tokens}


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


DECODERS: dict[str, Callable[[dict], Any]] = {
    "ours-fast": Ours,
    "ours-compiled": Ours,
    "ours-eager": Ours,
    "ours-no-cache": Ours,
    "transformers": Transformers,
    "transformers-static": TransformersStatic,
    "llama.cpp": LlamaCpp,
}
READERS: dict[str, Callable[[dict], Any]] = {
    "ours-fast": Ours,
    "ours-eager": Ours,
    "transformers": Transformers,
    "openvino": OpenVINO,
    "llama.cpp": LlamaCpp,
}
