"""Questions to an opened checkpoint, and their answers as text while they are made.

reply = ask(checkpoint, ["photo.jpg"], "How many boats are there?", GenerationOptions(max_new_tokens=32))
for number, piece in reply:
    print(piece, end="", flush=True)
print(reply.finish()["decode_tokens_per_second"])

`ask_each` asks several questions about the same images, which are encoded and prefilled once. What a model
thinks before its answer (`inference.thinking`) is no part of it: see `Reply.hear`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from data.processor import EncodedConversation
from generation.options import CacheMemoryError, GenerationOptions
from generation.output import GenerationOutput, TokenStream
from generation.score import Decision
from generation.session import Session
from generation.speculation import looks_up
from generation.steps import Step
from inference.answer_text import AnswerText
from inference.checkpoint import Checkpoint, RequestError
from inference.forms import decided, limited
from inference.results import logprobs_of
from inference.thinking import Think, form_of

_COUNTS = ("proposed_tokens", "accepted_tokens", "kv_cache_bytes")


def ask(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    question: str,
    options: GenerationOptions,
    system: str | None = None,
    session: Session | None = None,
) -> Reply:
    """Ask a question about images (any number, anything that `load_image` takes); what cannot be answered is
    refused before anything is computed. What the session holds of a prompt is not computed again."""
    began = time.perf_counter()
    checkpoint.check_images(len(images))
    row = encode(checkpoint, images, question, system, isinstance(options.constraint, Think))
    stream = start(checkpoint, row, options, session)
    return Reply(checkpoint, row, stream, options, time.perf_counter() - began)


def ask_each(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    questions: Sequence[str],
    options: GenerationOptions,
    system: str | None = None,
    keep: bool = False,
) -> Iterator[Reply]:
    """`ask` several questions about the same images, each after the reply before it has ended. `keep`: the
    images' features will be needed again, as by `inference.attribution`."""
    images = [visual for image in images for visual in checkpoint.processor.visuals(image)]
    # Frames of a video are often equal; a single image is not looked at.
    parts = [visual.parts for visual in images if len(visual.parts) > 1]
    repeat = any(len({*one.digests}) < len(one) for one in parts)
    keep = keep or repeat or len(questions) > 1 or checkpoint.prefixes is not None
    session = None
    if options.use_cache and (keep or options.lookup == "on"):  # of several answers too
        session = Session(checkpoint.model, checkpoint.features, checkpoint.prefixes)
    for question in questions:
        yield ask(checkpoint, images, question, options, system, session)


def encode(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    question: str,
    system: str | None = None,
    think: bool = False,
) -> EncodedConversation:
    """A question as token ids and tiles; `think` as of `Processor.encode_conversation`."""
    messages = checkpoint.processor.conversation(list(images), question, system)
    return checkpoint.processor.encode_conversation(messages, True, "question", think)


def start(
    checkpoint: Checkpoint,
    row: EncodedConversation,
    options: GenerationOptions,
    session: Session | None = None,
) -> TokenStream:
    """The token stream of a prompt's answers; a RequestError if they do not fit the context."""
    step = checkpoint.decode_step if options.use_cache else None
    if options.constraint is not None:
        options = limited(checkpoint, row, options)
    options = replace(options, stop_token_ids=checkpoint.stop_token_ids, decode_step=step)
    single = options.use_cache and options.num_return_sequences == 1
    if session is None and single and _in_session(options, step):
        session = Session(checkpoint.model)
    try:
        generate_stream = (checkpoint.model if session is None else session).generate_stream
        return generate_stream(**inputs_of(checkpoint, row), options=options)
    except CacheMemoryError:
        raise
    except ValueError as error:
        raise RequestError(error) from error


def _in_session(options: GenerationOptions, step: Step | None) -> bool:
    """True if a session answers faster: it verifies tokens together, and waits for no recorded step."""
    ahead = step is not None and (step.records or looks_up(options, step))
    return ahead or options.constraint is not None or options.lookup == "on"


def inputs_of(checkpoint: Checkpoint, row: EncodedConversation) -> dict[str, Any]:
    """The arguments of `generate` for one prompt."""
    ids = torch.tensor([row.input_ids])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": row.parts}


