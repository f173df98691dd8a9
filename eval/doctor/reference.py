"""The reference: a checkpoint in float32 through the eager path, and how far an answer is from it.

reference = Reference("checkpoints/ocelli-shapes", tolerance=0.02, tokens=8)
difference = reference.compare(case.messages, answer)      # None where the answer is the reference's
causes = reference.explain(case.messages, answer)          # mistakes that lead to just this answer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from data.errors import ImageError, ProcessorError, PromptError
from data.processor import EncodedConversation
from eval.doctor.cases import MISTAKES, Messages, Mistake, misread
from eval.doctor.client import Answer, CannotAnswer
from generation import kv_cache as kv
from inference.checkpoint import RequestError, open_checkpoint
from messages import one_line

LIKELIEST = 200  # tokens among which the server's is looked for


class Difference(NamedTuple):
    """Where an answer leaves the reference: what is said of it. `rounding`: within the tolerance."""

    said: str
    rounding: bool = False


class Reference:
    """See the module.

    Args:
        source: folder or Hub repository of the weights that the server has.
        tolerance: nats up to which a logprob, or the gap between the reference's token and the server's,
            counts as rounding.
        tokens: the most of an answer.
    """

    def __init__(self, source: str, tolerance: float, tokens: int):
        self._checkpoint = open_checkpoint(source, device="cpu", dtype="float32")
        self._tolerance, self._tokens = tolerance, tokens
        self._stops = frozenset(self._checkpoint.stop_token_ids)

    def compare(self, messages: Messages, answer: Answer) -> Difference | None:
        """What is different, prompt tokens first. Raises CannotAnswer."""
        return self._compare(self.encode(messages), answer)

    def explain(self, messages: Messages, answer: Answer) -> list[str]:
        """Names of the mistakes with which the reference gives this answer."""
        right, found = self.encode(messages), []
        for mistake in MISTAKES:
            try:
                row = self.encode(messages, mistake)
                difference = None if _same(row, right) else self._compare(row, answer)
            except (CannotAnswer, ValueError):
                continue  # a prompt that the model cannot take is not what the server gave it
            if not _same(row, right) and (difference is None or difference.rounding):
                found.append(mistake.name)
        return found

    def encode(self, messages: Messages, mistake: Mistake | None = None) -> EncodedConversation:
        """The prompt, with a mistake made in it. Raises CannotAnswer where the reference refuses it."""
        processor = self._checkpoint.processor
        try:
            shown = messages if mistake is None else misread(messages, mistake)
            conversation = [
                {"role": one.role, "content": [{"type": kind, kind: value} for kind, value in one.parts]}
                for one in shown
            ]
            row = processor.encode_conversation(conversation, True)
        except (ImageError, ProcessorError, PromptError, RequestError) as error:
            raise CannotAnswer(one_line(error, 200)) from None
        except Exception as error:
            if mistake is None:
                raise
            raise CannotAnswer(one_line(error, 200)) from None  # Pillow meets what a mistake made of a file
        if mistake is None or mistake.of != "ids":
            return row
        return replace(row, input_ids=mistake.change(row.input_ids, processor))

    @torch.inference_mode()
    def _compare(self, row: EncodedConversation, answer: Answer) -> Difference | None:
        """Follow the server's text token by token: each has to be the likeliest, within the tolerance."""
        expected = len(row.input_ids)
        more = expected if answer.prompt_tokens is None else answer.prompt_tokens
        if more := more - expected:
            fewer = "more" if more > 0 else "fewer"
            return Difference(f"the prompt has {abs(more)} tokens {fewer} ({expected} expected)")
        model, tokenizer = self._checkpoint.model, self._checkpoint.processor.tokenizer
        language_model = model.language_model
        x = model.embed(torch.tensor([row.input_ids]), row.parts)
        room, text = x.shape[1] + self._tokens, answer.first.text.strip()
        if room > self._checkpoint.context:
            raise CannotAnswer(f"the prompt has {x.shape[1]} tokens, more than the model's context holds")
        cache = kv.allocate_for(language_model, 1, room)
        hidden, _ = language_model(x, kv_cache=cache, start_pos=0)
        logprobs = answer.first.logprobs or []
        ids: list[int] = []
        rounding = None
        for number in range(self._tokens):
            scores = language_model.logits(hidden[:, -1])[0].log_softmax(-1)
            best = int(scores.argmax())
            likeliest = scores.topk(min(LIKELIEST, len(scores))).indices.tolist()
            chosen = next((token for token in likeliest if self._goes_on(ids, token, text)), None)
            shown = tokenizer.decode([best], skip_special_tokens=False)
            if chosen is None:
                rest = text[len(self._text(ids)) :]
                return Difference(
                    f"token {number + 1} is {shown!r} in the reference, the server has {rest!r}"
                )
            theirs = tokenizer.decode([chosen], skip_special_tokens=False)
            if (gap := float(scores[best] - scores[chosen])) > 0:
                place = f"token {number + 1} is {theirs!r} in place of {shown!r}, logprob gap {gap:.3g}"
                if gap > self._tolerance:
                    return Difference(place)
                rounding = rounding or Difference(place + ": rounding", rounding=True)
            if number < len(logprobs) and chosen not in self._stops:
                logprob, wanted = logprobs[number][1], float(scores[chosen])
                if not abs(logprob - wanted) <= self._tolerance:
                    return Difference(
                        f"the logprob of token {number + 1} {theirs!r} is {logprob:.3f}, "
                        f"{wanted:.3f} in the reference"
                    )
            ids.append(chosen)
            if chosen in self._stops:
                return rounding
            next_x = language_model.embed(torch.tensor([[chosen]]))
            hidden, _ = language_model(next_x, kv_cache=cache, start_pos=x.shape[1] + number)
        if self._text(ids) != text and not self._text(ids).startswith("\ufffd"):
            return Difference(f"after {self._tokens} tokens the server's answer goes on: {text!r}")
        return rounding

    def _text(self, ids: Sequence[int]) -> str:
        decode = self._checkpoint.processor.tokenizer.decode
        return decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()

    def _goes_on(self, ids: list[int], token: int, text: str) -> bool:
        """Whether the server's text may have this token next: an end of it, or a piece that fits."""
        if token in self._stops:
            return self._text(ids).rstrip("\ufffd") == text
        return text.startswith(self._text([*ids, token]).rstrip("\ufffd"))


def _same(one: EncodedConversation, other: EncodedConversation) -> bool:
    """Whether two prompts have the same tokens and the same pixels."""
    tiles = [[] if row.parts is None else row.parts.digests for row in (one, other)]
    return one.input_ids == other.input_ids and tiles[0] == tiles[1]
