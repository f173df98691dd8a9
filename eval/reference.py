"""Another engine's answers beside those of its own checkpoint.

    same, said = examine(checkpoint, messages, client.ask(messages, 8), tolerance=0.02, tokens=8)

The checkpoint runs in float32 through the eager path.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import torch

from data.errors import ImageError, ProcessorError, PromptError
from data.processor import EncodedConversation
from eval.probes import Messages
from generation.options import GenerationOptions
from generation.prompts import ContextError
from inference.checkpoint import Checkpoint
from inference.errors import RequestError
from messages import one_line

IMAGE_TYPES = {b"\xff\xd8": "jpeg", b"GI": "gif", b"RI": "webp"}  # by the file's first bytes; else PNG
LIKELIEST = 200  # tokens among which the server's is looked for


class ServerError(RequestError):
    """The server cannot be asked at all."""


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


def to_json(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the protocol has it, with images as data: addresses."""

    def part(one: dict[str, Any]) -> dict[str, Any]:
        if one["type"] == "text":
            return one
        name = IMAGE_TYPES.get(one["image"][:2], "png")
        url = f"data:image/{name};base64,{base64.b64encode(one['image']).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    content = message["content"]
    alone = [one["type"] for one in content] == ["text"]
    return message | {"content": content[0]["text"] if alone else list(map(part, content))}


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
def examine(
    checkpoint: Checkpoint, messages: Messages, answer: Answer, tolerance: float, tokens: int
) -> tuple[bool | None, str]:
    """Whether a server's answer is its own checkpoint's, None where both refuse; and a word on it.

    Args:
        checkpoint: the weights that the server has, on a CPU in float32.
        tolerance: nats up to which a logprob, or the gap between the reference's token and the server's,
            counts as rounding.
        tokens: the most of an answer.
    """
    try:
        row = checkpoint.processor.encode_conversation(messages, True)
        if not answer.problem:
            return _compare(checkpoint, row, answer, tolerance, tokens)
    except (ImageError, ProcessorError, PromptError, RequestError, ContextError) as error:
        if answer.refused or not answer.problem:
            return None, answer.problem or f"the reference refuses it: {one_line(error, 200)}"
    return False, answer.problem


def _compare(
    checkpoint: Checkpoint, row: EncodedConversation, answer: Answer, tolerance: float, tokens: int
) -> tuple[bool, str]:
    """Follow the server's text token by token: each has to be the likeliest, within the tolerance."""
    expected, tokenizer = len(row.input_ids), checkpoint.processor.tokenizer
    if more := (expected if answer.prompt_tokens is None else answer.prompt_tokens) - expected:
        fewer = "more" if more > 0 else "fewer"
        return False, f"the prompt has {abs(more)} tokens {fewer} ({expected} expected)"
    text, stops, ids, rounding = answer.text, checkpoint.stop_token_ids, list[int](), ""

    def read(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()

    def may_follow(token: int) -> bool:
        """Whether the server's text may have this token next: an end of it, or a piece that fits."""
        if token in stops:
            return read(ids).rstrip("\ufffd") == text
        return text.startswith(read([*ids, token]).rstrip("\ufffd"))

    ahead = list[dict[int, float]]()  # what the reference says next: the likeliest tokens with their logprobs
    for number in range(tokens):
        ahead = ahead or _after(checkpoint, row, ids, tokens - number)
        likeliest = ahead.pop(0)
        best = next(iter(likeliest))
        chosen = next(filter(may_follow, likeliest), None)
        shown = tokenizer.decode([best], skip_special_tokens=False)
        if chosen is None:
            return False, f"token {number + 1} is {text[len(read(ids)) :]!r} in place of {shown!r}"
        theirs = tokenizer.decode([chosen], skip_special_tokens=False)
        if chosen != best:
            gap = likeliest[best] - likeliest[chosen]
            said = f"token {number + 1} is {theirs!r} in place of {shown!r}, logprob gap {gap:.3g}"
            if gap > tolerance:
                return False, said
            rounding, ahead = rounding or f"{said}: rounding", []
        if number < len(answer.logprobs) and chosen not in stops:
            logprob, wanted = answer.logprobs[number], likeliest[chosen]
            if not abs(logprob - wanted) <= tolerance:
                said = f"the logprob of token {number + 1} {theirs!r} is {logprob:.3f}"
                return False, f"{said}, {wanted:.3f} in the reference"
        ids.append(chosen)
        if chosen in stops:
            break
    else:
        if read(ids) != text and not read(ids).startswith("\ufffd"):
            return False, f"after {tokens} tokens the server's answer goes on: {text!r}"
    return True, rounding or "the same answer"


def _after(
    checkpoint: Checkpoint, row: EncodedConversation, ids: Sequence[int], count: int
) -> list[dict[int, float]]:
    """For each token of the reference's greedy answer after these, the likeliest ones with their logprobs."""
    prompt, stops = torch.tensor([[*row.input_ids, *ids]]), tuple(checkpoint.stop_token_ids)
    options = GenerationOptions(max_new_tokens=count, logprobs=LIKELIEST, stop_token_ids=stops)
    (found,) = checkpoint.model.generate_detailed(prompt, row.parts, options=options).logprobs
    return [dict(one.top) for one in found]
