"""From a prompt to new tokens: prefill once, then one token at a time.

    prompt = compact(embeddings, attention_mask, lengths)
    logits = step.prefill(prompt.embeddings, prompt.lengths, kv_cache)
    for ids in decode(step, logits, rows, position): ...

The loop owns the positions. Rows of one length share an int `start_pos` and need no mask anywhere; rows of
different lengths have a (B,) tensor. What lies after a shorter row's end in the cache is garbage that no
real query sees: prefill is causal, and decoding overwrites each slot before its first query looks at it.

The logits come from a step (`generation/steps.py`), the tokens from `generation/sampling.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.confidence import TokenLogprobs
from generation.kv_cache import CachePosition, KVCache
from generation.memory import check_fits
from generation.options import GenerationOptions as GenerationOptions
from generation.prompts import Prompt, compact, prompt_lengths
from generation.protocol import Decoder, Pixels, VisionLanguage
from generation.sampling import Chosen, Decision, Row, choose, make_seeds
from generation.score import Ids, decide, look_ahead
from generation.speculation import Speculation
from generation.steps import DecodeStep, FunctionStep, Step, uncached_step

ASK_FROM = 64 * 2**20  # bytes of a cache that are taken without asking how much memory there is


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
    proposed_tokens: int  # tokens that calls verified, see `generation.speculation`
    accepted_tokens: int  # those among them that the answer holds and that saved a call
    confidences: list[float]  # of each row, where the options ask for them
    decisions: list[Decision]  # of each row that chose one of several answers
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
        # Not the steps: leaving a loop over them early would close them.
        while (token := self._next()) is not None:
            yield token

    def drain(self) -> GenerationOutput:
        """Run to the end."""
        while self._next() is not None:
            pass
        assert self.result is not None, "a stream at its end has a result"
        return self.result

    def _next(self) -> Tensor | None:
        """The ids of the next step; None at the end."""
        if self.result is None:
            try:
                return next(self._steps)
            except StopIteration as end:
                self.result = end.value
        return None


@torch.no_grad()
def decode(
    step: Step,
    logits: Tensor,
    rows: Sequence[Row],
    position: CachePosition,
    speculation: Speculation | None = None,
    choose: Callable[[Sequence[Row], Tensor], Chosen] = choose,
) -> Iterator[list[int]]:
    """Yield a token of each row until all have ended, from the logits (B, V) of the prompts' last positions:
    n tokens take n - 1 calls of `step`, fewer where the proposals of a single row are right. After its end a
    row's tokens are in vain.

    A GPU is not waited for: the next step runs while tokens are read, once more in vain at the end. `choose`
    is called in place of `sampling.choose`.
    """
    if speculation is not None and len(rows) == 1 and rows[0].proposer is not None:
        yield from _decode_proposed(step, logits, rows[0], position, speculation, choose)
        return
    asynchronous = logits.device.type == "cuda" and all(row.constraint is None for row in rows)

    def next_of(chosen: Chosen) -> Chosen:
        kv_cache, start_pos = position.advance()
        return choose(rows, step(chosen.token, kv_cache, start_pos, position.offset)).send()

    chosen = choose(rows, logits).send()
    while True:
        ahead = None
        if asynchronous and rows[0].launched < rows[0].options.max_new_tokens:
            ahead = next_of(chosen)
        ids = chosen.read()
        _check(rows)
        yield ids
        if all(row.stop_reason for row in rows):
            return
        chosen = ahead or next_of(chosen)


def _check(rows: Sequence[Row]) -> None:
    """Raise the error of a row, before anyone sees a token of such logits."""
    for row in rows:
        if row.error is not None:
            raise row.error


def _decode_proposed(
    step: Step,
    logits: Tensor,
    row: Row,
    position: CachePosition,
    speculation: Speculation,
    choose: Callable[[Sequence[Row], Tensor], Chosen],
) -> Iterator[list[int]]:
    """`decode` of one row whose tokens are proposed and verified together."""
    proposed, read = list[int](), 0
    while True:
        speculation.verify([row], [proposed], [logits], choose)
        position.rewind(len(proposed) + 1 - (len(row.tokens) - read))
        for token_id in row.tokens[read:]:
            yield [token_id]
        _check([row])
        if row.stop_reason:
            return
        read = len(row.tokens)
        (proposed,) = speculation.propose([row])
        kv_cache, start_pos = position.advance(1 + len(proposed))
        if proposed:
            assert isinstance(start_pos, int) and isinstance(position.offset, int), "a single row"
            ids = [[row.tokens[-1], *proposed]]
            (logits,) = step.ragged(ids, kv_cache, [start_pos], [position.offset])
        else:
            token = torch.tensor([[row.tokens[-1]]], device=logits.device)
            logits = step(token, kv_cache, start_pos, position.offset)
        speculation.observe([row], [proposed])


def step_of(decode_step: DecodeStep | None, language_model: Decoder) -> Step:
    """The step of options or a scheduler: the eager one for None."""
    if decode_step is None:
        return Step(language_model)
    return decode_step if isinstance(decode_step, Step) else FunctionStep(decode_step, language_model)


def encode_once(model: VisionLanguage, parts: Pixels) -> Sequence[Tensor]:
    """Features of images' parts; equal ones go through `model.encode_images` once. Nothing is kept, so they
    are compared: hashing them takes longer."""
    alike: Sequence[Any] = first_alike(parts) if isinstance(parts, Tensor) else list(parts)
    rows: dict[Any, int] = {}
    order = [rows.setdefault(one, len(rows)) for one in alike]
    if len(rows) == len(order):  # without a copy
        return model.encode_images(parts)
    features = model.encode_images(parts[[order.index(row) for row in range(len(rows))]])
    # Not an index: a GPU's host would wait for its copy.
    return [features[row] for row in order]


def first_alike(parts: Tensor) -> list[int]:
    """The index of the first part that equals each of the parts.

    Different ones are told apart by a few pixels, so this costs next to nothing, on any device.
    """
    if not len(parts):
        return []
    step = max(1, parts[0].numel() // 64)
    spots = parts.flatten(1)[:, ::step].tolist()  # waits for the device
    firsts: dict[tuple[float, ...], list[int]] = {}
    alike: list[int] = []
    for index, spot in enumerate(map(tuple, spots)):
        known = firsts.setdefault(spot, [])
        alike.append(next((other for other in known if torch.equal(parts[other], parts[index])), index))
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
    lengths = prompt_lengths(model.config, input_ids, attention_mask, options.max_new_tokens)
    if options.use_cache:
        rows, answers, longest = len(lengths), options.num_return_sequences, max(lengths)
        room = longest + options.max_new_tokens - 1
        needed = kv.bytes_for(model.language_model, rows * answers, room)
        if answers > 1:  # the prompts' own cache exists beside it while it is copied
            needed += kv.bytes_for(model.language_model, rows, longest)
        if needed > ASK_FROM:
            check_fits(f"{rows * answers} x {room}", needed, model.device)

    def encode(parts: Pixels) -> Sequence[Tensor]:
        return encode_once(model, parts) if len(parts) > 1 else model.encode_images(parts)

    def embed_prompt() -> Prompt:
        x = model.embed(input_ids, pixel_values, pixel_attention_mask, encode)
        return compact(x, attention_mask, lengths, places)

    own_ids = list(input_ids)
    if attention_mask is not None:
        own_ids = [ids[real] for ids, real in zip(input_ids, attention_mask.bool())]
    places = model.places(own_ids, pixel_values)
    return TokenStream(_generate(model, embed_prompt, own_ids, lengths, options))


def _generate(
    model: VisionLanguage,
    embed_prompt: Callable[[], Prompt],
    prompt_ids: list[Tensor],
    lengths: list[int],
    options: GenerationOptions,
) -> Generator[Tensor, None, GenerationOutput]:
    """Yield (B · N,) ids: one prefill pass, then token by token through the cache."""
    language_model, answers, longest = model.language_model, options.num_return_sequences, max(lengths)
    # All positions that will be needed (the last token is never fed back and takes none), or to start with
    # what fills the step that the prompt ends in.
    room = min(longest + options.max_new_tokens - 1, kv.round_up(longest + 1, kv.STEP))
    kv_cache: KVCache = []
    watch = _Stopwatch(model.device)
    with torch.no_grad():  # a decorator would keep the arguments, and with them the pixels, to the end
        prompt = embed_prompt()
        watch.lap("vision")
        if options.use_cache:
            filled = room if answers == 1 else longest
            kv_cache = kv.allocate_for(language_model, len(lengths), filled)
        step = step_of(options.decode_step if kv_cache else None, language_model)
        chunk = options.prefill_chunk if kv_cache else None
        logits = prefill(step, prompt, kv_cache, chunk)  # (B, V)
        logits = logits.repeat_interleave(answers, 0)  # (B · N, V)
    offsets = [offset for offset in prompt.offsets for _ in range(answers)]
    del prompt
    if not kv_cache:
        step = uncached_step(language_model, lambda: embed_prompt().repeat(answers))
    else:
        if answers > 1:
            kv_cache = kv.fork(kv_cache, longest, answers, room)
        if step.records:
            step.adopt(kv_cache, longest, longest + options.max_new_tokens - 1)
        del embed_prompt
    watch.lap("prefill")

    row_lengths = tuple(length for length in lengths for _ in range(answers))
    most = longest + options.max_new_tokens - 1
    position = CachePosition(kv_cache, row_lengths, model.device, most, offsets)
    speculation = Speculation(step, model)
    rows = new_rows(prompt_ids, options)
    if len(rows) == 1 and kv_cache:
        speculation.begin(rows[0])

    def ahead(row: Row, sequences: Sequence[Ids]) -> Iterator[Tensor]:
        number, offset = rows.index(row), position.offset
        offset = offset if isinstance(offset, int) else int(offset[number])
        start = row_lengths[number] + len(row.tokens)
        return look_ahead(step, position.kv_cache, number, start, offset, sequences)

    def choose_with_answers(rows: Sequence[Row], logits: Tensor) -> Chosen:
        decide(rows, logits, ahead)
        return choose(rows, logits)

    pad, count = pad_id(model, options), 0
    for ids in decode(step, logits, rows, position, speculation, choose_with_answers):
        count += 1
        yield torch.tensor([one if len(row.tokens) >= count else pad for one, row in zip(ids, rows)])
    watch.lap("decode")
    return GenerationOutput(
        **fields_of(rows, pad, model.device),
        prompt_tokens=lengths,
        seconds=watch.seconds,
        kv_cache_bytes=kv.size_in_bytes(position.kv_cache),
        decode_steps=count - 1 - speculation.accepted,
        proposed_tokens=speculation.proposed,
        accepted_tokens=speculation.accepted,
    )


def prefill(step: Step, prompt: Prompt, kv_cache: KVCache, chunk: int | None = None) -> Tensor:
    """Compute a prompt, `chunk` positions at a time: logits (B, V) of each row's last position."""
    longest, places = max(prompt.lengths), prompt.places
    if chunk is None or chunk >= longest:
        return step.prefill(prompt.embeddings, prompt.lengths, kv_cache, 0, places)
    logits: Tensor | None = None
    for start in range(0, longest, chunk):
        end = min(start + chunk, longest)
        lengths = [min(max(length - start, 0), end - start) for length in prompt.lengths]
        part = None if places is None else places[:, :, start:end]
        ended = step.prefill(prompt.embeddings[:, start:end], lengths, kv_cache, start, part)
        ends = torch.tensor([start < length <= end for length in prompt.lengths])[:, None]
        logits = ended if logits is None else torch.where(kv.to_device(ends, ended.device), ended, logits)
    assert logits is not None, "a prompt has a position"
    return logits


