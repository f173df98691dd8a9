"""A checkpoint is opened in one go: each file is parsed once, and the model is built once."""

from __future__ import annotations

from collections import Counter

import pytest

from data.processor import Processor
from inference.checkpoint import open_checkpoint
from models import VisionLanguageModel
from models.checkpoints import files, sources, weights
from models.checkpoints.sources import open_files


@pytest.mark.parametrize("source", ["embedded", "idefics3"])
def test_nothing_is_done_twice(model_folder, monkeypatch, source):
    done: Counter[tuple] = Counter()

    def counted(owner, name: str, what=lambda *given: given[:1]):
        original = getattr(owner, name)

        def call(*given, **options):
            done[name, *what(*given)] += 1
            return original(*given, **options)

        monkeypatch.setattr(owner, name, call)

    counted(files, "read_json")
    counted(weights, "read_header")
    counted(sources, "resolve_source", lambda *given: ())
    counted(VisionLanguageModel, "__init__", lambda *given: ())
    open_checkpoint("ocelli-shapes" if source == "embedded" else model_folder, device="cpu")
    parsed = {path.name for name, *rest in done if name == "read_json" for path in rest}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json"} <= parsed
    assert set(done.values()) == {1}, done


def test_model_and_processor_take_opened_files(model_folder):
    opened = open_files(model_folder)
    model = VisionLanguageModel.from_pretrained(opened)
    processor = Processor.from_pretrained(opened, model.config)
    assert model.origin == opened.origin and processor.ask(None, "how many?")["input_ids"].numel()
