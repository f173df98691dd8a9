"""A conversation with an opened checkpoint, images in any turn, on a kept prefix.

    conversation = Conversation(checkpoint, system="Be brief.")
    with conversation.ask("How many boats are there?", ["photo.jpg"]) as reply:
        for number, piece in reply:
            print(piece, end="", flush=True)
    conversation.ask("And how many of them are red?").finish()["reused_tokens"]
    conversation.undo()

A turn costs what is new in it: earlier images are neither encoded nor prefilled again. It enters the
history when its answer is finished, or stopped with what was answered so far. An error (an image that does
not open, a full context, ...) leaves the history as it was.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from data.inputs import EncodedConversation, TiledImage
from generation.decoding import GenerationOptions, TokenStream
from generation.prefix import FeatureCache
from generation.session import Session
from inference.answer import AnswerText, answer_text, prompt_tokens
from inference.checkpoint import Checkpoint, RequestError
from inference.conversation import Answer, Turn, encode_next, messages_of, seam_of

# Of images' features: for what the cache cannot keep, as where undone turns are asked again.
FEATURE_BYTES = 64 * 2**20


class ContextFullError(RequestError):
    """The conversation with its next question leaves no room for an answer."""


class Conversation:
    """See the module's docstring. Not from several threads at once, but for `TurnReply.stop`.

    Args:
        checkpoint: as `open_checkpoint` gives it, compiled or not.
        system: message in front of everything; may be changed between turns.
        session: of the checkpoint's model and of nobody else; None makes one.

    `remember` says whether earlier turns stand before the next question; it may be changed between turns.
    """

    def __init__(self, checkpoint: Checkpoint, system: str | None = None, session: Session | None = None):
        self.checkpoint, self.system, self.remember = checkpoint, system, True
        self.session = session or Session(checkpoint.model, FeatureCache(checkpoint.model, FEATURE_BYTES))
        self._turns: list[Turn] = []
        self._pending: TurnReply | None = None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was asked and answered, without an answer that is still being made."""
        return tuple(self._turns)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What stands before the next question, in the Hub's form, which `Processor.prepare` takes; images
        are `TiledImage`s."""
        return self._messages(self._remembered())

    @property
    def threads(self) -> list[list[dict[str, Any]]]:
        """All turns in that form: a question that was asked alone begins a new list."""
        begins = [place for place, turn in enumerate(self._turns) if turn.alone or place == 0]
        return [self._messages(self._turns[begin:end]) for begin, end in zip(begins, [*begins[1:], None])]

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        return messages_of(
            self.checkpoint.processor, self.system, turns, [turn.answer.text for turn in turns]
        )

    def _remembered(self) -> list[Turn]:
        """The turns that stand before the next question."""
        if not self.remember:
            return []
        return self._turns[max((place for place, turn in enumerate(self._turns) if turn.alone), default=0) :]

    def image(self, source: Any) -> TiledImage:
        """An image (anything that `load_image` takes) opened and cut, to be asked about.

        Raises:
            ImageError: see `load_image`.
        """
        tiled = self.checkpoint.processor.tile(source)
        is_path = isinstance(source, Path) or (isinstance(source, str) and not source.startswith("data:"))
        return replace(tiled, name=str(source)) if is_path else tiled

    def ask(
        self, question: str, images: Sequence[Any] = (), options: GenerationOptions | None = None
    ) -> TurnReply:
        """Put the next question, about the images so far and new ones (anything that `load_image` takes).

        An answer that is still being made is stopped first. The answer gets as many tokens as the context has
        left, if that is less than `max_new_tokens`. Of several answers (num_return_sequences) the
        conversation goes on behind the first, or the one that `choose` names.

        Raises:
            PromptError, ImageError: question or image cannot be used.
            ContextFullError: no room for an answer.
            RequestError: `use_cache=False`; no image so far where the model needs one.
            CacheMemoryError: the cache does not fit in memory.
        """
        self._end_pending()
        began = time.perf_counter()
        options = GenerationOptions() if options is None else options
        if not options.use_cache:
            raise RequestError("a conversation is a kept cache: expected use_cache=True, got False")
        pictures, before = tuple(self.image(image) for image in images), self._remembered()
        self.checkpoint.check_images(len(pictures) + sum(len(turn.images) for turn in before))
        processor, stops = self.checkpoint.processor, self.checkpoint.stop_token_ids
        row = encode_next(processor, stops, self.system, before, pictures, question)
        room = self._room(row)
        options = replace(
            options,
            max_new_tokens=min(options.max_new_tokens, room),
            stop_token_ids=stops,
            decode_step=self.checkpoint.decode_step,
        )
        self._pending = TurnReply(self, question, pictures, row, options, room, began)
        return self._pending

    def _room(self, row: EncodedConversation) -> int:
        """New tokens that the context has room for, behind a prompt."""
        prompt, context = prompt_tokens(self.checkpoint, row), self.checkpoint.context
        if prompt < context:
            return context - prompt
        way_out = "undo some turns, or begin anew" if self._remembered() else "ask less, or show less"
        raise ContextFullError(
            f"context full: expected fewer than {context} tokens, got {prompt} of conversation and question "
            f"({row.image_tokens} of them image); {way_out}"
        )

    def choose(self, number: int) -> None:
        """Go on behind another one of the last turn's answers.

        Raises:
            RequestError: there is no such answer.
        """
        self._end_pending()
        count = len(self._turns[-1].answers) if self._turns else 0
        if not 0 <= number < count:
            raise RequestError(f"answer: expected a number from 0 to below {count}, got {number}")
        self._turns[-1] = replace(self._turns[-1], chosen=number)

    def undo(self) -> Turn:
        """Take the last turn back, and give it. One that is being answered is stopped and taken back, even if
        it has no token yet: the turn in front of it stays.

        Raises:
            RequestError: there is none.
        """
        pending = self._pending
        self._end_pending()
        if pending is not None and not pending.kept:
            return pending.turn()
        if not self._turns:
            raise RequestError("nothing to undo: the conversation is empty")
        return self._turns.pop()

    def reset(self) -> None:
        """Forget all turns, and give the cache's memory back. The system message stays."""
        self._end_pending()
        self._turns.clear()
        self.session.reset()

    def _end_pending(self) -> None:
        if self._pending is not None:
            self._pending.close()

    def _settle(self, turn: Turn | None) -> None:
        """The pending answer has come to its end, and is kept unless None."""
        self._pending = None
        if turn is not None:
            self._turns.append(turn)


