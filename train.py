"""Train a vision-language model. With its defaults: Ocelli's embedded model, from nothing, on a CPU.

    python train.py                                 # configs/shapes.yaml, about two hours
    python train.py --pictures 2000000              # the same recipe for longer
    python train.py configs/smolvlm-256m-lora.yaml --data rows.jsonl --output runs/mine
    python train.py runs/mine/run.yaml              # go on where it stopped: killed, or told to stop
    torchrun --nproc-per-node 8 train.py configs/nanovlm-460m.yaml --parallel fsdp
    python train.py configs/nanovlm-460m.yaml --plan --plan-ranks 8    # parameters, memory, FLOPs, hours
    python train.py --help

The output folder is a checkpoint in the Hub's Idefics3 layout. Beside it lie run.yaml (every setting),
metrics.jsonl and plot.svg, answers to held-out questions in samples/, the best model so far in best/, and the
training state.
"""

from __future__ import annotations

import shutil
import sys

from training.recipe import parse_command, write_run

if __name__ == "__main__":  # before torch is imported, which takes seconds: a mistake is told at once
    COMMAND = parse_command(None, __doc__.splitlines()[0])

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch

from data.errors import DatasetError, ProcessorError, one_line
from data.packing import Batch
from eval.in_run import held_out_tasks, score_in_run
from inference.checkpoint import RequestError, pick_device
from inference.cli import log_if_slow
from inference.locks import only_writer
from models.checkpoints.atomic_folder import check_replaceable
from models.checkpoints.errors import CheckpointError
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig
from training.distributed import (
    LostRankError,
    Ranks,
    accumulating,
    clip,
    gradient_scale,
    prepare_blocks,
    wrap,
)
from training.evaluation import Evaluation
from training.export import ADAPTER, push, save_model
from training.memory import is_out_of_memory, out_of_memory
from training.metrics import Metrics
from training.optim import build_optimizers, freeze, rates, schedule, set_rates, update_average
from training.run_plan import PlanOptions, describe
from training.state import FOLDER, RunState, StateError, states
from training.stopping import StopSignal
from training.tasks import Task, open_task
from training.throughput import Throughput
from training.trackers import TrackerError

REFUSALS = (
    RequestError, CheckpointError, ProcessorError, DatasetError, StateError, TrackerError, ValueError, OSError
)  # fmt: skip


