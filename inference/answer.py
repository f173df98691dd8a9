"""Questions to an opened checkpoint, and their answers as text while they are made.

reply = ask(checkpoint, ["photo.jpg"], "How many boats are there?", GenerationOptions(max_new_tokens=32))
for number, piece in reply:
    print(piece, end="", flush=True)
print(reply.finish()["decode_tokens_per_second"])

`ask_each` asks several questions about the same images, which are encoded and prefilled once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from data.processor import EncodedConversation
from generation.decoding import TokenStream
from generation.options import CacheMemoryError, GenerationOptions
from generation.requests import Request, each_answer
from generation.session import Session, SessionOutput
from inference.checkpoint import Checkpoint, RequestError
from inference.grammar import Form
from inference.results import logprobs_of

DEFAULTS = GenerationOptions()
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
    row = replace(row, tiles=None)  # the stream has them, and lets go of them with the prefill
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
    images = [checkpoint.processor.tile(image) for image in images]
    keep = options.use_cache and (keep or len(questions) > 1 or checkpoint.prefixes is not None)
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
        inputs = checkpoint.processor.collate([replace(row, tiles=None)])
        return generate_stream(**inputs, pixel_values=row.tiles, options=options)
    except CacheMemoryError:
        raise
    except ValueError as error:
        raise RequestError(error) from error


@dataclass
class Reply:
    """The answers to one question: iterate for (number of the answer, next piece of its text).

    `finish` makes what is left; iterating first is not needed. `prepare` is the time that the prompt took.
    """

    checkpoint: Checkpoint
    row: EncodedConversation
    stream: TokenStream
    options: GenerationOptions
    prepare: float

    def __iter__(self) -> Iterator[tuple[int, str]]:
        answers = range(self.options.num_return_sequences)
        texts = [AnswerText(self.checkpoint, self.options) for _ in answers]
        for column in self.stream:
            for number, token_id in enumerate(column.tolist()):
                if piece := texts[number].put(token_id):
                    yield number, piece
        for number, text in enumerate(texts):
            if piece := text.finish():
                yield number, piece

    def finish(self) -> dict[str, Any]:
        """Answers, token ids, stop reasons, sizes and timings."""
        output, checkpoint = self.stream.result or self.stream.drain(), self.checkpoint
        ids, decode = output.rows(), output.seconds["decode"]
        after_first = sum(map(len, ids)) - len(ids)
        return {
            **answers_of(checkpoint, self.row, ids, self.options),
            "confidences": output.confidences,
            **(logprobs_of(checkpoint.processor.tokenizer, ids, output.logprobs) if output.logprobs else {}),
            "reused_tokens": output.reused if isinstance(output, SessionOutput) else 0,
            "seconds": {"load": checkpoint.load_seconds, "prepare": self.prepare, **output.seconds},
            "decode_tokens_per_second": after_first / decode if after_first else None,
            "proposed_tokens": output.proposed_tokens,
            "accepted_tokens": output.accepted_tokens,
            "kv_cache_bytes": output.kv_cache_bytes,
            **checkpoint.settings,
        }


class TextStream:
    """The text of token ids as they arrive, cut only where a character is complete.

    A token may hold part of a character, and its text may depend on the token before. So text is decoded from
    the first token of the last piece on, and the part that was returned already is cut off.
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
        self._said = ""  # what is to be written at the end

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
        return self._write(self._said) if whole else self._said

    def _show(self, piece: str) -> str:
        piece = piece if self._begun else piece.lstrip()
        self._begun = self._begun or bool(piece)
        if self._write is not None:
            self._said += piece
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
        "prompt_tokens": prompt_tokens(checkpoint, row),
        "image_tokens": row.image_tokens,
    }


def prompt_tokens(checkpoint: Checkpoint, row: EncodedConversation) -> int:
    """Positions of a prompt, including images that stand in front of the text."""
    front = row.image_tokens if checkpoint.model.config.image_placement == "prefix" else 0
    return front + len(row.input_ids)


def requests_for(
    checkpoint: Checkpoint, row: EncodedConversation, limit: int, options: GenerationOptions
) -> list[Request]:
    """A request to a `Scheduler` for each answer to one question, of at most `limit` new tokens."""
    options = replace(options, max_new_tokens=limit, stop_token_ids=checkpoint.stop_token_ids)
    return [Request(torch.tensor(row.input_ids), row.tiles, options=own) for own in each_answer(options)]
