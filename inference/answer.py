"""Questions to an opened checkpoint, and their answers as text while they are made.

reply = ask(checkpoint, ["photo.jpg"], "How many boats are there?", GenerationOptions(max_new_tokens=32))
for number, piece in reply:
    print(piece, end="", flush=True)
print(reply.finish()["decode_tokens_per_second"])

`ask_each` asks several questions about the same images, which are encoded and prefilled once.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from data.processor import EncodedConversation
from generation.decoding import GenerationOutput, TokenStream
from generation.options import CacheMemoryError, GenerationOptions
from generation.requests import Request, each_answer
from generation.session import Session
from inference.checkpoint import Checkpoint, RequestError
from inference.grammar import Form
from inference.results import logprobs_of

DEFAULTS = GenerationOptions()
_COUNTS = ("proposed_tokens", "accepted_tokens", "kv_cache_bytes")
_INCOMPLETE = "\ufffd"  # what tokenizers decode half a UTF-8 sequence to


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
    row = encode(checkpoint, images, question, system)
    stream = start(checkpoint, row, options, session)
    row = replace(row, parts=None)  # the stream has them, and lets go of them with the prefill
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
    images = [checkpoint.processor.cut(image) for image in images]
    keep = keep or len(questions) > 1 or checkpoint.prefixes is not None
    keep = options.use_cache and (keep or options.lookup == "on")  # of several answers too
    session = Session(checkpoint.model, checkpoint.features, checkpoint.prefixes) if keep else None
    for question in questions:
        yield ask(checkpoint, images, question, options, system, session)


def encode(
    checkpoint: Checkpoint, images: Sequence[Any], question: str, system: str | None = None
) -> EncodedConversation:
    """A question as token ids and tiles."""
    messages = checkpoint.processor.conversation(list(images), question, system)
    return checkpoint.processor.encode_conversation(messages, True, label="question")


def start(
    checkpoint: Checkpoint,
    row: EncodedConversation,
    options: GenerationOptions,
    session: Session | None = None,
) -> TokenStream:
    """The token stream of a prompt's answers; a RequestError if they do not fit the context."""
    step = checkpoint.decode_step if options.use_cache else None
    options = replace(options, stop_token_ids=checkpoint.stop_token_ids, decode_step=step)
    generate_stream = (checkpoint.model if session is None else session).generate_stream
    try:
        inputs = checkpoint.processor.collate([replace(row, parts=None)])
        return generate_stream(**inputs, pixel_values=row.parts, options=options)
    except CacheMemoryError:
        raise
    except ValueError as error:
        raise RequestError(error) from error


@dataclass
class Reply:
    """The answers to one question: iterate for (number of the answer, next piece of its text).

    Iterating may be interrupted and continued; `finish` makes what is left. `prepare` is the time that the
    prompt took, `ids` are the answers' tokens so far.
    """

    checkpoint: Checkpoint
    row: EncodedConversation
    stream: TokenStream
    options: GenerationOptions
    prepare: float

    def __post_init__(self) -> None:
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
                yield number, texts[number].put(token_id)
        for number, text in enumerate(texts):
            yield number, text.finish()

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
        logprobs = output.logprobs if output else []
        return {
            **answers_of(checkpoint, self.row, ids, self.options),
            "confidences": output.confidences if output else [],
            **(logprobs_of(checkpoint.processor.tokenizer, ids, logprobs) if logprobs else {}),
            "reused_tokens": getattr(output, "reused", 0),  # of a session
            "seconds": seconds,
            "decode_tokens_per_second": after_first / seconds["decode"] if after_first else None,
            **{name: getattr(output, name, 0) for name in _COUNTS},
            **checkpoint.settings,
        }


class TextStream:
    """The text of token ids as they arrive, cut only where a character is complete.

    A token may hold part of a character, and its text may depend on the token before. So text is decoded from
    the first token of the last piece on, and the part that was returned already is cut off. (The library's
    `DecodeStream` raises where bytes that are no text come before, as a sampler may have it.)
    """

    def __init__(self, tokenizer, skip_special_tokens: bool = True):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self._ids: list[int] = []  # tokens of the last piece returned, then those not yet returned
        self._returned = 0  # how many of them are in the text already

    def put(self, token_id: int) -> str:
        """The text that this token completes, "" while a character is incomplete."""
        self._ids.append(int(token_id))
        text = self._new_text()
        if text and not text.endswith(_INCOMPLETE):
            self._ids, self._returned = self._ids[self._returned :], len(self._ids) - self._returned
            return text
        return ""

    def finish(self) -> str:
        """What is left at the end, without a character that never became complete."""
        text = self._new_text()
        self._ids, self._returned = [], 0
        return text.rstrip(_INCOMPLETE)

    def _new_text(self) -> str:
        before, text = (
            self.tokenizer.decode(
                ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
            )
            for ids in (self._ids[: self._returned], self._ids)
        )
        return text[len(before) :]


class AnswerText:
    """The text of one answer, token by token, without its stop token and the space before its first word.

    options: which it was made with. Where their form is written around what the model says, all of the text
    comes at its end.
    """

    def __init__(self, checkpoint: Checkpoint, options: GenerationOptions = DEFAULTS):
        self._stream = TextStream(checkpoint.processor.tokenizer)
        self._stops = frozenset(checkpoint.stop_token_ids)
        self._begun = self._ended = False
        form = options.constraint
        self._write = form.write if isinstance(form, Form) else None
        self._text = ""  # what is to be written at the end

    def put(self, token_id: int) -> str:
        """The text that this token completes; "" from the stop token on."""
        if token_id in self._stops:
            return self._finish(whole=True)
        return "" if self._ended else self._show(self._stream.put(token_id))

    def finish(self) -> str:
        """The text of what is left. Around an answer that was cut nothing is written."""
        return self._finish(whole=False)

    def _finish(self, whole: bool) -> str:
        if self._ended:
            return ""
        self._ended = True
        shown = self._show(self._stream.finish())
        if self._write is None:
            return shown
        return self._write(self._text) if whole else self._text

    def _show(self, piece: str) -> str:
        piece = piece if self._begun else piece.lstrip()
        self._begun = self._begun or bool(piece)
        if self._write is not None:
            self._text += piece
            return ""
        return piece


def answer_text(checkpoint: Checkpoint, ids: Sequence[int], options: GenerationOptions = DEFAULTS) -> str:
    """The whole text of one answer, as streaming gives it, without space at its end."""
    text = AnswerText(checkpoint, options)
    return ("".join(map(text.put, ids)) + text.finish()).rstrip()


def answers_of(
    checkpoint: Checkpoint, row: EncodedConversation, ids: list[list[int]], options: GenerationOptions
) -> dict[str, Any]:
    """The fields of a result that describe answers with these token ids, and their prompt."""
    stops = set(checkpoint.stop_token_ids)
    return {
        "answers": [answer_text(checkpoint, answer, options) for answer in ids],
        "token_ids": ids,
        "stop_reasons": ["stop" if stops & set(answer[-1:]) else "length" for answer in ids],
        "prompt_tokens": len(row.input_ids),
        "image_tokens": row.image_tokens,
    }


def requests_for(
    checkpoint: Checkpoint, row: EncodedConversation, limit: int, options: GenerationOptions
) -> list[Request]:
    """A request to a `Scheduler` for each answer to one question, of at most `limit` new tokens."""
    options = replace(options, max_new_tokens=limit, stop_token_ids=checkpoint.stop_token_ids)
    return [Request(torch.tensor(row.input_ids), row.parts, options=one) for one in each_answer(options)]
