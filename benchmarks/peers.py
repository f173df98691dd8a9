"""Ocelli, transformers, llama.cpp and OpenVINO as benchmarks time them, with the same shapes and weights.

A system answers `first_token(tiles, image)` with the seconds of "vision" (tower and projector), of "prefill"
and of both in "total", as far as it has them: no two numbers of `image` have the same pixels. `features` are
those of its tower. It answers `decode(context, tokens, batch, tiles)` with the seconds of that many steps
after a cache of `context` positions, whose values are random, because their content costs nothing.
`weight_bytes` are what a step reads, and a cache of `cache_type`. A system that cannot do a job answers None.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import (
    DTYPES,
    SHAPES,
    Unavailable,
    build_checkpoint,
    build_ours,
    fill,
    fill_weights,
    median,
    now,
    prompt,
    prompt_tokens,
    tile_pixels,
    words,
)
from generation import kv_cache as kv
from generation.codes import CodedEmbedding, CodedLinear
from generation.decoding import decode_n
from generation.fast.native.build import NoCompiler, find_compiler
from generation.fast.native.step import NativeStep
from generation.features import FeatureCache
from generation.output import GenerationOutput
from generation.sampling import new_rows
from generation.session import Session
from generation.steps import Step
from inference.draft import Draft
from models.checkpoints.gguf import Place, read_header
from models.checkpoints.load import meta_init, prepare_device
from models.checkpoints.quantized import codes_of_blocks
from models.checkpoints.save import written
from models.config import TextConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel

WARM_UP = 3  # steps before the clock starts: graphs are captured, libraries choose their kernels
DRAFT_TOKENS = 64  # at most: a draft ends by itself when it has taken its share of the time


def need(*packages: str) -> list[Any]:
    """These packages, imported; Unavailable for the first one that is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise Unavailable(f"{package} is not installed (requirements-bench.txt)")
    return [importlib.import_module(package) for package in packages]


def bytes_read(language_model) -> int:
    """Bytes of weights that a decode step reads: all but the embedding table, of which it needs one row."""
    found = (language_model.named_parameters, language_model.named_buffers)
    named = (pair for each in found for pair in each(remove_duplicate=False))  # the head may be the table
    return sum(tensor.nbytes for name, tensor in named if not name.startswith("embed_tokens"))


def cache_bytes(shape: str, dtype: torch.dtype | None) -> int:
    """Of a position in a cache of that type, as far as each step reads it, keys and values; 0 without one."""
    with torch.device("meta"):
        layout = VisionLanguageModel(SHAPES[shape]).language_model.cache_layout
    attended = kv.numbers_per_token([layer for layer in layout if "key" in layer])
    return attended * dtype.itemsize if dtype else 0


# ---------------------------------------------------------------------------------------------- Ocelli
class Ours:
    """Our model: the eager step, the fast one, or nothing kept at all."""

    def __init__(self, setup: dict):
        self.shape, self.device = setup["shape"], setup["device"]
        self.kind = setup["system"].removeprefix("ours-")
        checkpoint = build_checkpoint(setup, fast=self.kind == "fast")
        self.model, self.step = checkpoint.model, checkpoint.decode_step
        self.info: dict[str, Any] = {"step": checkpoint.fast.name}
        if self.kind == "fast":
            if self.step is None:
                raise Unavailable(self.info["step"])
            start = now(self.device)
            if self.device == "cuda":  # compiled there when it is first used
                self._answer(prompt(self.shape, 0, device=self.device), 2)
            self.info["compile_seconds"] = checkpoint.load_seconds + now(self.device) - start
        self.weight_bytes = bytes_read(self.model.language_model)
        self.cache_type = None if self.kind == "no-cache" else self.model.language_model.cache_dtype

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
        times = [now(self.device) - start for _ in Draft(session, inputs, whole, options)]
        if not times:
            return {}
        next(iter(session.generate_stream(**inputs, options=options)))
        return {"draft": times[0], "with_draft": now(self.device) - start}

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        return torch.stack(tuple(self.model.encode_images(pixels)))

    @torch.no_grad()
    def decode(self, context: int, tokens: int, batch: int, tiles: int | None) -> dict | None:
        if self.kind == "no-cache":
            if tiles is None or context != prompt_tokens(self.shape, tiles) or batch > 1:
                return None
            generated = self._answer(prompt(self.shape, tiles, device=self.device), 2)
            return {"seconds": generated.seconds["decode"], "steps": 1}
        text, model = self.model.config.text, self.model
        cache = kv.allocate_for(model.language_model, batch, context + WARM_UP + tokens)
        for number, tensor in enumerate(tensor for layer in cache for tensor in layer.values()):
            fill(tensor, 1.0, start=7919 * number)
        options = model.generation_options(max_new_tokens=WARM_UP + tokens + 1, stop_token_ids=())
        rows = new_rows([torch.zeros(1, dtype=torch.int64)] * batch, options)
        logits = fill(torch.empty(batch, text.vocab_size, device=self.device), 1.0)
        step = self.step or Step(model.language_model)
        stream = decode_n(step, rows, logits, cache, context)
        for _ in range(WARM_UP + 1):
            next(stream)
        start = now(self.device)
        for _ in range(tokens):  # each one a step and the choice of a token
            next(stream)
        return {"seconds": now(self.device) - start, "steps": tokens}


