"""Compile the kernels of the decode step for GPUs that need not be here, and check what the compilers say.

    python -m tests.cuda_check.compile_kernels    # each kind of kernel for each GPU: minutes on two cores
    python -m tests.cuda_check.compile_kernels --target 90 --shape SmolVLM-256M --rows 1 --every

It fails if a kernel spills more than a few registers or needs more shared memory than a block has, if one
that is started early reads before it waits for the kernel before it, and if a GPU that is too old is not
refused.

Needs Triton and the assembler that comes with it. What is compiled is what `TritonDecoder` launches for
models of published sizes: their weights are on the meta device, and launches are written down.
"""

from __future__ import annotations

import argparse
import io
import itertools
import multiprocessing
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from generation import kv_cache as kv
from generation.fast.cuda import decoder, kernels
from models.config import TextConfig
from models.gemma4_text import Gemma4LanguageModel, Gemma4TextConfig
from models.language_model import LanguageModel

# Compute capability -> multiprocessors, and KiB of shared memory that a block has at most.
TARGETS = {
    75: (40, 64),
    80: (108, 163),
    86: (84, 99),
    89: (128, 99),
    90: (132, 227),
    100: (148, 227),
    120: (170, 99),
}
REFUSED = {75}
WEIGHTS = ("bfloat16", "float16", "float32", "int8", "int4")
ROWS = (1, 4, 16, 32, 64)  # the last three take turns over the GPUs
PRODUCTS = {"project", "add_product", "gate_up", "let_through"}
ROUNDED = {"int8": torch.int8, "int4": torch.int32}
MOST_SPILLED = 32  # bytes: float32 with heads of 512 spills a few, which a smaller chunk would cost more than
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


@contextmanager
def pretended(target: int) -> Iterator[None]:
    """A GPU of this compute capability."""
    with mock.patch("torch.cuda.get_device_capability", return_value=divmod(target, 10)):
        yield


class Case(NamedTuple):
    """A model, the type of its weights, rows, and a GPU."""

    target: int
    shape: str
    weights: str
    rows: int

    def launches(self) -> dict[tuple, tuple]:
        """(name, constants) -> (kernel, arguments, options) of each different launch of a token."""
        found: dict = {}

        def write_down(kernel, *arguments, grid, warmup, **options):
            constants = [a for a, p in zip(arguments, kernel.params, strict=True) if p.is_constexpr]
            found.setdefault((kernel.__name__, *constants), (kernel, arguments, options))

        model = make(SHAPES[self.shape], self.weights)
        ids = torch.zeros(self.rows, 1, dtype=torch.int64, device="meta")
        offsets = ids[:, 0] if model.config.rope_sections else None
        with (
            pretended(self.target),
            mock.patch.object(JITFunction, "run", write_down),
            mock.patch.object(decoder, "unsupported", lambda *_: None),
        ):
            step = decoder.TritonDecoder(model, TARGETS[self.target][0])
            step(ids, kv.allocate_for(model, self.rows, 4096), ids[:, 0], offsets)
        return found


def kind_of(key: tuple) -> tuple:
    """What a launch has in common with those of which one is enough for a GPU: products differ by the type of
    weights and the rows of a tile, others by the type of activations, and attention by the width of heads."""
    name, sizes = key[0], next(value for value in key[1:] if isinstance(value, kernels.Sizes))
    if name in PRODUCTS:
        return name, sizes.DT, sizes.BITS, sizes.ROWS
    return name, sizes.DT, sizes.HD if name == "attend" else sizes.BITS * (name == "begin")


def resources(kernel, arguments, options: dict, target: int) -> tuple[dict[str, int], str]:
    """Registers, spilled bytes, stack, shared memory and 128-bit loads of a launch; and its PTX."""
    gpu = GPUTarget("cuda", target, 32)
    backend = make_backend(gpu)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*arguments, **options, debug=False)
    options, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constants, attributes)
    triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
    with redirect_stdout(io.StringIO()) as said:
        made = compile(source, target=gpu, options=options.__dict__)
    number = lambda pattern: sum(int(found) for found in re.findall(pattern, said.getvalue()))
    ptx = made.asm["ptx"]
    return {
        "registers": number(r"Used (\d+) registers"),
        "spilled": number(r"(\d+) bytes spill stores"),
        "stack": number(r"(\d+) bytes stack frame"),
        "shared": made.metadata.shared,
        "vector loads": len(re.findall(r"ld\.global[^\n]*\.v4\.b32|cp\.async[^\n]*, 0x10", ptx)),
        "warps": made.metadata.num_warps,
    }, ptx


