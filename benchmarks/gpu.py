"""The first run on a GPU: does it work, is it right, how fast is it, beside what. `gpu.sh` starts it.

    python -m benchmarks.gpu --output runs/gpu      # at most nine minutes
    python -m benchmarks.gpu --only tests,decode
    python -m benchmarks.gpu --device cpu           # with a tiny model, to see whether it runs

Each section runs in a process of its own, ended at its time limit or the whole run's, so that one that
crashes or hangs takes no other with it. Most are the other benchmarks. Each adds a line to OUTPUT/gpu.jsonl,
its log lies beside it. What was measured becomes tables in OUTPUT/gpu.md, and the last line of stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from benchmarks.common import hardware, table
from benchmarks.peers import read_bandwidth
from training.flops import known_peak, measured_peak

ROOT = Path(__file__).resolve().parent.parent
TOTAL, LEAST = 530, 15  # seconds of a whole run, and those without which no section begins
SLOWER = 4  # times that a CPU takes, most of them to import what a section needs
RECIPES = {"nanoVLM-222M": "nanovlm-222m", "nanoVLM-460M": "nanovlm-460m"}
# Of what was measured: sections, and the columns of their table.
TABLES = {
    ("decode", "rounded", "rows"): """precision context:, batch decode_tokens_per_second:,.0f
        over_transformers_static:.2f floor_fraction:.0% step""",
    ("first_token",): "tiles first_token_seconds:.4f first_token_over_transformers:.2f",
    tuple(
        f"training {shape}" for shape in RECIPES
    ): "shape tokens_per_second:,.0f mfu:.0% peak_mebibytes:,.0f",
}


class Section(NamedTuple):
    """seconds: at most. arguments: of Python, which ends with a line of JSON, but for tests and prove."""

    seconds: int
    arguments: list[str]


def sections(device: str) -> dict[str, Section]:
    """In the order of what they tell."""
    cpu = device == "cpu"
    model = ["--device", device, "--shape", "tiny" if cpu else "SmolVLM-256M"]
    model += ["--quick", "--threads", "1"] if cpu else ["--rounds", "2"]
    latency, bfloat16 = ["-m", "benchmarks.latency"], ["--precisions", "bfloat16"]
    decode = [*latency, "decode", *model, "--tokens", "4" if cpu else "64", "--systems"]
    contexts = ["--prompts", "1", "--contexts", ""] if cpu else ["--prompts", "1,17", "--contexts", "8000"]
    rows = ["--contexts", "", "--batch", "1,3" if cpu else "1,2,4,8,16,32,64,128,256"]
    first = [*latency, "first-token", *model, *bfloat16, "--systems", "ours-fast,transformers"]
    batching = ["-m", "benchmarks.throughput", "batching", *model, "--precision", "bfloat16"]
    prove = ["-m", "eval", "prove", "checkpoints/ocelli-shapes"]
    found = {
        "env": Section(40, ["-c", f"from benchmarks.gpu import env; env({device!r})"]),
        "prove": Section(60, [*prove, "--device", device, "--quick", "--html", "runs/gpu/prove.html"]),
        "tests": Section(60, ["-m", "pytest", "-p", "no:cacheprovider", "tests/test_cuda.py"]),
        "decode": Section(150, [*decode, "ours-fast,transformers-static", *bfloat16, *contexts]),
        "rounded": Section(90, [*decode, "ours-fast", "--precisions", "int8,int4", *contexts]),
        "rows": Section(60, [*decode, "ours-fast", *bfloat16, *contexts[:2], *rows]),
        "first_token": Section(60, first),
        "scheduler": Section(60, [*batching, "--slots", "2" if cpu else "32"]),
    }
    for shape, name in RECIPES.items():
        recipe = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())
        arguments = [*model, "--row", "128", "--documents", "4", "--steps", "1"]
        if not cpu:
            arguments = [*model[:3], shape, "--row", str(recipe["sequence_length"]), "--documents", "96"]
            arguments += ["--packed-micro-batch", str(recipe["micro_batch_size"]), "--tiles", "1,4,0"]
            arguments += ["--steps", "4", "--rounds", "1"]
            name_here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
            if flops := known_peak(name_here, torch.bfloat16):
                arguments += ["--peak-flops", str(flops)]
        arguments += ["--systems", "ours-packed"]
        found[f"training {shape}"] = Section(100, ["-m", "benchmarks.training", *arguments])
    return found


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
    last = (printed.strip().splitlines() or [""])[-1]
    try:
        result = json.loads(last)
    except ValueError:
        result = {"said": last[:300]}
    if status != 0:
        said = [line for line in log.read_text().splitlines() if line.strip()]
        result |= {"status": status} | ({"said": said[-1][:300]} if said else {})
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


def env(device: str) -> None:
    """A section of its own: the machine, and how fast it reads and multiplies."""
    found = hardware(device, torch.get_num_threads())
    found["read_bytes_per_second"] = read_bandwidth(device, 2**23 if device == "cpu" else 2**32)
    found["flops_per_second"] = measured_peak(torch.device(device), torch.bfloat16)
    print(json.dumps(found))


def report(results: list[dict]) -> str:
    """What was measured of ours, in Markdown; nothing of a section that has not come to its end."""
    by_name = {result["section"]: result for result in results}
    parts = []
    for names, columns in TABLES.items():
        rows = [row for name in names for row in by_name.get(name, {}).get("rows", [])]
        own = [row for row in rows if row["system"] in ("ours-fast", "ours-packed")]
        parts += [table(columns, own)] if own else []
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="device (default cuda)")
    add("--only", metavar="S,S", help=f"some of {', '.join(sections('cpu'))}")
    add("--output", type=Path, default=ROOT / "runs/gpu", help="folder of the results (default runs/gpu)")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(sections(options.device))
    if unknown := [name for name in names if name not in sections("cpu")]:
        parser.error(f"--only: expected some of {', '.join(sections('cpu'))}, got {', '.join(unknown)}")
    results = run_all(options.device, names, options.output)
    (options.output / "gpu.md").write_text(report(results))
    print(report(results))
    print(json.dumps({"benchmark": "gpu", "sections": results}), flush=True)
    return int(any("status" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