def main(arguments: list[str] | None = None, command: tuple[TrainConfig, PlanOptions] | None = None) -> None:
    """Train as the arguments, or a `command` that was read from them, ask for."""
    config, asked = command or parse_command(arguments, __doc__.splitlines()[0])
    ranks = None
    try:
        if asked.plan:
            print(describe(config, asked))
            return
        ranks = Ranks(pick_device(config.device))
        output = check_replaceable(Path(config.output))
        with ranks.watching(), only_writer(output, parents=True) if ranks.is_first else nullcontext():
            train(config, ranks, output)
    except (*REFUSALS, RuntimeError, MemoryError) as error:
        if is_out_of_memory(error) and ranks is not None:
            error = MemoryError(out_of_memory(config, ranks.device, ranks.world_size))
        elif not isinstance(error, REFUSALS):
            raise
        reason = one_line(error) if ranks is None else ranks.reason(error)
        print(f"train.py: error: {reason}", file=sys.stderr)
        sys.exit(2)  # torchrun ends the other ranks
    except KeyboardInterrupt:  # before there was anything to save, or a second time
        print("train.py: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        if ranks is not None:
            ranks.close()


def train(config: TrainConfig, ranks: Ranks, output: Path) -> None:
    """Build or load everything that a run needs, then run it."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    loaded = config.init_from or config.text_from
    with log_if_slow("train.py", loaded) if loaded and ranks.is_first else nullcontext():
        task = open_task(config, ranks)
    ask = questions_to_ask(config, task, ranks)
    dtype = compute_dtype(config, ranks.device)
    if config.lora_rank:
        from training.lora import add_adapters  # peft takes seconds to import

        add_adapters(task.model, config)
    else:
        freeze(task.module, config.rates)
    prepare_blocks(task.model, config.activation_checkpointing, config.compile)
    wrapped = wrap(task.module, task.model, ranks, config.parallel, dtype)
    optimizers = build_optimizers(task.module, config.rates, config)
    average = {}
    if config.ema:
        trained = ((n, p) for n, p in task.module.named_parameters() if p.requires_grad)
        average = {name: parameter.detach().clone() for name, parameter in trained}

    state = RunState(output, task.module, optimizers, average, ranks, config.keep, config.async_save)
    saved = state.load(config, said) if config.resume else None
    first = 0
    if saved is not None:
        first = saved["step"]
        task.load_state_dict(saved["data"], first)
    metrics = Metrics(config, task.steps, first, ranks.is_first)
    parameters = sum(p.numel() for p in task.model.parameters())
    training = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    metrics.say(
        f"{parameters:,} parameters, of which {training:,} train, on {ranks.world_size} x {ranks.device}; "
        f"steps {first} to {task.steps}"
    )
    if config.keep_best and (lacking := lacking_for_best(config)):
        metrics.say(f"{lacking}: no model is kept in best/")
    try:
        if ranks.is_first:  # only now: a run that was refused leaves the folder as it found it
            output.mkdir(parents=True, exist_ok=True)
            if not config.resume:
                for name in (FOLDER, ADAPTER):
                    shutil.rmtree(output / name, ignore_errors=True)
            write_run(config, output)
        ranks.sum(0.0)  # the others wait
        run(config, ranks, task, ask, wrapped, optimizers, average, state, metrics, first, dtype)
    finally:
        metrics.close()  # what is said next begins a line


def questions_to_ask(
    config: TrainConfig, task: Task, ranks: Ranks
) -> Callable[[VisionLanguageModel], dict[str, float]] | None:
    """A function that scores a model's answers to held-out questions, through the runner of `python -m eval`;
    None where nothing is asked."""
    tasks = held_out_tasks(config)
    return (lambda model: score_in_run(tasks, model, task.processor, ranks)) if tasks else None


def lacking_for_best(config: TrainConfig) -> str:
    """What keeps evaluations from telling which model is best; empty where nothing does."""
    if config.is_shapes:
        return "" if config.eval_questions else "--eval-questions 0 leaves answers without a score"
    return "" if config.eval_data and config.eval_pictures else "no held-out rows are scored (--eval-data)"


def said(text: str) -> None:
    print(f"train.py: {text}", file=sys.stderr)


def run(
    config, ranks, task: Task, ask, wrapped, optimizers, average, state, metrics, first: int, dtype
) -> None:
    """The loop: one step; now and then a line of metrics, a look at held-out data, and a checkpoint."""
    stop, skipped, scores, done, saved_at, lost = StopSignal(), 0, {}, first, first, ""
    if not state.model_saved:  # with the state that was gone on from
        lost = save_model(config, ranks, task, average, metrics, first, scores)
    evaluation = Evaluation(config, ranks, task, ask, average, metrics, dtype, first)
    speed = Throughput(task, ranks, dtype, first)
    parameters = [p for p in task.module.parameters() if p.requires_grad]
    for step, batches, count in agreed_steps(task, ranks, stop, first):
        total, parts = backward(task, wrapped, batches, step, count, ranks, dtype)
        norm = clip(parameters, config.grad_clip)
        decay = decay_fraction(config)
        share = schedule(step, task.steps, config.warmup_steps, decay, task.second_stage, config.lr_floor)
        set_rates(optimizers, share, task.matrix_peak(step))
        if torch.isfinite(norm):
            for optimizer in optimizers:
                optimizer.step()
            if average:
                update_average(average, task.module, config.ema, step)
        else:
            skipped += 1
            report_not_finite(step, norm, skipped, batches, ranks, config, metrics)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        done = step + 1
        trained = Trained(done, batches, count, total, parts, rates(optimizers), norm)
        metrics.bar.update()
        speed.add(batches, step)

        if done % config.log_every == 0 or done == task.steps:
            metrics.write(trained.row(config, ranks, task) | speed.row(done))
        if done % config.eval_every == 0 or done == task.steps:
            with speed.aside():
                try:
                    scores = evaluation.run(wrapped, done)
                except DatasetError as error:  # on all ranks
                    stop.failed = error
        if done % config.save_every == 0:
            with speed.aside():
                lost = save(config, ranks, task, average, state, metrics, done, scores)
            saved_at = done
        if stop.failed is not None:
            break
    if first < done < task.steps and not (stop.agreed or stop.failed):  # the data have ended
        if done % config.log_every:
            metrics.write(trained.row(config, ranks, task) | speed.row(done))
        if done % config.eval_every:
            saved_at = first  # the card tells these scores
            try:
                scores = evaluation.run(wrapped, done)
            except DatasetError as error:
                stop.failed = error
    if done > saved_at:  # the end of the steps, of the data, or a signal
        lost = save(config, ranks, task, average, state, metrics, done, scores)
    if (problem := state.wait()) is not None:
        metrics.say(f"the training state could not be saved: {problem}")
    if stop.failed is not None:
        if done > first and any(path.name == f"step-{done:08d}" for path in states(state.folder)):
            metrics.say(f"step {done}: the data cannot be gone on with; the same command goes on from here")
        raise stop.failed
    if lost := ranks.gather(lost)[0]:
        raise CheckpointError(f"what was trained last is not saved: {lost}")
    if not (stop.agreed or ranks.sum(stop.asked)[0]):
        task.check_rows()
        if config.push_to_hub and ranks.is_first:
            push(config)


def agreed_steps(
    task: Task, ranks: Ranks, stop: StopSignal, first: int
) -> Iterator[tuple[int, list[Batch], float]]:
    """The number of each step, this rank's batches and all ranks' count of labelled tokens, until the last
    step, the data of all ranks have ended, or one was told to stop; all ranks agree on which.

    A rank whose data cannot be gone on with stops all: `stop.failed` says why, and the step is as if nobody
    had begun it.

    Raises:
        DatasetError: a new run has no data on any rank.
    """
    data = task.batches()
    for step in range(first, task.steps):
        stop.agreed = ranks.sum(stop.asked)[0] > 0
        if stop.agreed:  # asked before data are taken that would then count as trained on
            return
        try:
            batches, failed = next(data, None), None
        except DatasetError as error:
            batches, failed = None, error
        count = task.count(batches) if batches is not None else 0.0
        count, having, failing = ranks.sum(count, batches is not None, failed is not None)
        if failing:
            if failed or batches is not None:  # else this rank's data have ended before
                task.step_back()
            why = next(filter(None, ranks.gather(str(failed or ""))))
            stop.failed = failed or LostRankError(f"another rank's data failed: {why}")
            return
        if not having:
            if step == 0:
                raise DatasetError(f"no row can be trained on, on any of {ranks.world_size} ranks")
            return
        yield step, task.padding() if batches is None else batches, count


def backward(task, wrapped, batches, step, count: float, ranks, dtype) -> tuple[torch.Tensor, dict]:
    """Gradients of (sum of the losses over micro-batches and ranks) / count; this rank's sum, and what the
    last micro-batch has to log."""
    scale = gradient_scale(wrapped, ranks) / max(count, 1.0)
    autocast = torch.autocast(ranks.device.type, dtype, enabled=dtype != torch.float32)
    total, logged = torch.zeros((), device=ranks.device), {}
    for number, batch in enumerate(batches, 1):
        inputs = task.inputs(batch.to(ranks.device, non_blocking=True), step)
        with accumulating(wrapped, last=number == len(batches)):
            with autocast:
                loss, logged = wrapped(**inputs)
            (loss * scale).backward()
        total += loss.detach()
    return total, logged


class Trained(NamedTuple):
    """A finished step: this rank's batches and loss, what its last micro-batch has to log, and what all ranks
    have in common."""

    step: int
    batches: list[Batch]
    count: float
    total: torch.Tensor
    parts: dict[str, torch.Tensor]
    rates: dict[str, float]
    norm: torch.Tensor

    def row(self, config: TrainConfig, ranks: Ranks, task: Task) -> dict:
        """Its line of metrics.jsonl, the loss that of all ranks; all call it."""
        row = {"step": self.step, **task.seen(self.step), **self.rates, "grad_norm": self.norm.item()}
        total, *parts = ranks.sum(self.total.item(), *(value.item() for value in self.parts.values()))
        if self.parts:
            means = (round(value / ranks.world_size, 5) for value in parts)
            row |= dict(zip(self.parts, means, strict=True))
        else:
            row |= {"loss": total / max(self.count, 1.0), "labels": int(self.count)}
        if config.log_samples:
            row["samples"] = [ids for of_rank in ranks.gather(sample_ids(self.batches)) for ids in of_rank]
        return row


def report_not_finite(step, norm, skipped: int, batches, ranks, config, metrics) -> None:
    """Say it; leave once it has happened too often.

    Raises:
        ValueError: which names the samples.
    """
    named = ", ".join(
        f"{name} {number}"
        for of_rank in ranks.gather(sample_ids(batches))
        for row in of_rank
        for name, number in row
    )
    message = f"step {step}: the gradient is {norm.item()}; its samples: {named[:2000]}"
    if skipped > config.max_skipped:
        raise ValueError(f"{message}; the last checkpoint is in {config.output}")
    metrics.say(f"{message}; skipped ({skipped} of {config.max_skipped})")


def save(config, ranks, task: Task, average, state, metrics, step: int, scores: dict) -> str:
    """The model, then the training state; what cannot be written is said, and the run goes on. What kept the
    model from being written, on the first rank; empty where nothing did."""
    problem = state.wait()  # the folder is replaced as a whole: nothing may be writing into it
    lost = save_model(config, ranks, task, average, metrics, step, scores)
    state.model_saved = not lost
    problem = state.save(step, task.state_dict(), config.to_dict()) or problem
    if problem is not None:
        kept = "the one before is kept, " if states(state.folder) else ""
        metrics.say(f"step {step}: the training state could not be saved, {kept}the run goes on: {problem}")
    return lost


def sample_ids(batches) -> list[list]:
    return [[list(sample) for sample in row] for batch in batches for row in batch.sample_ids]


def decay_fraction(config: TrainConfig) -> float:
    return 1.0 if config.schedule == "cosine" else config.decay_fraction


def compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """What is computed in; weights and optimizers are float32 in any case."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if config.precision == "auto" else config.precision)


if __name__ == "__main__":
    main(command=COMMAND)
