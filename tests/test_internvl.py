"""InternVL3 and 3.5, Qianfan-OCR: of a checkpoint in any layout Ocelli computes what transformers does, and
what it saves transformers opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    InternVLConfig,
    InternVLForConditionalGeneration,
    QianfanOCRConfig,
    QianfanOCRForConditionalGeneration,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qianfan_ocr.processing_qianfan_ocr import QianfanOCRProcessor

from data.errors import ProcessorError
from data.processor import Processor
from families import internvl
from generation.fast.native import build
from generation.fast.native.step import NativeStep
from generation.fast.tower import FastTower
from inference.fast import speed_up
from models import VisionLanguageModel
from models.checkpoints.files import CheckpointError
from models.checkpoints.load import empty_model, parameter_shapes, read_config
from models.checkpoints.weights import check_shapes
from recipes.shapes.tokenizer import build_tokenizer
from tests.processors import seen, user
from tests.rows import WORDS
from tests.tiny import randomize

BAR = 1e-4
SIDE, PATCH, VOCAB = 28, 7, 352  # pixels of a tile and a patch; 2 x 2 positions a tile
TEXTS = {
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qianfan": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
}
LLAMA = {"model_type": "llama", "tie_word_embeddings": False}
# The layers of InternVL3.5 1B, 2B and 4B: width, inner width, layers, heads; 8 key heads of 128 everywhere.
PUBLISHED = {"1B": (1024, 3072, 28, 16), "2B": (2048, 6144, 28, 16), "4B": (2560, 9728, 36, 32)}
SIZES = ((30, 30), (90, 50), (40, 120))  # one tile, 2 x 4 and the image, 3 x 1 and the image
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PIXELS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def tokenizer(kind: str = ""):
    roles = {
        role: token for role, token in internvl.ROLES.items() if "video" not in role or kind != "qianfan"
    }
    made = build_tokenizer(WORDS, vocab_size=300)
    made.add_special_tokens({"additional_special_tokens": [*roles.values()]})
    made._set_model_specific_special_tokens(special_tokens=roles)
    return made


def hf_config(kind: str, **vision) -> InternVLConfig | QianfanOCRConfig:
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    own = TEXTS.get(kind, LLAMA)
    text = {"hidden_size": 48, "intermediate_size": 80, "vocab_size": VOCAB, "eos_token_id": None}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    seen = {"hidden_size": 32, "intermediate_size": 56, "attention_bias": True}
    seen |= {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}
    return (QianfanOCRConfig if kind == "qianfan" else InternVLConfig)(
        text_config=layers | text | own,
        vision_config=layers | seen | vision,
        image_token_id=tokenizer(kind).convert_tokens_to_ids(internvl.IMAGE),
        tie_word_embeddings=own["tie_word_embeddings"],
    )


def template(kind: str) -> str:
    return TEMPLATE.replace("<IMG_CONTEXT>", "<image>") if kind == "qianfan" else TEMPLATE


def write_processor(folder: Path, kind: str = "") -> None:
    tokenizer(kind).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template(kind))
    sizes = {"size": {"height": SIDE, "width": SIDE}}
    GotOcr2ImageProcessorPil(**PIXELS, **sizes).save_pretrained(folder)
    (folder / "processor_config.json").write_text('{"image_seq_length": 4}')


def save_hf(kind: str, folder: Path, **vision):
    theirs = QianfanOCRForConditionalGeneration if kind == "qianfan" else InternVLForConditionalGeneration
    model = theirs(hf_config(kind, **vision)).eval()
    randomize(model, seed=0)
    model.save_pretrained(folder)
    write_processor(folder, kind)
    return model


@pytest.fixture(scope="module", params=TEXTS)
def both(request, tmp_path_factory):
    """transformers' model, its folder, and what Ocelli makes of that."""
    folder = tmp_path_factory.mktemp("internvl") / request.param
    theirs = save_hf(request.param, folder)
    ours = VisionLanguageModel.from_pretrained(folder)
    return theirs, folder, ours, Processor.from_pretrained(folder, ours.config)


@pytest.fixture
def reference(monkeypatch):
    """transformers' processor of a folder; it would want torchvision, for videos."""
    monkeypatch.setattr(InternVLProcessor, "check_argument_for_proper_class", lambda *given: None)
    monkeypatch.setattr(QianfanOCRProcessor, "check_argument_for_proper_class", lambda *given: None)

    def opened(folder: Path) -> InternVLProcessor | QianfanOCRProcessor:
        kind = folder.name if folder.name == "qianfan" else ""
        made = QianfanOCRProcessor if kind else InternVLProcessor
        images = GotOcr2ImageProcessorPil.from_pretrained(folder)
        return made(images, tokenizer(kind), image_seq_length=4, chat_template=template(kind))

    return opened


