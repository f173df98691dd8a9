"""Killed at any moment and gone on with: the curve and samples of a run that was never killed, bitwise."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import train
from models import VisionLanguageModel
from tests.runs import (
    contents,
    curve,
    ended,
    flags,
    named,
    prepared,
    refused,
    settings_in,
    start,
    write_rows,
)
from tests.soak.kills import kill_training
from tests.waiting import wait_for
from training.state import FOLDER, RunState, states


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("resume"))


def settings(folder, output: str, **more) -> dict:
    usual = {"save_every": 2, "muon": "language", "ema": 0.9}
    if more.get("streaming"):
        usual["shuffle_buffer"] = 5
    return settings_in(folder, output, **(usual | more))


@contextmanager
def no_file_beyond(room: int) -> Iterator[None]:
    """For processes that are started inside."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # Python would leave modules that are cut off
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow
@pytest.mark.parametrize(("style", "kills"), [("map", 1), ("streaming", 1), ("rewards", 1)])
def test_killed_at_random_moments(folder, style, kills):
    """`python -m tests.soak.kills` does it oftener."""
    outcome = kill_training(folder, kills=kills, style=style)
    assert outcome.killed == kills and outcome.as_never_killed, outcome


@pytest.fixture(scope="module")
def six_steps(folder):
    """Of a run that nothing happens to."""
    train.main(flags(**settings(folder, "plain", steps=6)))
    return curve(folder / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["_begin", "_finish"])
def test_killed_while_saving(folder, six_steps, moment, monkeypatch):
    """Before a state's first tensor is written, and before the whole one has its name."""
    output, act = f"saving{moment}", getattr(RunState, moment)

    def killed(self, *arguments):
        if moment == "_begin":
            act(self, *arguments)
        if states(self.folder):  # the second save
            os.kill(os.getpid(), signal.SIGKILL)
        if moment == "_finish":
            act(self, *arguments)

    monkeypatch.setattr(RunState, moment, killed)
    assert ended(start(**settings(folder, output, steps=6))) == [-signal.SIGKILL]
    monkeypatch.undo()
    assert [path.name for path in states(folder / output / FOLDER)] == ["step-00000002"]
    train.main(flags(**settings(folder, output, steps=6)))
    assert curve(folder / output) == six_steps


@pytest.mark.slow
def test_a_signal_to_all_its_processes_saves_and_leaves(folder):
    """As Slurm, systemd and Ctrl-C send it: to the loader's worker, too."""
    plateau = {"decay_fraction": 1e-9, "workers": 1}
    (process,) = start(**settings(folder, "stopped", steps=100_000, save_every=100_000, **plateau))
    file = folder / "stopped" / "metrics.jsonl"
    assert wait_for(lambda: file.exists() or not process.is_alive())
    os.killpg(process.pid, signal.SIGTERM)
    assert ended([process]) == [0]
    (state,) = states(folder / "stopped" / FOLDER)
    done = curve(folder / "stopped")[-1][0]
    assert state.name == f"step-{done:08d}"
    more = plateau | {"steps": done + 3}  # long enough for all of the warm-up
    train.main(flags(**settings(folder, "stopped", **more)))
    train.main(flags(**settings(folder, "unstopped", **more)))
    assert curve(folder / "stopped") == curve(folder / "unstopped")


@pytest.mark.slow
def test_dropout_is_that_of_a_run_that_was_never_stopped(folder):
    """Though the loader of the resumed run draws a seed for its worker."""
    more = {"lora_rank": 2, "lora_dropout": 0.5, "muon": "none", "workers": 1, "steps": 4}
    train.main(flags(**settings(folder, "dropout", **more)))
    whole = curve(folder / "dropout")
    shutil.rmtree(folder / "dropout" / FOLDER / "step-00000004")
    train.main(flags(**settings(folder, "dropout", **more)))
    assert curve(folder / "dropout") == whole


@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_at_once(folder, capfd, monkeypatch):
    def impatient(*arguments) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train.Run, "save", impatient)
    (process,) = start(**settings(folder, "impatient", steps=100_000, save_every=100_000))
    assert wait_for(lambda: (folder / "impatient/metrics.jsonl").exists() or not process.is_alive())
    os.kill(process.pid, signal.SIGINT)
    assert ended([process]) == [130] and "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_full_disk_does_not_end_the_run(folder, capfd):
    """After the first save no file may grow past 32 KB. What was saved stays, and the run resumes from it."""
    finish = RunState._finish

    def last(self, *arguments):  # in the run itself, which may be quicker than whoever watches it
        finish(self, *arguments)
        sys.dont_write_bytecode = True  # Python would leave modules that are cut off
        resource.setrlimit(resource.RLIMIT_FSIZE, (32_768, 32_768))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunState, "_finish", last)
        (process,) = start(**settings(folder, "full", steps=8))
    ended([process])
    said = capfd.readouterr()
    assert process.exitcode == 2 and "Traceback" not in said.err
    assert "could not be saved" in said.out and f"OSError: [Errno 27] {os.strerror(27)}" in said.out
    assert [row[0] for row in curve(folder / "full")] == list(range(1, 9))
    (kept,) = (folder / "full" / FOLDER).iterdir()  # nothing of a broken one takes room
    assert int(kept.name.removeprefix("step-")) < 8
    train.main(flags(**settings(folder, "full", steps=8)))
    train.main(flags(**settings(folder, "empty", steps=8)))
    assert curve(folder / "full") == curve(folder / "empty")


