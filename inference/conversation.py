"""A conversation with an opened checkpoint. Images may come with any question.

    conversation = Conversation(checkpoint, system="Be brief.")
    with conversation.send("How many boats are there?", ["photo.jpg"]) as reply:
        for number, piece in reply:
            print(piece, end="", flush=True)
    conversation.send("And how many of them are red?").finish()["reused_tokens"]
    conversation.undo()

A turn costs what is new in it: earlier images and texts are already in the session's cache. A turn enters the
history when its answer ends or is stopped. An error (an image that does not open, a full context, ...) leaves
the history as it was.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

from data.processor import EncodedConversation, Processor
from data.tiles import Visual
from generation.options import GenerationOptions
from generation.output import TokenStream
from generation.session import Session
from inference.answer import inputs_of, start
from inference.checkpoint import Checkpoint, RequestError
from inference.draft import DraftedReply, wholes, with_seed
from inference.errors import ContextFullError as ContextFullError
from inference.forms import for_choices
from inference.thinking import Think

PLACEHOLDER = "ok"  # the text of each answer while a prompt is tokenized
TAIL = 4  # tokens before an answer that must be the same as when it was generated


@dataclass(frozen=True)
class Turn:
    """A question and its answer, the first one if there are several.

    prompt_tail: the last tokens before the answer.
    alone: no earlier turn stood in the prompt.
    answer_ids: as generated, with the stop token, without what was thought.
    ended: "stop", "length" (max_new_tokens), "context" (no room left) or "stopped" (by the user).
    """

    question: str
    images: tuple[Visual, ...]
    prompt_tail: tuple[int, ...]
    alone: bool = False
    answer: str = ""
    answer_ids: tuple[int, ...] = ()
    ended: str = ""


class Conversation:
    """See the module's docstring. `system` stands before everything.

    turns: those so far, without an answer that is still being made.
    remember: whether earlier turns stand before the next question; may be changed between turns, as `system`.
    """

    def __init__(self, checkpoint: Checkpoint, system: str | None = None):
        self.checkpoint, self.system, self.remember = checkpoint, system, True
        # Features are for what the key-value cache loses, as when a turn is undone.
        self.session = Session(checkpoint.model, checkpoint.features, checkpoint.prefixes)
        self.turns: list[Turn] = []
        self._pending: TurnReply | None = None

    @property
    def before(self) -> list[Turn]:
        """The turns that stand before the next question."""
        before = self.turns if self.remember else []
        return before[max((place for place, turn in enumerate(before) if turn.alone), default=0) :]

    def send(
        self,
        question: str,
        images: Sequence[Any] = (),
        options: GenerationOptions | None = None,
        draft: bool = False,
    ) -> TurnReply:
        """Send the next question, about the images so far and new ones. The reply may have a `draft`, while
        the tiles of new images are encoded, unless the model thinks first.

        An answer that is still being made is stopped first. If the context has room for fewer tokens than
        `max_new_tokens`, the answer gets those. Raises PromptError, ImageError, ContextFullError,
        RequestError (no cache; no image, but the model needs one), CacheMemoryError.
        """
        self._end_pending()
        began = time.perf_counter()
        options = options or GenerationOptions()
        if not options.use_cache:
            raise RequestError("a conversation needs the cache: expected use_cache=True, got False")
        checkpoint, before = self.checkpoint, self.before
        new = tuple(visual for image in images for visual in checkpoint.processor.visuals(image))
        checkpoint.check_images(len(new) + sum(len(turn.images) for turn in before))
        think = isinstance(options.constraint, Think)
        encode = partial(encode_next, checkpoint.processor, checkpoint.stop_token_ids, self.system)
        row = encode(before, new, question, think)
        prompt = len(row.input_ids)
        if (room := checkpoint.context - prompt) <= 0:
            advice = "undo some turns, or reset" if before else "shorten the question, or show less"
            raise ContextFullError(
                f"context full: expected fewer than {checkpoint.context} tokens, got {prompt} of conversation"
                f" and question ({row.image_tokens} are image tokens); {advice}"
            )
        options = for_choices(options, room)
        options = replace(options, max_new_tokens=min(options.max_new_tokens, room))
        draft = draft and not think
        options = with_seed(options) if draft else options
        turn = Turn(question, new, tuple(row.input_ids[-TAIL:]), alone=not before)
        stream = start(checkpoint, row, options, self.session)
        self._pending = TurnReply(self, turn, row, stream, options, time.perf_counter() - began)
        if draft:
            images = [*(image for turn in before for image in turn.images), *new]
            small = iter(wholes(checkpoint.processor, images))
            turns = [replace(turn, images=tuple(islice(small, len(turn.images)))) for turn in before]
            last = list(small)  # none where there is no new image, or one has no small picture
            short = encode(turns, last, question) if last else None
            self._pending.with_draft(inputs_of(checkpoint, row), short, self.session)
        return self._pending

    def undo(self) -> Turn:
        """Remove and return the last turn. An answer that is being made is stopped, and its turn removed even
        if it has no token yet. Raises RequestError if there is no turn."""
        pending = self._pending
        self._end_pending()
        if pending is not None and not pending.kept:
            return pending.turn
        if not self.turns:
            raise RequestError("nothing to undo: the conversation is empty")
        return self.turns.pop()

    def reset(self) -> None:
        """Forget all turns and free the cache's memory. The system message stays."""
        self._end_pending()
        self.turns.clear()
        self.session.reset()

    def _end_pending(self) -> None:
        if self._pending is not None:
            self._pending.close()


