"""Ocelli as a chat model of lmms-eval: its requests answered by our scheduler, many at a time.

Importing this module imports lmms-eval; `eval.lmms` does so when it is needed, and says what is missing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.protocol import ChatMessages
from tqdm import tqdm

from data.errors import one_line
from eval.lmms_settings import cut, read_settings
from generation.decoding import GenerationOptions
from generation.scheduler import LazyRequest, Request, Scheduler
from inference.answer import answer_text, prompt_tokens, requests_for
from inference.checkpoint import Checkpoint, RequestError, open_checkpoint

SEED_STEP = 1_000_003  # between the documents of a task: each of its answers draws with a seed of its own


class Ocelli(lmms):
    """A checkpoint behind lmms-eval's chat interface, which asks in `ChatMessages`.

    Args:
        pretrained: an opened checkpoint, or what `open_checkpoint` takes, with revision, device and dtype.
        batch_size: answers in work at the same time; no answer depends on it (in float32).

    seconds: what generating took so far. errors: (task, document, what was wrong) of each question that could
    not be answered; its answer is "".

    Raises:
        CheckpointError, ProcessorError, RequestError: see `open_checkpoint`.
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str | Checkpoint,
        revision: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | str | None = None,
        progress: bool = True,
    ):
        super().__init__()
        if not isinstance(pretrained, Checkpoint):
            pretrained = open_checkpoint(pretrained, revision, device or "auto", dtype).compiled()
        self.checkpoint, self.batch_size = pretrained, int(batch_size or 32)
        self.progress, self.seconds = progress, 0.0
        self.errors: list[tuple[str, int, str]] = []

    @property
    def device(self) -> torch.device:
        """Where lmms-eval puts the few numbers that ranks exchange."""
        return torch.device("cpu")

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """An answer to each request, in their order.

        Raises:
            RequestError: a setting that is not here, or not enough memory for so many answers at a time.
        """
        began, read = time.perf_counter(), [read_settings(one.args[4], one.args[2]) for one in requests]
        results = [GenerationResult("", TokenCounts(output_tokens=0)) for _ in requests]
        bar = tqdm(total=len(requests), desc="answers", disable=not self.progress or self.rank != 0)
        with bar:
            for done in self._scheduler(len(requests)).run(self._deferred(requests, read)):
                if done.error is None:
                    text = cut(answer_text(self.checkpoint, done.token_ids), read[done.key][1])
                    results[done.key] = GenerationResult(text, TokenCounts(output_tokens=len(done.token_ids)))
                else:
                    _, _, _, document, task, _ = requests[done.key].args
                    self.errors.append((task, document, one_line(done.error)))
                bar.update()
        self.seconds += time.perf_counter() - began
        return results

    def _scheduler(self, requests: int) -> Scheduler:
        slots = max(1, min(self.batch_size, requests))
        try:
            return Scheduler(self.checkpoint.model, slots, decode_step=self.checkpoint.decode_step)
        except ValueError as error:
            raise RequestError(f"{error} (--batch-size)") from None

    def _deferred(
        self, requests: list[Instance], read: Sequence[tuple[GenerationOptions, tuple[str, ...]]]
    ) -> Iterator[LazyRequest]:
        repeats: Counter[tuple] = Counter()
        for number, (request, (options, _)) in enumerate(zip(requests, read, strict=True)):
            _, _, _, document, task, split = request.args
            seed = document * SEED_STEP + repeats[task, split, document]
            repeats[task, split, document] += 1
            yield LazyRequest(number, partial(self._request, request, replace(options, seed=seed)))

    def _request(self, request: Instance, options: GenerationOptions) -> Request:
        """Raises PromptError, ImageError, RequestError, and what reading the document's images raises."""
        _, doc_to_messages, settings, document, task, split = request.args
        messages = ChatMessages(messages=doc_to_messages(self.task_dict[task][split][document]))
        row = self.checkpoint.processor.encode_conversation(
            messages.to_hf_messages(), True, where=f"{task}, document {document}"
        )
        limit = options.max_new_tokens
        if settings.get("max_new_tokens") is None:  # the limit is ours: what there is room for will do
            limit = max(1, min(limit, self.checkpoint.context - prompt_tokens(self.checkpoint, row)))
        return requests_for(self.checkpoint, row, limit, options)[0]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise RequestError(f"{_tasks(requests)}: asks for likelihoods, and a chat model only generates")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise RequestError(f"{_tasks(requests)}: asks in several rounds, which is not here")


def _tasks(requests: list[Instance]) -> str:
    names = sorted({request.task_name for request in requests})
    return f"task {', '.join(names)}"
