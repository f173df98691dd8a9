"""Which models a page opens for its visitors."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path

import pytest
from huggingface_hub import constants

from inference.checkpoint import RequestError
from models.checkpoints import CheckpointError
from models.checkpoints.hub import describe
from models.checkpoints.inspect import read_headers
from tests.hub_server import HubServer, point_client_at
from tests.pages import EMBEDDED
from web.models import Models


def test_models_may_be_chosen_from_the_list_only(tmp_path):
    models = Models([EMBEDDED])
    for name in ("no/such", str(tmp_path), "/etc", "../x", "", "checkpoints/ocelli-shapes"):
        with pytest.raises(RequestError):
            models.open(name)
    for name in (str(tmp_path), "../x", "a/b/c", "tests/fixtures", "a b/c"):
        with pytest.raises(RequestError):
            Models([EMBEDDED], any_model=True).open(name)


def test_what_a_visitor_names_is_measured_before_it_is_downloaded(tmp_path, monkeypatch):
    with HubServer({"owner/small": Path(EMBEDDED)}) as hub:
        point_client_at(monkeypatch, hub.url, tmp_path / "cache")
        size = (Path(EMBEDDED) / "model.safetensors").stat().st_size
        tight = Models([EMBEDDED], any_model=True, largest_guest=size // 2)
        with pytest.raises(RequestError, match=r"at most 0\.003\d+ GB, owner/small has 0\.00[67]\d* GB"):
            tight.open("owner/small")
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**12, 0, 10**7))
        with pytest.raises(RequestError, match=r"no room for the .* of owner/small \(0\.01 GB are free"):
            Models([EMBEDDED], any_model=True).open("owner/small")
        assert not hub.served  # no file of it has come
        monkeypatch.undo()
        point_client_at(monkeypatch, hub.url, tmp_path / "cache")
        assert Models([EMBEDDED], any_model=True).open("owner/small").name == "owner/small"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with a repository that may be changed, owner/one, and its twin."""
    for name in ("one", "two"):
        shutil.copytree(EMBEDDED, tmp_path / name)
    repos = {f"owner/{name}": tmp_path / name for name in ("one", "two")}
    with HubServer(repos) as server:
        point_client_at(monkeypatch, server.url, tmp_path / "cache")
        yield server


def guests(**options) -> Models:
    return Models([EMBEDDED], any_model=True, device="cpu", **options)


@pytest.mark.parametrize("name", ["generation_config.json", "model.safetensors.index.json"])
def test_every_file_that_may_come_is_counted(hub, name):
    with (hub.repos["owner/one"] / name).open("r+b" if name.startswith("gen") else "wb") as file:
        file.truncate(30_000_000)
    with pytest.raises(CheckpointError, match=rf"bytes of JSON in {name}, got 30000000"):
        guests().open("owner/one")
    with (hub.repos["owner/one"] / name).open("r+b") as file:
        file.truncate(4_000_000)
    size = sum(path.stat().st_size for path in Path(EMBEDDED).glob("model.safetensors"))
    with pytest.raises(RequestError, match="expected files of at most"):
        guests(largest_guest=size + 2_000_000).open("owner/one")
    assert not hub.served


def test_the_commit_that_was_measured_is_opened(hub):
    """The repository changes behind the measuring: the other content is never asked for."""
    measured = hub.commit("owner/one")

    def changes(request, path):
        if "/resolve/" in path:
            hub.fault = None
            (hub.repos["owner/one"] / "later.txt").write_text("pushed meanwhile")
        return False

    hub.fault = changes
    with pytest.raises(CheckpointError):  # this Hub knows the newest commit only
        guests().open("owner/one")
    asked = [line for line in hub.requests if "/resolve/" in line]
    assert asked and all(f"/resolve/{measured}/" in line for line in asked)


def test_a_tokenizer_of_another_repository_is_refused(hub):
    config = {"vit_hidden_dim": 8, "lm_hidden_dim": 8, "lm_tokenizer": "owner/two"}
    (hub.repos["owner/one"] / "config.json").write_text(json.dumps(config))
    (hub.repos["owner/one"] / "tokenizer.json").unlink()
    with pytest.raises(RequestError, match="takes its tokenizer from another repository"):
        guests().open("owner/one")
    assert not [name for name in hub.served if "two" in name or name.endswith(".safetensors")]


def test_weights_are_measured_as_what_they_become(hub):
    """Half of what they take as float32 may be loaded as bfloat16 only."""
    needed = read_headers(describe(EMBEDDED)).num_elements * 4
    files = sum(path.stat().st_size for path in Path(EMBEDDED).iterdir())
    assert files < needed - 1, "the embedded model is stored in two bytes"
    with pytest.raises(RequestError, match=r"GB of weights in memory, owner/one takes .* GB as float32"):
        guests(largest_guest=needed - 1).open("owner/one")
    assert not [name for name in hub.served if name.endswith(".safetensors") and hub.served[name] > 200_000]
    assert guests(largest_guest=needed - 1, dtype="bfloat16").open("owner/one").dtype == "bfloat16"


def test_the_old_guest_is_gone_before_the_next_is_loaded(hub):
    closed, there, models = [], [], guests()
    models.closed = lambda checkpoint: closed.append(checkpoint.name)
    old = weakref.ref(models.open("owner/one").model)

    def watches(request, path):
        if path.endswith(".safetensors") and request.command == "GET" and "Range" not in request.headers:
            there.append(old() is not None)
        return False

    with pytest.raises(CheckpointError):
        models.open("owner/none")
    assert models.held("owner/one") is not None  # one that is refused takes nobody's place
    hub.fault = watches
    models.open("owner/two")
    assert there == [False] and closed == ["owner/one"]


def test_a_guest_that_is_here_needs_neither_hub_nor_room(hub, monkeypatch):
    guests().open("owner/one")
    hub.requests.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**12, 10**12, 0))
    assert guests().open("owner/one").name == "owner/one"
    assert not [line for line in hub.requests if line.startswith("GET") and "/resolve/" in line]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert guests().open("owner/one").name == "owner/one"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert guests().open("owner/one").name == "owner/one"
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        guests().open("owner/two")
