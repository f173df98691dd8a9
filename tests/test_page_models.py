"""Which models a page opens for its visitors."""

from __future__ import annotations

import asyncio
import json
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from inference.checkpoint import RequestError
from models.checkpoints import CheckpointError
from models.checkpoints.names import MODELS
from tests.hub_server import HubServer, point_client_at
from tests.pages import EMBEDDED, make_service
from web.models import Models
from web.page import _title
from web.service import AskRequest, Visitor

EXAMPLE = Path(__file__).resolve().parent.parent / "assets" / "example.png"
SIZE = (Path(EMBEDDED) / "model.safetensors").stat().st_size  # two bytes a weight


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with a repository that may be changed, owner/one, and its twin."""
    repos = {f"owner/{name}": tmp_path / name for name in ("one", "two")}
    for folder in repos.values():
        shutil.copytree(EMBEDDED, folder)
    with HubServer(repos) as server:
        point_client_at(monkeypatch, server.url, tmp_path / "cache")
        yield server


def guests(**options) -> Models:
    return Models([EMBEDDED], any_model=True, device="cpu", **options)


def free_space(monkeypatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**12, 0, free))


def test_models_may_be_chosen_from_the_list_only(tmp_path):
    for name in ("no/such", str(tmp_path), "/etc", "../x", "", "checkpoints/ocelli-shapes"):
        with pytest.raises(RequestError):
            Models([EMBEDDED]).open(name)
    for name in (str(tmp_path), "../x", "a/b/c", "tests/fixtures", "a b/c"):
        with pytest.raises(RequestError):
            guests().open(name)


def test_what_a_model_says_that_it_knows_is_shown_as_text(tmp_path, cli):
    """Before an answer at the command line, but in JSON; on the page without a stranger's markup."""
    folder = tmp_path / "mine"
    shutil.copytree(EMBEDDED, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"knows": "<img src=x>\nall", "x": 1}))
    asked = ("-q", "How many shapes are there?", EXAMPLE)
    for options, shown in (((), True), (("--json",), False)):
        _, _, err = cli(*asked, *options, model=folder)
        assert ("mine knows <img src=x> all" in err) == shown
    models = Models([str(folder)], device="cpu")
    before = _title(SimpleNamespace(models=models), str(folder))
    models.open(str(folder))
    after = _title(SimpleNamespace(models=models), str(folder))
    assert before != after and "mine knows" in after and "<img" not in after


@pytest.mark.parametrize("any_model", [False, True])
def test_a_refusal_names_a_model_for_photographs(any_model, cli):
    """And on the page where it can be chosen, it can be by its short name."""
    question = "Who is the president of France?"
    if not any_model:
        assert "smolvlm-256m" in cli("-q", question, EXAMPLE, model=EMBEDDED)[2]
        assert "smolvlm-256m" not in cli("-q", "How many shapes are there?", EXAMPLE, model=EMBEDDED)[2]
    service, request = make_service(any_model=any_model), AskRequest((str(EXAMPLE),), question, EMBEDDED)

    async def told() -> list[str]:
        return [view.notice async for view in service.ask(Visitor(), request)]

    assert "smolvlm-256m" in asyncio.run(told())[-1]
    assert ("smolvlm-256m" in service.models.choices) == any_model
    assert service.models.named("smolvlm-256m") == MODELS["smolvlm-256m"].repo
    service.close()


def test_what_a_model_says_counts_before_it_is_opened(tmp_path):
    """Whoever adds images for it reads how many it knows, and they stay as large as it may see them."""
    folders = [tmp_path / name for name in ("usual", "several")]
    for folder, says in zip(folders, ({}, {"most_images": 2}), strict=True):
        shutil.copytree(EMBEDDED, folder)
        path = folder / "generation_config.json"
        path.write_text(json.dumps({"single_turn": True, **says}))
    alone, both = make_service(folders[0]), make_service(*folders)
    for service in (alone, both):
        service.models.open(str(folders[0]))
    assert alone.edge < 3000 < both.edge
    usual, several = map(str, folders)
    assert both.about_images(several, 2) == both.about_images(usual, 2) != ""
    assert both.about_images(several, 3) != both.about_images(usual, 3)
    assert both.models.held(several) is None
    for service in (alone, both):
        service.close()


def test_what_a_guest_says_counts_once_it_is_open(tmp_path, monkeypatch):
    """Until then its images stay as large as they are; how many it knows is told beside its first answer."""
    folder = tmp_path / "guest"
    shutil.copytree(EMBEDDED, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"most_images": 1}))
    service, load = make_service(any_model=True), Models._load
    service.models.open(EMBEDDED)
    monkeypatch.setattr(
        Models, "_load", lambda self, name: load(self, EMBEDDED if name == EMBEDDED else str(folder))
    )
    monkeypatch.setattr(Models, "_measured", lambda self, name: None)
    assert service.edge >= 10_000
    request = AskRequest((str(EXAMPLE), str(EXAMPLE)), "How many shapes are there?", "owner/guest")

    async def told() -> list[str]:
        return [view.notice async for view in service.ask(Visitor(), request)]

    assert "2" in asyncio.run(told())[-1]
    service.close()


@pytest.mark.parametrize(
    ("largest", "grown", "size", "error"),
    [
        (SIZE // 2, None, 0, RequestError),
        (SIZE + 2_000_000, "generation_config.json", 4_000_000, RequestError),  # every file counts
        (8 * 10**9, "generation_config.json", 30_000_000, CheckpointError),
        (8 * 10**9, "model.safetensors.index.json", 30_000_000, CheckpointError),
        (SIZE + 1_500_000, None, 0, RequestError),  # the files fit, the weights as float32 do not
    ],
)
def test_what_a_visitor_names_is_measured_before_its_weights_come(hub, largest, grown, size, error):
    if grown is not None:
        with (hub.repos["owner/one"] / grown).open("ab") as file:
            file.truncate(size)
    with pytest.raises(error):
        guests(largest_guest=largest).open("owner/one")
    assert all(count < SIZE // 4 for name, count in hub.served.items() if name.endswith(".safetensors"))


def test_a_guest_leaves_room_on_the_disk(hub, monkeypatch):
    free_space(monkeypatch, 10**7)
    with pytest.raises(RequestError):
        guests().open("owner/one")
    assert not hub.served


def test_a_tokenizer_of_another_repository_is_refused(hub):
    config = {"vit_hidden_dim": 8, "lm_hidden_dim": 8, "lm_tokenizer": "owner/two"}
    (hub.repos["owner/one"] / "config.json").write_text(json.dumps(config))
    (hub.repos["owner/one"] / "tokenizer.json").unlink()
    with pytest.raises(RequestError):
        guests().open("owner/one")
    assert not [name for name in hub.served if "two" in name or name.endswith(".safetensors")]


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


@pytest.mark.slow
def test_guests_take_turns_and_one_that_is_here_needs_neither_hub_nor_room(hub, monkeypatch):
    closed, there, models = [], [], guests(dtype="bfloat16", largest_guest=SIZE + 1_500_000)
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
    hub.fault = None
    hub.requests.clear()
    free_space(monkeypatch, 0)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert models.open("owner/one").dtype == "bfloat16"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert models.open("owner/two").name == "owner/two"
    assert not [line for line in hub.requests if "/resolve/" in line]
    with pytest.raises(CheckpointError):
        guests().open("owner/three")