CONVERSATIONS = {
    **{f"{size[0]} x {size[1]}": [user(seen(size), "how many red squares")] for size in SIZES},
    "two images": [user(seen(SIZES[0]), "and", seen(SIZES[1], 1), "circles are there three of them")],
    "ragged": [
        user(seen(SIZES[2]), "how many"),
        user("are there two squares and three red circles"),
        user(seen(SIZES[0]), seen(SIZES[1], 1), "red"),
    ],
}


@pytest.mark.slow(but=4)
@torch.no_grad()
@pytest.mark.parametrize("batch", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_prompts_logits_and_answers_are_theirs(both, batch, reference):
    theirs, folder, ours, processor = both
    said = reference(folder)
    images = [part["image"] for row in batch for part in row[0]["content"] if part["type"] == "image"]
    texts = [said.apply_chat_template(row, add_generation_prompt=True) for row in batch]
    expected = said(images=images, text=texts, return_tensors="pt", padding=True)
    inputs = processor.prepare(batch)
    real = inputs["attention_mask"].bool()
    assert torch.equal(real, expected["attention_mask"].bool())
    assert torch.equal(inputs["input_ids"][real], expected["input_ids"][real])
    assert torch.equal(inputs["pixel_values"], expected["pixel_values"])
    logits, others = ours(**inputs).logits, theirs(**expected).logits
    assert (logits - others)[real].abs().max() <= BAR
    answers = theirs.generate(**expected, max_new_tokens=12, do_sample=False)[:, real.shape[1] :]
    assert torch.equal(ours.generate(**inputs, max_new_tokens=12, stop_token_ids=()), answers)
    assert len(answers.unique()) > 3 or ours.config.tie_word_embeddings  # which repeats itself


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("side", "count", "most"), [(SIDE, 300, 12), (SIDE, 9, 4), (SIDE, 3, 1), (448, 3, 12)]
)
def test_pixels_are_theirs(side, count, most):
    rng = np.random.default_rng(side)
    settings = {"size": {"height": side, "width": side}, "max_patches": most, **PIXELS}
    theirs, ours = GotOcr2ImageProcessorPil(**settings), internvl.InternVLImages(settings, 4)
    grids = set()
    for _ in range(count):
        width, height = (int(one) for one in rng.integers(1, 6 * side, 2))
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        visual = ours.cut(image)
        expected = theirs(image, crop_to_patches=True, return_tensors="pt")["pixel_values"]
        assert torch.equal(visual.parts.to("cpu"), expected), (width, height)
        assert ours.plan(width, height).parts.shape == visual.parts.shape
        grids.add(visual.grid)
    assert len(grids) > count / 15 or most == 1


@torch.no_grad()
def test_transformers_opens_what_is_saved(both, tmp_path):
    first, folder, ours, processor = both
    saved = ours.save_pretrained(tmp_path / "saved", processor)
    theirs, loading = type(first).from_pretrained(saved, output_loading_info=True)
    assert not any(loading.values())
    inputs = processor.prepare(CONVERSATIONS["two images"])
    original = type(first).from_pretrained(folder)(**inputs).logits
    assert torch.equal(theirs(**inputs).logits, original)
    again_processor = Processor.from_pretrained(saved, ours.config)
    again = again_processor.prepare(CONVERSATIONS["two images"])
    assert all(torch.equal(again[name], inputs[name]) for name in inputs)
    images = GotOcr2ImageProcessorPil.from_pretrained(saved)
    assert (images.size.height, images.max_patches) == (SIDE, 12)
    config = json.loads((saved / "tokenizer_config.json").read_text())
    of_qianfan = folder.name == "qianfan"
    assert (config["extra_special_tokens"].items() >= internvl.ROLES.items()) is not of_qianfan
    assert ("<image>" in (saved / "chat_template.jinja").read_text()) is of_qianfan
    assert ("Qianfan" in (saved / "config.json").read_text()) is of_qianfan
    assert (again_processor.reading.prompt("page") == "Parse this document to Markdown.") is of_qianfan
    described = json.loads((saved / "preprocessor_config.json").read_text())
    assert described["image_processor_type"] == "GotOcr2ImageProcessor"


def test_names_of_modules_and_of_files(both, tmp_path):
    """transformers writes names of its older versions, and opens those of its modules as well."""
    theirs, folder, ours, _ = both
    shutil.copytree(folder, tmp_path / "modules")
    tensors = {name: tensor for name, tensor in theirs.state_dict().items() if "lm_head" not in name}
    if not ours.config.tie_word_embeddings:
        tensors["lm_head.weight"] = theirs.lm_head.weight
    assert not tensors.keys() & load_file(folder / "model.safetensors").keys()
    published = load_file(folder / "model.safetensors")
    for stored in (
        tensors,
        {name.replace(".model.encoder.", ".model."): published[name] for name in published},
    ):
        save_file(stored, tmp_path / "modules/model.safetensors")
        opened = VisionLanguageModel.from_pretrained(tmp_path / "modules").state_dict()
        assert all(torch.equal(tensor, opened[name]) for name, tensor in ours.state_dict().items())


