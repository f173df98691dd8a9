"""Optimizers, parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Coefficients of the quintic Newton-Schulz iteration, from Keller Jordan's Muon:
# https://kellerjordan.github.io/posts/muon
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices, approximately: (N, m, n) -> (N, m, n), in the input's dtype.

    torch.optim.Muon runs this in bfloat16, which most CPUs multiply ten times slower than float32.
    """
    a, b, c = _QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(Optimizer):
    """Momentum, orthogonalized: matrices of one shape are updated as one batch.

    The update is scaled by 0.2 · sqrt(max(m, n)), which gives it AdamW's typical size (arXiv:2502.16982).
    """

    def __init__(self, params, lr: float = 2e-3, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(tuple(parameter.shape), []).append(parameter)
            for (rows, columns), parameters in shapes.items():
                updates = []
                for parameter in parameters:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(momentum, group["momentum"]))  # Nesterov
                scale = group["lr"] * 0.2 * math.sqrt(max(rows, columns))
                for parameter, update in zip(parameters, orthogonalize(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def build_optimizers(modules: nn.Module, lr: float, matrix_lr: float, weight_decay: float) -> list[Optimizer]:
    """Muon for the matrices inside blocks and projector, AdamW for all else; norms and biases never decay."""
    matrices, tables, vectors = [], [], []
    for name, parameter in modules.named_parameters():
        if parameter.dim() == 2 and (".layers." in name or "projector" in name):
            matrices.append(parameter)
        elif parameter.dim() >= 2:
            tables.append(parameter)
        else:
            vectors.append(parameter)
    adamw = torch.optim.AdamW(
        [{"params": tables, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.98),
        fused=True,
    )
    return [adamw, Muon(matrices, lr=matrix_lr, weight_decay=weight_decay)]


def schedule(step: int, steps: int, warmup: int, decay_fraction: float, second_start: int = 0) -> float:
    """Share of the peak rate at `step` of `steps`: linear warm-up, a plateau, a cosine to zero.

    `second_start` warms up once more there (a new stage whose gradients are new).
    """
    since = step - second_start if second_start and step >= second_start else step
    warm = min(1.0, (since + 1) / max(warmup, 1))
    decay_start = steps * (1 - decay_fraction)
    if step < decay_start:
        return warm
    progress = min(1.0, (step - decay_start) / max(steps - decay_start, 1))
    return warm * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def update_average(average: dict[str, Tensor], model: nn.Module, decay: float, step: int) -> None:
    """Exponential moving average of the weights, started gently so that early noise is forgotten."""
    decay = min(decay, (1 + step) / (10 + step))
    for name, parameter in model.named_parameters():
        average[name].lerp_(parameter, 1 - decay)
