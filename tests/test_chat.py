"""generate.py --chat fed through a pipe: answers, commands, and one sentence for every mistake."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import generate
from data.inputs import TiledImage
from data.row_schemas import Layout
from generation.chooser import Chooser, NotFiniteError
from inference.chat import COMMANDS, path_of, place
from inference.checkpoint import open_checkpoint
from inference.conversation import Conversation
from tests.processors import draw_image
from tests.test_conversation import fresh

SHORT = ("--max-new-tokens", 8)


@pytest.fixture
def talk(cli, monkeypatch):
    """Run a chat on these lines: (exit status, lines of stdout, lines of stderr)."""

    def run(*lines: str, arguments=("--no-image",), options=SHORT, **more):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status, out, err = cli("--chat", *arguments, *options, **more)
        # Not splitlines, which takes control characters of a random model's answers for line ends.
        return status, *([line.rstrip() for line in text.split("\n")[:-1]] for text in (out, err))

    return run


@pytest.fixture
def one(as_json):
    """The answer to one question outside a chat."""

    def ask(*arguments) -> str:
        return as_json(*arguments, *SHORT)[0]["answers"][0]

    return ask


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "another photo.png"
    draw_image(30, 60, seed=1).save(path)
    return path


# --------------------------------------------------------------------------------------------------- answers
def test_answers_equal_those_without_a_kept_prefix(talk, photo, other, model_folder):
    conversation = Conversation(open_checkpoint(model_folder, device="cpu"), system="be brief")
    expected = []
    for question, images in (("how many?", [photo]), ("why?", []), ("what colour?", [other]), ("where?", [])):
        ids = fresh(conversation, question, images)
        made = conversation.send(question, images, options_of(8)).finish()
        assert made["token_ids"] == [ids]
        expected.append(made["answers"][0])
    lines = ("how many?", "why?", f"/image {other}", "what colour?", "where?")
    status, out, err = talk(*lines, arguments=(photo, "--system", "be brief", "--device", "cpu"))
    assert (status, "\n".join(out)) == (0, "\n".join(expected))
    assert err == [f"{other} is shown with the next question"]


def options_of(new: int):
    from generation.decoding import GenerationOptions

    return GenerationOptions(max_new_tokens=new)


def test_a_later_turn_does_not_compute_the_image_again(talk, photo):
    status, _, err = talk("how many?", "why?", "/stats", arguments=(photo, photo, "--stats"))
    prompts = [line for line in err if line.strip().startswith("prompt")]
    assert status == 0 and len(prompts) == 3 and prompts[1] == prompts[2]
    assert "kept" not in prompts[0]
    prompt, images, kept = map(int, re.findall(r"\d+", prompts[1]))
    assert images % 4 == 0 and images > 2 * 4 and images < kept < prompt
    for part in ("first token", "tokens/s", "kv cache", "context", "float32"):
        assert sum(part in line for line in err) == 3, part


def test_the_example_image_stands_in(talk, one):
    status, out, err = talk("how many?", arguments=())
    assert (status, out) == (0, [one("-q", "how many?")])
    assert err == ["generate.py: assets/example.png is shown with the first question"]


def test_questions_of_the_command_line_come_first(talk, one, photo):
    _, out, _ = talk("why?", "/save", arguments=(photo, "-q", "how many?", "-q", "/help is what?"))
    assert out[0] == one(photo, "-q", "how many?") and len(out) == 3


def test_windows_lines_and_no_lines(talk, one, photo):
    assert talk("how many?\r", arguments=(photo,))[1] == [one(photo, "-q", "how many?")]
    assert talk() == (0, [], [])


def test_each_answer_draws_anew_and_the_session_can_be_repeated(talk):
    sampling = (*SHORT, "--temperature", 3, "--seed", 4)
    lines = ("how many?", "/undo", "how many?")
    _, first, _ = talk(*lines, options=sampling)
    assert talk(*lines, options=sampling)[1] == first and first[0] != first[1]


def test_options_without_effect_are_named(talk):
    assert "--top-k without effect" in talk("how many?", options=(*SHORT, "--top-k", 5))[2][0]


def test_a_model_of_single_questions_is_asked_each_alone(
    talk, as_json, photo, other, single_folder, tmp_path
):
    """About the images shown last, until told to remember."""

    def one(*arguments) -> str:
        return as_json(*arguments, *SHORT)[0]["answers"][0]

    folder, rows = {"model": single_folder}, tmp_path / "rows.jsonl"
    lines = ("how many?", "why?", f"/image {other}", "why?", "/memory on", "how many?", f"/save {rows}")
    status, out, err = talk(*lines, arguments=(photo,), **folder)
    assert status == 0 and "single questions" in err[0]
    assert out[:3] == [one(photo, "-q", "how many?"), one(photo, "-q", "why?"), one(other, "-q", "why?")]
    assert out[3] != one(other, "-q", "how many?")
    saved = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [len(row["messages"]) for row in saved] == [2, 2, 4] and all(
        len(row["images"]) == 1 for row in saved
    )


def test_no_image_for_a_model_that_needs_one_is_told(talk, photo, single_folder):
    status, out, err = talk("how many?", f"/image {photo}", "how many?", model=single_folder)
    assert status == 2 and len(out) == 1
    assert any("image" in line and line.startswith("error: ") for line in err)


# -------------------------------------------------------------------------------------------------- commands
def test_help_names_every_command(talk):
    status, out, err = talk("/help")
    assert (status, out) == (0, [])
    for name, (takes, what) in COMMANDS.items():
        assert any(line.split() == [name, *takes.split(), *what.split()] for line in err)
    assert any("Ctrl-C" in line for line in err)


def test_quit_ends_it(talk):
    assert talk("/quit ", "how many?") == (0, [], [])


def test_undo(talk, photo, one):
    """The image of what was taken back is shown again, unless it is taken back too."""
    alone = one(photo, "-q", "why?")
    status, out, err = talk("how many?", "/undo", "why?", arguments=(photo,))
    assert (status, out[-1]) == (0, alone)
    assert err == [f"took back 'how many?'; {photo} is shown with the next one, unless taken back too"]
    _, out, err = talk("how many?", "/undo", "/undo", "why?", "/undo", arguments=(photo,))
    assert err[1:] == [f"took back {photo}", "took back 'why?'"]
    assert out[-1] == one("--no-image", "-q", "why?") != alone


def test_stats_do_not_tell_of_what_was_taken_back(talk):
    status, _, err = talk("how many?", "/undo", "/stats")
    assert status == 2 and err[1:] == ["error: there is no answer yet, or it was taken back"]


def test_reset(talk, photo, other, one):
    lines = ("how many?", f"/image {other}", "/reset", "why?", "/undo")
    status, out, err = talk(*lines, arguments=(photo,))
    assert (status, out[-1]) == (0, one("--no-image", "-q", "why?"))
    assert err[1:] == ["started again, without images", "took back 'why?'"]


def test_save(talk, photo, other, tmp_path, model_folder):
    notes, rows = tmp_path / "notes.md", tmp_path / "rows.jsonl"
    lines = ("how <image> many?", f"/image {other}", "why?", f"/save {notes}", f"/save {rows}")
    status, out, err = talk(*lines, arguments=(photo, "--system", "be brief"))
    assert status == 0 and err[1:] == [f"saved to {notes}", f"saved to {rows}"]
    text = notes.read_text()
    for part in ("be brief", f"![photo.png](<{photo}>)", "**You:** how <image> many?", out[0], str(other)):
        assert part in text
    assert "(ended by: length)" in text
    (line,) = rows.read_text().splitlines()
    row = json.loads(line)
    assert (row["images"], row["model"]) == ([str(photo), str(other)], str(model_folder))
    # Its images lie where they were shown: whoever trains on the row says allow_outside.
    messages = Layout(("messages",), folder=tmp_path, allow_outside=True).conversation(row)
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2]
    assert messages[3]["content"] == [{"type": "image", "image": other}, {"type": "text", "text": "why?"}]
    assert messages[2]["content"][0]["text"].split() == out[0].split()


def test_save_writes_over_nothing(talk, tmp_path):
    kept = tmp_path / "kept.md"
    kept.write_text("mine")
    missing = tmp_path / "missing" / "x.md"
    lines = (f"/save {kept}", "how many?", f"/save {kept}", f"/save {kept}.txt", f"/save {missing}")
    status, out, err = talk(*lines)
    assert status == 2 and len(out) == 1 and kept.read_text() == "mine"
    assert err == [
        "error: nothing to save: the conversation is empty",
        f"error: {kept}: the file exists, nothing was saved; choose another name",
        f"error: {kept}.txt: expected a name that ends in .md or .jsonl, got .txt",
        f"error: {missing}: No such file or directory",
    ]


def test_names_that_no_file_can_have_end_nothing(talk, tmp_path):
    lines = ("how many?", "/save ~nosuchuser/x.md", f"/save {tmp_path}/a\0b.md", f"/save {tmp_path}/x.md")
    status, out, err = talk(*lines)
    assert status == 2 and len(out) == 1 and (tmp_path / "x.md").is_file()
    assert err == [
        "error: ~nosuchuser/x.md: No such file or directory",
        f"error: '{tmp_path}/a\\x00b.md': expected the name of a file, got one with embedded null byte",
        f"saved to {tmp_path}/x.md",
    ]


def test_a_image_with_a_name_that_is_no_text_is_saved(talk, tmp_path):
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png"))
    draw_image(30, 60).save(tmp_path / "plain.png")
    os.rename(tmp_path / "plain.png", odd)
    lines = ("how many?", f"/save {tmp_path}/x.md", f"/save {tmp_path}/x.jsonl")
    status, _, err = talk(*lines, arguments=(odd,))
    assert status == 0 and len(err) == 2
    assert "caf\\udce9.png" in (tmp_path / "x.md").read_text()
    assert json.loads((tmp_path / "x.jsonl").read_text())["images"] == [str(odd)]


def test_images_that_are_at_no_path_keep_their_name():
    for name in ("~nosuchuser/x.png", "~a\0b", "data:image/png;base64," + "A" * 5000, "a\0b.png"):
        assert place(TiledImage(torch.zeros(1, 3, 2, 2), 1, 1, name=name)) == name


def test_nothing_is_left_of_what_cannot_be_written(talk, tmp_path):
    """Where no file may grow to more than some bytes, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        status, _, err = talk("how many?", f"/save {tmp_path}/x.md")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert status == 2 and not (tmp_path / "x.md").exists()
    assert err == [f"error: {tmp_path}/x.md: File too large"]


