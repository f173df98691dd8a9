"""Run tasks: answer what has no answer yet, score it, and write what came of it into the run's folder.

    results = evaluate(checkpoint, shapes_task(500), Path("runs/eval/shapes"), controls=True)
    for number, answer in answers(checkpoint, task.samples, slots=32):    # without a folder
        print(task.samples[number].question, answer.text)
    scores, answered = HeldOutQuestions(config, task, ranks).answer(model)  # in a training run

Samples are grouped by image, the longest prompt first, and answered many at a time in the scheduler. All
questions about an image stand one after another: it is opened, cut into tiles, encoded and prefilled once,
however many there are. In float32 each answer is the one that the model gives alone, whatever the number of
slots, the order and the number of ranks.

Under torchrun each rank answers its share of the images. A run that was killed resumes where it stopped, on
any number of ranks. A question whose image does not open scores 0, is listed, and is tried again next time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm

from data.box_rows import BoxRows, FormFor, by_name
from data.errors import DatasetError
from data.image_sizes import image_size
from data.processor import EncodedConversation, Processor
from data.sources import DatasetConfig
from data.tiles import Visual
from data.video import Clip
from eval.metrics import find_metric
from eval.report import write_report
from eval.results import (
    BLIND,
    REPORT,
    RESULTS,
    RUN,
    SAMPLES,
    at_k_text,
    calibration_text,
    cut_off_text,
    describe_model,
    environment,
    higher_limits,
    official_table,
    read_samples,
    samples_file,
    summarise,
    table_text,
    write_json,
)
from eval.tasks import (
    OWN,
    DataConfig,
    Draws,
    EvalSample,
    EvalTask,
    TaskError,
    data_task,
    is_user_error,
    own_task,
    shapes_task,
)
from generation.options import GenerationOptions
from generation.requests import LazyRequest, Request, Stats
from inference.answer import read_answer, split
from inference.asking import requests_for
from inference.batch import open_scheduler
from inference.checkpoint import Checkpoint, RequestError, open_checkpoint, pick_device, pixel_budget
from inference.conversation import Turn, messages_of
from inference.coordinates import ANY_SIZE
from inference.flags import log_if_slow, machine
from inference.grammar import choice_grammar
from inference.locks import only_writer
from inference.thinking import THINK_TOKENS, budget_of, held_to, think_first, thinking_end
from inference.votes import pick
from messages import counted, for_terminal, one_line
from models.checkpoints.sources import last_name
from models.vision_language_model import VisionLanguageModel
from training.config import TrainConfig, dataset_entries
from training.distributed import Ranks
from training.task import Answered, Question, Score
from training.task import Task as TrainingTask

_THINKING = ("thinking", "thinking_tokens", "thinking_stop_reason")
BLANK = (200, 200, 200)  # the colour that a blanked image shows everywhere
# In a training run: other questions than `python -m eval --tasks shapes` asks, since its score must not pick
# a model; answers in work at the same time; tokens of an answer that is kept.
HELD_OUT_SEED, SLOTS, SAMPLE_TOKENS = 1, 32, 64


# --------------------------------------------------------------------------------------------- answers
@dataclass(frozen=True)
class EvalAnswer:
    """The answer to a sample with its length in tokens, why it ended ("stop", or "length" where it was cut
    off) and its confidence; or "" and what was wrong. `thinking`: what was thought before, in how many
    tokens, and why that ended."""

    text: str
    tokens: int = 0
    stop_reason: str = "error"
    thinking: tuple[str, int, str] | None = None
    confidence: float | None = None
    probabilities: Mapping[str, float] | None = None  # of each of its choices, among them
    error: str = ""
    draw: int = 0  # its number, of several answers


def records_of(
    checkpoint: Checkpoint,
    task: EvalTask,
    samples: Sequence[EvalSample],
    slots: int,
    groups: Sequence[Sequence[int]],
    blank: bool = False,
) -> Iterator[dict[str, Any]]:
    """Lines of samples.jsonl, as they are ready: of `groups` of samples of a task, which may be none."""
    asked = (checkpoint, samples, slots, groups, blank)
    made: dict[int, list[EvalAnswer]] = {}  # of questions that wait for more answers
    for number, answer in answers(*asked, think=task.think, draws=task.draws) if groups else ():
        own = made.setdefault(number, [])
        own.append(answer)
        if len(own) == (task.draws.count if task.draws else 1):
            yield _record(task, samples[number], sorted(made.pop(number), key=lambda one: one.draw))


def _record(task: EvalTask, sample: EvalSample, several: Sequence[EvalAnswer]) -> dict[str, Any]:
    """The question, its answer and its score: of several answers the one that wins their vote, and the mean
    of their scores."""
    scores = [
        0.0 if one.error else task.metric.score(one.text, sample.targets, sample.fields) for one in several
    ]
    sure = [round(one.confidence or 0.0, 6) for one in several]
    won = pick([one.text for one in several], sure, same=task.same(sample))["number"]
    answer, score = several[won], sum(scores) / len(scores)
    record: dict[str, Any] = {"id": sample.id} | ({"family": sample.family} if sample.family else {})
    record |= {"earlier": sample.earlier} if sample.earlier else {}
    record |= {"question": sample.question, "prompt": sample.prompt, "targets": list(sample.targets)}
    record |= {"answer": answer.text, "score": score, "tokens": answer.tokens}
    record |= {"stop_reason": answer.stop_reason} | dict(zip(_THINKING, answer.thinking or ()))
    record |= {} if answer.confidence is None else {"confidence": round(answer.confidence, 6)}
    record |= {"probabilities": answer.probabilities} if answer.probabilities else {}
    if task.draws:
        record |= {"answers": [one.text for one in several], "scores": scores, "confidences": sure}
        record |= {"tokens": [one.tokens for one in several]}
        record |= {"stop_reason": [one.stop_reason for one in several]}
        if any(one.thinking for one in several):
            thoughts = zip(*(one.thinking or ("", 0, "") for one in several))
            record |= dict(zip(_THINKING, map(list, thoughts)))
    error = next((one.error for one in several if one.error), "")
    return record | ({"error": error} if error else {})


def by_image(samples: Sequence[EvalSample]) -> list[list[int]]:
    """Numbers of the samples by image, the longest prompt first among groups and inside them: neighbours are
    of similar length, and what does not fit into memory shows early."""
    groups: dict[str, list[int]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(number)
    for group in groups.values():
        group.sort(key=lambda number: (-len(samples[number].prompt), samples[number].prompt, number))
    return sorted(groups.values(), key=lambda group: -len(samples[group[0]].prompt))


def share(groups: Sequence[Sequence[int]], rank: int, world_size: int) -> list[list[int]]:
    """One rank's part of the groups. Each group goes to the rank that has least; too large ones are split."""
    largest = max(1, -(-sum(map(len, groups)) // world_size))
    pieces = [list(group[at : at + largest]) for group in groups for at in range(0, len(group), largest)]
    counts, own = [0] * world_size, []
    for place in sorted(range(len(pieces)), key=lambda place: -len(pieces[place])):
        least = counts.index(min(counts))
        counts[least] += len(pieces[place])
        if least == rank:
            own.append(place)
    return [pieces[place] for place in sorted(own)]


def answers(
    checkpoint: Checkpoint,
    samples: Sequence[EvalSample],
    slots: int = 32,
    groups: Sequence[Sequence[int]] | None = None,
    blank: bool = False,
    stats: Stats | None = None,
    think: int | None = None,
    draws: Draws | None = None,
) -> Iterator[tuple[int, EvalAnswer]]:
    """(number of the sample, its answer), as they are ready; of several answers each.

    Args:
        slots: answers in work at the same time.
        groups: which samples, as `by_image` groups them; default: all.
        blank: show a uniform image of the same size in place of each.
        think, draws: see `EvalTask`.
        stats: counts what the scheduler does.
    """
    groups = by_image(samples) if groups is None else groups
    options = think_first(GenerationOptions(confidence=True), think)
    count = 1
    if draws is not None:
        count = draws.count
        options = replace(options, temperature=draws.temperature, num_return_sequences=count)
    scheduler = open_scheduler(checkpoint, max(1, min(slots, count * sum(map(len, groups)))))
    scheduler.stats = scheduler.stats if stats is None else stats
    held: dict[str, list[Visual]] = {}  # of the group in work: opened and cut once
    left: list[Request] = []  # of the question in work, for its other answers
    budgets: dict[int, int | None] = {}  # of thinking: what the context leaves of `think`

    def request(number: int, draw: int) -> Request:
        if draw and left:
            return left.pop(0)
        sample = samples[number]
        if sample.group not in held:
            held.clear()
            held[sample.group] = [
                one for source in sample.images() for one in _visuals(checkpoint, source, blank)
            ]
        row = _encode(checkpoint.processor, held[sample.group], sample, think is not None)
        if draws is not None:
            own = replace(options, seed=draws.seed_of(sample))
        else:  # several answers are what a model says by itself, not the likeliest of the choices
            form = checkpoint.forms.constraint(choice_grammar(sample.choices)) if sample.choices else None
            own = held_to(options, form)
        first, *left[:] = requests_for(checkpoint, row, sample.max_new_tokens, own)
        budgets[number] = budget_of(first.options)
        return first

    keys = ((number, draw) for group in groups for number in group for draw in range(count))
    for done in scheduler.run(LazyRequest(key, partial(request, *key)) for key in keys):
        number, draw = done.key
        if done.error is not None:
            yield number, EvalAnswer("", error=one_line(done.error), draw=draw)
        else:
            said, text = read_answer(checkpoint, done.token_ids, options)
            thought, own = split(checkpoint, done.token_ids, options)
            thinking = None
            if thought or think is not None:
                thinking = said, len(thought), thinking_end(checkpoint, done.token_ids, budgets[number])
            choices, decision = samples[number].choices, done.decision
            shares = None if decision is None else dict(zip(choices, decision.probabilities))
            about = done.stop_reason, thinking, done.confidence, shares
            yield number, EvalAnswer(text, len(own), *about, draw=draw)


def _encode(
    processor: Processor, images: list[Visual], sample: EvalSample, think: bool
) -> EncodedConversation:
    """The sample's question, after the turns before it."""
    shown = [tuple(images), *[()] * len(sample.earlier)]  # with the first question
    turns = [Turn(question, own, ()) for (question, _), own in zip(sample.earlier, shown)]
    messages = messages_of(processor, sample.system or None, turns, [answer for _, answer in sample.earlier])
    messages += processor.conversation(list(shown[len(turns)]), sample.prompt)
    return processor.encode_conversation(messages, True, "question", think)


def _visuals(checkpoint: Checkpoint, source: Any, blank: bool) -> list[Visual]:
    processor = checkpoint.processor
    if isinstance(source, Clip):
        clip = replace(source, read=partial(map, lambda _: _blank(source.size))) if blank else source
        return processor.visuals(clip)
    return [processor.cut(_blank(image_size(source, processor.limits)) if blank else source)]


def _blank(size: tuple[int, int]) -> Image.Image:
    return Image.new("RGB", size, BLANK)


# --------------------------------------------------------------------------------------------- one task
def evaluate(
    checkpoint: Checkpoint,
    task: EvalTask,
    output: Path,
    batch_size: int = 32,
    controls: bool = False,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Answer, score and write; returns the content of results.json, on every rank.

    Args:
        output: a folder, new or of an earlier run of the same task and model.
        batch_size: answers in work at the same time; no score depends on it (in float32).
        controls: also answer with images blanked, and score the most common answers.
    """
    ranks = Ranks(checkpoint.model.device) if ranks is None else ranks
    described = {"task": task.definition(), "model": describe_model(checkpoint)}
    paths = [output / SAMPLES, output / BLIND][: 1 + controls]
    with ExitStack() as stack:  # the first rank holds the folder for all of them
        problem = _begin(task, output, described, paths, stack) if ranks.is_first else ""
        if problem := ranks.gather(problem)[0]:
            raise TaskError(problem)
        speed, *_ = [_answer(checkpoint, task, path, batch_size, ranks) for path in paths]
        ranks.sum()  # the other ranks have written all that they answered
        results: dict[str, Any] = {}
        if ranks.is_first:
            for path in paths:
                samples_file(path).compact(errors=True)
            seen, *blind = map(read_samples, paths)
            results = described | summarise(task, seen, *blind) | _speed(output, *speed)
            results |= {"batch_size": batch_size, "ranks": ranks.world_size} | environment(checkpoint)
            write_json(output / RESULTS, results)
            write_report(output / REPORT, task, results, seen, *blind)
        return ranks.gather(results)[0]


def _begin(
    task: EvalTask, output: Path, described: Mapping[str, Any], paths: Sequence[Path], stack: ExitStack
) -> str:
    """Lock the folder, see that it is new or this run's, and mend its files; what is wrong, or ""."""
    try:
        task.check()
        stack.enter_context(only_writer(output, parents=True))
        output.mkdir(parents=True, exist_ok=True)
        if (output / RUN).exists():
            _check_same(output, described)
        elif any((output / name).exists() for name in (SAMPLES, BLIND)):
            raise TaskError(f"{output}: expected a new folder or an earlier run's, got samples without {RUN}")
        write_json(output / RUN, described)
        known = {sample.id for sample in task.samples}
        for path in paths:
            samples_file(path).compact(errors=False)
            if foreign := sorted(read_samples(path).keys() - known):
                raise TaskError(f"{path}: has answers to questions of another task: {foreign[0]}")
            with samples_file(path).appending():  # shows now whether it can be written
                pass
    except (TaskError, RequestError) as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or output}: {error.strerror or error}"
    return ""


def _check_same(output: Path, described: Mapping[str, Any]) -> None:
    """Raises TaskError where a folder holds answers of another model or to another task."""
    compared = [("task", key) for key in described["task"]]
    compared += [("model", key) for key in ("revision", "dtype", "max_pixels", "frames")]
    try:
        earlier = json.loads((output / RUN).read_text(encoding="utf-8"))
        earlier["model"].setdefault("frames", described["model"]["frames"])  # runs before videos have none
        pairs = {key: (earlier[part].get(key), described[part][key]) for part, key in compared}
    except (ValueError, KeyError, AttributeError, TypeError):
        raise TaskError(f"{output / RUN} is not what an earlier run wrote: choose another --output") from None
    differ = [f"{key} {a!r:.60} there, {b!r:.60} now" for key, (a, b) in pairs.items() if a != b]
    if differ:
        raise TaskError(
            f"{output}: expected an earlier run of the same task and model, but they differ "
            f"({'; '.join(differ[:2])}): choose another --output"
        )


def _answer(
    checkpoint: Checkpoint, task: EvalTask, path: Path, batch_size: int, ranks: Ranks
) -> tuple[float, int]:
    """Answer this rank's share of what is missing; seconds of the slowest rank, and answers of all."""
    done, blank = read_samples(path), path.name == BLIND
    left = [sample for sample in task.samples if sample.id not in done]
    ranks.gather(len(left))  # every rank has read before any of them writes
    groups = share(by_image(left), ranks.rank, ranks.world_size)
    count = sum(map(len, groups))
    label = f"{task.name}, images blanked" if blank else task.name
    began = time.perf_counter()
    bar = tqdm(total=count, desc=label, unit="sample", disable=not (ranks.is_first and count))
    with bar, samples_file(path).appending(ranks.rank) as write:
        for record in records_of(checkpoint, task, left, batch_size, groups, blank):
            write(record)
            bar.update()
    both = ranks.gather((time.perf_counter() - began, count))
    return max(seconds for seconds, _ in both), sum(answered for _, answered in both)


def _speed(output: Path, seconds: float, answered: int) -> dict[str, float | None]:
    """Seconds and samples/s of this run, or of the earlier one where that left nothing to answer."""
    if not answered and (output / RESULTS).exists():
        with suppress(ValueError, KeyError, TypeError):  # a broken file is written anew
            earlier = json.loads((output / RESULTS).read_text(encoding="utf-8"))
            return {key: earlier[key] for key in ("seconds", "answered", "samples_per_second")}
    per_second = answered / seconds if answered else None
    return {"seconds": seconds, "answered": answered, "samples_per_second": per_second}


# ----------------------------------------------------------------------------------------- in a training run
class HeldOutQuestions:
    """Held-out questions that a training run asks its model now and then: those whose answers are scored,
    shared among all ranks, and a few whose answers are kept, on the first rank. Rows without a metric are
    scored by exact match, and the kept answers are the first of them. Answers are greedy and nothing is kept
    of the model, so a run learns the same with and without."""

    def __init__(self, config: TrainConfig, task: TrainingTask, ranks: Ranks):
        self.ranks, self.processor, self.kept = ranks, task.processor, config.eval_samples
        self.tasks = ranks.first_then_others(lambda: scored_tasks(config, task.processor))
        self.exact = not self.tasks and config.task == "answers" and config.eval_questions > 0
        # Of a model in shards, only who asks for a metric wants a whole one on each rank.
        self.shared = bool(self.tasks) or (self.exact and config.parallel != "fsdp")
        count = max(config.eval_samples, config.eval_questions * self.exact)
        asks = count and (ranks.is_first or (self.exact and self.shared))
        self.questions: list[Question] = task.questions(count) if asks else []
        self.here = bool(self.tasks or self.questions)
        self.any = ranks.sum(self.here)[0] > 0

    @torch.no_grad()
    def answer(self, model: VisionLanguageModel, whole: bool) -> tuple[dict[str, Score], list[Answered]]:
        """Mean scores over all tasks and by family, on every rank that answers, and the answers that are
        kept; all ranks with questions call it. Of questions that are scored by exact match, one batch is
        asked, or the `whole`."""
        was_training = model.training
        model.eval()
        checkpoint = Checkpoint("in training", model, self.processor, 0.0)
        try:
            # Blocks compiled for training would be compiled again for each shape that generation has.
            with torch.compiler.set_stance("force_eager"):
                found = [one for task in self.tasks for one in self._records(checkpoint, task, True)]
                scores = _scores("eval_accuracy", found)
                count = max(self.kept, 0 if not self.exact else len(self.questions) if whole else SLOTS)
                asked = self.questions[:count]
                task = EvalTask("held out", _samples(asked), find_metric("exact_match"), "{question}", {})
                found = self._records(checkpoint, task, self.exact and self.shared)
                if self.exact:
                    scores = _scores("eval_exact_match", found)
        finally:
            model.train(was_training)
        answered = [
            Answered(asked[int(one["id"])], one["answer"].strip(), stop_reason=one["stop_reason"])
            for one in sorted(found, key=lambda one: int(one["id"]))
            if "error" not in one  # as of those that do not fit into the model's context
        ]
        return scores, answered[: self.kept] if self.ranks.is_first else []

    def _records(self, checkpoint: Checkpoint, task: EvalTask, together: bool) -> list[dict[str, Any]]:
        """As `records_of`; of what ranks answer `together`, on each of them."""
        rank, size = (self.ranks.rank, self.ranks.world_size) if together else (0, 1)
        groups = share(by_image(task.samples), rank, size)
        found = list(records_of(checkpoint, task, task.samples, SLOTS, groups))
        return [one for of_rank in self.ranks.gather(found) for one in of_rank] if together else found


def _samples(questions: Sequence[Question]) -> list[EvalSample]:
    return [
        EvalSample(
            id=str(number),
            question=one.text,
            prompt=one.text,
            targets=(one.target, *one.accept),
            images=partial(getattr, one, "images"),
            group=str(number),
            max_new_tokens=SAMPLE_TOKENS,
            system=one.system,
        )
        for number, one in enumerate(questions)
    ]


def _scores(name: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Score]:
    """The mean score of all records, under its name, and by family, and the share that was cut off."""
    if not records:
        return {}
    scores = {name: Score.of([one["score"] for one in records])}
    for family in sorted({one["family"] for one in records if one.get("family")}):
        scores[f"eval_{family}"] = Score.of([one["score"] for one in records if one.get("family") == family])
    return scores | {"eval_cut_off": Score.of([one["stop_reason"] == "length" for one in records])}


OF_ENTRY = (
    *("subset", "split", "revision", "columns", "constants", "names", "image_folder", "min_ratings"),
    *("allow_urls", "allow_outside", "allow_text_only"),
)


def _boxes_of(
    entry: DatasetConfig, form_for: FormFor, options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[BoxRows, dict[str, Any]]:
    """How a dataset's boxes are asked for, and the options of the metric that say so;
    `options` of the metric go before the dataset's own."""
    given = {key: options[key] for key in ("form", "corners", "points") if key in options}
    boxes = BoxRows(**{**entry.boxes, **given})
    form = boxes.coordinates(ANY_SIZE, form_for)
    return boxes, {"form": form.name, "corners": boxes.corners, "points": boxes.points}


def scored_tasks(config: TrainConfig, processor: Processor) -> list[EvalTask]:
    """Held-out questions about shapes, or held-out rows if there is a metric."""
    if config.eval_questions and config.is_drawn:
        return [shapes_task(config.eval_questions, HELD_OUT_SEED)]
    if not config.eval_questions or not config.eval_metric:
        return []
    entries = [DatasetConfig.from_dict(entry) for entry in dataset_entries(config.held_out_data)]
    tasks = []
    for entry in entries:
        if entry.streaming:
            raise DatasetError(f"{entry.name}: --eval-metric: expected rows on this machine, got a stream")
        options: dict[str, Any] = {name: getattr(entry, name) for name in OF_ENTRY}
        options["holdout"] = config.holdout
        of_metric: dict[str, Any] = {}
        if config.eval_metric == "boxes":  # asked for as in training
            boxes, of_metric = _boxes_of(entry, processor.form)
            options |= {"boxes": boxes, "form_for": processor.form}
        limit = max(1, config.eval_questions // len(entries))
        rows = DataConfig(entry.path, limit=limit, download=True, **options)
        tasks.append(data_task(rows, find_metric(config.eval_metric, **of_metric)))
        tasks[-1].check()
    return tasks


# -------------------------------------------------------------------------------------- the command line
def run_command(settings: argparse.Namespace, check_names: Callable[[], None] | None) -> None:
    """Answer and score everything that the command line asks for; prints each task, then its figures. What
    one rank of several finds wrong all of them must hear, so `check_names` is called in here."""
    ranks = Ranks(pick_device(settings.device))
    try:
        with ranks.watching():
            if check_names is not None:
                check_names()
            _run_tasks(settings, ranks)
    except (ValueError, OSError, RuntimeError) as error:
        if not (ranks.together and is_user_error(error)):
            raise
        raise TaskError(ranks.reason(error)) from error
    finally:
        ranks.close()


def _run_tasks(settings: argparse.Namespace, ranks: Ranks) -> None:
    official = [name for name in settings.tasks if name not in OWN]
    tasks = []
    if settings.data:
        tasks.append(_data_task(settings, ranks.device))
    tasks += [own_task(name, settings.limit, settings.seed or 0) for name in OWN if name in settings.tasks]
    think = settings.think_tokens or THINK_TOKENS if settings.think else None
    draws = None
    if settings.samples:
        draws = Draws(settings.samples, settings.temperature, settings.sample_seed or 0)
    tasks = [replace(task, think=think, draws=draws) for task in tasks]
    for task in tasks:
        task.check()
    if official:
        from eval.lmms import check_tasks, run_lmms  # optional, and some seconds to import

        check_tasks(official)  # before our own tasks are answered
    with log_if_slow("python -m eval", settings.model) if ranks.is_first else nullcontext():
        own = machine(settings) | {"device": str(ranks.device)}
        checkpoint = open_checkpoint(settings.model, settings.revision, **own)
    if settings.think:
        checkpoint.processor.chat.check_thinking("--think")
    if settings.compile != "off":
        checkpoint = checkpoint.compiled()
    model = _as_folder(settings.model)
    for task in tasks:
        output = settings.output or Path("runs/eval") / f"{_as_folder(task.name)}-{model}"
        if settings.output and len(settings.tasks) > 1:
            output = settings.output / _as_folder(task.name)
        _run_own(task, checkpoint, settings, ranks, output)
    output = settings.output or Path("runs/eval") / model
    size = settings.batch_size
    for result in (
        run_lmms(official, checkpoint, settings.limit, size, output, think=think) if official else ()
    ):
        print(for_terminal(official_table(result)))
        asked = counted(result["n"], "question")
        print(f"{asked}, {result['seconds']:.1f} s in all; {output / result['task']['name']}")


def _data_task(settings: argparse.Namespace, on: torch.device) -> EvalTask:
    flags = {name: "data_revision" if name == "revision" else name for name in OF_ENTRY}
    given = {name: getattr(settings, flag, None) for name, flag in flags.items()}
    said = {"split": ""} | settings.data | {name: one for name, one in given.items() if one}
    entry = DatasetConfig.from_dict(said)
    idle = ["streaming", "weight", "language"] + ["boxes"] * (settings.metric != "boxes")
    if idle := [key for key in idle if said.get(key)]:
        needed = ", boxes without --metric boxes" if "boxes" in idle else ""
        raise DatasetError(f"--data: {', '.join(idle)}: without effect here{needed}; leave them out")
    options, boxes, form_for = dict(settings.metric_option), None, by_name
    if settings.metric == "boxes":
        seen = {"revision": settings.revision, "max_pixels": pixel_budget(on, settings.max_pixels)}
        form_for = Processor.from_pretrained(settings.model, **seen).form
        boxes, of_boxes = _boxes_of(entry, form_for, options)
        options |= of_boxes
    own = {name: getattr(entry, name) for name in OF_ENTRY}
    own |= {name: getattr(settings, name) for name in ("system", "max_new_tokens", "limit", "holdout")}
    config = DataConfig(
        entry.path,
        name=said.get("name", ""),
        prompt=settings.prompt.replace("\\n", "\n"),
        boxes=boxes,
        form_for=form_for,
        **own,
    )
    return data_task(config, find_metric(settings.metric or "exact_match", **options))


def _run_own(
    task: EvalTask, checkpoint: Checkpoint, settings: argparse.Namespace, ranks: Ranks, output: Path
) -> None:
    if ranks.is_first:
        step = f"{checkpoint.dtype} on {ranks.device}, {checkpoint.fast.name}"
        print(for_terminal(f"{task}\n   model  {settings.model}, {step}"))
    results = evaluate(checkpoint, task, output, settings.batch_size, settings.controls, ranks)
    if not ranks.is_first:
        return
    print(for_terminal(table_text(results["families"])))
    if results["at_k"]:
        print(f"\n{at_k_text(results)}\n")
    if calibrated := calibration_text(results):
        print(calibrated)
    if cut := cut_off_text(results):
        print("; ".join(filter(None, (cut, higher_limits(results)))))
    speed, errors = results["samples_per_second"], results["errors"]
    per_second = f", {speed:.1f} samples/s" if speed else ""
    asked = counted(results["n"], "question")
    print(f"{asked}; {results['answered']} answered in {results['seconds']:.1f} s{per_second}")
    if errors["count"]:
        listed = "; ".join(f"{one['id']}: {one['error']}" for one in errors["samples"][:3])
        said = f"{errors['count']} could not be answered and score 0 ({listed}; all of them in {RESULTS})"
        print(for_terminal(said))
    print(output / REPORT)


def _as_folder(name: str) -> str:
    """A name as part of a folder's."""
    return "".join(x if x.isalnum() or x in "-._" else "-" for x in last_name(name)).strip("-.") or "task"
