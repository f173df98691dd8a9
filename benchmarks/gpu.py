"""The first run on a GPU: does it work, is it right, how fast is it, beside what. `gpu.sh` starts it.

    python -m benchmarks.gpu --output runs/gpu      # at most nine minutes
    python -m benchmarks.gpu --only parity,decode
    python -m benchmarks.gpu --device cpu           # with a tiny model, to see whether it runs

Each section runs in a process of its own, ended at its time limit or the whole run's, so that one that
crashes or hangs takes no other with it. Most are the other benchmarks. Each adds a line to OUTPUT/gpu.jsonl,
its log lies beside it. What was measured becomes OUTPUT/gpu.md, after a whole run on a GPU also the table in
docs/speed.md, and the last line of stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from benchmarks.common import hardware, now
from benchmarks.peers import build_transformers
from benchmarks.picture import markdown, number
from benchmarks.shapes import DTYPES, build_ours, fill, prompt
from benchmarks.systems import read_bandwidth
from generation import kv_cache as kv
from generation.steps import Step
from inference.checkpoint import fast_step
from training.flops import known_peak, measured_peak

ROOT = Path(__file__).resolve().parent.parent
TOTAL, LEAST = 530, 15  # seconds of a whole run, and those without which no section begins
SLOWER = 4  # times that a CPU takes, most of them to import what a section needs
PARITY_TOKENS, PARITY_CONTEXT = 24, 300
PAGE, MARKS = ROOT / "docs/speed.md", ("<!-- gpu:", "<!-- /gpu -->")
RECIPES = {"nanoVLM-222M": "nanovlm-222m", "nanoVLM-460M": "nanovlm-460m"}


class Section(NamedTuple):
    """seconds: at most. arguments: of Python; the last line of what it prints is JSON."""

    seconds: int
    arguments: list[str]


def sections(device: str) -> dict[str, Section]:
    """In the order of what they tell."""
    cpu = device == "cpu"
    own = ["-m", "benchmarks.gpu", "--device", device, "--section"]
    model = ["--device", device, "--shape", "tiny" if cpu else "SmolVLM-256M"]
    model += ["--quick", "--threads", "1"] if cpu else ["--rounds", "2"]
    decode = ["-m", "benchmarks.decode", *model, "--tokens", "4" if cpu else "64", "--systems"]
    contexts = ["--prompts", "1", "--contexts", ""] if cpu else ["--prompts", "1,17", "--contexts", "8000"]
    rows = "1,3" if cpu else "1,2,4,8,16,32,64,128,256"
    bfloat16 = ["--precisions", "bfloat16"]
    found = {
        "env": Section(40, [*own, "env"]),
        "tests": Section(110, [*own, "tests"]),
        "parity": Section(60, [*own, "parity"]),
        "decode": Section(
            150, [*decode, "ours-fast,ours-compiled,transformers-static", *bfloat16, *contexts]
        ),
        "int8": Section(60, [*decode, "ours-fast", "--precisions", "int8", *contexts]),
        "rows": Section(
            60, [*decode, "ours-fast", *bfloat16, *contexts[:2], "--contexts", "", "--batch", rows]
        ),
        "first_token": Section(
            60, ["-m", "benchmarks.first_token", *model, *bfloat16, "--systems", "ours-fast,transformers"]
        ),
        "scheduler": Section(
            60,
            ["-m", "benchmarks.batching", *model, "--precision", "bfloat16", "--slots", "2" if cpu else "32"],
        ),
    }
    for shape, name in RECIPES.items():
        recipe = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
        arguments = [
            "--row",
            str(recipe["sequence_length"]),
            "--steps",
            "4",
            "--rounds",
            "1",
            "--tiles",
            "1,4,0",
        ]
        arguments += ["--packed-micro-batch", str(recipe["micro_batch_size"]), "--documents", "96"]
        arguments = [*model[:3], shape, *arguments]
        if cpu:
            arguments = [*model, "--row", "128", "--documents", "4", "--steps", "1"]
        elif torch.cuda.is_available() and (
            flops := known_peak(torch.cuda.get_device_name(), torch.bfloat16)
        ):
            arguments += ["--peak-flops", str(flops)]
        systems = ["--systems", "ours-packed"]
        found[f"training {shape}"] = Section(100, ["-m", "benchmarks.training", *arguments, *systems])
    return found


# ----------------------------------------------------------------------------------------- the run
def run(name: str, section: Section, seconds: float, output: Path) -> dict:
    """A section's last line, or how it ended."""
    log = output / f"{name.replace(' ', '-')}.log"
    began = time.perf_counter()
    with log.open("w") as errors:
        child = subprocess.Popen(
            [sys.executable, *section.arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True,  # its children end with it
        )  # fmt: skip
        try:
            printed, _ = child.communicate(timeout=seconds)
            status: Any = child.returncode
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            printed, _ = child.communicate()
            status = f"ended after {seconds:.0f} s"
    lines = printed.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else {}
    except ValueError:
        result = {}
    if status != 0:
        said = [line for line in log.read_text().splitlines() if line.strip()]
        result |= {"status": status, "said": said[-1][:300] if said else ""}
    return result | {"section": name, "wall_seconds": round(time.perf_counter() - began, 1)}


def run_all(device: str, names: list[str], output: Path) -> list[dict]:
    output.mkdir(parents=True, exist_ok=True)
    slower = SLOWER if device == "cpu" else 1
    results, end = [], time.monotonic() + TOTAL * slower
    with (output / "gpu.jsonl").open("w") as file:
        for name in names:
            section, left = sections(device)[name], end - time.monotonic()
            result = {"section": name, "status": "no time left"}
            if left > LEAST:
                result = run(name, section, min(section.seconds * slower, left), output)
            results.append(result)
            print(json.dumps(result), file=file, flush=True)
            print(f"{name}: {result.get('status', 'ok')}, {result.get('wall_seconds', 0)} s", file=sys.stderr)
    return results


# ------------------------------------------------------------------------------------------ sections
def env(device: str, shape: str) -> dict:
    """The machine, how fast it reads and multiplies, and what a kernel costs in a graph of them."""
    found = hardware(device, torch.get_num_threads())
    size = 2**23 if device == "cpu" else 2**32
    found["read_bytes_per_second"] = read_bandwidth(device, size)
    found["flops_per_second"] = measured_peak(torch.device(device), torch.bfloat16)
    if device == "cuda":
        found["capability"] = torch.cuda.get_device_capability()
        found["microseconds_a_kernel"] = {count: kernel_seconds(count) * 1e6 for count in (150, 300)}
    return found


def kernel_seconds(count: int) -> float:
    """Of one of `count` kernels, each of which waits for the one before it, in one graph."""
    x, graph = torch.ones(576, device="cuda"), torch.cuda.CUDAGraph()
    x.add_(1)
    with torch.cuda.graph(graph):
        for _ in range(count):
            x.add_(1)
    graph.replay()
    start = now("cuda")
    for _ in range(20):
        graph.replay()
    return (now("cuda") - start) / 20 / count


def tests(device: str, shape: str) -> dict:
    """tests/test_cuda.py: how many passed, and what the others said."""
    import pytest  # only here: a bare machine may lack it

    class Results:
        def __init__(self):
            self.counts: Counter[str] = Counter()
            self.failed: dict[str, str] = {}

        def pytest_runtest_logreport(self, report) -> None:
            if report.when == "call" or report.outcome != "passed":
                self.counts[report.outcome] += 1
            if report.failed:
                self.failed[report.nodeid.split("::")[-1]] = (
                    str(report.longrepr).strip().splitlines()[-1][:200]
                )

    results = Results()
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", str(ROOT / "tests/test_cuda.py")], plugins=[results]
    )
    return {"exit": int(status), **results.counts, "failures": results.failed}


