"""Train a vision-language model.

    python train.py                                 # configs/flags.yaml: the embedded model learns flags
    python train.py recipes/shapes/shapes.yaml      # plain drawings, from scratch, on a CPU: about two hours
    python train.py recipes/world/world.yaml        # the embedded model; see the page beside it
    python train.py configs/smolvlm-256m-lora.yaml --data rows.jsonl --output runs/mine
    python train.py runs/mine/run.yaml              # resume a run that was killed or stopped
    torchrun --nproc-per-node 8 train.py configs/nanovlm-460m.yaml --parallel fsdp
    python train.py configs/smolvlm-256m-lora.yaml --data rows.jsonl --show 3    # a look at the rows
    python train.py configs/nanovlm-460m.yaml --plan --plan-ranks 8    # parameters, memory, FLOPs, hours
    python train.py --help

The output folder is a checkpoint in transformers' layout. It also holds run.yaml (every setting),
metrics.jsonl, answers to held-out questions in samples/, the best model so far in best/, and the
training state.
"""

from __future__ import annotations

import shutil
import sys

from training.config import PlanOptions, TrainConfig, parse_command, write_run

if __name__ == "__main__":  # before torch is imported, which takes seconds: mistakes are reported at once
    COMMAND = parse_command(None, __doc__.splitlines()[0])

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.errors import DatasetError
from data.order import key_of
from data.packing import Batch, on_device
from eval.held_out import HeldOutQuestions
from generation.processors import limit_threads
from inference.checkpoint import pick_device
from inference.flags import log_if_slow
from inference.results import only_writer
from messages import counted, named, one_line
from models.checkpoints.files import CheckpointError
from models.checkpoints.folder import check_replaceable
from models.checkpoints.save import written
from training.distributed import (
    LostRankError,
    Ranks,
    accumulating,
    clip,
    gradient_scale,
    is_lost_worker,
    is_out_of_memory,
    out_of_memory,
    prepare_blocks,
    wrap,
)
from training.evaluation import Evaluation
from training.export import push, save_model, size_of
from training.lora import ADAPTER, add_adapters
from training.metrics import ROLLOUTS, Metrics, Throughput
from training.optim import build_optimizers, freeze, rates, update_average
from training.plan import describe_plan
from training.preferences import PreferencesTask
from training.rollouts import RewardsTask
from training.rows import RowsTask, taken
from training.show import describe_rows
from training.state import FOLDER, RunState, StopSignal, states
from training.task import Score, Task

TASKS: dict[str, type[Task]] = {
    "answers": RowsTask,
    "preferences": PreferencesTask,
    "rewards": RewardsTask,
}


def main(arguments: list[str] | None = None, command: tuple[TrainConfig, PlanOptions] | None = None) -> None:
    """Train as the arguments say, or a `command` that was read from them."""
    config, options = command or parse_command(arguments, __doc__.splitlines()[0])
    ranks = None
    try:
        if options.plan:
            drawn = task_class(config) if config.is_drawn else None
            print((drawn.describe_plan if drawn else describe_plan)(config, options))
            return
        if options.show >= 0:
            print(describe_rows(config, options.show))
            return
        ranks = Ranks(pick_device(config.device))
        output = check_replaceable(Path(config.output))
        with ranks.watching(), only_writer(output, parents=True) if ranks.is_first else nullcontext():
            run = Run(config, ranks, output)
            try:
                run.train()
            finally:
                run.metrics.close()  # what is printed next begins a line
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if is_out_of_memory(error) and ranks is not None:
            error = MemoryError(out_of_memory(config, ranks.device))
        elif is_lost_worker(error):
            more = "out of memory? Fewer --workers take less; the same command goes on from the latest state"
            error = DatasetError(f"a process that reads data has died ({one_line(error)}): {more}")
        elif not isinstance(error, ValueError | OSError):
            raise
        reason = one_line(error) if ranks is None else ranks.reason(error)
        print(named(f"train.py: error: {reason}"), file=sys.stderr)
        sys.exit(2)  # torchrun ends the other ranks
    except KeyboardInterrupt:  # before there was anything to save, or a second time
        print(named("train.py: interrupted"), file=sys.stderr)
        sys.exit(130)
    finally:
        if ranks is not None:
            ranks.close()


