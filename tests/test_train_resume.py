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

import pytest

import train
from tests.runs import curve, ended, flags, metrics, prepared, refused, settings_in, start
from tests.soak.kills import STYLES, kill_training
from tests.waiting import wait_for
from training.state import FOLDER, RunState, states


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("resume"))


def settings(folder, output: str, **more) -> dict:
    usual = {"shuffle_buffer": 5, "save_every": 2, "muon": "language", "ema": 0.9}
    return settings_in(folder, output, **(usual | more))


@contextmanager
def no_file_beyond(room: int) -> Iterator[None]:
    """For processes that are started inside."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("style", STYLES)
def test_killed_at_random_moments(folder, style):
    """`python -m tests.soak.kills` does it oftener."""
    outcome = kill_training(folder, kills=2, style=style)
    assert outcome.killed == 2 and outcome.as_never_killed, outcome


@pytest.fixture(scope="module")
def six_steps(folder):
    """Of a run that nothing happens to."""
    train.main(flags(**settings(folder, "plain", steps=6)))
    return curve(folder / "plain")


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


def test_a_second_ctrl_c_ends_it_at_once(folder, capfd, monkeypatch):
    """As does one before there is anything to save; either is told in a word."""

    def impatient(*arguments) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train.Run, "save", impatient)
    (process,) = start(**settings(folder, "impatient", steps=100_000, save_every=100_000))
    assert wait_for(lambda: (folder / "impatient/metrics.jsonl").exists() or not process.is_alive())
    os.kill(process.pid, signal.SIGINT)
    ended([process])
    said = capfd.readouterr().err
    assert process.exitcode == 130 and "train.py: interrupted" in said and "Traceback" not in said


def test_a_disk_that_is_full_before_the_first_step(folder, capfd):
    with no_file_beyond(1000):
        (process,) = start(**settings(folder, "none", steps=2))
    ended([process])
    said = capfd.readouterr().err
    assert process.exitcode == 2 and f"error: {folder / 'none' / 'run.yaml'}: {os.strerror(27)}" in said
    assert list((folder / "none").iterdir()) == []


def test_a_full_disk_is_said_and_the_run_goes_on(folder, capfd):
    """Behind the first save no file may grow past 32 KB. What was saved stays, and is gone on from."""
    finish = RunState._finish

    def last(self, *arguments):  # in the run itself, which may be quicker than whoever watches it
        finish(self, *arguments)
        resource.setrlimit(resource.RLIMIT_FSIZE, (32_768, 32_768))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunState, "_finish", last)
        (process,) = start(**settings(folder, "full", steps=30))
    ended([process])
    said = capfd.readouterr()
    assert process.exitcode == 2 and "Traceback" not in said.err
    assert "error: the latest model is not saved: " in said.err
    assert "the model could not be saved, the run goes on" in said.out
    kept = "the training state could not be saved, the one before is kept, the run goes on: OSError"
    assert f"{kept}: [Errno 27] {os.strerror(27)}" in said.out
    assert [row[0] for row in curve(folder / "full")] == list(range(1, 31))
    (kept,) = (folder / "full" / FOLDER).iterdir()  # nothing of a broken one takes room
    assert int(kept.name.removeprefix("step-")) < 30
    train.main(flags(**settings(folder, "full", steps=30)))
    train.main(flags(**settings(folder, "empty", steps=30)))
    assert curve(folder / "full") == curve(folder / "empty")


@pytest.mark.parametrize("room, ranks, more", [(4096, 1, {}), (32_768, 2, {"async_save": True})])
def test_a_full_disk_with_no_state_on_it(folder, capfd, room, ranks, more):
    """Too small for the least of a state's files, or for its tensors only: the system's reason is said."""
    output = f"none{room}-{ranks}"
    with no_file_beyond(room):
        processes = start(ranks, **settings(folder, output, steps=2, log_every=100, muon="none", **more))
    for process in processes:
        ended([process])
    said = capfd.readouterr().out
    assert [process.exitcode for process in processes] == [2] * ranks
    assert said.count("the training state could not be saved") == 1, said
    assert f": OSError: [Errno 27] {os.strerror(27)}" in said and "before is kept" not in said
    assert list((folder / output / FOLDER).iterdir()) == []


def test_a_disk_that_has_no_room_for_the_adapter(folder, capfd):
    """It is said; the model and the adapter from before stay, as a pair."""
    lora = {"lora_rank": 256, "muon": "none", "ema": 0.0}
    train.main(flags(**settings(folder, "small", steps=2, **lora)))
    output = folder / "small"
    pair = [output / "model.safetensors", output / "adapter" / "adapter_model.safetensors"]
    limit = pair[0].stat().st_size + 8192
    assert pair[1].stat().st_size > limit
    before = [path.read_bytes() for path in pair]
    with no_file_beyond(limit):
        (process,) = start(**settings(folder, "small", steps=4, **lora))
    ended([process])
    said = capfd.readouterr()
    assert process.exitcode == 2 and "Traceback" not in said.err
    assert "step 4: the model could not be saved, the run goes on" in said.out
    assert [path.read_bytes() for path in pair] == before
    train.main(flags(**settings(folder, "small", steps=2, resume=False)))
    assert not (output / "adapter").exists()  # nothing of another run's


def test_a_model_that_was_not_saved_is_saved_by_the_next_start(folder, capsys, monkeypatch):
    """Also where its state was, so that no step is left to do."""
    made = flags(**settings(folder, "unsaved", steps=3))

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(train, "export", full)
        assert "the latest model is not saved: " in refused(capsys, made)
    assert not (folder / "unsaved/model.safetensors").exists()
    assert states(folder / "unsaved" / FOLDER)[-1].name == "step-00000003"
    train.main(made)
    train.main(flags(**settings(folder, "saved", steps=3)))
    one, other = ((folder / name / "model.safetensors").read_bytes() for name in ("unsaved", "saved"))
    assert one == other


def test_a_signal_to_one_rank_in_the_last_save(folder, monkeypatch):
    """All ranks know of it, or none would wait for the other."""
    save = train.Run.save

    def signalled(self):
        if self.ranks.is_first:
            os.kill(os.getpid(), signal.SIGTERM)
        save(self)

    monkeypatch.setattr(train.Run, "save", signalled)
    processes = start(2, **settings(folder, "late", steps=2, save_every=100))
    for process in processes:
        ended([process])
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_tracker_that_is_refused_costs_no_state(folder, capsys, monkeypatch):
    """--no-resume drops the old state once nothing more can be refused."""
    train.main(flags(**settings(folder, "kept", steps=2)))
    before = states(folder / "kept" / FOLDER)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    said = refused(capsys, flags(**settings(folder, "kept", steps=2, resume=False, tracker="wandb")))
    assert "--tracker wandb: it is not installed" in said
    assert before and states(folder / "kept" / FOLDER) == before


# --------------------------------------------------------------------------------------- other settings
def contents(folder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def two_steps(folder):
    train.main(flags(**settings(folder, "two-steps", steps=2)))
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"muon": "all"},
        {"vision_lr": 0.0},
        {"ema": 0.0},
        {"lora_rank": 2},
        {"init_from": "checkpoints/ocelli-shapes"},
    ],
)
def test_what_cannot_be_resumed_is_refused_by_name(two_steps, change, capsys):
    """Not by a KeyError of the optimizer; and nothing of the run is lost."""
    before = contents(two_steps / "two-steps")
    said = refused(capsys, flags(**settings(two_steps, "two-steps", steps=3, **change)))
    (name,) = change
    assert f"--{name.replace('_', '-')} " in said and "cannot be resumed" in said
    assert contents(two_steps / "two-steps") == before


def test_settings_that_have_changed_are_listed(two_steps, capsys):
    shutil.copytree(two_steps / "two-steps", two_steps / "changed")
    change = {"lr": 1e-3, "steps": 3, "weight_decay": 0.2, "schedule": "cosine"}
    train.main(flags(**settings(two_steps, "changed", **change)))
    said = capsys.readouterr().err
    assert "resuming from step 2 with changed settings: " in said
    assert "--lr 0.003 -> 0.001" in said and "--schedule 'wsd' -> 'cosine'" in said and "--seed" not in said
    assert metrics(two_steps / "changed")[-1]["lr_projector"] < 1e-3
    change |= {"steps": 4, "init_from": two_steps / "." / "tiny"}  # the same folder by another name
    train.main(flags(**settings(two_steps, "changed", **change)))
    assert "changed settings: --steps 3 -> 4\n" in capsys.readouterr().err
