"""A run to look at: metrics.jsonl, the progress bar, sample answers, and a tracker for those who want one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.errors import one_line
from data.files import replacing
from training.config import TrainConfig
from training.samples import Answered, write_samples
from training.trackers import Tracker, open_tracker

METRICS = "metrics.jsonl"
# What the bar shows besides the time left: key of a row → its name there, and how it is written.
_SHOWN = {
    "loss": ("loss", "{:.3f}"),
    "dense_loss": ("dense_loss", "{:.3f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "images_per_second": ("images/s", "{:,.1f}"),
    "mfu": ("MFU", "{:.0%}"),
}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a line that was cut off is left out.

    Raises:
        OSError: it cannot be read.
    """
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


class Metrics:
    """Lines of metrics.jsonl, one bar, one tracker. On all ranks but the first, nothing.

    Lines beyond the step that a run goes on from are of steps that are done again: they are taken out.

    Raises:
        TrackerError: the tracker is not installed, or wants a login.
    """

    def __init__(self, config: TrainConfig, steps: int, first: int, active: bool):
        self.path, self.active = Path(config.output) / METRICS, active
        self.tracker: Tracker | None = open_tracker(config) if active else None
        self.bar = tqdm(
            total=steps, initial=first, unit="step", smoothing=0.02, mininterval=2, disable=not active
        )
        if active and self.path.exists():
            self._go_on_from(first)

    def _go_on_from(self, step: int) -> None:
        kept = [row for row in read_metrics(self.path) if row.get("step", 0) <= step]
        with replacing(self.path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

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
        shown = {name: form.format(row[key]) for key, (name, form) in _SHOWN.items() if key in row}
        if shown:
            self.bar.set_postfix(shown, refresh=False)
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and k != "step"}
        self._track(lambda tracker: tracker.log(numbers, row["step"]))

    def write_samples(self, step: int, answered: Sequence[Answered]) -> None:
        """Answers with their images, into the run's folder and to the tracker."""
        if not (self.active and answered):
            return
        try:
            write_samples(self.path.parent, step, answered)
        except OSError as error:
            self.say(f"step {step}: sample answers could not be written, the run goes on: {error}")
        self._track(lambda tracker: tracker.log_samples(answered, step))

    def _track(self, act: Callable[[Tracker], None]) -> None:
        """Log; a tracker that fails is said once and left, and the run goes on."""
        if self.tracker is None:
            return
        try:
            act(self.tracker)
        except Exception as error:  # of a network, a disk, a server: trackers raise anything
            self.tracker = None
            self.say(f"the tracker fails and is left, the run goes on: {one_line(error, 200)}")

    def say(self, text: str) -> None:
        if self.active:
            self.bar.write(text)

    def close(self) -> None:
        self.bar.close()
        self._track(lambda tracker: tracker.close())