def task_class(config: TrainConfig) -> Any:
    """A class of `Task`; that of drawings stands in the package of recipes/ that `data` names."""
    return resolve_name(f"{config.data}.training:TASK") if config.is_drawn else TASKS[config.task]


class Run:
    """A training run on this rank: everything that it needs, and the loop over its steps."""

    def __init__(self, config: TrainConfig, ranks: Ranks, output: Path):
        self.config, self.ranks, self.output = config, ranks, output
        limit_threads(config.threads or None)
        torch.manual_seed(config.seed)
        loaded = config.init_from or config.text_from
        with log_if_slow("train.py", loaded) if loaded and ranks.is_first else nullcontext():
            self.task: Task = task_class(config)(config, ranks)
        task = self.task
        self.held_out = HeldOutQuestions(config, task, ranks)
        self.eval_every, self.save_every = (
            max(1, round(every * task.steps)) if every < 1 else int(every)
            for every in (config.eval_every, config.save_every)
        )
        self.late = ranks.device.type == "cuda"
        if self.late:  # float32 products in TF32, as `--precision` says
            torch.set_float32_matmul_precision("high")
        self.dtype = task.dtype
        if config.lora_rank:
            add_adapters(task.model, config, written(task.model.config)[1])
        else:
            freeze(task.module, config.rates)
        prepare_blocks(task.model, config.activation_checkpointing, config.compile)
        self.wrapped = wrap(task.module, task.model, ranks, config.parallel, self.dtype)
        if ranks.rank:  # each rank drops out other inputs; the first is as a single process
            torch.manual_seed(key_of(config.seed, "rank", ranks.rank))
        self.optimizers = build_optimizers(task.module, config.rates, config)
        self.parameters = [p for p in task.module.parameters() if p.requires_grad]
        self.average: dict[str, Tensor] = {}
        if config.ema:
            trained = ((n, p) for n, p in task.module.named_parameters() if p.requires_grad)
            self.average = {name: parameter.detach().clone() for name, parameter in trained}

        self.state = RunState(config, output, task.module, self.optimizers, self.average, ranks)
        saved = self.state.load() if config.resume else None
        self.first = saved["step"] if saved else 0  # the step that this run resumes from
        if saved:
            task.load_state_dict(saved["data"], self.first)
        self.metrics = Metrics(config, task.steps, self.first, ranks.is_first)
        self.scores: dict[str, Score] = {}  # of the latest evaluation
        self.before: dict[str, Score] = {}  # of the one before the first step
        self.done = self.saved_at = self.first
        self.unchecked: Trained | None = None  # the latest step, until its gradient is known to be finite
        self.lost = ""  # why the model could not be saved

    def train(self) -> None:
        """From the first step to the end of the steps, of the data, or a signal."""
        config, ranks, task, metrics = self.config, self.ranks, self.task, self.metrics
        self._announce()
        if ranks.is_first:  # only now: a run that was refused leaves the folder as it was
            self.output.mkdir(parents=True, exist_ok=True)
            if not config.resume:
                for name in (FOLDER, ADAPTER):
                    shutil.rmtree(self.output / name, ignore_errors=True)
            write_run(config, self.output)
        ranks.sum(0.0)  # the others wait
        self.stop = stop = StopSignal()
        if not self.state.model_saved:  # with the state that was loaded
            self._save_model()
        self.evaluation = Evaluation(task, self.held_out, self.average, metrics, self.dtype, self.first)
        self.speed = speed = Throughput(task, self.dtype, self.first)
        if config.eval_on_start and not self.first:
            self._evaluate(last=True)
            self.before = self.scores
        stale = self.evaluation.stale
        for step, batches, count in () if stale else self.steps():
            trained = self.step(step, batches, count)
            self.done = done = step + 1
            metrics.bar.update()
            speed.add(batches, step)
            last = done == task.steps
            if done % config.log_every == 0 or last:
                self._log(trained)
            if done % self.eval_every == 0 or last:
                self._evaluate(last)
            if done % self.save_every == 0:
                self.save()
            if (stale := self.evaluation.stale) and not last:
                metrics.say(f"step {done}: stopped, after {config.patience} evaluations without a better one")
            if stale or stop.failed is not None:
                break
        if self.first and self.done == self.first and not (stop.agreed or stop.failed):
            more = "--patience" if stale else "--steps or --epochs"
            metrics.say(
                f"nothing to train: the run in {config.output} has ended, after "
                f"{counted(self.first, 'step')}; to go on raise {more}, to start over set --no-resume"
            )
        if self.first < self.done < task.steps and not (stop.agreed or stop.failed):  # ended before its steps
            if not stale:
                said = f"the data ends here, after {config.epochs} epochs (--epochs), not at --steps"
                metrics.say(f"step {self.done:,}: {said} {task.steps:,}")
            if self.done % config.log_every:
                self._log(trained)
            if self.done % self.eval_every or not self.evaluation.whole:
                self._evaluate(last=True)
                self.saved_at = self.first  # saved once more: the model card shows these scores
        if self.done > self.saved_at:
            self.save()
        self._end()

    # -------------------------------------------------------------------------------------------- a step
    def steps(self) -> Iterator[tuple[int, list[Batch], float]]:
        """The number of each step, this rank's batches, and all ranks' count of labelled tokens. They agree
        on when to stop: after the last step, when all data have ended, or when one of them gets a signal.

        A rank that cannot read its data stops all: `stop.failed` says why, and the step is as if not begun.
        """
        task, ranks, stop = self.task, self.ranks, self.stop
        data = task.batches()
        for step in range(self.first, task.steps):
            # Agreed on before data is taken, which would then count as trained on.
            stop.agreed = ranks.sum(stop.asked)[0] > 0
            if stop.agreed:
                return
            batches, failed = taken(data)
            count = task.count(batches) if batches is not None else 0.0
            count, having, failing = ranks.sum(count, batches is not None, failed is not None)
            if failing:
                if failed or batches is not None:  # else this rank's data had ended before
                    task.step_back()
                why = next(filter(None, ranks.gather(str(failed or ""))))
                stop.failed = failed or LostRankError(f"another rank's data failed: {why}")
                return
            if not having:
                if step == 0:
                    raise DatasetError(f"no row can be trained on, on any of {ranks.world_size} ranks")
                return
            yield step, task.padding() if batches is None else batches, count

    def step(self, step: int, batches: list[Batch], count: float) -> Trained:
        """Gradients and an update. Whether they were finite, the host reads of a GPU one step later, so that
        it never waits."""
        config, task = self.config, self.task
        total, parts = self.backward(step, batches, count)
        norm = clip(self.parameters, config.grad_clip)
        task.set_rates(self.optimizers, step)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.average:
            update_average(self.average, task.module, config.ema, step)
        known = norm.to("cpu", non_blocking=norm.is_cuda)
        ended = torch.cuda.current_stream(norm.device).record_event() if norm.is_cuda else None
        trained = Trained(step + 1, batches, count, total, parts, known, ended)
        self.check()
        self.unchecked = trained
        if not self.late:
            self.check()
        return trained

    def backward(
        self, step: int, batches: list[Batch], count: float
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Gradients of (sum of the losses over micro-batches and ranks) / count. Returns this rank's sum, and
        what each micro-batch has to log."""
        device = self.ranks.device
        scale = gradient_scale(self.wrapped, self.ranks) / max(count, 1.0)
        autocast = torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32)
        total, logged = torch.zeros((), device=device), []
        for number, batch in enumerate(batches, 1):
            inputs = {name: on_device(one, device) for name, one in self.task.inputs(batch, step).items()}
            with accumulating(self.wrapped, last=number == len(batches)):
                with autocast:
                    loss, parts = self.wrapped(**inputs)
                (loss * scale).backward()
            logged.append(parts)
            total += loss.detach()
            del inputs  # its memory is that of the next
        return total, logged

    def check(self) -> None:
        """Wait for the end of the latest step; ValueError for a gradient that was not finite."""
        step, self.unchecked = self.unchecked, None
        if step is None:
            return
        if step.ended is not None:
            step.ended.synchronize()
        self.task.note(step.parts)
        if step.norm.isfinite():
            return
        gathered = self.ranks.gather(sample_ids(step.batches))
        named = ", ".join(f"{name} {number}" for rows in gathered for row in rows for name, number in row)
        message = f"step {step.step - 1}: the gradient is {step.norm.item()}; its samples: {named[:2000]}"
        raise ValueError(f"{message}; the last checkpoint is in {self.config.output}")

    # ------------------------------------------------------------------------------------- now and then
    def _announce(self) -> None:
        config, model = self.config, self.task.model
        size = size_of(model.config)
        training = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.metrics.say(
            f"{size:,} parameters; {training:,} train, on {self.ranks.world_size} x "
            f"{self.ranks.device}; steps {self.first} to {self.task.steps}"
        )
        if self.task.is_estimate:
            self.metrics.say(f"about {config.epochs or 1} x all rows, as the first of them fill the steps")

    def _log(self, trained: Trained) -> None:
        """A line of metrics.jsonl, with the loss of all ranks; all call it."""
        self.check()
        ranks, task = self.ranks, self.task
        row: dict[str, Any] = {"step": trained.step, **rates(self.optimizers)}
        row["grad_norm"] = trained.norm.item()
        row |= task.row(trained.parts, ranks.sum(trained.total.item())[0], trained.labels)
        if self.config.log_samples:
            gathered = ranks.gather(sample_ids(trained.batches))
            row["samples"] = [ids for of_rank in gathered for ids in of_rank]
        self.metrics.write(row | self.speed.row(trained.step))
        self.metrics.write_samples(trained.step, task.answered() if ranks.is_first else [], ROLLOUTS)

    def _evaluate(self, last: bool) -> None:
        self.check()
        with self.speed.aside():
            try:
                self.scores = self.evaluation.run(self.wrapped, self.done, last)
            except DatasetError as error:  # on all ranks
                self.stop.failed = error

    def save(self) -> None:
        """The model, then the training state. If one cannot be written, a message says so and the run goes
        on."""
        self.check()
        with self.speed.aside():
            self._save_model()
            self.state.model_saved = not self.lost
            if (problem := self.state.save(self.done, self.task.state_dict())) is not None:
                kept = "the one before is kept, " if states(self.state.folder) else ""
                lost = f"step {self.done}: the training state could not be saved"
                self.metrics.say(f"{lost}, {kept}the run goes on: {problem}")
        self.saved_at = self.done

    def _save_model(self) -> None:
        """Into the output folder. On the first rank, `lost` says why it could not be written, if so."""
        self.lost = save_model(self.task, self.average, self.done, self.scores, self.output)
        if self.lost:
            self.metrics.say(f"step {self.done}: the model could not be saved, the run goes on: {self.lost}")

    def _end(self) -> None:
        """Report what went wrong, or upload the model."""
        stop, done = self.stop, self.done
        if stop.failed is not None:
            if done > self.first and any(p.name == f"step-{done:08d}" for p in states(self.state.folder)):
                self.metrics.say(f"step {done}: reading the data failed; rerun the same command to resume")
            raise stop.failed
        if lost := self.ranks.gather(self.lost)[0]:
            raise CheckpointError(f"the latest model is not saved: {lost}")
        if not (stop.agreed or self.ranks.sum(stop.asked)[0]):
            self.task.check_rows()
            for name in self.before.keys() & self.scores.keys() & {"eval_exact_match", "eval_accuracy"}:
                before, after = self.before[name], self.scores[name]
                self.metrics.say(f"{name.removeprefix('eval_')}: {before} before, {after} after")
            asked = next(iter(self.held_out.questions), None)
            question = f'"{asked.text}"' if asked and '"' not in asked.text else "QUESTION"
            ask = f"generate.py IMAGE -q {question} --model {self.output}"
            self.metrics.say(f"the model is in {self.output}; ask it: python {ask}")
            if better := self.evaluation.better_before(done):
                self.metrics.say(better)
            if self.config.push_to_hub and self.ranks.is_first:
                push(self.config)


class Trained(NamedTuple):
    """A step: this rank's batches and loss, what its micro-batches have to log, and what all ranks have in
    common. `norm`, of the gradient, is on the host once the GPU has `ended` the step."""

    step: int
    batches: list[Batch]
    labels: float
    total: Tensor
    parts: list[dict[str, Tensor]]
    norm: Tensor
    ended: torch.cuda.Event | None


def sample_ids(batches: list[Batch]) -> list[list]:
    return [[list(sample) for sample in row] for batch in batches for row in batch.sample_ids]


if __name__ == "__main__":
    main(command=COMMAND)
