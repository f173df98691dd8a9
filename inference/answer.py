"""Questions to an opened checkpoint; answers as text while they are made.

reply = ask(checkpoint, ["photo.jpg"], "How many boats are there?", GenerationOptions(max_new_tokens=32))
for number, piece in reply:
    print(piece, end="", flush=True)
print(reply.finish()["decode_tokens_per_second"])

Several questions about the same images share a `Session(checkpoint.model)`: same answers, and the images
are encoded and prefilled once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from data.inputs import EncodedConversation
from generation.decoding import GenerationOptions
from generation.scheduler import Request, each_answer
from generation.session import Session, SessionOutput
from inference.checkpoint import Checkpoint, RequestError

_INCOMPLETE = "\ufffd"  # what tokenizers decode half a UTF-8 sequence to


class TextStream:
    """Token ids of one answer to text as they arrive, cut only where a character is complete.

    A token may hold part of a character, and its text may depend on the token before. So text is decoded from
    the first token of the last piece on, and the part that was returned already is cut off.
    """

    def __init__(self, tokenizer, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []  # tokens of the last piece given, then those not yet given
        self._given = 0  # how many of them are in the text already

    def put(self, token_id: int) -> str:
        """The text that this token completes, "" while a character is incomplete."""
        self._ids.append(int(token_id))
        before, text = self._decode(self._ids[: self._given]), self._decode(self._ids)
        if text.endswith(_INCOMPLETE) or len(text) <= len(before):
            return ""
        self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return text[len(before) :]

    def finish(self) -> str:
        """What is left at the end, without a character that never became complete."""
        before, text = self._decode(self._ids[: self._given]), self._decode(self._ids)
        self._ids, self._given = [], 0
        return text[len(before) :].rstrip(_INCOMPLETE)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )


class AnswerText:
    """The text of one answer, token by token: without its stop token and the space before its first word."""

    def __init__(self, tokenizer, stop_token_ids: Sequence[int]):
        self._stream = TextStream(tokenizer)
        self._stops = frozenset(stop_token_ids)
        self._begun = self._ended = False

    def put(self, token_id: int) -> str:
        """The text that this token completes; "" from the stop token on."""
        if self._ended:
            return ""
        return self.finish() if token_id in self._stops else self._after_space(self._stream.put(token_id))

    def finish(self) -> str:
        if self._ended:
            return ""
        self._ended = True
        return self._after_space(self._stream.finish())

    def _after_space(self, piece: str) -> str:
        if not self._begun:
            piece = piece.lstrip()
            self._begun = bool(piece)
        return piece


class Reply:
    """Answers to one question, being made: iterate for (number of the answer, piece of its text).

    `finish` makes what is left and tells what came of it; iterating first is not needed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        row: EncodedConversation,
        options: GenerationOptions,
        prepare: float,
        session: Session | None = None,
    ):
        # Without its tiles, of which the model gets a copy that it lets go of.
        self._checkpoint, self._row, self._prepare = checkpoint, replace(row, tiles=None), prepare
        self._answers = options.num_return_sequences
        answerer = checkpoint.model if session is None else session
        self._stream = answerer.generate_stream(**checkpoint.processor.collate([row]), options=options)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        tokenizer, stops = self._checkpoint.processor.tokenizer, self._checkpoint.stop_token_ids
        texts = [AnswerText(tokenizer, stops) for _ in range(self._answers)]
        for column in self._stream:
            for number, token_id in enumerate(column.tolist()):
                if piece := texts[number].put(token_id):
                    yield number, piece
        for number, text in enumerate(texts):
            if piece := text.finish():
                yield number, piece

    def finish(self) -> dict[str, Any]:
        """Answers, token ids, stop reasons, sizes and timings."""
        made = self._stream.result or self._stream.drain()
        checkpoint, rows, decode = self._checkpoint, made.rows(), made.seconds["decode"]
        after_first = sum(len(ids) for ids in rows) - len(rows)
        return {
            **answers_of(checkpoint, self._row, rows),
            "reused_tokens": made.reused if isinstance(made, SessionOutput) else 0,
            "seconds": {"load": checkpoint.load_seconds, "prepare": self._prepare, **made.seconds},
            "decode_tokens_per_second": after_first / decode if after_first else None,
            "kv_cache_bytes": made.kv_cache_bytes,
            "device": str(checkpoint.model.device),
            "dtype": checkpoint.dtype,
            "decode_step": checkpoint.decode_step_name,
        }


