"""A client of OpenAI's protocol that takes nothing for granted."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from data.conversation import Message
from inference.errors import RequestError
from messages import one_line

USAGE = ("prompt_tokens", "completion_tokens")
IMAGE_TYPES = {b"\xff\xd8": "jpeg", b"GI": "gif", b"RI": "webp"}  # by the file's first bytes; else PNG


class ServerError(RequestError):
    """The server cannot be asked at all."""


class CannotAnswer(Exception):
    """Why the reference has no answer to a case."""


@dataclass
class Choice:
    """One of the answers; of its logprobs: (token's text, logprob)."""

    text: str = ""
    finish: str | None = None
    logprobs: list[tuple[str, float]] | None = None


@dataclass
class Answer:
    """What came back. `problem` says what is wrong with its form; with it, or unless `status` is 200, the
    rest may be empty."""

    status: int = 200
    error: str = ""
    problem: str = ""
    choices: list[Choice] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def refused(self) -> bool:
        return 400 <= self.status < 500

    @property
    def texts(self) -> list[str]:
        return [one.text for one in self.choices]

    @property
    def finish(self) -> list[str | None]:
        return [one.finish for one in self.choices]

    @property
    def first(self) -> Choice:
        return self.choices[0] if self.choices else Choice()


def to_json(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the protocol has them, with images as data: addresses."""

    def part(kind: str, value: Any) -> dict[str, Any]:
        if kind == "text":
            return {"type": "text", "text": value}
        name = IMAGE_TYPES.get(value[:2], "png")
        url = f"data:image/{name};base64,{base64.b64encode(value).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    def content(message: Message) -> Any:
        alone = [kind for kind, _ in message.parts] == ["text"]
        return message.text if alone else [part(*one) for one in message.parts]

    return [{"role": message.role, "content": content(message)} for message in messages]


class Client:
    """Asks a server at `url` (with /v1) about `model`; a request may take `seconds`."""

    def __init__(self, url: str, model: str, key: str | None = None, seconds: float = 600):
        headers = {b"authorization": f"Bearer {key}".encode()} if key else {}
        self.url, self.model = url.rstrip("/"), model
        # A connection for each request: some servers close one after an error without saying so.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(headers=headers, timeout=seconds, limits=limits)

    def models(self) -> list[str] | None:
        """The ids that the server lists, None if it has no such list. A ServerError if nobody answers."""
        try:
            reply = self._http.get(self.url + "/models")
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ServerError(f"{self.url!r} is no address of a server: {one_line(error)}") from None
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}: nobody answers ({_reason(error)})") from None
        if reply.status_code in (401, 403):
            raise ServerError(f"{self.url}: the key is refused (status {reply.status_code}); see --api-key")
        try:
            return [str(one["id"]) for one in reply.json()["data"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def ask(self, messages: Sequence[Message], **fields: Any) -> Answer:
        """One answer, or `n`; with stream=True put together from its events."""
        body = {"model": self.model, "messages": to_json(messages), "temperature": 0, **fields}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return self.send(body)

    def send(self, body: dict[str, Any]) -> Answer:
        """What the server makes of a body, whatever that is."""
        try:
            reply = self._http.post(self.url + "/chat/completions", json=body)
        except httpx.TimeoutException:
            return Answer(status=0, problem="no answer in time")
        except httpx.HTTPError as error:
            return Answer(status=0, problem=f"the connection broke: {_reason(error)}")
        if reply.status_code != 200:
            return refusal(reply.status_code, reply.text)
        try:
            return read_events(reply.text) if body.get("stream") else read_pieces([json.loads(reply.text)])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            return Answer(problem=f"not the protocol's form ({type(error).__name__}: {one_line(error, 100)})")


def _reason(error: httpx.HTTPError) -> str:
    return one_line(error) or type(error).__name__


def refusal(status: int, text: str) -> Answer:
    try:
        error = json.loads(text)
        error = error.get("error", error.get("detail", error)) if isinstance(error, dict) else error
        said = error.get("message", error) if isinstance(error, dict) else error
        return Answer(status, error=one_line(str(said), 200))
    except (ValueError, RecursionError):
        return Answer(status, error=one_line(text, 200), problem="the error is not JSON")


def read_events(text: str) -> Answer:
    """The answer that the events of a stream are the pieces of."""
    data = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]
    end = data.index("[DONE]") if "[DONE]" in data else len(data)
    return read_pieces([json.loads(one) for one in data[:end]])


def read_pieces(pieces: Sequence[dict[str, Any]]) -> Answer:
    """The answer of which a stream has many pieces, and a completion is the only one."""
    answer, choices = Answer(), defaultdict[int, Choice](Choice)
    for piece in pieces:
        if piece.get("error"):
            return Answer(problem=f"an error in the stream: {one_line(str(piece['error']), 200)}")
        for choice in piece["choices"]:
            one, part = choices[choice["index"]], choice["delta" if "delta" in choice else "message"]
            if not isinstance(content := part.get("content") or "", str):
                raise TypeError(f"content: expected a text, got {type(content).__name__}")
            one.text += content
            one.finish = choice.get("finish_reason") or one.finish
            if (scored := (choice.get("logprobs") or {}).get("content")) is not None:
                one.logprobs = [(str(token["token"]), float(token["logprob"])) for token in scored]
        if usage := piece.get("usage"):
            answer.prompt_tokens, answer.completion_tokens = map(usage.__getitem__, USAGE)
            total = sum(usage[key] for key in USAGE)
            if usage.get("total_tokens", total) != total:
                answer.problem = f"usage: total_tokens is {usage['total_tokens']}, expected the sum {total}"
    answer.choices = [choices[index] for index in sorted(choices)]
    if None in answer.finish:
        answer.problem = answer.problem or "an answer without finish_reason"
    return answer
