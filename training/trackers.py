"""Trackers to log to: trackio (local-first, no account), wandb, tensorboard; none of them is needed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data.errors import one_line
from training.config import TrainConfig
from training.samples import Answered, small

PROJECT = "ocelli"


class TrackerError(ValueError):
    """A tracker that is not installed or not logged in; one sentence."""


class Tracker(Protocol):
    def log(self, numbers: dict[str, float], step: int) -> None:
        """Numbers by name, after so many steps."""

    def log_samples(self, answered: Sequence[Answered], step: int) -> None:
        """Answers with their images."""

    def close(self) -> None:
        """Nothing comes any more."""


class _WandbLike:
    """wandb, or trackio, which has its calls."""

    def __init__(self, module: Any, name: str, config: dict[str, Any], **more):
        self.module = module
        module.init(project=PROJECT, name=name, config=config, **more)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.module.log(numbers, step=step)

    def log_samples(self, answered: Sequence[Answered], step: int) -> None:
        shown: dict[str, Any] = {}
        for number, one in enumerate(answered):
            for image in one.question.images[:1]:
                shown[f"sample_{number}"] = self.module.Image(np.array(small(image)), caption=one.caption)
        if shown:
            self.module.log(shown, step=step)

    def close(self) -> None:
        self.module.finish()


class _TensorBoard:
    def __init__(self, folder: Path):
        self.writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(self, numbers: dict[str, float], step: int) -> None:
        for key, value in numbers.items():
            self.writer.add_scalar(key, value, step)

    def log_samples(self, answered: Sequence[Answered], step: int) -> None:
        for number, one in enumerate(answered):
            for image in one.question.images[:1]:
                self.writer.add_image(f"sample_{number}", np.array(small(image)), step, dataformats="HWC")
            self.writer.add_text(f"sample_{number}", one.caption, step)

    def close(self) -> None:
        self.writer.close()


def open_tracker(config: TrainConfig) -> Tracker | None:
    """The tracker that the config names, None for none.

    Raises:
        TrackerError: it is not installed, or wants a login.
    """
    name, run = config.tracker, Path(config.output).name
    if name == "none":
        return None
    left = "leave it at none: metrics.jsonl is written in any case"
    try:
        if name == "tensorboard":
            return _TensorBoard(Path(config.output) / "tensorboard")
        # A run that goes on is one run in trackio; in wandb it is one of a group.
        more = {"resume": "allow" if config.resume else "never"} if name == "trackio" else {"group": run}
        return _WandbLike(importlib.import_module(name), run, config.to_dict(), **more)
    except ImportError:
        raise TrackerError(
            f"--tracker {name}: it is not installed here; pip install -r requirements-track.txt, or {left}"
        ) from None
    except Exception as error:  # trackers raise anything when they want a login or a network
        login = "log in with `wandb login`" if name == "wandb" else "see its documentation"
        said = one_line(error, 200)
        raise TrackerError(f"--tracker {name} cannot be used ({said}); {login}, or {left}") from error
