"""OpenAI's chat completions: a body becomes a request that is checked.

    asked = check_request(read_object(body))    # raises Refused
    options = asked.options(4096, 8)

Fields that nothing here knows are ignored, because clients send many that change no answer. Whatever is
refused is a `Refused`: what was wrong, in which field.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import Field as Field_
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from data.conversation import LONGEST_TEXT, GivenText
from data.tools import Tool, ToolCall
from generation.options import MAX_SEED, GenerationOptions, SamplingParams
from inference.errors import RequestError
from inference.grammar import (
    LONGEST_DECIDED,
    MOST_DECIDED,
    ToolUse,
    choice_grammar,
    json_grammar,
    lark_grammar,
    pattern_grammar,
    response_grammar,
)
from inference.thinking import THINK_TOKENS, Think
from messages import one_line, printable
from web.errors import Refused, unexpected

DEFAULT_MAX_TOKENS = 256  # as of generate.py
MOST_LOGGED = 2**17  # log-probabilities of all answers to a request: writing them holds everybody up
MOST_TOOLS = 128
MOST_PIECES = 4096  # messages, parts of them and calls: making their prompt takes longer than their number
MOST_VALUES = 50_000  # of a conversation: looking at them holds everybody up
# Fields of OpenAI's and of other servers that an answer without them would be wrong for.
REFUSED = (
    "allowed_token_ids", "audio", "bad_words", "chat_template", "continue_final_message", "documents", "echo",
    "format", "functions", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "ignore_eos", "json_schema", "logit_bias", "min_tokens", "stop_token_ids",
)  # fmt: skip
# Most tokens of thinking: OpenAI's and its clients' words; "none" is no thinking.
EFFORTS = {"none": None, "minimal": 128, "low": 512, "medium": THINK_TOKENS, "high": 4096}
EFFORTS |= {"xhigh": 8192, "max": 16_384}
# What bodies may ask of sampling, where `generate` takes something else; -1 is vLLM's word for no top_k.
BOUNDS: dict[str, dict[str, Any]] = {
    "temperature": {"le": 2}, "top_k": {"ge": -1, "le": 2**31}, "repetition_penalty": {"le": 100},
    "seed": {"ge": -(2**63), "le": 2**63 - 1},
}  # fmt: skip


def _refuse(value: Any) -> None:
    if value:
        raise PydanticCustomError("unsupported_parameter", "not supported by this server; remove it")


Refusing = Annotated[None, BeforeValidator(_refuse)]


class Strict(BaseModel):
    """Strict about types, and about no other fields."""

    model_config = ConfigDict(strict=True)


# ------------------------------------------------------------------------------------------------- messages
def _url(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("file_id"):
        raise PydanticCustomError("unsupported_parameter", "file_id: no files are kept here; send file_data")
    return value.get("url", value.get("file_data"))


Url = Annotated[str | None, BeforeValidator(_url)]


class Part(Strict):
    """`detail` of an image is ignored: images are seen as the checkpoint's processor cuts them."""

    type: Literal["text", "image_url", "video_url", "file"]
    text: str | None = None
    image_url: Url = None
    video_url: Url = None
    file: Url = None  # a PDF

    @property
    def shown(self) -> str | None:
        return None if self.type == "text" else getattr(self, self.type)

    @model_validator(mode="after")
    def _of_its_type(self) -> Part:
        names = ("text", "image_url", "video_url", "file")
        if {name for name in names if getattr(self, name) is not None} != {self.type}:
            raise ValueError(f"expected {self.type!r} in a part of this type, and nothing else")
        return self


def _tool_call(value: Any) -> ToolCall:
    """A call of an earlier answer. Raises ValueError for arguments that are no JSON object."""
    try:
        if isinstance(value, ToolCall):
            return value
        if isinstance(text := value["function"].get("arguments"), str) and text:
            read_json(text)  # which refuses what is nested too deep
        return ToolCall.read(value)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            "expected a function with a name, and arguments that are JSON of an object"
        ) from None


