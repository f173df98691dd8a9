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
from models.checkpoints import CheckpointError
from models.checkpoints import convert as conversion
from models.checkpoints.__main__ import main
from models.checkpoints.convert import Companion, Probe, Request, compare, convert, our_logits
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

    @pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
    def test_merged_as_peft_merges(self, bare, tmp_path, command, options):  # noqa: F811
        """On the text model's layers alone, as train.py trains them."""
        targets = r".*text_model\..*\.(q_proj|down_proj)"
        adapter = make_adapter(tmp_path / "adapter", target_modules=targets, **options)
        status, _, err = command("convert", bare, tmp_path / "to", "--adapter", adapter)
        assert status == 0 and "4 layers" in err, err
        theirs = PeftModel.from_pretrained(tiny.hf_model("smolvlm-1-tile"), str(adapter)).merge_and_unload()
        merged = load_file(tmp_path / "to" / "model.safetensors")
        for name, tensor in theirs.state_dict().items():
            assert (merged[name] - tensor).abs().max() <= 1e-6
        plain = load_file(bare / "model.safetensors")
        assert sum(not torch.equal(merged[name], plain[name]) for name in plain) == 4

    def test_on_the_vision_tower_too(self, bare, adapter, tmp_path, command):  # noqa: F811
        status, _, err = command("convert", bare, tmp_path / "to", "--adapter", adapter)
        assert status == 0 and "6 layers" in err, err

    def test_a_wrong_merge_is_found_before_it_is_rounded(
        self,
        bare,
        tmp_path,
        command,  # noqa: F811
        monkeypatch,
    ):
        """A small adapter at half its scale: a mistake of ours, put in here. What rounding to bfloat16 may
        change has a wide tolerance, so it is to be found in float32."""
        targets = r".*text_model\..*\.(q_proj|down_proj)"
        adapter = make_adapter(tmp_path / "adapter", target_modules=targets, lora_alpha=1)
        assert command("convert", bare, tmp_path / "base", "--dtype", "bfloat16")[0] == 0
        arguments = ("convert", tmp_path / "base", tmp_path / "to", "--adapter", adapter)
        status, _, err = command(*arguments)
        assert status == 0 and "to bfloat16" in err, err
        right = conversion.adapter_updates

        def halved(*given):
            return {name: update / 2 for name, update in right(*given).items()}

        monkeypatch.setattr(conversion, "adapter_updates", halved)
        status, _, err = command(*arguments, "--overwrite")
        assert status == 2 and "the result is not the original (rewritten: " in err

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"peft_type": "IA3"}, "expected an adapter of type LORA, got 'IA3'"),
            ({"use_dora": True}, "expected plain LoRA with use_dora False, got True"),
            ({"rank_pattern": {"q_proj": 2}}, "expected plain LoRA with rank_pattern"),
            ({"lora_alpha": "much"}, "expected a number as lora_alpha, got 'much'"),
        ],
    )
    def test_other_adapters(self, bare, adapter, tmp_path, command, change, sentence):  # noqa: F811
        (tmp_path / "adapter").mkdir()
        settings = json.loads((adapter / "adapter_config.json").read_text())
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings | change))
        weights = (adapter / "adapter_model.safetensors").read_bytes()
        (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(weights)
        status, _, err = command("convert", bare, tmp_path / "to", "--adapter", tmp_path / "adapter")
        assert status == 2 and sentence in err and not (tmp_path / "to").exists()

    def test_of_another_model(self, bare, adapter, tmp_path, command):  # noqa: F811
        """Its layers have other shapes, or other names."""
        status, _, err = command("convert", bare, tmp_path / "to", "--adapter", bare)
        assert status == 2 and "has no adapter_config.json" in err
        other = tiny.save(tiny.hf_model("idefics3-own-head-dim"), tmp_path / "other")
        status, _, err = command("convert", other, tmp_path / "to", "--adapter", adapter)
        assert status == 2 and "the adapter belongs to another model" in err
        folder = tmp_path / "renamed"
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
        tensors = load_file(adapter / "adapter_model.safetensors")
        renamed = {name.replace("layers.1", "layers.7"): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "adapter_model.safetensors")
        status, _, err = command("convert", bare, tmp_path / "to", "--adapter", folder)
        assert status == 2 and "expected an A and a B for layers of this model" in err

    def test_nanovlm_has_no_adapters(self, adapter, tmp_path, command):  # noqa: F811
        status, _, err = command("convert", GOLDEN / CURRENT, tmp_path / "to", "--adapter", adapter)
        assert status == 2 and "convert it first" in err


class TestVerification:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_two_swapped_tensors_are_found(self, bare, dtype):
        """What a wrong mapping would do; bfloat16's wider tolerance included."""
        model = VisionLanguageModel.from_pretrained(bare)
        probe = Probe.of(model.config)
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
        assert status == 2 and "has files in it that are no checkpoint" in err
        assert content(tmp_path / "letters") == {"dear.txt": b"you"}
        status, _, err = command("convert", bare, tmp_path / "letters" / "dear.txt", "--overwrite")
        assert status == 2 and "is a file" in err

    @pytest.mark.parametrize("moment", ["read", "opened by Ocelli", "opened by transformers"])
    def test_ctrl_c_leaves_nothing(self, bare, tmp_path, moment):
        def interrupt(line: str) -> None:
            if line.startswith(moment):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(Request(str(bare), tmp_path / "to"), lambda folder, nano: Companion(), interrupt)
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
        sentence = "could not be written, what it held is unchanged: [Errno 27] File too large"
        assert sentence in err.splitlines()[-1]

    def test_nanovlm_to_nanovlm(self, tmp_path):
        with pytest.raises(CheckpointError, match="in nanoVLM's layout already: expected --to hub"):
            convert(Request(str(GOLDEN / CURRENT), tmp_path / "to", "nanovlm"), lambda *_: Companion())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "the following arguments are required: inspect|convert"),
        (("convert", "a"), "the following arguments are required: DST"),
        (("convert", "a", "b", "--max-shard-size", "much"), "expected a size such as 5GB, 500MB or 60KB"),
        (("convert", "a", "b", "--dtype", "int8"), "invalid choice: 'int8'"),
        (("convert", "a", "b", "--to", "nanovlm", "--push", "me/x"), "--push uploads transformers' layout"),
        (("convert", "a", "b", "--to", "nanovlm", "--no-processor"), "nanoVLM's layout has its tokenizer"),
        (("convert", "a", "b", "--to", "nanovlm", "--max-shard-size", "1GB"), "is one file of weights"),
        (("convert", "a", "b", "--private"), "expected it with --push"),
        (("convert", "a", "b", "--push", "no name"), "expected a repository's name such as owner/name"),
        (("inspect", "a", "--question", "how many?"), "expected it with --image"),
        (("convert", "./nothing", "b"), "there is no folder ./nothing"),
    ],
)
def test_mistakes_are_one_sentence(command, arguments, sentence, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*arguments)
    assert status == 2 and out == "" and sentence in err and err.count("\n") == 1
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
