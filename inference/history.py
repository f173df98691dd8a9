"""The turns of a conversation, and the prompt that they make with the next question.

An answer stands in the next prompt as the tokens that were generated, not as its text tokenized anew: a model
that samples may spell a word in other tokens than its tokenizer would, and the cache holds what it generated.
So the conversation is rendered and tokenized with a stand-in for each answer, and the answers' own tokens are
put in the stand-ins' places. Everything else, what a person typed above all, goes through `data/chat.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from data.inputs import EncodedConversation, TiledImage
from data.processor import Processor

STAND_IN = "ok"
SEAM = 4  # tokens in front of an answer that must be those it was generated behind


@dataclass(frozen=True)
class Answer:
    """One answer as far as it went.

    token_ids: as generated, the stop token included.
    ended: "stop", "length" (max_new_tokens), "context" (no room left) or "stopped" (by a person).
    """

    text: str
    token_ids: tuple[int, ...]
    ended: str


@dataclass(frozen=True)
class Turn:
    """A question about images and its answers, of which the conversation goes on behind one.

    seam: the last tokens of the prompt that the answers were generated behind.
    alone: no earlier turn stood in that prompt.
    """

    question: str
    images: tuple[TiledImage, ...]
    answers: tuple[Answer, ...]
    seam: tuple[int, ...]
    chosen: int = 0
    alone: bool = False

    @property
    def answer(self) -> Answer:
        return self.answers[self.chosen]


def messages_of(
    processor: Processor, system: str | None, turns: Sequence[Turn], answers: Sequence[str]
) -> list[dict[str, Any]]:
    """A conversation in the Hub's form, with these texts as answers; images are `TiledImage`s.

    Raises:
        PromptError: a question without text.
    """
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
    images: Sequence[TiledImage],
    question: str,
) -> EncodedConversation:
    """The prompt of the next question: as much of it as can be is what the earlier ones left in a cache.

    Raises:
        PromptError: the question has no text, or the checkpoint cannot take such a conversation.
    """
    asked = processor.conversation(list(images), question)

    def encode(answers: list[str]) -> EncodedConversation:
        messages = messages_of(processor, system, turns, answers) + asked
        return processor.encode_conversation(messages, True, label="conversation")

    stops = frozenset(stop_token_ids)
    row = _with_answers(encode([STAND_IN] * len(turns)), turns, stops, _hidden_ids(processor) | stops)
    # A template that writes something else in front of an answer than in front of a kept one: the texts then.
    return encode([turn.answer.text for turn in turns]) if row is None else row


def _with_answers(
    row: EncodedConversation, turns: Sequence[Turn], stops: frozenset[int], hidden: frozenset[int]
) -> EncodedConversation | None:
    """`row` with the turns' own tokens in the stand-ins' places, or None where they do not fit in there."""
    spans = _answer_spans(row)
    if len(spans) != len(turns):
        return None
    ids: list[int] = []
    mask: list[bool] = []
    last = 0
    for (start, end), turn in zip(spans, turns):
        if tuple(row.input_ids[max(0, start - SEAM) : start]) != turn.seam:
            return None
        # What nobody was shown is not said: a placeholder that a model makes is no image.
        said = [i for i in turn.answer.token_ids if i not in hidden]
        closing = row.input_ids[end - 1 : end] if row.input_ids[end - 1] in stops else []
        ids += [*row.input_ids[last:start], *said, *closing]
        mask += [*row.assistant_mask[last:start], *[True] * (len(said) + len(closing))]
        last = end
    return replace(row, input_ids=ids + row.input_ids[last:], assistant_mask=mask + row.assistant_mask[last:])


def _answer_spans(row: EncodedConversation) -> list[tuple[int, int]]:
    """(start, end) of each run of tokens that the assistant says, the end of its turn included."""
    edges = [False, *row.assistant_mask, False]
    changes = [place for place, (a, b) in enumerate(pairwise(edges)) if a != b]
    return list(zip(changes[::2], changes[1::2]))


def _hidden_ids(processor: Processor) -> frozenset[int]:
    """Ids that an answer's text does not show, and the placeholder of images in any case."""
    hidden = {i for i, token in processor.tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(hidden if processor.image_token_id is None else hidden | {processor.image_token_id})


def seam_of(row: EncodedConversation) -> tuple[int, ...]:
    """`Turn.seam` of a prompt."""
    return tuple(row.input_ids[-SEAM:])
