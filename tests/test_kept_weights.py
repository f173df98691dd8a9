"""Weights in four bits are rounded once; a file that is not the one written is not used, and written anew."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch

from generation.fast.quantized import ARITHMETIC
from generation.memory import mapped_bytes
from inference import checkpoint as checkpoint_module
from inference import kept as kept_files
from inference.checkpoint import open_checkpoint
from models import VisionLanguageModel
from tests import gemma4_checkpoints, tiny
from tests.prompts import tiny_vlm
from tests.qwen_checkpoints import save_hf
from tests.test_fast_decode import needs_compiler  # noqa: F401  (for every test here)

EACH = pytest.mark.parametrize("opened", [0, 2, "gemma4"], indirect=True)  # one or two tables, or one in rows


@pytest.fixture
def opened(request, tmp_path, monkeypatch):
    """(a function that opens a checkpoint and says how many tensors were rounded, its folder, the kept file,
    state of the first opening)."""
    kept_files.load_panels(4)  # compiled where it always is
    folder, rounded, put = tmp_path / "model", [], kept_files.put_layers
    if (of := getattr(request, "param", 0)) == "gemma4":
        gemma4_checkpoints.save_hf(folder)
    else:
        save_hf("qwen3_vl", folder, of)
    monkeypatch.setenv("OCELLI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_files, "LEAST_BYTES", 0)
    monkeypatch.setattr(kept_files, "put_layers", lambda *given: (rounded.append(given[1]), put(*given)))

    def open_again(device="cpu"):
        rounded.clear()
        model = open_checkpoint(folder, device=device, dtype="int4").model
        return model, len(rounded)

    first, count = open_again()
    (kept,) = (tmp_path / "cache" / "weights").iterdir()
    assert count > 0
    return open_again, folder, kept, first.state_dict()


def same(model, state):
    own = model.state_dict()
    return own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in state)


@pytest.mark.slow
@EACH
def test_a_gpu_is_given_what_was_kept(opened, monkeypatch):
    """On the meta device, which takes the numbers for granted."""
    open_again, *_ = opened
    monkeypatch.setattr(checkpoint_module, "pick_device", torch.device)
    monkeypatch.setitem(checkpoint_module.PACKED, "int4", ("meta",))
    monkeypatch.setitem(ARITHMETIC, "meta", torch.bfloat16)
    model, rounded = open_again("meta")
    assert rounded == 0 and {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    lm = model.language_model
    assert lm.norm.weight.dtype == torch.bfloat16 and lm.lm_head.weight.dtype == torch.int32
    assert (lm.lm_head.weight is lm.embed_tokens.weight) == lm.tied


@pytest.mark.slow
@EACH
def test_a_second_opening_rounds_nothing_and_what_it_maps_counts_as_taken(opened):
    """The system says that the pages of a mapped file are free, and a cache would be given them."""
    open_again, _, kept, state = opened
    before = mapped_bytes()
    model, rounded = open_again()
    assert rounded == 0 and same(model, state)
    lm = model.language_model
    assert (lm.lm_head.weight.data_ptr() == lm.embed_tokens.weight.data_ptr()) == lm.tied
    assert mapped_bytes() == before + kept.stat().st_size
    del model, lm
    gc.collect()
    assert mapped_bytes() == before


MEASURED = """
import os, sys, threading
from functools import partial
from pathlib import Path
from generation.fast.native import panels
from inference.kept import KeptWeights
from models.checkpoints.sources import open_files
from models.vision_language_model import VisionLanguageModel

def own():  # bytes that are in memory and of no file
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * 4096

panels.load_panels(4), panels.load_panels(8)  # compiled where they always are
os.environ["OCELLI_CACHE"] = sys.argv[2]
# As little as they are beside billions of weights.
panels.PARTIAL_FLOATS, panels.NOTED, panels.SHARED_BYTES = 2**17, 16, 2**20
opened = open_files(sys.argv[1])
kept, done, before, most = KeptWeights(opened), threading.Event(), own(), 0

def watch():
    global most
    while not done.wait(0.002):
        most = max(most, own())

watching = threading.Thread(target=watch)
watching.start()
model = kept.load(partial(VisionLanguageModel.from_pretrained, opened, None, "stored", "cpu", kept.put))
done.set()
watching.join()
print((most - before) / sum(tensor.nbytes for tensor in model.state_dict().values()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of memory")
def test_loading_takes_little_more_memory_than_what_is_loaded(tmp_path):
    """Where a process has no more, it would be killed: beside the result, a copy of a tensor and what is
    rounded at a time."""
    deep = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 512}
    tiny_vlm(**deep, image_token_id=511).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "model"), str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=kept_files.ROOT, capture_output=True, text=True, check=True)
    assert 0.5 < float(done.stdout) < 1.2


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


DAMAGES = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut short": lambda path: os.truncate(path, 9000),
    "one bit": lambda path: flip(path, -40),
    "a name": lambda path: flip(path, 20),
    "others may write": lambda path: path.chmod(0o666),
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_trusted_is_written_anew(opened, damage):
    open_again, _, kept, state = opened
    DAMAGES[damage](kept)
    model, rounded = open_again()
    assert rounded > 0 and same(model, state)
    assert kept.stat(follow_symlinks=False).st_mode & 0o777 == 0o600 and open_again()[1] == 0


@pytest.mark.slow
def test_somebody_elses_file_is_not_used(opened, monkeypatch):
    open_again, _, kept, _ = opened
    if os.geteuid() == 0:
        os.chown(kept, 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: kept.stat().st_uid + 1)
    assert open_again()[1] > 0


@pytest.mark.slow
def test_another_checkpoint_or_another_code_is_rounded_anew(opened, monkeypatch):
    open_again, folder, kept, _ = opened
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert open_again()[1] > 0
    monkeypatch.setattr(kept_files, "code_digest", lambda: "another")
    assert open_again()[1] > 0
    assert len(list(kept.parent.iterdir())) == 3


@pytest.mark.slow
def test_a_full_folder_forgets_what_was_used_longest_ago_and_a_full_disk_nothing_else(opened, monkeypatch):
    open_again, folder, kept, state = opened
    monkeypatch.setattr(kept_files, "WEIGHTS_BYTES", int(1.5 * kept.stat().st_size))
    os.utime(folder / "model.safetensors", ns=(1, 1))
    open_again()
    (left,) = kept.parent.iterdir()
    assert left != kept and open_again()[1] == 0
    left.unlink()

    def fail(*given):
        raise OSError(28, "no space left")

    monkeypatch.setattr(kept_files, "write_whole", fail)
    assert same(open_again()[0], state)


def test_a_checkpoint_that_changes_between_its_two_readings(opened, monkeypatch):
    """Else its tower would be of one version, and its language model of the other."""
    open_again, folder, kept, _ = opened
    kept.unlink()
    original, left = kept_files.second_moments, [None]

    def meanwhile(*given):
        if left:
            left.clear()
            model = VisionLanguageModel.from_pretrained(folder)
            tiny.randomize(model, 9)
            model.save_pretrained(folder)
        return original(*given)

    monkeypatch.setattr(kept_files, "second_moments", meanwhile)
    state = open_again()[0].state_dict()
    assert not left
    for path in kept.parent.iterdir():
        path.unlink()
    assert same(open_again()[0], state)
