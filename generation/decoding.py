"""From a prompt to new tokens: prefill once, then one token at a time.

    prompt = compact(embeddings, attention_mask, lengths)
    logits = step.prefill(prompt.embeddings, prompt.lengths, kv_cache)
    for token in decode(step, logits, sampler, position, max_new_tokens): ...

The loop owns the positions. Rows of one length share an int `start_pos` and need no mask anywhere; rows of
different lengths have a (B,) tensor. What lies after a shorter row's end in the cache is garbage that no
real query sees: prefill is causal, and decoding overwrites each slot before its first query looks at it.

The logits come from a step (`generation/steps.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.confidence import TokenLogprobs, confidences_of
from generation.kv_cache import CachePosition, KVCache, Prompt, compact, prompt_lengths, seen_tokens
from generation.memory import check_caches_fit
from generation.options import GenerationOptions as GenerationOptions
from generation.protocol import Pixels, VisionLanguage
from generation.sampling import Sampler
from generation.steps import (
    ConstrainedSampler,
    Proposer,
    Step,
    decode_proposed,
    forced_tokens,
    prompt_lookup,
    sampler_for,
    step_of,
    uncached_step,
)


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
    proposed_tokens: int  # tokens that calls verified, see `generation.steps`
    accepted_tokens: int  # those among them that the answer holds and that saved a call
    confidences: list[float]  # of each row, where the options ask for them
    logprobs: list[list[TokenLogprobs]]  # of each token of each row, where the options ask for them

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
        for token in self._rest():
            yield token.cpu()

    def drain(self) -> GenerationOutput:
        """Run to the end."""
        for _ in self._rest():
            pass
        assert self.result is not None, "a stream at its end has a result"
        return self.result

    def _rest(self) -> Iterator[Tensor]:
        # Not `yield from`: leaving a loop early would close the steps.
        while self.result is None:
            try:
                token = next(self._steps)
            except StopIteration as end:
                self.result = end.value
                return
            yield token


def decode(
    step: Step,
    logits: Tensor,
    sampler: Sampler,
    position: CachePosition,
    max_new_tokens: int,
    proposer: Proposer | None = None,
) -> Iterator[Tensor]:
    """Yield (B, 1) token ids until every row has stopped, from the logits (B, V) of the prompts' last
    positions: n tokens take n - 1 calls of `step`, fewer where a `proposer` is right about a single row."""
    if proposer is not None and len(sampler.stopped) == 1 and step.chunks:
        yield from decode_proposed(step, logits, sampler, position, max_new_tokens, proposer)
        return
    if step.loops and sampler.reports is None and not isinstance(sampler, ConstrainedSampler):
        yield from step.decode(logits, sampler, position, max_new_tokens)
        return
    for remaining in range(max_new_tokens - 1, -1, -1):
        token = sampler.sample(logits)
        finished = sampler.finished()
        yield token
        if finished or not remaining:
            break
        kv_cache, start_pos = position.advance()
        logits = step(token, kv_cache, start_pos)
    sampler.check_finite()


def encode_once(model: VisionLanguage, tiles: Pixels, masks: Tensor | None = None) -> Tensor:
    """Features of tiles; equal tiles go through `model.encode_images` once. Nothing is kept, so tiles are
    compared: hashing them takes longer."""
    alike: Sequence[Hashable] = first_alike(tiles, masks) if isinstance(tiles, Tensor) else list(tiles)
    rows: dict[Hashable, int] = {}
    order = [rows.setdefault(one, len(rows)) for one in alike]
    if len(rows) == len(order):  # without a copy
        return model.encode_images(tiles, masks)
    places = [order.index(row) for row in range(len(rows))]
    features = model.encode_images(tiles[places], None if masks is None else masks[places])
    # Not an index: a GPU's host would wait for its copy.
    return torch.stack([features[row] for row in order])


def first_alike(tiles: Tensor, masks: Tensor | None = None) -> list[int]:
    """The index of the first tile, with its mask, that equals each of the tiles.

    Different ones are told apart by a few pixels, so this costs next to nothing, on any device.
    """
    if not len(tiles):
        return []
    step = max(1, tiles[0].numel() // 64)
    spots = tiles.flatten(1)[:, ::step].tolist()  # waits for the device
    firsts: dict[tuple[float, ...], list[int]] = {}
    alike: list[int] = []
    for index, spot in enumerate(map(tuple, spots)):
        known = firsts.setdefault(spot, [])
        same = (
            other
            for other in known
            if torch.equal(tiles[other], tiles[index])
            and (masks is None or torch.equal(masks[other], masks[index]))
        )
        alike.append(next(same, index))
        if alike[-1] == index:
            known.append(index)
    return alike


def generate_stream(
    model: VisionLanguage,
    input_ids: Tensor,
    pixel_values: Pixels | None,
    pixel_attention_mask: Tensor | None,
    attention_mask: Tensor | None,
    options: GenerationOptions,
) -> TokenStream:
    """The answers of `VisionLanguageModel.generate`, token by token; wrong inputs are refused at once."""
    has_images = pixel_values is not None and pixel_values.numel() > 0
    lengths = prompt_lengths(model.config, input_ids, attention_mask, has_images, options.max_new_tokens)
    if options.use_cache:
        rows, answers, longest = len(lengths), options.num_return_sequences, max(lengths)
        caches = [(rows * answers, longest + options.max_new_tokens - 1)]
        if answers > 1:  # the prompts' own cache exists beside it while it is copied
            caches.append((rows, longest))
        check_caches_fit(model.language_model, caches)

    def encode(tiles: Pixels, masks: Tensor | None) -> Tensor:
        return encode_once(model, tiles, masks) if len(tiles) > 1 else model.encode_images(tiles, masks)

    def embed_prompt() -> Prompt:
        x = model.embed(input_ids, pixel_values, pixel_attention_mask, encode)
        return compact(x, attention_mask, lengths)

    seen = None
    if options.repetition_penalty != 1:
        vocab = model.config.text.vocab_size
        seen = seen_tokens(input_ids, attention_mask, vocab, options.num_return_sequences)
        seen = kv.to_device(seen, model.device)
    proposer = prompt_lookup(options, input_ids, model.config.image_token_id)
    return TokenStream(_generate(model, embed_prompt, lengths, options, seen, proposer))


def _generate(
    model: VisionLanguage,
    embed_prompt: Callable[[], Prompt],
    lengths: list[int],
    options: GenerationOptions,
    seen: Tensor | None,
    proposer: Proposer | None,
) -> Generator[Tensor, None, GenerationOutput]:
    """Yield (B · N,) ids: one prefill pass, then token by token through the cache."""
    language_model, answers, longest = model.language_model, options.num_return_sequences, max(lengths)
    room = initial_capacity(longest, options.max_new_tokens)
    kv_cache: KVCache = []
    watch = Stopwatch(model.device)
    with torch.no_grad():  # a decorator would keep the arguments, and with them the pixels, to the end
        prompt = embed_prompt()
        watch.lap("vision")
        if options.use_cache:
            filled = room if answers == 1 else longest
            like, dtype = prompt.embeddings, language_model.cache_dtype
            kv_cache = kv.allocate_for(language_model.config, len(lengths), filled, like, dtype)
        step = step_of(options.decode_step if kv_cache else None, language_model)
        logits = step.prefill(prompt.embeddings, prompt.lengths, kv_cache)  # (B, V)
        logits = logits.repeat_interleave(answers, 0)  # (B · N, V)
    del prompt
    if not kv_cache:
        step = uncached_step(language_model, lambda: embed_prompt().repeat(answers))
    else:
        if answers > 1:
            kv_cache = kv.fork(kv_cache, longest, answers, room)
        del embed_prompt
    watch.lap("prefill")

    sampler = sampler_for(options, len(lengths), pad_id(model, options), model.device, seen)
    row_lengths = tuple(length for length in lengths for _ in range(answers))
    position = CachePosition(kv_cache, row_lengths, model.device, longest + options.max_new_tokens - 1)
    count = options.max_new_tokens
    return (yield from run_decode(step, logits, sampler, position, count, lengths, watch, proposer))


def pad_id(model: VisionLanguage, options: GenerationOptions) -> int:
    """What a row that has stopped goes on with: an id that has an embedding, which not all configs name."""
    ids = (model.config.pad_token_id, *(options.stop_token_ids or ()), 0)
    return next(i for i in ids if i is not None and i < model.config.text.vocab_size)


@torch.no_grad()
def run_decode(
    step: Step,
    logits: Tensor,
    sampler: Sampler,
    position: CachePosition,
    max_new_tokens: int,
    prompt_tokens: list[int],
    watch: Stopwatch,
    proposer: Proposer | None = None,
) -> Generator[Tensor, None, GenerationOutput]:
    """`decode` as a generator that yields (B · N,) ids and returns the output, to which `prompt_tokens`, the
    positions of each prompt, and the laps of `watch` belong."""
    tokens, proposer = [], proposer or forced_tokens(sampler)
    for token in decode(step, logits, sampler, position, max_new_tokens, proposer):
        tokens.append(token)
        yield token[:, 0]
    watch.lap("decode")
    proposed, accepted = (proposer.proposed, proposer.accepted) if proposer else (0, 0)
    lengths, stopped = torch.stack((sampler.lengths, sampler.stopped.long())).tolist()
    return GenerationOutput(
        token_ids=kv.to_device(torch.cat(tokens, dim=1), sampler.stopped.device),
        lengths=lengths,
        stop_reasons=["stop" if row else "length" for row in stopped],
        prompt_tokens=prompt_tokens,
        seconds=watch.seconds,
        kv_cache_bytes=kv.size_in_bytes(position.kv_cache),
        decode_steps=len(tokens) - 1 - accepted,
        proposed_tokens=proposed,
        accepted_tokens=accepted,
        confidences=[] if sampler.sums is None else confidences_of(sampler.sums),
        logprobs=[] if sampler.reports is None else sampler.reports.of(lengths),
    )


class Stopwatch:
    """Seconds between laps, by name. On CUDA the device takes the times, so that a lap waits for nothing."""

    def __init__(self, device: torch.device):
        self.device = device
        self._names: list[str] = []
        self._times = [self._now()]

    def _now(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            return event
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def lap(self, name: str) -> None:
        self._names.append(name)
        self._times.append(self._now())

    @property
    def seconds(self) -> dict[str, float]:
        """Of the laps so far; waits for the device."""
        laps = zip(self._names, self._times, self._times[1:])
        if self.device.type != "cuda":
            return {name: end - begin for name, begin, end in laps}
        self._times[-1].synchronize()
        return {name: begin.elapsed_time(end) / 1000 for name, begin, end in laps}


def initial_capacity(prompt_length: int, max_new_tokens: int) -> int:
    """Positions to start with: all that will be needed (the last token is never fed back and takes none), or
    what fills the step that the prompt ends in."""
    return min(prompt_length + max_new_tokens - 1, kv.round_up(prompt_length + 1, kv.STEP))
