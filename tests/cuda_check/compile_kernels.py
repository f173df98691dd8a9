"""Compile every kernel of the decode step for GPUs that need not be here, and fail if one spills registers.

    python -m tests.cuda_check.compile_kernels    # sm_80, sm_90 and sm_100: some minutes on two cores
    python -m tests.cuda_check.compile_kernels --target 90 --shape SmolVLM-256M --rows 1

Needs Triton and the assembler that comes with it. What is compiled is what `TritonDecoder` launches for
models of published sizes: their weights are on the meta device, and launches are written down.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from generation import kv_cache as kv
from generation.fast.cuda import decoder
from models.config import TextConfig
from models.gemma4_text import Gemma4LanguageModel, Gemma4TextConfig
from models.language_model import LanguageModel

PROGRAMS = {80: 108, 90: 132, 100: 148}  # multiprocessors
ROUNDED = {"int8": torch.int8, "int4": torch.int32}
LAYERS = 3  # are compiled like thirty


def text(width: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocab: int, **other) -> TextConfig:
    return TextConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_hidden_layers=LAYERS,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, **other,
    )  # fmt: skip


QWEN3_5 = {
    "layer_types": ("delta", "delta", "attention"), "conv_kernel": 4, "qk_norm": True, "attention_gate": True,
    "zero_centered_norms": True, "partial_rotary_factor": 0.25, "rope_sections": (11, 11, 10),
    "rope_interleaved": True,
}  # fmt: skip


def gemma(width: int, inner: int, kv_heads: int, factor: int) -> Gemma4TextConfig:
    return Gemma4TextConfig(
        vocab_size=262_144, hidden_size=width, intermediate_size=inner, num_attention_heads=8,
        num_key_value_heads=kv_heads, head_dim=256, qk_norm=True, logit_cap=30.0, per_layer_width=256,
        layer_types=("sliding", "full", "sliding shared", "full shared"), num_hidden_layers=4,
        per_layer_count=4, shared_mlp_factor=factor,
    )  # fmt: skip


SHAPES = {
    "SmolVLM-256M": text(576, 1536, 9, 3, 64, 49_280),
    "SmolVLM-500M": text(960, 2560, 15, 5, 64, 49_280),
    "SmolVLM-2.2B": text(2048, 8192, 32, 32, 64, 49_280),
    "Idefics3-8B": text(4096, 14_336, 32, 8, 128, 128_259),
    "biases": text(896, 4864, 14, 2, 64, 151_936, attention_bias=True, mlp_bias=True),
    "Qwen2.5-VL-3B": text(
        2048, 11_008, 16, 2, 128, 151_936, attention_bias=True, qkv_bias_only=True, rope_sections=(16, 24, 24)
    ),
    "Qwen3-VL-2B": text(
        2048, 6144, 16, 8, 128, 151_936, qk_norm=True, rope_sections=(24, 20, 20), rope_interleaved=True
    ),
    "Qwen3.5-0.8B": text(1024, 3584, 8, 2, 256, 248_320, **QWEN3_5),
    "Qwen3.5-4B": text(2560, 9216, 16, 4, 256, 248_320, delta_value_heads=32, **QWEN3_5),
    "LFM2.5-VL-450M": text(
        1024, 4608, 16, 8, 64, 65_536, qk_norm=True, layer_types=("conv", "conv", "attention")
    ),
    "Gemma 4 E2B": gemma(1536, 6144, 1, 2),
    "Gemma 4 E4B": gemma(2560, 10_240, 2, 1),
}


def make(config: TextConfig, weights: str) -> LanguageModel:
    """weights: a dtype's name, or int8 or int4, around which all is in bfloat16."""
    with torch.device("meta"):
        soft = {"tie_word_embeddings": True, "soft_ids": (258_880, 258_881, 258_884)}
        model = LanguageModel(config) if type(config) is TextConfig else Gemma4LanguageModel(config, **soft)
        model.to(torch.bfloat16 if weights in ROUNDED else getattr(torch, weights))
        for part in model.modules() if weights in ROUNDED else ():
            if isinstance(part, torch.nn.Linear | torch.nn.Embedding):
                height, width = part.weight.shape
                if weights == "int4":
                    width = -(-width // 64) * 9 + 3 & ~3  # see native/panels.py
                del part.weight
                part.register_buffer("weight", torch.empty(height, width, dtype=ROUNDED[weights]))
                part.register_buffer("scale", torch.empty(height))
    return model


def launches(model: LanguageModel, rows: int, programs: int) -> dict:
    """name -> (kernel, arguments, options) of each different launch of a token."""
    found: dict = {}

    def write_down(kernel, *arguments, grid, warmup, **options):
        name = kernel.__name__
        constants = [a for a, p in zip(arguments, kernel.params, strict=True) if p.is_constexpr]
        found.setdefault((name, *constants), (kernel, arguments, options))

    original, checked, JITFunction.run = JITFunction.run, decoder.unsupported, write_down
    decoder.unsupported = lambda *_: None
    try:
        step = decoder.TritonDecoder(model, programs)
        cache = kv.allocate_for(model, rows, 4096)
        ids = torch.zeros(rows, 1, dtype=torch.int64, device="meta")
        step(ids, cache, ids[:, 0], ids[:, 0] if model.config.rope_sections else None)
    finally:
        JITFunction.run, decoder.unsupported = original, checked
    return found


def resources(kernel, arguments, options: dict, target: GPUTarget) -> dict[str, int]:
    """Registers, spilled bytes, stack, shared memory and 128-bit loads of a launch."""
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*arguments, **options, debug=False)
    options, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constants, attributes)
    made = compile(source, target=target, options=options.__dict__)
    ptx = made.asm["ptx"]
    gpu = re.search(r"^\.target (\w+)", ptx, re.MULTILINE).group(1)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(target.arch).path, "-v", f"--gpu-name={gpu}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    number = lambda pattern: sum(int(found) for found in re.findall(pattern, said))
    return {
        "registers": number(r"Used (\d+) registers"),
        "spilled": number(r"(\d+) bytes spill stores"),
        "stack": number(r"(\d+) bytes stack frame"),
        "shared": made.metadata.shared,
        "vector loads": len(re.findall(r"ld\.global[^\n]*\.v4\.b32|cp\.async[^\n]*, 0x10", ptx)),
        "warps": made.metadata.num_warps,
    }


