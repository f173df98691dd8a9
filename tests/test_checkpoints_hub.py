"""Finding a checkpoint: the name a person gives, and the real huggingface_hub client on a Hub on loopback,
which may answer slowly, wrongly or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from data.processor import Processor
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints.files import EMBEDDED
from models.checkpoints.names import MODELS
from models.checkpoints.sources import check_has_config, open_files, resolve_source
from tests import tiny
from tests.hub_server import HubServer, etag, point_client_at
from tests.processors import draw_image
from tests.qwen_checkpoints import save_hf
from tests.tiny import same_weights

NOBODY = "http://127.0.0.1:9"
PLAIN, SHARDED, EMPTY = "owner/plain", "owner/sharded", "owner/empty"
WEIGHTS = "model.safetensors"
Fault = Callable[[BaseHTTPRequestHandler, str], bool]
load = VisionLanguageModel.from_pretrained


def locate(name: str | Path) -> tuple[Path, ...]:
    opened = open_files(name)
    assert opened.config == {}
    return opened.weights


def snapshot(name: str, revision: str | None = None) -> Path:
    return open_files(name, revision).processor_folder


def complaint(ask: Callable, *args, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        ask(*args, **options)
    text = str(caught.value)
    assert text.isprintable() and 0 < len(text) < 600
    return text


# ---------------------------------------------------------------------------------------------------- names
@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder to start in, which is not the repository's own, with three checkpoints and other folders."""
    for name in ("runs/first", "runs/second", "owner/model-256M"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "google").mkdir()
    for name in ("weights.safetensors", "google/weights.safetensors"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_half_a_download_and_an_adapter_alone(here):
    first = here / "runs" / "first"
    assert "safetensors first" in complaint(locate, first)
    (first / "model.safetensors.incomplete").touch()
    assert "download it again" in complaint(locate, first)
    (first / "adapter").mkdir()
    (first / "adapter" / "adapter_config.json").write_text("{}")
    assert "is an adapter" in complaint(locate, first / "adapter")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *((name, "runs/first") for name in ("runs/first", "./runs/first", "runs/first/", Path("runs/first"))),
        ("google", "google"),
        *((name, EMBEDDED / "ocelli-shapes") for name in ("ocelli-shapes", "checkpoints/ocelli-shapes")),
    ],
)
def test_folders_come_first_then_the_embedded_model(here, name, found):
    assert Path(resolve_source(name)).samefile(here / found)


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "HuggingFaceTB/SmolVLM-256M-Instruct", "me/ocelli-shapes", "google/siglip-base"),
    ],
)
def test_the_hub_for_what_nothing_here_is_like(here, name):
    assert resolve_source(name) == name
    assert resolve_source("runs/mine", "main") == "runs/mine"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("ocelli-shape", "did you mean ocelli-shapes?"),
        ("Ocelli-Shapes", "did you mean ocelli-shapes?"),
        ("runs/frist", "did you mean runs/first?"),
        ("owner/modl-256M", "did you mean owner/model-256M?"),
        ("runs/other", "runs/first, runs/second"),
        ("qwen3-vl-2", "did you mean qwen3-vl-2b?"),
        *((f"{folder}missing.gguf", "no checkpoint") for folder in ("", "runs/", "runs/first/", "./")),
        *((name, "") for name in ("", " ", "a b", "-", "\0", "owner/na:me", "a//b", "~nobody-of-this/x")),
        *((name, "") for name in ("runs/first/config.json", "https://huggingface.co/owner/name")),
        *((name, "expected a folder") for name in ("weights.safetensors", "google/weights.safetensors")),
    ],
)
def test_slips_are_refused_before_the_hub_is_asked(here, name, named):
    assert named in complaint(resolve_source, name)


