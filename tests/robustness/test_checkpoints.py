"""Checkpoints made to do harm: refused in one sentence, in little memory and without running their code."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.processor import ProcessorError
from inference.checkpoint import open_checkpoint
from inference.errors import user_errors
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from tests import tiny
from tests.robustness.hostile_checkpoints import (
    CASES,
    NAMED,
    PROCESSOR_CASES,
    Change,
    larger_than_memory,
    linked,
)
from tests.test_architecture import MODULES, ROOT, imports, tree


def judged(arguments: list[str], folders: list[Path]) -> list[tuple[str, str]]:
    """What a process with little memory says to each folder: (type of the error, message)."""
    command = [sys.executable, "-m", "tests.robustness.hostile_checkpoints", *arguments, *map(str, folders)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    lines = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(lines) == len(folders), done.stderr[-2000:]
    return lines


def changed(good: Path, root: Path, changes: Iterable[Change]) -> list[Path]:
    folders = []
    for number, change in enumerate(changes):
        folders.append(root / str(number) / "checkpoint")
        shutil.copytree(good, folders[-1])
        change(folders[-1])
    return folders


@pytest.mark.slow
def test_each_is_refused_in_one_sentence(tmp_path):
    good = tiny.save(tiny.hf_model("idefics3-1-tile"), tmp_path / "good")
    folders = changed(good, tmp_path / "cases", (*CASES.values(), larger_than_memory))
    first, *others, last = judged([], [good, *folders])
    shutil.rmtree(tmp_path / "cases")
    assert first == ("loaded", "")
    for name, (kind, text) in zip(CASES, others, strict=True):
        # A file that cannot be mapped is too large for this process's memory.
        expected = ("MemoryError",) if name == "a file of 10 TB" else ("CheckpointError",)
        assert kind in expected and 20 < len(text) <= 1000 and text.isprintable(), (name, kind, text)
        assert NAMED.get(name, "") in text, (name, text)
    assert last[0] == "MemoryError" and last[0] in {error.__name__ for error in user_errors()}


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


@pytest.mark.slow
def test_processors_are_refused_before_they_are_opened(model_folder, tmp_path):
    folders = changed(model_folder, tmp_path, PROCESSOR_CASES.values())
    first, *others = judged(["--processor"], [model_folder, *folders])
    shutil.rmtree(tmp_path)
    assert first == ("loaded", "")
    for name, (kind, text) in zip(PROCESSOR_CASES, others, strict=True):
        assert kind == "ProcessorError" and text.isprintable(), (name, text)
        assert "MemoryError" not in text and "RecursionError" not in text, (name, text)


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
