"""Which models a page opens for its visitors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inference.checkpoint import RequestError
from tests.hub_server import HubServer, point_client_at
from tests.pages import EMBEDDED
from web.models import Models


def test_models_may_be_chosen_from_the_list_only(tmp_path):
    models = Models([EMBEDDED])
    for name in ("no/such", str(tmp_path), "/etc", "../x", "", "checkpoints/ocelli-shapes"):
        with pytest.raises(RequestError, match="expected one of"):
            models.open(name)
    for name in (str(tmp_path), "../x", "a/b/c", "tests/fixtures", "a b/c"):
        with pytest.raises(RequestError, match="expected an id on the Hub"):
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
