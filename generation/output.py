"""What `generate` gives: tokens while they are made, and at the end all that is known of the answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from generation.confidence import TokenLogprobs
from generation.kv_cache import to_device
from generation.options import GenerationOptions
from generation.protocol import VisionLanguage
from generation.sampling import Row
from generation.score import Decision


@dataclass(frozen=True)
class GenerationOutput:
    """N answers to each of B prompts; the answers to one prompt are consecutive rows."""

    token_ids: Tensor  # (B · N, T_new), the pad id after a row's stop token
    lengths: list[int]  # tokens of each row, its stop token included
    stop_reasons: list[str]  # "stop" or "length" for each row
    prompt_tokens: list[int]  # positions of each prompt, with its images, without padding
    seconds: dict[str, float]  # "vision" (with the token embeddings), "prefill", "decode"
    kv_cache_bytes: int  # of the buffers at the end; 0 without a cache
    decode_steps: int  # calls of the decode step
    confidences: list[float]  # of each row, where the options ask for them
    decisions: list[Decision]  # of each row that chose one of several answers
    logprobs: list[list[TokenLogprobs]]  # of each token of each row, where the options ask for them
    proposed_tokens: int = 0  # tokens that calls verified, see `generation.speculation`
    accepted_tokens: int = 0  # those among them that the answer holds and that saved a call
    # Of a session: positions of the prompt that were in its cache already, and the others, which were
    # computed; tiles that were encoded, and the others, which had been before or stand twice in the prompt.
    reused: int = 0
    prefilled: int = 0
    tiles_encoded: int = 0
    tiles_reused: int = 0

    def rows(self) -> list[list[int]]:
        """The token ids of each row, up to and including its stop token."""
        return [row[:length] for row, length in zip(self.token_ids.tolist(), self.lengths)]


class TokenStream:
    """Iterate for the new ids of each step, (B · N,) on the CPU; at the end `result` is set. You may leave
    the loop and go on later, in another loop or by `drain`."""

    def __init__(self, steps: Iterator[Tensor]):
        self._steps = steps
        self.result: GenerationOutput | None = None

    def __iter__(self) -> Iterator[Tensor]:
        # Not the steps: leaving a loop over them early would close them.
        while self.result is None:
            try:
                token = next(self._steps)
            except StopIteration as end:
                self.result = end.value
            else:
                yield token

    def drain(self) -> GenerationOutput:
        """Run to the end."""
        for _ in self:
            pass
        assert self.result is not None, "a stream at its end has a result"
        return self.result


def pad_id(model: VisionLanguage, options: GenerationOptions) -> int:
    """The id after the end of a row in a batch: one that has an embedding, which not all configs name."""
    ids = (model.config.pad_token_id, *(options.stop_token_ids or ()), 0)
    return next(i for i in ids if i is not None and i < model.config.text.vocab_size)


def column_of(rows: Sequence[Row], number: int, pad: int) -> Tensor:
    """Token `number` of each row, (B · N,) on the CPU; the pad id after a row's end."""
    return torch.tensor([row.tokens[number] if number < len(row.tokens) else pad for row in rows])


def fields_of(rows: Sequence[Row], pad: int, device: torch.device) -> dict[str, Any]:
    """The fields of a `GenerationOutput` that rows at their end know."""
    longest = max(len(row.tokens) for row in rows)
    token_ids = torch.tensor([row.tokens + [pad] * (longest - len(row.tokens)) for row in rows])
    return {
        "token_ids": to_device(token_ids, device),
        "lengths": [len(row.tokens) for row in rows],
        "stop_reasons": [row.stop_reason for row in rows],
        "confidences": [row.confidence for row in rows if row.confidence is not None],
        "decisions": [row.decision for row in rows if row.decision is not None],
        "logprobs": [row.logprobs for row in rows if row.logprobs is not None],
    }


class Stopwatch:
    """Seconds between laps, by name. A lap waits for the device."""

    def __init__(self, device: torch.device):
        self._device, self.seconds = device, dict[str, float]()
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def lap(self, name: str) -> None:
        before, self._last = self._last, self._now()
        self.seconds[name] = self._last - before