@dataclass
class Reply:
    """The answers to one question: iterate for (number of the answer, next piece of its text).

    Iterating may be interrupted and continued; `finish` makes what is left. `prepare` is the time that the
    prompt took, `ids` are the answers' tokens so far, with those of their thinking. `hear` is called with
    (number of the answer, next piece of what is thought before it).
    """

    checkpoint: Checkpoint
    row: EncodedConversation
    stream: TokenStream
    options: GenerationOptions
    prepare: float
    hear: Callable[[int, str], None] = lambda number, piece: None

    def __post_init__(self) -> None:
        self.row = replace(self.row, parts=None)  # the stream has the tiles, and lets go of them
        self.ids: list[list[int]] = [[] for _ in range(self.options.num_return_sequences)]
        self._times: list[float] = []  # of the start, then of each token
        self._pieces = self._run()

    def __iter__(self) -> Iterator[tuple[int, str]]:
        # Not the generator itself: a loop over it that is interrupted could close it.
        steps = iter(lambda: next(self._pieces, None), None)
        return ((number, piece) for number, piece in steps if piece)

    def _run(self) -> Generator[tuple[int, str], None, None]:
        texts = [AnswerText(self.checkpoint, self.options) for _ in self.ids]
        stops = self.checkpoint.stop_token_ids
        self._times = self._times or [time.perf_counter()]
        for column in self.stream:
            self._times.append(time.perf_counter())
            for ids, token_id in zip(self.ids, column.tolist()):
                if not ids or ids[-1] not in stops:
                    ids.append(token_id)
            for number, token_id in enumerate(column.tolist()):
                yield self._said(number, texts[number], texts[number].put(token_id))
        for number, text in enumerate(texts):
            yield self._said(number, text, text.finish())

    def _said(self, number: int, text: AnswerText, piece: str) -> tuple[int, str]:
        if thought := text.thought():
            self.hear(number, thought)
        return number, piece

    def finish(self) -> dict[str, Any]:
        """Make what is left. Returns answers, token ids, stop reasons, sizes and timings. Of the "seconds",
        "first_token" is the time from the question, with "prepare", to the first token."""
        for _ in self:
            pass
        return self.describe(self.stream.result)

    def describe(self, output: GenerationOutput | None) -> dict[str, Any]:
        """The fields of `finish`; without an output, of answers that were stopped."""
        checkpoint, ids = self.checkpoint, self.ids
        begun, first, last = (*self._times[:2], self._times[-1]) if len(self._times) > 1 else (0.0, 0.0, 0.0)
        seconds = {"load": checkpoint.load_seconds, "prepare": self.prepare}
        seconds |= output.seconds if output else {"decode": last - first}
        seconds["first_token"] = self.prepare + first - begun
        after_first = sum(len(answer) - 1 for answer in ids if answer)
        answers = answers_of(checkpoint, self.row, ids, self.options, output.decisions if output else ())
        own_ids, logprobs = answers["token_ids"], output.logprobs if output else []
        logprobs = [one[len(one) - len(own) :] for one, own in zip(logprobs, own_ids)]
        return {
            **answers,
            "confidences": output.confidences if output else [],
            **(logprobs_of(checkpoint.processor.tokenizer, own_ids, logprobs) if logprobs else {}),
            "reused_tokens": output.reused if output else 0,  # of a session
            "seconds": seconds,
            "decode_tokens_per_second": after_first / seconds["decode"] if after_first else None,
            **{name: getattr(output, name, 0) for name in _COUNTS},
            **checkpoint.settings,
        }


def read_answer(checkpoint: Checkpoint, ids: Sequence[int], options: GenerationOptions) -> tuple[str, str]:
    """The thoughts before one answer, and its whole text as streaming gives it, without space at its end."""
    text = AnswerText(checkpoint, options)
    answer = "".join(map(text.put, ids)) + text.finish()
    return text.thought(), answer.strip()


def answers_of(
    checkpoint: Checkpoint,
    row: EncodedConversation,
    ids: list[list[int]],
    options: GenerationOptions,
    decisions: Sequence[Decision | None] = (),
) -> dict[str, Any]:
    """The fields of a result that describe answers with these token ids, and their prompt. Where something
    was thought, or was to be, "thinking" and "thinking_tokens" say what and how much; "token_ids" are of the
    answers alone. Of choices there is what `decided` says of each answer."""
    stops = set(checkpoint.stop_token_ids)
    thinking, asked = checkpoint.thinking, isinstance(options.constraint, Think)
    parts = [thinking.split(answer, asked) if thinking else ([], answer) for answer in ids]
    said = [read_answer(checkpoint, answer, options) for answer in ids]
    choices = [decided(form_of(options), one) for one in decisions] or [{}]
    thoughts = dict[str, Any]()
    if asked or any(thought for thought, _ in parts):
        thoughts = {"thinking": [one for one, _ in said], "thinking_tokens": [len(one) for one, _ in parts]}
    return {
        "answers": [answer for _, answer in said],
        **{name: [one[name] for one in choices] for name in choices[0]},
        **thoughts,
        "token_ids": [answer for _, answer in parts],
        "stop_reasons": ["stop" if stops & set(answer[-1:]) else "length" for answer in ids],
        "prompt_tokens": len(row.input_ids),
        "image_tokens": row.image_tokens,
    }
