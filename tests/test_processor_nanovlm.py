"""The processor of nanoVLM checkpoints, in their three generations: tiles, prompts and ids are golden."""

from __future__ import annotations

import json
import shutil

import PIL
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from data.errors import ProcessorError
from data.processor import Processor, PromptError
from families.nanovlm import NanoVLMImages
from tests.hub_server import HubServer, point_client_at
from tests.processors import GOLDEN, assert_same, draw_image, nano_config, processor

resize = Image.Image.resize
PREPROCESSING = json.loads((GOLDEN / "preprocessing-current" / "expected.json").read_text())


def height_first(image: Image.Image, size: tuple[int, int], resample: int) -> Image.Image:
    """Resize as Pillow 13 does a tall image, with which these tiles were recorded. Pillow 12 does the width
    first, and rounds in between: some pixels of an image of noise differ."""
    return resize(resize(image, (image.width, size[1]), resample), size, resample)


@pytest.mark.parametrize("case", PREPROCESSING["cases"])
def test_nanovlm_tiles_and_prompt_are_golden(case: str, monkeypatch):
    if int(PIL.__version__.split(".")[0]) < 13 and case.startswith("tall"):
        monkeypatch.setattr(Image.Image, "resize", height_first)
    expected = PREPROCESSING["cases"][case]
    config = nano_config(resize_to_max_side_len=expected["resize_to_max_side_len"])
    images = NanoVLMImages(config, processor("nanovlm-current").tokenizer)
    image = Image.open(GOLDEN / "preprocessing-current" / expected["file"]).convert("RGB")
    visual = images.cut(image)
    assert list(visual.grid) == expected["grid_n_h_n_w"]
    assert list(visual.parts.shape) == expected["output_shape"]
    assert_golden(visual.parts.to("cpu"), case)
    assert images.prompt(visual, 0, 1) == expected["image_string"]