def compile_case(target: int, shape: str, weights: str, rows: int) -> list[tuple[str, bool]]:
    """A line for each kernel that a model of this kind launches, and whether it spills."""
    model, lines = make(SHAPES[shape], weights), []
    for (name, *_), launch in launches(model, rows, PROGRAMS[target]).items():
        usage = resources(*launch, GPUTarget("cuda", target, 32))
        line = f"sm_{target} {shape} {weights} rows {rows} {name}"
        text = "  ".join([line, *(f"{key} {value}" for key, value in usage.items())])
        lines.append((text, bool(usage["spilled"])))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_check.compile_kernels", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add(
        "--target", type=int, action="append", choices=PROGRAMS, help="compute capability · 10 (default: all)"
    )
    add("--shape", action="append", choices=SHAPES, help="sizes of a model (default: all)")
    add("--weights", action="append", help="bfloat16, int8, int4, ... (default: all)")
    add("--rows", type=int, action="append", help="rows that are decoded together (default: 1 and 4)")
    args = parser.parse_args()
    cases = [
        (target, shape, weights, rows)
        for target in args.target or PROGRAMS
        for shape in args.shape or SHAPES
        for weights in args.weights
        or ["bfloat16", *ROUNDED, *("float16", "float32") * (shape == "SmolVLM-256M")]
        for rows in args.rows or (1, 4)
    ]
    spilled = []
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for lines in pool.map(compile_case, *zip(*cases)):
            for text, bad in lines:
                print(text, flush=True)
                spilled += [text] * bad
    if spilled:
        sys.exit("registers are spilled by:\n" + "\n".join(spilled))


if __name__ == "__main__":
    main()
