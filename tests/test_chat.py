"""generate.py chat fed through a pipe: answers, commands, and one sentence for every mistake."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from generation import sampling
from generation.options import NotFiniteError
from inference.chat import COMMANDS
from inference.command import ROOT
from messages import for_terminal
from tests.processors import draw_image

SHORT = ("--max-new-tokens", 8)


@pytest.fixture
def talk(cli, monkeypatch):
    """Run a chat on these lines: (exit status, lines of stdout, lines of stderr)."""

    def run(*lines: str, arguments=("--no-image",), options=SHORT, **more):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status, out, err = cli("chat", *arguments, *options, **more)
        # Not splitlines, which takes control characters of a random model's answers for line ends.
        return status, *([line.rstrip() for line in text.split("\n")[:-1]] for text in (out, err))

    return run


@pytest.fixture
def one(as_json):
    """The answer to one question outside a chat, as a terminal shows it."""

    def ask(*arguments, **options) -> str:
        return for_terminal(as_json(*arguments, *SHORT, **options)[0]["answers"][0])

    return ask


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("images") / "another photo.png"
    draw_image(30, 60, seed=1).save(path)
    return path


# --------------------------------------------------------------------------------------------------- answers
def test_a_later_turn_does_not_compute_the_image_again(talk, photo):
    status, _, err = talk("how many?", "why?", "/stats", arguments=(photo, photo, "--stats"))
    prompts = [line for line in err if line.strip().startswith("prompt")]
    assert status == 0 and len(prompts) == 3 and prompts[1] == prompts[2] and "kept" not in prompts[0]
    prompt, images, kept = map(int, re.findall(r"\d+", prompts[1]))
    assert images % 4 == 0 and images > 2 * 4 and images < kept < prompt
    for part in ("first token", "tokens/s", "kv cache", "context", "float32"):
        assert sum(part in line for line in err) == 3, part


def test_images_and_questions_of_the_command_line_come_first(talk, one, photo):
    _, out, _ = talk("why?", arguments=(photo, "-q", "how many?", "-q", "/help is what?"))
    assert out[0] == one(photo, "-q", "how many?") and len(out) == 3
    status, out, err = talk("how many?\r", arguments=())
    assert (status, out) == (0, [one("-q", "how many?")]) and "example.png" in err[0]


def test_each_answer_has_a_seed_of_its_own_and_the_session_can_be_repeated(talk):
    sampling = (*SHORT, "--temperature", 3, "--seed", 4)
    lines = ("how many?", "/undo", "how many?")
    _, first, _ = talk(*lines, options=sampling)
    assert talk(*lines, options=sampling)[1] == first and first[0] != first[1]


def test_a_model_of_single_questions_is_asked_each_alone(talk, one, photo, other, single_folder):
    """About the images shown last, until told to remember."""
    folder = {"model": single_folder}
    lines = ("how many?", "why?", f"/image {other}", "why?", "/memory on", "how many?")
    status, out, err = talk(*lines, arguments=(photo,), **folder)
    assert status == 0 and "single questions" in err[0]
    assert out[:3] == [one(photo, "-q", "how many?"), one(photo, "-q", "why?"), one(other, "-q", "why?")]
    assert out[3] != one(other, "-q", "how many?")
    status, out, err = talk("how many?", f"/image {photo}", "how many?", **folder)
    assert status == 2 and len(out) == 1 and any(line.startswith("error: ") for line in err)


# -------------------------------------------------------------------------------------------------- commands
def test_undo_and_reset(talk, photo, other, one):
    """The image of what was taken back is shown again, unless it is taken back too."""
    alone = one(photo, "-q", "why?")
    status, out, err = talk("how many?", "/undo", "why?", arguments=(photo,))
    assert (status, out[-1]) == (0, alone) and "'how many?'" in err[0] and str(photo) in err[0]
    _, out, err = talk("how many?", "/undo", "/undo", "why?", "/undo", arguments=(photo,))
    assert str(photo) in err[1] and "'why?'" in err[2]
    assert out[-1] == one("--no-image", "-q", "why?") != alone
    status, _, err = talk("how many?", "/undo", "/stats")
    assert status == 2 and err[1].startswith("error: ")
    lines = ("how many?", f"/image {other}", "/reset", "why?", "/undo")
    status, out, err = talk(*lines, arguments=(photo,))
    assert (status, out[-1]) == (0, one("--no-image", "-q", "why?")) and "'why?'" in err[-1]


def as_terminals_write(path: Path) -> list[str]:
    """What is pasted when this file is dropped on one: some add a space."""
    return [f"'{path}' ", f'"{path}"', str(path).replace(" ", "\\ ") + " ", path.as_uri(), str(path)]


def test_an_image_alone_is_shown_and_may_stand_before_its_question(talk, one, other, photo, monkeypatch):
    monkeypatch.chdir(other.parent)
    answer, both = one(other, "-q", "why?"), one(photo, other, "-q", "why?")
    for typed in (other.name, *as_terminals_write(other)):
        status, out, err = talk(typed, "why?", options=SHORT)
        assert (status, out, len(err)) == (0, [answer], 1), typed
    quoted, escaped = as_terminals_write(other)[:3:2]
    assert talk(f"{escaped}why?")[1] == [answer] and talk(f"{photo} {quoted}why?")[1] == [both]
    # What is named like an image and is none is a mistake; behind a space, everything is a question.
    status, out, err = talk("anohter.png", f"{other.parent}/missing what is it?")
    assert (status, out, len(err)) == (2, [], 2) and all(line.startswith("error: ") for line in err)
    question = f" {other.name}"
    assert talk(question)[1] == [one("--no-image", "-q", question.strip())]


def test_people_leave_in_their_own_words(talk):
    for word in ("exit", "quit", "Quit", "bye", "exit()", ":q", "/exit", "/quit "):
        assert talk(word, "how many?") == (0, [], []), word
    status, out, _ = talk(" exit", "exit the room?")
    assert (status, len(out)) == (0, 2)


# -------------------------------------------------------------------------------------------------- mistakes
MISTAKES = {
    "/foo": "/foo",
    "/image": "/image PATH",
    "/undo 3": "/undo",
    "/stats": "answer",
    "/quit now": "/quit",
    "/memory maybe": "/memory on",
    "/image x\0.png": "x",
    "/image data:image/png;base64," + "A" * 5000: "error: ",
    "/image missing.png": "missing.png",
    f"/image {ROOT / 'README.md'}": "README.md",
    "why " * 400: "context",
    "half a character \udcff": "Unicode",
}


def test_help_names_every_command_and_a_mistake_is_one_sentence_and_the_chat_continues(talk, one, photo):
    assert all(any(line.startswith(name) for line in talk("/help")[2]) for name in COMMANDS)
    status, out, err = talk("", *MISTAKES, "how many?", arguments=(photo,))
    assert status == 2 and len(err) == 1 + len(MISTAKES)
    for line, field in zip(err[1:], MISTAKES.values()):
        assert line.startswith("error: ") and field in line
    assert out == [one(photo, "-q", "how many?")]  # the image is still shown


def test_an_answer_that_fails_is_not_kept(talk, one, photo, monkeypatch):
    expected, choose, calls = one(photo, "-q", "how many?"), sampling.draw, []

    def broken(rows, logits):
        calls.append(1)
        if len(calls) in (3, 20):
            raise NotFiniteError(2) if len(calls) == 3 else MemoryError
        return choose(rows, logits)

    monkeypatch.setattr(sampling, "draw", broken)
    lines = ("why?", "how many?", "/undo", "/undo", "/undo")
    status, out, err = talk(*lines, arguments=(photo,))
    assert status == 2 and len(err) == 4 and "not finite" in err[0]
    assert out[-1] == expected and "nothing to undo" in err[-1]
    calls[:] = [1] * 19
    assert "/reset" in talk("how many?")[2][0]


def test_ctrl_c_ends_what_comes_from_a_pipe(talk, monkeypatch):
    def interrupted(rows, logits):
        raise KeyboardInterrupt

    monkeypatch.setattr(sampling, "draw", interrupted)
    status, _, err = talk("how many?", "why?")
    assert status == 130 and err[-1] == "generate.py: interrupted"


def test_what_is_wrong_at_the_start_ends_it(complaint, cli, monkeypatch, tmp_path):
    assert "--json" in complaint("chat", "--json")
    monkeypatch.setattr(sys, "stdin", io.StringIO("how many?\n"))
    assert "missing.png" in complaint("chat", tmp_path / "missing.png")
    monkeypatch.setattr(sys, "stdin", None)
    assert cli("chat", "--no-image") == (0, "", "")