_LEAVES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


class OursOfFile(Ours):
    """Our model with the codes of llama.cpp's very file: Q8_0 for int8, Q4_K_M for int4."""

    def __init__(self, setup: dict):
        self.shape, self.device, self.kind = setup["shape"], setup["device"], "fast"
        path, _ = llama_file(setup, mixed=setup["precision"] == "int4")
        with meta_init():
            self.model = VisionLanguageModel(SHAPES[self.shape])
        lm = self.model.language_model
        raw, header = np.memmap(path, mode="r"), read_header(path)
        for name, layer in [*lm.named_modules()]:
            number, leaf = name.split(".")[1:2], name.rpartition(".")[-1]
            if not isinstance(layer, nn.Linear | nn.Embedding):
                for leaf, one in [*layer.named_parameters(recurse=False)]:
                    setattr(layer, leaf, nn.Parameter(torch.ones(one.shape)))
                continue
            theirs = {"lm_head": "output", "embed_tokens": "token_embd"}.get(leaf)
            place = header.tensors[f"{theirs or f'blk.{number[0]}.{_LEAVES[leaf]}'}.weight"]
            rows = torch.from_numpy(raw[place.begin : place.end].copy()).view(place.shape[0], -1)
            codes = codes_of_blocks(rows, place.type)
            made = CodedEmbedding(codes, torch.float32) if theirs == "token_embd" else CodedLinear(codes)
            lm.set_submodule(name, made)
        self.step = NativeStep(lm.eval())
        self.info = {"step": "native C step", "format": path.stem}
        self.weight_bytes, self.cache_type = bytes_read(lm), lm.cache_dtype


# ---------------------------------------------------------------------------------------- transformers
def build_transformers(shape: str, dtype: torch.dtype, device: str):
    """transformers' model of a shape, with its sdpa attention, in eval mode."""
    transformers, initialization = need("transformers", "transformers.initialization")
    prepare_device(device)
    described, places = written(SHAPES[shape])
    config = transformers.AutoConfig.for_model(**described)
    with initialization.no_init_weights():
        model: Any = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    with meta_init():
        ours = [name for name, _ in VisionLanguageModel(SHAPES[shape]).named_parameters()]
    fill_weights(model, [places(name).name for name in ours])  # the same numbers in the same places
    model = model.to(device, dtype).eval()
    model.generation_config.eos_token_id = None  # answers are as long as they are asked to be
    return model


# Tower, projector and text of transformers' models.
_PARTS = {
    "idefics3": ("vision_model", "connector", "text_model"),
    "lfm2_vl": ("vision_tower", "multi_modal_projector", "language_model"),
}


