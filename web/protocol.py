"""OpenAI's protocol: a body becomes a request that is checked, pieces of answers become JSON.

    asked = read_request(body)                                 # raises ApiError
    options = asked.options(limits)
    chunk(head, index, {"content": " blue"})                   # one event of a stream

Whatever is refused is an `ApiError`, which is one JSON object: what was wrong, in which field.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from data.chat import LONGEST_TEXT
from data.errors import did_you_mean, one_line, printable
from generation.options import MAX_SEED, GenerationOptions
from inference.errors import RequestError
from inference.grammar import response_grammar

DEFAULT_MAX_TOKENS = 256  # as of generate.py
MOST_VALUES = 50_000  # of a body: looking at them holds everybody up
# OpenAI's fields that change no answer here.
HARMLESS = frozenset((
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
))  # fmt: skip
# OpenAI's fields that ask for nothing with these values, and for what does not exist here with any other.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (), "frequency_penalty": (0,), "function_call": ("none", "auto"), "functions": ([],),
    "logit_bias": ({},), "modalities": (["text"],), "moderation": (), "prediction": (),
    "presence_penalty": (0,), "reasoning_effort": ("none",), "tool_choice": ("none", "auto"), "tools": ([],),
    "verbosity": ("medium",), "web_search_options": (),
}  # fmt: skip


class ApiError(Exception):
    """A refusal in OpenAI's form. `param` is the field, `code` names the kind for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 retry_after: float | None = None):  # fmt: skip
        super().__init__(printable(message))
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {} if self.retry_after is None else {"retry-after": str(max(1, round(self.retry_after)))}


# --------------------------------------------------------------------------------------------- what is asked
class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ImageUrl(Strict):
    """`detail` changes nothing: an image is always seen as the checkpoint's processor cuts it."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class Part(Strict):
    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: Annotated[
        ImageUrl | None, BeforeValidator(lambda value: {"url": value} if isinstance(value, str) else value)
    ] = None

    @model_validator(mode="after")
    def _of_its_type(self) -> Part:
        given = {name for name in ("text", "image_url") if getattr(self, name) is not None}
        if given != {self.type}:
            raise ValueError(f"expected {self.type!r} in a part of this type, and nothing else")
        return self


class ChatMessage(Strict):
    """The last three are what a client's own record of an answer holds besides, and `null` in any field."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[list[Part], Field(fail_fast=True)] | None,
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] = []
    annotations: Annotated[list[Any], Field(max_length=0)] = []
    provider_specific_fields: dict[str, Any] = {}  # LiteLLM's

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {k: own for k, own in value.items() if own is not None} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError("expected content in a message")
        if self.role != "user" and any(part.type == "image_url" for part in self.content or ()):
            raise ValueError("expected images in the messages of the user only")
        return self


class JsonSchema(Strict):
    """`schema` is the name of a method of pydantic's."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("expected json_schema with type 'json_schema', and only there")
        return self


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # of the lengths of chunks: there is none


class ChatRequest(Strict):
    """A body of /v1/chat/completions. `top_k`, `min_p` and `repetition_penalty` are Ocelli's own."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000, fail_fast=True)]
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]],
        Field(max_length=4),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _go_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: expected with logprobs only")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: expected with stream only")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ValueError("max_tokens: expected the same as max_completion_tokens, or one of them alone")
        length = sum(len(part.text or "") for one in self.messages for part in one.content or ())
        if length > LONGEST_TEXT:
            raise ValueError(f"messages: expected at most {LONGEST_TEXT:,} characters, got {length:,}")
        return self

    @property
    def top(self) -> int | None:
        """How many likeliest tokens stand beside each token's logprob; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def grammar(self) -> str | None:
        """What the answers are held to. Raises ApiError."""
        if self.response_format is None:
            return None
        try:
            return response_grammar(self.response_format.model_dump(by_alias=True))
        except RequestError as error:
            raise ApiError(400, one_line(error), "response_format", "invalid_value") from None

    def options(self, most_tokens: int, most_answers: int) -> GenerationOptions:
        """How the answers are made. Raises ApiError for more than the server allows."""
        tokens = self.max_completion_tokens or self.max_tokens or min(DEFAULT_MAX_TOKENS, most_tokens)
        for name, value, most in (("max_tokens", tokens, most_tokens), ("n", self.n, most_answers)):
            if value > most:
                raise ApiError(400, f"{name}: expected at most {most}, got {value}", name)
        return GenerationOptions(
            max_new_tokens=tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=secrets.randbelow(2**31) if self.seed is None else self.seed % MAX_SEED,
            num_return_sequences=self.n,
        )


def read_request(body: bytes) -> ChatRequest:
    """The request of a body. Raises ApiError, which quotes nothing but the names of fields."""
    if body.count(b",") > MOST_VALUES:  # there is one between any two
        raise ApiError(400, f"expected at most {MOST_VALUES:,} values in the body, got more")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError:  # nested too deep, as well
        raise ApiError(400, "expected JSON in the body, got something else", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"expected a JSON object, got {_kind(value)}", code="invalid_type")
    asked = {name: own for name, own in value.items() if own is not None and name not in HARMLESS}
    for name in [name for name in asked if name in NEUTRAL]:
        if asked.pop(name) not in NEUTRAL[name]:
            raise ApiError(400, f"{name}: this server has nothing of the kind; leave it out", name,
                           "unsupported_parameter")  # fmt: skip
    try:
        return ChatRequest.model_validate(asked)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    """The first thing that pydantic found, in a sentence."""
    first = error.errors(include_url=False, include_input=False, include_context=True)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    param, kind = printable(place, 100) or None, first["type"]
    if kind == "extra_forbidden":
        name = printable(first["loc"][-1], 100)
        hint = did_you_mean(name, ChatRequest.model_fields) if len(first["loc"]) == 1 else ""
        return ApiError(400, f"unknown field {param!r}{hint}", param, "unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param}: expected this field, found none", param, "missing_required_parameter")
    said = first["msg"].removeprefix("Value error, ")
    if param is None and said.split(":")[0] in ChatRequest.model_fields:
        return ApiError(400, said, said.split(":")[0], "invalid_value")
    return ApiError(400, f"{param}: {said[0].lower()}{said[1:]}" if param else said, param, "invalid_value")


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


# ------------------------------------------------------------------------------------------- what is answered
@dataclass(frozen=True)
class Head:
    """What all objects of one answer begin with; `created` is in seconds since 1970."""

    id: str
    created: int
    model: str

    def of(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """The positions of a prompt with its images, how many of them were kept from before, and new tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chunk(
    head: Head, index: int, delta: Mapping[str, Any], logprobs: Any = None, finish: str | None = None
) -> dict[str, Any]:
    """One event of a stream."""
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    return head.of("chat.completion.chunk") | {"choices": [choice]}


def completion(
    head: Head, texts: Sequence[str], finish: Sequence[str], logprobs: Sequence[Any], used: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole answer of a request that was not streamed."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": own,
            "finish_reason": reason,
        }
        for index, (text, reason, own) in enumerate(zip(texts, finish, logprobs, strict=True))
    ]
    return head.of("chat.completion") | {"choices": choices, "usage": used}
