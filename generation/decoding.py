"""From prompts to answers: one pass over the prompts, then one token at a time. This is the reference.

    logits = prefill(step, prompt, kv_cache)              # (B, V): of the last position of each prompt
    for ids in decode_n(step, rows, logits, kv_cache, start_pos):      # one token of each row, until all have
        ...                                                            # ended

The parts: a *step* computes logits (`steps.py`), *rows* say how their tokens are chosen and hold those that
were (`sampling.py`), and the *cache* holds keys and values of all positions so far (`kv_cache.py`). The loop
allocates the cache, and the model's layers write it, in place, at the slots that the loop names.

**Positions.** The loop owns them; neither the model nor the cache counts. `start_pos` is the slot of the
first token that a pass is given, which is how many slots of the row are filled. `prefill` fills slots 0 …
L - 1 of each row, all at once or in chunks, each of which sees all slots before it, and gives the logits of
the first new token. `choose` makes a token of logits; fed at `start_pos`, it gives the logits of the token
after it. So n tokens take one prefill and n - 1 steps; the last token is never fed, and takes no slot.

**Ragged rows.** Rows of one length share an int `start_pos` and need no mask anywhere. Rows of different
lengths have a tensor (B,) of them. The slots after the end of a shorter row may hold garbage, of its padding,
that no query of a token sees: prefill is causal, and each slot is overwritten by the step that first looks at
it. Layers that keep running sums get each row's length, and add no padding to them.

**Ends.** A row ends with a stop token, which belongs to its answer ("stop"), or with token number
`max_new_tokens` ("length"): `Row.take` notes it. The row is computed on with the others, in vain, until the
last one has ended; in the output the pad id stands for those tokens.

Where images have rotary places of their own (Qwen-VL), the place of a token after the prompt is its slot plus
an `offset` of its row; elsewhere the offset is 0.

A grammar or another constraint of a row (`protocol.Constraint`) enters in `choose`, before a token is drawn.
`generation/scheduler.py` runs the same steps and the same `choose` for rows that come and go, with prompts
that share what they have in common and GPUs that run ahead. Tokens that a row's proposer
(`protocol.Proposer`) guesses are verified there, several in one pass; the loop here decodes one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.kv_cache import KVCache
from generation.memory import check_fits
from generation.options import GenerationOptions
from generation.output import GenerationOutput, Stopwatch, TokenStream, column_of, fields_of, pad_id
from generation.prompts import Prompt, compact, prompt_lengths
from generation.protocol import Pixels, VisionLanguage
from generation.recorded import alike, recorded
from generation.sampling import Chosen, Row, choose, new_rows
from generation.score import decide
from generation.steps import Step, UncachedStep

ASK_FROM = 64 * 2**20  # bytes of a cache that are taken without asking how much memory there is


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
        here = step.prefill(prompt.embeddings[:, start:end], lengths, kv_cache, start, part)
        # A row's logits mean something in the chunk that has its last position: those are kept.
        ends_here = torch.tensor([start < length <= end for length in prompt.lengths])[:, None]
        logits = here if logits is None else torch.where(kv.to_device(ends_here, here.device), here, logits)
    assert logits is not None, "a prompt has a position"
    return logits


@torch.no_grad()
def decode_n(
    step: Step,
    rows: Sequence[Row],
    logits: Tensor,
    kv_cache: KVCache,
    start_pos: int | Tensor,
    offset: int | Tensor = 0,
) -> Iterator[list[int]]:
    """Yield a token of each row until all have ended, from the logits (B, V) of the first ones. After its end
    the tokens of a row mean nothing. Raises the error of a row, such as logits that are not finite."""

    def at(number: int) -> tuple[int, int, int]:
        start, ahead = (n if isinstance(n, int) else int(n[number]) for n in (start_pos, offset))
        return number, start, ahead

    def each() -> Iterator[Chosen]:
        nonlocal logits, start_pos
        while True:
            if any(row.constraint is not None for row in rows):
                decide(rows, logits, step, kv_cache, at)
            yield (chosen := choose(rows, logits))
            logits = step(chosen.token, kv_cache, start_pos, offset)  # of the tokens after these
            start_pos = start_pos + 1

    def each_recorded() -> Iterator[Chosen]:
        return recorded(step, rows, choose(rows, logits), kv_cache, [*map(at, range(len(rows)))])

    for chosen in each_recorded() if step.records and alike(rows) else each():
        ids = chosen.read()
        for row in rows:
            if row.error is not None:
                raise row.error
        yield ids
        if all(row.stop_reason for row in rows):
            return


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
    own_ids = list(input_ids)
    if attention_mask is not None:
        own_ids = [ids[real] for ids, real in zip(input_ids, attention_mask.bool())]
    places = model.places(own_ids, pixel_values)

    def embed_prompt() -> Prompt:
        x = model.embed(input_ids, pixel_values, pixel_attention_mask)
        return compact(x, attention_mask, lengths, places)

    return TokenStream(_generate(model, embed_prompt, own_ids, lengths, options))


def _generate(
    model: VisionLanguage,
    embed_prompt: Callable[[], Prompt],
    prompt_ids: list[Tensor],
    lengths: list[int],
    options: GenerationOptions,
) -> Generator[Tensor, None, GenerationOutput]:
    """Yield (B · N,) ids: prefill, then decode."""
    language_model, answers, longest = model.language_model, options.num_return_sequences, max(lengths)
    room = longest + options.max_new_tokens - 1  # slots of a row; the last token is never fed and takes none
    kv_cache: KVCache = []
    watch = Stopwatch(model.device)
    with torch.no_grad():  # a decorator would keep the arguments, and with them the pixels, to the end
        prompt = embed_prompt()
        watch.lap("vision")
        if options.use_cache:
            kv_cache = kv.allocate_for(language_model, len(lengths), room if answers == 1 else longest)
        step: Step = (options.decode_step if kv_cache else None) or Step(language_model)
        logits = prefill(step, prompt, kv_cache, options.prefill_chunk if kv_cache else None)  # (B, V)
        logits = logits.repeat_interleave(answers, 0)  # (B · N, V)
    offsets = [offset for offset in prompt.offsets for _ in range(answers)]
    del prompt
    if not kv_cache:
        step = UncachedStep(language_model, embed_prompt)
    else:
        if answers > 1:
            kv_cache = kv.fork(kv_cache, longest, answers, room)
        del embed_prompt
    watch.lap("prefill")

    starts = [length for length in lengths for _ in range(answers)]
    rows, pad, count = new_rows(prompt_ids, options), pad_id(model, options), 0
    at = kv.per_row(starts, model.device), kv.per_row(offsets, model.device)
    for _ in decode_n(step, rows, logits, kv_cache, *at):
        count += 1
        yield column_of(rows, count - 1, pad)
    watch.lap("decode")
    return GenerationOutput(
        **fields_of(rows, pad, model.device),
        prompt_tokens=lengths,
        seconds=watch.seconds,
        kv_cache_bytes=kv.size_in_bytes(kv_cache),
        decode_steps=count - 1,
    )