@torch.no_grad()
def parity(device: str, shape: str) -> dict:
    """Beside transformers with the same weights: logits of a prompt, relative to their standard deviation,
    and how many greedy tokens are equal from the first on. Then the logits of one decode step of each kind,
    beside those of the eager step in float32."""
    found: dict[str, Any] = {}
    exact: torch.Tensor | None = None
    for precision, dtype in DTYPES.items():
        ours, theirs = (build(shape, dtype, device) for build in (build_ours, build_transformers))
        inputs: dict[str, Any] = prompt(shape, 2, device=device)
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
        got, expected = (model(**inputs).logits.float() for model in (ours, theirs))
        row: dict[str, Any] = {"prompt_logits": relative(got, expected)}
        row["same_argmax"] = (got.argmax(-1) == expected.argmax(-1)).float().mean().item()
        tokens = theirs.generate(**inputs, max_new_tokens=PARITY_TOKENS, do_sample=False)
        tokens = tokens[:, inputs["input_ids"].shape[1] :]
        for name, step in decode_steps(ours).items():
            own = ours.generate(**inputs, max_new_tokens=PARITY_TOKENS, stop_token_ids=(), decode_step=step)
            logits = step_logits(ours, step)
            exact = logits if exact is None else exact  # of the first: eager, in float32
            equal = int((own == tokens).long().cumprod(1).sum())
            row[name] = {"equal_tokens": equal, "step_logits": relative(logits, exact)}
        found[precision] = row
        del ours, theirs
    return found


