"""Another engine's answers beside those of its own checkpoint.

    reference = Reference(checkpoint, tolerance=0.02, tokens=8)
    finding = reference.examine(case, client.ask(case.messages, 8))

The checkpoint runs in float32 through the eager path. Where an answer is another, the reference is run with
each of the mistakes of `eval.probes`, and those that lead to just this answer are named.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import httpx
import torch

from data.conversation import Message
from data.errors import ImageError, ProcessorError, PromptError
from data.processor import EncodedConversation
from eval.probes import MISTAKES, Case, Messages, Mistake, misread
from generation import kv_cache as kv
from inference.checkpoint import Checkpoint
from inference.errors import RequestError
from messages import one_line

GOOD, ROUNDING, REFUSED, FAULT = "good", "rounding", "refused", "FAULT"
IMAGE_TYPES = {b"\xff\xd8": "jpeg", b"GI": "gif", b"RI": "webp"}  # by the file's first bytes; else PNG
LIKELIEST = 200  # tokens among which the server's is looked for


class ServerError(RequestError):
    """The server cannot be asked at all."""


class CannotAnswer(Exception):
    """Why the reference has no answer to a case."""


class Finding(NamedTuple):
    """The outcome of a case: one of the four kinds above, and what is to be said of it."""

    case: str
    kind: str
    said: str = ""


# ------------------------------------------------------------------------------------------- the server
@dataclass(frozen=True)
class Answer:
    """A server's answer, or why there is none: `problem`, which a server may have where it `refused` (a
    status from 400 to 499)."""

    text: str = ""
    prompt_tokens: int | None = None
    logprobs: Sequence[float] = ()
    problem: str = ""
    refused: bool = False


def to_json(message: Message) -> dict[str, Any]:
    """A message as the protocol has it, with images as data: addresses."""

    def part(kind: str, value: Any) -> dict[str, Any]:
        if kind == "text":
            return {"type": "text", "text": value}
        name = IMAGE_TYPES.get(value[:2], "png")
        url = f"data:image/{name};base64,{base64.b64encode(value).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    alone = [kind for kind, _ in message.parts] == ["text"]
    return {
        "role": message.role,
        "content": message.text if alone else [part(*one) for one in message.parts],
    }


class Client:
    """A server at `url` (with /v1), asked about `model`; a request may take `seconds`."""

    def __init__(self, url: str, model: str, key: str | None = None, seconds: float = 600):
        headers = {b"authorization": f"Bearer {key}".encode()} if key else {}
        self.url, self.model = url.rstrip("/"), model
        # A connection for each request: some servers close one after an error without saying so.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(headers=headers, timeout=seconds, limits=limits)

    def check(self) -> None:
        """Raises ServerError if nobody answers at the address, or refuses the key."""
        try:
            status = self._http.get(self.url + "/models").status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"{self.url!r}: no server answers there ({one_line(error)})") from None
        if status in (401, 403):
            raise ServerError(f"{self.url}: the key is refused (status {status}); see OPENAI_API_KEY")

    def ask(self, messages: Messages, tokens: int) -> Answer:
        """The greedy answer, with logprobs if the server gives them."""
        body = {"model": self.model, "messages": [to_json(one) for one in messages], "temperature": 0}
        try:
            reply = self._http.post(
                self.url + "/chat/completions", json=body | {"max_tokens": tokens, "logprobs": True}
            )
        except httpx.HTTPError as error:
            return Answer(problem=f"no answer ({one_line(error)})")
        status = reply.status_code
        if status != 200:
            problem = f"status {status}: {one_line(reply.text, 200)}"
            return Answer(problem=problem, refused=400 <= status < 500)
        try:
            found = reply.json()
            choice = found["choices"][0]
            scored = (choice.get("logprobs") or {}).get("content") or ()
            return Answer(
                str.strip(choice["message"]["content"]),
                (found.get("usage") or {}).get("prompt_tokens"),
                [float(token["logprob"]) for token in scored],
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            return Answer(problem=f"not the protocol's form ({type(error).__name__}: {one_line(error, 100)})")


# ---------------------------------------------------------------------------------------- the reference
class Difference(NamedTuple):
    """How an answer leaves the reference. `rounding`: within the tolerance."""

    said: str
    rounding: bool = False


class Reference:
    """The checkpoint that the server has, and how far an answer is from its.

    Args:
        checkpoint: the weights that the server has, on a CPU in float32.
        tolerance: nats up to which a logprob, or the gap between the reference's token and the server's,
            counts as rounding.
        tokens: the most of an answer.
    """

    def __init__(self, checkpoint: Checkpoint, tolerance: float, tokens: int):
        self._checkpoint, self._tolerance, self._tokens = checkpoint, tolerance, tokens
        self._stops = frozenset(self._checkpoint.stop_token_ids)

    def examine(self, case: Case, answer: Answer) -> Finding:
        """How the server's answer to a case compares. It may refuse what the reference refuses, too."""
        try:
            row = self._encode(case.messages)
            difference = None if answer.problem else self._compare(row, answer)
        except CannotAnswer as error:
            kind = FAULT if answer.problem and not answer.refused else REFUSED
            return Finding(case.name, kind, answer.problem or f"the reference refuses it: {error}")
        if answer.problem or difference is None:
            return Finding(case.name, FAULT if answer.problem else GOOD, answer.problem)
        if difference.rounding:
            return Finding(case.name, ROUNDING, difference.said)
        causes = [one.name for one in MISTAKES if self._explains(one, case.messages, row, answer)]
        cause = " or ".join(causes) or "no known mistake leads to this answer"
        return Finding(case.name, FAULT, f"{difference.said}: {cause}")

    def _explains(
        self, mistake: Mistake, messages: Messages, right: EncodedConversation, answer: Answer
    ) -> bool:
        """Whether a mistake changes the prompt, and the reference then gives this answer."""
        try:
            row = self._encode(messages, mistake)
            if row.input_ids == right.input_ids and _pixels(row) == _pixels(right):
                return False
            difference = self._compare(row, answer)
        except (CannotAnswer, ValueError):
            return False  # a prompt that the model cannot take is not what the server gave it
        return difference is None or difference.rounding

    def _encode(self, messages: Messages, mistake: Mistake | None = None) -> EncodedConversation:
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

    def _compare(self, row: EncodedConversation, answer: Answer) -> Difference | None:
        """Follow the server's text token by token: each has to be the likeliest, within the tolerance. None
        where it is the reference's answer."""
        expected = len(row.input_ids)
        if more := (expected if answer.prompt_tokens is None else answer.prompt_tokens) - expected:
            fewer = "more" if more > 0 else "fewer"
            return Difference(f"the prompt has {abs(more)} tokens {fewer} ({expected} expected)")
        model, tokenizer = self._checkpoint.model, self._checkpoint.processor.tokenizer
        language_model, text = model.language_model, answer.text
        ids: list[int] = []
        rounding = None
        with torch.inference_mode():
            x = model.embed(torch.tensor([row.input_ids]), row.parts)
            room = x.shape[1] + self._tokens
            if room > self._checkpoint.context:
                raise CannotAnswer(f"the prompt has {x.shape[1]} tokens, more than the model's context holds")
            cache = kv.allocate_for(language_model, 1, room)
            hidden, _ = language_model(x, kv_cache=cache, start_pos=0)
            for number in range(self._tokens):
                scores = language_model.logits(hidden[:, -1])[0].log_softmax(-1)
                best = int(scores.argmax())
                likeliest = scores.topk(min(LIKELIEST, len(scores))).indices.tolist()
                chosen = next((token for token in likeliest if self._goes_on(ids, token, text)), None)
                shown = tokenizer.decode([best], skip_special_tokens=False)
                if chosen is None:
                    rest = text[len(self._text(ids)) :]
                    return Difference(f"token {number + 1} is {rest!r} in place of {shown!r}")
                theirs = tokenizer.decode([chosen], skip_special_tokens=False)
                if (gap := float(scores[best] - scores[chosen])) > 0:
                    said = f"token {number + 1} is {theirs!r} in place of {shown!r}, logprob gap {gap:.3g}"
                    if gap > self._tolerance:
                        return Difference(said)
                    rounding = rounding or Difference(said + ": rounding", rounding=True)
                if number < len(answer.logprobs) and chosen not in self._stops:
                    logprob, wanted = answer.logprobs[number], float(scores[chosen])
                    if not abs(logprob - wanted) <= self._tolerance:
                        said = f"the logprob of token {number + 1} {theirs!r} is {logprob:.3f}"
                        return Difference(f"{said}, {wanted:.3f} in the reference")
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


def _pixels(row: EncodedConversation) -> Any:
    return None if row.parts is None else row.parts.digests
