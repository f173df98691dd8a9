"""Between two decode steps: logits to tokens, and who has stopped."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from generation.sampling import make_seeds, sample, uniforms

if TYPE_CHECKING:
    from generation.decoding import GenerationOptions


class NotFiniteError(ValueError):
    """Logits that hold NaN or infinity: no token drawn from them means anything.

    Args:
        token: the new token that they were for, counted from 1.
    """

    def __init__(self, token: int):
        super().__init__(
            f"the model's logits are not finite (NaN or infinity) for new token {token}: broken weights, or "
            "a dtype of too small a range"
        )
        self.token = token

    def __reduce__(self):
        return type(self), (self.token,)


class Chooser:
    """What happens between two decode steps: a token for each row, and who has stopped. All on the device,
    in tensors that are changed in place and never replaced.

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
        seeds = [0] * prompts * answers if options.greedy else make_seeds(options.seed, prompts, answers)
        self.seeds = torch.tensor(seeds, device=device)
        self.drawn = torch.zeros((), dtype=torch.int64, device=device)
        self.stop_ids = torch.tensor(options.stop_token_ids, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(prompts * answers, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(prompts * answers, dtype=torch.int64, device=device)
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        self.sound = torch.zeros((), dtype=torch.int64, device=device)  # choices before the first not finite

    @property
    def state(self) -> list[Tensor]:
        """All that `choose` changes, and the seeds."""
        state = [self.seeds, self.drawn, self.stopped, self.lengths, self.finite, self.sound]
        return state if self.seen is None else [*state, self.seen]

    @property
    def kind(self) -> tuple:
        """Equal for choosers that differ in their state only."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop_token_ids")
        return self.pad_id, *(getattr(self.options, name) for name in names)

    def like(self) -> Chooser:
        """Another chooser of this kind, with a state of its own."""
        other = copy(self)
        for name in ("seeds", "drawn", "stopped", "lengths", "finite", "sound", "seen"):
            value = getattr(self, name)
            setattr(other, name, None if value is None else value.clone())
        return other

    def load(self, other: Chooser) -> None:
        """Take over the state of a chooser of the same kind and as many rows."""
        for mine, theirs in zip(self.state, other.state, strict=True):
            mine.copy_(theirs)

    def choose(self, logits: Tensor) -> Tensor:
        """(B, V) logits -> (B, 1) token ids, the pad id for rows that had stopped."""
        # The maximum is NaN where anything is, and +inf where anything is; -inf alone is a banned token.
        self.finite &= logits.amax(-1).isfinite().all()
        self.sound += self.finite
        uniform = None if self.options.greedy else uniforms(self.seeds, self.drawn)
        token = sample(logits, self.options, uniform, self.seen).masked_fill_(
            self.stopped[:, None], self.pad_id
        )
        self.drawn += 1
        self.lengths += ~self.stopped
        self.stopped |= (token == self.stop_ids).any(-1)
        if self.seen is not None:
            self.seen.scatter_(1, token, True)
        return token

    def finished(self) -> bool:
        """Whether every row has stopped: the loop's one read-back, and none at all without stop ids, where
        `check_finite` at the end has to do.

        Raises:
            NotFiniteError: before anyone sees a token drawn from such logits.
        """
        if self.stop_ids.numel() == 0:
            return False
        if not (self.stopped.all() | ~self.finite).item():
            return False
        self.check_finite()
        return True

    def check_finite(self) -> None:
        """Raises NotFiniteError if any logits so far held NaN or infinity."""
        if not self.finite.item():
            raise NotFiniteError(int(self.sound) + 1)