class TurnReply:
    """Answers to the next question of a conversation, being made: iterate for (number of the answer, piece of
    its text).

    Iterating may be broken off and taken up again; `finish` makes what is left. `close`, leaving a `with`,
    and whatever is done to the conversation next end the answer: what there is of it by then stays in the
    history. Before its first token nothing was answered, and nothing stays.
    """

    def __init__(
        self,
        conversation: Conversation,
        question: str,
        images: tuple[TiledImage, ...],
        row: EncodedConversation,
        options: GenerationOptions,
        room: int,
        began: float,
    ):
        self._alone = not conversation._remembered()
        self.kept = False  # whether the turn is in the history
        self._conversation, self._question, self._images = conversation, question, images
        self._row, self._limit = replace(row, tiles=None), options.max_new_tokens
        self._fills_context = options.max_new_tokens == room
        self._ids: list[list[int]] = [[] for _ in range(options.num_return_sequences)]
        self._stopping = Event()
        self._made: dict[str, Any] | None = None
        self._turn: Turn | None = None
        inputs = conversation.checkpoint.processor.collate([row])
        # The generator alone holds the stream: at its end the memory of several answers is free again.
        self._pieces = self._make(conversation.session.generate_stream(**inputs, options=options))
        self._prepared = time.perf_counter() - began
        self._begun = self._first = self._last = 0.0  # when work began, and of the first and the last token

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return ((number, piece) for number, piece in self.steps() if piece)

    def steps(self) -> Iterator[tuple[int, str]]:
        """As iterating, with a piece "" for each token that completes no text: for who does other things
        between two tokens."""
        # Not the generator itself, whose end a loop that is broken off could be.
        return iter(lambda: next(self._pieces, None), None)

    def __enter__(self) -> TurnReply:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def stop(self) -> None:
        """End the answer at its next token; from any thread, while another one iterates."""
        self._stopping.set()

    def close(self) -> None:
        """End the answer where it is, if it has not ended."""
        self._pieces.close()
        if self._made is None:  # not begun
            self._settle(stopped=True)

    def turn(self) -> Turn:
        """The question with its answers, ended now if they have not; it is in the history where `kept`."""
        self.close()
        assert self._turn is not None, "an answer that was closed has come to its end"
        return self._turn

    def finish(self) -> dict[str, Any]:
        """Make what is left, unless stopped, and tell what came of it: the fields of `Reply.finish`, with
        "prefilled_tokens" and "tiles_encoded". Of the "seconds", "prepare" went into images and prompt,
        "first_token" is from the question to its first token ("prepare" included), "decode" is all others.
        """
        for _ in self:
            pass
        self.close()
        assert self._made is not None, "an answer that has come to its end can be told about"
        return self._made

    def _make(self, stream: TokenStream) -> Generator[tuple[int, str], None, None]:
        checkpoint = self._conversation.checkpoint
        tokenizer, stops = checkpoint.processor.tokenizer, checkpoint.stop_token_ids
        texts = [AnswerText(tokenizer, stops) for _ in self._ids]
        try:
            self._begun = time.perf_counter()
            for column in stream:
                self._note(column.tolist(), stops)
                for number, token_id in enumerate(column.tolist()):
                    yield number, texts[number].put(token_id)
                if self._stopping.is_set():
                    break
        except Exception:
            self._ids = [[] for _ in self._ids]  # an answer that failed is none
            self._settle(stopped=True)
            raise
        except BaseException:  # Ctrl-C, or closed
            self._settle(stopped=True)
            raise
        self._settle(stopped=stream.result is None)
        for number, text in enumerate(texts):
            if piece := text.finish():
                yield number, piece

    def _note(self, tokens: list[int], stops: Sequence[int]) -> None:
        """One more token of each answer that has not ended."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        for ids, token_id in zip(self._ids, tokens):
            if not ids or ids[-1] not in stops:
                ids.append(token_id)

    def _settle(self, stopped: bool) -> None:
        """Once: tell about the answers, and put their turn into the history if they have a token."""
        checkpoint = self._conversation.checkpoint
        answers = tuple(
            Answer(answer_text(checkpoint, ids), tuple(ids), self._ending(ids, stopped)) for ids in self._ids
        )
        self._made = self._describe(answers)
        self._turn = Turn(self._question, self._images, answers, seam_of(self._row), alone=self._alone)
        self.kept = all(self._ids)
        self._conversation._settle(self._turn if self.kept else None)

    def _ending(self, ids: list[int], stopped: bool) -> str:
        if ids and ids[-1] in self._conversation.checkpoint.stop_token_ids:
            return "stop"
        if stopped and len(ids) < self._limit:
            return "stopped"
        return "context" if self._fills_context else "length"

    def _describe(self, answers: tuple[Answer, ...]) -> dict[str, Any]:
        checkpoint, session = self._conversation.checkpoint, self._conversation.session
        after_first = sum(len(ids) - 1 for ids in self._ids if ids)
        decode = self._last - self._first
        spared = session.reuse if self._first else None  # without a token it is still the last turn's
        return {
            "answers": [answer.text for answer in answers],
            "token_ids": [list(answer.token_ids) for answer in answers],
            "stop_reasons": [answer.ended for answer in answers],
            "prompt_tokens": prompt_tokens(checkpoint, self._row),
            "image_tokens": self._row.image_tokens,
            "reused_tokens": spared.reused if spared else 0,
            "prefilled_tokens": spared.prefilled if spared else 0,
            "tiles_encoded": spared.tiles_encoded if spared else 0,
            "seconds": {
                "load": checkpoint.load_seconds,
                "prepare": self._prepared,
                "first_token": self._prepared + max(0.0, self._first - self._begun),
                "decode": decode,
            },
            "decode_tokens_per_second": after_first / decode if after_first and decode else None,
            "kv_cache_bytes": session.kv_cache_bytes,
            "device": str(checkpoint.model.device),
            "dtype": checkpoint.dtype,
            "decode_step": checkpoint.decode_step_name,
        }