# -------------------------------------------------------------------------------------------------- the Hub
@pytest.fixture(scope="module")
def repos(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("repos")
    model = tiny.hf_model("idefics3-1-tile")
    model.save_pretrained(root / "plain")
    model.save_pretrained(root / "sharded", max_shard_size="60KB")
    (root / "plain" / "training_state.bin").write_bytes(bytes(1000))
    (root / "plain" / "chat_template.jinja").write_text("{{ messages }}")
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


def test_repository_and_revision(hub, local):
    for revision in (None, "v1", hub.commit(PLAIN)):
        assert same_weights(load(PLAIN, revision=revision), local)
    fetched = {path.rsplit("/", 1)[1] for path in hub.served}
    assert fetched == {"config.json", "generation_config.json", WEIGHTS}
    assert {path.name for path in snapshot(PLAIN).iterdir()} == fetched | {"chat_template.jinja"}


def test_a_short_name_is_its_repository_unless_a_folder_has_it(hub, tmp_path, monkeypatch):
    """Downloaded in shards, and then opened without a network. What is saved names the repository."""
    repo = MODELS["qwen3-vl-2b"].repo
    save_hf("qwen3_vl", tmp_path / "model", max_shard_size="200KB")
    here = load(tmp_path / "model")
    hub.repos = hub.repos | {repo: tmp_path / "model"}
    assert same_weights(load("qwen3-vl-2b"), here)
    assert len([name for name in hub.served if name.endswith(".safetensors")]) > 2
    snapshot("qwen3-vl-2b")
    point_client_at(monkeypatch, NOBODY, tmp_path / "cache", offline=True)
    alone = load("Qwen3-VL-2B")
    assert same_weights(alone, here) and alone.origin.source == repo
    processor = Processor.from_pretrained(snapshot("qwen3-vl-2b"), alone.config)
    assert processor.ask(draw_image(90, 60), "how many")["pixel_values"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-vl-2b").mkdir()
    assert resolve_source("qwen3-vl-2b") == "qwen3-vl-2b"


def test_shards_of_one_commit_and_a_second_load_that_asks_once(hub, local):
    """Each file is of the commit that was asked for first; loaded again, that alone is asked for."""
    assert same_weights(load(SHARDED), local)
    others = [line for line in hub.requests if "/resolve/" in line and "/config.json" not in line]
    assert others and all(f"/resolve/{hub.commit(SHARDED)}/" in line for line in others)
    hub.requests.clear()
    load(SHARDED)
    assert len(hub.requests) == 1 and "/api/models/owner/sharded" in hub.requests[0]
    load(SHARDED, hub.commit(SHARDED))
    assert len(hub.requests) == 2


@pytest.mark.parametrize(("url", "offline"), [(None, True), (NOBODY, False)])
def test_a_second_load_without_a_network(hub, monkeypatch, tmp_path, local, url, offline):
    load(SHARDED)
    hub.requests.clear()
    point_client_at(monkeypatch, url or hub.url, tmp_path / "cache", offline)
    assert same_weights(load(SHARDED), local) and hub.requests == []


@pytest.mark.parametrize("ask", [load, snapshot, check_has_config])
def test_no_network(monkeypatch, tmp_path, ask, caplog):
    """Found out with one try, without the client's 23 seconds of others."""
    point_client_at(monkeypatch, NOBODY, tmp_path / "cache")
    waits = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    text = complaint(ask, PLAIN)
    assert NOBODY in text and PLAIN in text and not waits and not caplog.records


def test_what_is_missing_is_named(hub, repos, tmp_path, monkeypatch):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "README.md").write_text("nothing here")
    part = shutil.copytree(repos[SHARDED], tmp_path / "part")
    next(part.glob("*00002-of*")).unlink()
    hub.repos = repos | {"owner/bare": tmp_path / "bare", "owner/part": part}
    for ask, repo, revision, named in (
        (load, "owner/nothing", None, hub.url),
        (snapshot, "owner/nothing", None, hub.url),
        (load, PLAIN, "v2", "'v2'"),
        (load, EMPTY, None, WEIGHTS),
        (load, "owner/bare", None, "config.json"),
        (load, "owner/part", None, "model-00002-of-"),
    ):
        text = complaint(ask, repo, revision)
        assert repo in text and named in text
    point_client_at(monkeypatch, hub.url, tmp_path / "cold", offline=True)
    assert "HF_HUB_OFFLINE" in complaint(load, PLAIN)


@pytest.mark.parametrize("network", ["a Hub without it", "none"])
def test_a_repository_that_cannot_be_found_is_said_so_at_once(repos, tmp_path, monkeypatch, network):
    """In words of ours: no number of the system, no text of a library."""
    waits = []
    with HubServer(repos) as server:
        point_client_at(monkeypatch, NOBODY if network == "none" else server.url, tmp_path / "cache")
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
        for ask in (check_has_config, load):
            text = complaint(ask, "nobody/nothing-alike")
            assert "there is no folder nobody/nothing-alike here" in text and not waits
            assert not [word for word in ("Errno", "urllib3", "httpx", "HTTPConnection") if word in text]


@pytest.mark.slow
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
        command = [sys.executable, "-c", script, SHARDED]
        done = subprocess.run(
            command,
            env=environment,
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == float(sum(p.detach().double().sum() for p in local.parameters()))


# --------------------------------------------------------------------------------------------------- faults
@pytest.fixture
def faulty(hub, local):
    """In the end, without the fault, all is well: nothing half is in the cache."""
    yield hub
    hub.fault = None
    assert same_weights(load(PLAIN), local)


def times(count: int, fault: Fault, of: str = WEIGHTS, method: str = "GET") -> Fault:
    """A fault for the first so many requests for paths that end so."""
    left = [count]

    def some(request: BaseHTTPRequestHandler, path: str) -> bool:
        if not path.endswith("/" + of) or request.command != method or not left[0]:
            return False
        left[0] -= 1
        return fault(request, path)

    return some


def status(code: int) -> Fault:
    def answer(request: BaseHTTPRequestHandler, path: str) -> bool:
        HubServer._send(request, code, b"busy", {"Retry-After": "1"})
        return True

    return answer


def hung_up(request: BaseHTTPRequestHandler, path: str) -> bool:
    """The connection is closed without an answer."""
    request.close_connection = True
    return True


def body(folder: Path, change: Callable[[bytes], bytes]) -> Fault:
    """The file with other bytes, under its own ETag and length."""

    def answer(request: BaseHTTPRequestHandler, path: str) -> bool:
        name = path.rpartition("/")[2]
        whole = (folder / name).read_bytes()
        request.send_response(200)
        request.send_header("ETag", f'"{etag(name, whole)}"')
        request.send_header("X-Repo-Commit", path.split("/")[4])
        request.send_header("Content-Length", str(len(whole)))
        request.end_headers()
        request.wfile.write(change(whole))
        request.close_connection = True
        return True

    return answer


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("code", "count"), [(500, 2), (500, 10**6), (401, 10**6)])
@pytest.mark.parametrize(("name", "method"), [(WEIGHTS, "GET"), ("config.json", "HEAD")])
def test_an_error(faulty, local, code, count, name, method):
    faulty.fault = times(count, status(code), name, method)
    try:
        assert same_weights(load(PLAIN), local) and count == 2
    except CheckpointError as error:
        assert name in str(error) or str(code) in str(error) or "reach" in str(error)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("ask", "of", "method"),
    [
        (load, "config.json", "HEAD"),
        (load, WEIGHTS, "GET"),
        (snapshot, "config.json", "HEAD"),  # a tokenizer's repository is asked so, too
    ],
)
def test_a_connection_that_the_hub_had_closed(faulty, ask, of, method):
    """The client keeps connections for later, and finds out only when it uses them."""
    faulty.fault = times(1, hung_up, of, method)
    ask(PLAIN)


def test_a_body_that_breaks_off(faulty, repos):
    faulty.fault = times(10**6, body(repos[PLAIN], lambda whole: whole[: len(whole) // 2]))
    assert WEIGHTS in complaint(load, PLAIN)
