"""Conversions keep what they must: dtype, adapters, and whatever the target held if anything goes wrong."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models import VisionLanguageModel
from models.checkpoints import convert as conversion
from models.checkpoints.__main__ import main
from models.checkpoints.convert import ProcessorBundle, Request, TestInputs, compare, convert, our_logits
from tests import tiny
from tests.hub_server import HubServer, point_client_at
from tests.test_convert import command  # noqa: F401  (a fixture)
from tests.test_golden_nanovlm import CURRENT, GOLDEN


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A model without a processor, as transformers writes it, in float32."""
    return tiny.save(tiny.hf_model("smolvlm-1-tile"), tmp_path_factory.mktemp("bare") / "model")


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


TEXT_LAYERS = r".*text_model\..*\.(q_proj|down_proj)"  # as train.py trains them


def make_adapter(folder: Path, **options) -> Path:
    """Made and saved by peft itself, with factors that are not zero."""
    model = tiny.hf_model("smolvlm-1-tile")
    options = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]} | options
    adapted = get_peft_model(model, LoraConfig(**options))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return folder


class TestDtype:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_every_weight_is_rounded_once(self, bare, tmp_path, command, dtype):  # noqa: F811
        status, _, err = command("convert", bare, tmp_path / "to", "--dtype", dtype)
        assert status == 0 and f"rounded to {dtype}: largest difference" in err
        before, after = (load_file(folder / "model.safetensors") for folder in (bare, tmp_path / "to"))
        assert all(torch.equal(after[name], before[name].to(getattr(torch, dtype))) for name in after)
        assert json.loads((tmp_path / "to" / "config.json").read_text())["dtype"] == dtype
        # The same dtype again changes nothing, and is held to that.
        status, _, err = command("convert", tmp_path / "to", tmp_path / "again")
        assert status == 0 and "rounded to" not in err
        assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
            tmp_path / "to" / "model.safetensors"
        ).read_bytes()

    def test_numbers_that_do_not_fit(self, tmp_path, command):  # noqa: F811
        """A weight beyond float16's range becomes infinite: logits are not finite, the result is refused."""
        model = tiny.hf_model("idefics3-1-tile")
        with torch.no_grad():
            model.model.text_model.layers[0].mlp.down_proj.weight[0, 0] = 1e6
        source = tiny.save(model, tmp_path / "source")
        status, _, err = command("convert", source, tmp_path / "to", "--dtype", "float16")
        assert status == 2 and "the result is not the original" in err
        assert not (tmp_path / "to").exists()

    def test_shards(self, bare, tmp_path, command):  # noqa: F811
        status, _, err = command("convert", bare, tmp_path / "to", "--max-shard-size", "100KB")
        assert status == 0, err
        assert len(list((tmp_path / "to").glob("model-*.safetensors"))) > 1
        same = zip(*(VisionLanguageModel.from_pretrained(f).parameters() for f in (bare, tmp_path / "to")))
        assert all(torch.equal(one, other) for one, other in same)