@pytest.mark.slow
@pytest.mark.parametrize("room, ranks, more", [(1000, 1, {}), (32_768, 2, {})])
def test_a_full_disk_with_no_state_on_it(folder, capfd, room, ranks, more):
    """Too small for run.yaml, or for a state's tensors: the system's reason is given."""
    output = f"none-{ranks}"
    with no_file_beyond(room):
        processes = start(ranks, **settings(folder, output, steps=2, log_every=100, muon="none", **more))
    assert ended(processes) == [2] * ranks
    said = capfd.readouterr()
    assert os.strerror(27) in said.err + said.out and "Traceback" not in said.err
    assert not states(folder / output / FOLDER)


@pytest.mark.slow
def test_a_model_that_was_not_saved_is_saved_by_the_next_start(folder, capsys, monkeypatch):
    """Also where its state was, so that no step is left to do."""
    made = flags(**settings(folder, "unsaved", steps=3))

    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(VisionLanguageModel, "save_pretrained", full)
        assert "the latest model is not saved: " in refused(capsys, made)
    assert not (folder / "unsaved/model.safetensors").exists()
    assert states(folder / "unsaved" / FOLDER)[-1].name == "step-00000003"
    train.main(made)
    train.main(flags(**settings(folder, "saved", steps=3)))
    one, other = ((folder / name / "model.safetensors").read_bytes() for name in ("unsaved", "saved"))
    assert one == other


@pytest.mark.slow
def test_a_signal_to_one_rank_in_the_last_save(folder, monkeypatch):
    """All ranks know of it, or none would wait for the other."""
    save = train.Run.save

    def signalled(self):
        if self.ranks.is_first:
            os.kill(os.getpid(), signal.SIGTERM)
        save(self)

    monkeypatch.setattr(train.Run, "save", signalled)
    processes = start(2, **settings(folder, "late", steps=2, save_every=100))
    assert ended(processes) == [0, 0]


# --------------------------------------------------------------------------------------- other settings
@pytest.fixture(scope="module")
def two_steps(folder):
    train.main(flags(**settings(folder, "two-steps", steps=2)))
    return folder


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "change",
    [
        {"muon": "all"},
        {"vision_lr": 0.0},
        {"ema": 0.0},
        {"lora_rank": 2},
        {"init_from": "checkpoints/ocelli-shapes"},
        {"tracker": "wandb", "resume": False},
    ],
)
def test_what_is_refused_loses_nothing(two_steps, change, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    before = contents(two_steps / "two-steps")
    said = refused(capsys, flags(**settings(two_steps, "two-steps", steps=3, **change)))
    assert f"--{next(iter(change)).replace('_', '-')} " in said
    assert contents(two_steps / "two-steps") == before


# -------------------------------------------------------------------------------------------- broken states
@pytest.fixture(scope="module")
def adapted(folder):
    """With adapters and in bfloat16: the settings, and the files that a repeated step has to make again."""
    more = {"precision": "bfloat16", "lora_rank": 2, "activation_checkpointing": True, "eval_every": 4}
    held = named(write_rows(folder / "held.jsonl", 4))
    more |= {"eval_data": held, "steps": 4, "batch_size": 4, "muon": "none", "ema": 0.0}
    train.main(flags(**settings(folder, "adapted", **more)))
    return more


@pytest.mark.slow
@pytest.mark.parametrize("file", ["run.pt", "*.distcp"])
def test_a_broken_state_is_passed_over(folder, adapted, capsys, file):
    run = folder / f"broken-{file.strip('*.')}"
    shutil.copytree(folder / "adapted", run)
    before, newest = states(run / FOLDER)
    (path,) = newest.glob(file)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (newest.parent / ".writing-00000007").mkdir()
    train.main(flags(**settings(folder, run.name, **adapted)))
    assert f"{newest} cannot be read and is skipped" in capsys.readouterr().err
    assert curve(run) == curve(folder / "adapted") and states(run / FOLDER) == [before, newest]
    lora = Path("adapter", "adapter_model.safetensors")
    for name in ("model.safetensors", lora, "best" / lora):
        assert (run / name).read_bytes() == (folder / "adapted" / name).read_bytes()


def test_no_state_can_be_read(two_steps, capsys):
    shutil.copytree(two_steps / "two-steps", two_steps / "lost")
    (state,) = states(two_steps / "lost" / FOLDER)
    (state / "run.pt").write_bytes(b"")
    assert "no state that can be read" in refused(capsys, flags(**settings(two_steps, "lost", steps=2)))
    assert states(two_steps / "lost" / FOLDER) == [state]
