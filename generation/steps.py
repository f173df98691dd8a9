"""Steps: what the token loops call for the logits of the next token.

    step = step_of(options.decode_step, model.language_model)      # the eager one, unless another is given
    logits = step.prefill(embeddings, lengths, kv_cache, 0)        # (B, V)
    logits = step(token_ids, kv_cache, start_pos)                  # (B, V)

`Step` itself is the eager one, in PyTorch's own operations; `generation/fast/` has faster ones, which derive
from it. The slow reference, without a cache, is here as well.

A `Proposer` brings several tokens from one pass: it proposes the next ones, and the model verifies
them together.

    proposer = PromptLookup(input_ids[0], image_token_id)
    for token in decode(step, logits, sampler, position, max_new_tokens, proposer): ...

A decode step of one row reads all weights for one token; a pass over several positions reads them once for
all. At each position the sampler draws from that position's logits, with the random numbers, penalties and
stop ids that it would have had without proposals. Proposals that equal the draws cost no pass of their own;
the first draw that differs is the next token, and what lies in the cache after it is free again. So proposals
change when tokens come and never which, as long as a pass over several positions gives the bits of single
steps. Steps say so themselves (`Step.same_bits`): where a product of several positions is rounded
otherwise, a tie within that rounding may be decided otherwise too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from generation.kv_cache import CachePosition, KVCache, Prompt, to_device
from generation.options import GenerationOptions
from generation.protocol import Constraint, Decoder
from generation.sampling import Sampler

MOST = 8  # ids proposed at a time
SIZES = (3, 2)  # of the n-grams that are looked up, the longest first

DecodeStep = Callable[[Tensor, KVCache, "int | Tensor"], Tensor]


class Step:
    """A decode step, and what else its maker knows to compute. What is not overridden is eager.

    same_bits: whether `chunk` gives, to the bit, the logits of single steps. A product of several positions
        may round otherwise than that of one.
    chunks: whether it can run several positions of a row at once, so that proposed tokens are verified
        together.
    alone: whether `prefill` computes each row by itself: padding costs nothing, and company changes no bit.
    loops: whether `decode` runs the whole loop, to sample tokens where the logits are made.
    records: whether `recorded` is there.
    """

    same_bits, chunks, alone, loops, records = False, True, False, False, False

    def __init__(self, language_model: Decoder):
        self._language_model = language_model

    def __call__(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        """(B, 1) token ids -> (B, V) logits; the cache gains a position in each row."""
        return self.chunk(token_ids, kv_cache, start_pos)[:, -1]

    def chunk(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        """(B, T) token ids -> (B, T, V) logits of each position; the cache gains T positions in each row."""
        x = self._language_model.embed_tokens(token_ids)  # (B, T, D)
        hidden, _ = self._language_model(x, kv_cache=kv_cache, start_pos=start_pos)
        return self._language_model.logits(hidden)

    def prefill(
        self, embeddings: Tensor, lengths: Sequence[int], kv_cache: KVCache, start_pos: int | Tensor = 0
    ) -> Tensor:
        """(B, L, D) embeddings, of which each row's first `lengths` are real -> (B, V) logits of its last
        position; the cache, if there is one, gains `lengths` positions in each row."""
        language_model = self._language_model
        hidden, _ = language_model(embeddings, kv_cache=kv_cache or None, start_pos=start_pos)  # (B, L, D)
        if min(lengths) == max(lengths):
            return language_model.logits(hidden[:, max(lengths) - 1])
        last = to_device(torch.tensor(lengths) - 1, hidden.device)[:, None, None]
        return language_model.logits(hidden.gather(1, last.expand(-1, 1, hidden.shape[2]))[:, 0])

    def decode(
        self, logits: Tensor, sampler: Sampler, position: CachePosition, max_new_tokens: int
    ) -> Iterator[Tensor]:
        """What `generation.decoding.decode` does, as far as a caller can see.

        It calls `position.reserve` before each step, and leaves in the sampler which rows have stopped after
        how many tokens. It may write into the cache after these, and may yield tokens on the host.
        """
        raise NotImplementedError

    def recorded(
        self,
        token: Tensor,
        kv_cache: KVCache,
        positions: Tensor,
        choose: Callable[[Tensor], None],
        state: list[Tensor],
        key: tuple,
    ) -> Callable[[], None]:
        """What runs a step, and then `choose` with its logits (B, V), each time it is called.

        Args:
            token, positions: (B, 1) ids and where they go, (B,): buffers that stay, read anew by each run.
            kv_cache: whose buffers stay; a view of it must hold every position that is run.
            choose: operations on the device that read nothing back.
            state: every tensor that `choose` changes, which recording must not.
            key: equal only where `choose` does the same to the same tensors.

        Ask again where any of these or the weights may have changed; what is known is not recorded again.
        """
        raise NotImplementedError


class FunctionStep(Step):
    """A function in place of the single step, which knows nothing else."""

    chunks = False

    def __init__(self, function: DecodeStep, language_model: Decoder):
        super().__init__(language_model)
        self._function = function

    def __call__(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        return self._function(token_ids, kv_cache, start_pos)


def step_of(decode_step: DecodeStep | None, language_model: Decoder) -> Step:
    """The step of options or a scheduler: the eager one for None."""
    if decode_step is None:
        return Step(language_model)
    return decode_step if isinstance(decode_step, Step) else FunctionStep(decode_step, language_model)


def uncached_step(language_model: Decoder, embed_prompt: Callable[[], Prompt]) -> Step:
    """The slow reference: no cache; images, prompt and all tokens so far are recomputed for each token."""
    new_ids: list[Tensor] = []

    def step(token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        new_ids.append(token_ids)
        prompt, new = embed_prompt(), language_model.embed_tokens(torch.cat(new_ids, 1))  # (B, n, D)
        count = new.shape[1]
        x = F.pad(prompt.embeddings, (0, 0, 0, count))  # (B, L + n, D)
        slots = prompt.lengths_tensor()[:, None] + torch.arange(count, device=x.device)  # (B, n)
        rows = torch.arange(x.shape[0], device=x.device)
        x[rows[:, None], slots] = new  # after each row's real positions
        hidden, _ = language_model(x)
        return language_model.logits(hidden[rows, slots[:, -1]])

    return FunctionStep(step, language_model)


class Proposer:
    """Proposes the next tokens of one row, for one answer.

    proposed: ids that were verified; accepted: those that saved a pass.
    """

    proposed = 0
    accepted = 0

    def propose(self, new_ids: list[int]) -> list[int]:
        """The ids that may follow, none or any number, after `new_ids`, which came since the last call: one
        more than were accepted of its ids."""
        raise NotImplementedError

    def observe(self, positions: int, seconds: float) -> None:
        """A pass over so many positions, the proposals and one more, took so long."""


def decode_proposed(
    step: Step,
    logits: Tensor,
    sampler: Sampler,
    position: CachePosition,
    max_new_tokens: int,
    proposer: Proposer,
) -> Iterator[Tensor]:
    """`generation.decoding.decode` of one row with a proposer."""
    proposed: list[int] = []
    columns: Sequence[Tensor] = (logits,)  # (1, V) for each position of the last pass
    while True:
        new_ids: list[int] = []
        for place, column in enumerate(columns):
            token = sampler.sample(column)
            finished = sampler.finished()
            proposer.accepted += place > 0
            yield token
            max_new_tokens -= 1
            if finished or not max_new_tokens:
                sampler.check_finite()
                return
            new_ids.append(int(token))
            if place == len(proposed) or new_ids[place] != proposed[place]:
                break
        if len(new_ids) <= len(proposed):
            position.rewind(len(proposed) + 1 - len(new_ids))
        # The last token is never fed back, so that of n to come at most n - 1 are worth a proposal.
        proposed = proposer.propose(new_ids)[: max_new_tokens - 1]
        kv_cache, start_pos = position.advance(1 + len(proposed))
        began = time.perf_counter()
        if proposed:
            token_ids = torch.cat((token, token.new_tensor([proposed])), 1)  # (1, 1 + n)
            columns = step.chunk(token_ids, kv_cache, start_pos).unbind(1)
        else:
            columns = (step(token, kv_cache, start_pos),)
        proposer.observe(1 + len(proposed), time.perf_counter() - began)
        proposer.proposed += len(proposed)


class ConstrainedSampler(Sampler):
    """A `Sampler` each of whose rows has a constraint of its own. It changes the logits, and
    reads every token from the device."""

    def __init__(self, options: GenerationOptions, *args):
        super().__init__(options, *args)
        assert options.constraint is not None, "without a constraint a Sampler does"
        self.constraints = [options.constraint() for _ in self.stopped]

    def sample(self, logits: Tensor) -> Tensor:
        for scores, constraint in zip(logits, self.constraints, strict=True):
            constraint.close(scores)
        reports = self.reports
        own = None if reports is None else logits.float().log_softmax(-1)
        forced = [bool(reports and reports.steps and one.forced()) for one in self.constraints]
        alone = self.options.likeliest and self.sums is None  # confidences are among what is allowed
        best = logits.argmax(-1).tolist() if alone else [None] * len(logits)
        for scores, constraint, token_id in zip(logits, self.constraints, best, strict=True):
            if token_id is None or not constraint.allows(token_id):  # else a mask would change nothing
                constraint.mask(scores)
        token = self.choose(logits)
        if reports is not None and own is not None:
            reports.note(own, token, forced)
        for (token_id,), constraint in zip(token.tolist(), self.constraints, strict=True):
            constraint.accept(token_id)
        return token


def sampler_for(options: GenerationOptions, *args) -> Sampler:
    """What chooses the tokens of these answers: a `Sampler(options, *args)`, with its constraints."""
    return Sampler(options, *args) if options.constraint is None else ConstrainedSampler(options, *args)


class ForcedTokens(Proposer):
    """Proposes what a constraint forces, which is always right."""

    def __init__(self, constraint: Constraint):
        self._constraint = constraint

    def propose(self, new_ids: list[int]) -> list[int]:
        return self._constraint.forced()


def forced_tokens(sampler: Sampler) -> Proposer | None:
    """What proposes the forced tokens of a single row; None where there are no constraints."""
    constraints = sampler.constraints if isinstance(sampler, ConstrainedSampler) else ()
    return ForcedTokens(constraints[0]) if len(constraints) == 1 else None


class PromptLookup(Proposer):
    """Proposes what followed the last time that the answer's last tokens stood in the prompt or the answer.

    Args:
        prompt_ids: (T,) of the row.
        image_token_id: is neither looked up nor proposed; None where images have no ids.
    """

    def __init__(self, prompt_ids: Tensor, image_token_id: int | None):
        self._prompt_ids, self._image_token_id = prompt_ids, image_token_id
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where the token after the latest n-gram stands
        self._since_image = 0  # tokens at the end without an image

    def propose(self, new_ids: list[int]) -> list[int]:
        if not self._ids:  # not earlier: the first token does not wait for it
            self._append(self._prompt_ids.tolist())
        self._append(new_ids)
        for size in SIZES:
            start = self._after.get(tuple(self._ids[-size:]))
            if start is not None:
                break
        else:
            return []
        # What is copied may run into its own beginning: a short period goes on and on.
        ids = self._ids[start : start + MOST]
        while len(ids) < MOST:
            ids.append(ids[start + len(ids) - len(self._ids)])
        return ids[: ids.index(self._image_token_id)] if self._image_token_id in ids else ids

    def _append(self, ids: list[int]) -> None:
        for token_id in ids:
            for size in SIZES:
                if size <= self._since_image:
                    self._after[tuple(self._ids[-size:])] = len(self._ids)
            self._ids.append(token_id)
            self._since_image = 0 if token_id == self._image_token_id else self._since_image + 1


class WhilePaying(Proposer):
    """Another's proposals, as many at a time as bring the most tokens a second, by what passes have taken and
    how many proposals were right so far.

    All times are in single steps. What was lost by wrong proposals stays below `LOSS` of the answer, with
    `HEAD_START` tokens for its beginning; what was gained may be risked again, up to `STAKE`.
    """

    LOSS, HEAD_START, STAKE = 0.01, 16, 2.0
    ASSUMED = 0.2  # what a position more costs before any pass with one was seen
    FORGETTING = 0.9  # weight of what a pass showed after each one that follows

    def __init__(self, proposer: Proposer):
        self._proposer = proposer
        self._recent: dict[int, deque[float]] = {}  # seconds of the last passes over so many positions
        self._seconds: dict[int, float] = {}  # their medians
        self._positions = 1  # of the last pass
        self._tokens, self._gained = 0, 0.0
        self._right = self._wrong = 1.0

    def observe(self, positions: int, seconds: float) -> None:
        self._positions = positions
        recent = self._recent.setdefault(positions, deque(maxlen=5))
        recent.append(seconds)
        self._seconds[positions] = sorted(recent)[len(recent) // 2]

    def propose(self, new_ids: list[int]) -> list[int]:
        self._tokens += len(new_ids)
        if self._positions > 1:
            self._settle(len(new_ids) - 1)
        ids = self._proposer.propose(new_ids)
        if not ids or 1 not in self._seconds:
            return []
        allowed = self._gained + self.LOSS * (self._tokens + self.HEAD_START)
        share = self._right / (self._right + self._wrong)
        best, best_rate, expected = 0, 0.0, 1.0
        for count in range(1, len(ids) + 1):
            expected += share**count
            cost = self._cost(1 + count)
            if cost - 1 > allowed:
                break
            if expected / cost > best_rate:
                best, best_rate = count, expected / cost
        # Where none would pay, one proposal finds out whether that has changed.
        return ids[: best if best_rate > 1 else min(best, 1)]

    def _settle(self, accepted: int) -> None:
        """Account for the last pass."""
        gained = self._gained + 1 + accepted - self._cost(self._positions)
        self._gained = min(gained, self.STAKE)
        self._right = self._right * self.FORGETTING + accepted
        self._wrong = self._wrong * self.FORGETTING + (accepted < self._positions - 1)

    def _cost(self, positions: int) -> float:
        """Single steps that a pass over so many positions takes; of those never seen, on the line through the
        nearest that was."""
        seen = min(self._seconds, key=lambda other: (other == 1, abs(other - positions)))
        each = (self._seconds[seen] / self._seconds[1] - 1) / (seen - 1) if seen > 1 else self.ASSUMED
        return 1 + max(each, 0.0) * (positions - 1)


def prompt_lookup(
    options: GenerationOptions, input_ids: Tensor, image_token_id: int | None
) -> Proposer | None:
    """What proposes tokens of the answer to a prompt (B, T), as `options.lookup` says; None for nobody, and
    for several rows and where a constraint proposes."""
    several = len(input_ids) * options.num_return_sequences != 1
    if options.lookup == "off" or options.constraint is not None or several:
        return None
    lookup = PromptLookup(input_ids[0], image_token_id)
    if options.lookup == "on":
        return lookup
    step = options.decode_step
    return WhilePaying(lookup) if isinstance(step, Step) and step.same_bits else None
