"""The answers to a request as a chat completion: whole, or as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from inference.boxes import located
from inference.checkpoint import Checkpoint
from inference.coordinates import PixelText
from web.blocks import Blocks, Delta, Logged, tool_call
from web.engine import Ticket
from web.protocol import ChatRequest, StreamOptions
from web.stops import Piece

LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Completion:
    """The answers of a checkpoint to one request, from the pieces of the ticket for which it `ask`s."""

    _ticket: Ticket

    def __init__(self, checkpoint: Checkpoint, asked: ChatRequest, ask: Callable[[], Awaitable[Ticket]]):
        self._checkpoint, self._asked, self._ask = checkpoint, asked, ask
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())  # since 1970

    def _object(self, kind: str, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._asked.model}
        return {**head, "choices": choices, **more}

    def _usage(self) -> dict[str, Any]:
        """Positions of the prompt with its images, how many of them were kept from before, and new tokens,
        with those of the thinking."""
        ticket = self._ticket
        prompt, new = ticket.prompt_tokens, ticket.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": ticket.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": ticket.reasoning_tokens},
        }

    def _logprobs(self, piece: Piece) -> Logged:
        """Those of a piece, without the token that ends an answer and what was thought before it."""
        stops, tokenizer = set(self._checkpoint.stop_token_ids), self._checkpoint.processor.tokenizer

        def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            part = "\ufffd" in text  # of a character: its bytes are not known here
            # None: a schema left no choice.
            number = 0.0 if logprob is None else max(logprob, LEAST_LOGPROB)
            return {"token": text, "logprob": number, "bytes": None if part else list(text.encode())}

        return [
            entry(token_id, token.logprob) | {"top_logprobs": [entry(*one) for one in token.top]}
            for token_id, token in zip(piece.token_ids[piece.thinking :], piece.logprobs or ())
            if token_id not in stops
        ]

    async def deltas(self) -> AsyncIterator[Delta]:
        """The answers, piece by piece. Coordinates in the text become pixels."""
        self._ticket = ticket = await self._ask()
        coordinates = self._checkpoint.processor.coordinates
        texts, pixels, called = dict[int, str](), dict[int, PixelText](), set[int]()
        open_calls = dict[int, int]()  # by answer
        async for piece in ticket:
            number = piece.answer
            logged, usage = self._logprobs(piece), self._usage()
            if number not in pixels:
                pixels[number] = PixelText(coordinates, ticket.sizes, lines=False)
            if piece.thought:
                yield Delta(number, "thought", piece.thought, usage=usage)
            texts[number] = texts.get(number, "") + piece.text
            text = Delta(number, "text", pixels[number].put(piece.text), logged, usage=usage)
            # What ends an earlier call comes before the text that follows it.
            earlier = [call for call in piece.calls if call.index == open_calls.get(number)]
            for call in (*earlier, None, *piece.calls[len(earlier) :]):
                if call is None:
                    yield text
                    continue
                called.add(number)
                open_calls[number] = -1 if call.ended else call.index
                yield Delta(
                    number, "call", call.arguments, call=call.id, call_number=call.index, name=call.name,
                    ended=call.ended, usage=usage,
                )  # fmt: skip
        for number in range(self._asked.n):
            reason = ticket.finish_reasons[number]  # one that was cut is not said to have called
            finish = "tool_calls" if number in called and reason == "stop" else reason
            left = pixels[number].finish() if number in pixels else ""
            beside = located(coordinates, ticket.sizes, texts.get(number, "")) | ticket.decided[number]
            yield Delta(number, "text", left, finish=finish, beside=beside, usage=self._usage())

    async def whole(self) -> dict[str, Any]:
        # By number, as they come: how many there may be is refused when they are asked for.
        answers, logged = defaultdict[int, Blocks](Blocks), defaultdict[int, Logged](list)
        choices = list[dict[str, Any]]()
        async for delta in self.deltas():
            answers[delta.answer].grow(delta)
            logged[delta.answer] += delta.logprobs
            if delta.finish:
                message = answers[delta.answer].message | {"refusal": None, **delta.beside}
                entries = {"content": logged[delta.answer], "refusal": None}
                choice = {"index": delta.answer, "message": message, "finish_reason": delta.finish}
                choices.append(choice | {"logprobs": entries if self._asked.logprobs else None})
        return self._object("chat.completion", choices, usage=self._usage())

    def _chunk(
        self, delta: Delta, said: dict[str, Any], logged: Sequence[Any] = (), finish: str | None = None
    ) -> dict[str, Any]:
        options, more = self._asked.stream_options or StreamOptions(), dict[str, Any]()
        if options.include_usage:
            more["usage"] = delta.usage if options.continuous_usage_stats else None
        logprobs = {"content": logged, "refusal": None} if logged and self._asked.logprobs else None
        choice = {"index": delta.answer, "delta": said, "logprobs": logprobs, "finish_reason": finish}
        return self._object("chat.completion.chunk", [choice], **more)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Each answer begins with its role and ends with its reason."""
        begun, usage = set[int](), dict[str, Any]()
        async for delta in self.deltas():
            usage = delta.usage
            if delta.answer not in begun:
                begun.add(delta.answer)
                yield self._chunk(delta, {"role": "assistant", "content": ""})
            if delta.kind == "thought":
                yield self._chunk(delta, {"reasoning_content": delta.text})
            elif delta.kind == "text" and (delta.text or delta.logprobs):
                yield self._chunk(delta, {"content": delta.text}, delta.logprobs)
            elif delta.name or (delta.kind == "call" and delta.text):
                more = {"function": {"arguments": delta.text}}
                call = tool_call(delta.call, delta.name, delta.text) if delta.name else more
                yield self._chunk(delta, {"tool_calls": [{"index": delta.call_number, **call}]})
            if delta.finish:
                yield self._chunk(delta, delta.beside, finish=delta.finish)
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            yield self._object("chat.completion.chunk", [], usage=usage)
