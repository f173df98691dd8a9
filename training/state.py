"""Saved states of a run, one folder per save: weights, their average, optimizers, data, random state.

    output/state/step-00000500/        # torch.distributed.checkpoint's files, each rank its own shards
                               run.pt  # the rest: step, config, every rank's data and RNG

A folder is written as `.writing-…` and renamed once it is whole, so a cut-off one is never read; the one
before is kept until then. Any number of ranks, with DDP or FSDP, reads what any other number wrote.
"""

from __future__ import annotations

import io
import os
import random
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from messages import for_terminal
from training.config import TrainConfig, flag, settings_class
from training.distributed import Ranks

FOLDER, RUN = "state", "run.pt"
_WHOLE = re.compile(r"step-(\d+)")
_AWAY = "use another --output, or --no-resume to start over"


class StopSignal:
    """SIGTERM or SIGINT asks the run to save and leave after the step it is in; a second one ends it.

    asked: whether this rank was; agreed: whether all ranks have agreed to; failed: why data cannot be read
    any longer, which stops the run in the same way.
    """

    def __init__(self):
        self.asked = self.agreed = False
        self.failed: Exception | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number, frame) -> None:
        self.asked = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


class StateError(ValueError):
    """A state that this run cannot resume from."""


class RunState:
    """Saves and loads in `state/` of the run's output; parameter names key everything. All ranks call its
    methods together."""

    def __init__(
        self,
        config: TrainConfig,
        output: Path,
        modules: nn.Module,
        optimizers: Sequence[Optimizer],
        average: dict[str, Tensor],
        ranks: Ranks,
    ):
        self.config, self.folder, self.modules, self.optimizers = config, output / FOLDER, modules, optimizers
        self.average, self.ranks = average, ranks
        self.model_saved = True  # whether the model was written, too, with the latest state

    # --------------------------------------------------------------------------------------------- save
    def save(self, step: int, data: dict[str, Any]) -> str | None:
        """Write the state after `step` steps, with this rank's data state. Returns None, or why it could not
        be written (a full disk, say): the states before are unharmed."""
        cuda = self.ranks.device.type == "cuda"
        drawn = {"torch": torch.get_rng_state(), "python": random.getstate()}  # all that a step may draw from
        drawn |= {"cuda": torch.cuda.get_rng_state(self.ranks.device)} if cuda else {}
        run = {
            "step": step,
            "config": asdict(self.config),
            "data": self.ranks.gather(data),
            "random": self.ranks.gather(drawn),
            "model_saved": self.ranks.gather(self.model_saved)[0],
        }

        def write() -> None:
            writer = _Writer(self._writing(step), sync_files=True)
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # one process saves alone
                dcp.save(self._tensors(), storage_writer=writer, no_dist=not self.ranks.together)

        for act in (lambda: self._begin(step, run), write, lambda: self._finish(step)):
            if (problem := self._together(act)) is not None:
                return problem
        return None

    def _together(self, act: Callable[[], Any]) -> str | None:
        """Do it, and agree on whether it worked. Returns the first rank's error; a `StateError` goes through.
        What was not finished is removed then: it may have filled the disk."""
        problem = None
        try:
            act()
        except StateError:
            raise
        except (Exception, CheckpointException) as error:  # unpickling what is broken raises anything
            cause: BaseException = error
            if isinstance(error, CheckpointException):
                cause = next((inner for inner, _ in error.failures.values()), error)
            problem = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
        problem = next((said for said in self.ranks.gather(problem) if said is not None), None)
        if problem is not None:
            self._clear()
        return problem

    def _writing(self, step: int) -> Path:
        return self.folder / f".writing-{step:08d}"

    def _clear(self) -> None:
        for left in self.folder.glob(".*") if self.ranks.is_first else ():
            shutil.rmtree(left, ignore_errors=True)

    def _begin(self, step: int, run: dict[str, Any]) -> None:
        if not self.ranks.is_first:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clear()  # what a crash left
        self._writing(step).mkdir()
        packed = io.BytesIO()  # torch.save hides the system's errors behind its own
        torch.save(run, packed)
        with (self._writing(step) / RUN).open("wb") as file:
            file.write(packed.getbuffer())
            file.flush()
            os.fsync(file.fileno())

    def _finish(self, step: int) -> None:
        if not self.ranks.is_first:
            return
        whole = self.folder / f"step-{step:08d}"
        if whole.exists():  # a step that is done again
            shutil.rmtree(whole)
        self._writing(step).rename(whole)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self._drop(states(self.folder)[: -self.config.keep])

    def _drop(self, folders: Sequence[Path]) -> None:
        for folder in folders if self.ranks.is_first else ():
            # Renamed first: half of a folder is never taken for a whole one.
            doomed = folder.with_name(f".old-{folder.name}")
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _tensors(self) -> dict[str, Any]:
        """Flat names → tensors; DTensors are saved shard by shard."""
        named = dict(self.modules.named_parameters())
        tensors: dict[str, Any] = {f"weights/{name}": p.detach() for name, p in named.items()}
        tensors |= {f"average/{name}": value for name, value in self.average.items()}
        names: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                tensors |= {f"optimizer/{names[parameter]}/{key}": value for key, value in state.items()}
        return tensors

    # --------------------------------------------------------------------------------------------- load
    def load(self) -> dict[str, Any] | None:
        """Restore the newest whole state in place and return what `save` wrote with it, `data` of all ranks.
        A broken state is skipped with a message.

        Raises:
            StateError: the state is of another model or of other optimizers, or all states are broken.
        """
        found = states(self.folder)
        for folder in reversed(found):
            run: dict[str, Any] = {}
            stored: dict[str, Any] = {}
            # Agreed on first: a rank that cannot read must not leave the others waiting in `dcp.load`.
            problem = self._together(lambda: self._read(folder, run, stored))  # noqa: B023
            problem = problem or self._together(lambda: self._load_tensors(folder, stored))  # noqa: B023
            if problem is None:
                self._restore_random(run["random"])
                self.model_saved = run.get("model_saved", True)
                self._drop(found[found.index(folder) + 1 :])
                return run
            self._say(f"{folder} cannot be read and is skipped: {problem}")
        if found:
            raise StateError(f"{self.folder} holds no state that can be read ({len(found)} tried): {_AWAY}")
        return None

    def _say(self, text: str) -> None:
        if self.ranks.is_first:
            print(for_terminal(f"train.py: {text}"), file=sys.stderr)

    def _restore_random(self, saved: Sequence[dict[str, Any]]) -> None:
        """This rank's generators; a rank that the saved run did not have keeps its own."""
        if self.ranks.rank < len(saved):
            state = saved[self.ranks.rank]
            torch.set_rng_state(state["torch"])
            random.setstate(state["python"])
            if self.ranks.device.type == "cuda" and "cuda" in state:
                with suppress(RuntimeError):  # a state of another kind of device
                    torch.cuda.set_rng_state(state["cuda"], self.ranks.device)

    def _read(self, folder: Path, run: dict[str, Any], stored: dict[str, Any]) -> None:
        run.update(torch.load(folder / RUN, map_location="cpu", weights_only=True))
        stored.update(FileSystemReader(folder).read_metadata().state_dict_metadata)
        if differing := changes(run["config"], self.config):
            raise StateError(
                f"{folder} cannot be resumed, because these settings have changed: {', '.join(differing)}; "
                f"set them back, or {_AWAY} (with --init-from {self.folder.parent} to start from its weights)"
            )

    def _load_tensors(self, folder: Path, stored: dict[str, Any]) -> None:
        parameters, target = dict(self.modules.named_parameters()), self._tensors()
        model = {n: tuple(value.shape) for n, value in target.items() if not n.startswith("optimizer/")}
        others = {n: tuple(value.size) for n, value in stored.items() if not n.startswith("optimizer/")}
        if differing := sorted(n for n in model | others if model.get(n) != others.get(n)):
            name = differing[0]
            raise StateError(
                f"{folder} is the state of another model ({name}: expected {model.get(name, 'none')}, "
                f"got {others.get(name, 'none')}): {_AWAY}"
            )
        owners = {
            p: optimizer for optimizer in self.optimizers for g in optimizer.param_groups for p in g["params"]
        }
        for name, described in stored.items():
            if name.startswith("optimizer/"):
                _, owner, key = name.split("/")
                if (parameter := parameters[owner]) in owners:
                    owners[parameter].state[parameter][key] = target[name] = _like(described, parameter)
        with torch.no_grad(), warnings.catch_warnings(action="ignore", category=UserWarning):
            dcp.load(target, storage_reader=FileSystemReader(folder), no_dist=not self.ranks.together)


