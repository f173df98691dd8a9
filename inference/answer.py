"""Questions to an opened checkpoint, and their answers as text while they are made.

reply = ask(checkpoint, ["photo.jpg"], "How many boats are there?", GenerationOptions(max_new_tokens=32))
for number, piece in reply:
    print(piece, end="", flush=True)
print(reply.finish()["decode_tokens_per_second"])

`ask_each` asks several questions about the same images, which are encoded and prefilled once. Answers may be
drafted from small pictures while the images are still to be encoded: see `Reply.draft` and
`inference.draft`. What a model thinks before its answer (`inference.thinking`) is no part of it: see
`Reply.hear`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from data.processor import EncodedConversation, Processor
from data.tiles import Visual
from generation.options import CacheMemoryError, GenerationOptions
from generation.output import GenerationOutput, TokenStream
from generation.requests import Request, each_answer
from generation.sampling import Decision
from generation.score import Choices
from generation.session import Session
from generation.speculation import looks_up
from generation.steps import DecodeStep, Step
from inference.calls import CallPiece, begun
from inference.checkpoint import Checkpoint, RequestError
from inference.decide import decided
from inference.draft import Draft, with_seed
from inference.errors import ContextFullError
from inference.grammar import Form
from inference.results import logprobs_of
from inference.terminal import GreyText, wrapped
from inference.thinking import Think, for_prompt, form_of, held_to
from inference.thoughts import Span, Thinking

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
    small: Sequence[Visual] | None = None,
) -> Reply:
    """Ask a question about images (any number, anything that `load_image` takes); what cannot be answered is
    refused before anything is computed. What the session holds of a prompt is not computed again. `small`:
    for a draft, the images' `wholes`."""
    began = time.perf_counter()
    checkpoint.check_images(len(images))
    row = encode(checkpoint, images, question, system, isinstance(options.constraint, Think))
    short, draft = encode(checkpoint, small, question, system) if small else None, None
    options = options if small is None else with_seed(options)
    stream = start(checkpoint, row, options, session)
    if small is not None:
        assert session is not None, "drafts need a session"
        draft = draft_of(checkpoint, row, short, options, session)
    return Reply(checkpoint, row, stream, options, time.perf_counter() - began, short, draft)


def ask_each(
    checkpoint: Checkpoint,
    images: Sequence[Any],
    questions: Sequence[str],
    options: GenerationOptions,
    system: str | None = None,
    keep: bool = False,
    draft: bool = False,
) -> Iterator[Reply]:
    """`ask` several questions about the same images, each after the reply before it has ended. `keep`: the
    images' features will be needed again, as by `inference.attribution`. `draft`: the first answer has a
    draft, where one helps; for the others the images are encoded."""
    images = [visual for image in images for visual in checkpoint.processor.visuals(image)]
    repeat = any(len({*visual.parts}) < len(visual.parts) for visual in images)  # frames of a video
    keep = keep or repeat or len(questions) > 1 or checkpoint.prefixes is not None
    keep = options.use_cache and (keep or options.lookup == "on")  # of several answers too
    session = None
    if keep or draft:
        session = Session(checkpoint.model, checkpoint.features, checkpoint.prefixes)
    small = wholes(checkpoint.processor, images) if draft else None
    for question in questions:
        yield ask(checkpoint, images, question, options, system, session, small)


def wholes(processor: Processor, images: Sequence[Visual]) -> list[Visual]:
    """A small picture of each image; [] if none of them is smaller, or an image has none."""
    found = [whole for image in images if (whole := processor.images.whole(image)) is not None]
    smaller = any(whole is not image for whole, image in zip(found, images))
    return found if smaller and len(found) == len(images) else []


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
    options = for_choices(options, checkpoint.context - len(row.input_ids))
    if isinstance(options.constraint, Think):
        options = for_prompt(checkpoint, row, options)
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


def _in_session(options: GenerationOptions, step: DecodeStep | None) -> bool:
    """Whether a session answers faster than `model.generate`: it verifies proposed tokens together, and does
    not wait for steps that are recorded."""
    ahead = isinstance(step, Step) and (step.records or looks_up(options, step))
    return ahead or options.constraint is not None or options.lookup == "on"


def inputs_of(checkpoint: Checkpoint, row: EncodedConversation) -> dict[str, Any]:
    """What `generate` takes, of one prompt."""
    return checkpoint.processor.collate([replace(row, parts=None)]) | {"pixel_values": row.parts}


