"""--help, --version and every refusal of a command line need no torch, which takes seconds to import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inference import flags
from models import __version__
from models.checkpoints.names import MODELS

ROOT = Path(__file__).resolve().parent.parent
ENTRY_POINTS = {
    "generate": "--max-new-tokens",
    "app": "--drain",
    "serve": "--drain",
    "eval.__main__": "--tasks",
    "tools.__main__": "convert",
    "training.config": "--lora-rank",
}
SHAPES = ["--tasks", "shapes"]
ROWS = ["--data", "assets/rows.jsonl", "--init-from"]
WHERE = ["where", "assets/cup.png"]
CONVERT = ["convert", "ocelli-shapes"]
# (module of the entry point, arguments, what the sentence must name)
REFUSED = [
    ("generate", ["--num-answer", "3"], "--num-answers"),
    ("generate", ["--out", "x.jsonl"], "--out"),
    ("generate", ["--compile", "on", "--no-cache"], "--no-cache cannot be combined with --compile on"),
    (
        "generate",
        ["--lookup", "on", "--no-cache"],
        "--lookup on",
    ),
    ("generate", ["-q", "how many?", "-q", " "], "-q"),
    ("generate", ["batch", "x.jsonl"], "--out"),
    ("generate", ["batch", "x.jsonl", "--out", "y.jsonl", "-q", "why?"], "-q"),
    ("generate", [*WHERE, "-q", "how many?", "-q", "why?"], "question"),
    ("generate", [*WHERE, "why?", "--out", "no/where.png"], "'no'"),
    ("generate", [*WHERE, "why?", "--out", "assets/cup.png"], "cup.png"),  # meant as the image
    ("generate", ["assets/cupp.png", "What is it?"], "assets/cupp.png"),
    ("generate", ["--temperature", "-1"], "temperature"),
    ("generate", ["--max-new-tokens", "0"], "--max-new-tokens"),
    ("generate", ["--top-p", "nan"], "top_p"),
    ("generate", ["--seed", "-1"], "seed"),
    ("generate", ["--dtype", "bf17"], "bf17"),
    ("generate", ["--device", "toaster"], "toaster"),
    ("generate", ["--model", "checkpoints/ocelli-shape"], "checkpoints/ocelli-shapes"),
    ("generate", ["--model", "assets"], "config.json"),
    ("generate", ["chat", "nothing.png"], "nothing.png"),
    ("generate", ["--adapter", "assets"], "adapter_config.json"),
    ("generate", ["--model", "owner/nothing"], "owner/nothing"),
    ("generate", ["batch", "assets/question.jsonl", "--out", "OUT"], "assets/question.jsonl"),
    ("generate", ["batch", "assets/questions.jsonl", "--out", "OUT", "--temperature", "x"], "temperature"),
    ("serve", ["--port", "99999"], "--port"),
    ("app", ["--drian"], "--drain"),
    ("serve", ["--model", "checkpoints/ocelli-shape"], "checkpoints/ocelli-shapes"),
    ("serve", ["--drian", "3"], "--drain"),
    ("serve", ["--queue", "0"], "--queue"),
    ("serve", ["--adapter", "checkpoints/ocelli-shape"], "ocelli-shapes"),
    ("eval.__main__", ["--task", "shapes"], "--tasks"),
    ("eval.__main__", ["--tasks", "shape"], "shapes"),
    ("eval.__main__", ["--data", "assets/question.jsonl"], "assets/question.jsonl"),
    ("eval.__main__", ["--data", "assets/questions.jsonl", "--metric", "anl"], "anls"),
    ("eval.__main__", [*SHAPES, "--model", "checkpoints/ocelli-shape"], "checkpoints/ocelli-shapes"),
    ("eval.__main__", ["--data", "README.md"], ".md"),
    ("eval.__main__", ["compare", "assets", "docs"], "assets"),
    ("eval.__main__", ["card", "checkpoints/ocelli-shapes", "docs"], "docs"),
    ("tools.__main__", ["inspect", "checkpoints/ocelli-shape"], "checkpoints/ocelli-shapes"),
    ("tools.__main__", ["inspect", "ocelli-shapes", "--image", "assets/cupp.png"], "cupp.png"),
    ("tools.__main__", ["inspect", "ocelli-shapes", "--image", "0x20"], "0 x 20"),
    ("tools.__main__", [*CONVERT, "checkpoints/ocelli-shapes"], "--overwrite"),
    ("tools.__main__", [*CONVERT, "OUT", "--adapter", "nothing"], "nothing"),
    ("training.config", ["--stepps", "3"], "--steps"),
    ("training.config", ["configs/box.yaml"], "configs/box.yaml"),
    ("training.config", ["--lr", "-1"], "--lr"),
    ("training.config", [*ROWS, "ocelli-shapes", "--device", "toaster"], "toaster"),
    ("training.config", [*ROWS, "checkpoints/ocelli-shape"], "checkpoints/ocelli-shapes"),
    (
        "training.config",
        ["--init-from", "ocelli-shapes", "--data", "assets/question.jsonl"],
        "assets/question.jsonl",
    ),
    ("training.config", [*ROWS, "assets"], "config.json"),
    ("training.config", [*ROWS, "ocelli-shapes", "--output", "README.md"], "README.md"),
]
# What train.py calls before it imports torch is `parse_command`. None: a module that cannot be imported.
RUN = """
import contextlib, importlib, io, json, sys
sys.modules["torch"] = None
for name, arguments in json.load(sys.stdin):
    module = importlib.import_module(name)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = getattr(module, "parse_command", None) or module.main
            status = status(arguments)
        except SystemExit as stop:
            status = stop.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


def run(calls: list[tuple[str, list[str]]]) -> list[tuple[int, str, str]]:
    command, given = [sys.executable, "-c", RUN], json.dumps(calls)
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT, env=offline)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_mistakes_are_told_without_torch(tmp_path):
    calls = [(name, [arg.replace("OUT", str(tmp_path / "out")) for arg in args]) for name, args, _ in REFUSED]
    for (_, arguments, named), (status, out, err) in zip(REFUSED, run(calls), strict=True):
        assert (status, out) == (2, "") and err.count("\n") == 1 and named in err, (arguments, err)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_short_names_are_listed_without_torch():
    calls = [(name, ["--model", "list"]) for name in ("generate", "app", "serve", "eval.__main__")]
    for status, out, err in run([*calls, ("tools.__main__", ["inspect", "list"])]):
        assert (status, err) == (0, "")
        assert all(name in out and f"{known.gigabytes} GB" in out for name, known in MODELS.items())


@pytest.mark.slow
def test_help_and_version_need_no_torch():
    calls = [(name, [option]) for name in ENTRY_POINTS for option in ("--help", "--version")]
    for (name, (option,)), (status, out, err) in zip(calls, run(calls), strict=True):
        assert (status, err) == (0, ""), name
        assert (ENTRY_POINTS[name] if option == "--help" else __version__) in out, name


def test_a_long_load_is_told(capsys, monkeypatch):
    monkeypatch.setattr(flags, "LOG_AFTER", 0.01)
    with flags.log_if_slow("program", "the/model"):
        time.sleep(0.2)
    assert capsys.readouterr().err == "program: loading the/model\n"
    monkeypatch.setattr(flags, "LOG_AFTER", 60)
    with pytest.raises(OSError), flags.log_if_slow("program", "the/model"):
        raise OSError
    assert capsys.readouterr().err == ""
