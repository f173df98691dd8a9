"""Conversions: the same logits here and in transformers; nothing lost if one fails."""

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

from tests import tiny
from tests.hub_server import HubServer, point_client_at
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


def rows_of(model, ids, images) -> dict[int, dict]:
    """The images of each row, by how many places it has."""
    per_tile = model.model.image_seq_len
    counts = [int((row == model.config.image_token_id).sum()) // per_tile for row in ids]
    split = images.split(counts)
    return {row: {"pixel_values": tiles[None]} for row, tiles in enumerate(split) if len(tiles)}


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
        assert "nobody/nothing" in err and not (tmp_path / "to").exists()


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path, monkeypatch, command, capsys):
    """Each line of docs/hub.md's block about converting, in a folder of its own. The last one prints what the
    page shows, but for the differences, which are the machine's."""
    text = (ROOT / "docs/hub.md").read_text(encoding="utf-8").split("## Convert and inspect")[1]
    _, block, _, shown, *_ = text.split("```")
    start = ".venv/bin/python -m tools "
    lines = [line.removeprefix(start) for line in block.splitlines() if line.startswith(start)]
    assert len(lines) == 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    for line in lines:
        capsys.readouterr()
        assert main(line.split()) == 0
    err = capsys.readouterr().err
    assert without_differences(err) == without_differences(shown.removeprefix("text\n"))
    with safe_open(tmp_path / "runs" / "shapes-float32" / WEIGHTS, "pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F32"}  # noqa: SIM118


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
    def test_merged_as_peft_merges(self, bare, tmp_path, command):
        options = {"use_rslora": True, "target_modules": TEXT_LAYERS}
        adapter, base = make_adapter(tmp_path / "adapter", **options), tmp_path / "base"
        shutil.copytree(bare, base)
        (base / "generation_config.json").write_text('{"knows": "cats", "single_turn": true}')
        command(base, tmp_path / "to", "--adapter", adapter)
        theirs = PeftModel.from_pretrained(tiny.hf_model("smolvlm-1-tile"), str(adapter)).merge_and_unload()
        merged, plain = load_file(tmp_path / "to" / WEIGHTS), load_file(bare / WEIGHTS)
        assert all(torch.equal(merged[name], tensor) for name, tensor in theirs.state_dict().items())
        assert sum(not torch.equal(merged[name], plain[name]) for name in plain) == 4
        said = json.loads((tmp_path / "to" / "generation_config.json").read_text())
        assert "knows" not in said and said["single_turn"] is True  # it is not what the base was


def test_what_transformers_computes_otherwise_is_refused(tmp_path, command):
    """19 patches a side: transformers rounds their positions otherwise than arange, which no published model
    meets. The result would not be the original there, and nothing is left of it."""
    model = tiny.CLASSES["idefics3"](tiny.config_for(tiny.Case(image_size=19 * 8, scale=19)))
    tiny.randomize(model, 0)
    source = tiny.save(model, tmp_path / "source")
    assert "(opened by transformers" in command(source, tmp_path / "to", status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


class TestTheTarget:
    @pytest.mark.slow
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
        # And back without a processor: no file of the one before stays.
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


@pytest.mark.slow
def test_the_source_may_be_an_id(bare, tmp_path, monkeypatch):
    with HubServer({"me/small": bare}) as hub:
        point_client_at(monkeypatch, hub.url, tmp_path / "cache")
        assert main(["convert", "me/small", str(tmp_path / "fetched"), "--dtype", "bfloat16"]) == 0
    card = (tmp_path / "fetched" / "README.md").read_text()
    assert "Made from me/small" in card and "rounded to bfloat16" in card
    assert "base_model: me/small" in card and f'from_pretrained("{tmp_path}/fetched")' in card