@pytest.mark.slow(but=1)
@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen2", "qianfan"])
@pytest.mark.parametrize(
    "vision",
    [{"norm_type": "rms_norm", "attention_bias": False}, {"use_qk_norm": True}],
    ids=["as in InternViT-6B", "norms of queries and keys"],
)
def test_other_towers(vision, kind, tmp_path):
    theirs = save_hf(kind, tmp_path / "hf", **vision)
    ours = VisionLanguageModel.from_pretrained(tmp_path / "hf")
    inputs = Processor.from_pretrained(tmp_path / "hf").prepare(CONVERSATIONS["two images"])
    assert (ours(**inputs).logits - theirs(**inputs).logits).abs().max() <= BAR
    saved = ours.save_pretrained(tmp_path / "saved")
    again = AutoModelForImageTextToText.from_pretrained(saved)
    assert torch.equal(again(**inputs).logits, theirs(**inputs).logits)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("size", PUBLISHED)
def test_published_shapes(size):
    """Every tensor of transformers' model has its place in ours, and nothing else has one."""
    width, inner, layers, heads = PUBLISHED[size]
    text = {"model_type": "qwen3", "hidden_size": width, "intermediate_size": inner, "vocab_size": 151_936}
    text |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8}
    config = InternVLConfig(
        text_config=text | {"head_dim": 128, "max_position_embeddings": 40_960},
        vision_config={"attention_bias": True},
        image_token_id=151_671,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        theirs = InternVLForConditionalGeneration(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    ours = internvl.read_config(json.loads(config.to_json_string(use_diff=False)), {}, {})
    assert internvl.positions(ours) == 256
    expected = parameter_shapes(empty_model(VisionLanguageModel, ours))
    check_shapes(expected, internvl.tensor_map(shapes), shapes, internvl.IGNORABLE, size)
    assert internvl.read_config(internvl.write(ours, "bfloat16"), {}, {}) == ours


@pytest.mark.parametrize(
    "change",
    [
        {"vision_feature_layer": -2},
        {"downsample_ratio": 0.4},
        {"vision_config": {"use_mean_pooling": False}},
        {"vision_config": {"norm_type": "batch_norm"}},
        {"vision_config": {"use_qk_norm": True, "layer_norm_eps": 1e-5}},
        {"text_config": {"model_type": "internlm2"}},
    ],
)
def test_what_it_has_no_code_for_is_refused(change):
    with pytest.raises(CheckpointError):
        read_config({"model_type": "internvl"} | change, "here")


def test_dynamic_scaling_is_none_within_the_context():
    """InternVL3's text models ask for it; it sets in beyond max_position_embeddings, where no prompt goes."""
    plain = {"model_type": "qwen2", "rope_theta": 1e6}
    scaled = plain | {"rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}}
    first, second = (
        internvl.read_config({"model_type": "internvl", "text_config": text}, {}, {})
        for text in (plain, scaled)
    )
    assert first == second and first.text.rope_theta == 1e6


@pytest.mark.parametrize("settings", [{"do_resize": False}])
def test_images_that_are_not_cut_so_are_refused(settings):
    with pytest.raises(ProcessorError):
        internvl.InternVLImages({"size": {"height": SIDE, "width": SIDE}} | settings, 4)


# ----------------------------------------------------------------------------------- answers and training
@torch.no_grad()
def test_c_serves_it(both):
    try:
        build.find_compiler()
    except build.NoCompiler:
        pytest.skip("no C compiler on this machine")
    _, folder, ours, processor = both
    inputs, options = processor.prepare(CONVERSATIONS["ragged"]), {"max_new_tokens": 12, "stop_token_ids": ()}
    model = VisionLanguageModel.from_pretrained(folder)
    step = speed_up(model)[0]
    assert isinstance(step, NativeStep) and isinstance(model.vision_model, FastTower)
    features = [torch.cat(tuple(one.encode_images(inputs["pixel_values"]))) for one in (model, ours)]
    torch.testing.assert_close(*features, atol=BAR, rtol=BAR)
    alone = model.vision_model(inputs["pixel_values"][3:4])
    assert torch.equal(alone, model.vision_model(inputs["pixel_values"])[3:4])
    assert torch.equal(
        model.generate(**inputs, decode_step=step, **options), ours.generate(**inputs, **options)
    )
