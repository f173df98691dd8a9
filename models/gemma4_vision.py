"""Gemma 4's tower and projector as transformers has them: whole images in patches, which are pooled to the
positions of the text part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.language_model import apply_rope
from models.packed_vision_transformer import Arranged, PackedVisionConfig, block_order, patches_of


@dataclass(frozen=True)
class Gemma4VisionConfig(PackedVisionConfig):
    """Gemma 4's tower: learned positions of rows and of columns, `merge_size`² patches pooled to one."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    merge_size: int = 3
    temporal_patch_size: int = 1
    norm: str = "rms"
    gated_mlp: bool = True
    patch_bias: bool = False
    channels_last: bool = True
    table_side: int = 10_240
    rope_theta: float = 100.0
    clips: bool = False  # inputs and outputs of linear layers are clipped
    standardizes: bool = False  # pooled features are shifted and scaled


def bound(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value), requires_grad=False)


class ClippedLinear(nn.Module):
    """A linear layer whose input and output are clipped to stored bounds, if the config says so."""

    def __init__(self, config: Gemma4VisionConfig, width: int, out: int):
        super().__init__()
        self.linear = nn.Linear(width, out, bias=False)
        self.clips = config.clips
        if self.clips:
            self.input_min, self.output_min = bound(-torch.inf), bound(-torch.inf)
            self.input_max, self.output_max = bound(torch.inf), bound(torch.inf)

    def forward(self, x: Tensor) -> Tensor:
        if not self.clips:
            return self.linear(x)
        x = self.linear(torch.clamp(x, self.input_min.detach(), self.input_max.detach()))
        return torch.clamp(x, self.output_min.detach(), self.output_max.detach())


class Gemma4VisionBlock(nn.Module):
    def __init__(self, config: Gemma4VisionConfig):
        super().__init__()
        width, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.heads, self.eps = config.num_attention_heads, eps
        self.head_dim = width // self.heads
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(width, eps)
        self.post_feedforward_layernorm = nn.RMSNorm(width, eps)
        self.q_proj, self.k_proj = ClippedLinear(config, width, width), ClippedLinear(config, width, width)
        self.v_proj, self.o_proj = ClippedLinear(config, width, width), ClippedLinear(config, width, width)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim, eps), nn.RMSNorm(self.head_dim, eps)
        self.gate_proj, self.up_proj = (ClippedLinear(config, width, inner) for _ in range(2))
        self.down_proj = ClippedLinear(config, inner, width)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """(P, D), the patches of one image."""
        x = x + self.post_attention_layernorm(self.attend(self.input_layernorm(x), rope))
        normed = self.pre_feedforward_layernorm(x)
        inner = F.gelu(self.gate_proj(normed), approximate="tanh") * self.up_proj(normed)
        return x + self.post_feedforward_layernorm(self.down_proj(inner))

    def attend(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part(x).view(len(x), self.heads, self.head_dim) for part in projections)
        # (P, H, D_h) -> (H, P, 2, D_h / 2), whose halves are rotated by column and by row
        q, k = (part.transpose(0, 1).unflatten(-1, (2, -1)) for part in (self.q_norm(q), self.k_norm(k)))
        q, k = (apply_rope(part, *rope).flatten(-2) for part in (q, k))
        v = F.rms_norm(v, (self.head_dim,), eps=self.eps).transpose(0, 1)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], scale=1.0)[0]
        return self.o_proj(out.transpose(0, 1).flatten(1))


class Gemma4VisionTransformer(nn.Module):
    def __init__(self, config: Gemma4VisionConfig):
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Linear(
            config.num_channels * config.patch_size**2, config.hidden_size, bias=False
        )
        self.position_embedding_table = nn.Parameter(torch.empty(2, config.table_side, config.hidden_size))
        self.layers = nn.ModuleList(Gemma4VisionBlock(config) for _ in range(config.num_hidden_layers))
        if config.standardizes:
            self.std_bias = nn.Parameter(torch.zeros(config.hidden_size), requires_grad=False)
            self.std_scale = nn.Parameter(torch.ones(config.hidden_size), requires_grad=False)

    def forward(self, images: Iterable[Tensor]) -> Tensor:
        """Images (3, H, W), values in 0 … 1 -> (P, D), the positions of all, one after another."""
        return torch.cat([self.encode(image) for image in images])

    def encode(self, image: Tensor) -> Tensor:
        """(3, H, W) -> (its positions, D)."""
        given = self.arrange([image])
        x = self.patch_embedding(given.patches) + given.places
        for layer in self.layers:
            x = layer(x, given.rope)
        return self.pool(x)

    def arrange(self, images: Sequence[Tensor]) -> Arranged:
        """The input of the first block, of one image; cos and sin (P, 2, D_h / 2), by column and by row."""
        (image,), config, table = images, self.config, self.position_embedding_table
        grid = image.shape[1] // config.patch_size, image.shape[2] // config.patch_size
        order = block_order(grid, config.merge_size).to(image.device)
        places = table[0, order[:, 1]] + table[1, order[:, 0]]
        dim = config.hidden_size // config.num_attention_heads // 2
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, device=image.device).float() / dim)
        angles = order.flip(1)[..., None].float() * frequencies  # (P, 2, D_h / 4)
        angles = torch.cat((angles, angles), dim=-1)
        rope = angles.cos().to(table.dtype), angles.sin().to(table.dtype)
        patches, count = 2 * (patches_of(image, config) - 0.5), [len(order)]
        return Arranged(patches, places, rope, count, count, None)

    def pool(self, x: Tensor) -> Tensor:
        """(P, D) patches, block by block -> the mean of each block, times √D."""
        blocks = x.float().unflatten(0, (-1, self.config.merge_size**2))
        pooled = blocks.mean(1).to(x.dtype).float() * self.config.hidden_size**0.5
        if self.config.standardizes:
            pooled = (pooled - self.std_bias.detach().float()) * self.std_scale.detach().float()
        return pooled.to(x.dtype)


class Gemma4Projector(nn.Module):
    def __init__(self, config: Gemma4VisionConfig, width: int):
        super().__init__()
        self.eps = config.norm_eps
        self.embedding_projection = nn.Linear(config.hidden_size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding_projection(F.rms_norm(x, x.shape[-1:], eps=self.eps))
