"""The loss in chunks against all logits at once: value, gradients, and how many logits ever exist."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import losses
from models.losses import summed_cross_entropy
from models.whole_rows import IGNORE_INDEX
from tests.prompts import ImageBlock, inputs_of, loss_of, tiny_vlm, words
from tests.tiny import IMAGE_ID
from training.rows import RowsLoss

WIDTH, VOCAB, COUNT = 24, 301, 23


def plain(hidden, targets, head):
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")


def make(dtype=torch.float32, count=COUNT):
    generator = torch.Generator().manual_seed(count)
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    nn.init.normal_(head.weight, std=0.5, generator=generator)
    hidden = torch.randn(count, WIDTH, generator=generator).to(dtype).requires_grad_()
    return hidden, torch.randint(VOCAB, (count,), generator=generator), head.to(dtype)


def gradients(loss, hidden, head, scale=1.0):
    return torch.autograd.grad(loss * scale, [hidden, *head.parameters()])


def assert_same(got, expected, bar, floor=0.0):
    """Within `bar` of the largest number of each tensor; `floor` is for those that are but rounding."""
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one - other).abs().max() <= bar * other.abs().max() + floor


class Adapted(nn.Module):
    """A head that is more than one matrix, as peft makes them."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(WIDTH, 2), nn.Linear(2, VOCAB)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("kind", ["linear", "bias", "adapted"])
@pytest.mark.parametrize("chunk", [7, None])
def test_value_and_gradients_are_those_of_all_logits_at_once(kind, chunk):
    hidden, targets, head = make()
    torch.manual_seed(0)
    if kind != "linear":
        head = Adapted(head) if kind == "adapted" else nn.Linear(WIDTH, VOCAB)
    got = summed_cross_entropy(hidden, targets, head, chunk)
    expected = plain(hidden, targets, head)
    assert got.dtype == torch.float32 and got.shape == ()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert_same(gradients(got, hidden, head, 0.3), gradients(expected, hidden, head, 0.3), 1e-6)


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_is_as_near_to_float32_as_the_plain_loss(autocast):
    """Either by autocast over float32 weights, or with weights in bfloat16."""
    hidden, targets, head = make(count=200)
    expected = plain(hidden, targets, head)
    exact = gradients(expected, hidden, head)
    if not autocast:
        hidden, head = hidden.detach().bfloat16().requires_grad_(), copy.deepcopy(head).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = summed_cross_entropy(hidden, targets, head, 16)
        theirs = plain(hidden, targets, head)
    assert ours.dtype == torch.float32
    assert abs(ours - expected) <= max(2 * abs(theirs - expected), 1e-3 * expected)
    for own, other, true in zip(
        gradients(ours, hidden, head), gradients(theirs, hidden, head), exact, strict=True
    ):
        assert own.dtype == other.dtype == (torch.float32 if autocast else torch.bfloat16)
        error, usual = ((one.float() - true).norm() / true.norm() for one in (own, other))
        assert error <= max(1.5 * usual, 4e-3)


def test_only_what_learns_gets_a_gradient():
    hidden, targets, head = make()
    head.requires_grad_(False)
    expected = torch.autograd.grad(plain(hidden, targets, head), hidden)
    assert_same(torch.autograd.grad(summed_cross_entropy(hidden, targets, head, 5), hidden), expected, 1e-6)
    head.requires_grad_(True)
    expected = torch.autograd.grad(plain(hidden.detach(), targets, head), head.weight)
    got = torch.autograd.grad(summed_cross_entropy(hidden.detach(), targets, head, 5), head.weight)
    assert_same(got, expected, 1e-6)
    with torch.no_grad():
        assert not summed_cross_entropy(hidden, targets, head).requires_grad


class MostLogits(TorchDispatchMode):
    """The most rows of logits that one tensor has: of those as wide as the vocabulary, but for weights."""

    def __init__(self, model: nn.Module, vocabulary: int):
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            wide = isinstance(one, torch.Tensor) and one.shape[-1:] == (self.vocabulary,)
            if wide and one.untyped_storage().data_ptr() not in self.weights:
                self.rows = max(self.rows, one.numel() // self.vocabulary)
        return made


def test_logits_of_a_row_never_exist_in_training(monkeypatch):
    """The model's plain forward makes them all, and is caught at it."""
    monkeypatch.setitem(losses.CHUNK_BYTES, "cpu", 0)  # the fewest positions at once: 16
    model = tiny_vlm()
    inputs = inputs_of([ImageBlock(1), *words(1, 60)])
    ids = inputs["input_ids"]
    labels = ids.masked_fill(ids == IMAGE_ID, IGNORE_INDEX)
    labels[:, :20] = IGNORE_INDEX
    batch = {"input_ids": ids, "labels": labels, "pixel_values": inputs["pixel_values"].flatten(0, -4)}
    batch |= {"position_ids": torch.arange(ids.shape[1])[None], "segment_ids": torch.ones_like(ids)}
    batch["labelled"], batch["placeholders"] = (
        found.flatten().nonzero()[:, 0] for found in (labels != IGNORE_INDEX, ids == IMAGE_ID)
    )
    vocabulary = model.config.text.vocab_size
    with MostLogits(model, vocabulary) as seen:
        total, _ = RowsLoss(model, blank=False)(**batch)
        total.backward()
    assert 0 < seen.rows <= 16
    with MostLogits(model, vocabulary) as seen, torch.no_grad():
        whole = model(labels=labels, **inputs)
    assert seen.rows >= ids.shape[1]
    labelled = int((labels[:, 1:] != IGNORE_INDEX).sum())
    torch.testing.assert_close(total.detach(), whole.loss * labelled, rtol=1e-5, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_learns_what_all_its_logits_teach(tied):
    model = tiny_vlm()
    if tied:
        model.language_model.lm_head.weight = model.language_model.embed_tokens.weight
    inputs = inputs_of([ImageBlock(1), *words(1, 12)])
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE_ID, IGNORE_INDEX)
    labels[:, 5:8] = IGNORE_INDEX
    logits, wanted = model(**inputs).logits[:, :-1], labels[:, 1:]
    expected = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
    total, count = loss_of(model, labels=labels, **inputs)
    assert count == (wanted != IGNORE_INDEX).sum()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    parameters = list(model.parameters())
    got, wanted = (torch.autograd.grad(loss, parameters) for loss in (total, expected))
    assert_same(got, wanted, 2e-5, floor=5e-6)  # a bias of keys changes no softmax


def test_a_batch_without_labels_reaches_every_parameter_with_zeros():
    model = tiny_vlm()
    inputs = inputs_of([ImageBlock(1), *words(1, 6)])
    total, count = loss_of(model, labels=torch.full_like(inputs["input_ids"], IGNORE_INDEX), **inputs)
    (total / count.clamp(min=1)).backward()
    assert total == 0 and count == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
