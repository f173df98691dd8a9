"""Official benchmarks through lmms-eval: its tasks, prompts and scorers, our batched answers.

    python -m eval --tasks mmstar,docvqa_val --model HuggingFaceTB/SmolVLM-256M-Instruct
    torchrun --nproc-per-node 8 -m eval --tasks chartqa --model runs/mine

This module imports lmms-eval, which is optional: pip install -r requirements-eval.txt. Nothing in lmms-eval
is changed: it is handed our model.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.evaluator import simple_evaluate
from lmms_eval.protocol import ChatMessages
from lmms_eval.tasks import TaskManager
from tqdm import tqdm

from data.processor import EncodedConversation, kind_of
from data.tiles import Visual
from eval.lmms_tasks import (
    Ended,
    Error,
    LmmsError,
    Task,
    check_known,
    cut,
    read_settings,
    task_result,
    write_result,
)
from generation.options import GenerationOptions
from generation.requests import LazyRequest, Request
from inference.answer import read_answer
from inference.batch import open_scheduler
from inference.checkpoint import Checkpoint, RequestError
from inference.forms import requests_for
from inference.thinking import budget_of, think_first, thinking_end
from messages import one_line

T = TypeVar("T", bound=tuple)
NAME = "ocelli"
SEED_STEP = 1_000_003  # between documents of a task: each of its answers draws with a seed of its own


class Ocelli(lmms):
    """A checkpoint as a chat model of lmms-eval, which asks in `ChatMessages`.

    errors: (task, document, what was wrong) of each question that could not be answered; its answer is "".
    ended: why each answer ended, and its thinking.
    """

    is_simple = False

    def __init__(self, checkpoint: Checkpoint, batch_size: int, think: int | None = None):
        super().__init__()
        self.checkpoint, self.batch_size, self.think = checkpoint, batch_size, think
        self.errors: list[Error] = []
        self.ended: list[Ended] = []
        self._budgets: dict[int, int | None] = {}  # of the thinking of each request
        self._video: tuple[Any, list[Visual]] = (None, [])  # the last one

    @property
    def device(self) -> torch.device:
        """Where lmms-eval puts the few numbers that ranks exchange."""
        return torch.device("cpu")

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """An answer to each request, in their order."""
        read = [read_settings(one.args[4], one.args[2]) for one in requests]
        read = [(think_first(options, self.think), until) for options, until in read]
        results = [GenerationResult("", TokenCounts(output_tokens=0)) for _ in requests]
        scheduler = open_scheduler(self.checkpoint, max(1, min(self.batch_size, len(requests))))
        with tqdm(total=len(requests), desc="answers", disable=self.rank != 0) as bar:
            for done in scheduler.run(self._deferred(requests, [options for options, _ in read])):
                _, _, _, document, task, _ = requests[done.key].args
                if done.error is None:
                    options, until = read[done.key]
                    _, whole = read_answer(self.checkpoint, done.token_ids, options)
                    text = cut(whole, until)
                    reason, thought = done.stop_reason if text == whole else "stop", ""
                    if self.think is not None:
                        thought = thinking_end(self.checkpoint, done.token_ids, self._budgets[done.key])
                    self.ended.append((task, document, reason, thought))
                    results[done.key] = GenerationResult(text, TokenCounts(output_tokens=len(done.token_ids)))
                else:
                    self.errors.append((task, document, one_line(done.error)))
                    self.ended.append((task, document, "error", ""))
                bar.update()
        return results

    def _deferred(
        self, requests: list[Instance], options: Sequence[GenerationOptions]
    ) -> Iterator[LazyRequest]:
        repeats: Counter[tuple] = Counter()
        for number, (request, own) in enumerate(zip(requests, options, strict=True)):
            _, _, _, document, task, split = request.args
            seed = document * SEED_STEP + repeats[task, split, document]
            repeats[task, split, document] += 1
            yield LazyRequest(number, partial(self._request, number, request, replace(own, seed=seed)))

    def _request(self, number: int, request: Instance, options: GenerationOptions) -> Request:
        _, doc_to_messages, settings, document, task, split = request.args
        row = self._encoded(doc_to_messages(self.task_dict[task][split][document]), task, document)
        limit = options.max_new_tokens
        if settings.get("max_new_tokens") is None:  # the limit is ours, so whatever there is room for will do
            limit = max(1, min(limit, self.checkpoint.context - len(row.input_ids)))
        (made,) = requests_for(self.checkpoint, row, limit, options)
        self._budgets[number] = budget_of(made.options)
        return made

    def _encoded(self, messages: list[dict[str, Any]], task: str, document: int) -> EncodedConversation:
        """A prompt of lmms-eval's messages."""
        opened, label = ChatMessages(messages=messages).to_hf_messages(), f"{task}, document {document}"
        for message in opened:
            message["content"] = [one for part in message["content"] for one in self._shown(part)]
        return self.checkpoint.processor.encode_conversation(opened, True, label, self.think is not None)

    def _shown(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        """A part of a message; of a video, what the model is shown of it."""
        if part["type"] != "video":
            return [part]
        if part.keys() & {"video_start", "video_end"}:
            raise RequestError("it asks about a part of a video (video_start, video_end): not supported")
        if self._video[0] != part["video"]:  # several questions about one follow one another
            self._video = part["video"], self.checkpoint.processor.visuals(part["video"])
        return [{"type": kind_of(one), kind_of(one): one} for one in self._video[1]]

    def loglikelihood(self, requests: list[Instance]) -> list[GenerationResult]:
        raise RequestError(f"task {requests[0].task_name}: likelihoods are not supported")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise RequestError(f"task {requests[0].task_name}: several rounds are not supported")


def check_tasks(names: Sequence[str]) -> None:
    """Raises LmmsError where lmms-eval does not know a task."""
    check_known(names, TaskManager("WARNING", model_name=NAME).all_tasks)


def run_lmms(
    tasks: Sequence[Task],
    checkpoint: Checkpoint,
    limit: int | None,
    batch_size: int,
    output: Path,
    include_path: Path | None = None,
    think: int | None = None,
) -> list[dict[str, Any]]:
    """Answer and score official tasks. When all are done, results.json and samples.jsonl of each replace an
    earlier run's in a folder of its name; nothing is kept of a run that was stopped. Under torchrun every
    rank answers its share. Returns what results.json holds of each task; on the first rank only.

    Args:
        tasks: names of lmms-eval's tasks, groups or tags; {"task": name, "dataset_path": ...} replaces
            settings of a task, for instance where its data come from.
        limit: only the first so many documents of each task.
        batch_size: answers in work at the same time; no answer depends on it (in float32).
        include_path: folder with more tasks (YAML files).
        think: tokens that the model may think before each answer; None for no thinking.
    """
    manager = TaskManager("WARNING", include_path=include_path and str(include_path), model_name=NAME)
    check_known(tasks, manager.all_tasks)
    ours = Ocelli(checkpoint, batch_size, think)
    loaded = _load(tasks, manager)
    began = time.perf_counter()
    report = simple_evaluate(
        ours,
        tasks=loaded,
        limit=limit,
        batch_size=batch_size,
        task_manager=manager,
        bootstrap_iters=0,
        distributed_executor_backend="torchrun",
        # In one thread: where an answer has no letter, MMMU's scorer draws one, and draws in order.
        process_docs_parallel=1,
        cli_args=argparse.Namespace(output_path=str(output), process_with_media=False),
    )
    seconds = time.perf_counter() - began
    errors, ended = _of_all_ranks(ours.errors), _of_all_ranks(ours.ended)
    if report is None:
        return []
    results = [task_result(name, report, errors, checkpoint, ended) for name in report["samples"]]
    run = {
        "seconds": seconds,
        "samples_per_second": sum(result["n"] for result in results) / seconds,
        "batch_size": batch_size,
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    } | ({} if think is None else {"think_tokens": think})
    for result in results:
        name = result["task"]["name"]
        write_result(output / name, result | run, report["samples"][name])
    return [result | run for result in results]


def _load(tasks: Sequence[Task], manager: TaskManager) -> list:
    """Tasks as objects with their data. The first rank loads first; the others then find it in the cache."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    if not first:
        dist.barrier()

    loaded = []
    for task in tasks:
        named = task if isinstance(task, str) else [dict(task)]  # which is changed
        try:
            leaves = _leaves(manager.load_task_or_group(named, "chat"))
        except Exception as error:  # datasets and the Hub raise anything
            cause = error.__cause__ or error  # lmms-eval retries, and then reports only that it did
            reason = f"{type(cause).__name__}: {one_line(cause, 300)}"
            raise LmmsError(f"task {task}: its data cannot be loaded ({reason})") from error
        if any(leaf.OUTPUT_TYPE == "multiple_choice" for leaf in leaves):  # whose requests have no chat
            raise LmmsError(f"task {task}: likelihoods are not supported; take a task that generates answers")
        loaded += leaves
    if first and dist.is_initialized():
        dist.barrier()
    return loaded


def _leaves(tree: Mapping[Any, Any]) -> list:
    return [
        leaf
        for branch in tree.values()
        for leaf in (_leaves(branch) if isinstance(branch, Mapping) else [branch])
    ]


def _of_all_ranks(found: Sequence[T]) -> list[T]:
    """What every rank found, each once: where shares are uneven, a rank answers some question twice."""
    every: list[Any] = [list(found)]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, list(found))
    return sorted({one for of_rank in every for one in of_rank})
