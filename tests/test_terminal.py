"""Answers on a terminal: nothing that a model says controls it."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys

import pytest

import generate
from inference.answer_text import AnswerText
from inference.boxes import Locator
from inference.results import to_json
from messages import for_terminal
from tests.house import edit_json

HOSTILE = "".join(map(chr, (*range(9), *range(11, 32), *range(127, 160))))
SAID = f"one{HOSTILE}\x1b]0;owned\x07\u009b2J two\n\tthree"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def show(monkeypatch):
    """Puts a terminal of 40 columns, or what is none, on stdout and stderr. Called in the test itself: pytest
    sets them after fixtures."""

    def put(tty: bool = True) -> io.StringIO:
        monkeypatch.setenv("COLUMNS", "40")
        shown = Terminal() if tty else io.StringIO()
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, shown)
        return shown

    return put


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("tty", [True, False])
def test_the_name_of_a_model_controls_no_terminal(model_folder, photo, tmp_path, monkeypatch, show, tty):
    """While it is loaded, beside its answer, in a mistake, in a chat."""
    folder = tmp_path / f"model{HOSTILE.strip()}".replace("\0", "")
    shutil.copytree(model_folder, folder)
    path = folder / "generation_config.json"
    edit_json(path, knows=HOSTILE, most_images=1)
    monkeypatch.setattr("inference.flags.LOG_AFTER", 0)
    shown = show(tty)
    more = ["--max-new-tokens", "2", "--model", str(folder)]
    assert generate.main([str(photo), str(photo), "-q", "how many?", "--stats", *more]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("how many?\n/stats\n"))
    assert generate.main(["chat", *more]) == 0
    assert generate.main(["-q", "how many?", "--model", f"{folder}/none"]) == 2
    said = shown.getvalue()
    assert said.count("model") > 5 and not set(HOSTILE) & set(said)


def test_what_a_model_says_controls_no_terminal():
    assert for_terminal(SAID) == "one]0;owned2J two\n\tthree"
    assert json.loads(to_json({"answer": SAID})) == {"answer": SAID}
    assert not set(HOSTILE) & set(to_json({"answer": SAID}))


WAYS = {
    "an answer": (),
    "a draft": ("--draft",),
    "several answers": ("--num-answers", 2),
    "several questions": ("-q", SAID, "-q", "why?"),
    "JSON": ("--json",),
    "figures": ("--stats",),
    "boxes": ("--box-format", "qwen3-vl", "--detect", "cup"),
    "a chat": ("chat",),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("way", "tty"), [*((way, True) for way in WAYS), ("an answer", False), ("a chat", False)]
)
def test_no_way_to_stdout_lets_a_model_control_the_terminal(model_folder, photo, monkeypatch, show, way, tty):
    """Nor to stderr, whether or not they are terminals: who knows what reads a pipe."""
    monkeypatch.setattr(AnswerText, "put", lambda self, token_id: SAID)
    monkeypatch.setattr(AnswerText, "finish", lambda self: SAID)
    monkeypatch.setattr(Locator, "text", lambda self, answer: answer)
    shown = show(tty)
    monkeypatch.setattr(sys, "stdin", io.StringIO("how many?\n"))
    more = ("--max-new-tokens", 2, "--model", model_folder, photo)
    question = ("-q", "how many?") if way not in ("several questions", "boxes") else ()
    assert generate.main([*map(str, (*WAYS[way], *more, *question))]) == 0
    said = shown.getvalue()
    assert "two" in said
    own = r"\x1b\[90m|\x1b\[0m"  # of grey text
    assert not set(HOSTILE) & set(re.sub(own, "", said))
