"""Two processes and one output: the second one is refused at once, and the first one's files stay whole."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from contextlib import contextmanager

import pytest
from tqdm import tqdm

import generate
import train
from eval.__main__ import main as evaluate
from inference.checkpoint import RequestError
from inference.locks import only_writer
from tests.evaluations import FORK, answered, exits_of_ranks, write_rows
from tests.runs import SETTINGS, curve, flags, start, tiny_checkpoint
from tests.runs import write_rows as write_training_rows
from tests.soak.kills import last_step
from tests.waiting import PATIENCE
from training.metrics import Metrics


@contextmanager
def stopped(work, owner, name: str, there):
    """`work` in a process that stands still, with all it has open, behind the first call of `owner.name`
    after which `there()` is true; it goes on behind the block. It stops itself: it could have ended before
    anybody has looked."""
    act, stops = getattr(owner, name), [signal.SIGSTOP]

    def acting(*arguments):
        done = act(*arguments)
        if stops and there():
            os.kill(os.getpid(), stops.pop())
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, acting)
        process = FORK.Process(target=work)
        process.start()
    state, until = None, time.monotonic() + PATIENCE
    while state is None and time.monotonic() < until:
        time.sleep(0.01)
        state = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
    try:
        assert state is not None and state.si_code == os.CLD_STOPPED
        yield process
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.join(PATIENCE)


def files_of(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lines(path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def settings(folder, output) -> dict:
    data = [{"path": str(folder / "rows.jsonl"), "name": "rows"}]
    made = {"init_from": str(folder / "tiny"), "data": data, "output": str(folder / output)}
    return SETTINGS | made | {"steps": 40, "save_every": 4}


def test_two_trainings(tmp_path, capfd):
    """The second one has two ranks; killed, the first one's lock is gone with it."""
    tiny_checkpoint(tmp_path / "tiny")
    write_training_rows(tmp_path / "rows.jsonl")
    run, output = settings(tmp_path, "runs/mine"), tmp_path / "runs" / "mine"

    def first() -> None:
        train.main(flags(**run))

    with stopped(first, Metrics, "write", lambda: last_step(output) > 5) as process:
        before = files_of(output)
        others = start(2, **run)
        for other in others:
            other.join(PATIENCE)
        err = capfd.readouterr().err
        assert [other.exitcode for other in others] == [2, 2]
        assert f"{output} is being written by another process (pid {process.pid})" in err
        assert "Traceback" not in err
        assert files_of(output) == before
        process.kill()
    train.main(flags(**run))
    train.main(flags(**settings(tmp_path, "whole")))
    assert curve(output) == curve(tmp_path / "whole")
    assert [path.name for path in output.parent.iterdir()] == ["mine"]


def test_two_batches(tmp_path, capfd):
    rows, out = write_rows(tmp_path, 4, 6), tmp_path / "out.jsonl"
    command = ["--batch", str(rows), "--out", str(out), "--compile", "off", "--batch-size", "4"]

    def first() -> None:
        sys.exit(generate.main(command))

    # The bar moves after each line is written.
    with stopped(first, tqdm, "update", lambda: lines(out) > 3) as process:
        before = out.read_bytes()
        assert generate.main(command) == 2
        err = capfd.readouterr().err.splitlines()[-1]
        assert f"{out} is being written by another process (pid {process.pid})" in err
        assert out.read_bytes() == before
    assert process.exitcode == 0 and not list(tmp_path.glob(".*"))
    assert sorted(json.loads(line)["line"] for line in out.read_text().splitlines()) == list(range(1, 25))


def test_two_evaluations(tmp_path, capfd):
    """The second one has two ranks, each of which would write to a file of its own."""
    rows, output = write_rows(tmp_path, 4, 6), tmp_path / "evals" / "out"
    command = ["--data", str(rows), "--output", str(output), "--compile", "off", "--batch-size", "4"]

    def first() -> None:
        sys.exit(evaluate(command))

    with stopped(first, tqdm, "update", lambda: lines(output / "samples.jsonl") > 3) as process:
        before = files_of(output)
        assert exits_of_ranks([command] * 2) == [2, 2]
        said = capfd.readouterr().err
        assert f"{output} is being written by another process (pid {process.pid})" in said
        assert "Traceback" not in said and files_of(output) == before
    assert process.exitcode == 0 and len(answered(output)) == 24
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_nothing_is_left_and_what_was_left_locks_nobody_out(tmp_path):
    (tmp_path / ".run.lock").write_text("1234")
    with only_writer(tmp_path / "run"):
        assert (tmp_path / ".run.lock").read_text() == str(os.getpid())
    with pytest.raises(KeyError), only_writer(tmp_path / "a" / "b" / "run", parents=True):
        assert (tmp_path / "a" / "b" / ".run.lock").exists()
        raise KeyError
    with only_writer(tmp_path / "nowhere" / "run"):
        assert not (tmp_path / "nowhere").exists()
    assert list(tmp_path.iterdir()) == []


def test_two_names_of_one_output(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")

    def second() -> None:
        with pytest.raises(RequestError, match=f"link is being written by .*pid {os.getppid()}"):
            only_writer(tmp_path / "link").__enter__()

    with only_writer(tmp_path / "run"):
        process = FORK.Process(target=second)
        process.start()
        process.join(PATIENCE)
    assert process.exitcode == 0


def test_a_fork_does_not_hold_on_to_it(tmp_path):
    """A loader's worker that outlives the run for a moment."""
    with only_writer(tmp_path / "run"):
        worker = FORK.Process(target=time.sleep, args=(600,))
        worker.start()
    try:
        second = FORK.Process(target=only_writer(tmp_path / "run").__enter__)
        second.start()
        second.join(PATIENCE)
        assert second.exitcode == 0
    finally:
        worker.kill()
        worker.join()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number):
    def refuse(handle, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with only_writer(tmp_path / "run"):
        (tmp_path / "run").mkdir()
    assert (tmp_path / "run").exists()