class TurnReply(DraftedReply):
    """The answers to the next question of a conversation.

    `close`, leaving a `with`, and whatever is done to the conversation next end the answer. The history then
    keeps what there is of it, but nothing if it has no token yet. `kept` says whether the turn is in the
    history.
    """

    def __init__(
        self,
        conversation: Conversation,
        turn: Turn,
        row: EncodedConversation,
        stream: TokenStream,
        options: GenerationOptions,
        prepare: float,
    ):
        self.turn, self.kept, self._conversation = turn, False, conversation
        self._result: dict[str, Any] | None = None
        super().__init__(conversation.checkpoint, row, stream, options, prepare)

    def __enter__(self) -> TurnReply:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the answer where it is, unless it has ended."""
        self._pieces.close()
        self._settle()  # if the generator had not begun

    def finish(self) -> dict[str, Any]:
        """Make what is left. Returns the fields of `Reply.finish`, and "prefilled_tokens" and
        "tiles_encoded"."""
        for _ in self:
            pass
        self.close()
        assert self._result is not None, "an answer that has ended has a result"
        return self._result

    def _run(self) -> Generator[tuple[int, str], None, None]:
        try:
            yield from super()._run()
        except Exception:
            self.ids = [[] for _ in self.ids]  # an answer that failed is none
            raise
        finally:  # also after Ctrl-C and `close`
            self._settle()

    def _settle(self) -> None:
        """Describe the answers, and put their turn into the history if each has a token."""
        if self._result is not None:
            return
        session, output, most = self._conversation.session, self.stream.result, self.options.max_new_tokens
        result = self.describe(output)
        limit = "context" if most == self.checkpoint.context - len(self.row.input_ids) else "length"
        result["stop_reasons"] = [
            "stop" if reason == "stop" else "stopped" if output is None and len(ids) < most else limit
            for reason, ids in zip(result["stop_reasons"], result["token_ids"])
        ]
        # Before the first token it is the last turn's.
        reuse = session.reuse if len(self._times) > 1 else {}
        result["reused_tokens"] = reuse.get("reused", 0)
        result["prefilled_tokens"] = reuse.get("prefilled", 0)
        result["tiles_encoded"] = reuse.get("tiles_encoded", 0)
        result["kv_cache_bytes"] = session.kv_cache_bytes
        del self.stream  # with it, the memory of several answers
        self._result, self._conversation._pending = result, None
        self.kept = all(result["token_ids"])
        if self.kept:
            answer, ids, ended = (result[name][0] for name in ("answers", "token_ids", "stop_reasons"))
            self.turn = replace(self.turn, answer=answer, answer_ids=tuple(ids), ended=ended)
            self._conversation.turns.append(self.turn)


# ------------------------------------------------------------------------------- the prompt of a turn
def messages_of(
    processor: Processor, system: str | None, turns: Sequence[Turn], answers: Sequence[str]
) -> list[dict[str, Any]]:
    """A conversation in the Hub's form, with these texts as answers and `Visual`s as images."""
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": [{"type": "text", "text": system}]})
    for turn, answer in zip(turns, answers, strict=True):
        messages += processor.conversation(list(turn.images), turn.question)
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return messages


def encode_next(
    processor: Processor,
    stop_token_ids: Sequence[int],
    system: str | None,
    turns: Sequence[Turn],
    images: Sequence[Visual],
    question: str,
    think: bool = False,
) -> EncodedConversation:
    """The prompt of the next question, whose beginning is what the earlier turns left in the cache.

    An answer stands in it as the tokens that were generated, without what was thought before: tokenizing its
    text anew might give other ones, which the cache does not hold. So the conversation is tokenized with a
    placeholder for each answer, which the answer's own tokens then replace. Everything else goes through the
    processor, so that text which a person typed never becomes a special token. Raises PromptError.
    """
    last = processor.conversation(list(images), question)

    def encode(answers: list[str]) -> EncodedConversation:
        messages = messages_of(processor, system, turns, answers) + last
        return processor.encode_conversation(messages, True, "conversation", think)

    # Special tokens that a model makes were not shown to anybody; a placeholder among them is no image.
    hidden = {i for i, token in processor.tokenizer.added_tokens_decoder.items() if token.special}
    hidden |= {*stop_token_ids, processor.image_token_id}
    row = encode([PLACEHOLDER] * len(turns))
    edges = [False, *row.assistant_mask, False]
    changes = [place for place, (a, b) in enumerate(pairwise(edges)) if a != b]
    spans = list(zip(changes[::2], changes[1::2]))  # of each answer, with the end of its turn
    tails = [tuple(row.input_ids[max(0, begin - TAIL) : begin]) for begin, _ in spans]
    if tails != [turn.prompt_tail for turn in turns]:
        # A template may write something else before an answer in the history than before a new one. Then the
        # texts have to do.
        return encode([turn.answer for turn in turns])
    ids, mask = list(row.input_ids), list(row.assistant_mask)
    for (begin, end), turn in reversed(list(zip(spans, turns))):
        shown = [i for i in turn.answer_ids if i not in hidden]
        kept = end - 1 if ids[end - 1] in stop_token_ids else end
        ids[begin:kept], mask[begin:kept] = shown, [True] * len(shown)
    return replace(row, input_ids=ids, assistant_mask=mask)
