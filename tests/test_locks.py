"""Two processes and one output: the second one is refused at once, and what is there stays as it is."""

from __future__ import annotations

import errno
import os
import sys
import time

import pytest

import generate
from inference.checkpoint import RequestError
from inference.results import only_writer
from tests.evaluations import FORK, exits_of_ranks, write_rows
from tests.runs import SETTINGS, start, tiny_checkpoint
from tests.runs import write_rows as write_training_rows
from tests.waiting import PATIENCE


def exits_of_trainings(folder, output) -> list[int | None]:
    tiny_checkpoint(folder / "tiny")
    write_training_rows(folder / "rows.jsonl")
    data = [{"path": str(folder / "rows.jsonl"), "name": "rows"}]
    ranks = start(2, **SETTINGS | {"init_from": str(folder / "tiny"), "data": data, "output": str(output)})
    for rank in ranks:
        rank.join(PATIENCE)
    return [rank.exitcode for rank in ranks]


def exits_of_evaluations(folder, output) -> list[int | None]:
    rows = write_rows(folder, 1, 3)
    return exits_of_ranks([["--data", str(rows), "--output", str(output), "--compile", "off"]] * 2)


def exits_of_a_batch(folder, output) -> list[int | None]:
    command = ["batch", str(write_rows(folder, 1, 3)), "--out", str(output)]
    process = FORK.Process(target=lambda: sys.exit(generate.main(command)))
    process.start()
    process.join(PATIENCE)
    return [process.exitcode]


@pytest.mark.parametrize("second", [exits_of_a_batch, exits_of_evaluations, exits_of_trainings])
def test_a_second_run_is_refused(tmp_path, capfd, second):
    """On all of its ranks."""
    output = tmp_path / "runs" / "out"
    with only_writer(output, parents=True):
        assert set(second(tmp_path, output)) == {2}
        said = capfd.readouterr().err
        assert str(output) in said and f"pid {os.getpid()}" in said and "Traceback" not in said
        assert [path.name for path in output.parent.iterdir()] == [".out.lock"]
    assert list(output.parent.iterdir()) == []


def test_nothing_is_left_and_what_was_left_locks_nobody_out(tmp_path):
    (tmp_path / ".run.lock").write_text("1234")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with only_writer(folder / "run"):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_fork_does_not_hold_on_to_it(tmp_path):
    """A loader's worker that outlives the run for a moment; and two names of one output."""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with only_writer(tmp_path / "run"):
        with pytest.raises(RequestError, match=f"pid {os.getpid()}"):
            only_writer(tmp_path / "link").__enter__()
        worker = FORK.Process(target=time.sleep, args=(600,))
        worker.start()
    try:
        with only_writer(tmp_path / "run"):
            pass
    finally:
        worker.kill()
        worker.join()


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(handle, how):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    with only_writer(tmp_path / "run"):
        (tmp_path / "run").mkdir()
    assert (tmp_path / "run").exists()