def test_paths_as_terminals_write_them(other, tmp_path, monkeypatch):
    monkeypatch.chdir(other.parent)
    escaped = str(other).replace(" ", "\\ ")
    for typed in (other.name, f"'{other}'", f'"{other}"', escaped, str(other)):
        assert Path(path_of(typed)).resolve() == other
    assert path_of("bob's boat.png") == "bob's boat.png"


# -------------------------------------------------------------------------------------------------- mistakes
MISTAKES = {
    "/foo": "/foo: no such command; /help lists them",
    "/image": "expected /image PATH, got '/image'",
    "/undo 3": "expected /undo, got '/undo 3'",
    "/stats": "no answer yet",
    "/quit now": "expected /quit, got '/quit now'",
    "/image x\0.png": "x",
    "/image data:image/png;base64," + "A" * 5000: "error: ",
    "/image missing.png": "missing.png",
    f"/image {generate.ROOT / 'README.md'}": "a file that starts with",
    "why " * 400: "context full: expected fewer than 512 tokens",
    "half a character \udcff": "expected valid Unicode",
}


@pytest.mark.parametrize("line", MISTAKES, ids=lambda line: line[:20])
def test_a_mistake_is_one_sentence_and_the_chat_goes_on(talk, one, photo, line):
    status, out, err = talk(line, "how many?", arguments=(photo,))
    assert status == 2 and len(err) == 1 and err[0].startswith("error: ") and MISTAKES[line] in err[0]
    assert out == [one(photo, "-q", "how many?")]  # the image is still shown


