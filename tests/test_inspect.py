"""`python -m tools inspect`: right numbers, from headers alone."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from data.errors import ProcessorError
from data.processor import Processor
from generation.fast.native.panels import round_layer, to_panels
from generation.fast.quantized import pack
from generation.kv_cache import bytes_per_position
from models.checkpoints.save import model_card
from models.checkpoints.sizes import PARTS
from models.vision_language_model import VisionLanguageModel
from tests import lfm2_checkpoints, tiny
from tests.house import sentence
from tests.hub_server import HubServer, point_client_at
from tests.processors import draw_image
from tests.qwen_checkpoints import KINDS, save_hf
from tests.runs import tiny_checkpoint
from tests.test_checkpoints_backbones import llama, siglip
from tests.test_golden_nanovlm import CURRENT, GOLDEN, OLD
from tools.__main__ import main
from tools.inspect import as_text

ROOT = Path(__file__).resolve().parent.parent
EMBEDDED = ROOT / "checkpoints" / "ocelli-shapes"


@pytest.fixture
def report(capsys):
    """The object of a call with --json."""

    def run(*arguments) -> dict:
        capsys.readouterr()
        assert main(["inspect", *map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def numbers_of(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["idefics3-2-tiles-tied", "smolvlm-17-tiles"])
def test_numbers_are_those_of_the_model(report, tmp_path, name):
    theirs = tiny.hf_model(name)
    told = report(tiny.save(theirs, tmp_path / "model"))
    parameters = told["parameters"]
    assert parameters["all"] == numbers_of(theirs) == sum(parameters[part] for part in PARTS)
    assert parameters["vision"] == numbers_of(theirs.model.vision_model)
    assert parameters["embeddings"] == numbers_of(theirs.model.text_model.embed_tokens)
    assert parameters["head"] == (0 if "tied" in name else theirs.lm_head.weight.numel())
    assert told["fits"] == "yes" and told["stored"]["dtypes"] == {"float32": parameters["all"]}
    text = theirs.config.text_config
    for dtype, size in told["cache"].items():
        numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
        per_token = numbers * getattr(torch, dtype).itemsize
        assert size == {"per_token": per_token, "full_context": 512 * per_token}
    memory = told["memory"]["bfloat16"]
    assert memory["all"] == 2 * parameters["all"] + told["cache"]["bfloat16"]["full_context"]


@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="C rounds")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rounded_weights_take_the_memory_that_it_says(report, dtype):
    rounded = pack(VisionLanguageModel.from_pretrained(EMBEDDED), dtype, round_layer)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in to_panels(rounded).state_dict().values()}
    told = report(EMBEDDED)
    assert told["memory"][dtype]["weights"] == pytest.approx(sum(held.values()), rel=0.02)
    assert told["memory"][dtype]["cache"] == told["cache"]["bfloat16"]["full_context"]


@pytest.mark.slow
def test_a_repository_gives_headers_only(report, tmp_path, monkeypatch):
    """Of each file of weights at most its first 100 kB, which huggingface_hub asks for; nothing is kept.
    Without a network, what was downloaded whole is read, and nothing else."""
    model = tiny.CLASSES["smolvlm"](tiny.config_for(tiny.Case("smolvlm", text={"vocab_size": 20_000})))
    cache, repos = tmp_path / "cache", {f"owner/{name}": tmp_path / name for name in ("single", "sharded")}
    for name, most in (("single", "5GB"), ("sharded", "1MB")):
        model.save_pretrained(tmp_path / name, max_shard_size=most)
    files = tmp_path.glob("*/*.safetensors")
    weights = {f"owner/{path.parent.name}/{path.name}": path.stat().st_size for path in files}
    assert len(weights) > 2 and max(weights.values()) > 70 * 100_001
    with HubServer(repos) as hub:
        point_client_at(monkeypatch, hub.url, cache)
        for name in repos:
            told = report(name)
            assert told["commit"] == hub.commit(name) and told["fits"] == "yes"
            assert told["parameters"]["all"] == numbers_of(model)
            assert told["stored"]["bytes"] == 4 * told["stored"]["numbers"]
        fetched = {name: size for name, size in hub.served.items() if name.endswith(".safetensors")}
        assert fetched.keys() == weights.keys() and max(fetched.values()) <= 100_001
        assert not list(cache.rglob("*.safetensors"))
        VisionLanguageModel.from_pretrained("owner/sharded")
    point_client_at(monkeypatch, "http://127.0.0.1:9", cache, offline=True)
    assert report("owner/sharded")["stored"] == report(tmp_path / "sharded")["stored"]
    next(cache.rglob("snapshots/*/model-00002-*")).unlink()
    for name in repos:
        assert main(["inspect", name]) == 2


@pytest.mark.parametrize("name", [CURRENT, OLD])
def test_nanovlm(report, name):
    told = report(GOLDEN / name)
    model = VisionLanguageModel.from_pretrained(GOLDEN / name)
    assert "nanoVLM" in told["family"] and " 4 tokens a tile" in told["images"]
    assert told["parameters"]["all"] == numbers_of(model) and told["fits"] == "yes"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", KINDS)
def test_images_of_their_own_sizes(report, tmp_path, kind):
    """Numbers, memory and tokens are those of the model, and the saved card says how images are cut."""
    theirs = save_hf(kind, tmp_path)
    told = report(tmp_path, "--image", "640x480")
    assert told["parameters"]["all"] == numbers_of(theirs) and told["fits"] == "yes"
    config = VisionLanguageModel.from_pretrained(tmp_path).config
    side = config.vision.patch_size * config.vision.merge_size
    for text in (told["images"], model_card("me/mine", config, 1)):
        assert f"{config.vision.patch_size} px" in text and f"{side} x {side} px" in text
    picture = told["picture"]
    assert picture["image_tokens"] == picture["rows"] * picture["columns"]
    assert picture["tile_pixels"] == f"{picture['columns'] * side} x {picture['rows'] * side}"
    small = report(tmp_path, "--image", "640x480", "--max-pixels", 30_000)["picture"]
    assert 0 < small["image_tokens"] * side**2 <= 30_000 < picture["image_tokens"] * side**2
    for pixels in ("x", 1, True):
        with pytest.raises(ProcessorError):
            Processor.from_pretrained(tmp_path, config, max_pixels=pixels)
    ids = Processor.from_pretrained(tmp_path, config).ask(draw_image(640, 480), picture["question"])
    assert picture["prompt_tokens"] == ids["input_ids"].shape[1]


def test_layers_of_convolution(report, tmp_path):
    """The cache that is told is the one that a scheduler reserves."""
    lfm2_checkpoints.save_hf(tmp_path)
    told, model = report(tmp_path, "--image", "100x60"), VisionLanguageModel.from_pretrained(tmp_path)
    assert told["parameters"]["all"] == numbers_of(model) and told["fits"] == "yes"
    assert told["cache"]["float32"]["per_token"] == bytes_per_position(model.language_model)
    assert told["picture"]["tiles"] > 1 and "whole" not in told["images"]
    told["stored"]["dtypes"] = {"Q4_0": 32, "bfloat16": 1}
    shown = as_text(told)
    assert "layer types" in shown and "delta" not in shown and "Q4_0 32" in shown


@pytest.mark.parametrize("alone", [True, False])
def test_backbones(report, tmp_path, alone):
    tower, model = siglip(tmp_path / "siglip", alone), llama(tmp_path / "llama", alone)
    told = report(tmp_path / "siglip")
    ours = sum(p.numel() for name, p in tower.named_parameters() if ".head." not in f".{name}")
    assert told["parameters"]["vision"] == told["parameters"]["all"] == ours
    assert told["fits"] == "yes" and told["cache"] is None and told["text"] is None
    told = report(tmp_path / "llama")
    assert told["parameters"]["all"] == numbers_of(model)
    assert told["fits"] == "yes" and told["vision"] is None and told["context"] == 256


@pytest.mark.parametrize("size", [(640, 480)])
@pytest.mark.parametrize("folder", [EMBEDDED, GOLDEN / CURRENT, GOLDEN / OLD])
def test_an_image_costs_what_the_processor_makes_of_it(report, folder, size, tmp_path):
    draw_image(*size).save(tmp_path / "photo.png")
    image = tmp_path / "photo.png" if folder == EMBEDDED else "{}x{}".format(*size)
    told = report(folder, "--image", image, "--question", "how many?")["picture"]
    assert (told["width"], told["height"]) == size
    processor = Processor.from_pretrained(folder)
    inputs = processor.ask(draw_image(*size), "how many?")
    assert told["prompt_tokens"] == inputs["input_ids"].shape[1]
    assert told["image_tokens"] == inputs.image_tokens[0]
    assert told["tiles"] == math.prod(inputs["pixel_values"].shape[:-3])


def test_weights_that_are_not_the_configs(report, tmp_path):
    folder = tiny.save(tiny.hf_model("idefics3-1-tile"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    assert "tensors are missing" in report(folder)["fits"]
    (folder / "model.safetensors").unlink()
    told = report(folder)
    assert told["fits"] == "no weights here" and told["stored"] is None


def test_what_is_refused(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    assert "'mistral'" in sentence(main, ["inspect", tmp_path], capsys)
    siglip(tmp_path / "siglip", alone=True)
    assert "siglip" in sentence(main, ["inspect", tmp_path / "siglip", "--image", "5x5"], capsys)
    cut = ["inspect", tiny_checkpoint(tmp_path / "tiny"), "--image", "640x480", "--max-pixels", "4096"]
    assert "--max-pixels" in sentence(main, cut, capsys)
