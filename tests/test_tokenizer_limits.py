"""A tokenizer.json that is broken ends in one sentence: when it is opened, or with the first text."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import generate
from data.errors import ProcessorError, PromptError
from data.processor import Processor
from inference.command import DEFAULT_MODEL, EXAMPLE_IMAGE
from tests.processors import processor

UNIGRAM = {"type": "Unigram", "unk_id": 0}
# name → what a tokenizer.json has in place of a good one's.
BROKEN: dict[str, dict] = {
    "a mapping of noise": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    "no numbers": {"model": UNIGRAM | {"vocab": [["e", float("nan")]]}},
    "an id of no piece": {"model": UNIGRAM | {"unk_id": 10**6, "vocab": [["e", 0.0]]}},
    "no pattern": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "["}, "behavior": "Isolated"}},
    "a part of no kind": {"normalizer": {"type": "Nothing"}},
    "no model": {"model": None},
    "tokens that are numbers": {"added_tokens": [1, 2]},
    "a list of tokens in place of a vocabulary": {"model": {"type": "BPE", "vocab": ["a"], "merges": []}},
}
ONLY_A_TEXT_SHOWS = {
    "a panic": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "no token for the rest": {"model": {"type": "WordLevel", "unk_token": "none", "vocab": {"e": 0}}},
}


@pytest.fixture
def with_spec(tmp_path) -> Callable[[dict], Path]:
    """A processor's folder whose tokenizer.json says something else."""
    processor("embedded").hf_processor.save_pretrained(tmp_path / "good")

    def change(changes: dict) -> Path:
        folder = shutil.copytree(tmp_path / "good", tmp_path / "bad", dirs_exist_ok=True)
        spec = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(spec | changes))
        return folder

    return change


@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN)
def test_refused_when_opened(changes, with_spec):
    with pytest.raises(ProcessorError) as error:
        Processor.from_pretrained(with_spec(changes))
    assert str(error.value).isprintable()


@pytest.mark.parametrize("changes", ONLY_A_TEXT_SHOWS.values(), ids=ONLY_A_TEXT_SHOWS)
def test_what_only_a_text_shows_is_a_sentence(changes, with_spec):
    with pytest.raises((PromptError, ProcessorError)) as error:
        Processor.from_pretrained(with_spec(changes)).ask(None, "e" * 300)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("text", ['{"model": ', "[]", "\udcff", '{"version": "1.0"}', "{}"])
def test_a_broken_file_is_one_sentence_at_the_command_line(text, tmp_path, capsys):
    folder = shutil.copytree(DEFAULT_MODEL, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_bytes(os.fsencode(text))
    assert generate.main([str(EXAMPLE_IMAGE), "what is it?", "--model", str(folder)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "loading" not in line]
    assert line.startswith("generate.py: error: ") and "Traceback" not in line
