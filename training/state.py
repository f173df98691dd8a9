"""What a run needs to resume, one folder per save: weights, their average, optimizers, data, random state.

    output/state/step-00000500/        # torch.distributed.checkpoint's files, each rank its own shards
                               run.pt  # the rest: step, config, every rank's data and RNG

A folder is written as `.writing-…` and renamed once it is whole, so a cut-off one is never read; the one
before is kept until then. Any number of ranks, with DDP or FSDP, reads what any other number wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Saves and loads in `output/state`; parameter names key everything.

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
        keep: int = 1,
        background: bool = False,
    ):
        self.folder, self.modules, self.optimizers = output / FOLDER, modules, list(optimizers)
        self.average, self.ranks, self.keep = average, ranks, keep
        self.model_saved = True  # whether the model was written, too, with the latest state
        self._pending: tuple[Any, Path, Path] | None = None
        # A background save talks to the other ranks while steps do. Without a group of its own, one would
        # receive what was meant for the other, and all would wait for ever.
        apart = background and ranks.together
        self._group = dist.new_group(backend="gloo") if apart else None

    # --------------------------------------------------------------------------------------------- save
    def save(self, step: int, data: dict[str, Any], config: dict[str, Any]) -> str | None:
        """Write the state after `step` steps, with this rank's data state; all ranks call it.

        Returns:
            None, or why it could not be written (a full disk, say): the states before are unharmed.
        """
        problem = self.wait()
        writing, whole = self.folder / f".writing-{step:08d}", self.folder / f"step-{step:08d}"
        run = {
            "step": step,
            "config": config,
            "data": self.ranks.gather(data),
            "random": self.ranks.gather(random_state(self.ranks.device)),
            "model_saved": self.ranks.gather(self.model_saved)[0],
        }
        if (found := self._everywhere(lambda: self._begin(writing, run))) is not None:
            self._clear()
            return found
        tensors = self._tensors()
        writer = _Writer(writing, sync_files=True)
        if self._group is not None:
            future = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
            self._pending = (future, writing, whole)
            return problem
        alone = not self.ranks.together

        def write() -> None:
            with quiet():
                dcp.save(tensors, storage_writer=writer, no_dist=alone)

        return self._end(write, writing, whole) or problem

    def wait(self) -> str | None:
        """Wait for a background save; returns why it could not be written."""
        if self._pending is None:
            return None
        (future, writing, whole), self._pending = self._pending, None
        return self._end(future.result, writing, whole)

    def _end(self, write: Callable[[], Any], writing: Path, whole: Path) -> str | None:
        """Finish writing and give the state its name; returns why it could not be."""
        found = self._everywhere(write) or self._everywhere(lambda: self._finish(writing, whole))
        if found is not None:
            self._clear()
        return found

    def _everywhere(
        self, act: Callable[[], Any], may: tuple = (OSError, CheckpointException, RuntimeError)
    ) -> str | None:
        """Do it, and agree on whether it worked. Returns the first rank's error among those of `may`; a
        `StateError` goes through."""
        problem = None
        try:
            act()
        except StateError:
            raise
        except may as error:
            problem = _sentence(error)
        return next((said for said in self.ranks.gather(problem) if said is not None), None)

    def _clear(self) -> None:
        """Remove what was not finished, which may have filled the disk."""
        for left in self.folder.glob(".*") if self.ranks.is_first else ():
            shutil.rmtree(left, ignore_errors=True)

    def _begin(self, writing: Path, run: dict[str, Any]) -> None:
        if not self.ranks.is_first:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clear()  # what a crash left
        writing.mkdir()
        with (writing / RUN).open("wb") as file:
            torch.save(run, file)
            file.flush()
            os.fsync(file.fileno())

    def _finish(self, writing: Path, whole: Path) -> None:
        if not self.ranks.is_first:
            return
        if whole.exists():  # a step that is done again
            shutil.rmtree(whole)
        writing.rename(whole)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self._drop(states(self.folder)[: -self.keep])

    def _drop(self, folders: Sequence[Path]) -> None:
        """Remove states; the first rank does."""
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
    def load(self, config: TrainConfig, say: Callable[[str], None] = print) -> dict[str, Any] | None:
        """Restore the newest whole state in place and return what `save` wrote with it, `data` of all ranks.
        A broken state is skipped with a message; changed settings are listed.

        Raises:
            StateError: the state is of another model or of other optimizers, or all states are broken.
        """
        found = states(self.folder)
        if self.ranks.is_first:
            for cut in sorted(self.folder.glob(".writing-*")):
                step = cut.name.removeprefix(".writing-")
                say(f"the state after step {int(step)} was not written completely and is skipped")
        for number, folder in enumerate(reversed(found)):
            run: dict[str, Any] = {}
            problem = self._attempt(folder, run, config)
            if problem is None:
                restore_random(run["random"], self.ranks)
                self.model_saved = run.get("model_saved", True)
                self._drop(found[len(found) - number :])
                changed = in_words(differences(run["config"], config))
                if changed and self.ranks.is_first:
                    say(f"resuming from step {run['step']} with changed settings: {changed}")
                return run
            if self.ranks.is_first:
                say(f"{folder} cannot be read and is skipped: {problem}")
        if found:
            raise StateError(f"{self.folder} holds no state that can be read ({len(found)} tried): {_AWAY}")
        return None

    def _attempt(self, folder: Path, run: dict[str, Any], config: TrainConfig) -> str | None:
        """Load one state into `run` and in place; returns why it cannot be read."""
        stored: dict[str, Any] = {}

        def read() -> None:
            run.update(torch.load(folder / RUN, map_location="cpu", weights_only=True))
            stored.update(FileSystemReader(folder).read_metadata().state_dict_metadata)
            if fixed := in_words(fixed_differences(run["config"], config)):
                raise StateError(
                    f"{folder} cannot be resumed, because these settings have changed: {fixed}; set them "
                    f"back, or {_AWAY} (with --init-from {self.folder.parent} to start from its weights)"
                )

        may = (Exception, CheckpointException)  # unpickling what is broken raises anything
        # Agreed on first: a rank that cannot read must not leave the others waiting in `dcp.load`.
        return self._everywhere(read, may) or self._everywhere(
            lambda: self._load_tensors(folder, stored), may
        )

    def _load_tensors(self, folder: Path, stored: dict[str, Any]) -> None:
        parameters = self._parameters()
        wanted = {f"weights/{name}" for name in parameters} | {f"average/{name}" for name in self.average}
        lacking = sorted(name for name in wanted if name not in stored)
        surplus = sorted(n for n in stored if n.split("/")[0] in ("weights", "average") and n not in wanted)
        if lacking or surplus:
            name = (lacking or surplus)[0]
            raise StateError(
                f"{folder} is the state of another model ({len(lacking)} tensors are missing and "
                f"{len(surplus)} too many, {name} for one): {_AWAY}"
            )
        target = self._tensors()
        owners = {
            p: optimizer for optimizer in self.optimizers for g in optimizer.param_groups for p in g["params"]
        }
        for name, described in stored.items():
            if name.startswith("optimizer/"):
                _, owner, key = name.split("/")
                parameter = parameters.get(owner)
                if parameter is None or parameter not in owners:
                    continue
                owners[parameter].state[parameter][key] = target[name] = _like(described, parameter)
            elif tuple(target[name].shape) != tuple(described.size):
                raise StateError(
                    f"{folder} is the state of another model ({name}: expected {tuple(target[name].shape)}, "
                    f"got {tuple(described.size)}): {_AWAY}"
                )
        with torch.no_grad(), quiet():
            dcp.load(target, storage_reader=FileSystemReader(folder), no_dist=not self.ranks.together)


def _like(described: TensorStorageMetadata, parameter: nn.Parameter) -> Tensor:
    """An empty tensor of that size; one of the parameter's shape is sharded like it."""
    dtype = described.properties.dtype
    if described.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(described.size, dtype=dtype, device=parameter.device)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warning that one process saves alone, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*", category=UserWarning)
        yield


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
        with contextlib.suppress(RuntimeError):  # a state of another kind of device
            torch.cuda.set_rng_state(state["cuda"], ranks.device)


