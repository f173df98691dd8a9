"""generate.py as a person meets it: answers, JSON, and one sentence for every mistake."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ocelli
from generate import DEFAULT_QUESTION
from generation import sampling
from inference.checkpoint import RequestError, pick_device
from inference.command import ROOT
from inference.flags import is_question
from messages import for_terminal

FIELDS = (
    "model images question answers token_ids stop_reasons prompt_tokens image_tokens seconds "
    "decode_tokens_per_second proposed_tokens accepted_tokens kv_cache_bytes device dtype decode_step"
)


# ------------------------------------------------------------------------------------------------- answers
def test_no_arguments_show_the_example_image(cli):
    status, out, err = cli("--max-new-tokens", 4)
    assert status == 0 and out.strip()
    assert err == f"generate.py: assets/example.png: {DEFAULT_QUESTION}\n"


def test_streamed_text_is_the_answer(cli, as_json, photo):
    ask = (photo, "-q", "how many?", "--max-new-tokens", 40)
    status, out, err = cli(*ask)
    assert (status, err) == (0, "")
    (made,) = as_json(*ask)
    assert out.rstrip() == for_terminal(made["answers"][0]) and len(made["answers"][0]) > 10


def test_json_fields(as_json, photo, model_folder):
    (made,) = as_json(photo, "how many?", photo, "--max-new-tokens", 6)
    assert made.keys() >= {*FIELDS.split()}
    assert (made["model"], made["images"]) == (str(model_folder), [str(photo)] * 2)
    assert made["question"] == "how many?" and made["dtype"] == "float32"
    assert made["image_tokens"] % 4 == 0 and made["image_tokens"] > 2 * 4  # two images of several tiles
    assert made["prompt_tokens"] > made["image_tokens"]
    assert len(made["token_ids"][0]) == 6 and made["stop_reasons"] == ["length"]
    assert made["seconds"].keys() >= {"load", "vision", "prefill", "decode"}
    assert made["decode_tokens_per_second"] > 0 and made["kv_cache_bytes"] > 0
    assert made["device"] == str(pick_device("auto"))
    (made,) = as_json("--no-image", "-q", "how many?", "--max-new-tokens", 1, "--system", "be short")
    assert made.keys() >= {*FIELDS.split()}
    assert (made["images"], made["image_tokens"], made["decode_tokens_per_second"]) == ([], 0, None)
    assert made["prompt_tokens"] > as_json("--no-image", "-q", "how many?")[0]["prompt_tokens"]


def test_a_model_of_questions_about_images_needs_one(cli, complaint, photo, single_folder, tmp_path):
    assert "image" in complaint("--no-image", "-q", "how many?", model=single_folder)
    assert cli(photo, "-q", "how many?", "--max-new-tokens", 1, model=single_folder)[0] == 0
    (tmp_path / "q.jsonl").write_text('{"question": "how many?"}\n')
    out = tmp_path / "a.jsonl"
    cli("batch", tmp_path / "q.jsonl", "--out", out, model=single_folder)
    assert "image" in json.loads(out.read_text())["error"]


def test_what_is_no_image_and_reads_as_text_is_a_question(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my photo.jpg", "what is this"):
        (tmp_path / name).touch()
    asked = ("What?", "Describe the image", "Is it black/white or grey", "これは何ですか？")
    named = (
        "photo.jpg",
        "Describe",
        "holiday fotos/one.jpg",
        "./what is this",
        "-",
        "https://example.org/a b?",
        "what is this",
    )  # is there
    assert all(map(is_question, asked)) and not any(map(is_question, named))


def test_a_mistyped_command_is_refused_with_the_nearest_one(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ocelli", "serv", "--port", "1"])
    with pytest.raises(SystemExit) as ended:
        ocelli.main()
    assert ended.value.code == 2 and "did you mean serve?" in capsys.readouterr().err


def stdin_of(monkeypatch, content: bytes) -> None:
    """stdin as a shell makes it of `|`."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as file:
        file.write(content)
    monkeypatch.setattr(sys, "stdin", os.fdopen(reading))


@pytest.mark.parametrize(
    "words",
    [
        "{photo} what is this", "{photo} what is this?", "{photo} -q what is this", "how many are there?",
        "chat {photo} what is this", "batch {photo} what is this --out {out}",
        "batch {photo} -q what is this --out {out}",
    ],
)  # fmt: skip
def test_a_question_without_quotes_is_called_that(complaint, photo, tmp_path, words):
    said = complaint(*words.format(photo=photo, out=tmp_path / "out.jsonl").split())
    assert "quotes" in said and not (tmp_path / "out.jsonl").exists()


def test_an_image_on_stdin(as_json, complaint, photo, monkeypatch):
    ask = ("-q", "how many?", "--max-new-tokens", 2)
    (expected,) = as_json(photo, *ask)
    stdin_of(monkeypatch, photo.read_bytes())
    (made,) = as_json("-", *ask)
    assert (made["images"], made["answers"]) == (["-"], expected["answers"])
    for content, reason in ((b"", "nothing"), (b"no image", "a file that starts with")):
        stdin_of(monkeypatch, content)
        assert reason in complaint("-", *ask)
    assert "stdin" in complaint("-", "-", *ask) and "stdin" in complaint("chat", "-")


