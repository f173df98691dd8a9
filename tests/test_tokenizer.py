"""A folder's tokenizer, opened without transformers: the same rules, ids and texts as transformers'."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Idefics3Processor

from data.errors import ProcessorError, PromptError
from data.processor import Processor
from data.tokenizer import FolderTokenizer, open_tokenizer
from models.checkpoints.sources import open_files
from tests.house import edit_json
from tests.processors import GOLDEN, assert_same, draw_image, embedded, processor

ROOT = Path(__file__).parent.parent
MARKS = {"normalized": False, "rstrip": False, "single_word": False}
ODD = {"__type": "AddedToken", "content": "<odd>", "lstrip": True, **MARKS}
# What tokenizer_config.json may say of a tokenizer, besides what it says already.
SETTINGS = {
    "nothing": {},
    "a role for an absent token": {"eos_token": "<never seen>", "sep_token": "<sep>"},
    "a token as an object": {"eos_token": ODD | {"content": "<end_of_utterance>"}},
    "a list of more": {"additional_special_tokens": ["<one>", "<image>", ODD]},
    "roles of its own": {"extra_special_tokens": {"image_token": "<image>", "odd_token": "<two>"}},
    "a role for none": {"pad_token": None},
    "what changes nothing": {"add_bos_token": True, "add_prefix_space": True, "legacy": False},
}


def folder_with(kind: str, folder: Path, config: dict, model_type: str | None = None, **files: dict) -> Path:
    """A processor's files, with changes to tokenizer_config.json and other JSON files."""
    processor(kind).hf_processor.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    edit_json(path, **config)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def rules(tokenizer) -> dict:
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: value for name, value in spec.items() if name not in ("truncation", "padding")}


