"""Answers on a terminal: no word is cut at its edge, and nothing that a model says controls it."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest

import generate
from inference.answer_text import AnswerText
from inference.boxes import Locator
from inference.coordinates import PixelText
from inference.draft import DraftedReply
from inference.flags import log
from inference.results import to_json
from inference.terminal import GreyText, wrapped
from messages import for_terminal
from tests.house import edit_json

HOSTILE = "".join(map(chr, (*range(9), *range(11, 32), *range(127, 160))))
SAID = f"one{HOSTILE}\x1b]0;owned\x07\u009b2J two\n\tthree"
TEXTS = {
    "words": "The quick brown fox jumps over the lazy dog, and then it does so once more. " * 3,
    "lines": "a\n\n  indented words that go over the edge of a narrow terminal\n\nlast",
    "no spaces": "x" * 95,
    "wide": "広い文字は二つ分あるので四十桁の端末では二十文字で一行になる" * 2,
    "mixed": "naïve café \u0065\u0301te 広い word, " * 8,
    "exact": f"{'a' * 19} {'b' * 20} {'c' * 40} {'d' * 39} e",
    "tabs": "a\tb\tc\td\te\tf\tg",
}


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


def columns(text: str) -> int:
    return sum(0 if c == "\u0301" else 2 if ord(c) > 0x2FFF else 1 for c in text)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_no_word_is_cut_at_the_edge_of_a_terminal(show, name, size):
    terminal, text = show(), TEXTS[name]
    pieces = (text[place : place + size] for place in range(0, len(text), size))
    print("".join(wrapped(pieces)))
    lines = terminal.getvalue().split("\n")
    assert "".join(terminal.getvalue().split()) == "".join(text.split())
    if name not in ("no spaces", "wide", "mixed"):
        assert [word for line in lines for word in line.split()] == text.split()
    if name != "no spaces":
        assert max(map(columns, lines)) <= 40
        assert len(lines) <= 2 + columns(text.expandtabs()) // 30 + text.count("\n")


def test_a_word_is_shown_as_soon_as_it_is_complete(show):
    show()
    assert list(wrapped(["one tw", "o ", "thr"])) == ["one", " two", " thr"]

    def stopped():
        yield "one tw"
        raise KeyboardInterrupt

    shown = wrapped(stopped())
    assert [next(shown), next(shown)] == ["one", " tw"]
    with pytest.raises(KeyboardInterrupt):
        next(shown)


def test_no_word_of_a_draft_is_cut_either(show, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown, text = show(), TEXTS["words"][:100]
    checkpoint = SimpleNamespace(pixels=lambda row: PixelText(None, None))
    reply = SimpleNamespace(draft=lambda: iter(text), checkpoint=checkpoint, short=None, row=None)
    DraftedReply.after_draft(reply, GreyText())
    lines = re.sub(r"\x1b\[\d*m", "", shown.getvalue()).split("\n")
    assert len(lines) == 3 and max(map(len, lines)) <= 40
    assert [word for line in lines for word in line.split()] == text.split()


def test_the_lines_of_a_chat_are_wrapped_as_well(show):
    terminal = show()
    log("    a table's row  with a long explanation behind it, which does not fit\nerror: short")
    assert terminal.getvalue().split("\n") == [
        "    a table's row  with a long",
        "      explanation behind it, which does",
        "      not fit",
        "error: short",
        "",
    ]


def test_a_chat_cuts_no_word_before_its_first_line_either(model_folder, monkeypatch, show):
    """What generate.py says itself: of the example in place of an image, of options without effect."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    shown = show()
    assert generate.main(["chat", "--model", str(model_folder), "--top-k", "3", "--seed", "1"]) == 0
    lines = shown.getvalue().splitlines()
    assert len(lines) >= 4 and max(map(len, lines)) <= 40


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("tty", [True, False])
def test_the_name_of_a_model_controls_no_terminal(model_folder, photo, tmp_path, monkeypatch, show, tty):
    """While it is loaded, beside its answer, in a mistake, in a conversation that is saved."""
    folder, saved = tmp_path / f"model{HOSTILE.strip()}".replace("\0", ""), tmp_path / "a.md"
    shutil.copytree(model_folder, folder)
    path = folder / "generation_config.json"
    edit_json(path, knows=HOSTILE, most_images=1)
    monkeypatch.setattr("inference.flags.LOG_AFTER", 0)
    shown = show(tty)
    more = ["--max-new-tokens", "2", "--model", str(folder)]
    assert generate.main([str(photo), str(photo), "-q", "how many?", "--stats", *more]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"how many?\n/save {saved}\n"))
    assert generate.main(["chat", *more]) == 0
    assert generate.main(["-q", "how many?", "--model", f"{folder}/none"]) == 2
    said = shown.getvalue() + saved.read_text()
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
    own = r"\x1b\[90m|\x1b\[0m|\x1b\[\d+A|\r\x1b\[J"  # of grey text
    assert not set(HOSTILE) & set(re.sub(own, "", said))
