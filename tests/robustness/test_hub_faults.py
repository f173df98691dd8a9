"""A Hub that answers slowly, wrongly or not at all; a folder that two save to.

Each fault ends in a model or in one sentence. Behind either, the same client gets the whole checkpoint:
nothing half is left in its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub import constants

from models import VisionLanguageModel
from models.checkpoints import CheckpointError
from models.checkpoints.folder import replace_folder
from models.checkpoints.hub import measure
from tests.hub_server import HubServer, etag, point_client_at
from tests.tiny import same_weights

REPO, WEIGHTS = "owner/tiny", "model.safetensors"
Fault = Callable[[BaseHTTPRequestHandler, str], bool]
load = VisionLanguageModel.from_pretrained


@pytest.fixture
def hub(model_folder, tmp_path, monkeypatch):
    """In the end, without the fault, all is well: nothing half is in the cache."""
    with HubServer({REPO: model_folder}) as server:
        point_client_at(monkeypatch, server.url, tmp_path / "cache")
        yield server
        server.fault = None
        assert same_weights(load(REPO), load(model_folder))


def complaint(ask: Callable[[str], object] = load) -> str:
    with pytest.raises(CheckpointError) as caught:
        ask(REPO)
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


def status(code: int) -> Fault:
    def answer(request: BaseHTTPRequestHandler, path: str) -> bool:
        HubServer._send(request, code, b"busy", {"Retry-After": "1"})
        return True

    return answer


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


@pytest.mark.parametrize("code", [401, 429, 500, 503])
@pytest.mark.parametrize("count", [2, 10**6], ids=["passes", "stays"])
@pytest.mark.parametrize(("name", "method"), [(WEIGHTS, "GET"), (WEIGHTS, "HEAD"), ("config.json", "HEAD")])
def test_an_error(hub, model_folder, code, count, name, method):
    hub.fault = times(count, status(code), name, method)
    try:
        assert same_weights(load(REPO), load(model_folder)) and count == 2
    except CheckpointError as error:
        text = str(error)
        assert "\n" not in text and (name in text or str(code) in text or "reach" in text)


def test_a_body_that_breaks_off(hub, model_folder):
    hub.fault = times(10**6, body(model_folder, lambda whole: whole[: len(whole) // 2]))
    assert WEIGHTS in complaint()


def test_other_bytes_of_the_same_length(hub, model_folder):
    """The client compares lengths; a flipped bit in the weights would be a model that answers, wrongly."""
    flip = lambda whole: whole[:-1] + bytes([whole[-1] ^ 1])
    hub.fault = times(1, body(model_folder, flip))
    assert "SHA-256" in complaint()


def test_a_page_of_a_proxy_instead_of_a_file(hub, model_folder, tmp_path, monkeypatch):
    hub.fault = times(10**6, body(model_folder, lambda whole: b"<html>".ljust(len(whole))), of="config.json")
    assert "config.json" in complaint()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "other"))  # text has no hash to be held to


BODIES = {"a page": b"<html>", "a list": b"[1,2]", "null": b"null", "nothing": b"{}"}


@pytest.mark.parametrize("what", BODIES)
def test_other_bytes_instead_of_an_answer(hub, what):
    """Of the Hub's API, with status 200."""

    def answer(request: BaseHTTPRequestHandler, path: str) -> bool:
        if path.startswith("/api/"):
            HubServer._send(request, 200, BODIES[what], {"Content-Type": "application/json"})
        return path.startswith("/api/")

    hub.fault = answer
    text = complaint(measure)
    assert hub.url in text and REPO in text


def test_offline_with_half_a_checkpoint(hub, model_folder, monkeypatch):
    hub.fault = times(10**6, status(500))
    complaint()
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert WEIGHTS in complaint()


# ------------------------------------------------------------------------------------- two who save at once
def test_two_who_save_to_one_folder(model_folder, tmp_path):
    """At every moment, and in the end, the folder holds one whole checkpoint: all ones or all twos."""
    target = tmp_path / "shared"
    models = [load(model_folder).requires_grad_(False) for _ in range(2)]
    for number, model in enumerate(models, start=1):
        for parameter in model.parameters():
            parameter.fill_(number)

    def save(model: VisionLanguageModel) -> int:
        saved = 0
        for _ in range(15):
            try:
                model.save_pretrained(target, max_shard_bytes=40_000)
                saved += 1
            except CheckpointError as error:
                assert str(target) in str(error)
        return saved

    with ThreadPoolExecutor() as pool:
        assert sum(pool.map(save, models)) > 0
    values = {parameter.unique().item() for parameter in load(target).parameters()}
    assert values in ({1.0}, {2.0})
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]  # nobody's half is left


def test_a_second_saver_is_refused_while_the_first_one_writes(model_folder, tmp_path):
    model, target = load(model_folder), tmp_path / "shared"
    model.save_pretrained(target)
    before = (target / WEIGHTS).read_bytes()
    with replace_folder(target, lambda name: True) as new:
        (new / "config.json").write_text("{}")
        with pytest.raises(CheckpointError, match="another process"):
            model.save_pretrained(target)
        assert (new / "config.json").read_text() == "{}" and (target / WEIGHTS).read_bytes() == before
        model.save_pretrained(tmp_path / "other")  # beside it there is room
    assert [path.name for path in target.iterdir()] == ["config.json"]
    model.save_pretrained(target)  # the first one is through
    assert (target / WEIGHTS).read_bytes() == before
