"""The first run on a GPU: does it work, is it right, how fast is it, beside what. `gpu.sh` starts it.

    python -m benchmarks.gpu --output runs/gpu      # at most nine minutes
    python -m benchmarks.gpu --only tests,ours
    python -m benchmarks.gpu --device cpu           # with a tiny model, to see whether it runs

Each section runs in a process of its own, ended at its time limit or the whole run's, so that one that
crashes or hangs takes no other with it. Ours come before others', and what tells most before the rest.
OUTPUT/gpu.jsonl gets each point when it is measured, and how each section ended; OUTPUT/gpu.log whatever else
they print; OUTPUT/gpu.md, and stdout, the tables of what was measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

# What takes seconds to import is imported where it is used: the seconds of a lent machine count.

ROOT = Path(__file__).resolve().parent.parent
TOTAL, LEAST = 530, 15  # seconds of a whole run, and those without which no section begins
SLOWER = 4  # times that a CPU takes, most of them to import what a section needs
SAID = 1500  # characters of what a section said that failed
# Of what was measured, by a key that each row has: the columns of a table.
TABLES = {
    "decode_tokens_per_second": """system shape precision context:, batch decode_tokens_per_second:,.0f
        floor_fraction:.0% over_transformers_static:.2f step""",
    "first_token_seconds": "system precision tiles first_token_seconds:.4f first_token_over_transformers:.2f",
    "tokens_per_second": "system slots tokens_per_second:,.0f mfu:.0% peak_mebibytes:,.0f identical",
    "error": "shape precision rows step error:.5f eager_error:.5f same_bits ok",
    "kernel": "kernel launches:.1f microseconds:.1f",
}


class Section(NamedTuple):
    """seconds: at most. arguments: of Python, which prints lines of JSON. needs: packages beside gpu.sh's."""

    seconds: int
    arguments: list[str]
    needs: tuple[str, ...] = ()


def sections(device: str, output: Path = ROOT / "runs/gpu") -> dict[str, Section]:
    """In the order of what they tell."""
    cpu = device == "cpu"

    def own(name: str) -> list[str]:
        return ["-c", f"from benchmarks.gpu import {name}; {name}({device!r})"]

    def model(shape: str, rounds: str = "2") -> list[str]:
        sized = ["--quick", "--threads", "1"] if cpu else ["--rounds", rounds]
        return ["--device", device, "--shape", "tiny" if cpu else shape, *sized]

    def decode(shape: str, systems: str, precisions: str, prompts: str, contexts: str) -> list[str]:
        asked = ["--systems", systems, "--precisions", precisions, "--tokens", "4" if cpu else "64"]
        asked += ["--prompts", "1" if cpu else prompts, "--contexts", "" if cpu else contexts]
        return ["-m", "benchmarks.latency", "decode", *model(shape), *asked]

    small, bfloat16 = "SmolVLM-256M", ["--precisions", "bfloat16"]
    rows = [
        *decode(small, "ours-fast", "bfloat16", "1", ""),
        "--batch",
        "1,3" if cpu else "1,2,4,8,9,16,32,64",
    ]
    first = ["-m", "benchmarks.latency", "first-token", *model(small), *bfloat16]
    batching = ["-m", "benchmarks.throughput", "batching", *model(small), "--precision", "bfloat16"]
    prove = ["-m", "eval", "prove", "checkpoints/ocelli-shapes", "--device", device, "--quick"]
    training = [
        "-m",
        "benchmarks.training",
        *model("nanoVLM-222M", "1"),
        "--systems",
        "ours-packed",
        "--steps",
    ]
    # As configs/nanovlm-222m.yaml has them.
    training += (
        ["1", "--row", "128", "--documents", "4"] if cpu else ["4", "--row", "2048", "--documents", "96"]
    )
    training += [] if cpu else ["--packed-micro-batch", "4", "--tiles", "1,4,0"]
    return {
        "env": Section(40, own("env")),
        "probe": Section(60, own("probe")),
        "ours": Section(60, decode(small, "ours-fast", "bfloat16", "1,17", "8000")),
        "profile": Section(30, own("profile")),
        "Qwen3.5-0.8B": Section(75, decode("Qwen3.5-0.8B", "ours-fast", "bfloat16,int4", "1,17", "")),
        "Qwen3-VL-2B": Section(75, decode("Qwen3-VL-2B", "ours-fast", "bfloat16,int4", "1,17", "")),
        "Gemma-4-E2B": Section(60, decode("Gemma-4-E2B", "ours-fast", "bfloat16", "1", "")),
        "rows": Section(60, rows),
        "scheduler": Section(60, [*batching, "--slots", "2" if cpu else "8"]),
        "tests": Section(
            180, ["-m", "pytest", "-p", "no:cacheprovider", "--durations", "8", "tests/test_cuda.py"]
        ),
        "first_token": Section(60, [*first, "--systems", "ours-fast,transformers"]),
        "prove": Section(60, [*prove, "--html", str(output / "prove.html")], ("pydantic",)),
        "training": Section(60, [*training, "--no-compile"], ("pydantic",)),
        "training compiled": Section(100, [*training, "--compile"], ("pydantic",)),
        "rounded": Section(60, decode(small, "ours-fast", "float32,int8,int4", "1,17", "")),
        "transformers": Section(150, decode(small, "transformers-static", "bfloat16", "1,17", "8000")),
    }


