"""Sections of `benchmarks.gpu`: the machine, the kernels beside the eager step, the kernels of a step. Each
is called with a device, and prints lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.common import SHAPES, build_checkpoint, build_ours, fill, hardware, now, prompt
from benchmarks.peers import read_bandwidth
from generation import kv_cache as kv
from generation.fast.cuda.graph import GraphStep
from generation.fast.native.panels import round_layer, to_rows
from generation.fast.quantized import pack
from generation.steps import Step
from training.flops import measured_peak


def env(device: str) -> None:
    """The machine, and how fast it reads and multiplies."""
    found = hardware(device, torch.get_num_threads())
    found["read_bytes_per_second"] = read_bandwidth(device, 2**23 if device == "cpu" else 2**32)
    found["flops_per_second"] = measured_peak(torch.device(device), torch.bfloat16)
    print(json.dumps(found), flush=True)


PROBED = [("SmolVLM-256M", "bfloat16"), ("Qwen3.5-0.8B", "bfloat16"), ("SmolVLM-256M", "int4")]
PROBED += [("Gemma-4-E2B", "bfloat16")]
ROWS = (1, 2, 8, 9, 16, 64)
CAPACITY = {"cpu": 130, "cuda": 1200}
PLACES = {"cpu": (0, 63, 129), "cuda": (0, 63, 64, 127, 1100, 1199)}


def probe(device: str) -> None:
    """The Triton step and the eager one, both beside the eager one in float32: relative errors of logits, the
    largest at some places in the cache. The former runs twice, and once as a graph: the same bits, also in a
    cache. Then the tokens of a graph beside the eager step's. In Triton's interpreter a CPU runs it, too."""

    def built(shape: str, precision: str) -> Any:
        if device == "cpu":  # a layer of each kind, and few numbers: the interpreter takes seconds for a step
            text = SHAPES[shape].text
            kinds = tuple(dict.fromkeys(text.layer_types))
            small: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320}
            small |= {"num_attention_heads": 4, "num_hidden_layers": len(kinds) or 1, "layer_types": kinds}
            for name in ("num_key_value_heads", "delta_key_heads", "delta_value_heads"):
                small[name] = 2
            for name in ("head_dim", "delta_key_dim", "delta_value_dim"):
                small[name] = 16
            if hasattr(text, "per_layer_width"):
                small |= {"per_layer_width": 16, "per_layer_vocab": 320, "per_layer_count": len(kinds)}
                small |= {"full_head_dim": 32, "sliding_window": 32}
            tower = replace(SHAPES[shape].vision, num_hidden_layers=1)
            text = replace(text, **small, rope_sections=())
            SHAPES[shape] = replace(SHAPES[shape], vision=tower, text=text, image_token_id=319)
        kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
        model = build_ours(shape, kind, "cpu" if precision == "int4" else device)
        if precision == "int4":
            to_rows(pack(model, precision, round_layer), torch.device(device))
        return model

    @torch.no_grad()
    def compared(lm: Any, rows: int) -> dict[str, Any]:
        graph = GraphStep(lm)
        if (decoder := graph.decoder(rows)) is None:
            return {"step": graph.name, "ok": True}
        cache = kv.allocate_for(lm, rows, CAPACITY[device])
        for number, tensor in enumerate(held := [one for layer in cache for one in layer.values()]):
            fill(tensor, 1.0, start=7919 * number)
        before = [tensor.clone() for tensor in held]
        exact = deepcopy(lm).float()
        if hasattr(exact.embed_tokens, "dtype"):
            exact.embed_tokens.dtype = torch.float32
        steps: dict[str, Any] = {"exact": Step(exact), "eager": Step(lm)}
        steps |= {"decoder": decoder, "again": decoder, "graph": graph}
        errors, same = {"eager": 0.0, "decoder": 0.0}, True
        for place in PLACES[device]:
            position = (place - 7 * torch.arange(rows, device=device)).clamp(min=0)
            ids = 3 + torch.arange(rows, device=device)[:, None] + place
            logits, after = {}, {}
            for name, step in steps.items():
                for tensor, values in zip(held, before, strict=True):
                    tensor.copy_(values)
                given = cache
                if name == "exact":
                    given = [{key: one.float() for key, one in layer.items()} for layer in cache]
                logits[name] = step(ids, given, position).reshape(rows, -1).float().clone()
                after[name] = [tensor.clone() for tensor in held]
            for name in errors:
                off = (logits[name] - logits["exact"]).norm() / logits["exact"].norm()
                errors[name] = max(errors[name], off.item() if off.isfinite() else float("inf"))
            for name in ("again", "graph"):
                same = same and torch.equal(logits[name], logits["decoder"])
                same = same and all(map(torch.equal, after[name], after["decoder"]))
        ok = same and errors["decoder"] <= 1e-3 + 2 * errors["eager"]
        found = {"step": graph.name, "error": errors["decoder"], "eager_error": errors["eager"]}
        return found | {"same_bits": same, "ok": ok}

    wrong = 0
    for shape, precision in PROBED:
        model = built(shape, precision)
        for rows in ROWS if device == "cuda" else ROWS[:2]:
            began = time.perf_counter()
            point = {"shape": shape, "precision": precision, "rows": rows}
            found = compared(model.language_model, rows)
            wrong += not found["ok"]
            print(json.dumps(point | found | {"seconds": time.perf_counter() - began}), flush=True)
    model = built("tiny" if device == "cpu" else PROBED[0][0], "float32")
    options = {"max_new_tokens": 40 if device == "cuda" else 3, "stop_token_ids": ()}
    ids = {"input_ids": prompt("tiny", 0, device=device)["input_ids"]}
    tokens = [
        model.generate(**ids, **options, decode_step=step) for step in (None, GraphStep(model.language_model))
    ]
    equal = (tokens[0] == tokens[1]).sum().item()
    print(json.dumps({"tokens": tokens[0].numel(), "equal": equal}), flush=True)
    sys.exit(int(wrong or equal < tokens[0].numel()))


def profile(device: str) -> None:
    """The kernels of a step: how many, and microseconds of one, beside those of the step."""
    steps, shape = 20, "tiny" if device == "cpu" else "SmolVLM-256M"
    checkpoint = build_checkpoint({"shape": shape, "precision": "bfloat16", "device": device}, fast=True)
    lm, step = checkpoint.model.language_model, checkpoint.decode_step
    assert step is not None, checkpoint.fast.name
    cache = kv.allocate_for(lm, 1, 300)
    ids, place = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.full((1,), 200, device=device)
    step(ids, cache, place)
    began = now(device)
    for _ in range(steps):
        step(ids, cache, place)
    print(
        json.dumps(
            {"kernel": "the whole step", "launches": 1, "microseconds": (now(device) - began) / steps * 1e6}
        )
    )
    kinds = [ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(steps):
            step(ids, cache, place)
        now(device)
    took = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    for one in sorted(profiler.key_averages(), key=lambda one: -getattr(one, took))[:20]:
        found = {
            "kernel": one.key[:60],
            "launches": one.count / steps,
            "microseconds": getattr(one, took) / one.count,
        }
        print(json.dumps(found), flush=True)