def new_rows(prompt_ids: Sequence[Tensor], options: GenerationOptions) -> list[Row]:
    """A row for each answer to each prompt (T,), the answers to one prompt side by side."""
    answers = options.num_return_sequences
    seeds: list[int] | list[None] = [None] * (len(prompt_ids) * answers)
    if not options.greedy:
        seeds = make_seeds(options.seed, len(prompt_ids), answers)
    each = [ids for ids in prompt_ids for _ in range(answers)]
    return [Row(options, ids, seed) for ids, seed in zip(each, seeds, strict=True)]


def pad_id(model: VisionLanguage, options: GenerationOptions) -> int:
    """What a row that has stopped goes on with: an id that has an embedding, which not all configs name."""
    ids = (model.config.pad_token_id, *(options.stop_token_ids or ()), 0)
    return next(i for i in ids if i is not None and i < model.config.text.vocab_size)


def fields_of(rows: Sequence[Row], pad: int, device: torch.device) -> dict[str, Any]:
    """What rows that have ended say of a `GenerationOutput`."""
    longest = max(len(row.tokens) for row in rows)
    token_ids = torch.tensor([row.tokens + [pad] * (longest - len(row.tokens)) for row in rows])
    return {
        "token_ids": kv.to_device(token_ids, device),
        "lengths": [len(row.tokens) for row in rows],
        "stop_reasons": [row.stop_reason for row in rows],
        "confidences": [row.confidence for row in rows if row.options.confidence],
        "decisions": [row.decision for row in rows if row.decision is not None],
        "logprobs": [row.reports for row in rows if row.options.logprobs is not None],
    }


class _Stopwatch:
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
