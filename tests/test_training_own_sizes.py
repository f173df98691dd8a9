"""Families whose images have sizes of their own train as in transformers, padded or packed; what is saved
opens there."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

import train
from data.errors import ProcessorError
from data.image_rules import Images
from data.packing import Batch, SampleEncoder, collate, pack, pack_answers
from data.processor import Processor
from families import FAMILIES
from families.idefics3 import IdeficsImages
from families.internvl import InternVLImages
from families.lfm2_images import Lfm2Images
from families.qwen_images import QwenImages
from models import VisionLanguageModel
from tests import gemma4_checkpoints, lfm2_checkpoints, minicpm_checkpoints, qwen_checkpoints
from tests.processors import embedded
from tests.processors import processor as processor_of
from tests.rows import loader, png, rows
from tests.runs import SETTINGS, flags
from training.distributed import prepare_blocks
from training.rows import RowsLoss

SIZES = ((90, 60), (40, 130), (64, 64), (150, 50), (33, 70))
SAVE = {kind: partial(qwen_checkpoints.save_hf, kind) for kind in qwen_checkpoints.KINDS}
SAVE |= {"lfm2_vl": lfm2_checkpoints.save_hf, "gemma4": gemma4_checkpoints.save_hf}
SAVE["minicpmv4_6"] = minicpm_checkpoints.save_hf
BAR = 1e-4  # of the largest number in each parameter's gradient


def examples() -> list[dict]:
    """Rows without an image, with one, with two, no two of one size."""
    made = rows(12, every=99, longest=8)
    for number, row in enumerate(made):
        del row["image"]
        row["images"] = [png(*SIZES[(number + i) % 5], seed=number) for i in range(number % 3)]
    return made


@pytest.fixture(scope="module", params=SAVE)
def opened(request, tmp_path_factory):
    """transformers' model, ours, and the processor, of one small checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = SAVE[request.param](folder, seed=1).train()
    ours = VisionLanguageModel.from_pretrained(folder, dtype=torch.float32).train()
    return theirs, ours, Processor.from_pretrained(folder, config=ours.config)


def check_within(images: Images, least: int, reopened=lambda rule: rule) -> None:
    """Whatever their size, images take at most so many positions, and hardly fewer; `least` is the least."""
    for most in (least, 3 * least, 8 * least, 40 * least):
        rule = images.within(most)
        stored = reopened(rule)
        for size in ((4000, 3000), (900, 2000), (1500, 1500), (40, 30)):
            planned, saved = rule.plan(*size), stored.plan(*size)
            assert planned.positions == saved.positions <= most and planned.grid == saved.grid
        assert rule.plan(4000, 3000).positions > most / 4
    with pytest.raises(ProcessorError):
        images.within(least - 1)


@pytest.mark.slow(but=1)
def test_images_may_take_fewer_positions(opened, tmp_path):
    """Also by what is saved with the model."""
    _, model, processor = opened

    def reopened(rule: Images) -> Images:
        rule.transformers(processor.tokenizer, processor.chat.chat_template).save_pretrained(tmp_path)
        config = FAMILIES[model.config.family].write(model.config, "float32")
        (tmp_path / "config.json").write_text(json.dumps(config))
        return Processor.from_pretrained(tmp_path, model.config).images

    check_within(processor.images, {"gemma4": 70}.get(model.config.family, 1), reopened)


def test_images_of_tiles_may_take_fewer_positions():
    check_within(embedded(split=True).images, 4)
    check_within(InternVLImages({"size": {"height": 32, "width": 32}, "max_patches": 9}, 4), 4)
    with pytest.raises(ProcessorError):
        processor_of("nanovlm-current").images.within(1000)