def run(name: str, section: Section, seconds: float, output: Path) -> tuple[dict[str, Any], list[dict]]:
    """How a section ended; and the rows of its last line, or, where it did not come to that, its points."""
    began, points, said = time.perf_counter(), list[dict](), ""
    with (output / "gpu.log").open("a") as log, (output / "gpu.jsonl").open("a") as file:
        print(f"== {name}", file=log, flush=True)
        child = subprocess.Popen(
            [sys.executable, *section.arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"}, text=True, errors="replace",
            start_new_session=True,  # its children end with it
        )  # fmt: skip
        timer = threading.Timer(seconds, lambda: os.killpg(child.pid, 9))
        timer.start()
        assert child.stdout is not None
        for line in child.stdout:
            found = None
            if line.startswith("{"):
                with suppress(ValueError):
                    found = json.loads(line)
            if found is None:
                said = (said + line)[-SAID:]
                log.write(line)
                log.flush()
            else:
                points.append(found)
                print(json.dumps({"section": name} | found), file=file, flush=True)
        status: Any = child.wait()
        timer.cancel()
        wall = time.perf_counter() - began
        ended = {"section": name, "wall_seconds": round(wall, 1)}
        if status or name == "tests":
            ended |= {"status": f"ended after {seconds:.0f} s" if wall > seconds else status, "said": said}
        if not status:
            ended.pop("status", None)
        print(json.dumps(ended), file=file, flush=True)
    last = points[-1] if points else {}
    return ended, last.get("rows", points)


def run_all(device: str, names: list[str], output: Path, seconds: float = TOTAL) -> list[dict]:
    output.mkdir(parents=True, exist_ok=True)
    for name in ("gpu.jsonl", "gpu.log"):
        (output / name).write_text("")
    slower = SLOWER if device == "cpu" else 1
    results, rows, end = list[dict](), list[dict](), time.monotonic() + seconds * slower
    for name in names:
        section, left = sections(device, output.resolve())[name], end - time.monotonic()
        missing = [package for package in section.needs if importlib.util.find_spec(package) is None]
        result = {"section": name, "status": f"needs {', '.join(missing)}" if missing else "no time left"}
        if left > LEAST and not missing:
            result, found = run(name, section, min(section.seconds * slower, left), output)
            rows += found
        results.append(result)
        (output / "gpu.md").write_text(report(rows, results))  # whatever ends this process
        print(f"{name}: {result.get('status', 'ok')}, {result.get('wall_seconds', 0)} s", file=sys.stderr)
    return results


def report(rows: list[dict], results: list[dict]) -> str:
    """What was measured, in Markdown."""
    from benchmarks.common import compare, table

    decoded = [row for row in rows if "decode_tokens_per_second" in row]
    same = ("shape", "precision", "tiles", "context", "batch")
    compare(decoded, "decode_tokens_per_second", same, ["transformers-static"])
    parts = [
        table(columns, own) for key, columns in TABLES.items() if (own := [row for row in rows if key in row])
    ]
    parts += [table("section wall_seconds status", results)]
    return "\n\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------ sections of its own
def env(device: str) -> None:
    """The machine, and how fast it reads and multiplies."""
    import torch

    from benchmarks.common import hardware
    from benchmarks.peers import read_bandwidth
    from training.flops import measured_peak

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
    import torch

    from benchmarks.common import SHAPES, build_ours, fill, prompt
    from generation import kv_cache as kv
    from generation.fast.cuda.graph import GraphStep
    from generation.fast.native.panels import round_layer, to_rows
    from generation.fast.quantized import pack
    from generation.steps import Step

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
            SHAPES[shape] = replace(SHAPES["tiny"], text=replace(text, **small, rope_sections=()))
        kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
        model = build_ours(shape, kind, "cpu" if precision == "int4" else device)
        if precision == "int4":
            to_rows(pack(model, precision, round_layer), torch.device(device))
        return model

    @torch.no_grad()
    def compared(lm: Any, rows: int) -> dict | None:
        graph = GraphStep(lm)
        if (decoder := graph.decoder(rows)) is None:
            return None
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
        return found | {"same_bits": same, "failure": graph.failure, "ok": ok}

    wrong = 0
    for shape, precision in PROBED:
        model = built(shape, precision)
        for rows in ROWS if device == "cuda" else ROWS[:2]:
            began = time.perf_counter()
            point = {"shape": shape, "precision": precision, "rows": rows}
            if (found := compared(model.language_model, rows)) is not None:
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
    import torch
    from torch.profiler import ProfilerActivity

    from benchmarks.common import build_checkpoint, now
    from generation import kv_cache as kv

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


def main(arguments: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="device (default cuda)")
    add("--only", metavar="S,S", help=f"some of {', '.join(sections('cpu'))}")
    add("--output", type=Path, default=ROOT / "runs/gpu", help="folder of the results (default runs/gpu)")
    add("--seconds", type=float, default=TOTAL, help=f"of the whole run, at most (default {TOTAL})")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(sections(options.device))
    if unknown := [name for name in names if name not in sections("cpu")]:
        parser.error(f"--only: expected some of {', '.join(sections('cpu'))}, got {', '.join(unknown)}")
    results = run_all(options.device, names, options.output, options.seconds)
    print((options.output / "gpu.md").read_text())
    print(json.dumps({"benchmark": "gpu", "sections": results}), flush=True)
    return int(any("status" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
