"""Loading through the real huggingface_hub client, from a Hub on loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints import hub as hub_module
from tests import tiny
from tests.hub_server import HubServer, point_client_at
from tests.tiny import same_weights

NOBODY = "http://127.0.0.1:9"
PLAIN, SHARDED, EMPTY = "owner/plain", "owner/sharded", "owner/empty"


load = VisionLanguageModel.from_pretrained


@pytest.fixture(scope="module")
def repos(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("repos")
    model = tiny.hf_model("idefics3-1-tile")
    model.save_pretrained(root / "plain")
    model.save_pretrained(root / "sharded", max_shard_size="60KB")
    (root / "plain" / "training_state.bin").write_bytes(bytes(1000))
    (root / "plain" / "chat_template.jinja").write_text("{{ messages }}")
    (root / "plain" / "notes.json").write_text("[]")
    (root / "empty").mkdir()
    (root / "empty" / "config.json").write_bytes((root / "plain" / "config.json").read_bytes())
    return {PLAIN: root / "plain", SHARDED: root / "sharded", EMPTY: root / "empty"}


@pytest.fixture(scope="module")
def local(repos):
    return load(repos[PLAIN])


@pytest.fixture
def hub(repos, tmp_path, monkeypatch):
    with HubServer(repos, branches=("main", "v1")) as server:
        point_client_at(monkeypatch, server.url, tmp_path / "cache")
        yield server


def complaint(ask, *args, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        ask(*args, **options)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


def test_repository_and_revision(hub, local):
    for revision in (None, "v1", hub.commit(PLAIN)):
        assert same_weights(load(PLAIN, revision=revision), local)
    fetched = {
        line.rsplit("/", 1)[1] for line in hub.requests if line.startswith("GET /owner/plain/resolve/")
    }
    assert fetched == {"config.json", "generation_config.json", "model.safetensors"}


def test_shards_of_one_commit_and_a_second_load_that_asks_once(hub, local):
    """Each file is of the commit of config.json; loaded again, that is asked for, and offline nothing."""
    assert same_weights(load(SHARDED), local)
    others = [line for line in hub.requests if "/resolve/" in line and "config.json" not in line]
    assert others and all(f"/resolve/{hub.commit(SHARDED)}/" in line for line in others)
    hub.requests.clear()
    load(SHARDED)
    assert hub.requests == ["HEAD /owner/sharded/resolve/main/config.json"]
    load(SHARDED, hub.commit(SHARDED))
    assert len(hub.requests) == 1


@pytest.mark.parametrize(
    ("repo", "url", "offline"), [(PLAIN, None, True), (SHARDED, None, True), (SHARDED, NOBODY, False)]
)
def test_a_second_load_without_a_network(hub, monkeypatch, tmp_path, local, repo, url, offline):
    load(repo)
    hub.requests.clear()
    point_client_at(monkeypatch, url or hub.url, tmp_path / "cache", offline)
    assert same_weights(load(repo), local) and hub.requests == []


@pytest.mark.parametrize("ask", [load, hub_module.snapshot, hub_module.describe, hub_module.measure])
def test_no_network(monkeypatch, tmp_path, ask, caplog):
    """Found out with one try, without the client's 23 seconds of others."""
    point_client_at(monkeypatch, NOBODY, tmp_path / "cache")
    waits = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    text = complaint(ask, PLAIN)
    assert NOBODY in text and PLAIN in text and not waits and not caplog.records


def test_no_network_and_a_cache_that_was_filled_otherwise(repos, monkeypatch, tmp_path, caplog, local):
    """What the cache does not know to be absent is not asked for again, either."""
    with HubServer(repos) as server:
        point_client_at(monkeypatch, server.url, tmp_path / "cache")
        snapshot_download(SHARDED, allow_patterns=["config.json", "model*"])
    point_client_at(monkeypatch, NOBODY, tmp_path / "cache")
    waits = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    model = load(SHARDED)
    assert hub_module.snapshot(SHARDED, model.origin.commit) == model.origin.folder
    assert same_weights(model, local) and not waits and not caplog.records


def test_what_is_missing_is_named(hub, repos, tmp_path, monkeypatch):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "README.md").write_text("nothing here")
    part = shutil.copytree(repos[SHARDED], tmp_path / "part")
    next(part.glob("*00002-of*")).unlink()
    hub.repos = repos | {"owner/bare": tmp_path / "bare", "owner/part": part}
    for ask, repo, revision, named in (
        (load, "owner/nothing", None, hub.url),
        (hub_module.snapshot, "owner/nothing", None, hub.url),
        (load, PLAIN, "v2", "'v2'"),
        (load, EMPTY, None, "model.safetensors"),
        (load, "owner/bare", None, "config.json"),
        (load, "owner/part", None, "model-00002-of-"),
    ):
        text = complaint(ask, repo, revision)
        assert repo in text and named in text
    point_client_at(monkeypatch, hub.url, tmp_path / "cold", offline=True)
    assert "HF_HUB_OFFLINE" in complaint(load, PLAIN)


def test_snapshot_fetches_processor_files_only(hub, repos):
    names = {path.name for path in hub_module.snapshot(PLAIN).iterdir()}
    assert names == {"config.json", "chat_template.jinja"}
    assert hub_module.snapshot(repos[PLAIN]) == repos[PLAIN]


def test_environment_variables(repos, tmp_path, local):
    """The same once in a process of its own, with the variables that users set; and nothing is imported that
    takes seconds."""
    script = (
        "import json, sys, torch\nfrom models import VisionLanguageModel\n"
        "model = VisionLanguageModel.from_pretrained(sys.argv[1]).requires_grad_(False)\n"
        "assert not {'torch._dynamo', 'transformers', 'torch.distributed.tensor'} & sys.modules.keys()\n"
        "print(json.dumps(float(sum(p.double().sum() for p in model.parameters()))))\n"
    )
    with HubServer(repos) as server:
        variables = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | variables
        done = subprocess.run(
            [sys.executable, "-c", script, SHARDED],
            env=environment,
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == float(sum(p.detach().double().sum() for p in local.parameters()))
