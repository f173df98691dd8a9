"""From a prompt to new tokens: prefill once, then one token at a time.

    prompt = compact(embeddings, attention_mask, lengths)
    logits = prefill(language_model, prompt, kv_cache)
    for token in decode(step, logits, chooser, cursor, max_new_tokens): ...

The loop owns the positions. Rows of one length share an int `start_pos` and need no mask anywhere; rows of
different lengths have a (B,) tensor. What stands behind a shorter row's end in the cache is garbage that no
real query sees: prefill is causal, and decoding overwrites each slot before its first query looks at it.

A decode step is any callable (token ids (B, 1), kv_cache, start_pos) -> logits (B, V). One that is an
`OwnLoop` besides chooses the tokens itself, and `decode` leaves the loop to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from generation import kv_cache as kv
from generation.chooser import Chooser
from generation.chooser import NotFiniteError as NotFiniteError
from generation.kv_cache import KVCache
from generation.options import GenerationOptions as GenerationOptions
from generation.prompt import Prompt

DecodeStep = Callable[[Tensor, "KVCache | None", "int | Tensor"], Tensor]

VIEW_STEP = 128  # rows of different lengths read the cache up to the longest, rounded up to this


@dataclass(frozen=True)
class Generated:
    """What `generate` made of B prompts with N answers each; answers to a prompt stand side by side.

    token_ids: (B · N, T_new), the pad id behind a row's stop token.
    lengths: tokens of each row, its stop token included.
    stop_reasons: "stop" or "length" for each row.
    prompt_tokens: positions of each prompt, images included, padding not.
    seconds: "vision" (with the token embeddings), "prefill", "decode".
    kv_cache_bytes: of the buffers as they were at the end; 0 without a cache.
    decode_steps: calls of the decode step.
    """

    token_ids: Tensor
    lengths: list[int]
    stop_reasons: list[str]
    prompt_tokens: list[int]
    seconds: dict[str, float]
    kv_cache_bytes: int
    decode_steps: int

    def rows(self) -> list[list[int]]:
        """The token ids of each row, up to and including its stop token."""
        return [row[:length] for row, length in zip(self.token_ids.tolist(), self.lengths)]


class TokenStream:
    """Iterate for the new ids of each step, (B · N,) on the CPU; then `result` is filled in.

    Iterating may be broken off and taken up again, by another loop or by `drain`.
    """

    def __init__(self, steps: Iterator[Tensor]):
        self._steps = steps
        self.result: Generated | None = None

    def __iter__(self) -> Iterator[Tensor]:
        for token in self._rest():
            yield token.cpu()  # of a loop that reads its tokens late, they are there already

    def drain(self) -> Generated:
        """Run to the end."""
        for _ in self._rest():
            pass
        assert self.result is not None, "a stream that has come to its end has a result"
        return self.result

    def _rest(self) -> Iterator[Tensor]:
        # Not `yield from`: a loop that is broken off would close the steps.
        while self.result is None:
            try:
                token = next(self._steps)
            except StopIteration as end:
                self.result = end.value
                return
            yield token


def prefill(
    language_model, prompt: Prompt, kv_cache: KVCache | None = None, start_pos: int | Tensor = 0
) -> Tensor:
    """One pass over the prompt: fills the cache, returns the logits (B, V) of each row's last position."""
    hidden, _ = language_model(prompt.embeddings, kv_cache=kv_cache, start_pos=start_pos)  # (B, L, D)
    if prompt.ragged:
        last = (prompt.lengths_tensor() - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
        return language_model.logits(hidden.gather(1, last)[:, 0])
    return language_model.logits(hidden[:, max(prompt.lengths) - 1])


def eager_step(language_model) -> DecodeStep:
    """The ordinary decode step: (B, 1) ids in, (B, V) logits out, the cache one position longer."""

    def step(token_ids: Tensor, kv_cache: KVCache | None, start_pos: int | Tensor) -> Tensor:
        x = language_model.embed_tokens(token_ids)  # (B, 1, D)
        hidden, _ = language_model(x, kv_cache=kv_cache, start_pos=start_pos)
        return language_model.logits(hidden[:, -1])

    return step


def recompute_step(language_model, embed_prompt: Callable[[], Prompt]) -> DecodeStep:
    """The reference decode step: no cache; images, prompt and every token so far anew for each token."""
    new_ids: list[Tensor] = []

    def step(token_ids: Tensor, kv_cache: KVCache | None, start_pos: int | Tensor) -> Tensor:
        new_ids.append(token_ids)
        prompt, new = embed_prompt(), language_model.embed_tokens(torch.cat(new_ids, 1))  # (B, n, D)
        count = new.shape[1]
        x = F.pad(prompt.embeddings, (0, 0, 0, count))  # (B, L + n, D)
        slots = prompt.lengths_tensor()[:, None] + torch.arange(count, device=x.device)  # (B, n)
        rows = torch.arange(x.shape[0], device=x.device)
        x[rows[:, None], slots] = new
        hidden, _ = language_model(x)
        return language_model.logits(hidden[rows, slots[:, -1]])

    return step


class CacheCursor:
    """Where the next token of each row goes: hands each decode step its cache and start_pos.

    Args:
        kv_cache: filled with a prompt, grown when it is outlived; None where nothing is kept.
        lengths: filled positions of each row.
        device: of the positions.
        limit: positions that will be needed at most.
    """

    def __init__(self, kv_cache: KVCache | None, lengths: tuple[int, ...], device, limit: int | None = None):
        self.kv_cache, self.limit = kv_cache, limit
        self.longest = max(lengths)
        shared = min(lengths) == self.longest
        self.start_pos: int | Tensor = self.longest if shared else torch.tensor(lengths, device=device)
        self._view: KVCache | None = None

    @property
    def full(self) -> bool:
        """Whether the cache has to grow for the next token."""
        return self.kv_cache is not None and self.longest >= kv.capacity(self.kv_cache)

    def make_room(self) -> None:
        """One more position in each row: called once before each decode step."""
        if self.kv_cache is not None and self.full:
            kv.grow(self.kv_cache, self.longest + 1, self.limit)  # what outgrew the buffer outgrew the view
        self.longest += 1

    def advance(self) -> tuple[KVCache | None, int | Tensor]:
        """(cache, start_pos) for the next token of each row."""
        self.make_room()
        start_pos = self.start_pos
        self.start_pos = start_pos + 1
        if self.kv_cache is None or isinstance(start_pos, int):
            return self.kv_cache, start_pos
        # A tensor of positions reads the whole buffer it is given: give it what the longest row needs.
        if self._view is None or kv.capacity(self._view) < self.longest:
            length = min(kv.round_up(self.longest, VIEW_STEP), kv.capacity(self.kv_cache))
            self._view = kv.view(self.kv_cache, length)
        return self._view, start_pos


@runtime_checkable
class OwnLoop(Protocol):
    """A decode step that runs the whole loop, to choose tokens where the logits are made."""

    def decode(
        self, logits: Tensor, chooser: Chooser, cursor: CacheCursor, max_new_tokens: int
    ) -> Iterator[Tensor]:
        """What `decode` does, in every respect that a caller can see.

        It calls `cursor.make_room` before each step, uses the cursor up, and leaves in the chooser who has
        stopped after how many tokens. It may write into the cache behind what was yielded, and yield tokens
        that it has on the host.
        """


def decode(
    step: DecodeStep, logits: Tensor, chooser: Chooser, cursor: CacheCursor, max_new_tokens: int
) -> Iterator[Tensor]:
    """Yield (B, 1) token ids until every row has stopped: n tokens take n - 1 calls of `step`.

    Args:
        step: one decode step, eager or compiled.
        logits: (B, V), of the prompts' last positions.
        chooser: turns logits into tokens and knows who has stopped.
        cursor: where tokens go in the cache.
        max_new_tokens: at most so many are yielded.

    Raises:
        NotFiniteError: logits that are not finite.
    """
    if isinstance(step, OwnLoop):
        yield from step.decode(logits, chooser, cursor, max_new_tokens)
        return
    for remaining in range(max_new_tokens - 1, -1, -1):
        token = chooser.choose(logits)
        finished = chooser.finished()
        yield token
        if finished or not remaining:
            break
        kv_cache, start_pos = cursor.advance()
        logits = step(token, kv_cache, start_pos)
    chooser.check_finite()


@torch.no_grad()
def answer(
    step: DecodeStep,
    logits: Tensor,
    chooser: Chooser,
    cursor: CacheCursor,
    max_new_tokens: int,
    prompt_tokens: list[int],
    watch: Stopwatch,
) -> Generator[Tensor, None, Generated]:
    """`decode` after a prefill, whoever did it: yields (B · N,) ids, returns what came of it.

    Args:
        prompt_tokens: positions of each prompt, for the result.
        watch: has the laps of what was done before; gets "decode".
    """
    tokens = []
    for token in decode(step, logits, chooser, cursor, max_new_tokens):
        tokens.append(token)
        yield token[:, 0]
    watch.lap("decode")
    return Generated(
        token_ids=torch.cat(tokens, dim=1).to(chooser.stopped.device),
        lengths=chooser.lengths.tolist(),
        stop_reasons=["stop" if stopped else "length" for stopped in chooser.stopped.tolist()],
        prompt_tokens=prompt_tokens,
        seconds=watch.seconds,
        kv_cache_bytes=kv.size_in_bytes(cursor.kv_cache) if cursor.kv_cache else 0,
        decode_steps=len(tokens) - 1,
    )


class Stopwatch:
    """Seconds between laps, by name; waits for the device at each lap."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = {}
        self._last = self._now()

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def lap(self, name: str) -> None:
        now = self._now()
        self.seconds[name], self._last = now - self._last, now


def initial_capacity(prompt_length: int, max_new_tokens: int) -> int:
    """Positions to start with: all that will be needed, or what fills the step the prompt ends in.

    The last token is never fed back, so it takes no position.
    """
    return min(prompt_length + max_new_tokens - 1, kv.round_up(prompt_length + 1, kv.STEP))
