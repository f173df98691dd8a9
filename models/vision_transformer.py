"""Pixels to embeddings among the text's: a vision transformer, then a projector.

The transformer is SigLIP's (arXiv:2303.15343), or by fields of its config has InternViT's parts: a class
token, layer scale (arXiv:2103.17239), other norms. The projector is a linear layer or an MLP.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import VisionConfig, VLMConfig


def make_norm(config: VisionConfig) -> nn.LayerNorm | nn.RMSNorm:
    kind = nn.RMSNorm if config.norm_type == "rms_norm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.layer_norm_eps)


class VisionAttention(nn.Module):
    """Bidirectional multi-head attention over the patches of one tile."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.out_proj = nn.Linear(width, width)
        self.q_norm = nn.RMSNorm(width, config.layer_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(width, config.layer_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        # (N, P, D) -> (N, heads, P, D / heads)
        q, k, v = (one.view(batch, length, self.num_heads, -1).transpose(1, 2) for one in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).reshape(batch, length, width))


class VisionMLP(nn.Module):
    def __init__(self, width: int, inner: int, act: str = "gelu_pytorch_tanh"):
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.approximate = "tanh" if act == "gelu_pytorch_tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class VisionBlock(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        width, scaled = config.hidden_size, config.layer_scale
        self.layer_norm1 = make_norm(config)
        self.self_attn = VisionAttention(config)
        self.layer_scale1 = nn.Parameter(torch.ones(width)) if scaled else None
        self.layer_norm2 = make_norm(config)
        self.mlp = VisionMLP(width, config.intermediate_size, config.hidden_act)
        self.layer_scale2 = nn.Parameter(torch.ones(width)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        added = self.self_attn(self.layer_norm1(x))
        x = x + (added if self.layer_scale1 is None else self.layer_scale1 * added)
        added = self.mlp(self.layer_norm2(x))
        return x + (added if self.layer_scale2 is None else self.layer_scale2 * added)


class VisionTransformer(nn.Module):
    """Patch convolution, learned positions, pre-norm blocks and a final norm, if the config has one; no
    pooling."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
        )
        self.class_token = nn.Parameter(torch.zeros(1, config.hidden_size)) if config.class_token else None
        self.position_embedding = nn.Embedding(config.num_patches + config.class_token, config.hidden_size)
        self.layers = nn.ModuleList(VisionBlock(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = make_norm(config) if config.last_norm else None

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(N, C, M, M) normalised tiles of `image_size` pixels -> (N, P, D_v) features, patches row-major."""
        if pixel_values.shape[-2:] != (self.config.image_size,) * 2:
            raise ValueError(
                f"expected tiles of {self.config.image_size} pixels a side, got {tuple(pixel_values.shape)}: "
                "resize or split the image with the checkpoint's processor"
            )
        pixel_values = pixel_values.to(self.patch_embedding.weight.dtype)  # the text part may have another
        x = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)  # (N, D, h, w) -> (N, P, D)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(len(x), 1, -1), x), dim=1)  # (N, 1 + P, D)
        x = x + self.position_embedding.weight
        for layer in self.layers:
            x = layer(x)
        x = x if self.class_token is None else x[:, 1:]
        return x if self.post_layernorm is None else self.post_layernorm(x)


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


class MLPProjector(nn.Module):
    """(N, P, D_v) patch features -> (N, P / s², D), as InternVL has it: pixel shuffle, a norm, two layers."""

    def __init__(self, config: VLMConfig):
        super().__init__()
        self.scale_factor = config.scale_factor
        folded, width = config.vision.hidden_size * config.scale_factor**2, config.text.hidden_size
        self.norm = nn.LayerNorm(folded)
        self.fc1 = nn.Linear(folded, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(pixel_shuffle(x, self.scale_factor)))))