def test_an_empty_line_is_no_mistake(talk):
    status, out, err = talk("", "  ", "how many?")
    assert (status, len(out), err) == (0, 1, ["type a question, or /help"] * 2)


def test_an_answer_that_fails_is_not_kept(talk, one, photo, monkeypatch):
    expected, choose, calls = one(photo, "-q", "how many?"), Chooser.choose, []

    def broken(self, logits):
        calls.append(1)
        if len(calls) == 3:
            raise NotFiniteError(2)
        return choose(self, logits)

    monkeypatch.setattr(Chooser, "choose", broken)
    status, out, err = talk("why?", "how many?", "/undo", "/undo", "/undo", arguments=(photo,))
    assert status == 2 and len(err) == 4 and "not finite" in err[0]
    assert out[-1] == expected and "nothing to undo" in err[-1]


def test_a_context_that_fills_up_is_made_room_in(talk, one):
    status, out, err = talk("why " * 120, "why " * 110, "/undo", "how many?")
    assert status == 2 and len(out) == 2 and len(err) == 2
    assert "undo some turns, or reset" in err[0] and err[1].startswith("took back 'why why")
    assert out[-1] == one("--no-image", "-q", "how many?")


def test_memory_that_does_not_suffice(talk, monkeypatch):
    def greedy(self, logits):
        raise MemoryError

    monkeypatch.setattr(Chooser, "choose", greedy)
    status, _, err = talk("how many?")
    assert status == 2 and "out of memory: /reset frees" in err[0]


def test_ctrl_c_ends_what_comes_from_a_pipe(talk, monkeypatch):
    def interrupted(self, logits):
        raise KeyboardInterrupt

    monkeypatch.setattr(Chooser, "choose", interrupted)
    status, _, err = talk("how many?", "why?")
    assert status == 130 and err[-1] == "generate.py: interrupted"


UNFIT = [
    ("--json",),
    ("--num-answers", "2"),
    ("--no-cache",),
    ("--batch", "x.jsonl", "--out", "y.jsonl"),
]


@pytest.mark.parametrize("options", UNFIT, ids=lambda options: options[0])
def test_options_that_do_not_fit_are_refused(complaint, options):
    assert "--chat" in (said := complaint("--chat", *options)) and options[0] in said


def test_what_is_wrong_at_the_start_ends_it(complaint, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.StringIO("how many?\n"))
    assert "missing.png" in complaint("--chat", tmp_path / "missing.png")
    assert "temperature" in complaint("--chat", "--temperature", -1)
    assert "no folder" in complaint("--chat", model=tmp_path / "absent")


def test_a_closed_stdin(cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert cli("--chat", "--no-image") == (0, "", "")


def test_bytes_that_are_no_text(model_folder, photo):
    command = [sys.executable, str(generate.ROOT / "generate.py"), "--chat", str(photo), *map(str, SHORT)]
    lines = b"\xff why?\nhow many?\n"
    done = subprocess.run([*command, "--model", model_folder], input=lines, capture_output=True, timeout=600)
    assert done.returncode == 2 and done.stdout.strip() and b"expected valid Unicode" in done.stderr
