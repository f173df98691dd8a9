"""A disk that may only be read: said before anything is computed; in mid-run, the run goes on."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest

import generate
import train
from eval.__main__ import main as evaluate
from tests.evaluations import FORK, write_rows
from tests.runs import SETTINGS, curve, flags, tiny_checkpoint
from tests.runs import write_rows as write_training_rows
from tests.waiting import PATIENCE
from training.state import FOLDER, states

_VERSION_3 = 0x20080522  # of capset(2)


def without_privileges(work, told) -> None:
    """Run `work` in this process, which may do no more than its files' modes say, root or not."""
    header, none = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")
    sys.stdout = sys.stderr = told.open("w")
    raise SystemExit(work())


@pytest.fixture
def locked(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    yield folder
    folder.chmod(0o755)


def refused(work, told) -> str:
    """What a command said that ended with status 2."""
    process = FORK.Process(target=without_privileges, args=(work, told))
    process.start()
    process.join(PATIENCE)
    said = told.read_text()
    assert process.exitcode == 2 and "Traceback" not in said, said
    return said


def test_a_batch_and_an_evaluation(tmp_path, locked):
    rows = write_rows(tmp_path, 1, 3)
    batch = ["--batch", str(rows), "--out", str(locked / "out.jsonl"), "--compile", "off"]
    said = refused(lambda: generate.main(batch), tmp_path / "told")
    assert f"{locked / 'out.jsonl'}: Permission denied" in said
    arguments = ["--data", str(rows), "--output", str(locked / "out"), "--compile", "off"]
    said = refused(lambda: evaluate(arguments), tmp_path / "told")
    assert "Permission denied" in said and str(locked) in said


def training(folder, output, **more) -> list[str]:
    data = [{"path": str(folder / "rows.jsonl"), "name": "rows"}]
    made = {"init_from": str(folder / "tiny"), "data": data, "output": str(output)}
    return flags(**(SETTINGS | made | more))


def test_a_run_that_cannot_begin(tmp_path, locked):
    tiny_checkpoint(tmp_path / "tiny")
    write_training_rows(tmp_path / "rows.jsonl")
    said = refused(lambda: train.main(training(tmp_path, locked / "run", steps=2)), tmp_path / "told")
    assert "Permission denied" in said and str(locked) in said


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
        said = refused(work, tmp_path / "told")
    finally:
        for folder in folders:
            os.chmod(folder, 0o755)
    assert "error: the latest model is not saved: " in said
    assert "the model could not be saved, the run goes on" in said
    assert "the training state could not be saved, the one before is kept, the run goes on" in said
    assert "Permission denied" in said
    assert states(output / FOLDER) and [row[0] for row in curve(output)] == list(range(1, 41))
    train.main(training(tmp_path, output, **steps))
    train.main(training(tmp_path, tmp_path / "whole", **steps))
    assert curve(output) == curve(tmp_path / "whole")
