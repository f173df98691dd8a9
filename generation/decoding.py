"""From a prompt to new tokens: prefill once, then one token at a time.

    prompt = compact(embeddings, attention_mask, lengths)
    logits = prefill(language_model, prompt, kv_cache)
    for token in decode(step, logits, chooser, cursor, max_new_tokens): ...

The loop owns the positions. Rows of one length share an int `start_pos` and need no mask anywhere; rows of
different lengths have a (B,) tensor. What stands behind a shorter row's end in the cache is garbage that no
real query sees: prefill is causal, and decoding overwrites each slot before its first query looks at it.

A decode step is any callable (token ids (B, 1), kv_cache, start_pos) -> logits (B, V).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from generation import kv_cache as kv
from generation.kv_cache import KVCache
from generation.prompt import Prompt
from generation.sampling import SamplingParams, check_integer, make_generators, sample

DecodeStep = Callable[[Tensor, "KVCache | None", "int | Tensor"], Tensor]

VIEW_STEP = 128  # rows of different lengths read the cache up to the longest, rounded up to this


class NotFiniteError(ValueError):
    """Logits that hold NaN or infinity: no token drawn from them means anything."""

    def __init__(self):
        super().__init__(
            "the model's logits are not finite (NaN or infinity): broken weights, or a dtype of too "
            "small a range"
        )


@dataclass(frozen=True)
class GenerationOptions(SamplingParams):
    """Everything a caller may ask of `generate` besides the inputs, validated.

    max_new_tokens: at most so many; prompt and answer must fit the model's context.
    stop_token_ids: a row ends with any of these; None means the checkpoint's, () none.
    num_return_sequences: answers to each prompt, from one prefill.
    use_cache: False recomputes everything for every token: the slow reference.
    decode_step: replaces the eager step (see `DecodeStep`).
    """

    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None
    num_return_sequences: int = 1
    use_cache: bool = True
    decode_step: DecodeStep | None = None

    def __post_init__(self):
        super().__post_init__()
        check_integer("max_new_tokens", self.max_new_tokens, low=1)
        check_integer("num_return_sequences", self.num_return_sequences, low=1)
        if self.decode_step is not None and not self.use_cache:
            raise ValueError("decode_step replaces the cached step: it cannot go with use_cache=False")
        if self.stop_token_ids is not None:
            ids = self.stop_token_ids
            ids = tuple(ids) if isinstance(ids, Iterable) else (ids,)
            for token_id in ids:
                check_integer("stop_token_ids", token_id, low=0)
            object.__setattr__(self, "stop_token_ids", ids)


@dataclass(frozen=True)
class Generated:
    """What `generate` made of B prompts with N answers each; answers to a prompt stand side by side.

    token_ids: (B · N, T_new), the pad id behind a row's stop token.
    lengths: tokens of each row, its stop token included.
    stop_reasons: "stop" or "length" for each row.
    prompt_tokens: positions of each prompt, pictures included, padding not.
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
    """Iterate for the new ids of each step, (B · N,) on the model's device; then `result` is filled in.

    Iterating may be broken off and taken up again, by another loop or by `drain`.
    """

    def __init__(self, steps: Iterator[Tensor]):
        self._steps = steps
        self.result: Generated | None = None

    def __iter__(self) -> Iterator[Tensor]:
        # Not `yield from`: a loop that is broken off would close the steps.
        while self.result is None:
            try:
                token = next(self._steps)
            except StopIteration as end:
                self.result = end.value
                return
            yield token

    def drain(self) -> Generated:
        """Run to the end."""
        for _ in self:
            pass
        assert self.result is not None, "a stream that has come to its end has a result"
        return self.result


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
    """The reference decode step: no cache; pictures, prompt and every token so far anew for each token."""
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

    def advance(self) -> tuple[KVCache | None, int | Tensor]:
        """(cache, start_pos) for the next token of each row."""
        start_pos = self.start_pos
        self.start_pos = start_pos + 1
        self.longest += 1
        if self.kv_cache is None:
            return None, start_pos
        if self.longest > kv.capacity(self.kv_cache):
            kv.grow(self.kv_cache, self.longest, self.limit)  # what outgrew the buffer outgrew the view
        if isinstance(start_pos, int):
            return self.kv_cache, start_pos
        # A tensor of positions reads the whole buffer it is given: give it what the longest row needs.
        if self._view is None or kv.capacity(self._view) < self.longest:
            length = min(kv.round_up(self.longest, VIEW_STEP), kv.capacity(self.kv_cache))
            self._view = kv.view(self.kv_cache, length)
        return self._view, start_pos


class Chooser:
    """What happens between two decode steps: a token for each row, and who has stopped. All on the device.

    Args:
        options: sampling and `stop_token_ids`, which must not be None here.
        prompts: B; rows are B · num_return_sequences.
        pad_id: what rows that have stopped go on with.
        device: where logits are.
        seen: (B · N, V) bool, tokens of the prompts, where there is a repetition penalty; updated in place.
    """

    def __init__(self, options: GenerationOptions, prompts: int, pad_id: int, device, seen: Tensor | None):
        answers = options.num_return_sequences
        self.options, self.pad_id, self.seen = options, pad_id, seen
        self.generators = None if options.greedy else make_generators(options.seed, prompts, answers, device)
        self.stop_ids = torch.tensor(options.stop_token_ids, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(prompts * answers, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(prompts * answers, dtype=torch.int64, device=device)
        self.finite = torch.ones((), dtype=torch.bool, device=device)

    def choose(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> (B, 1) token ids, the pad id for rows that had stopped."""
        # The maximum is NaN where anything is, and +inf where anything is; -inf alone is a banned token.
        self.finite = self.finite & logits.amax(-1).isfinite().all()
        token = sample(logits, self.options, self.generators, self.seen)
        token = token.masked_fill(self.stopped[:, None], self.pad_id)
        self.lengths = self.lengths + ~self.stopped
        self.stopped = self.stopped | (token == self.stop_ids).any(-1)
        if self.seen is not None:
            self.seen.scatter_(1, token, True)
        return token

    def finished(self) -> bool:
        """Whether every row has stopped: the loop's one read-back, and none at all without stop ids.

        Raises:
            ValueError: logits that are not finite, before anyone sees a token drawn from them.
        """
        if self.stop_ids.numel() == 0:
            return False
        if not (self.stopped.all() | ~self.finite).item():
            return False
        self.check_finite()
        return True

    def check_finite(self) -> None:
        """Raises ValueError if any logits so far held NaN or infinity."""
        if not self.finite.item():
            raise NotFiniteError


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
        ValueError: logits that are not finite.
    """
    for remaining in range(max_new_tokens - 1, -1, -1):
        token = chooser.choose(logits)
        finished = chooser.finished()
        yield token
        if finished or not remaining:
            break
        kv_cache, start_pos = cursor.advance()
        logits = step(token, kv_cache, start_pos)
    chooser.check_finite()


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
        token_ids=torch.cat(tokens, dim=1),
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
