"""What a run needs to resume, one folder per save: weights, their average, optimizers, data, random state.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from training.config import TrainConfig, flag
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
    """Saves and loads in `output/state`; parameter names key everything. All ranks call its methods together.

    Args:
        average: name → averaged parameter; empty where there is none.
        keep: how many of the newest states stay.
        background: write while the run goes on; the next save waits for the last.
    """

    def __init__(
        self,
        output: Path,
        modules: nn.Module,
        optimizers: Sequence[Optimizer],
        average: dict[str, Tensor],
        ranks: Ranks,
        keep: int,
        background: bool,
    ):
        self.folder, self.modules, self.optimizers = output / FOLDER, modules, list(optimizers)
        self.average, self.ranks, self.keep = average, ranks, keep
        self.model_saved = True  # whether the model was written, too, with the latest state
        self._pending: tuple[Any, int] | None = None  # what a background save returns, and its step
        # A background save talks to the other ranks while steps do. Without a group of its own, one would
        # receive what was meant for the other, and all would wait for ever.
        apart = background and ranks.together
        self._group = dist.new_group(backend="gloo") if apart else None

    # --------------------------------------------------------------------------------------------- save
    def save(self, step: int, data: dict[str, Any], config: TrainConfig) -> str | None:
        """Write the state after `step` steps, with this rank's data state.

        Returns:
            None, or why it could not be written (a full disk, say): the states before are unharmed.
        """
        problem = self.wait()
        run = {
            "step": step,
            "config": asdict(config),
            "data": self.ranks.gather(data),
            "random": self.ranks.gather(random_state(self.ranks.device)),
            "model_saved": self.ranks.gather(self.model_saved)[0],
        }
        if (failed := self._together(lambda: self._begin(step, run))) is not None:
            return failed
        tensors, writer = self._tensors(), _Writer(self._writing(step), sync_files=True)
        if self._group is not None:
            self._pending = (
                dcp.async_save(tensors, storage_writer=writer, process_group=self._group),
                step,
            )
            return problem

        def write() -> None:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # one process saves alone
                dcp.save(tensors, storage_writer=writer, no_dist=not self.ranks.together)

        return self._end(write, step) or problem

    def wait(self) -> str | None:
        """Wait for a background save; returns why it could not be written."""
        if self._pending is None:
            return None
        (future, step), self._pending = self._pending, None
        return self._end(future.result, step)

    def _end(self, write: Callable[[], Any], step: int) -> str | None:
        return self._together(write) or self._together(lambda: self._finish(step))

    def _together(self, act: Callable[[], Any]) -> str | None:
        """Do it, and agree on whether it worked. Returns the first rank's error; a `StateError` goes through.

        What was not finished is removed then: it may have filled the disk.
        """
        problem = None
        try:
            act()
        except StateError:
            raise
        except (Exception, CheckpointException) as error:  # unpickling what is broken raises anything
            problem = _sentence(error)
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
        self._drop(states(self.folder)[: -self.keep])

    def _drop(self, folders: Sequence[Path]) -> None:
        for folder in folders if self.ranks.is_first else ():
            # Renamed first: half of a folder is never taken for a whole one.
            doomed = folder.with_name(f".old-{folder.name}")
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _tensors(self) -> dict[str, Any]:
        """Flat names → tensors; DTensors are saved shard by shard."""
        tensors: dict[str, Any] = {f"weights/{n}": p.detach() for n, p in self._parameters().items()}
        tensors |= {f"average/{name}": value for name, value in self.average.items()}
        names: dict[Any, str] = {parameter: name for name, parameter in self._parameters().items()}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    tensors[f"optimizer/{names[parameter]}/{key}"] = value
        return tensors

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.modules.named_parameters())

    # --------------------------------------------------------------------------------------------- load
    def load(self, config: TrainConfig) -> dict[str, Any] | None:
        """Restore the newest whole state in place and return what `save` wrote with it, `data` of all ranks.
        A broken state is skipped with a message; changed settings are listed.

        Raises:
            StateError: the state is of another model or of other optimizers, or all states are broken.
        """
        for cut in sorted(self.folder.glob(".writing-*")):
            step = int(cut.name.removeprefix(".writing-"))
            self._say(f"the state after step {step} was not written completely and is skipped")
        found = states(self.folder)
        for folder in reversed(found):
            run: dict[str, Any] = {}
            stored: dict[str, Any] = {}
            # Agreed on first: a rank that cannot read must not leave the others waiting in `dcp.load`.
            problem = self._together(lambda: self._read(folder, config, run, stored))  # noqa: B023
            problem = problem or self._together(lambda: self._load_tensors(folder, stored))  # noqa: B023
            if problem is None:
                restore_random(run["random"], self.ranks)
                self.model_saved = run.get("model_saved", True)
                self._drop(found[found.index(folder) + 1 :])
                if changed := changes(settings_of(run["config"]), config):
                    self._say(f"resuming from step {run['step']} with changed settings: {in_words(changed)}")
                return run
            self._say(f"{folder} cannot be read and is skipped: {problem}")
        if found:
            raise StateError(f"{self.folder} holds no state that can be read ({len(found)} tried): {_AWAY}")
        return None

    def _say(self, text: str) -> None:
        if self.ranks.is_first:
            print(f"train.py: {text}", file=sys.stderr)

    def _read(self, folder: Path, config: TrainConfig, run: dict[str, Any], stored: dict[str, Any]) -> None:
        run.update(torch.load(folder / RUN, map_location="cpu", weights_only=True))
        stored.update(FileSystemReader(folder).read_metadata().state_dict_metadata)
        before = settings_of(run["config"])
        was, now = fixed(before), fixed(config)
        if differing := {k: v for k, v in changes(before, config).items() if was.get(k) != now.get(k)}:
            raise StateError(
                f"{folder} cannot be resumed, because these settings have changed: {in_words(differing)}; "
                f"set them back, or {_AWAY} (with --init-from {self.folder.parent} to start from its weights)"
            )

    def _load_tensors(self, folder: Path, stored: dict[str, Any]) -> None:
        parameters, target = self._parameters(), self._tensors()
        model = {n: tuple(value.shape) for n, value in target.items() if not n.startswith("optimizer/")}
        others = {n: tuple(value.size) for n, value in stored.items() if not n.startswith("optimizer/")}
        if differing := sorted(n for n in model | others if model.get(n) != others.get(n)):
            name, count = differing[0], len(differing)
            raise StateError(
                f"{folder} is the state of another model ({count} tensors differ; {name}: expected "
                f"{model.get(name, 'none')}, got {others.get(name, 'none')}): {_AWAY}"
            )
        owners = {
            p: optimizer for optimizer in self.optimizers for g in optimizer.param_groups for p in g["params"]
        }
        for name, described in stored.items():
            if name.startswith("optimizer/"):
                _, owner, key = name.split("/")
                parameter = parameters[owner]
                if parameter in owners:
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


def random_state(device: torch.device) -> dict[str, Any]:
    """Every generator that a step may draw from, on this rank."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random(saved: Sequence[dict[str, Any]], ranks: Ranks) -> None:
    """This rank's generators; a rank that the saved run did not have keeps its own."""
    if ranks.rank >= len(saved):
        return
    state = saved[ranks.rank]
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if ranks.device.type == "cuda" and "cuda" in state:
        with suppress(RuntimeError):  # a state of another kind of device
            torch.cuda.set_rng_state(state["cuda"], ranks.device)


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


