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
        return ["-c", f"from benchmarks.probe import {name}; {name}({device!r})"]

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
