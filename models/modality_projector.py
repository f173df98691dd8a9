"""Patch features to language-model embeddings: pixel shuffle, then one linear layer."""

from __future__ import annotations

from torch import Tensor, nn

from models.config import VLMConfig


def pixel_shuffle(x: Tensor, scale: int) -> Tensor:
    """Fold each scale × scale square of patches into one token.

    Args:
        x: (N, P, D), P a square number, row-major.
        scale: patches folded along each side.

    Returns:
        (N, P / scale², D · scale²).
    """
    n, patches, width = x.shape
    side = int(patches**0.5)
    if side * side != patches or side % scale:
        raise ValueError(f"pixel shuffle by {scale} needs a square grid it divides, got {patches} patches")
    x = x.view(n, side // scale, scale, side // scale, scale, width)
    x = x.permute(0, 1, 3, 2, 4, 5)  # (N, h, w, s, s, D)
    return x.reshape(n, patches // scale**2, width * scale**2)


class ModalityProjector(nn.Module):
    """(N, P, D_v) patch features -> (N, P / s², D) embeddings among the text's."""

    def __init__(self, config: VLMConfig):
        super().__init__()
        self.scale_factor = config.scale_factor
        self.proj = nn.Linear(
            config.vision.hidden_size * config.scale_factor**2,
            config.text.hidden_size,
            bias=config.projector_bias,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(pixel_shuffle(x, self.scale_factor))