def ask(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    question: str,
    options: GenerationOptions,
    system: str | None = None,
    session: Session | None = None,
) -> Reply:
    """Put a question about images (any number, anything that `load_image` takes).

    Args:
        session: of the checkpoint's model: what the prompt shares with the session's last one is not computed
            again, and counted in "reused_tokens".

    Raises:
        PromptError, ImageError: question or image cannot be used.
        RequestError: prompt and answer do not fit the context, or no image where the model needs one. Nothing
            has been computed by then.
    """
    began = time.perf_counter()
    checkpoint.check_images(len(images))
    row = encode(checkpoint, images, question, system)
    check_context(checkpoint, row, options.max_new_tokens)
    options = replace(options, stop_token_ids=checkpoint.stop_token_ids)
    if options.use_cache:
        options = replace(options, decode_step=checkpoint.decode_step)
    return Reply(checkpoint, row, options, prepare=time.perf_counter() - began, session=session)


def encode(
    checkpoint: Checkpoint, images: Sequence[Any], question: str, system: str | None = None
) -> EncodedConversation:
    """A question as token ids and tiles. Raises PromptError, ImageError."""
    messages = checkpoint.processor.conversation(list(images), question, system)
    return checkpoint.processor.encode_conversation(messages, True, label="question")


def prompt_tokens(checkpoint: Checkpoint, row: EncodedConversation) -> int:
    """Positions that a prompt takes, its images included."""
    in_front = row.image_tokens if checkpoint.model.config.image_placement == "prefix" else 0
    return in_front + len(row.input_ids)


def check_context(checkpoint: Checkpoint, row: EncodedConversation, max_new_tokens: int) -> None:
    """Raises RequestError where prompt and answer do not fit the model's context."""
    prompt = prompt_tokens(checkpoint, row)
    if prompt + max_new_tokens > checkpoint.context:
        raise RequestError(
            f"context too long: expected at most {checkpoint.context} tokens, got {prompt} of prompt "
            f"({row.image_tokens} of them image) and {max_new_tokens} new ones; "
            "shorten the question or lower max_new_tokens"
        )


def requests_for(
    checkpoint: Checkpoint, row: EncodedConversation, limit: int, options: GenerationOptions
) -> list[Request]:
    """What to ask a `Scheduler` for the answers to one question: `num_return_sequences` requests.

    Args:
        limit: new tokens of each answer, at most.
        options: for everything else.
    """
    options = replace(options, max_new_tokens=limit, stop_token_ids=checkpoint.stop_token_ids)
    inputs = checkpoint.processor.collate([row])
    pixels, mask = inputs.get("pixel_values"), inputs.get("pixel_attention_mask")
    return [Request(inputs["input_ids"][0], pixels, mask, own) for own in each_answer(options)]


def answers_of(checkpoint: Checkpoint, row: EncodedConversation, ids: list[list[int]]) -> dict[str, Any]:
    """What answers with these token ids say, and how they and their prompt are counted."""
    stops = checkpoint.stop_token_ids
    return {
        "answers": [answer_text(checkpoint, answer) for answer in ids],
        "token_ids": ids,
        "stop_reasons": ["stop" if answer[-1] in stops else "length" for answer in ids],
        "prompt_tokens": prompt_tokens(checkpoint, row),
        "image_tokens": row.image_tokens,
    }


def answer_text(checkpoint: Checkpoint, ids: Sequence[int]) -> str:
    """The text of one answer: what streaming it gives, without space at its end."""
    text = AnswerText(checkpoint.processor.tokenizer, checkpoint.stop_token_ids)
    return ("".join(map(text.put, ids)) + text.finish()).rstrip()
