"""Packing: full rows within both limits, and a document in a row learns what it learns alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from data import packing
from data.packing import (
    IGNORE_INDEX,
    Batch,
    Sample,
    block_mask,
    collate,
    dense_mask,
    pack,
    pack_answers,
    pack_indices,
    segment_mask,
)
from data.tiles import Parts
from models import language_model, packed_rows
from tests import prompts
from tests.prompts import IMAGE_ID, PER_TILE, SIDE, tile, tiny_vlm, words
from training.rows import RowsLoss

PAD = 0


def test_the_choice_is_the_best_there_is_within_both_limits():
    rng = random.Random(0)
    for _ in range(60):
        count = rng.randint(1, 8)
        tokens = [rng.randint(1, 40) for _ in range(count)]
        tiles = [rng.randint(0, 5) for _ in range(count)]
        max_tokens, max_tiles = rng.randint(tokens[0], 90), rng.randint(tiles[0], 9)
        others = itertools.chain(*(itertools.combinations(range(1, count), n) for n in range(count)))
        sums = [(sum(tokens[i] for i in (0, *o)), sum(tiles[i] for i in (0, *o))) for o in others]
        best = max(total for total, images in sums if total <= max_tokens and images <= max_tiles)
        chosen = pack_indices(tokens, tiles, max_tokens, max_tiles)
        assert chosen[0] == 0 and chosen == sorted(set(chosen))
        assert sum(tiles[i] for i in chosen) <= max_tiles and sum(tokens[i] for i in chosen) == best
    with pytest.raises(ValueError, match="does not fit"):
        pack_indices([10], [0], 9, None)


# ------------------------------------------------------------------------ a row as its documents alone
def document(seed: int, question: int, answer: int, images: int = 0) -> tuple[Sample, Parts | None]:
    ids = [1, *[IMAGE_ID] * (PER_TILE * images), *words(seed, question)]
    said = words(100 + seed, answer)
    labels = [IGNORE_INDEX] * len(ids) + said
    tiles = Parts.of(torch.stack([tile(10 * seed + i) for i in range(images)])) if images else None
    return Sample(("toy", seed), ids + said, labels, (None,) * images, ((1, 3, SIDE, SIDE),) * images), tiles


def batch_of(*rows, length=None) -> Batch:
    return collate([pack(*zip(*row)) if row else None for row in rows], PAD, length).to("cpu")


def loss_of(model, batch: Batch) -> torch.Tensor:
    """Summed over the labelled tokens."""
    total, count = prompts.loss_of(
        model,
        batch["labels"],
        input_ids=batch["input_ids"],
        pixel_values=batch.get("pixel_values"),
        attention_mask=dense_mask(batch["segment_ids"]),
        position_ids=batch["position_ids"],
    )
    assert count == batch.num_labels
    return total


def mean_loss(model, batch: Batch, row: int = 0, number: int = 1) -> torch.Tensor:
    """Of one document of a batch."""
    elsewhere = batch["segment_ids"] != number
    elsewhere[:row], elsewhere[row + 1 :] = True, True
    only = Batch(batch, labels=batch["labels"].masked_fill(elsewhere, IGNORE_INDEX))
    return loss_of(model, only) / only.num_labels


DOCUMENTS = ((1, 5, 3, 1), (2, 9, 2, 0), (3, 2, 7, 2), (4, 1, 1, 0), (5, 12, 4, 1))


def test_packed_loss_is_that_of_the_samples_alone():
    model = tiny_vlm()
    documents = [document(*numbers) for numbers in DOCUMENTS]
    packed = batch_of(documents[:3], documents[3:], [], length=50)
    padded = batch_of(*[[one] for one in documents])
    with torch.no_grad():
        alone = [mean_loss(model, batch_of([one])) for one in documents]
        for i, expected in enumerate(alone):
            row, number = divmod(i, 3)
            torch.testing.assert_close(mean_loss(model, packed, row, number + 1), expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(mean_loss(model, padded, i, 1), expected, rtol=0, atol=1e-5)
        counts = [sum(label != IGNORE_INDEX for label in sample.labels) for sample, _ in documents]
        summed = sum(loss * count for loss, count in zip(alone, counts))
        torch.testing.assert_close(loss_of(model, packed), summed)
    assert packed.sample_ids == [(("toy", 1), ("toy", 2), ("toy", 3)), (("toy", 4), ("toy", 5)), ()]
    assert packed["input_ids"].shape == (3, 50) and packed["pixel_values"].shape[0] == 4


def test_the_gradient_of_one_document_does_not_feel_its_neighbours():
    model = tiny_vlm()

    def gradients(neighbour, labelled: bool):
        first, pixels = document(1, 5, 3, 1)
        sample, tiles = neighbour
        if not labelled:
            sample = replace(sample, labels=[IGNORE_INDEX] * sample.tokens)
        model.zero_grad()
        last = document(6, 3, 2, 0)
        loss_of(model, batch_of([(first, pixels), (sample, tiles), last])).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    one, other = (gradients(document(seed, 8, 4, 1), labelled=False) for seed in (2, 3))
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-5, atol=1e-6, msg=name)
    learnt = gradients(document(2, 8, 4, 1), labelled=True)
    assert any(not torch.allclose(learnt[name], one[name], atol=1e-4) for name in one)


def test_the_first_token_of_a_document_is_never_predicted_from_the_one_before():
    sample = Sample(("toy", 0), [5, 6, 7], [5, 6, 7])
    batch = batch_of([(sample, None), (sample, None)])
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 6, 7, IGNORE_INDEX, 6, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2]]


def test_answers_share_their_prompt():
    """Each is scored as if it were alone after it; with another prompt they are refused."""
    model = tiny_vlm()
    (sample, tiles), said = document(1, 5, 3, 2), (words(7, 4), words(8, 1), words(9, 6))
    prompt = sample.input_ids[:-3]
    answers = [
        replace(sample, input_ids=prompt + one, labels=[IGNORE_INDEX] * len(prompt) + one) for one in said
    ]
    batch = collate([pack_answers(answers, tiles)], PAD).to("cpu")
    assert batch["input_ids"].shape[1] == len(prompt) - 1 + sum(1 + len(one) for one in said)
    with torch.no_grad():
        for number, one in enumerate(answers, 1):
            expected = mean_loss(model, batch_of([(one, tiles)]))
            torch.testing.assert_close(mean_loss(model, batch, 0, number), expected, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="one prompt"):
        pack_answers([answers[0], replace(answers[1], input_ids=[3, *answers[1].input_ids[1:]])], tiles)


# -------------------------------------------------------------------------------------------------- masks
def test_masks():
    documents = torch.tensor([[1, 1, 2, -1, -1], [0, 0, 1, 2, 2]])
    expected = torch.tensor(
        [
            [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]],
            [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]],
        ]
    )
    assert torch.equal(dense_mask(documents), expected.bool())
    assert torch.equal(segment_mask(documents), dense_mask(documents))  # on the CPU


def test_one_document_a_row_needs_no_mask():
    """Causal attention does, and the loss is the same."""
    for row in ([1, 1, 2], [0, 1, 1], [-1, 1, 1], [1, -1, 1]):
        documents = torch.tensor([[1, 1, 1], row])
        assert torch.equal(segment_mask(documents), dense_mask(documents))
    model = tiny_vlm()
    batch = batch_of(*[[document(*numbers)] for numbers in DOCUMENTS], [])
    assert segment_mask(batch["segment_ids"]) is None
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "pixel_values", "position_ids")}
        total, _ = prompts.loss_of(model, batch["labels"], **inputs)
        torch.testing.assert_close(total, loss_of(model, batch))


def test_a_mask_is_kept_once_for_all_blocks():
    """Autograd keeps one (B, 1, T, T) float mask, not one for each block."""
    model = tiny_vlm(num_hidden_layers=3)
    batch, kept = batch_of([document(*numbers) for numbers in DOCUMENTS], length=70), set()

    def pack(tensor):
        if tensor.shape[-2:] == (70, 70):
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = loss_of(model, batch)
    assert len(kept) == 1
    with torch.no_grad():  # there, the mask stays bool
        torch.testing.assert_close(loss_of(model, batch), total, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("autocast", 0.05)])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_what_the_dense_mask_shows(dtype, tolerance):
    """Under autocast, as in training, queries and keys are float32 behind their rotation, values are not."""
    model = tiny_vlm()
    batch = batch_of([document(*numbers) for numbers in DOCUMENTS[:3]], [document(*DOCUMENTS[4])], length=64)
    arguments = [batch["input_ids"], batch["pixel_values"]]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        dense, flex = (
            model.hidden_states(
                *arguments, attention_mask=mask(batch["segment_ids"]), position_ids=batch["position_ids"]
            )[0]
            for mask in (dense_mask, block_mask)
        )
    torch.testing.assert_close(flex, dense, rtol=tolerance, atol=tolerance)


def test_block_masks_are_compiled_on_cuda(monkeypatch):
    """As they are, they make T² numbers of segments."""
    asked: list = []
    monkeypatch.setattr(packing, "create_block_mask", lambda *_, **__: asked.append("eager"))
    monkeypatch.setattr(torch, "compile", lambda function: lambda *_, **__: asked.append("compiled"))
    packing._compiled_create_block_mask.cache_clear()
    with FakeTensorMode():
        for device in ("cpu", "cuda"):
            block_mask(torch.ones(1, 8, dtype=torch.int64, device=device))
    packing._compiled_create_block_mask.cache_clear()
    assert asked == ["eager", "compiled"]


def test_flex_attention_is_compiled_on_cuda_whatever_the_recipe_says(monkeypatch):
    """Called as it is, it keeps all scores: slow, and several GiB."""
    compiled: list = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    packed_rows._compiled_flex_attention.cache_clear()
    mask = block_mask(torch.ones(1, 8, dtype=torch.int64))
    monkeypatch.setattr(packed_rows, "flex_attention", lambda q, k, v, **named: q)
    cpu = torch.zeros(1, 2, 8, 4)
    with FakeTensorMode():
        cuda = torch.zeros(1, 2, 8, 4, device="cuda")
    for q in (cpu, cuda, cuda):
        language_model.attend(q, q, q, mask)
    packed_rows._compiled_flex_attention.cache_clear()
    assert compiled == [packed_rows.flex_attention]  # once, for the device that needs it


def test_training_takes_the_models_loss():
    """From places of labels and of placeholders that the host has counted. A row of padding has none."""
    model = tiny_vlm()
    rows = [[document(*numbers) for numbers in DOCUMENTS[:3]], None, [document(*DOCUMENTS[4])]]
    packed = [pack(*zip(*row)) if row else None for row in rows]
    batch = collate(packed, PAD, image_token_id=IMAGE_ID).to("cpu")
    losses, gradients = [], []
    for loss in (lambda: RowsLoss(model, blank=False)(**batch)[0], lambda: loss_of(model, batch)):
        losses.append(loss())
        gradients.append(torch.autograd.grad(losses[-1], [*model.parameters()]))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_batch_that_moves_keeps_all_that_it_knows():
    packed = pack([replace(document(*DOCUMENTS[0])[0], row={"target": "two"})], [document(*DOCUMENTS[0])[1]])
    batch = collate([packed], PAD)
    moved = batch.to("cpu")
    assert vars(moved) == vars(batch) and [one.row for one in moved.samples] == [{"target": "two"}]