def test_what_is_enlarged_stays_within_the_positions_too():
    """Where the least that an image takes is near the most: sides are rounded up."""
    least = {"size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}, "patch_size": 16}
    for rule in (QwenImages(least).within(64), Lfm2Images({}).within(64)):
        assert all(16 < rule.plan(*size).positions <= 64 for size in ((160, 120), (40, 90), (20, 20)))


def test_a_most_beyond_what_the_rule_can_do_is_what_it_can_do():
    """8192 tokens of SmolVLM, which cuts 4,096 pixels at most, and of 400 tiles."""
    side = {"size": {"height": 32, "width": 32}}
    for rule in (IdeficsImages({}, 64), InternVLImages(side | {"max_patches": 9}, 4)):
        assert 1024 < rule.within(8192).plan(4000, 3900).positions <= 8192


def batches(processor: Processor, **config) -> list[Batch]:
    """All rows, in batches of two rows."""
    settings = {"epochs": 1, "sequence_length": 160, "batch_size": 2, "micro_batch_size": 2}
    return list(loader(examples(), processor=processor, **settings | config))


def ours_on(given: list[Batch], model: VisionLanguageModel) -> torch.Tensor:
    """Loss, summed over labelled tokens."""
    return torch.stack([RowsLoss(model, blank=True)(**batch.to("cpu"))[0] for batch in given]).sum()


def of_transformers(ids: torch.Tensor, images: list[torch.Tensor], config) -> dict[str, torch.Tensor]:
    """Its model's arguments besides ids."""
    if config.family == "lfm2_vl":
        return lfm2_checkpoints.transformers_inputs(images, config.vision.patch_size) if len(images) else {}
    if config.family == "minicpmv4_6":
        return minicpm_checkpoints.transformers_inputs(images) if len(images) else {}
    inputs = {"mm_token_type_ids": (ids == config.image_token_id).int()}
    if config.family == "gemma4":
        return inputs | gemma4_checkpoints.transformers_inputs(images, config.vision)
    if len(images):
        inputs |= qwen_checkpoints.transformers_inputs(images, config)
    return inputs


def theirs_on(given: list[Batch], config, model) -> torch.Tensor:
    """The same of padded batches."""
    losses = []
    for batch in given:
        ids = batch["input_ids"]
        inputs = of_transformers(ids, batch.to("cpu").get("pixel_values", []), config)
        mask = (batch["segment_ids"] > 0).long()
        out = model(input_ids=ids, attention_mask=mask, labels=batch["labels"], **inputs)
        losses.append(out.loss * batch.num_labels)
    return torch.stack(losses).sum()


def gradients(model, loss_of: Callable) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    (loss := loss_of(model)).backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(got, expected) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    for name, gradient in got[1].items():
        scale = expected[1][name].abs().max()
        assert scale > 0, name
        # Keys' biases change no softmax: without rotation their gradient is noise.
        assert (gradient - expected[1][name]).abs().max() <= max(BAR * scale, 2e-6), name


@pytest.mark.slow
def test_every_gradient_is_theirs_padded_or_packed(opened, monkeypatch):
    monkeypatch.setattr("data.loader._SHARDS", 2)  # of which each has rows enough to pack
    theirs, ours, processor = opened
    padded = batches(processor, packing=False)
    loss, named = gradients(theirs, lambda model: theirs_on(padded, ours.config, model))
    place, expected = FAMILIES[ours.config.family].tensor_map(list(named)), {}
    for name, _ in ours.named_parameters():
        if (stored := place(name)).name not in named:
            continue  # bounds, which do not learn
        expected[name] = named[stored.name].chunk(stored.parts)[stored.part]
    compare(gradients(ours, lambda model: ours_on(padded, model)), (loss, expected))
    packed = batches(processor, workers=1)
    assert max(len(row) for batch in packed for row in batch.sample_ids) > 1
    assert len({part.pixels.shape for batch in packed for part in batch["pixel_values"]}) > 3
    compare(gradients(ours, lambda model: ours_on(packed, model)), (loss, expected))
    # Recomputed activations change nothing.
    prepare_blocks(ours, recompute=True, compiled=False)
    compare(gradients(ours, lambda model: ours_on(packed, model)), (loss, expected))


@pytest.mark.slow(but=1)
def test_answers_to_one_prompt_learn_what_they_learn_alone(opened):
    """The prompt and its images are once in the row, unless layers keep states or windows."""
    _, model, processor = opened
    encoder, row = SampleEncoder(processor, 400), examples()[2]
    asked = [{"type": "image", "image": image} for image in row["images"]]
    asked += [{"type": "text", "text": row["question"]}]
    samples = [
        encoder.encode(
            [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": [{"type": "text", "text": said}]},
            ],
            ("toy", number),
        )
        for number, said in enumerate(("three of them", "two", "red squares and two circles"))
    ]
    tiles, config, image_id = encoder.tiles(samples[0]), model.config, processor.image_token_id
    together = pack_answers(samples, tiles, config)
    assert bool(config.text.layer_types) == (len(together.input_ids) > 2 * samples[0].tokens)
    alone = collate([pack([sample], [tiles], config) for sample in samples], 0, None, image_id)
    expected = gradients(model, lambda model: ours_on([alone], model))
    compare(
        gradients(model, lambda model: ours_on([collate([together], 0, None, image_id)], model)), expected
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("qwen3_5", "int4"),
        ("lfm2_vl", "float32"),
        ("gemma4", "int8"),
        ("paddleocr_vl", "float32"),
    ],
)
def test_adapters_and_projector_open_in_transformers_and_peft(kind, weights, tmp_path):
    """Merged in the one, and in the other as an adapter that holds the projector whole."""
    base = tmp_path / "base"
    SAVE[kind](base, seed=1)
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(*SIZES[number], seed=number))
    lines = [
        {"question": "how many", "answer": "three", "images": ["0.png", f"{i % 3}.png"]} for i in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    paths = {"init_from": base, "data": tmp_path / "rows.jsonl", "output": tmp_path / "run"}
    more = {"lora_rank": 4, "projector_lr": 1e-2, "sequence_length": 192, "steps": 2, "weights": weights}
    more |= {} if kind == "lfm2_vl" else {"max_pixels": 6000}
    train.main(flags(**SETTINGS | paths | more))
    ours = VisionLanguageModel.from_pretrained(tmp_path / "run", dtype=torch.float32)
    processor = Processor.from_pretrained(tmp_path / "run", config=ours.config)
    inputs = processor.ask([tmp_path / "1.png", tmp_path / "2.png"], "how many")
    ids, parts = inputs["input_ids"], inputs["pixel_values"]
    named = of_transformers(ids, parts.to("cpu"), ours.config)
    start, merged = (AutoModelForImageTextToText.from_pretrained(tmp_path / one) for one in ("base", "run"))
    with torch.no_grad():
        plain, expected = (model.eval()(input_ids=ids, **named).logits for model in (start, merged))
        adapted = PeftModel.from_pretrained(start, tmp_path / "run" / "adapter").eval()
        for got in (ours(ids, parts).logits, adapted(input_ids=ids, **named).logits):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert (plain - expected).abs().max() > 1e-2
