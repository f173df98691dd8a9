"""The rates of a run: where its peak is, where it ends, and what of it stands in metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training.config import TrainConfig, parse_arguments
from training.distributed import clip
from training.optim import build_optimizers, rates, schedule, set_rates

ROWS = {"init_from": "x", "data": "y"}
CONFIGS = Path(__file__).parent.parent / "configs"


def shares(steps: int, warmup: int, decay: float = 1.0, floor: float = 0.0) -> list[float]:
    return [schedule(step, steps, warmup, decay, floor) for step in range(steps)]


@pytest.mark.parametrize("decay", [1.0, 0.35, 1e-9])
@pytest.mark.parametrize("steps, warmup", [(1, 20), (4, 20), (91, 20), (1000, 100), (20, 0), (30, 30)])
def test_every_run_reaches_its_rate(steps, warmup, decay):
    """At the end of a warm-up that takes at most half of it."""
    found = shares(steps, warmup, decay)
    peak = min(warmup, steps // 2)
    assert max(found) == 1.0 == found[max(peak - 1, 0)]
    assert found[:peak] == pytest.approx([(step + 1) / peak for step in range(peak)])
    assert found[peak:] == sorted(found[peak:], reverse=True)


@pytest.fixture
def model():
    block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    language = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList([block]), "embed": torch.nn.Embedding(3, 2)}
    )
    return torch.nn.ModuleDict({"language_model": language, "vision_model": torch.nn.Linear(2, 2)})


def test_metrics_name_the_rate_of_each_part(model):
    config = TrainConfig(**ROWS, lr=2e-3, vision_lr=1e-3, matrix_lr=4e-3, muon="language")
    optimizers = build_optimizers(model, config.rates, config)
    set_rates(optimizers, 0.5)
    expected = {"lr_language_model": 1e-3, "lr_vision_model": 5e-4, "matrix_lr_language_model": 2e-3}
    assert rates(optimizers) == pytest.approx(expected)


@pytest.mark.parametrize("muon", ["none", "all"])
def test_norms_and_biases_do_not_decay(model, muon):
    """Without a gradient to follow, a step shrinks matrices and tables, and them alone."""
    config = TrainConfig(**ROWS, weight_decay=0.5, muon=muon)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in build_optimizers(model, config.rates, config):
        optimizer.step()
    for name, parameter in model.named_parameters():
        rate = config.matrix_lr if muon == "all" and ".layers." in name else config.lr
        left = 1 - 0.5 * rate if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), left * before[name], msg=name)


def test_gradients_are_clipped():
    parameter = torch.nn.Parameter(torch.zeros(2))
    for limit, left in ((0.0, 5.0), (10.0, 5.0), (1.0, 1.0)):
        parameter.grad = torch.tensor([3.0, 4.0])
        assert clip([parameter], limit) == 5.0  # the norm that they had
        assert parameter.grad.norm().item() == pytest.approx(left, rel=1e-4)


@pytest.mark.parametrize(
    ("recipe", "rows", "projector", "backbones", "clip"),
    [("nanovlm-222m", 20, 2e-3, 1e-4, 0.0), ("nanovlm-460m", 8 * 16, 5.12e-3, 5e-5, 1.0)],
)
def test_recipes_that_name_nanovlm_learn_as_it_does(recipe, rows, projector, backbones, clip):
    """As its v0.1 and its code of October 2025 say: in models/config.py, and get_lr and AdamW in train.py."""
    config = parse_arguments([str(CONFIGS / f"{recipe}.yaml")])[0]
    assert config.rates == {"projector": projector, "vision_model": backbones, "language_model": backbones}
    assert (config.muon, config.beta2, config.weight_decay) == ("none", 0.999, 0.01)
    assert (config.batch_size, config.grad_clip, config.ema) == (rows, clip, 0.0)
    assert config.schedule == "cosine" and config.warmup_steps == 0.03 * config.steps
    middle = (config.steps + config.warmup_steps) // 2
    for step, share in ((0, 1 / config.warmup_steps), (middle, 0.55), (config.steps - 1, 0.1)):
        found = schedule(step, config.steps, config.warmup_steps, 1.0, floor=config.lr_floor)
        assert found == pytest.approx(share, abs=1e-4)