def _content(value: Any, validated: ValidatorFunctionWrapHandler) -> Any:
    """A text as a part of its own, which remembers that it was one."""
    if isinstance(value, str):
        return GivenText(validated([{"type": "text", "text": value}]))
    return validated(value)


class ChatMessage(Strict):
    """A client's own record of an answer may stand here as it is, with `null` in any field."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Annotated[list[Part], Field(fail_fast=True)] | None, WrapValidator(_content)] = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[Annotated[Any, AfterValidator(_tool_call)]] = []
    tool_call_id: str | None = None
    audio: Refusing = None
    function_call: Refusing = None
    images: Refusing = None  # Ollama's

    @property
    def parts(self) -> Sequence[Part]:
        return self.content or ()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = {name: field for name, field in value.items() if field is not None}
        if isinstance(given.get("reasoning"), str):  # as vLLM calls it now
            given.setdefault("reasoning_content", given.pop("reasoning"))
        return given

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError("expected content in a message")
        if self.role not in ("user", "tool") and any(part.shown is not None for part in self.parts):
            raise ValueError("expected images in the messages of the user and in results of tools only")
        if (self.tool_calls and self.role != "assistant") or (self.tool_call_id and self.role != "tool"):
            raise ValueError("expected tool_calls in an assistant's message, tool_call_id in that of a tool")
        return self


# ------------------------------------------------------------------------------------- forms of the answer
def _short(texts: list[str]) -> list[str]:
    if (length := sum(map(len, texts))) > LONGEST_DECIDED:
        raise ValueError(f"expected at most {LONGEST_DECIDED:,} characters in all, got {length:,}")
    return texts


Choices = Annotated[list[str], Field(max_length=MOST_DECIDED), AfterValidator(_short)]


class StructuredOutputs(Strict):
    """vLLM's: one of these, of which `json` is the name of a method of pydantic's."""

    choice: Choices | None = None
    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None

    @property
    def written(self) -> str:
        """The grammar. Raises RequestError."""
        match [(name, value) for name, value in self if value not in (None, False)]:
            case [("choice", texts)]:
                return choice_grammar(texts)
            case [("regex", pattern)]:
                return pattern_grammar(pattern)
            case [("grammar", text)]:
                return lark_grammar(text)
            case [("json_object" | "json_" as name, schema)]:
                return json_grammar(schema if name == "json_" else {"type": "object"})
        raise RequestError("expected one of choice, json, json_object, regex and grammar")


def _tool(value: Any) -> Tool:
    """A function that may be called. `strict` changes nothing: arguments always fit the schema."""
    match value:
        case {"type": "function", "function": {"name": str(name)} as about}:
            description, parameters = about.get("description"), about.get("parameters")
            typed = isinstance(description, str | None) and isinstance(parameters, dict | None)
            named = re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name)
            if typed and named and (parameters or {}).get("type", "object") == "object":
                return Tool(name, description, parameters)
    raise ValueError("expected a function: a name of A-Z a-z 0-9 _ . -, and parameters of type 'object'")


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: so far, in each chunk


def _sampling_field(own: Field_) -> tuple[Any, Any]:
    """A field of `SamplingParams` as one of pydantic's."""
    bounds = {"ge": own.metadata["low"], "gt": own.metadata["over"], "le": own.metadata["high"]}
    bounds |= BOUNDS.get(own.name, {})
    kind = float if isinstance(own.default, float) else int if own.default is not None else int | None
    return Annotated[kind, Field(**bounds)], own.default


_FIELDS: dict[str, Any] = {own.name: _sampling_field(own) for own in fields(SamplingParams)}
_FIELDS |= {name: (Refusing, None) for name in REFUSED}
Sampled: Any = create_model("Sampled", __base__=Strict, **_FIELDS)