def decode_steps(model) -> dict[str, Any]:
    """The eager step and the fast one, by name."""
    step, name = fast_step(model.language_model)
    return {"eager": None, name: step}


def step_logits(model, step) -> torch.Tensor:
    """(1, V) of a token after random keys and values."""
    language_model = model.language_model
    weight = language_model.norm.weight
    cache = kv.allocate_for(model.config.text, 1, PARITY_CONTEXT + 1, like=weight)
    for layer in cache:
        fill(layer["key"], 1.0), fill(layer["value"], 1.0, start=7919)
    ids = torch.full((1, 1), 7, device=weight.device)
    return (step or Step(language_model))(ids, cache, PARITY_CONTEXT).float()


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).abs().max() / expected.std()).item()


OWN = {"env": env, "tests": tests, "parity": parity}


# ------------------------------------------------------------------------------------------- the table
def table(results: list[dict]) -> str:
    """What was measured, in Markdown; a dash where a section has not come to its end."""
    by_name = {result["section"]: result for result in results}

    def rows(name: str) -> list[dict]:
        return by_name.get(name, {}).get("rows", [])

    heads = [
        "weights",
        "context",
        "rows",
        "tokens/s",
        "x transformers",
        "x torch.compile",
        "of the floor",
        "step",
    ]
    lines = [
        [
            row["precision"], f"{row['context']:,}", str(row["batch"]),
            f"{row['decode_tokens_per_second']:,.0f}",
            number(row["over_static"], ".2f"), number(row["speed_over"].get("ours-compiled"), ".2f"),
            f"{row['floor_fraction']:.0%}", row["step"],
        ]
        for name in ("decode", "int8", "rows")
        for row in rows(name)
        if row["system"] == "ours-fast"
    ]  # fmt: skip
    parts = [markdown(heads, lines)]
    first = [
        [str(row["tiles"]), f"{row['first_token_seconds'] * 1000:.1f} ms",
         number(row["first_token_over_transformers"], ".2f")]
        for row in rows("first_token") if row["system"] == "ours-fast"
    ]  # fmt: skip
    parts.append(markdown(["tiles", "first token", "/ transformers"], first))
    trained = [
        [
            shape,
            f"{row['tokens_per_second']:,.0f}",
            f"{row['mfu']:.0%}",
            f"{row['peak_mebibytes'] / 1024:.1f} GiB",
        ]
        for shape in RECIPES
        for row in rows(f"training {shape}")
    ]
    parts.append(markdown(["recipe", "tokens/s", "MFU", "memory"], trained))
    return "\n\n".join(parts) + "\n"


def write_page(text: str, found: dict) -> None:
    """The table into docs/speed.md, under the name of the machine."""
    machine = f"On one {found['gpu']}, torch {found['torch']}, transformers {found['transformers']}:"
    begin, rest = PAGE.read_text().split(MARKS[0], 1)
    head, rest = rest.split("\n", 1)  # what the mark says about itself
    PAGE.write_text(f"{begin}{MARKS[0]}{head}\n{machine}\n\n{text}{MARKS[1]}{rest.split(MARKS[1], 1)[1]}")


def main(arguments: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="device (default cuda)")
    add("--only", metavar="S,S", help=f"some of {', '.join(sections('cpu'))}")
    add("--output", type=Path, default=ROOT / "runs/gpu", help="folder of the results (default runs/gpu)")
    add("--section", choices=OWN, help="run this one in this process, as the others' processes do")
    options = parser.parse_args(arguments)
    if options.section:
        shape = "tiny" if options.device == "cpu" else "SmolVLM-256M"
        print(json.dumps(OWN[options.section](options.device, shape)), flush=True)
        return 0
    names = options.only.split(",") if options.only else list(sections(options.device))
    if unknown := [name for name in names if name not in sections("cpu")]:
        parser.error(f"--only: expected some of {', '.join(sections('cpu'))}, got {', '.join(unknown)}")
    results = run_all(options.device, names, options.output)
    (options.output / "gpu.md").write_text(table(results))
    print(table(results))
    if options.device == "cuda" and not options.only and "gpu" in results[0]:
        write_page(table(results), results[0])
    print(json.dumps({"benchmark": "gpu", "sections": results}), flush=True)
    return int(any("status" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
