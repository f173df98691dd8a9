"""Answers to samples, scored: the lines of a run's samples.jsonl.

    for number, answer in answers(checkpoint, task.samples, slots=32):
        print(task.samples[number].question, answer.text)

Samples are grouped by image, the longest prompt first, and answered many at a time in the scheduler. All
questions about an image stand one after another: it is opened, cut into tiles, encoded and prefilled once,
however many there are. In float32 each answer is the one that the model gives alone, whatever the number of
slots, the order and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from PIL import Image

from data.image_sizes import image_size
from data.processor import EncodedConversation, Processor
from data.tiles import Visual
from data.video import Clip
from eval.tasks import Draws, EvalSample, EvalTask
from generation.options import GenerationOptions
from generation.requests import LazyRequest, Request, Stats
from inference.answer import read_answer
from inference.answer_text import TextStream
from inference.batch import open_scheduler
from inference.checkpoint import Checkpoint
from inference.conversation import Turn, messages_of
from inference.forms import requests_for
from inference.grammar import choice_grammar
from inference.thinking import budget_of, held_to, think_first, thinking_end
from inference.votes import winner
from messages import one_line

_THINKING = ("thinking", "thinking_tokens", "thinking_stop_reason")
BLANK = (200, 200, 200)  # the colour that a blanked image shows everywhere


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
    won = winner([one.text for one in several], sure, task.same(sample))
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
    pages: dict[int, Any] = {}  # the `PageForm` of questions that are pages

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
        own, form, limit = options, None, sample.max_new_tokens
        if sample.page is not None:
            page = pages[number] = sample.page(checkpoint)
            form, limit = page.constraint(), page.limit
        elif sample.choices and draws is None:  # several answers are what a model says by itself
            form = checkpoint.forms.constraint(choice_grammar(sample.choices))
        if draws is not None:
            own = replace(options, seed=draws.seed_of(sample))
        first, *left[:] = requests_for(checkpoint, row, limit, held_to(own, form))
        budgets[number] = budget_of(first.options)
        return first

    keys = ((number, draw) for group in groups for number in group for draw in range(count))
    for done in scheduler.run(LazyRequest(key, partial(request, *key)) for key in keys):
        number, draw = done.key
        if done.error is not None:
            yield number, EvalAnswer("", error=one_line(done.error), draw=draw)
        else:
            said, text = read_answer(checkpoint, done.token_ids, options)
            thought, thinking = 0, None
            if checkpoint.thinking is not None:
                thought = checkpoint.thinking.span(done.token_ids, think is not None).thought
            if thought or think is not None:
                thinking = said, thought, thinking_end(checkpoint, done.token_ids, budgets[number])
            choices, decision, ended = samples[number].choices, done.decision, done.stop_reason
            shares = None if decision is None else dict(zip(choices, decision.probabilities))
            if page := pages.get(number):
                stream = TextStream(checkpoint.processor.tokenizer, skip_special_tokens=False)
                own_ids = (one for one in done.token_ids[thought:] if one not in checkpoint.stop_token_ids)
                text = "".join(map(stream.put, own_ids)) + stream.finish()
                ended = {"whole": "stop", "cut": "length"}.get(how := page.ended(done), how)
            about = ended, thinking, done.confidence, shares
            yield number, EvalAnswer(text, len(done.token_ids) - thought, *about, draw=draw)


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