class ChatRequest(Sampled, Strict):
    """A body of /v1/chat/completions, with all of `SamplingParams`: some of these are Ocelli's own."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000, fail_fast=True)]
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
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
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    tools: Annotated[list[Annotated[Any, AfterValidator(_tool)]], Field(max_length=MOST_TOOLS)] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: Annotated[int | None, Field(ge=0)] = None  # vLLM's
    chat_template_kwargs: dict[str, Any] = {}
    modalities: list[Literal["text"]] = []

    @model_validator(mode="after")
    def _go_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: expected with logprobs only")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ValueError("max_tokens: expected the same as max_completion_tokens, or one of them alone")
        if (count := sum(1 + len(one.parts) + len(one.tool_calls) for one in self.messages)) > MOST_PIECES:
            raise ValueError(
                f"messages: expected at most {MOST_PIECES} messages, parts and calls, got {count}"
            )
        thinks = (self.chat_template_kwargs or {}).get("enable_thinking")
        if thinks is not None and not isinstance(thinks, bool):
            raise ValueError(
                f"chat_template_kwargs: enable_thinking: expected true or false, got {thinks!r:.40}"
            )
        form = self.response_format or {"type": "text"}
        schema = form.get("schema") or (
            form.get("json_schema") if form.get("type") != "json_schema" else None
        )
        if schema is not None:  # llama.cpp's, or one that would be left out
            raise ValueError("response_format: expected a schema in json_schema, of the type json_schema")
        if form.get("type") != "text" and self.structured_outputs is not None:
            raise ValueError("response_format: expected none beside structured_outputs")
        texts = [part.text or "" for one in self.messages for part in one.parts]
        texts += [one.reasoning_content or "" for one in self.messages]
        texts += [call.name + call.arguments for one in self.messages for call in one.tool_calls]
        length = sum(map(len, [*texts, *(json.dumps(tool.shown) for tool in self.tools)]))
        if length > LONGEST_TEXT:
            raise ValueError(f"messages: expected at most {LONGEST_TEXT:,} characters, got {length:,}")
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: expected different names")
        must, _, chosen = self._choice
        if not chosen <= set(names) or (must and not chosen):
            raise ValueError("tool_choice: expected tools that are among tools")
        return self

    @property
    def _choice(self) -> tuple[bool, bool, set[str]]:
        """(whether the answer must be a call, whether several are allowed, the names of those allowed).
        Raises ValueError."""
        several = self.parallel_tool_calls
        match self.tool_choice:
            case "none":
                return False, several, set()
            case "auto" | "required" as mode:
                return mode == "required", several, {one.name for one in self.tools}
            case {"type": "function", "function": {"name": str(name)}}:
                return True, False, {name}
            case {"allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
                with suppress(TypeError, KeyError):
                    return mode == "required", several, {str(one["function"]["name"]) for one in tools}
        raise ValueError(
            "tool_choice: expected none, auto, required, a function with its name or allowed_tools"
        )

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """Those that the prompt speaks of."""
        return tuple(self.tools) if self._choice[2] else ()

    @property
    def top(self) -> int | None:
        """How many likeliest tokens stand beside each token's logprob; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def held_to(self) -> str | ToolUse | None:
        """What the answers are held to. Raises Refused."""
        must, several, names = self._choice
        tools = tuple(tool for tool in self.shown_tools if tool.name in names)
        text = None if tools and must else self._grammar
        return ToolUse(tools, must, several, text) if tools else text

    @property
    def _grammar(self) -> str | None:
        """What answers in words are held to. Raises Refused."""
        form, field = self.response_format, "response_format"
        try:
            if self.structured_outputs is not None:
                field = "structured_outputs"
                return self.structured_outputs.written
            return None if form is None else response_grammar(form)
        except RequestError as error:
            raise Refused(400, one_line(error), field, "invalid_value") from None

    def think(self, most_tokens: int) -> Think | None:
        """Thinking before the answers, of so many tokens at most. None where it is not asked for."""
        switch = self.chat_template_kwargs.get("enable_thinking")
        wanted = self.thinking_token_budget is not None if switch is None else switch
        effort = self.reasoning_effort or ("medium" if wanted else "none")
        most, budget = EFFORTS[effort], self.thinking_token_budget
        return None if most is None else Think(min(most if budget is None else budget, most_tokens))

    @property
    def thinks_by(self) -> str:
        """The field that asks for thinking, where one does."""
        switch = self.chat_template_kwargs.get("enable_thinking")
        other = "chat_template_kwargs.enable_thinking" if switch else "thinking_token_budget"
        return "reasoning_effort" if self.reasoning_effort else other

    def options(self, most_tokens: int, most_answers: int) -> GenerationOptions:
        """How the answers are made, of so many tokens at most. Raises Refused for too many answers, and for
        more log-probabilities than can be written."""
        if self.n > most_answers:
            raise Refused(400, f"n: expected at most {most_answers}, got {self.n}", "n")
        sampling = {field.name: getattr(self, field.name) for field in fields(SamplingParams)}
        sampling["top_k"] = max(0, self.top_k)
        sampling["seed"] = secrets.randbelow(2**31) if self.seed is None else self.seed % MAX_SEED
        wanted = self.max_completion_tokens or self.max_tokens or DEFAULT_MAX_TOKENS
        most, think = min(wanted, most_tokens), self.think(most_tokens)
        logged = 0 if self.top is None else self.n * most * (1 + self.top)
        if logged > MOST_LOGGED:
            most_logged = f"at most {MOST_LOGGED:,} log-probabilities of all tokens"
            raise unexpected("top_logprobs", f"{most_logged}, got {logged:,}")
        return GenerationOptions(
            max_new_tokens=most, constraint=think, num_return_sequences=self.n, **sampling
        )


