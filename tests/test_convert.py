"""Conversions: the same logits in transformers, in nanoVLM's layout and back; nothing lost if one fails."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from data.processor import Processor
from families import nanovlm
from models import VisionLanguageModel
from tests import tiny
from tests.hub_server import HubServer, point_client_at
from tests.processors import assert_same, draw_image
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
from tools import convert as conversion
from tools.__main__ import main
from tools.convert import convert

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, Path]:
    """Both golden nanoVLM checkpoints in transformers' layout."""
    folder = tmp_path_factory.mktemp("converted")
    for name in (CURRENT, OLD):
        assert main(["convert", str(GOLDEN / name), str(folder / name)]) == 0
    return {name: folder / name for name in (CURRENT, OLD)}


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A model without a processor, as transformers writes it, in float32."""
    return tiny.save(tiny.hf_model("smolvlm-1-tile"), tmp_path_factory.mktemp("bare") / "model")


@pytest.fixture
def command(capsys):
    """Run `convert`: what it said on stderr."""

    def run(*arguments, status: int = 0) -> str:
        capsys.readouterr()
        try:
            ended = main(["convert", *map(str, arguments)])
        except SystemExit as stop:  # from argparse
            ended = stop.code
        err = capsys.readouterr().err
        assert ended == status, err
        return err

    return run


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


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

    def test_without_a_tokenizer(self, tmp_path, command, monkeypatch):
        """As on the Hub: config.json names another repository, which is not in the cache here."""
        point_client_at(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
        source = tmp_path / "bare"
        source.mkdir()
        config = json.loads((GOLDEN / OLD / "config.json").read_text()) | {"lm_tokenizer": "nobody/nothing"}
        (source / "config.json").write_text(json.dumps(config))
        (source / WEIGHTS).write_bytes((GOLDEN / OLD / WEIGHTS).read_bytes())
        err = command(source, tmp_path / "to", status=2)
        assert "nobody/nothing" in err and "--no-processor" in err and not (tmp_path / "to").exists()
        command(source, tmp_path / "to", "--no-processor")
        assert not (tmp_path / "to" / "tokenizer.json").exists()
        assert VisionLanguageModel.from_pretrained(tmp_path / "to").config.image_token_id == 300


# Changes to config.json of the golden nanoVLM checkpoint: lengths and rules of other checkpoints, a grid that
# leaves no tile's name for Idefics3's own tokens, and the generation without tiles.
BEFORE = {
    "golden": {},
    "of its own lengths": {"resize_to_max_side_len": False, "lm_max_length": 200, "hf_repo_name": "me/nano"},
    "one square": {"max_img_size": None, "resize_to_max_side_len": None},
}


def nano_before(folder: Path, **changes) -> dict:
    """The golden checkpoint in a folder, its config.json with changes (None: absent); returns that."""
    shutil.copytree(GOLDEN / CURRENT, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return config


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

    @torch.no_grad()
    def test_files_logits_and_prompts(self, original, tmp_path, command):
        nano = tmp_path / "nano"
        command(original, nano, "--to", "nanovlm")
        config = json.loads((nano / "config.json").read_text())
        golden = json.loads((GOLDEN / CURRENT / "config.json").read_text())
        # nanoVLM makes a dataclass of it: an unknown key is an error there, a missing one its own default.
        assert nanovlm.recognises(config) and config.keys() <= golden.keys()
        defaulted = {"vit_model_type", "lm_model_type", "vlm_checkpoint_path", "hf_repo_name"}
        assert golden.keys() - config.keys() == defaulted
        stored, theirs = (load_file(folder / WEIGHTS) for folder in (nano, GOLDEN / CURRENT))
        tied = {"decoder.token_embedding.weight"}
        assert stored.keys() == theirs.keys() | (set() if config["lm_tie_weights"] else tied)

        before, after = (VisionLanguageModel.from_pretrained(folder) for folder in (original, nano))
        processor = Processor.from_pretrained(nano, config=after.config)
        inputs = processor.ask(draw_image(60, 30), "how many circles are there?")
        ids, pixels = inputs["input_ids"], inputs["pixel_values"]
        assert difference(after(ids, pixels).logits, before(ids, 2 * pixels - 1).logits) <= BAR
        shown = processor.tokenizer.decode(ids[0])
        assert shown.startswith("<|im_start|>User: <global-img><image>")
        assert shown.endswith("how many circles are there?<end_of_utterance>\nAssistant:")

    @pytest.mark.parametrize("kind", BEFORE)
    def test_there_and_back(self, tmp_path, command, kind):
        """nanoVLM's golden checkpoint through transformers' layout, in two dtypes on the way: its weights bit
        for bit, but for one rounding, its config, and its own inputs for any image and question."""
        before, hub, back = tmp_path / "before", tmp_path / "hub", tmp_path / "back"
        config = nano_before(before, **BEFORE[kind])
        command(before, hub)
        command(hub, tmp_path / "again", "--dtype", "float32")
        command(tmp_path / "again", back, "--to", "nanovlm")
        assert json.loads((back / "config.json").read_text()) == config
        tensors, golden = (load_file(f / WEIGHTS) for f in (back, GOLDEN / CURRENT))
        assert tensors.keys() == golden.keys()
        bias = "vision_encoder.patch_embedding.conv.bias"
        assert all(torch.equal(tensors[name], golden[name]) for name in golden if name != bias)
        assert difference(tensors[bias], golden[bias]) <= 1e-6
        with safe_open(back / WEIGHTS, "pt") as file:
            assert file.metadata()["decoder.token_embedding.weight"] == "decoder.head.weight"
        ours, theirs = Processor.from_pretrained(back), Processor.from_pretrained(before)
        assert ours.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()
        for size in ((20, 20), (100, 40), (150, 190)):
            images = [draw_image(*size), draw_image(*size[::-1])]
            for question in ("how many?", "what is <image> or <|image|>?"):
                assert_same(ours.ask(images, question), theirs.ask(images, question))

    def test_what_was_trained_since_keeps_its_own_prompts(self, converted, tmp_path, command, monkeypatch):
        """Saved by Ocelli, with an adapter merged, or trained in transformers, which keeps the record, it has
        prompts of transformers. An upload of what was converted has not."""
        model = VisionLanguageModel.from_pretrained(converted[CURRENT], dtype="stored")
        processor = Processor.from_pretrained(converted[CURRENT])
        trained = model.save_pretrained(tmp_path / "trained", processor)
        theirs = AutoModelForImageTextToText.from_pretrained(trained)
        adapter = tmp_path / "adapter"
        get_peft_model(theirs, LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter)
        command(trained, tmp_path / "1", "--to", "nanovlm")
        command(converted[CURRENT], tmp_path / "2", "--to", "nanovlm", "--adapter", adapter)
        shutil.copytree(converted[CURRENT], tmp_path / "kept")
        theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "kept")
        with torch.no_grad():
            next(theirs.parameters()).mul_(1.001)
        theirs.save_pretrained(tmp_path / "kept")
        assert conversion.WAS in json.loads((tmp_path / "kept" / "config.json").read_text())
        command(tmp_path / "kept", tmp_path / "4", "--to", "nanovlm")
        for name in ("1", "2", "4"):
            config = json.loads((tmp_path / name / "config.json").read_text())
            assert config["vlm_extra_tokens"]["image_token"] == "<image>"
        with HubServer({}, uploads=tmp_path / "hub") as hub:
            point_client_at(monkeypatch, hub.url, tmp_path / "cache")
            command(GOLDEN / CURRENT, tmp_path / "pushed", "--push", "me/nano")
            command("me/nano", tmp_path / "3", "--to", "nanovlm")
        config = json.loads((tmp_path / "3" / "config.json").read_text())
        assert config["vlm_extra_tokens"]["image_token"] == "<|image|>"

    @pytest.mark.parametrize(
        ("name", "named"),
        [("idefics3-llama3-rope", "llama3"), ("idefics3-own-head-dim", "16"), ("idefics3-biases", "biases")],
    )
    def test_what_nanovlm_has_no_words_for(self, tmp_path, command, name, named):
        processor, model = tiny.model_with_processor(name)
        theirs = VisionLanguageModel.from_pretrained(tiny.save(model, tmp_path / "theirs"))
        source = theirs.save_pretrained(tmp_path / "source", processor)
        assert named in command(source, tmp_path / "to", "--to", "nanovlm", status=2)
        assert not (tmp_path / "to").exists()


def test_the_commands_of_the_page(tmp_path, monkeypatch, command, capsys):
    """Each line of docs/hub.md's block about converting, in a folder of its own; bfloat16 stays so on the way
    back. The last one prints what the page shows, but for the differences, which are the machine's."""
    text = (ROOT / "docs/hub.md").read_text(encoding="utf-8").split("## Convert and inspect")[1]
    _, block, _, shown, *_ = text.split("```")
    start = ".venv/bin/python -m tools "
    lines = [line.removeprefix(start) for line in block.splitlines() if line.startswith(start)]
    assert len(lines) == 4
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    for line in lines:
        capsys.readouterr()
        assert main(line.split()) == 0
    err = capsys.readouterr().err
    assert without_differences(err) == without_differences(shown.removeprefix("text\n"))
    for name, dtype in (("float32", "F32"), ("nano", "BF16"), ("back", "BF16")):
        with safe_open(tmp_path / "runs" / f"shapes-{name}" / WEIGHTS, "pt") as file:
            names = [key for key in file.keys() if key != nanovlm.INV_FREQ]  # noqa: SIM118
            assert {file.get_slice(key).get_dtype() for key in names} == {dtype}