def _sentence(error: BaseException) -> str:
    """The cause inside what torch.distributed.checkpoint raises, on one line."""
    if isinstance(error, CheckpointException):
        error = next((cause for cause, _ in error.failures.values()), error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# ------------------------------------------------------------------------------------------- settings
_SOURCES = ("init_from", "vision_from", "text_from")
_FIXED = (
    *("lora_rank", "lora_targets", "muon"),
    *("vision_width", "vision_layers", "vision_heads", "image_size", "patch_size", "scale_factor"),
    *("text_width", "text_layers", "text_heads", "text_kv_heads", "text_inner", "vocab_size", "longest_edge"),
)
Changes = dict[str, tuple[Any, Any]]  # setting -> what it was, what it is


def settings_of(saved: Mapping[str, Any]) -> TrainConfig:
    """The saved settings. What was not saved had its default; what is none any more is left out."""
    known = {item.name for item in fields(TrainConfig)}
    return TrainConfig(**{name: value for name, value in saved.items() if name in known})


def changes(before: TrainConfig, config: TrainConfig) -> Changes:
    was, now = asdict(before), asdict(config)
    return {
        name: (was[name], now[name])
        for name in was
        if name not in ("output", "resume") and _real(name, was[name]) != _real(name, now[name])
    }


def _real(name: str, value: Any) -> Any:
    """One folder may have several names."""
    return os.path.realpath(value) if name in _SOURCES and value else value


def fixed(config: TrainConfig) -> dict[str, Any]:
    """What a state's weights, averages and momenta depend on, by setting. The loader refuses other data
    itself: it knows what decides the order of rows."""
    learns = {part: rate > 0 for part, rate in config.rates.items()}
    return {name: _real(name, getattr(config, name)) for name in (*_SOURCES, *_FIXED)} | {
        "ema": config.ema > 0,
        "data": config.is_shapes,
        "lr": learns["language_model"],
        "vision_lr": learns["vision_model"],
        "projector_lr": learns["projector"],
    }


def in_words(changed: Changes) -> str:
    """ "--lr 0.1 -> 0.2, --data": without values that are too long to show."""
    shown = []
    for name, (was, now) in changed.items():
        values = f"{was!r} -> {now!r}" if isinstance(was, str) else f"{was} -> {now}"
        shown.append(f"{flag(name)} {values}" if len(values) <= 60 else flag(name))
    return ", ".join(shown)