def assert_as_transformers(folder: Path) -> None:
    """Whether it is opened here or, where other files name more tokens, by transformers."""
    ours = open_tokenizer(open_files(folder))
    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert rules(ours) == rules(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    for name in ("bos_token", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert len(ours) == len(theirs) and ours.get_added_vocab() == theirs.get_added_vocab()
    for token in ("<image>", "two", "not a token"):
        assert ours.convert_tokens_to_ids([token]) == theirs.convert_tokens_to_ids([token])
    ids = theirs("two red squares , 12 of<image> them<end_of_utterance> .")["input_ids"]
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize(
    ("kind", "named", "model_type"),
    [
        *((kind, "PreTrainedTokenizerFast", "idefics3") for kind in ("embedded", "llama", "nfkc", "unigram")),
        *((kind, "GPT2Tokenizer", "idefics3") for kind in ("embedded", "llama", "nfkc")),
        ("nfkc", "GPT2Tokenizer", "smolvlm"),
        ("embedded", "TokenizersBackend", "smolvlm"),
    ],
)
def test_every_published_class_reads_as_in_transformers(kind, named, model_type, tmp_path):
    folder = folder_with(kind, tmp_path / "new", {"tokenizer_class": named}, model_type)
    assert kind == "llama" or isinstance(open_tokenizer(open_files(folder)), FolderTokenizer)
    assert_as_transformers(folder)


@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_named_in_other_files_are_added_as_in_transformers(settings, tmp_path):
    tokens = {
        t.pop("id"): t
        for t in json.loads(processor("nfkc").tokenizer.backend_tokenizer.to_str())["added_tokens"]
    }
    tokens[min(tokens)] |= {"rstrip": True, "special": False}
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "added_tokens_decoder": tokens | {9000: ODD | {"content": "<four>"}},
    }
    assert_as_transformers(folder_with("nfkc", tmp_path / "listed", config | SETTINGS[settings]))
    files = {"special_tokens_map": {"own_token": ODD}, "added_tokens": {"<five>": 9999}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | SETTINGS[settings]
    assert_as_transformers(folder_with("nfkc", tmp_path / "beside", config, **files))


@pytest.mark.parametrize("folder", ["nanovlm-current/tokenizer", "nanovlm-v0.1/tokenizer"])
def test_golden_tokenizers_read_as_in_transformers(folder):
    assert isinstance(open_tokenizer(open_files(GOLDEN / folder)), FolderTokenizer)
    assert_as_transformers(GOLDEN / folder)


def test_what_this_repository_does_not_know_is_transformers_to_open(tmp_path):
    for name, config, model_type in (
        ("a class", {"tokenizer_class": "LlamaTokenizer"}, None),
        ("a setting", {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True}, None),
        ("a model", {"tokenizer_class": "PreTrainedTokenizerFast"}, "mistral"),
    ):
        folder = folder_with("llama", tmp_path / name, config, model_type)
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        assert rules(open_tokenizer(open_files(folder))) == rules(theirs)
        assert type(open_tokenizer(open_files(folder))) is type(theirs)


def test_what_transformers_tokenizer_can_do_the_opened_one_can(tmp_path):
    """Saving included, and behind a pickle."""
    folder = folder_with("embedded", tmp_path / "a", {"tokenizer_class": "PreTrainedTokenizerFast"})
    p = Processor.from_pretrained(folder)
    p = pickle.loads(pickle.dumps(p))
    assert p.tokenizer("two red")["input_ids"] == p.tokenizer.backend_tokenizer.encode("two red").ids
    assert p.tokenizer.model_max_length == embedded().tokenizer.model_max_length
    assert not hasattr(p.tokenizer, "no_such_method")
    p.hf_processor.save_pretrained(tmp_path / "b")
    for name in ("tokenizer.json", "processor_config.json", "chat_template.jinja"):
        assert (tmp_path / "b" / name).read_bytes() == (folder / name).read_bytes(), name
    assert str(tmp_path) not in (tmp_path / "b" / "tokenizer_config.json").read_text()
    again = Processor.from_pretrained(tmp_path / "b")
    assert_same(again.ask(draw_image(40, 20), "two <image>?"), p.ask(draw_image(40, 20), "two <image>?"))
    shutil.rmtree(tmp_path / "b")
    assert again.ask(None, "two?")
    with pytest.raises(ProcessorError, match="transformers cannot open"):
        again.hf_processor  # noqa: B018


@pytest.mark.slow
def test_a_question_is_answered_without_transformers():
    """Whose import takes longer than all the rest."""
    code = "import sys, generate; generate.main(['--max-new-tokens', '1']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    imported = done.stdout.splitlines()[-1].split()
    assert "data.processor" in imported and "transformers" not in imported, done.stderr


# ---------------------------------------------------------------------------------------- broken tokenizers
BROKEN: dict[str, dict] = {  # what a tokenizer.json has in place of a good one's
    "a mapping of noise": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    "an id of no piece": {"model": {"type": "Unigram", "unk_id": 10**6, "vocab": [["e", 0.0]]}},
    "no model": {"model": None},
    "tokens that are numbers": {"added_tokens": [1, 2]},
    # Which only a text shows:
    "a panic": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "no token for the rest": {"model": {"type": "WordLevel", "unk_token": "none", "vocab": {"e": 0}}},
}


@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN)
def test_a_broken_tokenizer_ends_in_one_sentence(changes, tmp_path):
    processor("embedded").hf_processor.save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer.json", **changes)
    with pytest.raises((PromptError, ProcessorError)) as error:
        Processor.from_pretrained(tmp_path).ask(None, "e" * 300)
    assert str(error.value).isprintable()


# ------------------------------------------------------------------------------------------ chat templates
TEMPLATES = (
    {"processor_config.json": "p", "chat_template.json": "j", "chat_template.jinja": "f"},
    {"chat_template.json": "j", "chat_template.jinja": "f", "tokenizer_config.json": "t"},
    {"chat_template.jinja": "f", "tokenizer_config.json": "t"},
    {"chat_template.jinja": "f", "additional_chat_templates/default.jinja": "a"},
    {"additional_chat_templates/default.jinja": "a", "tokenizer_config.json": "t"},
    {"processor_config.json": "p", "additional_chat_templates/tools.jinja": "a"},
    {"additional_chat_templates/tools.jinja": "a"},
)


@pytest.mark.parametrize("files", TEMPLATES, ids=lambda files: " ".join(files))
def test_of_several_chat_templates_the_one_transformers_takes(files, tmp_path):
    processor("embedded").hf_processor.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".jinja":
            path.write_text(text)
        else:
            old = json.loads(path.read_text()) if path.is_file() else {}
            path.write_text(json.dumps(old | {"chat_template": text}))
    try:
        expected = Idefics3Processor.from_pretrained(tmp_path)._resolve_chat_template(None)
    except ValueError:
        with pytest.raises(ProcessorError, match="template"):
            Processor.from_pretrained(tmp_path)
    else:
        assert Processor.from_pretrained(tmp_path).chat.chat_template == expected


NAMED = [{"name": "default", "template": "of {messages}"}, {"name": "tools", "template": "t"}]


@pytest.mark.parametrize("written", [NAMED, NAMED[1:], 7, [], [3], {}])
def test_of_a_list_of_chat_templates_the_default_one(written, tmp_path):
    processor("embedded").hf_processor.save_pretrained(tmp_path)
    path = tmp_path / "processor_config.json"
    edit_json(path, chat_template=written)
    if written is NAMED:
        assert Processor.from_pretrained(tmp_path).chat.chat_template == NAMED[0]["template"]
    else:
        with pytest.raises(ProcessorError):
            Processor.from_pretrained(tmp_path)