def test_a_question_from_a_pipe(as_json, complaint, cli, photo, monkeypatch):
    """Where nobody writes one (cron, CI), the default one is asked; one that is given is asked anyway."""
    short = ("--max-new-tokens", 1)
    for content, asked in ((b"how many?\n", "how many?"), (b" \n", DEFAULT_QUESTION)):
        stdin_of(monkeypatch, content)
        assert as_json(photo, *short)[0]["question"] == asked
    stdin_of(monkeypatch, b"how many?")
    assert as_json(photo, "why?", *short)[0]["question"] == "why?"
    stdin_of(monkeypatch, b"\xff\xfe")
    assert "UTF-8" in complaint(photo)
    monkeypatch.setattr("inference.command.STDIN_TIMEOUT", 0)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w"):  # open, and silent
        monkeypatch.setattr(sys, "stdin", os.fdopen(reading))
        status, _, err = cli(photo, *short)
    assert status == 0 and DEFAULT_QUESTION in err


def test_several_questions(cli, as_json, photo):
    ask = ("-q", "how many?", photo, "-q", "what colour is the triangle?", "--max-new-tokens", 5)
    first, second = as_json(*ask)
    assert [first["question"], second["question"]] == ["how many?", "what colour is the triangle?"]
    assert first["images"] == second["images"] == [str(photo)]
    _, out, _ = cli(*ask)
    assert out.startswith("> how many?\n") and "\n> what colour is the triangle?\n" in out


def test_seeds_and_several_answers(cli, as_json, photo):
    sampling = ("--num-answers", 3, "--temperature", 2, "--seed", 5, "--max-new-tokens", 6)
    (made,) = as_json(photo, "-q", "how many?", *sampling)
    assert len(made["answers"]) == len(made["stop_reasons"]) == 3
    assert len({tuple(ids) for ids in made["token_ids"]}) == 3
    _, out, _ = cli(photo, "-q", "how many?", *sampling)
    assert out == "".join(f"{number}. {answer}\n" for number, answer in enumerate(made["answers"], 1))
    ask = (photo, "-q", "how many?", "--temperature", 3, "--max-new-tokens", 8)
    (first,), (again,), (other,) = as_json(*ask, "--seed", 1), as_json(*ask, "--seed", 1), as_json(*ask)
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    (repeated,) = as_json(*ask, "--seed", other["seed"])
    assert repeated["token_ids"] == other["token_ids"]


# ------------------------------------------------------------------------------------------ bad checkpoints
def cut_in_half(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def poison(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.text_model.norm.weight"] *= float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BAD_CHECKPOINTS = {
    "model.safetensors": cut_in_half,
    "not finite": poison,
    "config.json": lambda folder: (folder / "config.json").unlink(),
}


@pytest.mark.parametrize("expected", BAD_CHECKPOINTS)
def test_bad_checkpoint(complaint, photo, model_folder, tmp_path, expected):
    folder = tmp_path / "broken"
    shutil.copytree(model_folder, folder)
    BAD_CHECKPOINTS[expected](folder)
    assert expected in complaint(photo, "-q", "how many?", "--json", model=folder)


# ----------------------------------------------------------------------------------------------- bad requests
BAD_OPTIONS = [  # those that only a model shows; tests/test_help.py has the others
    (("--max-new-tokens", "5000"), "512 tokens, but the prompt"),
    (("-q", "why " * 400), "context"),
    (("-q", "why " * 200_000), "the context holds 512 tokens"),
    (("--device", "cuda:99"), "cuda:99"),
    (("--dtype", "int8", "--device", "cuda:0"), "cuda"),
]


@pytest.mark.parametrize("arguments, expected", BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_bad_request(complaint, arguments, expected):
    assert expected in complaint(*arguments)


def test_out_of_memory(complaint, monkeypatch):
    def greedy(rows, logits):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB. GPU 0 has\nmore. See ...")

    monkeypatch.setattr(sampling, "draw", greedy)
    err = complaint("--json")
    assert "20 GiB" in err and "--num-answers" in err and "more" not in err


def test_options_without_effect_are_named(cli, photo):
    ask = (photo, "-q", "how many?", "--max-new-tokens", 1, "--json")
    status, _, err = cli(*ask, "--top-k", 5, "--seed", 0)
    assert status == 0 and "--top-k, --seed" in err and err.count("\n") == 1
    assert cli(*ask, "--top-k", 5, "--seed", 0, "--temperature", 1)[2] == ""


def test_debug_shows_where(cli):
    status, _, err = cli("--temperature", -1, "--debug")
    assert status == 2 and "Traceback" in err and RequestError.__name__ in err


def test_a_bug_is_not_hidden_and_ctrl_c_is_no_bug(cli, monkeypatch):
    def raising(error):
        def choose(rows, logits):
            raise error

        monkeypatch.setattr(sampling, "draw", choose)
        return cli("--max-new-tokens", 2)

    with pytest.raises(ValueError, match="a bug"):
        raising(ValueError("a bug"))
    status, _, err = raising(KeyboardInterrupt())
    assert status == 130 and err.endswith("generate.py: interrupted\n")


@pytest.mark.slow
def test_a_process_in_any_folder(model_folder, photo, tmp_path):
    """A chat from a pipe of bytes that are no text."""
    command = [sys.executable, str(ROOT / "generate.py"), "chat", str(photo)]
    command += ["--max-new-tokens", "3", "--model", str(model_folder)]
    lines = b"\xff why?\nhow many?\n"
    done = subprocess.run(command, input=lines, capture_output=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout.strip() and b"expected valid Unicode" in done.stderr


def test_a_tokenizer_with_more_ids_than_its_model(complaint, model_folder, photo, tmp_path):
    """A question with one of them; another question is answered as ever."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    spec = json.loads((folder / "tokenizer.json").read_text())
    vocab = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    marks = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    spec["added_tokens"].append({"id": vocab, "content": "<td>", **marks})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert "input_ids" in complaint(photo, "what is <td>?", model=folder)