class Clock:
    """A streamer that notes when transformers' generate gave each token."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


class Transformers:
    """transformers' own generate, with its dynamic cache or the static one, for which it compiles its step on
    CUDA; first tokens are timed at its modules."""

    def __init__(self, setup: dict):
        if setup["precision"] not in DTYPES:
            raise Unavailable(f"transformers has no {setup['precision']} weights without further packages")
        self.shape, self.device = setup["shape"], setup["device"]
        self.static, family = setup["system"] == "transformers-static", SHAPES[self.shape].family
        if family not in _PARTS or (self.static and family != "idefics3"):
            raise Unavailable(f"{setup['system']} is not measured with {self.shape}")
        self.dtype = self.cache_type = DTYPES[setup["precision"]]
        self.model = build_transformers(self.shape, self.dtype, self.device)
        self.info: dict[str, Any] = {}
        self._marks: list[float] = []
        self._tower, self._projector, text = (getattr(self.model.model, name) for name in _PARTS[family])
        self._tower.register_forward_pre_hook(lambda *_: self._marks.append(now(self.device)))
        self._projector.register_forward_hook(lambda *_: self._marks.append(now(self.device)))
        self.weight_bytes = bytes_read(text) + self.model.lm_head.weight.nbytes

    def generate(self, tokens: int, **inputs) -> Tensor:
        """Greedy; without an "attention_mask", rows of equal length."""
        inputs = {"attention_mask": torch.ones_like(inputs["input_ids"])} | inputs
        return self.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)

    def first_token(self, tiles: int, image: int) -> dict | None:
        if SHAPES[self.shape].family != "idefics3":
            return None  # its patches are packed otherwise
        inputs = prompt(self.shape, tiles, device=self.device, image=image)
        self._marks.clear()
        start = now(self.device)
        self.generate(1, **inputs)
        total = now(self.device) - start
        vision = self._marks[1] - self._marks[0] if tiles else 0.0
        return {"total": total, "vision": vision, "prefill": total - vision}

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        pixels = pixels.flatten(0, 1).to(self.device, self.dtype)
        return self._projector(self._tower(pixel_values=pixels).last_hidden_state)

    @torch.no_grad()
    def decode(self, context: int, tokens: int, batch: int, tiles: int | None) -> dict:
        (transformers,) = need("transformers")
        text, cache = SHAPES[self.shape].text, transformers.DynamicCache(config=self.model.config)
        if self.static:
            cache = transformers.StaticCache(self.model.config, max_cache_len=context + WARM_UP + tokens + 1)
        size = (batch, text.num_key_value_heads, context, text.head_dim)
        for layer in range(0 if text.layer_types else text.num_hidden_layers):  # else it reads a prompt
            random = [fill(torch.empty(size, dtype=self.dtype, device=self.device), 1.0) for _ in range(2)]
            cache.update(*random, layer)
        ids = words(self.shape, 1, context + 1).expand(batch, -1).to(self.device)
        clock = Clock()
        got = self.generate(WARM_UP + tokens + 1, input_ids=ids, past_key_values=cache, streamer=clock)
        assert got.shape[1] == context + 1 + WARM_UP + tokens + 1, "transformers stopped early"
        return {"seconds": clock.times[-1] - clock.times[-1 - tokens], "steps": tokens}


# -------------------------------------------------------------------------------------------- OpenVINO
HINTS = {"float32": "f32", "bfloat16": "bf16"}  # OpenVINO's names of our precisions


class OpenVINO:
    """OpenVINO on our tower and projector: there is no language model. int8 is nncf's quantization after
    training, calibrated on two of the tiles that are timed; what it leaves in floating point runs in the type
    that OpenVINO chooses on this machine."""

    def __init__(self, setup: dict):
        if setup["device"] != "cpu":
            raise Unavailable("OpenVINO is measured on a CPU only")
        precision, self.shape = setup["precision"], setup["shape"]
        openvino, *quantizer = need("openvino", *(["nncf"] if precision == "int8" else []))
        ours = build_ours(self.shape, torch.float32, "cpu")
        tower = nn.Sequential(ours.vision_model, ours.projector)
        tiles = tile_pixels(self.shape, 2)[0].split(1)  # (1, 3, M, M) each
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is a constant in the traced tower, as it is to be
            model = openvino.convert_model(tower, example_input=tiles[0], input=list(tiles[0].shape))
        for nncf in quantizer:
            data = nncf.Dataset([tile.numpy() for tile in tiles])
            with contextlib.redirect_stdout(sys.stderr):  # where it shows its progress
                kind = nncf.ModelType.TRANSFORMER
                model = nncf.quantize(model, data, subset_size=len(tiles), model_type=kind)
        options = {"INFERENCE_NUM_THREADS": setup["threads"]}
        options |= {"INFERENCE_PRECISION_HINT": HINTS[precision]} if precision in HINTS else {}
        compiled = openvino.compile_model(model, "CPU", options)
        self._request = compiled.create_infer_request()
        self.info = {"hint": str(compiled.get_property("INFERENCE_PRECISION_HINT"))}

    def features(self, pixels: Tensor) -> Tensor:
        """Tile by tile: several at once take it as long."""
        tiles = pixels.flatten(0, 1).split(1)
        return torch.cat([torch.from_numpy(self._request.infer([tile.numpy()])[0].copy()) for tile in tiles])

    def first_token(self, tiles: int, image: int) -> dict:
        pixels = tile_pixels(self.shape, tiles, image)
        start = time.perf_counter()
        self.features(pixels)
        return {"vision": time.perf_counter() - start}


# ------------------------------------------------------------------------------------------- llama.cpp
# llama.cpp's names of our precisions, and of the other one that "llama.cpp-k" has in place of the last
FORMATS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
OTHER = "Q4_K_M"


def llama_file(setup: dict, mixed: bool) -> tuple[Path, int]:
    """A file of random weights, and the bytes of it that a token reads."""
    kind = OTHER if mixed else FORMATS[setup["precision"]]
    path = Path(setup["folder"]) / f"{kind}.gguf"
    written = path.with_name("BF16.gguf") if mixed else path
    weight_bytes = write_gguf(SHAPES[setup["shape"]], "BF16" if mixed else kind, written)
    if mixed:  # only llama.cpp itself writes it
        (library,) = need("llama_cpp")
        parameters = library.llama_model_quantize_default_params()
        parameters.ftype, parameters.allow_requantize = library.LLAMA_FTYPE_MOSTLY_Q4_K_M, True
        names = (str(written).encode(), str(path).encode())
        if code := library.llama_model_quantize(*names, ctypes.byref(parameters)):
            raise RuntimeError(f"llama_model_quantize: code {code}")
        weight_bytes = weight_bytes * path.stat().st_size // written.stat().st_size  # about
    return path, weight_bytes


class LlamaCpp:
    """llama.cpp on a GGUF file of the text part's shape. It sees no image, so its first token is one of text
    alone; choosing a token is not counted, in its favour; its cache is in 16 bits, its default. Systems whose
    names end in "-flash" have its flash attention."""

    def __init__(self, setup: dict):
        (self.library,) = need("llama_cpp")
        if setup["device"] == "cuda" and not self.library.llama_supports_gpu_offload():
            raise Unavailable("llama-cpp-python is built without CUDA")
        self.shape, self.longest = setup["shape"], setup["longest"]
        path, self.weight_bytes = llama_file(setup, mixed="-k" in setup["system"])
        self.info, self.cache_type = {"format": path.stem}, torch.float16
        self.llm = self.library.Llama(
            str(path),
            n_ctx=self.longest, n_batch=512, n_gpu_layers=-1 if setup["device"] == "cuda" else 0,
            n_threads=setup["threads"], n_threads_batch=setup["threads"], logits_all=False, verbose=False,
            flash_attn=setup["system"].endswith("-flash"),
        )  # fmt: skip

    def first_token(self, tiles: int, image: int) -> dict:
        ids = words(self.shape, 1, prompt_tokens(self.shape, tiles)).tolist()
        self.llm.n_tokens = 0  # forgets; eval then clears the cache from there on
        start = time.perf_counter()
        self.llm.eval(ids)
        return {"prefill": time.perf_counter() - start}

    def features(self, pixels: Tensor) -> None: ...

    def decode(self, context: int, tokens: int, batch: int, tiles: int | None) -> dict:
        ids = words(self.shape, 1, context + WARM_UP + tokens).tolist()
        if batch > 1:
            return self._decode_rows(ids, context, batch)
        held = 0 if SHAPES[self.shape].text.layer_types else context  # it cannot go back in a convolution
        self.llm.n_tokens = min(self.llm.n_tokens, held)
        if self.llm.n_tokens < context:
            self.llm.eval(ids[self.llm.n_tokens : context])
        for token in ids[context : context + WARM_UP]:
            self.llm.eval([token])
        start = time.perf_counter()
        for token in ids[context + WARM_UP :]:
            self.llm.eval([token])
        return {"seconds": time.perf_counter() - start, "steps": tokens}

    def _decode_rows(self, ids: list[int], context: int, rows: int) -> dict:
        """The same in `rows` sequences with a cache for each, which llama.cpp's own class does not offer."""
        llama = self.library
        parameters = type(self.llm.context_params).from_buffer_copy(self.llm.context_params)
        parameters.n_seq_max, parameters.kv_unified = rows, False
        parameters.n_ctx = rows * -(-self.longest // 256) * 256  # it wants each cache in units of 256
        in_rows = llama.llama_init_from_model(self.llm.model, parameters)
        batch = llama.llama_batch_init(parameters.n_batch, 0, 1)

        def evaluate(places: list[tuple[int, int, int]]) -> None:
            """One pass over tokens (id, position, sequence); logits of the last one of each sequence."""
            batch.n_tokens = len(places)
            last = {sequence: number for number, (_, _, sequence) in enumerate(places)}
            for number, (token, position, sequence) in enumerate(places):
                batch.token[number], batch.pos[number] = token, position
                batch.n_seq_id[number], batch.seq_id[number][0] = 1, sequence
                batch.logits[number] = last[sequence] == number
            if code := llama.llama_decode(in_rows, batch):
                raise RuntimeError(f"llama_decode: code {code} for {len(places)} tokens")
            llama.llama_synchronize(in_rows)

        try:
            prefix = [(token, position, 0) for position, token in enumerate(ids[:context])]
            for first in range(0, context, parameters.n_batch):
                evaluate(prefix[first : first + parameters.n_batch])
            for row in range(1, rows):
                llama.llama_memory_seq_cp(llama.llama_get_memory(in_rows), 0, row, -1, -1)
            start = 0.0
            for number, token in enumerate(ids[context:]):
                if number == WARM_UP:
                    start = time.perf_counter()
                evaluate([(token, context + number, row) for row in range(rows)])
            return {"seconds": time.perf_counter() - start, "steps": len(ids) - context - WARM_UP}
        finally:
            llama.llama_batch_free(batch)
            llama.llama_free(in_rows)


def gguf_shapes(config: TextConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes (rows, columns) of llama.cpp's tensors of a Llama, Qwen3, Qwen3.5 or LFM2 with a head
    of its own."""
    width, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    values = config.delta_value_heads * config.delta_value_dim
    mixers: dict[str, dict[str, tuple[int, ...]]] = {
        "attention": {
            "attn_q": (queries * (1 + config.attention_gate), width),
            "attn_k": (keys, width),
            "attn_v": (keys, width),
            "attn_output": (width, queries),
            **dict.fromkeys(("attn_q_norm", "attn_k_norm") if config.qk_norm else (), (config.head_dim,)),
        },
        "conv": {
            "shortconv.conv": (width, config.conv_kernel),
            "shortconv.in_proj": (3 * width, width),
            "shortconv.out_proj": (width, width),
        },
        "delta": {
            "attn_qkv": (2 * config.delta_key_heads * config.delta_key_dim + values, width),
            "attn_gate": (values, width),
            **dict.fromkeys(("ssm_alpha", "ssm_beta"), (config.delta_value_heads, width)),
            "ssm_out": (width, values),
            "ssm_conv1d": (2 * config.delta_key_heads * config.delta_key_dim + values, config.conv_kernel),
            **dict.fromkeys(("ssm_a", "ssm_dt.bias"), (config.delta_value_heads,)),
            "ssm_norm": (config.delta_value_dim,),
        },
    }
    second = "post_attention_norm" if "delta" in config.layer_types else "ffn_norm"
    shared: dict[str, tuple[int, ...]] = {"attn_norm": (width,), second: (width,)}
    shared |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        block = mixers[config.mixer(layer)] | shared
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    shapes |= {"token_embd_norm" if "conv" in config.layer_types else "output_norm": (width,)}
    shapes |= {"output": (config.vocab_size, width)}
    bare = ("ssm_a", "ssm_dt.bias")  # names without an ending
    return {name if name.endswith(bare) else f"{name}.weight": shape for name, shape in shapes.items()}


def write_gguf(config: VLMConfig, kind: str, path: Path) -> int:
    """Write random weights of the text part; returns the bytes that one token reads. All layers get the same
    numbers, which keeps memory small; speed does not depend on them. The tokens have names and no meaning."""
    gguf, gguf_files = need("gguf", "benchmarks.gguf_files")
    text = config.text
    described = written(config)[0]["text_config"]
    described |= {"layer_types": text.layer_types, "conv_L_cache": text.conv_kernel}
    name = "qwen3" if text.qk_norm else "llama"
    if text.layer_types:
        name = "qwen35" if "delta" in text.layer_types else "lfm2"
    elif name == "qwen3":  # without rotary sections, which its own llama.cpp architecture has
        described["rope_parameters"].pop("mrope_section", None)
    said = gguf_files.text_metadata(name, described)
    if name == "qwen35":
        numbers = {
            "rope.dimension_count": text.rotary_dim,
            "ssm.conv_kernel": text.conv_kernel,
            "ssm.inner_size": text.delta_value_heads * text.delta_value_dim,
            "ssm.state_size": text.delta_key_dim,
            "ssm.time_step_rank": text.delta_value_heads,
            "ssm.group_count": text.delta_key_heads,
            "full_attention_interval": text.layer_types.index("attention") + 1,
        }
        said |= {f"{name}.{key}": number for key, number in numbers.items()}
    # A sentencepiece vocabulary: three control tokens, the 256 bytes that it must have, and names.
    more, types = text.vocab_size - 259, gguf.TokenType
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [types.UNKNOWN, types.CONTROL, types.CONTROL, *[types.BYTE] * 256, *[types.NORMAL] * more]
    said |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *bytes_, *(f"token{i}" for i in range(more))],
        "tokenizer.ggml.scores": [0.0] * 3 + [-float(number) for number in range(text.vocab_size - 3)],
        "tokenizer.ggml.token_type": [int(one) for one in kinds],
        **{f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("unknown", "bos", "eos"))},
        "general.file_type": int(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"]),
    }
    random, kept, tensors, read = np.random.default_rng(0), {}, {}, 0
    for name, shape in gguf_shapes(text).items():
        part = name.split(".")[-2], shape  # the same in all layers
        if part not in kept and len(shape) == 1:
            kept[part] = np.ones(shape, np.float32), "F32"
        elif part not in kept:
            numbers = random.standard_normal(shape, np.float32) * shape[1] ** -0.5
            of_part = "F32" if "shortconv.conv" in name or "conv1d" in name else kind
            kept[part] = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[of_part]), of_part
        data, type_ = kept[part]
        tensors[name] = Place(type_, shape, 0, data.nbytes), lambda data=data: data
        read += data.nbytes if name != "token_embd.weight" else 0
    gguf_files.write_file(path, said, tensors)
    return read


# --------------------------------------------------------------------------------------- memory's speed
def read_bandwidth(device: str, size: int) -> dict[str, float]:
    """Bytes a second that all threads read, by way of reading: torch's sum, on a GPU its copy, whose written
    bytes count too, and on a CPU 1 to 8 streams a thread in C, where a compiler is there. Memory gives a core
    more when it reads in several places at once.

    Args:
        size: bytes of the buffer: more than any cache holds.
    """
    buffer = torch.ones(64, size // 256, device=device)

    def speed(way, moved: int = 1) -> float:
        seconds = []
        for _ in range(8):
            start = now(device)
            way()
            seconds.append(now(device) - start)
        return moved * buffer.nbytes / median(seconds)

    speeds = {"sum": speed(lambda: buffer.sum(1))}
    if device != "cpu":
        other = torch.empty_like(buffer)
        return speeds | {"whole sum": speed(buffer.sum), "copy": speed(lambda: other.copy_(buffer), 2)}
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
