"""A tiny random checkpoint, and generate.py run on it in this process."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import generate
from generation.fast.native import passes
from inference import flags
from models.checkpoints import load
from models.config import TextConfig, VisionConfig, VLMConfig
from models.vision_language_model import VisionLanguageModel
from tests.house import edit_json
from tests.processors import draw_image, embedded
from tests.prompts import tiny_vlm
from tests.tiny import randomize


def pytest_configure():
    """One thread: tests fork, and what is forked from a process whose OpenMP has threads may hang."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    passes.EACH = 1  # where tests ask for several, small models take them as well
    load.QUIET = 0.01  # tests write files and load them at once, hundreds of times


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`@pytest.mark.slow(but=n)`: the first n cases of a test are quick enough for `make test`."""
    seen: dict[str, int] = {}
    for item in items:
        for mark in [mark for mark in item.own_markers if mark.name == "slow" and mark.kwargs]:
            name = item.nodeid.partition("[")[0]
            seen[name] = seen.get(name, 0) + 1
            if seen[name] <= mark.kwargs["but"]:
                item.own_markers.remove(mark)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A checkpoint whose random weights make its answers vary with question and image."""
    processor = embedded(split=True)
    tokenizer = processor.tokenizer
    config = VLMConfig(
        vision=VisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
        ),
        text=TextConfig(
            vocab_size=len(tokenizer),
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        ),
        scale_factor=2,
        image_token_id=processor.image_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )
    model = VisionLanguageModel(config)
    randomize(model, seed=0)
    return model.save_pretrained(tmp_path_factory.mktemp("model") / "tiny", processor=processor)


@pytest.fixture(scope="session")
def single_folder(model_folder, tmp_path_factory) -> Path:
    """The same checkpoint, said to be trained on single questions about images."""
    folder = tmp_path_factory.mktemp("model") / "single"
    shutil.copytree(model_folder, folder)
    edit_json(folder / "generation_config.json", needs_image=True, single_turn=True)
    return folder


@pytest.fixture(scope="session")
def vlm() -> VisionLanguageModel:
    """The tiny random model of `tests.prompts`."""
    return tiny_vlm()


@pytest.fixture(scope="session")
def photo(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "photo.png"
    draw_image(40, 30).save(path)
    return path


@pytest.fixture
def cli(model_folder, capsys, monkeypatch):
    """Run generate.py: (exit status, stdout, stderr)."""

    monkeypatch.setattr(flags, "LOG_AFTER", 60)  # however slow this machine is

    def run(*arguments, model=model_folder) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = generate.main([*map(str, arguments), "--model", str(model)])
        except SystemExit as stop:  # from argparse
            status = stop.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def as_json(cli):
    """The objects of a run with --json."""

    def run(*arguments, **options) -> list[dict]:
        status, out, err = cli(*arguments, "--json", **options)
        assert status == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return run


@pytest.fixture
def complaint(cli):
    """The one sentence that a mistake ends in."""

    def run(*arguments, **options) -> str:
        status, out, err = cli(*arguments, **options)
        assert (status, out) == (2, ""), err
        assert re.match(r"generate\.py( \w+)?: error: ", err) and err.count("\n") == 1 and err.endswith("\n")
        return err

    return run


@pytest.fixture(scope="module")
def browser():
    """A Chromium, the system's or Playwright's; who asks for it is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    own = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=own, args=arguments)
        except api.Error as error:
            pytest.skip(f"no Chromium to start: {str(error).splitlines()[0]}")
        yield opened
        opened.close()
