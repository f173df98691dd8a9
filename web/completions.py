"""OpenAI's text completions: prompts without a chat template, each a request of chat completions.

body, prompts = chat_body(asked)       # for `web.protocol.check_request`; raises Refused
made = Made(asked, prompts, request.n)
async for event in made.events(chunks_of_each_prompt): ...
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from web.blocks import STREAMED, check_fields, piece_of
from web.errors import Refused, unexpected

DEFAULT_MAX_TOKENS = 16  # OpenAI's own
MOST_PROMPTS = 1_000
NAMES = ("prompt", "echo", "logprobs", "max_tokens", "stream_options", "stream")
# Without a template there are neither calls nor thinking.
ABSENT = ("pick", "suffix", "tools", "reasoning_effort", "thinking_token_budget", "chat_template_kwargs")
BACK = {"messages": "prompt", "top_logprobs": "logprobs", "max_completion_tokens": "max_tokens"}


def chat_body(asked: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the body of chat completions, the prompts). Raises Refused."""
    given = asked.get("prompt")
    prompts: list[Any] = given if isinstance(given, list) else [given]
    if not prompts or not all(isinstance(one, str) and one for one in prompts):
        message = "prompt: expected a text, or a list of texts that are not empty"
        raise Refused(400, message, "prompt", "invalid_type")
    if len(prompts) > MOST_PROMPTS:
        raise unexpected("prompt", f"at most {MOST_PROMPTS:,} texts, got {len(prompts):,}")
    check_fields(asked, ABSENT)
    piece_of(asked, "stream_options", dict)
    top = asked.get("logprobs")
    if top is not None and piece_of(asked, "echo", bool):
        raise unexpected("logprobs", "without echo: those of a prompt are not computed here")
    own = {name: value for name, value in asked.items() if name not in NAMES}
    body = own | {
        "messages": [{"role": "user", "content": "".join(prompts)}],
        "max_completion_tokens": asked.get("max_tokens", DEFAULT_MAX_TOKENS),
        "logprobs": None if top is None else True,
        "top_logprobs": top,
        **STREAMED,
    }
    return body, prompts


class Made:
    """Completions as they are made: `events` of a stream, and `whole` after them. Those of prompt N have the
    numbers from N * `each` on."""

    def __init__(self, asked: Mapping[str, Any], prompts: Sequence[str], each: int):
        self._model, self._each = asked["model"], each
        self._before = prompts if asked.get("echo") else [""] * len(prompts)
        self._with_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        self._id, self._created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self._choices = [_choice(index) for index in range(len(prompts) * each)]
        self._usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)

    def _object(self, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}
        return {**head, "choices": choices, **more}

    @property
    def whole(self) -> dict[str, Any]:
        return self._object(self._choices, usage=self._usage)

    async def events(
        self, chunks_of_each: AsyncIterator[AsyncIterator[dict[str, Any]]]
    ) -> AsyncIterator[dict[str, Any]]:
        number = -1
        async for chunks in chunks_of_each:
            number += 1
            async for chunk in chunks:
                for name in self._usage:
                    self._usage[name] += (chunk.get("usage") or {}).get(name, 0)
                for choice in chunk["choices"]:
                    made = self._choices[number * self._each + choice["index"]]
                    before = self._before[number] if "role" in choice["delta"] else ""
                    text = before + choice["delta"].get("content", "")
                    logged = _logged(choice["logprobs"], len(made["text"]))
                    made["text"] += text
                    made["finish_reason"] = choice["finish_reason"]
                    if logged is not None:
                        made["logprobs"] = made["logprobs"] or {name: [] for name in logged}
                        for name, entries in logged.items():
                            made["logprobs"][name] += entries
                    if text or logged or choice["finish_reason"]:
                        yield self._object([made | {"text": text, "logprobs": logged}])
        if self._with_usage:
            yield self._object([], usage=self._usage)


def _choice(index: int) -> dict[str, Any]:
    return {"index": index, "text": "", "logprobs": None, "finish_reason": None}


def _logged(logprobs: dict[str, Any] | None, offset: int) -> dict[str, list[Any]] | None:
    """Entries of chat completions as this protocol has them; the first token's text begins at `offset`."""
    if not logprobs or not (entries := logprobs["content"]):
        return None
    made: dict[str, list[Any]] = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs")}
    made["text_offset"] = []
    for entry in entries:
        made["tokens"].append(entry["token"])
        made["token_logprobs"].append(entry["logprob"])
        made["top_logprobs"].append({one["token"]: one["logprob"] for one in entry["top_logprobs"]})
        made["text_offset"].append(offset)
        offset += len(entry["token"])
    return made