def without_differences(printed: str) -> list[str]:
    return re.sub(r"difference of logits \S+, tolerance \S+", "", printed).splitlines()


TEXT_LAYERS = r".*text_model\..*\.(q_proj|down_proj)"  # as train.py trains them


def make_adapter(folder: Path, **options) -> Path:
    """Made and saved by peft itself, with factors that are not zero."""
    options = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]} | options
    adapted = get_peft_model(tiny.hf_model("smolvlm-1-tile"), LoraConfig(**options))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return folder


class TestAdapter:
    @pytest.mark.parametrize(
        ("options", "layers"),
        [({"use_rslora": True, "target_modules": TEXT_LAYERS}, 4), ({"use_dora": True}, 6)],
    )
    def test_merged_as_peft_merges(self, bare, tmp_path, command, options, layers):
        adapter = make_adapter(tmp_path / "adapter", **options)
        command(bare, tmp_path / "to", "--adapter", adapter)
        theirs = PeftModel.from_pretrained(tiny.hf_model("smolvlm-1-tile"), str(adapter)).merge_and_unload()
        merged, plain = load_file(tmp_path / "to" / WEIGHTS), load_file(bare / WEIGHTS)
        assert all(torch.equal(merged[name], tensor) for name, tensor in theirs.state_dict().items())
        assert sum(not torch.equal(merged[name], plain[name]) for name in plain) == layers

    def test_what_the_base_knows_is_not_what_it_knows(self, bare, tmp_path, command):
        shutil.copytree(bare, tmp_path / "base")
        path = tmp_path / "base" / "generation_config.json"
        said = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(said | {"knows": "cats", "single_turn": True}))
        command(tmp_path / "base", tmp_path / "to", "--adapter", make_adapter(tmp_path / "adapter"))
        merged = json.loads((tmp_path / "to" / "generation_config.json").read_text())
        assert "knows" not in merged and merged["single_turn"] is True


