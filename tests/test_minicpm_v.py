"""MiniCPM-V 4.6 and MiniCPM-OCR: of a checkpoint Ocelli computes what transformers does."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image, ImageDraw
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from data.errors import ProcessorError
from data.processor import Processor
from data.tiles import Parts
from families import minicpm_v
from families.minicpm_v import MiniCPMImages
from generation.fast.network import DECODER, PACKED_TOWER
from models import VisionLanguageModel
from models.checkpoints.load import empty_model, meta_init, parameter_shapes, read_config
from models.checkpoints.weights import check_shapes
from tests.house import edit_json
from tests.minicpm_checkpoints import CLASSES, save_hf, transformers_inputs
from tests.processors import draw_image, seen, user
from tests.test_qwen3_5 import published

BATCH = [
    user(seen((130, 60)), "how many red squares"),
    user("are there two"),
    user(seen((30, 20)), "and", seen((8, 90), 1), "circles are there"),
]


@pytest.mark.slow(but=1)
@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_what_is_saved_is_what_transformers_computes(seed, tmp_path):
    theirs = save_hf(tmp_path, seed, [*CLASSES][seed % 2])
    ours = VisionLanguageModel.from_pretrained(tmp_path)
    processor = Processor.from_pretrained(tmp_path, ours.config)
    inputs = processor.prepare(BATCH)
    given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    given |= transformers_inputs(inputs["pixel_values"].to("cpu", torch.float32))
    real = inputs["attention_mask"].bool()
    expected = theirs(**given).logits[real]
    assert (ours(**inputs).logits[real] - expected).abs().max() <= 1e-4 * (expected.max() - expected.min())
    ours.save_pretrained(tmp_path / "saved", processor)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(**given).logits[real], expected)
    opened = VisionLanguageModel.from_pretrained(tmp_path / "saved")
    same = Processor.from_pretrained(tmp_path / "saved", opened.config)
    assert replace(opened.config, pad_token_id=None) == replace(ours.config, pad_token_id=None)
    assert same.images.settings == processor.images.settings


SETTINGS = (
    {},
    {"downsample_mode": "4x", "max_slice_nums": 4, "scale_resolution": 140, "use_image_id": False},
    {"slice_mode": False, "image_mean": [0.4, 0.5, 0.3], "image_std": [0.2, 0.3, 0.5], "resample": 2},
    {"max_slice_nums": 25, "scale_resolution": 60, "patch_size": 4},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_images_are_those_of_transformers_processor(settings):
    """Overviews, slices, their pixels, and what stands in a prompt: tiny, large and very long images."""
    ours, theirs, draw = MiniCPMImages(settings), MiniCPMV4_6ImageProcessorPil(**settings), random.Random(0)
    words = SimpleNamespace(**minicpm_v.ROLES, slice_mode=theirs.slice_mode)
    sizes = [(draw.randint(1, 700), draw.randint(1, 700)) for _ in range(8)]
    for size in ((1, 1), (900, 2), (3, 500), (448, 448), (1100, 700), *sizes):
        image = draw_image(*size)
        expected, visual = theirs(image, return_tensors="pt"), ours.cut(image)
        numbers = [one for part in visual.parts for one in Parts((part,)).to("cpu")]
        own = transformers_inputs(numbers, theirs.patch_size)
        assert torch.equal(own["target_sizes"].int(), expected["target_sizes"]), size
        assert torch.equal(own["pixel_values"], expected["pixel_values"]), size
        folded = 4 if theirs.downsample_mode == "4x" else 16
        text = MiniCPMV4_6Processor.replace_image_token(words, expected, 0, image_token_divisor=folded)
        name = "<image_id>2</image_id>" if theirs.use_image_id else ""
        assert ours.prompt(visual, 2, 3) == name + text, size


@pytest.mark.parametrize("kind", CLASSES)
def test_every_tensor_of_the_published_shapes_has_its_place(kind):
    """Sizes of MiniCPM-V 4.6, and of its text's rotary positions, which are plain."""
    text = published(1024, 3584, 24, 8, 2, 16, {})["text_config"]
    text |= {"vocab_size": 248_094, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000}}
    tower = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14}
    tower |= {"num_attention_heads": 16, "image_size": 980, "model_type": f"{kind}_vision"}
    config = {"model_type": kind, "text_config": text, "vision_config": tower, "tie_word_embeddings": True}
    whole = CLASSES[kind][0].from_dict(config)
    with torch.device("meta"):
        theirs = CLASSES[kind][1](whole)
    stored = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    ours = read_config(config, kind, {})
    expected = parameter_shapes(empty_model(VisionLanguageModel, ours))
    check_shapes(expected, minicpm_v.tensor_map(stored), stored, minicpm_v.IGNORABLE, kind)
    assert ours.text.rotary_dim == 64 and ours.vision.table_side == 70 and not ours.text.rope_sections
    with meta_init():
        empty = VisionLanguageModel(ours)
    assert PACKED_TOWER.unknown(empty.vision_model) is DECODER.unknown(empty.language_model) is None
    written = minicpm_v.write(ours, "bfloat16")
    assert read_config(written, kind, {}) == ours
    again = AutoConfig.for_model(**written)
    assert again.vision_config.to_dict() == whole.vision_config.to_dict() | {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    "changed",
    [
        {"merge_kernel_size": [1, 4]},
        {"insert_layer_id": 9},
        {"vision_config": {"window_kernel_size": [3, 3]}},
    ],
    ids=str,
)
def test_what_has_no_code_is_refused(changed):
    config = {"model_type": "minicpmv4_6", "vision_config": {"num_hidden_layers": 9}, **changed}
    with pytest.raises(ValueError, match=r"expected .* got"):
        minicpm_v.read_config(config, {}, {})