class _Writer(FileSystemWriter):
    """Says why a file cannot be written."""

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise _cause(error) from error


def _cause(error: BaseException) -> BaseException:
    """The system's error (a full disk, say) behind one of torch.save's own that does not mention it; without
    one, the error itself."""
    at: BaseException | None = error
    while at is not None and not isinstance(at, OSError):
        at = at.__cause__ or at.__context__
    return at or error


def _sentence(error: BaseException) -> str:
    """The cause inside what torch.distributed.checkpoint raises, on one line."""
    if isinstance(error, CheckpointException):
        causes = [failure[0] for failure in error.failures.values()]
        error = next((cause for cause in causes if isinstance(cause, Exception)), error)
    error = _cause(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# ------------------------------------------------------------------------------------------- settings
# A state's weights, averages and momenta belong to this model and these optimizers. The loader refuses other
# data itself: it knows what decides the order of rows.
_SOURCES = ("init_from", "vision_from", "text_from")
_FIXED = (
    *_SOURCES,
    *("lora_rank", "lora_targets", "muon"),
    *("vision_width", "vision_layers", "vision_heads", "image_size", "patch_size", "scale_factor"),
    *("text_width", "text_layers", "text_heads", "text_kv_heads", "text_inner", "vocab_size", "longest_edge"),
)
Changes = dict[str, tuple[Any, Any]]  # setting -> what it was, what it is


def differences(saved: Mapping[str, Any], config: TrainConfig) -> Changes:
    """Settings that differ from the saved ones; what was not saved had its default."""
    defaults = {item.name: item.default for item in dataclasses.fields(TrainConfig)}
    was, now = defaults | dict(saved), config.to_dict()
    return {
        name: (was[name], now[name])
        for name in defaults
        if name not in ("output", "resume") and not _same(name, was[name], now[name])
    }


def _same(name: str, was: Any, now: Any) -> bool:
    if name in _SOURCES and was and now:  # one folder may have several names
        return os.path.realpath(was) == os.path.realpath(now)
    return was == now


def fixed_differences(saved: Mapping[str, Any], config: TrainConfig) -> Changes:
    """Those with which a saved state cannot be resumed."""
    changed = differences(saved, config)
    fixed = {name: change for name, change in changed.items() if name in _FIXED}
    if "ema" in changed and 0 in changed["ema"]:
        fixed["ema"] = changed["ema"]
    known = {item.name for item in dataclasses.fields(TrainConfig)}
    before = TrainConfig(**{name: value for name, value in saved.items() if name in known})
    if before.is_shapes != config.is_shapes:
        fixed["data"] = changed["data"]
    flags = {"language_model": "lr", "vision_model": "vision_lr", "projector": "projector_lr"}
    for part, name in flags.items():
        if bool(before.rates[part]) != bool(config.rates[part]):
            fixed[name] = (before.rates[part], config.rates[part])
    return fixed


def in_words(changes: Changes) -> str:
    """ "--lr 0.1 -> 0.2, --data": without values that are too long to show."""
    shown = []
    for name, (was, now) in changes.items():
        values = f"{was!r} -> {now!r}" if isinstance(was, str) else f"{was} -> {now}"
        shown.append(f"{flag(name)} {values}" if len(values) <= 60 else flag(name))
    return ", ".join(shown)
