"""Loading through the real huggingface_hub client, from a Hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download

from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints import hub as hub_module
from models.checkpoints.hub import measure
from tests import tiny
from tests.hub_server import HubServer, point_client_at

NOBODY = "http://127.0.0.1:9"
PLAIN, SHARDED, EMPTY = "owner/plain", "owner/sharded", "owner/empty"


@pytest.fixture(scope="module")
def repos(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("repos")
    model = tiny.hf_model("idefics3-1-tile")
    model.save_pretrained(root / "plain")
    model.save_pretrained(root / "sharded", max_shard_size="60KB")
    (root / "plain" / "training_state.bin").write_bytes(bytes(1000))
    (root / "plain" / "chat_template.jinja").write_text("{{ messages }}")
    (root / "plain" / "training_log.json").write_text("[]")
    (root / "plain" / "notes.txt").write_text("nothing for a processor")
    (root / "empty").mkdir()
    (root / "empty" / "config.json").write_bytes((root / "plain" / "config.json").read_bytes())
    return {PLAIN: root / "plain", SHARDED: root / "sharded", EMPTY: root / "empty"}


@pytest.fixture
def hub(repos, tmp_path, monkeypatch):
    with HubServer(repos, branches=("main", "v1")) as server:
        point_client_at(monkeypatch, server.url, tmp_path / "cache")
        yield server


def same_weights(first, second) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def complaint(*args, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        VisionLanguageModel.from_pretrained(*args, **options)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


def test_repository_and_revision(hub, repos):
    local = VisionLanguageModel.from_pretrained(repos[PLAIN])
    assert same_weights(VisionLanguageModel.from_pretrained(PLAIN), local)
    assert same_weights(VisionLanguageModel.from_pretrained(PLAIN, revision="v1"), local)
    assert same_weights(VisionLanguageModel.from_pretrained(PLAIN, revision=hub.commit(PLAIN)), local)
    fetched = {
        line.rsplit("/", 1)[1] for line in hub.requests if line.startswith("GET /owner/plain/resolve/")
    }
    assert fetched == {"config.json", "generation_config.json", "model.safetensors"}


def test_every_file_is_of_the_commit_of_the_config(hub):
    VisionLanguageModel.from_pretrained(SHARDED)
    others = [line for line in hub.requests if "/resolve/" in line and "config.json" not in line]
    assert others and all(f"/resolve/{hub.commit(SHARDED)}/" in line for line in others)


def test_sharded(hub, repos):
    model = VisionLanguageModel.from_pretrained(SHARDED)
    assert same_weights(model, VisionLanguageModel.from_pretrained(repos[PLAIN]))


def test_second_load_asks_once(hub):
    VisionLanguageModel.from_pretrained(SHARDED)
    hub.requests.clear()
    VisionLanguageModel.from_pretrained(SHARDED)
    assert hub.requests == ["HEAD /owner/sharded/resolve/main/config.json"]


@pytest.mark.parametrize("repo", [PLAIN, SHARDED])
def test_second_load_offline_asks_nothing(hub, monkeypatch, tmp_path, repo):
    online = VisionLanguageModel.from_pretrained(repo)
    hub.requests.clear()
    point_client_at(monkeypatch, hub.url, tmp_path / "cache", offline=True)
    assert same_weights(VisionLanguageModel.from_pretrained(repo), online)
    assert hub.requests == []


def test_second_load_with_the_server_gone(repos, monkeypatch, tmp_path):
    with HubServer(repos) as server:
        point_client_at(monkeypatch, server.url, tmp_path / "cache")
        online = VisionLanguageModel.from_pretrained(SHARDED)
    point_client_at(monkeypatch, NOBODY, tmp_path / "cache")  # the server goes on with kept connections
    assert same_weights(VisionLanguageModel.from_pretrained(SHARDED), online)


@pytest.mark.parametrize(
    "load", [VisionLanguageModel.from_pretrained, hub_module.snapshot, hub_module.describe, measure]
)
def test_no_network(monkeypatch, tmp_path, load, caplog):
    """Found out with one try, without the client's 23 seconds of others."""
    point_client_at(monkeypatch, NOBODY, tmp_path / "cache")
    waits = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    with pytest.raises(CheckpointError, match=rf"{NOBODY} cannot be reached for .* of owner/plain"):
        load(PLAIN)
    assert not waits and not caplog.records


def test_no_network_and_a_cache_that_was_filled_otherwise(repos, monkeypatch, tmp_path, caplog):
    """What the cache does not know to be absent is not asked for again, either."""
    with HubServer(repos) as server:
        point_client_at(monkeypatch, server.url, tmp_path / "cache")
        snapshot_download(SHARDED, allow_patterns=["config.json", "model*"])
    point_client_at(monkeypatch, NOBODY, tmp_path / "cache")
    waits = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    model = VisionLanguageModel.from_pretrained(SHARDED)
    assert hub_module.snapshot(SHARDED, model.origin.commit) == model.origin.folder
    assert same_weights(model, VisionLanguageModel.from_pretrained(repos[PLAIN]))
    assert not waits and not caplog.records


def test_what_is_missing_is_named(hub, repos, tmp_path, monkeypatch):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "README.md").write_text("nothing here")
    hub.repos = repos | {"owner/bare": tmp_path / "bare"}
    for repo, options, named in (
        ("owner/nothing", {}, hub.url),
        (PLAIN, {"revision": "v2"}, "'v2'"),
        (EMPTY, {}, "model.safetensors"),
        ("owner/bare", {}, "config.json"),
    ):
        text = complaint(repo, **options)
        assert repo in text and named in text
    point_client_at(monkeypatch, hub.url, tmp_path / "cold", offline=True)
    assert "HF_HUB_OFFLINE" in complaint(PLAIN)


def test_missing_shard(hub, repos, tmp_path):
    (tmp_path / "part").mkdir()
    for path in repos[SHARDED].iterdir():
        if "00002-of" not in path.name:
            (tmp_path / "part" / path.name).write_bytes(path.read_bytes())
    hub.repos = repos | {"owner/part": tmp_path / "part"}
    text = complaint("owner/part")
    assert "repository owner/part has no model-00002-of-" in text and "which its index names" in text


def test_snapshot_fetches_processor_files_only(hub, repos):
    folder = hub_module.snapshot(PLAIN)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "chat_template.jinja"}
    assert hub_module.snapshot(repos[PLAIN]) == repos[PLAIN]
    for source, sentence in (
        ("owner/nothing", "no repository owner/nothing"),
        ("./x", "there is no folder ./x"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            hub_module.snapshot(source)


def test_environment_variables(repos, tmp_path):
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
    local = VisionLanguageModel.from_pretrained(repos[PLAIN]).requires_grad_(False)
    assert json.loads(done.stdout) == float(sum(p.double().sum() for p in local.parameters()))
