"""A disk that fills up while answers are written: said with the file's name, and the next start goes on."""

from __future__ import annotations

import resource
import sys

import pytest

import generate
from eval.__main__ import main as evaluate
from tests.evaluations import FORK, answered, write_rows

IMAGES, EACH = 2, 12
ROWS = IMAGES * EACH


def limited(work, size: int, told) -> None:
    """Run `work` in this process, whose files may not grow past `size` bytes: a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    sys.stderr = told.open("w")
    raise SystemExit(work())


def run(work, size: int, told) -> int | None:
    process = FORK.Process(target=limited, args=(work, size, told))
    process.start()
    process.join(600)
    return process.exitcode


def test_a_batch(tmp_path):
    rows, out = write_rows(tmp_path, IMAGES, EACH), tmp_path / "out.jsonl"

    def work() -> int:
        paths = ["--batch", str(rows), "--out", str(out), "--compile", "off"]
        return generate.main([*paths, "--max-new-tokens", "32", "--batch-size", "4"])

    assert run(work, 5_001, tmp_path / "told") == 2
    said = (tmp_path / "told").read_text().splitlines()[-1]
    assert said.startswith(f"generate.py: error: {out}: File too large; answers so far are kept")
    kept = out.read_bytes().splitlines(keepends=True)
    assert 0 < len(kept) < ROWS
    assert run(work, 10**9, tmp_path / "told") == 0
    lines = out.read_bytes().splitlines(keepends=True)
    whole = [line for line in kept if line.endswith(b"\n")]
    assert set(lines) >= set(whole) and len(set(lines)) == len(lines) == ROWS


@pytest.mark.parametrize("size", [3_000, 14_000])  # bytes: in samples.jsonl, in report.html
def test_an_evaluation(tmp_path, size):
    rows, output = write_rows(tmp_path, IMAGES, EACH), tmp_path / "out"

    def work() -> int:
        return evaluate(["--data", str(rows), "--output", str(output), "--compile", "off"])

    assert run(work, size, tmp_path / "told") == 2
    said = (tmp_path / "told").read_text().splitlines()[-1]
    assert said.startswith(f"python -m eval: error: {output}") and "File too large" in said
    assert not list(output.glob("*.tmp")) and not (output / "report.html").exists()
    before = (output / "samples.jsonl").read_bytes()
    assert run(work, 10**9, tmp_path / "told") == 0
    whole = before[: before.rfind(b"\n") + 1]
    assert (output / "samples.jsonl").read_bytes().startswith(whole) and len(answered(output)) == ROWS
    assert (output / "report.html").exists()