class TestAdapter:
    @pytest.fixture
    def adapter(self, tmp_path) -> Path:
        return make_adapter(tmp_path / "made")

    @pytest.mark.parametrize(
        ("options", "layers"),
        [({}, 6), ({"use_rslora": True, "target_modules": TEXT_LAYERS}, 4), ({"use_dora": True}, 6)],
    )
    def test_merged_as_peft_merges(self, bare, tmp_path, command, options, layers):  # noqa: F811
        adapter = make_adapter(tmp_path / "adapter", **options)
        status, _, err = command("convert", bare, tmp_path / "to", "--adapter", adapter)
        assert status == 0 and f"{layers} layers" in err, err
        theirs = PeftModel.from_pretrained(tiny.hf_model("smolvlm-1-tile"), str(adapter)).merge_and_unload()
        merged = load_file(tmp_path / "to" / "model.safetensors")
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(merged[name], tensor)
        plain = load_file(bare / "model.safetensors")
        assert sum(not torch.equal(merged[name], plain[name]) for name in plain) == layers

    def test_a_wrong_merge_is_found_before_it_is_rounded(
        self,
        bare,
        tmp_path,
        command,  # noqa: F811
        monkeypatch,
    ):
        """A small adapter at half its scale: a mistake of ours, put in here. What rounding to bfloat16 may
        change has a wide tolerance, so it is to be found in float32."""
        adapter = make_adapter(tmp_path / "adapter", target_modules=TEXT_LAYERS, lora_alpha=1)
        assert command("convert", bare, tmp_path / "base", "--dtype", "bfloat16")[0] == 0
        arguments = ("convert", tmp_path / "base", tmp_path / "to", "--adapter", adapter)
        status, _, err = command(*arguments)
        assert status == 0 and "to bfloat16" in err, err
        right = conversion.merge_adapter

        def halved(model, *given):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            result = right(model, *given)
            with torch.no_grad():
                for parameter, plain in zip(model.parameters(), before, strict=True):
                    parameter.copy_((parameter + plain) / 2)
            return result

        monkeypatch.setattr(conversion, "merge_adapter", halved)
        status, _, err = command(*arguments, "--overwrite")
        assert status == 2 and "the result is not the original (rewritten: " in err

    def test_adapters_that_do_not_fit(self, bare, adapter, tmp_path, command):  # noqa: F811
        """Another kind of adapter, other shapes, other layers, other layouts."""

        def refused(source, folder) -> str:
            status, _, err = command("convert", source, tmp_path / "to", "--adapter", folder)
            assert status == 2 and err.count("\n") <= 3 and not (tmp_path / "to").exists()
            return err

        assert "adapter_config.json" in refused(bare, bare)
        assert str(GOLDEN / CURRENT) in refused(GOLDEN / CURRENT, adapter)
        other = tiny.save(tiny.hf_model("idefics3-own-head-dim"), tmp_path / "other")
        assert "size mismatch" in refused(other, adapter)
        folder = tmp_path / "renamed"
        folder.mkdir()
        settings = json.loads((adapter / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(settings | {"peft_type": "IA3"}))
        tensors = load_file(adapter / "adapter_model.safetensors")
        renamed = {name.replace("layers.1", "layers.7"): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "adapter_model.safetensors")
        assert "IA3" in refused(bare, folder)
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        assert "another model" in refused(bare, folder)


class TestVerification:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_two_swapped_tensors_are_found(self, bare, dtype):
        """What a wrong mapping would do; bfloat16's wider tolerance included."""
        model = VisionLanguageModel.from_pretrained(bare)
        probe = TestInputs.of(model.config)
        reference = our_logits(model, probe, around_zero=True)
        assert compare("same", reference, reference, dtype).passed
        first, second = model.language_model.layers
        for one, other in (
            (first.input_layernorm, second.input_layernorm),
            (first.self_attn.k_proj, first.self_attn.v_proj),
            (model.vision_model.layers[0].mlp.fc1, model.vision_model.layers[1].mlp.fc1),
        ):
            one.weight, other.weight = other.weight, one.weight
            assert not compare("swapped", reference, our_logits(model, probe, True), dtype).passed
            one.weight, other.weight = other.weight, one.weight

    def test_what_transformers_computes_otherwise_is_refused(self, tmp_path, command):  # noqa: F811
        """19 patches a side: transformers rounds their positions otherwise than arange, which no published
        model meets. The result would not be the original there, and nothing is left of it."""
        config = tiny.config_for(tiny.Case(image_size=19 * 8, scale=19))
        model = tiny.CLASSES["idefics3"](config)
        tiny.randomize(model, 0)
        source = tiny.save(model, tmp_path / "source")
        status, _, err = command("convert", source, tmp_path / "to")
        assert status == 2 and "the result is not the original (opened by transformers" in err
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


class TestTheTarget:
    def test_is_not_overwritten_unasked(self, bare, tmp_path, command):  # noqa: F811
        assert command("convert", bare, tmp_path / "to")[0] == 0
        (tmp_path / "to" / "metrics.jsonl").write_text("{}")
        before = content(tmp_path / "to")
        status, _, err = command("convert", GOLDEN / CURRENT, tmp_path / "to")
        assert status == 2 and "exists: name another folder, or give --overwrite" in err
        assert content(tmp_path / "to") == before
        status, _, err = command("convert", GOLDEN / CURRENT, tmp_path / "to", "--overwrite")
        assert status == 0, err
        after = content(tmp_path / "to")
        assert after["metrics.jsonl"] == b"{}" and after["model.safetensors"] != before["model.safetensors"]
        # Over the other layout: neither nanoVLM's tokenizer stays behind, nor the card of transformers'.
        nano = tmp_path / "nano"
        for _ in range(2):
            status, _, err = command("convert", tmp_path / "to", nano, "--to", "nanovlm", "--overwrite")
            assert status == 0, err
            assert (nano / "tokenizer").is_dir() and not (nano / "README.md").exists()
            status, _, err = command("convert", bare, nano, "--overwrite")
            assert status == 0, err
            assert not (nano / "tokenizer").exists() and (nano / "README.md").exists()
        # Over itself, and without a processor: the old one's files do not stay behind.
        status, _, err = command("convert", bare, tmp_path / "to", "--overwrite")
        assert status == 0 and "tokenizer.json" not in content(tmp_path / "to"), err

    def test_is_never_what_is_no_checkpoint(self, bare, tmp_path, command):  # noqa: F811
        (tmp_path / "letters").mkdir()
        (tmp_path / "letters" / "dear.txt").write_text("you")
        status, _, err = command("convert", bare, tmp_path / "letters", "--overwrite")
        assert status == 2 and "letters" in err
        assert content(tmp_path / "letters") == {"dear.txt": b"you"}
        status, _, err = command("convert", bare, tmp_path / "letters" / "dear.txt", "--overwrite")
        assert status == 2 and "dear.txt" in err

    @pytest.mark.parametrize("moment", ["read", "opened by Ocelli", "opened by transformers"])
    def test_ctrl_c_leaves_nothing(self, bare, tmp_path, moment):
        def interrupt(line: str) -> None:
            if line.startswith(moment):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            request = Request(str(bare), tmp_path / "to")
            convert(VisionLanguageModel, request, lambda folder, nano: ProcessorBundle(), interrupt)
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_leaves_nothing(self, bare, tmp_path, command):  # noqa: F811
        """The system itself refuses to let the weights' file grow."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            status, _, err = command("convert", bare, tmp_path / "to")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert status == 2 and list(tmp_path.iterdir()) == []
        assert "File too large" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "inspect|convert"),
        (("convert", "a"), "DST"),
        (("convert", "a", "b", "--max-shard-size", "much"), "'much'"),
        (("convert", "a", "b", "--dtype", "int8"), "int8"),
        (("convert", "a", "b", "--to", "nanovlm", "--push", "me/x"), "--push"),
        (("convert", "a", "b", "--to", "nanovlm", "--no-processor"), "--no-processor"),
        (("convert", "a", "b", "--to", "nanovlm", "--max-shard-size", "1GB"), "--max-shard-size"),
        (("convert", "a", "b", "--private"), "--push"),
        (("convert", GOLDEN / CURRENT, "b", "--to", "nanovlm"), "--to hub"),
        (("convert", "a", "b", "--push", "no name"), "no name"),
        (("inspect", "a", "--question", "how many?"), "--image"),
        (("convert", "./nothing", "b"), "./nothing"),
    ],
)
def test_mistakes_are_one_sentence(command, arguments, named, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*arguments)
    assert status == 2 and out == "" and named in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_push(bare, tmp_path, monkeypatch, capsys):
    """Off by default; with a name, what was verified is uploaded with its card."""
    with HubServer({}, uploads=tmp_path / "hub") as hub:
        point_client_at(monkeypatch, hub.url, tmp_path / "cache")
        assert main(["convert", str(GOLDEN / CURRENT), str(tmp_path / "to")]) == 0
        assert hub.requests == []
        arguments = ["convert", str(bare), str(tmp_path / "pushed"), "--dtype", "bfloat16"]
        sharded = ["--max-shard-size", "100KB"]
        assert main([*arguments, "--push", "me/small", "--private", *sharded]) == 0
        assert hub.created[0]["visibility"] == "private"
        held = content(hub.repos["me/small"])
        assert held == content(tmp_path / "pushed")
        card = held["README.md"].decode()
        assert "Made from model by Ocelli's converter, rounded to bfloat16." in card
        assert 'from_pretrained("me/small")' in card and "pushed" not in card
        assert f"uploaded to {hub.url}/me/small/commit/" in capsys.readouterr().err
        index = json.loads(held["model.safetensors.index.json"])["weight_map"]
        with safe_open(hub.repos["me/small"] / index["lm_head.weight"], "pt") as file:
            assert file.get_tensor("lm_head.weight").dtype == torch.bfloat16
        # From the Hub again, to another layout or none: the source may be an id.
        assert main(["convert", "me/small", str(tmp_path / "fetched"), "--dtype", "float32"]) == 0
        card = (tmp_path / "fetched" / "README.md").read_text()
        assert "base_model: me/small" in card and f'from_pretrained("{tmp_path}/fetched")' in card
