"""A disk that may only be read, or that fills up: a command says so with the file's name, keeps what it has,
and the next start goes on."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable

import pytest

import generate
import train
from eval.__main__ import main as evaluate
from tests.evaluations import FORK, answered, write_rows
from tests.runs import SETTINGS, curve, flags, tiny_checkpoint
from tests.runs import write_rows as write_training_rows
from tests.waiting import PATIENCE
from training.state import FOLDER, states

_VERSION_3 = 0x20080522  # of capset(2)
IMAGES, EACH = 2, 12
ROWS = IMAGES * EACH


def without_privileges() -> None:
    """This process may do no more than its files' modes say, root or not."""
    header, none = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def at_most(size: int) -> Callable[[], None]:
    """This process's files may not grow past `size` bytes: a disk that is full."""

    def limit() -> None:
        sys.dont_write_bytecode = True  # Python would leave modules that are cut off
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def refused(work: Callable[[], object], limit: Callable[[], None], log) -> str:
    """What a command printed that ended with status 2, in a process of its own under a limit."""

    def child() -> None:
        limit()
        sys.stdout = sys.stderr = log.open("w")
        raise SystemExit(work())

    process = FORK.Process(target=child)
    process.start()
    process.join(PATIENCE)
    printed = log.read_text()
    assert process.exitcode == 2 and "Traceback" not in printed, printed
    return printed


@pytest.fixture
def locked(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    yield folder
    folder.chmod(0o755)


def training(folder, output, **more) -> list[str]:
    data = [{"path": str(folder / "rows.jsonl"), "name": "rows"}]
    made = {"init_from": str(folder / "tiny"), "data": data, "output": str(output)}
    return flags(**(SETTINGS | made | more))


def test_commands_that_cannot_begin(tmp_path, locked):
    rows = write_rows(tmp_path, 1, 3)
    tiny_checkpoint(tmp_path / "tiny")
    write_training_rows(tmp_path / "rows.jsonl")
    for work, path in (
        (lambda: generate.main(["batch", str(rows), "--out", str(locked / "out.jsonl")]), "out.jsonl"),
        (lambda: evaluate(["--data", str(rows), "--output", str(locked / "out")]), ""),
        (lambda: train.main(training(tmp_path, locked / "run", steps=2)), ""),
    ):
        printed = refused(work, without_privileges, tmp_path / "log")
        assert "Permission denied" in printed and str(locked / path) in printed


@pytest.mark.slow
def test_a_disk_that_becomes_so_in_mid_run(tmp_path):
    """It is said, what was saved is kept, and a later start goes on from it."""
    tiny_checkpoint(tmp_path / "tiny")
    write_training_rows(tmp_path / "rows.jsonl")
    output, steps = tmp_path / "run", {"steps": 40, "save_every": 4}
    folders, save = [tmp_path, output, output / FOLDER], train.Run.save

    def saved_once(self):
        save(self)
        for folder in folders:
            os.chmod(folder, 0o555)

    def work() -> None:
        train.Run.save = saved_once
        train.main(training(tmp_path, output, **steps))

    try:
        printed = refused(work, without_privileges, tmp_path / "log")
    finally:
        for folder in folders:
            os.chmod(folder, 0o755)
    assert "error: the latest model is not saved: " in printed and "Permission denied" in printed
    assert states(output / FOLDER) and [row[0] for row in curve(output)] == list(range(1, 41))
    train.main(training(tmp_path, output, **steps))
    train.main(training(tmp_path, tmp_path / "whole", **steps))
    assert curve(output) == curve(tmp_path / "whole")


@pytest.mark.slow
def test_a_batch_on_a_full_disk(tmp_path):
    rows, out = write_rows(tmp_path, IMAGES, EACH), tmp_path / "out.jsonl"

    def work() -> int:
        paths = ["batch", str(rows), "--out", str(out), "--compile", "off"]
        return generate.main([*paths, "--max-new-tokens", "32", "--batch-size", "4"])

    printed = refused(work, at_most(5_001), tmp_path / "log")
    assert f"{out}: File too large" in printed
    kept = out.read_bytes().splitlines(keepends=True)
    assert 0 < len(kept) < ROWS
    assert work() == 0
    lines = out.read_bytes().splitlines(keepends=True)
    whole = [line for line in kept if line.endswith(b"\n")]
    assert set(lines) >= set(whole) and len(set(lines)) == len(lines) == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("size", [14_000])  # bytes: in report.html
def test_an_evaluation_on_a_full_disk(tmp_path, size):
    rows, output = write_rows(tmp_path, IMAGES, EACH), tmp_path / "out"

    def work() -> int:
        return evaluate(["--data", str(rows), "--output", str(output), "--compile", "off"])

    printed = refused(work, at_most(size), tmp_path / "log")
    assert str(output) in printed and "File too large" in printed
    assert not list(output.glob("*.tmp")) and not (output / "report.html").exists()
    before = (output / "samples.jsonl").read_bytes()
    assert work() == 0
    whole = before[: before.rfind(b"\n") + 1]
    assert (output / "samples.jsonl").read_bytes().startswith(whole) and len(answered(output)) == ROWS
    assert (output / "report.html").exists()
