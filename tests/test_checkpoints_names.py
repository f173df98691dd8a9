"""What a person calls a checkpoint: folders first, the nearest name, and no PyTorch for a refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from models.checkpoints import CheckpointError
from models.checkpoints.hub import EMBEDDED, resolve_source


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder to start in, which is not the repository's own, with three checkpoints and other folders."""
    for name in ("runs/first", "runs/second", "owner/model-256M"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "google").mkdir()
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(source, revision=None) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_source(source, revision)
    return str(caught.value)


@pytest.mark.parametrize("name", ["runs/first", "./runs/first", "runs/first/", Path("runs/first"), "google"])
def test_a_folder_comes_first(here, name):
    assert Path(resolve_source(name)).samefile(here / name)


@pytest.mark.parametrize("name", ["ocelli-shapes", "checkpoints/ocelli-shapes"])
def test_the_embedded_model_from_any_folder(here, name):
    assert resolve_source(name) == str(EMBEDDED / "ocelli-shapes")
    (here / "ocelli-shapes").mkdir()
    assert Path(resolve_source("ocelli-shapes")).samefile(here / "ocelli-shapes")


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "HuggingFaceTB/SmolVLM-256M-Instruct",
        "me/ocelli-shapes",
        "google/siglip-base",
        "runs.old/first.b",
    ],
)
def test_the_hub_for_what_nothing_here_is_like(here, name):
    assert resolve_source(name) == name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ocelli-shape", "ocelli-shapes"),
        ("Ocelli-Shapes", "ocelli-shapes"),
        ("checkpoints/oceli-shapes", "ocelli-shapes"),
        ("runs/frist", "runs/first"),
        ("run/first", "runs/first"),
        ("runz/secnd", "runs/second"),
        ("./runs/secon", "runs/second"),
        ("owner/model-500M", "owner/model-256M"),
        ("https://huggingface.co/owner/name/tree/main", "owner/name"),
    ],
)
def test_the_nearest_name(here, name, meant):
    assert f"did you mean {meant}?" in complaint(name).replace("the repository ", "")


def test_a_path_without_a_similar_name_tells_what_there_is(here):
    assert "first, second" in complaint("runs/mine") and "first, second" in complaint(here / "runs" / "x")
    assert str(here / "a" / "b") in complaint(here / "a" / "b")
    assert "runs/first," in complaint("runs/first/config.json")


def test_a_revision_means_the_hub(here):
    assert resolve_source("runs/mine", "main") == "runs/mine"
    assert "'main'" in complaint("runs/first", "main") and "./runs/mine" in complaint("./runs/mine", "main")


@pytest.mark.parametrize("name", ["", " ", "a b", "-", "\0", "owner/na:me", "a//b", "~nobody-of-this-name/x"])
def test_what_is_no_name(here, name):
    assert "\n" not in complaint(name)


def test_no_torch_is_imported_for_it():
    script = (
        "import sys\nfrom models.checkpoints.hub import resolve_source\n"
        "try: resolve_source('./nothing')\nexcept ValueError: pass\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=EMBEDDED.parent)