def draft_of(
    checkpoint: Checkpoint,
    row: EncodedConversation,
    short: EncodedConversation | None,
    options: GenerationOptions,
    session: Session,
) -> Draft:
    """The draft of an answer with these options (`with_seed`); without a `short` prompt it has no token."""
    options = for_choices(options, checkpoint.context - len(row.input_ids))
    options = replace(options, stop_token_ids=checkpoint.stop_token_ids, decode_step=checkpoint.decode_step)
    small = None if short is None else inputs_of(checkpoint, short)
    return Draft(session, inputs_of(checkpoint, row), small, options)


def for_choices(options: GenerationOptions, room: int) -> GenerationOptions:
    """Options of the answers to one prompt, with as many new tokens as the longest choice has, where they are
    choices. Raises RequestError if the context has no `room` for it, or no cache is kept, in which all are
    looked at."""
    form = None if options.constraint is None else form_of(options)
    if form is None or not form.tokens:
        return options
    if form.tokens > room:
        raise ContextFullError(
            f"choices: the longest takes {form.tokens} tokens, but the context has room for {max(0, room)} "
            "after the question: shorten either"
        )
    if not options.use_cache:
        raise RequestError("choices need the cache: expected use_cache=True, got False")
    assert isinstance(form.constraint, Choices), "others have no tokens"
    form = replace(form, constraint=form.constraint.of_one_prompt())
    return replace(held_to(options, form), max_new_tokens=form.tokens)


