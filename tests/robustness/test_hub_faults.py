"""A Hub that answers slowly, wrongly or not at all; a folder that two processes save to.

Each fault ends in a model or in one sentence. Behind either, the same client gets the whole checkpoint:
nothing half is left in its cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from inference.checkpoint import open_checkpoint
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints.folder import replace_folder
from models.checkpoints.hub import measure, snapshot
from tests.hub_server import HubServer, etag, point_client_at

REPO, WEIGHTS = "owner/tiny", "model.safetensors"
ROOT = Path(__file__).resolve().parents[2]
Fault = Callable[[BaseHTTPRequestHandler, str], bool]


@pytest.fixture
def hub(model_folder, tmp_path, monkeypatch):
    with HubServer({REPO: model_folder}) as server:
        point_client_at(monkeypatch, server.url, tmp_path / "cache")
        yield server


def weights(source) -> dict[str, torch.Tensor]:
    return dict(open_checkpoint(source, device="cpu").model.named_parameters())


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def complaint() -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(REPO, device="cpu")
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500
    return text


def times(count: int, fault: Fault, of: str = WEIGHTS, method: str = "GET") -> Fault:
    """A fault for the first so many requests for one file."""
    left = [count]

    def some(request: BaseHTTPRequestHandler, path: str) -> bool:
        if not path.endswith("/" + of) or request.command != method or not left[0]:
            return False
        left[0] -= 1
        return fault(request, path)

    return some


def status(code: int, **headers: str) -> Fault:
    def answer(request: BaseHTTPRequestHandler, path: str) -> bool:
        HubServer._send(request, code, b"busy", {name.replace("_", "-"): v for name, v in headers.items()})
        return True

    return answer


def body(folder: Path, change: Callable[[bytes], bytes], announced: Callable[[bytes], int] = len) -> Fault:
    """The file with other bytes, under its own ETag; `announced` is the length that is told beforehand."""

    def answer(request: BaseHTTPRequestHandler, path: str) -> bool:
        name = path.rpartition("/")[2]
        whole = (folder / name).read_bytes()
        request.send_response(200)
        request.send_header("ETag", f'"{etag(name, whole)}"')
        request.send_header("X-Repo-Commit", path.split("/")[4])
        request.send_header("Content-Length", str(announced(whole)))
        request.end_headers()
        request.wfile.write(change(whole))
        request.close_connection = True
        return True

    return answer


def assert_recovers(hub: HubServer, model_folder: Path) -> None:
    """Nothing half in the cache: without the fault all is well, and then without the Hub, too."""
    hub.fault = None
    assert same(weights(REPO), weights(model_folder))


@pytest.mark.parametrize("code", [429, 500, 503])
@pytest.mark.parametrize(("name", "method"), [(WEIGHTS, "GET"), ("config.json", "HEAD")])
def test_an_error_that_passes(hub, model_folder, code, name, method):
    hub.fault = times(2, status(code, Retry_After="1"), name, method)
    try:
        assert same(weights(REPO), weights(model_folder))
    except CheckpointError as error:  # a sentence is an answer, too
        assert "\n" not in str(error)
    assert_recovers(hub, model_folder)


@pytest.mark.parametrize("code", [401, 429, 500])
@pytest.mark.parametrize(("name", "method"), [(WEIGHTS, "GET"), (WEIGHTS, "HEAD"), ("config.json", "HEAD")])
def test_an_error_that_stays(hub, model_folder, code, name, method):
    hub.fault = times(10**6, status(code, Retry_After="1"), name, method)
    text = complaint()
    assert name in text or str(code) in text or "reach" in text
    assert_recovers(hub, model_folder)


def test_a_body_that_breaks_off(hub, model_folder):
    hub.fault = times(10**6, body(model_folder, lambda whole: whole[: len(whole) // 2]))
    assert WEIGHTS in complaint()
    assert_recovers(hub, model_folder)


def test_other_bytes_of_the_same_length(hub, model_folder):
    """The client compares lengths; a flipped bit in the weights would be a model that answers, wrongly."""
    flip = lambda whole: whole[:-1] + bytes([whole[-1] ^ 1])
    hub.fault = times(1, body(model_folder, flip))
    assert "arrived with other bytes than" in complaint()
    assert_recovers(hub, model_folder)


def test_a_page_of_a_proxy_instead_of_a_file(hub, model_folder):
    hub.fault = times(10**6, body(model_folder, lambda whole: b"<html>".ljust(len(whole))), of="config.json")
    assert "config.json: not valid JSON" in complaint()


BODIES = {"a page": b"<html>", "a list": b"[1,2]", "null": b"null", "nothing": b"{}"}


@pytest.mark.parametrize("what", BODIES)
@pytest.mark.parametrize("kind", ["", "/tree/"])
def test_other_bytes_instead_of_an_answer(hub, model_folder, what, kind):
    """Of the Hub's API, with status 200: once for the list of files, once for all it has."""

    def answer(request: BaseHTTPRequestHandler, path: str) -> bool:
        if not path.startswith("/api/") or kind not in path:
            return False
        HubServer._send(request, 200, BODIES[what], {"Content-Type": "application/json"})
        return True

    hub.fault = answer
    for ask in (measure, snapshot, lambda repo: open_checkpoint(repo, device="cpu")):
        with pytest.raises(CheckpointError) as caught:
            ask(REPO)
        text = str(caught.value)
        assert hub.url in text and REPO in text and "\n" not in text and len(text) < 500
    assert_recovers(hub, model_folder)