def read_json(text: str | bytes) -> Any:
    """A value whose numbers JSON can hold. Raises ValueError for one that is something else, or is nested too
    deep."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        raise ValueError("something else") from None
    left = [value]
    while left:
        match left.pop():
            case float(number) if not math.isfinite(number):  # such as 1e999
                raise ValueError("a number that no double holds")
            case dict(fields):
                left += fields.values()
            case list(values):
                left += values
    return value


def values_in(body: bytes) -> int:
    """About the values in JSON, those in texts that are JSON themselves included: after the first, each comes
    after a comma or opens within a list or object. Such a text may hold these marks escaped."""
    escaped = (b"\\u002c", b"\\u002C", b"\\u005b", b"\\u005B", b"\\u007b", b"\\u007B")
    return sum(map(body.count, (b",", b"[", b"{", *escaped)))


def read_object(body: bytes) -> dict[str, Any]:
    """A body of any protocol, without fields that are null. Raises Refused."""
    if (count := values_in(body)) > MOST_VALUES:
        raise Refused(400, f"expected at most {MOST_VALUES:,} values in a conversation, got {count:,}")
    try:
        value = read_json(body)
    except ValueError as error:
        raise Refused(400, f"expected JSON in the body, got {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Refused(400, "expected a JSON object in the body", code="invalid_type")
    return {name: field for name, field in value.items() if field is not None}


def check_request(value: Mapping[str, Any]) -> ChatRequest:
    """A request. Raises Refused, which quotes nothing but the names of fields."""
    try:
        return ChatRequest.model_validate({k: v for k, v in value.items() if v is not None})
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> Refused:
    """The first thing that pydantic found, in a sentence."""
    first = error.errors(include_url=False, include_input=False, include_context=True)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    param, kind = printable(place, 100) or None, first["type"]
    if kind == "missing":
        return Refused(400, f"{param}: expected this field, found none", param, "missing_required_parameter")
    said = first["msg"].removeprefix("Value error, ")
    said = "expected an object" if kind in ("dict_type", "model_type") else said
    if param is None and said.split(":")[0] in ChatRequest.model_fields:
        return Refused(400, said, said.split(":")[0], "invalid_value")
    code = kind if kind == "unsupported_parameter" else "invalid_value"
    return Refused(400, f"{param}: {said[0].lower()}{said[1:]}" if param else said, param, code)