@dataclass
class Reply:
    """The answers to one question: iterate for (number of the answer, next piece of its text).

    Iterating may be interrupted and continued; `finish` makes what is left. `prepare` is the time that the
    prompt took, `ids` are the answers' tokens so far, with those of their thinking. `hear` is called with
    (number of the answer, next piece of what is thought before it). `short`: the prompt of its draft;
    `drafted`: that, None where none was asked for.
    """

    checkpoint: Checkpoint
    row: EncodedConversation
    stream: TokenStream
    options: GenerationOptions
    prepare: float
    short: EncodedConversation | None = None
    drafted: Draft | None = None
    hear: Callable[[int, str], None] = lambda number, piece: None

    def __post_init__(self) -> None:
        # The stream has the tiles, and lets go of them with the prefill.
        self.row, self.short = replace(self.row, parts=None), self.short and replace(self.short, parts=None)
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
        if self.drafted is not None:
            self.drafted.over = True
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

    def draft(self) -> Iterator[str]:
        """The pieces of the draft's text, if this is iterated first: "" for a token that completes none; no
        pieces where no draft helps, or the answer has begun."""
        if self.drafted is not None and not self.drafted.over:
            self._times = self._times or [time.perf_counter()]
            text = AnswerText(self.checkpoint, self.options)
            for token_id in self.drafted:
                yield text.put(token_id)
            yield text.finish()

    def after_draft(self, grey: GreyText, always: bool = False) -> Iterator[tuple[int, str]]:
        """What iterating gives, once the draft was made and shown; that goes when the answer comes.

        A draft that cannot be shown is not made, unless `always`. Ctrl-C leaves on the screen what is there.
        """
        if grey.possible or always:
            for piece in wrapped(self.checkpoint.pixels(self.short or self.row).each(self.draft())):
                grey.put(piece)

        def replacing() -> Iterator[tuple[int, str]]:
            try:
                for number, piece in self:
                    grey.clear()
                    yield number, piece
            except Exception:  # an answer that failed leaves no draft
                grey.clear()
                raise
            grey.clear()

        return replacing()

    def finish(self) -> dict[str, Any]:
        """Make what is left. Returns answers, token ids, stop reasons, sizes and timings. Of the "seconds",
        "first_token" is the time from the question, with "prepare", to the first token. Where there was to be
        a "draft": its text, how many tokens it has and with how many of them the answer begins, seconds of
        work until the first one and until the last; None if none was made."""
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
        drafted: dict[str, Any] = {}
        if (made := self.drafted) is not None:
            made.over = True
            drafted["draft"] = (
                {
                    "text": answer_text(checkpoint, made.token_ids, self.options),
                    "tokens": len(made.token_ids),
                    "accepted": made.accepted(ids[0]),
                    "first_token_seconds": made.first_token_seconds,
                    "draft_seconds": made.seconds,
                }
                if made.token_ids
                else None
            )
        return {
            **answers,
            "confidences": output.confidences if output else [],
            **(logprobs_of(checkpoint.processor.tokenizer, own_ids, logprobs) if logprobs else {}),
            "reused_tokens": getattr(output, "reused", 0),  # of a session
            "seconds": seconds,
            "decode_tokens_per_second": after_first / seconds["decode"] if after_first else None,
            **{name: getattr(output, name, 0) for name in _COUNTS},
            **checkpoint.settings,
            **drafted,
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
    """The text of one answer, token by token, without its stop token, the space before its first word, and
    the thinking before that, which is `thought`.

    options: which it was made with. Where their form is written around what the model says, all of the text
    comes at its end. Where they may call tools, `calls` are apart from the text.

    span: which tokens were thinking; None for a model that does not think.
    turned: the latest token has shown that all text so far was thought. Who has shown it cannot take it back:
        so the answer stands apart from it, and the marker is not shown.
    """

    def __init__(self, checkpoint: Checkpoint, options: GenerationOptions = DEFAULTS):
        self._tokenizer = checkpoint.processor.tokenizer
        self._thinking = checkpoint.thinking
        self._stream, self._thoughts = TextStream(self._tokenizer), TextStream(self._tokenizer)
        self._stops = frozenset(checkpoint.stop_token_ids)
        think, form = isinstance(options.constraint, Think), options.constraint
        self.span = None if self._thinking is None else Span(self._thinking, think)
        self._begun = self._ended = self.turned = False
        form = form.form if isinstance(form, Think) else form
        self._write = form.write if isinstance(form, Form) else None
        self._reader = form.reader() if isinstance(form, Form) and form.reader is not None else None
        self._calls = list[CallPiece]()  # that were not told of
        # Marks of calls that are special tokens, whose text is shown nowhere else.
        self._marks = {} if self._reader is None else {i: mark for mark, i in checkpoint.forms.marks.items()}
        self._text = ""  # what is to be written at the end
        self._held = list[int]()  # tokens of which it is open whether they begin a block of thinking
        self._thought = self._open = ""  # text of it that was not told of, and what may be its end
        self._has_thought = False
        self._mark = ""  # what may begin the end of a block that nothing has begun

    def put(self, token_id: int) -> str:
        """The text that this token completes; "" from the stop token on."""
        self.turned = False
        if token_id in self._stops:
            return self._finish(whole=True)
        return "" if self._ended else self._beside_calls(self._show(self._take(token_id)))

    def thought(self) -> str:
        """What was thought since the last call, without white space around all of it."""
        thought, self._thought = self._thought, ""
        return thought

    def calls(self) -> list[CallPiece]:
        """More of the calls since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def finish(self) -> str:
        """The text of what is left. Around an answer that was cut nothing is written."""
        return self._finish(whole=False)

    def _take(self, token_id: int) -> str:
        """The answer's part of a token's text."""
        span, thinking = self.span, self._thinking
        if span is None or thinking is None:
            return self._text_of(token_id)
        before = span.place
        span.put(token_id)
        if before == "answer" and span.place != "before":
            return self._before_end(token_id, thinking, span)
        if before == "inside":
            marker = span.place == "gap" and len(thinking.end_ids) == 1
            self._open += "" if marker else self._thoughts.put(token_id)
            if span.place == "inside":
                self._think(thinking.end)
                return ""
            self._open, _, rest = (self._open + self._thoughts.finish()).partition(thinking.end)
            self._think()
            return rest
        self._held = [*self._held, token_id] if span.place in ("before", "answer") else []
        if span.place == "inside" and self._begun:  # a block after words, which were thought then
            shown, self._mark, self.turned, self._text = self._mark + self._stream.finish(), "", True, ""
            return f"{shown}\n\n"
        return self._unheld() if span.place == "answer" else ""

    def _before_end(self, token_id: int, thinking: Thinking, span: Span) -> str:
        """The text of a token of the answer, without a marker that ends a block which nothing has begun, or
        what may be its beginning. With the marker, all before it was thought."""
        ended, whole = span.place == "gap", len(thinking.end_ids) == 1
        text = self._mark + ("" if ended and whole else self._text_of(token_id))
        if ended:
            self._mark, self.turned, self._text = "", True, ""
            return text.partition(thinking.end)[0] + "\n\n" * self._begun
        end = len(text) - (0 if whole else begun(text, thinking.end))
        self._mark = text[end:]
        return text[:end]

    def _text_of(self, token_id: int) -> str:
        mark = self._marks.get(token_id)
        return self._stream.put(token_id) if mark is None else self._stream.finish() + mark

    def _unheld(self) -> str:
        held, self._held = self._held, []
        return "".join(map(self._text_of, held))

    def _think(self, marker: str = "") -> None:
        """Tell of what is open, but for the beginning of a marker, and white space before that."""
        shown = self._open[: len(self._open) - begun(self._open, marker)].rstrip()
        self._open = self._open[len(shown) :] if marker else ""
        self._thought += shown if self._has_thought else shown.lstrip()
        self._has_thought = self._has_thought or bool(shown.strip())

    def _finish(self, whole: bool) -> str:
        if self._ended:
            return ""
        self._ended = True
        if self.span is not None and self.span.place == "inside":
            self._open += self._thoughts.finish()
            self._think()
        shown = self._show(self._unheld() + self._mark + self._stream.finish())
        if self._write is not None:
            shown = self._write(self._text) if whole else self._text
        return self._beside_calls(shown, last=True)

    def _beside_calls(self, piece: str, last: bool = False) -> str:
        """The piece without what is part of calls."""
        if self._reader is None:
            return piece
        shown, calls = self._reader.put(piece, last)
        self._calls += calls
        return shown

    def _show(self, piece: str) -> str:
        piece = piece if self._begun else piece.lstrip()
        self._begun = (self._begun or bool(piece)) and not self.turned
        if self._write is not None:
            self._text += piece
            return ""
        return piece


def answer_text(checkpoint: Checkpoint, ids: Sequence[int], options: GenerationOptions = DEFAULTS) -> str:
    """The whole text of one answer, as streaming gives it, without space at its end."""
    return read_answer(checkpoint, ids, options)[1]


def read_answer(checkpoint: Checkpoint, ids: Sequence[int], options: GenerationOptions) -> tuple[str, str]:
    """What was thought before one answer, and the answer as `answer_text` has it."""
    text, thoughts, answer = AnswerText(checkpoint, options), list[str](), ""
    for token_id in ids:
        answer += text.put(token_id)
        if text.turned:
            thoughts, answer = [*thoughts, text.thought(), answer.strip()], ""
    answer = (answer + text.finish()).strip()
    return "\n\n".join(filter(None, [*thoughts, text.thought()])), answer


def split(
    checkpoint: Checkpoint, ids: list[int], options: GenerationOptions = DEFAULTS
) -> tuple[list[int], list[int]]:
    """The tokens of what was thought before an answer, and its own."""
    thinking = checkpoint.thinking
    return ([], ids) if thinking is None else thinking.split(ids, isinstance(options.constraint, Think))


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
    parts = [split(checkpoint, answer, options) for answer in ids]
    said = [read_answer(checkpoint, answer, options) for answer in ids]
    choices = [decided(form_of(options), one) for one in decisions] or [{}]
    thoughts = dict[str, Any]()
    if isinstance(options.constraint, Think) or any(thought for thought, _ in parts):
        thoughts["thinking"] = [thought for thought, _ in said]
        thoughts["thinking_tokens"] = [len(thought) for thought, _ in parts]
    return {
        "answers": [answer for _, answer in said],
        **{name: [one[name] for one in choices] for name in choices[0]},
        **thoughts,
        "token_ids": [answer for _, answer in parts],
        "stop_reasons": ["stop" if stops & set(answer[-1:]) else "length" for answer in ids],
        "prompt_tokens": len(row.input_ids),
        "image_tokens": row.image_tokens,
    }


def requests_for(
    checkpoint: Checkpoint, row: EncodedConversation, limit: int, options: GenerationOptions
) -> list[Request]:
    """A request to a `Scheduler` for each answer to one question, of at most `limit` new tokens."""
    options = replace(options, max_new_tokens=limit, stop_token_ids=checkpoint.stop_token_ids)
    options = for_choices(options, checkpoint.context - len(row.input_ids))
    if isinstance(options.constraint, Think):
        options = for_prompt(checkpoint, row, options)
    return [Request(torch.tensor(row.input_ids), row.parts, options=one) for one in each_answer(options)]
