"""What generation needs of a model; `models` has the implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor


class CutParts(Protocol):
    """Parts of one prompt's images (tiles) that are not numbers yet, and know which are equal; `data.tiles`
    has them. Where pixels are expected they stand for a tensor (N, 3, H, W)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def digests(self) -> list[bytes]: ...
    @property
    def keys(self) -> list[bytes]: ...  # of what a part leaves in a cache: its digest and its time in a video
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...  # hashable, with `pixels` (3, H, W)
    def __getitem__(self, which: slice | Sequence[int], /) -> CutParts: ...
    def numel(self) -> int: ...
    def to(
        self, device: torch.device, dtype: torch.dtype, /
    ) -> Sequence[Tensor]: ...  # a tensor if of one size


Pixels: TypeAlias = Tensor | CutParts


class VisionLanguage(Protocol):
    """A language model with images.

    config: a `models.config.VLMConfig`, as wherever generation/ says config.
    language_model: a `models.language_model.LanguageModel`. It embeds ids (B, T); called with embeddings
        (B, T, D) it gives hidden states and writes a cache as its `cache_layout` has it; `logits` is a call
        of its own. Its norm's weight says where it is.
    """

    config: Any
    language_model: Any

    @property
    def device(self) -> torch.device: ...

    @staticmethod
    def parts_of_rows(
        pixel_values: Pixels, pixel_attention_mask: Tensor | None
    ) -> tuple[Pixels, list[int] | None]: ...

    def positions(self, parts: Pixels) -> list[int]: ...
    def places(self, prompts: Sequence[Tensor], parts: Pixels | None) -> list[tuple[Tensor, int]] | None: ...
    def check_placeholders(
        self, input_ids: Tensor, positions: list[int], row_parts: list[int] | None = None
    ) -> None: ...

    def embed(
        self,
        input_ids: Tensor,
        pixel_values: Pixels | None,
        pixel_attention_mask: Tensor | None,
    ) -> Tensor: ...
    def encode_images(self, pixel_values: Pixels) -> Sequence[Tensor]: ...
    def place_features(self, input_ids: Tensor, features: Tensor | None) -> Tensor: ...


class Constraint(Protocol):
    """What may stand in one answer, token by token. Where something is forced, its first token alone is
    allowed: so an answer is the same whether forced tokens are taken one at a time or together.

    For each token `close` comes first, with the model's logits; `allows` and `mask` are about what it leaves.

    thinking: whether the tokens so far are no answer yet. full: the answer has as many as it may have.
    choice: the choice among whole answers that comes next, or was made (`generation.score.Choice`); None
        where tokens are chosen one by one.
    """

    @property
    def thinking(self) -> bool: ...
    @property
    def full(self) -> bool: ...
    @property
    def choice(self) -> Any: ...

    def close(self, scores: Tensor) -> None:
        """Move the probability of the stop tokens, in scores (V,), in place, to the token that closes what is
        still open in the answer (a list, a block of thinking). The other probabilities stay as they are."""

    def allows(self, token_id: int) -> bool:
        """Whether this may be the next token. It costs less than `mask`, which leaves just these."""

    def mask(self, scores: Tensor) -> None:
        """Set scores (V,), of the next token, to -inf where a token is not allowed. A ConstraintError says
        why nothing can be."""

    def accept(self, token_id: int) -> None:
        """The next token is this one."""

    def forced(self) -> list[int]:
        """The tokens that must come next, none or several."""


class Proposer(Protocol):
    """Proposes the next tokens of one row, for one answer; `generation.speculation.PromptLookup` is one."""

    def propose(self, tokens: list[int], alone: bool) -> list[int]:
        """The ids that may follow the answer's tokens so far, none or any number; `alone`: whether the next
        pass is of no other row."""
