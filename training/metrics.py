"""What a run shows: metrics.jsonl, the progress bar, its speed, sample answers, and the tracker, if any."""

from __future__ import annotations

import importlib
import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from tqdm import tqdm

from data.errors import ImageError, replacing
from data.images import load_image
from data.packing import Batch
from data.video import Clip
from messages import for_terminal, one_line
from training.config import TrainConfig
from training.flops import costs, peak_flops, training_flops
from training.task import Answered, Task

METRICS, RUN_ID = "metrics.jsonl", "wandb-run-id"
SAMPLES, ROLLOUTS, ANSWERS = "samples", "rollouts", "answers.jsonl"
PROJECT = "ocelli"  # in trackers
_LONGEST = 512  # pixels of the longer side of an image that is kept
# Keys of metrics.jsonl that the bar shows: their name there, and how they are written.
_SHOWN = {
    "loss": ("loss", "{:.3f}"),
    "reward": ("reward", "{:.3f}"),
    "dense_loss": ("dense_loss", "{:.3f}"),
    "samples_per_step": ("rows/step", "{:,.1f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "images_per_second": ("images/s", "{:,.1f}"),
    "mfu": ("MFU", "{:.0%}"),
}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, without a line that was cut off."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


class Metrics:
    """Lines of metrics.jsonl, one bar, one tracker. On all ranks but the first, nothing.

    A resumed run repeats the steps after the one it resumes from, so their lines are removed.
    """

    def __init__(self, config: TrainConfig, steps: int, first: int, active: bool):
        self.path, self.active = Path(config.output) / METRICS, active
        self.tracker = open_tracker(config, first > 0) if active else None
        self.bar = tqdm(
            total=steps, initial=first, unit="step", smoothing=0.02, mininterval=2, disable=not active
        )
        if active and self.path.exists():
            kept = [row for row in read_metrics(self.path) if row.get("step", 0) <= first]
            with replacing(self.path) as temporary:
                temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """One line. If the disk is full, a message says so and the run goes on."""
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

    def write_samples(self, step: int, answered: Sequence[Answered], into: str = SAMPLES) -> None:
        """Answers with their images into the run's folder, whole or not at all:

        output/samples/step-00000500/answers.jsonl     # {"pictures": ["00.png"], "question": …}
                                     00.png
        """
        if not (self.active and answered):
            return
        folder = self.path.parent / into / f"step-{step:08d}"
        writing = folder.with_name(f".{folder.name}")
        try:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
            with (writing / ANSWERS).open("w", encoding="utf-8") as file:
                for number, one in enumerate(answered):
                    names = []
                    for place, image in enumerate(one.question.images):
                        names.append(f"{number:02d}.png" if place == 0 else f"{number:02d}-{place + 1}.png")
                        small(image).save(writing / names[-1])
                    row: dict[str, Any] = {"pictures": names, "question": one.question.text}
                    row |= {"target": one.question.target, "answer": one.answer, "right": one.right}
                    row |= {"stop_reason": one.stop_reason}
                    row |= {} if one.reward is None else {"reward": one.reward}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            shutil.rmtree(folder, ignore_errors=True)  # of the same step, before the run was resumed
            writing.rename(folder)
        except (OSError, ImageError) as error:
            self.say(f"step {step}: sample answers could not be written, the run goes on: {error}")

    def _track(self, act: Callable[[Any], None]) -> None:
        """Log. A tracker that fails is given up with one message, and the run goes on."""
        if self.tracker is None:
            return
        try:
            act(self.tracker)
        except Exception as error:  # of a network, a disk, a server: trackers raise anything
            self.tracker = None
            self.say(f"the tracker failed and is no longer used, the run goes on: {one_line(error, 200)}")

    def say(self, text: str) -> None:
        if self.active:
            self.bar.write(for_terminal(text))

    def close(self) -> None:
        self.bar.close()
        self._track(lambda tracker: tracker.close())


# ------------------------------------------------------------------------------------------------- speed
class Throughput:
    """Samples per step, tokens and images per second and MFU since the last row, without evaluations and
    saves. All ranks add theirs; `first` is the step that the run resumes from."""

    def __init__(self, task: Task, dtype: torch.dtype, first: int):
        self.task, self.ranks, ranks = task, task.ranks, task.ranks
        self.costs = costs(task.model)
        self.peak = peak_flops(ranks.device, dtype)[0] * ranks.world_size if ranks.is_first else 0.0
        self.first, self._last, self._began = first, first, time.monotonic()
        self._reset()

    def _reset(self) -> None:
        self._tokens = self._images = self._samples = 0
        self._flops = self._aside = 0.0
        self._since = time.monotonic()

    def add(self, batches: Sequence[Batch], step: int) -> None:
        """This rank's batches of a step."""
        for batch in batches:
            amounts = self.task.amounts(batch, step)
            self._tokens += int(amounts.positions)
            self._images += batch.images
            self._samples += sum(map(len, batch.sample_ids))
            self._flops += training_flops(self.costs, amounts)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time that does not count."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._aside += time.monotonic() - began

    def row(self, done: int) -> dict[str, float]:
        """Speeds since the last row, for metrics.jsonl, after `done` steps; all ranks call it."""
        seconds = max(time.monotonic() - self._since - self._aside, 1e-9)
        own = self._tokens, self._images, self._flops, self._samples
        tokens, images, flops, samples = self.ranks.sum(*own)
        steps, self._last = max(1, done - self._last), done
        each = (time.monotonic() - self._began) / max(done - self.first, 1)
        self._reset()
        row = {"images_per_second": round(images / seconds, 2), "samples_per_step": round(samples / steps, 2)}
        if tokens:  # the first stage on shapes has none
            row = {"tokens_per_second": round(tokens / seconds, 1)} | row
        if self.peak:
            row["mfu"] = round(flops / seconds / self.peak, 4)
        return row | {"seconds_left": round(each * (self.task.steps - done))}


def small(image: Any) -> Image.Image:
    """A small copy of an image (whatever `load_image` takes), or of a video's first frame."""
    copy = load_image(next(image.frames([0])) if isinstance(image, Clip) else image).copy()
    copy.thumbnail((_LONGEST, _LONGEST))
    return copy


# ---------------------------------------------------------------------------------------------- trackers
class Tracker(NamedTuple):
    """Numbers of a step by name, and the end of the run, as a tracker takes them."""

    log: Callable[[dict[str, float], int], None]
    close: Callable[[], None]


def _wandb(config: TrainConfig, resumed: bool) -> Tracker:
    """wandb, or trackio, which has its calls."""
    module, output = importlib.import_module(config.tracker), Path(config.output)
    # A resumed run is the same run: trackio knows it by its name, wandb by an id of ours.
    more = {"id": _run_id(output, resumed)} if config.tracker == "wandb" else {}
    more["resume"] = "allow" if config.resume else "never"
    module.init(project=PROJECT, name=output.name, config=asdict(config), **more)
    return Tracker(lambda numbers, step: module.log(numbers, step=step), module.finish)


def _run_id(output: Path, resumed: bool) -> str:
    """The id that a run has in wandb, kept in its output folder. One that starts anew gets a new one."""
    path, known = output / RUN_ID, ""
    if resumed:
        with suppress(OSError):
            known = path.read_text(encoding="utf-8").strip()
    if not known:
        known = secrets.token_hex(4)
        with suppress(OSError):  # a run that resumes is then another one in wandb
            output.mkdir(parents=True, exist_ok=True)
            path.write_text(known + "\n", encoding="utf-8")
    return known


def _tensorboard(config: TrainConfig, resumed: bool) -> Tracker:
    tensorboard = importlib.import_module("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(str(Path(config.output) / "tensorboard"))

    def log(numbers: dict[str, float], step: int) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)

    return Tracker(log, writer.close)


def open_tracker(config: TrainConfig, resumed: bool = False) -> Tracker | None:
    """The tracker of a run, which may be `resumed`, if any; ValueError if it is not installed or refuses."""
    if config.tracker == "none":
        return None
    try:
        return (_tensorboard if config.tracker == "tensorboard" else _wandb)(config, resumed)
    except Exception as error:  # trackers raise anything when they want a login or a network
        reason = one_line(error, 200)
        if isinstance(error, ImportError):
            reason = "not installed; pip install -r requirements-track.txt"
        raise ValueError(f"--tracker {config.tracker} cannot be used: {reason}") from error
