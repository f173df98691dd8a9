"""Optimizers, parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from training.config import TrainConfig
from training.distributed import whole

# Coefficients of the quintic Newton-Schulz iteration, from Keller Jordan's Muon:
# https://kellerjordan.github.io/posts/muon
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, steps: int = 5, bfloat16: bool = False) -> Tensor:
    """Nearest semi-orthogonal matrices, approximately: (N, m, n) -> (N, m, n), in the input's dtype.

    On a GPU that has it, it is computed in bfloat16, as torch.optim.Muon does it everywhere. So it is with
    `bfloat16` on a CPU that multiplies it: most do so ten times slower than float32.
    """
    a, b, c = _QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    fits = torch.cuda.is_bf16_supported(False) if x.is_cuda else torch.cpu._is_avx512_bf16_supported()
    low = fits and (bfloat16 or x.is_cuda)
    x = x.to(torch.bfloat16 if low else x.dtype).contiguous()
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(Optimizer):
    """Momentum, orthogonalized: matrices of one shape are updated as one batch.

    The update is scaled by 0.2 · sqrt(max(m, n)), which gives it AdamW's typical size (arXiv:2502.16982).
    Sharded matrices keep sharded momentum; each rank orthogonalizes the whole update and takes its own rows.
    """

    def __init__(self, params, lr: float = 2e-3, momentum: float = 0.95, weight_decay: float = 0.0,
                 bfloat16: bool = False):  # fmt: skip
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.bfloat16 = bfloat16

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
                    state = self.state[parameter]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(parameter)
                    momentum = state["momentum"]
                    momentum.lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(whole(parameter.grad.lerp(momentum, group["momentum"])))  # Nesterov
                scale = group["lr"] * 0.2 * math.sqrt(max(rows, columns))
                updated = orthogonalize(torch.stack(updates), bfloat16=self.bfloat16)
                for parameter, update in zip(parameters, updated, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(_sharded_like(update, parameter), alpha=-scale)


def _sharded_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A tensor that every rank holds, sharded as a parameter is; nothing is sent."""
    if not isinstance(parameter, DTensor):
        return tensor
    everywhere = [Replicate()] * parameter.device_mesh.ndim
    whole = DTensor.from_local(tensor, parameter.device_mesh, everywhere, run_check=False)
    return whole.redistribute(placements=parameter.placements)


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to: vision_model, projector or language_model. Heads
    that exist in training only count as vision_model."""
    for part in ("language_model", "projector"):
        if f".{part}." in f".{name}":
            return part
    return "vision_model"


def freeze(modules: nn.Module, rates: dict[str, float]) -> None:
    """Turn off gradients where the rate is 0, so that no graph is built for it."""
    for name, parameter in modules.named_parameters():
        if rates[part_of(name)] == 0:
            parameter.requires_grad_(False)


def is_muon_matrix(name: str, parameter: nn.Parameter, muon: str) -> bool:
    """Whether Muon trains this parameter under `--muon`: the matrices of the language model's blocks, or with
    all, those of the vision tower and the projector, too."""
    part = part_of(name)
    inside = parameter.dim() == 2 and (".layers." in name or part == "projector") and "lora_" not in name
    return inside and (muon == "all" or (muon == "language" and part == "language_model"))


def build_optimizers(modules: nn.Module, rates: dict[str, float], config: TrainConfig) -> list[Optimizer]:
    """AdamW, and last Muon for matrices where the config asks for it; one group for each part of the model.
    `rates` are AdamW's peaks by part. Norms and biases never decay."""
    tables: dict[str, list] = {}
    vectors: dict[str, list] = {}
    matrices: dict[str, list] = {}
    for name, parameter in modules.named_parameters():
        if parameter.requires_grad:
            vector_or_table = tables if parameter.dim() >= 2 else vectors
            kind = matrices if is_muon_matrix(name, parameter, config.muon) else vector_or_table
            kind.setdefault(part_of(name), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": decay, "lr": rates[part], "peak": rates[part], "part": part}
        for kind, decay in ((tables, config.weight_decay), (vectors, 0.0))
        for part, parameters in kind.items()
    ]
    muon_groups = []
    for part, parameters in matrices.items():
        # Muon's rate is in proportion to the part's.
        ratio = 1.0 if rates[part] == config.lr or not config.lr else rates[part] / config.lr
        muon_groups.append({"params": parameters, "peak": config.matrix_lr * ratio, "part": part})
    optimizers: list[Optimizer] = []
    if groups:
        optimizers.append(torch.optim.AdamW(groups, betas=(0.9, config.beta2), fused=True))
    if muon_groups:
        low = config.precision == "bfloat16"
        optimizers.append(Muon(muon_groups, config.matrix_lr, weight_decay=config.weight_decay, bfloat16=low))
    return optimizers


def set_rates(optimizers: list[Optimizer], share: float) -> None:
    """Set every group to `share` of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share


def rates(optimizers: list[Optimizer]) -> dict[str, float]:
    """The rate of each part, under its name in metrics.jsonl."""
    return {
        f"{'matrix_lr' if isinstance(optimizer, Muon) else 'lr'}_{group['part']}": group["lr"]
        for optimizer in optimizers
        for group in optimizer.param_groups
    }


def decay_fraction(config: TrainConfig) -> float:
    """The last share of a run in which its rates decay."""
    return 1.0 if config.schedule == "cosine" else config.decay_fraction


def schedule(step: int, steps: int, warmup: int, decay: float, floor: float = 0.0) -> float:
    """Share of the peak rate at `step` of `steps`: linear warm-up to 1, a plateau, a cosine to `floor`.

    A warm-up takes at most half of the steps, so that short runs reach their peak, too. `decay` is the last
    share of the steps; 1 has no plateau: this is the cosine schedule.
    """
    warm_end = min(warmup, steps // 2)
    if step < warm_end:
        return (step + 1) / warm_end
    decay_start = max(steps * (1 - decay), warm_end)
    progress = min(1.0, max(0.0, (step - decay_start) / max(steps - decay_start, 1)))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def update_average(average: dict[str, Tensor], model: nn.Module, decay: float, step: int) -> None:
    """Exponential moving average of the weights. Its decay grows from 0.1, to forget early noise."""
    decay = min(decay, (1 + step) / (10 + step))
    for name, parameter in model.named_parameters():
        if name in average:
            average[name].lerp_(parameter, 1 - decay)


@contextmanager
def averaged(modules: nn.Module, average: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the modules hold their averaged weights."""

    @torch.no_grad()
    def put(values: dict[str, Tensor]) -> None:
        named = dict(modules.named_parameters())  # looked up anew: under FSDP, a forward pass replaces them
        for name, value in values.items():
            named[name].copy_(value)

    named = dict(modules.named_parameters())
    kept = {name: named[name].detach().clone() for name in average}
    put(average)
    try:
        yield
    finally:
        put(kept)