def _like(described: TensorStorageMetadata, parameter: nn.Parameter) -> Tensor:
    """An empty tensor of that size; one of the parameter's shape is sharded like it."""
    dtype = described.properties.dtype
    if described.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(described.size, dtype=dtype, device=parameter.device)


def states(folder: Path) -> list[Path]:
    """The whole states in a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _WHOLE.fullmatch(path.name) and (path / RUN).exists()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


class _Writer(FileSystemWriter):
    """Raises the system's error (a full disk, say), which torch.save hides behind one of its own; between
    ranks that would be lost."""

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            at: BaseException | None = error
            while at is not None and not isinstance(at, OSError):
                at = at.__cause__ or at.__context__
            raise at or error from error


# ------------------------------------------------------------------------------------------- settings
_SWITCHES: dict[str, Callable[[TrainConfig], bool]] = {  # of these only whether they are on is fixed
    "ema": lambda config: config.ema > 0,
    "data": lambda config: config.is_drawn,
    "lr": lambda config: config.lr > 0,
    "vision_lr": lambda config: "vision_model" in config.learns,
    "projector_lr": lambda config: "projector" in config.learns,
}


def changes(saved: dict[str, Any], config: TrainConfig) -> list[str]:
    """The settings that a state's weights, averages and momenta depend on and that differ from those that
    were saved, as "--muon 'all' -> 'none'". The loader itself refuses data in another order. What was not
    saved had its default."""
    kind = settings_class(saved)
    known = {item.name for item in fields(kind)}
    before = kind(**{name: value for name, value in saved.items() if name in known})

    def decides(run: TrainConfig, name: str) -> Any:
        if name in _SWITCHES:
            return _SWITCHES[name](run)
        value = getattr(run, name, None)
        if name in ("init_from", "vision_from", "text_from"):  # one folder may have several names
            return value and os.path.realpath(value)
        return value

    return [
        f"{flag(name)} {getattr(before, name, None)!r:.60} -> {getattr(config, name)!r:.60}"
        for name in (*config.fixed, *_SWITCHES)
        if decides(before, name) != decides(config, name)
    ]