def test_what_transformers_computes_otherwise_is_refused(tmp_path, command):
    """19 patches a side: transformers rounds their positions otherwise than arange, which no published model
    meets. The result would not be the original there, and nothing is left of it."""
    model = tiny.CLASSES["idefics3"](tiny.config_for(tiny.Case(image_size=19 * 8, scale=19)))
    tiny.randomize(model, 0)
    source = tiny.save(model, tmp_path / "source")
    assert "(opened by transformers" in command(source, tmp_path / "to", status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


class TestTheTarget:
    def test_is_not_overwritten_unasked(self, bare, tmp_path, command):
        target = tmp_path / "to"
        command(bare, target)
        (target / "metrics.jsonl").write_text("{}")
        before = content(target)
        assert "--overwrite" in command(GOLDEN / CURRENT, target, status=2)
        assert content(target) == before
        command(GOLDEN / CURRENT, target, "--overwrite")
        after = content(target)
        assert after["metrics.jsonl"] == b"{}" and after[WEIGHTS] != before[WEIGHTS]
        # Over itself in the other layout, and back without a processor: no file of the one before stays.
        command(target, target, "--to", "nanovlm", "--overwrite")
        assert (target / "tokenizer").is_dir() and not (target / "README.md").exists()
        command(bare, target, "--overwrite")
        assert content(target).keys() == before.keys() and (target / "README.md").exists()
        (tmp_path / "letters").mkdir()
        (tmp_path / "letters" / "dear.txt").write_text("you")
        command(bare, tmp_path / "letters", "--overwrite", status=2)
        command(bare, tmp_path / "letters" / "dear.txt", "--overwrite", status=2)

    @pytest.mark.parametrize("moment", ["read", "opened by Ocelli", "opened by transformers"])
    def test_ctrl_c_leaves_nothing(self, bare, tmp_path, moment):
        def interrupt(line: str) -> None:
            if line.startswith(moment):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(str(bare), tmp_path / "to", log=interrupt)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("a", "DST"),
        ("a b --to nanovlm --push me/x", "--push"),
        (f"{GOLDEN / CURRENT} b --to nanovlm", "--to hub"),
        ("a b --push no:name", "no:name"),
    ],
)
def test_mistakes_are_one_sentence(command, arguments, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    err = command(*arguments.split(), status=2)
    assert named in err and err.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_push(bare, tmp_path, monkeypatch, capsys):
    """With a name, what was verified is uploaded with its card."""
    with HubServer({}, uploads=tmp_path / "hub") as hub:
        point_client_at(monkeypatch, hub.url, tmp_path / "cache")
        arguments = ["convert", str(bare), str(tmp_path / "pushed"), "--dtype", "bfloat16"]
        sharded = ["--max-shard-size", "100KB"]
        assert main([*arguments, "--push", "me/small", "--private", *sharded]) == 0
        assert hub.created[0]["visibility"] == "private"
        held = content(hub.repos["me/small"])
        assert held == content(tmp_path / "pushed")
        card = held["README.md"].decode()
        assert "Made from model" in card and "rounded to bfloat16" in card
        assert 'from_pretrained("me/small")' in card and "pushed" not in card
        assert f"{hub.url}/me/small/commit/" in capsys.readouterr().err
        index = json.loads(held["model.safetensors.index.json"])["weight_map"]
        assert len(set(index.values())) > 1
        # From the Hub again, to another dtype: the source may be an id.
        assert main(["convert", "me/small", str(tmp_path / "fetched"), "--dtype", "float32"]) == 0
        card = (tmp_path / "fetched" / "README.md").read_text()
        assert "base_model: me/small" in card and f'from_pretrained("{tmp_path}/fetched")' in card
