"""A run to look at: metrics.jsonl, the progress bar, and a tracker for those who want one."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from training.config import TrainConfig

METRICS = "metrics.jsonl"
_SHOWN = ("loss", "dense_loss", "patch_kind", "patch_count", "tokens_per_second")


class TrackerError(ValueError):
    """A tracker that is not installed or not logged in; one sentence."""


class Metrics:
    """Lines of metrics.jsonl, one bar, one tracker. On all ranks but the first, nothing.

    Lines beyond the step that a run goes on from are of steps that are done again: they are taken out.
    """

    def __init__(self, config: TrainConfig, steps: int, first: int, active: bool):
        self.path, self.active = Path(config.output) / METRICS, active
        self.tracker = open_tracker(config) if active and config.tracker != "none" else None
        self.bar = tqdm(
            total=steps, initial=first, unit="step", smoothing=0.02, mininterval=2, disable=not active
        )
        if active:
            self._go_on_from(first)

    def _go_on_from(self, step: int) -> None:
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # cut off
                continue
            if row.get("step", 0) <= step:
                kept.append(line)
        temporary = self.path.with_name(f".{METRICS}.tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(self.path)

    def write(self, row: dict[str, Any]) -> None:
        """One line; a disk that is full is said, and the run goes on."""
        if not self.active:
            return
        try:
            # Opened each time: the folder is replaced as a whole whenever the model is saved.
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            self.say(f"metrics could not be written, the run goes on: {error}")
        self.bar.set_postfix({k: f"{v:.3f}" for k, v in row.items() if k in _SHOWN}, refresh=False)
        if self.tracker is not None:
            numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
            self.tracker(numbers, row["step"])

    def say(self, text: str) -> None:
        if self.active:
            self.bar.write(text)

    def close(self) -> None:
        self.bar.close()


def open_tracker(config: TrainConfig):
    """A function (numbers, step) that logs to the tracker.

    Raises:
        TrackerError: it is not installed, or wants a login.
    """
    name, run = config.tracker, Path(config.output).name
    try:
        if name == "tensorboard":
            module = importlib.import_module("torch.utils.tensorboard")
            writer = module.SummaryWriter(str(Path(config.output) / "tensorboard"))

            def log(numbers: dict[str, float], step: int) -> None:
                for key, value in numbers.items():
                    writer.add_scalar(key, value, step)

            return log
        module = importlib.import_module(name)
        module.init(project="ocelli", name=run, config=config.to_dict())
        return lambda numbers, step: module.log(numbers, step=step)
    except ImportError:
        raise TrackerError(
            f"--tracker {name}: it is not installed here; pip install {name}, or leave it at none: "
            f"{METRICS} is written in any case"
        ) from None
    except Exception as error:  # trackers raise anything when they want a login or a network
        raise TrackerError(
            f"--tracker {name} cannot be used ({' '.join(str(error).split())[:200]}); log in to it, or leave "
            f"it at none: {METRICS} is written in any case"
        ) from error
