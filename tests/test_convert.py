"""Conversions between layouts: the same logits in transformers, in nanoVLM's layout, and back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from data.chat import CHATML_TEMPLATE
from data.processor import Processor
from models import VisionLanguageModel
from models.checkpoints import nanovlm
from models.checkpoints.__main__ import main
from tests import tiny
from tests.hub_server import point_client_at
from tests.processors import draw_image
from tests.test_golden_nanovlm import (
    BAR,
    CASES,
    CURRENT,
    GOLDEN,
    OLD,
    comparable,
    difference,
    expected,
    golden_images,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, Path]:
    """Both golden nanoVLM checkpoints in transformers' layout."""
    folder = tmp_path_factory.mktemp("converted")
    for name in (CURRENT, OLD):
        assert main(["convert", str(GOLDEN / name), str(folder / name)]) == 0
    return {name: folder / name for name in (CURRENT, OLD)}


@pytest.fixture
def command(capsys):
    """Run the command line: (exit status, stdout, stderr)."""

    def run(*arguments) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # from argparse
            status = stop.code
        return status, *capsys.readouterr()

    return run


class TestNanoVLMToTransformers:
    @pytest.mark.parametrize(("folder", "case"), CASES)
    @torch.no_grad()
    def test_golden_logits(self, converted, folder, case):
        """transformers' own model on the converted folder, against what nanoVLM itself recorded. v0.1's
        images stand where the converted one has placeholders."""
        theirs = AutoModelForImageTextToText.from_pretrained(converted[folder]).eval()
        stored, images = expected(folder), golden_images(folder, case)
        ids, wanted = stored[f"{case}.input_ids"], stored[f"{case}.logits"]
        mask = stored.get(f"{case}.attention_mask", torch.ones_like(ids))
        if folder == OLD:
            front = wanted.shape[1] - ids.shape[1]
            places = torch.full((len(ids), front), theirs.config.image_token_id)
            ids, mask = torch.cat((places, ids), 1), torch.cat((torch.ones_like(places), mask), 1)
        rows = comparable(folder, case)
        per_row = {} if images is None else rows_of(theirs, ids, 2 * images - 1)
        for row in rows:
            real = mask[row].bool()
            got = theirs(ids[row, real][None], **per_row.get(row, {})).logits[0]
            assert difference(got[:, : wanted.shape[2]], wanted[row, real]) <= BAR

    @pytest.mark.parametrize("name", [CURRENT, OLD])
    def test_greedy_answers_are_not_changed_by_new_rows(self, converted, name):
        """The rows that v0.1's vocabulary gets are means: their logits never exceed all others."""
        before = VisionLanguageModel.from_pretrained(GOLDEN / name)
        after = VisionLanguageModel.from_pretrained(converted[name])
        old, new = before.config.text.vocab_size, after.config.text.vocab_size
        assert (old, new) == ((400, 400) if name == CURRENT else (300, 304))
        ids = torch.randint(3, 290, (1, 40), generator=torch.Generator().manual_seed(3))
        logits = after(ids).logits
        assert torch.equal(logits.argmax(-1), logits[..., :old].argmax(-1))

    @pytest.mark.parametrize("name", [CURRENT, OLD])
    def test_transformers_answers_a_question(self, converted, name):
        """Processor, chat template and model, a black image among the images."""
        processor = AutoProcessor.from_pretrained(converted[name])
        model = AutoModelForImageTextToText.from_pretrained(converted[name]).eval()
        ours = Processor.from_pretrained(
            converted[name], config=VisionLanguageModel.from_pretrained(converted[name]).config
        )
        for image in (draw_image(100, 40), Image.new("RGB", (40, 70))):
            content = [{"type": "image", "image": image}, {"type": "text", "text": "how many circles?"}]
            inputs = processor.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
            assert torch.equal(inputs["input_ids"], ours.ask(image, "how many circles?")["input_ids"])
            new = model.generate(**inputs, max_new_tokens=3, do_sample=False)
            assert new.shape[1] > inputs["input_ids"].shape[1]

    def test_token_ids_stay(self, converted):
        before, after = (
            Processor.from_pretrained(f).tokenizer for f in (GOLDEN / CURRENT, converted[CURRENT])
        )
        text = "how many circles are there? <row_1_col_2>"
        assert before(text)["input_ids"] == after(text)["input_ids"]
        assert before.convert_tokens_to_ids(["<|image|>", "<|global_image|>"]) == after.convert_tokens_to_ids(
            ["<image>", "<global-img>"]
        )
        assert len(before) == len(after)
        # The names that only Idefics3 has belong to tiles past nanoVLM's largest grid, 3 x 3 here.
        ids = after.convert_tokens_to_ids(["<fake_token_around_image>", "<end_of_utterance>"])
        taken = before.convert_ids_to_tokens(ids)
        assert set(taken) == {"<row_8_col_8>", "<row_8_col_7>"}

    def test_several_images_are_numbered_as_in_nanovlm(self, converted):
        processor = AutoProcessor.from_pretrained(converted[CURRENT])
        parts = [{"type": "text", "text": "which?"}, {"type": "image"}]
        messages = [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "that"},
            {"role": "user", "content": parts},
        ]
        shown = processor.apply_chat_template(messages, add_generation_prompt=True)
        flat = [
            {"role": "user", "content": "<image: 0><image><image: 1><image>which?"},
            {"role": "assistant", "content": "that"},
            {"role": "user", "content": "which?"},
        ]
        assert shown == processor.tokenizer.apply_chat_template(
            flat, chat_template=CHATML_TEMPLATE, add_generation_prompt=True, tokenize=False
        )

    def test_without_a_tokenizer(self, tmp_path, command, monkeypatch):
        """As on the Hub: config.json names another repository, which is not in the cache here."""
        point_client_at(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
        source = tmp_path / "bare"
        source.mkdir()
        config = json.loads((GOLDEN / OLD / "config.json").read_text()) | {"lm_tokenizer": "nobody/nothing"}
        (source / "config.json").write_text(json.dumps(config))
        (source / "model.safetensors").write_bytes((GOLDEN / OLD / "model.safetensors").read_bytes())
        status, _, err = command("convert", source, tmp_path / "to")
        assert status == 2 and "nobody/nothing" in err and "--no-processor" in err
        assert not (tmp_path / "to").exists()
        status, _, err = command("convert", source, tmp_path / "to", "--no-processor")
        assert status == 0 and "has no processor" in err
        assert not (tmp_path / "to" / "tokenizer.json").exists()
        assert VisionLanguageModel.from_pretrained(tmp_path / "to").config.image_token_id == 300


def rows_of(model, ids, images) -> dict[int, dict]:
    """The images of each row, by how many places it has."""
    per_tile = model.model.image_seq_len
    counts = [int((row == model.config.image_token_id).sum()) // per_tile for row in ids]
    split = images.split(counts)
    return {row: {"pixel_values": tiles[None]} for row, tiles in enumerate(split) if len(tiles)}


class TestTransformersToNanoVLM:
    @pytest.fixture(scope="class")
    @classmethod
    def original(cls, tmp_path_factory) -> Path:
        """SmolVLM with its processor."""
        processor, model = tiny.model_with_processor("smolvlm-1-tile")
        ours = VisionLanguageModel.from_pretrained(tiny.save(model, tmp_path_factory.mktemp("theirs")))
        return ours.save_pretrained(tmp_path_factory.mktemp("smolvlm") / "folder", processor)

    @pytest.fixture(scope="class")
    @classmethod
    def nano(cls, original) -> Path:
        assert main(["convert", str(original), str(original.parent / "nano"), "--to", "nanovlm"]) == 0
        return original.parent / "nano"

    def test_the_files_are_nanovlms(self, nano):
        config = json.loads((nano / "config.json").read_text())
        golden = json.loads((GOLDEN / CURRENT / "config.json").read_text())
        assert nanovlm.recognises(config)
        # nanoVLM makes a dataclass of it: an unknown key is an error there, a missing one its own default.
        assert config.keys() <= golden.keys()
        defaulted = {"vit_model_type", "lm_model_type", "vlm_checkpoint_path", "hf_repo_name"}
        assert golden.keys() - config.keys() == defaulted
        stored, theirs = (load_file(folder / "model.safetensors") for folder in (nano, GOLDEN / CURRENT))
        tied = {"decoder.token_embedding.weight"}
        assert stored.keys() == theirs.keys() | (set() if config["lm_tie_weights"] else tied)

    @torch.no_grad()
    def test_logits_and_prompts(self, original, nano):
        before, after = (VisionLanguageModel.from_pretrained(folder) for folder in (original, nano))
        assert after.config.image_token_id == before.config.image_token_id
        processor = Processor.from_pretrained(nano, config=after.config)
        inputs = processor.ask(draw_image(60, 30), "how many circles are there?")
        pixels = inputs["pixel_values"]
        got = after(inputs["input_ids"], pixels).logits
        wanted = before(inputs["input_ids"], 2 * pixels - 1).logits
        assert difference(got, wanted) <= BAR
        shown = processor.tokenizer.decode(inputs["input_ids"][0])
        assert shown.startswith("<|im_start|>User: <global-img><image>")
        assert shown.endswith("how many circles are there?<end_of_utterance>\nAssistant:")

    def test_there_and_back(self, converted, tmp_path, command):
        """nanoVLM's golden weights through transformers' layout: bit for bit, but for one rounding."""
        status, _, err = command("convert", converted[CURRENT], tmp_path / "back", "--to", "nanovlm")
        assert status == 0, err
        back, golden = (load_file(f / "model.safetensors") for f in (tmp_path / "back", GOLDEN / CURRENT))
        assert back.keys() == golden.keys()
        bias = "vision_encoder.patch_embedding.conv.bias"
        assert all(torch.equal(back[name], golden[name]) for name in golden if name != bias)
        assert difference(back[bias], golden[bias]) <= 1e-6
        with safe_open(tmp_path / "back" / "model.safetensors", "pt") as file:
            assert file.metadata()["decoder.token_embedding.weight"] == "decoder.head.weight"

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            ("idefics3-llama3-rope", "it has no llama3 rotary scaling"),
            ("idefics3-own-head-dim", "48 / 4, these are 16"),
            ("idefics3-biases", "its language model has no biases"),
        ],
    )
    def test_what_nanovlm_has_no_words_for(self, tmp_path, command, name, sentence):
        processor, model = tiny.model_with_processor(name)
        theirs = VisionLanguageModel.from_pretrained(tiny.save(model, tmp_path / "theirs"))
        source = theirs.save_pretrained(tmp_path / "source", processor)
        status, _, err = command("convert", source, tmp_path / "to", "--to", "nanovlm")
        assert status == 2 and "cannot be written in nanoVLM's layout" in err and sentence in err
        assert not (tmp_path / "to").exists()

    def test_a_model_without_a_tokenizer(self, tmp_path, command):
        source = tiny.save(tiny.hf_model("idefics3-1-tile"), tmp_path / "source")
        status, _, err = command("convert", source, tmp_path / "to", "--to", "nanovlm")
        assert status == 2 and "found neither" in err


def test_the_commands_of_the_page(tmp_path, monkeypatch, command):
    """Each line of docs/hub.md's block about converting, in a folder of its own; bfloat16 stays so on the way
    back. The last one prints what the page shows, but for the differences, which are the machine's."""
    text = (ROOT / "docs/hub.md").read_text(encoding="utf-8").split("## Convert and inspect")[1]
    _, block, _, shown, *_ = text.split("```")
    start = ".venv/bin/python -m models.checkpoints "
    lines = [line.removeprefix(start) for line in block.splitlines() if line.startswith(start)]
    assert len(lines) == 4
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    for line in lines:
        status, _, err = command(*line.split())
        assert status == 0, err
    assert without_differences(err) == without_differences(shown.removeprefix("text\n"))
    for name, dtype in (("float32", "F32"), ("nano", "BF16"), ("back", "BF16")):
        with safe_open(tmp_path / "runs" / f"shapes-{name}" / "model.safetensors", "pt") as file:
            names = [key for key in file.keys() if key != nanovlm.INV_FREQ]  # noqa: SIM118
            assert {file.get_slice(key).get_dtype() for key in names} == {dtype}


def without_differences(printed: str) -> list[str]:
    return re.sub(r"difference of logits \S+,", "", printed).splitlines()