def assert_golden(tiles: torch.Tensor, case: str) -> None:
    """Tiles to the bit. What torch makes small of the whole image rounds as its processor does."""
    stored = load_file(GOLDEN / "preprocessing-current" / "expected.safetensors")
    if f"{case}.tiles_u8" not in stored:  # it has the same ones
        case = case.replace(".no_max", ".to_max")
    grid, whole = stored[f"{case}.tiles_u8"], stored.get(f"{case}.global_f32")
    assert torch.equal(tiles[-len(grid) :], grid.float() / 255)
    assert len(tiles) == len(grid) + (whole is not None)
    if whole is not None:
        torch.testing.assert_close(tiles[0], whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", ["to_max", "no_max"])
def test_nanovlm_resize_rule_is_golden(rule: str):
    config = nano_config(vit_img_size=512, max_img_size=2048, resize_to_max_side_len=rule == "to_max")
    images = NanoVLMImages(config, processor("nanovlm-current").tokenizer)
    table = PREPROCESSING["resize_rule_table"][f"patch_512_max_2048_{rule}"]
    assert len(table) == 19
    expected = [(row, row["new_h_w"]) for row in table]
    for name, examples in PREPROCESSING["float_rounding_overshoot"]["examples"].items():
        if name.endswith("to_max") == (rule == "to_max"):
            expected += [(row, row["nanovlm_new_h_w"]) for row in examples["first"]]
    for row, size in expected:
        assert [512 * tiles for tiles in images.grid(row["w"], row["h"])] == size, row


@pytest.mark.parametrize("kind", ["nanovlm-current", "nanovlm-base"])
def test_nanovlm_end_to_end_inputs_are_golden(kind: str):
    p = processor(kind)
    golden = load_file(GOLDEN / "nanovlm-current" / "expected.safetensors")
    inputs = p.ask(GOLDEN / "preprocessing-current" / "wide_100x40.png", "What is in the picture?")
    assert torch.equal(inputs["input_ids"], golden["end_to_end.input_ids"])
    assert_golden(inputs["pixel_values"], "wide_100x40.to_max")
    assert inputs.image_tokens == [28]
    assert "pixel_attention_mask" not in inputs
    text = p.prepare([{"role": "user", "content": "What time is it on the clock?"}])
    assert torch.equal(text["input_ids"], golden["text_only.input_ids"])
    assert "pixel_values" not in text


def test_nanovlm_batch_is_golden():
    """Two rows, one with two images that are numbered; left padding."""
    golden = load_file(GOLDEN / "nanovlm-current" / "expected.safetensors")
    config = nano_config(resize_to_max_side_len=False)
    p = processor("nanovlm-current")
    p = Processor(NanoVLMImages(config, p.tokenizer), p.tokenizer, p.chat.chat_template)
    inputs = p.prepare(
        [
            p.conversation(draw_image(60, 60), "How many boats?"),
            p.conversation(
                [draw_image(100, 40), draw_image(60, 60)], "Describe both images in one sentence."
            ),
        ]
    )
    assert torch.equal(inputs["input_ids"], golden["batch.input_ids"])
    assert torch.equal(inputs["attention_mask"], golden["batch.attention_mask"])
    assert inputs["pixel_values"].shape == golden["batch.images"].shape
    assert inputs.image_tokens == [4, 16]


def test_nanovlm_v01_inputs_are_golden():
    p = processor("nanovlm-v0.1")
    golden = load_file(GOLDEN / "nanovlm-v0.1" / "expected.safetensors")
    path = GOLDEN / "preprocessing-current" / "wide_100x40.png"
    inputs = p.ask(path, "What is in the picture?")
    assert inputs["input_ids"].tolist() == [[300] * 4 + golden["end_to_end.input_ids"][0].tolist()]
    assert torch.equal(inputs["pixel_values"], golden["end_to_end.images_u8"].float() / 255)
    assert inputs.image_tokens == [4]
    questions = ("How many boats?", "What is the person on the pier holding in the picture?")
    batch = p.prepare([p.conversation(path, question) for question in questions])
    for row, (ids, mask) in enumerate(zip(golden["batch.input_ids"], golden["batch.attention_mask"])):
        real = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
        assert real == [300] * 4 + ids[mask.bool()].tolist()
    for images, system in (([], None), ([path, path], None), (path, "be brief")):
        with pytest.raises(PromptError):
            p.ask(images, "What?", system)


def test_nanovlm_v01_training_text_is_golden():
    p = processor("nanovlm-v0.1")
    golden = load_file(GOLDEN / "nanovlm-v0.1" / "expected.safetensors")
    texts = (
        ("What is this?", "This is a map of the town."),
        ("How many boats are there?", "There are two boats."),
    )
    rows = [
        [*p.conversation(draw_image(8, 8), question), {"role": "assistant", "content": answer}]
        for question, answer in texts
    ]
    inputs = p.prepare(rows, add_generation_prompt=False, return_assistant_mask=True)
    for i in range(2):
        ids = inputs["input_ids"][i][inputs["attention_mask"][i] == 1][4:]
        labels = golden["train.labels"][i]
        assert torch.equal(ids, golden["train.input_ids"][i][golden["train.attention_mask"][i] == 1])
        assert torch.equal(inputs["input_ids"][i][inputs["assistant_mask"][i]], labels[labels != -100])


def test_a_tokenizer_of_another_repository(tmp_path, monkeypatch):
    """As nanoVLM's checkpoints on the Hub have it; its files are held against the same limits."""
    expected = Processor.from_pretrained(GOLDEN / "nanovlm-current")
    folder = shutil.copytree(GOLDEN / "nanovlm-current", tmp_path / "model")
    words = (folder / "tokenizer").rename(tmp_path / "words")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"lm_tokenizer": "owner/words"}))
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    with HubServer({"owner/words": words}) as hub:
        for offline in (False, True):
            point_client_at(monkeypatch, hub.url, tmp_path / "cache", offline)
            opened = Processor.from_pretrained(folder)
            assert_same(opened.prepare(question), expected.prepare(question))
        settings = json.loads((words / "tokenizer_config.json").read_text())
        settings["tokenizer_class"] = "Idefics3Processor"
        (words / "tokenizer_config.json").write_text(json.dumps(settings))
        point_client_at(monkeypatch, hub.url, tmp_path / "other")
        with pytest.raises(ProcessorError):
            Processor.from_pretrained(folder)
    point_client_at(monkeypatch, "http://127.0.0.1:9", tmp_path / "empty")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: pytest.fail("waited"))
    with pytest.raises(ProcessorError):
        Processor.from_pretrained(folder)
