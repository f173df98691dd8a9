"""Checkpoints that are damaged, cut short or of another model: refused in one sentence, without running their
code."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.processor import Processor, ProcessorError
from inference.checkpoint import open_checkpoint
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints.load import fill
from models.checkpoints.weights import StoredTensor
from tests import tiny
from tests.test_architecture import MODULES, imports, tree

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def with_value(path: str, value: object) -> Callable[[Path], object]:
    """config.json with another value of a key."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        section, _, key = path.rpartition(".")
        (config[section] if section else config)[key] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def with_tensor(name: str, value: torch.Tensor | None) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors.pop(name, None)
        own = {} if value is None else {name: value}
        save_file(tensors | own, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def with_bytes(edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes(edit((folder / WEIGHTS).read_bytes()))


def index_of(shard: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder.parent / "secret.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))

    return change


def linked(name: str, target: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / f"moved-{folder.name}")
        (folder / name).symlink_to(target.format(moved=folder.parent / f"moved-{folder.name}"))

    return change


# What is changed, and what the refusal names.
CASES: list[tuple[Callable[[Path], object], str]] = [
    (with_value("model_type", "qwen2_vl"), "model_type"),
    (with_value("text_config.model_type", "mamba"), "mamba"),
    (with_value("text_config.hidden_size", -1), "hidden_size"),
    (with_value("text_config.num_hidden_layers", 3), "9 of 68 tensors"),
    (with_value("text_config.hidden_act", "relu"), "hidden_act"),
    (with_value("text_config.rope_parameters", {"rope_type": "yarn"}), "yarn"),
    (with_value("text_config.rope_parameters", {"rope_type": "llama3"}), "low_freq_factor"),
    (with_value("text_config.rope_parameters", 3), "config.json"),
    (with_value("text_config.rope_parameters", {"rope_theta": "x"}), "rope_theta"),
    (with_value("text_config.partial_rotary_factor", 0.5), "partial_rotary_factor"),
    (with_value("vision_config.image_size", [32, 48]), "image_size"),
    (with_value("vision_config", [1]), "config.json"),
    (with_value("eos_token_id", "stop"), "config.json"),
    (with_value("quantization_config", {"bits": 4}), "quantized"),
    (with_value("dtype", "int4"), "int4"),
    (lambda folder: (folder / "config.json").write_text("[1]"), "config.json"),
    (lambda folder: (folder / "config.json").write_text('{"model'), "config.json"),
    (with_tensor("model.text_model.layers.1.mlp.up_proj.weight", None), "layers.1.mlp.up_proj.weight"),
    (with_tensor("model.text_model.layers.0.mlp.gate_proj.lora_A", torch.ones(2, 3)), "gate_proj.lora_A"),
    (with_tensor("model.text_model.norm.weight", torch.ones(47)), "norm.weight"),
    (with_tensor("lm_head.weight", torch.ones(160, 48, dtype=torch.int8)), "I8"),
    (with_bytes(lambda raw: raw[: len(raw) // 2]), WEIGHTS),
    (with_bytes(lambda raw: raw[: int(len(raw) * 0.999)]), WEIGHTS),
    (with_bytes(lambda raw: b""), WEIGHTS),
    (with_bytes(lambda raw: raw + b"more"), WEIGHTS),
    (index_of("../secret.safetensors"), INDEX),
    (linked("config.json", "/etc/passwd"), "link"),
    (linked(WEIGHTS, "{moved}"), "link"),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return tiny.save(tiny.hf_model("idefics3-1-tile"), tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_each_is_refused_in_one_sentence(good, tmp_path, case):
    change, named = CASES[case]
    change(folder := Path(shutil.copytree(good, tmp_path / "checkpoint")))
    with pytest.raises(CheckpointError) as error:
        VisionLanguageModel.from_pretrained(folder)
    text = str(error.value)
    assert named in text and 20 < len(text) <= 1000 and text.isprintable()


def test_weights_that_memory_does_not_hold_say_how_large_they_are():
    def read(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    entries = {"lm_head.weight": SimpleNamespace(read=read)}
    shapes = {"lm_head.weight": (2_000_000, 1_000)}
    with pytest.raises(MemoryError, match="2 billion weights"):
        fill(torch.nn.Module(), shapes, StoredTensor, entries, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_half_a_tokenizer_is_refused(model_folder, tmp_path, name):
    folder = Path(shutil.copytree(model_folder, tmp_path / "copy"))
    (folder / name).write_bytes((folder / name).read_bytes()[:20])
    with pytest.raises(ProcessorError, match=name):
        Processor.from_pretrained(folder)


def test_an_index_and_its_shards_belong_together(tmp_path):
    tiny.hf_model("idefics3-1-tile").save_pretrained(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second = sorted(tmp_path.glob("model-*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    for weights, named in (
        ({name: second.name}, name),
        ({"lost": first.name}, "lost"),
        ({name: "model-9.safetensors"}, "model-9"),
        (None, "weight_map"),
    ):
        held = {} if weights is None else {"weight_map": index["weight_map"] | weights}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(held))
        with pytest.raises(CheckpointError) as error:
            VisionLanguageModel.from_pretrained(tmp_path)
        assert named in str(error.value)


def test_devices_and_dtypes_that_are_none(model_folder):
    for options in ({"device": "toaster"}, {"device": "cuda:99"}, {"dtype": "float7"}, {"dtype": torch.int8}):
        with pytest.raises(CheckpointError) as error:
            VisionLanguageModel.from_pretrained(model_folder, **options)
        assert str(next(iter(options.values()))).removeprefix("torch.") in str(error.value)


# --------------------------------------------------------------------------------------------------- links
def test_a_link_can_be_allowed(tmp_path, monkeypatch):
    folder = tiny.save(tiny.hf_model("idefics3-1-tile"), tmp_path / "own")
    linked("model.safetensors", "{moved}")(folder)
    with pytest.raises(CheckpointError, match="OCELLI_FOLLOW_LINKS"):
        VisionLanguageModel.from_pretrained(folder)
    monkeypatch.setenv("OCELLI_FOLLOW_LINKS", "1")
    VisionLanguageModel.from_pretrained(folder)


def test_the_clients_cache_and_a_linked_folder_are_no_links_away(tmp_path):
    """A snapshot's files are links to blobs beside it; a folder may itself be a link."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    blobs = tmp_path / "models--a--b" / "blobs"
    tiny.save(tiny.hf_model("idefics3-1-tile"), snapshot)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    VisionLanguageModel.from_pretrained(snapshot)
    (tmp_path / "latest").symlink_to(snapshot)
    VisionLanguageModel.from_pretrained(tmp_path / "latest")


# ---------------------------------------------------------------------------------------------------- code
class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return (open, (self.mark, "w"))


@pytest.mark.parametrize("weights", [True, False])
def test_no_code_of_a_checkpoint_runs(model_folder, tmp_path, weights):
    """Pickles under every name that any library looks for, and remote code in every file that may name it."""
    mark, folder = tmp_path / "mark", tmp_path / "copy"
    shutil.copytree(model_folder, folder)
    code = f"open({str(mark)!r}, 'w')\nclass Evil: pass\n"
    for name in ("modeling.py", "tokenization.py", "processing.py", "setup.py", "__init__.py"):
        (folder / name).write_text(code)
    for name in ("pytorch_model.bin", "training_state.pt", "tokenizer.pkl", "model.ckpt", "vocab.pkl"):
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    named = {
        "config.json": {"AutoConfig": "modeling.Evil", "AutoModel": "modeling.Evil"},
        "tokenizer_config.json": {"AutoTokenizer": ["tokenization.Evil", "tokenization.Evil"]},
        "preprocessor_config.json": {"AutoImageProcessor": "processing.Evil"},
        "processor_config.json": {"AutoProcessor": "processing.Evil"},
    }
    for name, auto_map in named.items():
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"auto_map": auto_map, "trust_remote_code": True}))
    if not weights:
        (folder / "model.safetensors").unlink()
        with pytest.raises(CheckpointError):
            open_checkpoint(folder)
    else:
        try:
            open_checkpoint(folder)
        except ProcessorError as error:  # remote code that is not allowed may be refused, never run
            assert "trust_remote_code" in str(error) or "Evil" in str(error)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))  # the bomb is one
    assert mark.exists()


@pytest.mark.slow
def test_nothing_here_unpickles_or_trusts_code():
    """Our own training state is read by torch.load with weights_only, which builds only tensors."""
    for name in (name for name in MODULES if name.split(".")[0] not in ("tests", "benchmarks")):
        assert not {"pickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"} & imports(name)
        for node in ast.walk(tree(name)):
            if not isinstance(node, ast.Call):
                continue
            called, line = ast.unparse(node.func), f"{name}, line {node.lineno}"
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert called not in ("eval", "exec", "compile", "__import__"), line
            assert options.get("trust_remote_code", "False") == "False", line
            if called in ("torch.load", "torch.jit.load", "np.load", "numpy.load"):
                assert options.get("weights_only") == "True" or options.get("allow_pickle") == "False", line
