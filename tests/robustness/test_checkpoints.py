"""Checkpoints made to do harm: refused in one sentence, in little memory and without running their code."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shutil
import subprocess
import sys

import pytest

from data.processor import ProcessorError
from inference.checkpoint import open_checkpoint
from inference.errors import user_errors
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from tests import tiny
from tests.robustness.hostile_checkpoints import (
    CASES,
    JUST_BELOW,
    PROCESSOR_CASES,
    larger_than_memory,
    linked,
)
from tests.test_architecture import MODULES, ROOT, imports

LARGER = "weights larger than memory"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """What a process with little memory says to each case: (type of the error, message)."""
    root = tmp_path_factory.mktemp("hostile")
    good = tiny.save(tiny.hf_model("idefics3-1-tile"), root / "good")
    folders = [good]
    for number, change in enumerate((*CASES.values(), larger_than_memory)):
        folders.append(root / "cases" / str(number) / "checkpoint")
        shutil.copytree(good, folders[-1])
        change(folders[-1])
    command = [sys.executable, "-m", "tests.robustness.hostile_checkpoints", *map(str, folders)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    shutil.rmtree(root / "cases")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(folders), done.stderr[-2000:]
    return {name: (kind, text) for name, (kind, text) in zip(["good", *CASES, LARGER], lines, strict=True)}


def test_the_process_opens_a_good_one(verdicts):
    assert verdicts["good"] == ("loaded", "")


def test_weights_larger_than_memory(verdicts):
    kind, text = verdicts[LARGER]
    assert kind == "MemoryError" and kind in {error.__name__ for error in user_errors()}
    assert re.fullmatch(r"the weights take 1\.15 GB as float32, more memory than cpu has left", text)


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_sentence(verdicts, name):
    kind, text = verdicts[name]
    assert kind == "CheckpointError", text
    assert 20 < len(text) <= 1000 and text.isprintable()


@pytest.fixture(scope="module")
def processor_verdicts(model_folder, tmp_path_factory) -> dict[str, tuple[str, str]]:
    """The same of a process that opens processors."""
    cases = {name: change for name, (change, _) in PROCESSOR_CASES.items()}
    cases |= {f"below: {name}": change for name, change in JUST_BELOW.items()}
    root, folders = tmp_path_factory.mktemp("processors"), [model_folder]
    for number, change in enumerate(cases.values()):
        folders.append(root / str(number))
        shutil.copytree(model_folder, folders[-1])
        change(folders[-1])
    command = [sys.executable, "-m", "tests.robustness.hostile_checkpoints", "--processor"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *map(str, folders)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    shutil.rmtree(root)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(folders), done.stderr[-2000:]
    return {name: (kind, text) for name, (kind, text) in zip(["good", *cases], lines, strict=True)}


@pytest.mark.parametrize("name", PROCESSOR_CASES)
def test_a_processor_is_refused_before_it_is_opened(processor_verdicts, name):
    kind, text = processor_verdicts[name]
    assert processor_verdicts["good"] == ("loaded", "")
    assert kind == "ProcessorError" and text.isprintable(), text
    assert PROCESSOR_CASES[name][1] in text


@pytest.mark.parametrize("name", JUST_BELOW)
def test_a_processor_just_below_the_limits_takes_no_time(processor_verdicts, name):
    kind, text = processor_verdicts[f"below: {name}"]
    assert kind in ("loaded", "ProcessorError") and "MemoryError" not in text, (kind, text)
    assert "expected at most" not in text


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "text_config.num_hidden_layers 1e9",
            "num_hidden_layers: expected an integer from 1 to 1024",
        ),
        ("text_config.vocab_size NaN", "vocab_size: expected an integer from 1 to 4194304, got nan"),
        ("1024 layers", "tensors that config.json calls for are missing"),
        ("config of 15 MB", "expected at most 4194304 bytes, got 150000"),
        ("config of many values", "expected at most 2500000 values of JSON, got more"),
        ("a key twice", "the key 'scale_factor' stands twice, with different values"),
        ("header 2**60", "the header claims 1152921504606846976 bytes but the file has 108"),
        ("header of brackets", "expected a header of at most 8388608 bytes, got 20000000"),
        ("a tensor of 10 TB", "it was cut short"),
        ("two tensors in one place", "follows bytes of no tensor"),
        ("a tensor twice", "the key 'lm_head.weight' stands twice"),
        (
            "index to the parent",
            "expected shards named like model-00001-of-00002.safetensors",
        ),
        ("config linked away", "config.json is a link out of its folder, to /etc/passwd"),
        ("weights linked away", "is a link out of its folder"),
    ],
)
def test_the_sentence_says_what(verdicts, name, sentence):
    assert sentence in verdicts[name][1]


# --------------------------------------------------------------------------------------------------- links
def test_a_link_can_be_allowed(tmp_path, monkeypatch):
    folder = tiny.save(tiny.hf_model("idefics3-1-tile"), tmp_path / "own")
    linked("model.safetensors", "{moved}")(folder)
    with pytest.raises(CheckpointError, match="OCELLI_FOLLOW_LINKS=1 if the link is yours"):
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


def test_a_linked_tokenizer_is_refused(model_folder, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(model_folder, folder)
    linked("tokenizer.json", "{moved}")(folder)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is a link out of its folder"):
        open_checkpoint(folder)


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
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin must be converted to safetensors"):
            open_checkpoint(folder)
    else:
        try:
            open_checkpoint(folder)
        except ProcessorError as error:  # remote code that is not allowed may be refused, never run
            assert "trust_remote_code" in str(error) or "Evil" in str(error)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))  # the bomb is one
    assert mark.exists()


OURS = [name for name in MODULES if name.split(".")[0] not in ("tests", "benchmarks")]


@pytest.mark.parametrize("name", OURS)
def test_nothing_here_unpickles_or_trusts_code(name):
    """Our own training state is read by torch.load with weights_only, which builds only tensors."""
    assert not {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"} & imports(name)
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert called not in ("eval", "exec", "compile", "__import__"), f"{name}, line {node.lineno}"
        assert options.get("trust_remote_code", "False") == "False", f"{name}, line {node.lineno}"
        if called in ("torch.load", "torch.jit.load", "np.load", "numpy.load"):
            safe = options.get("weights_only") == "True" or options.get("allow_pickle") == "False"
            assert safe, f"{name}, line {node.lineno}: {called}"