def test_offline_with_half_a_checkpoint(hub, model_folder, monkeypatch, tmp_path):
    hub.fault = times(10**6, status(500))
    complaint()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert WEIGHTS in complaint()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert_recovers(hub, model_folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same(weights(REPO), weights(model_folder))


# ------------------------------------------------------------------------------------- two who save at once
SAVE = """
import sys, torch
from pathlib import Path
from models import VisionLanguageModel
from models.checkpoints import CheckpointError
model = VisionLanguageModel.from_pretrained(sys.argv[1])
number = float(sys.argv[3])
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(number)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(15):
    try:
        model.save_pretrained(sys.argv[2], max_shard_bytes=40_000)
    except CheckpointError as error:
        assert "\\n" not in str(error), error
        print("refused", flush=True)
    else:
        print("saved", flush=True)
"""


def test_two_processes_that_save_to_one_folder(model_folder, tmp_path):
    """At every moment, and in the end, the folder holds one whole checkpoint: all ones or all twos."""
    target = tmp_path / "shared"
    VisionLanguageModel.from_pretrained(model_folder).save_pretrained(target)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SAVE, str(model_folder), str(target), number],
            cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for number in ("1", "2")
    ]  # fmt: skip
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.communicate(timeout=600)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(len(words) == 15 and set(words) <= {"saved", "refused"} for words in said)
    assert any("saved" in words for words in said)
    values = {
        parameter.unique().item() for parameter in VisionLanguageModel.from_pretrained(target).parameters()
    }
    assert values in ({1.0}, {2.0})
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]  # nobody's half is left


def test_a_second_saver_is_refused_while_the_first_one_writes(model_folder, tmp_path):
    model, target = VisionLanguageModel.from_pretrained(model_folder), tmp_path / "shared"
    model.save_pretrained(target)
    before = weights_of(target)
    with replace_folder(target, lambda name: True) as new:
        (new / "config.json").write_text("{}")
        with pytest.raises(CheckpointError, match="shared is being saved to by another process"):
            model.save_pretrained(target)
        assert (new / "config.json").read_text() == "{}" and weights_of(target) == before
        model.save_pretrained(tmp_path / "other")  # beside it there is room
    assert [path.name for path in target.iterdir()] == ["config.json"]
    model.save_pretrained(target)  # the first one is through
    assert weights_of(target) == before


def weights_of(folder: Path) -> bytes:
    return (folder / WEIGHTS).read_bytes()