ORDER = {"ld.global": "L", "cp.async": "L", "st.global": "S", "atom": "S", "griddepcontrol.wait": "W"}


def wrong_order(name: str, alone: bool, ptx: str) -> str | None:
    """What is wrong with a kernel that is started before the one before it has ended; or None.

    Nothing is written, and no more than weights is read, before it waits: by products alone, and a tile of
    them where there is one row. Then it lets the next one start.
    """
    if ptx.count("griddepcontrol.wait") != 1 or ptx.count("griddepcontrol.launch_dependents") != 1:
        return "it does not wait once, or let the next one start once"
    found = "".join(ORDER[one] for one in re.findall("|".join(ORDER), ptx))
    before = found.partition("W")[0]
    if "S" in before or ("L" in before and name not in PRODUCTS):
        return f"it reads or writes before it waits: {found}"
    if alone and name in PRODUCTS and not before:
        return f"weights are not read before it waits: {found}"
    return None


def check(case: Case, chosen: list[tuple]) -> list[tuple[str, list[str]]]:
    """Compile launches of a case: a line for each, and what is wrong with it."""
    found = []
    for key, launch in case.launches().items():
        if key not in chosen:
            continue
        usage, ptx = resources(*launch, case.target)
        wrong = ["registers are spilled"] if usage["spilled"] > MOST_SPILLED else []
        if usage["shared"] > TARGETS[case.target][1] * 1024:
            wrong.append(f"a block has {TARGETS[case.target][1]} KiB of shared memory")
        if case.target >= 90 and key[0] != "begin" and not launch[2].get("launch_pdl"):
            wrong.append("it is not started early")
        if case.target >= 90 and (reason := wrong_order(key[0], case.rows == 1, ptx)):
            wrong.append(reason)
        line = f"sm_{case.target} {case.shape} {case.weights} rows {case.rows} {key[0]}"
        found.append(("  ".join([line, *(f"{name} {value}" for name, value in usage.items())]), wrong))
    return found


def choose(target: int, args: Any) -> list[tuple[Case, list[tuple]]]:
    """The launches to compile for a GPU: all, or one of each kind, of another model for each GPU."""
    turn = list(TARGETS).index(target)
    rows = args.rows or (ROWS if args.every else (*ROWS[:2], ROWS[2 + turn % 3]))
    kinds: dict[tuple, list[tuple[Case, tuple]]] = {}
    for case in itertools.starmap(Case, itertools.product([target], args.shape, args.weights, rows)):
        for key in case.launches():
            kinds.setdefault(kind_of(key), []).append((case, key))
    jobs: dict[Case, list[tuple]] = {}
    for number, found in enumerate(kinds.values()):
        for case, key in found if args.every else [found[(turn + number) % len(found)]]:
            jobs.setdefault(case, []).append(key)
    return list(jobs.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_check.compile_kernels", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    targets = "compute capability · 10 (default: all)"
    add("--target", type=int, action="append", choices=TARGETS, help=targets)
    add("--shape", action="append", choices=SHAPES, help="sizes of a model (default: all)")
    add("--weights", action="append", choices=WEIGHTS, help="type of a model's weights (default: all)")
    add("--rows", type=int, action="append", help=f"rows that are decoded together (default: {ROWS})")
    add("--every", action="store_true", help="every launch, not one of each kind for each GPU")
    args = parser.parse_args()
    args.shape, args.weights = args.shape or list(SHAPES), args.weights or WEIGHTS
    failed, supported = [], []
    for target in args.target or TARGETS:
        with pretended(target):
            reason = decoder.unfit(torch.device("cuda"))
        print(f"sm_{target} {'is refused: ' + reason if reason else ''}", flush=True)
        if (reason is not None) != (target in REFUSED):
            failed.append(f"sm_{target} is {'refused' if reason else 'not refused'}")
        elif reason is None:
            supported.append(target)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = itertools.chain(*pool.map(choose, supported, [args] * len(supported)))
        for lines in pool.map(check, *zip(*jobs)) if supported else ():
            for line, wrong in lines:
                print(line, flush=True)
                failed += [f"{line}: {', '.join(wrong)}"] * bool(wrong)
    if failed:
        sys.exit("\n".join(["what is wrong:", *failed]))


if __name__ == "__main__":
    main()
