"""train.py and the Hub, through the real clients and a Hub on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from huggingface_hub import ModelCard

import train
from models import VisionLanguageModel
from tests.hub_server import HubServer, point_client_at
from tests.rows import png
from tests.runs import curve, flags, prepared, refused, settings_in
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("hub"), rows=12)


def settings(base, output: Path, **more) -> list[str]:
    return flags(**(settings_in(base, str(output), batch_size=4, steps=2) | more))


def test_a_finished_run_is_pushed(base, tmp_path, monkeypatch, capsys):
    with HubServer({}, uploads=tmp_path / "hub") as hub:
        point_client_at(monkeypatch, hub.url, tmp_path / "cache")
        train.main(settings(base, tmp_path / "run", push_to_hub="me/tiny", lora_rank=2))
        assert f"{hub.url}/me/tiny/commit/" in capsys.readouterr().out
        there = hub.repos["me/tiny"]
        for name in ("model.safetensors", "README.md", "config.json", "tokenizer.json"):
            assert (there / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name
        assert not (there / "run.yaml").exists() and not (there / "state").exists()
        card = ModelCard((there / "README.md").read_text())
        assert card.data.pipeline_tag == "image-text-to-text"
        assert 'from_pretrained("me/tiny")' in card.content and str(base) not in card.content
        VisionLanguageModel.from_pretrained("me/tiny")


def test_a_push_that_is_refused(base, tmp_path, monkeypatch, capsys):
    """One sentence; the model is where it was written."""
    with HubServer({}) as hub:
        point_client_at(monkeypatch, hub.url, tmp_path / "cache")
        said = refused(capsys, settings(base, tmp_path / "run", push_to_hub="me/tiny"))
    assert "the upload of me/tiny failed" in said
    VisionLanguageModel.from_pretrained(tmp_path / "run")


def test_a_dataset_by_its_hub_id(base, tmp_path):
    """Downloaded, and streamed: in a process of its own, which reads HF_ENDPOINT."""
    rows = [{"question": "what is it", "answer": f"row {i}", "image": png(seed=i)} for i in range(12)]
    columns = datasets.Features(
        {"question": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image()}
    )
    repo = tmp_path / "repo"
    datasets.Dataset.from_list(rows, features=columns).to_parquet(
        repo / "data" / "train-00000-of-00001.parquet"
    )
    data = [{"path": "owner/rows"}]
    data += [{"path": "owner/rows", "name": "streamed", "streaming": True, "weight": 12}]
    with HubServer({"datasets/owner/rows": repo}) as hub:
        env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        # The client gives up after ten seconds, in which this process may not get to answer it.
        env |= {"HF_HUB_ETAG_TIMEOUT": str(PATIENCE), "HF_HUB_DOWNLOAD_TIMEOUT": str(PATIENCE)}
        env |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "train.py", *settings(base, tmp_path / "run", data=data)],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    seen = {name for _, _, rows in curve(tmp_path / "run") for row in rows for name, _ in row}
    assert seen == {"owner/rows", "streamed"}
