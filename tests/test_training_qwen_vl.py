"""Qwen2.5-VL and Qwen3-VL train as in transformers, padded or packed, on images of their own sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from data.packing import Batch
from data.processor import Processor
from families import qwen_vl
from models import VisionLanguageModel
from models.packed_vision_transformer import patches_of
from tests import qwen_checkpoints
from tests.rows import loader, png, rows
from training.distributed import prepare_blocks
from training.rows import RowsLoss

SIZES = ((90, 60), (40, 130), (64, 64), (150, 50), (33, 70))
BAR = 1e-4  # of the largest number in each parameter's gradient


def examples() -> list[dict]:
    """Rows without an image, with one, with two, no two of one size."""
    made = rows(12, every=99, longest=8)
    for number, row in enumerate(made):
        del row["image"]
        row["images"] = [png(*SIZES[(number + i) % 5], seed=number) for i in range(number % 3)]
    return made


@pytest.fixture(scope="module", params=qwen_checkpoints.KINDS)
def opened(request, tmp_path_factory):
    """transformers' model, ours, and the processor, of one small checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = qwen_checkpoints.save_hf(request.param, folder, seed=1).train()
    ours = VisionLanguageModel.from_pretrained(folder, dtype=torch.float32).train()
    return theirs, ours, Processor.from_pretrained(folder, config=ours.config)


def batches(processor: Processor, **config) -> list[Batch]:
    """All rows, in batches of two rows."""
    settings = {"epochs": 1, "sequence_length": 160, "batch_size": 2, "micro_batch_size": 2}
    return list(loader(examples(), processor=processor, **settings | config))


def ours_on(given: list[Batch], model: VisionLanguageModel) -> torch.Tensor:
    """Loss, summed over labelled tokens."""
    return torch.stack([RowsLoss(model, blank=True)(**batch.to("cpu"))[0] for batch in given]).sum()


def theirs_on(given: list[Batch], config, model) -> torch.Tensor:
    """The same of padded batches."""
    losses, vision = [], config.vision
    for batch in given:
        ids, images = batch["input_ids"], batch.to("cpu").get("pixel_values", [])
        inputs = {}
        if len(images):
            pixels = torch.cat([patches_of(image, vision) for image in images]).view(
                -1, 3, 1, vision.patch_size**2
            )
            inputs["pixel_values"] = pixels.expand(-1, -1, 2, -1).flatten(1)
            inputs["image_grid_thw"] = torch.tensor(
                [(1, *(side // vision.patch_size for side in image.shape[1:])) for image in images]
            )
        inputs |= {"mm_token_type_ids": (ids == config.image_token_id).int(), "labels": batch["labels"]}
        out = model(input_ids=ids, attention_mask=(batch["segment_ids"] > 0).long(), **inputs)
        losses.append(out.loss * batch.num_labels)
    return torch.stack(losses).sum()


def gradients(model, loss_of: Callable) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    (loss := loss_of(model)).backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def compare(got, expected) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    for name, gradient in got[1].items():
        scale = expected[1][name].abs().max()
        assert scale > 0, name
        assert (gradient - expected[1][name]).abs().max() <= BAR * scale, name


def test_every_gradient_is_theirs_padded_or_packed(opened, monkeypatch):
    monkeypatch.setattr("data.loader._SHARDS", 2)  # of which each has rows enough to pack
    theirs, ours, processor = opened
    padded = batches(processor, packing=False)
    loss, named = gradients(theirs, lambda model: theirs_on(padded, ours.config, model))
    place, expected = qwen_vl.tensor_map(list(named)), {}
    for name, _ in ours.named_parameters():
        stored = place(name)
        expected[name] = named[stored.name].chunk(stored.parts)[stored.part]
    compare(gradients(ours, lambda model: ours_on(padded, model)), (loss, expected))
    packed = batches(processor, workers=1)
    assert max(len(row) for batch in packed for row in batch.sample_ids) > 2
    assert len({part.pixels.shape for batch in packed for part in batch["pixel_values"]}) > 3
    compare(gradients(ours, lambda model: ours_on(packed, model)), (loss, expected))
    # Recomputed activations change nothing.
    prepare_blocks(ours, recompute=True, compiled=False)
    compare(gradients(ours, lambda model: ours_on(packed, model)), (loss, expected))