def test_a_processor_that_folds_otherwise_than_the_model_is_refused(tmp_path):
    save_hf(tmp_path, seed=1)
    config = VisionLanguageModel.from_pretrained(tmp_path).config
    edit_json(tmp_path / "preprocessor_config.json", downsample_mode="4x")
    with pytest.raises(ProcessorError, match="does not fit"):
        Processor.from_pretrained(tmp_path, config)


def crosses(size: tuple[int, int], *sides: int) -> Image.Image:
    """Crosses of so many pixels a side, those of each upright band of their own size."""
    image, wide = Image.new("RGB", size, (200, 190, 180)), size[0] // len(sides)
    draw = ImageDraw.Draw(image)
    for band, side in enumerate(sides):
        for top in range(3, size[1] - side, 2 * side):
            for left in range(band * wide + 3, (band + 1) * wide - side, 2 * side):
                right, bottom = left + side - 1, top + side - 1
                draw.line((left, top, right, bottom), (20, 30, 90))
                draw.line((right, top, left, bottom), (20, 30, 90))
    return image


# Rows and columns of patches of each part, and the sum of all numbers, as transformers' image processor of
# MiniCPM-OCR makes them with torchvision 0.28 and OpenCV 5.0.
ADAPTED = [
    ((300, 200), (8,), [(26, 40)], 258_096.460_833),
    ((300, 200), (40,), [(14, 22)], 86_607.546_974),
    ((60, 50), (20,), [(6, 6)], 10_059.764_925),
    ((900, 600), (8, 60), [(26, 40), (36, 28), (36, 28)], 810_004.308_734),
    ((900, 300), (8, 40, 10), [(18, 56), (32, 32), (22, 22), (32, 32)], 910_272.859_872),
]


@pytest.mark.parametrize(("size", "sides", "shapes", "total"), ADAPTED)
def test_small_writing_is_enlarged(size, sides, shapes, total):
    images = MiniCPMImages({"small_image_upsize": "adaptive"}, "minicpm_ocr")
    visual = images.cut(crosses(size, *sides))
    assert [tuple(side // 14 for side in part.pixels.shape[1:]) for part in visual.parts] == shapes
    numbers = [one.double().sum().item() for part in visual.parts for one in Parts((part,)).to("cpu")]
    assert sum(numbers) == pytest.approx(total, abs=1e-3)
    assert visual.positions == sum(rows * columns for rows, columns in shapes) // 4
    assert visual.positions <= images.plan(*size).positions
