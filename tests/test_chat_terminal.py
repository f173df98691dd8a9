"""generate.py chat at a terminal, a real one (a pseudo-terminal): editing, completion, history, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inference.checkpoint import open_checkpoint
from inference.command import ROOT
from tests.waiting import PATIENCE

UP, CTRL_A, CTRL_C, CTRL_D = "\x1b[A", "\x01", "\x03", "\x04"
PROMPT = "\x1b[?2004h"  # "bracketed paste on": what prompt_toolkit begins to read a line with
# Makes the terminal on stdin the controlling one, so that Ctrl-C typed there is a signal.
START = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """generate.py at a pseudo-terminal: `type` at it, and `expect` what it shows."""

    def __init__(self, *arguments, folder: Path):
        self._ours, theirs = pty.openpty()
        environment = os.environ | {
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody here to ask where the cursor is
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(ROOT / "generate.py"), "chat", *map(str, arguments)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *command],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._shown, self._read_to = "", 0

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def expect(self, text: str) -> str:
        """Wait for text behind what was expected last: all that was shown up to its end."""
        while (found := self._shown.find(text, self._read_to)) < 0:
            self._read(text)
        begin, self._read_to = self._read_to, found + len(text)
        return self._shown[begin : self._read_to]

    def more(self, count: int) -> None:
        """Wait for so many characters behind what was expected last."""
        while len(self._shown) - self._read_to < count:
            self._read("more")

    def _read(self, awaited: str) -> None:
        ready, _, _ = select.select([self._ours], [], [], PATIENCE)
        try:
            data = os.read(self._ours, 65536) if ready else b""
        except OSError:  # Linux: the other side has closed
            data = b""
        assert data, f"no {awaited!r} behind {self._shown[self._read_to :][-2000:]!r}"
        self._shown += data.decode(errors="replace")

    def leave(self, keys: str) -> int:
        """Type this at the next prompt: the exit status. Before it, the system would take Ctrl-D itself."""
        self.expect(PROMPT)
        self.type(keys)
        return self._process.wait(PATIENCE)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(tmp_path):
    """Start one in an empty folder."""
    opened = []

    def start(*arguments) -> Terminal:
        opened.append(Terminal(*arguments, folder=tmp_path))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.fixture(scope="module")
def endless(model_folder, tmp_path_factory) -> Path:
    """The tiny checkpoint with a context that no answer comes to the end of, nor by itself."""
    folder, checkpoint = (
        tmp_path_factory.mktemp("endless") / "model",
        open_checkpoint(model_folder, device="cpu"),
    )
    head = checkpoint.model.language_model.lm_head.weight
    with torch.no_grad():
        head[list(checkpoint.stop_token_ids)] = (head[20] + head[21]) / 2  # below the larger
    checkpoint.model.save_pretrained(folder, processor=checkpoint.processor)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 400_000
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_session(terminal, endless):
    talk = terminal("--model", endless, "--no-image", "--max-new-tokens", 300_000, "--compile", "off")
    talk.expect("/help lists the commands, Ctrl-D leaves")
    talk.expect(PROMPT)
    talk.type(CTRL_C)
    talk.expect("Ctrl-D or /quit leaves")
    talk.expect(PROMPT)
    talk.type("half a question" + CTRL_C)
    talk.expect("half a question")
    talk.expect(PROMPT)
    for number in (1, 2):
        talk.type(f"question {number}?\r")
        talk.expect(f"question {number}?")
        talk.expect("\r\n")
        talk.more(200)  # a good piece of an answer
        talk.type(CTRL_C)
        talk.expect("stopped; /undo takes the question back")
        talk.expect(PROMPT)
    talk.type("/stats\r")
    shown = talk.expect("context")
    assert "ended by stopped" in shown and "kept from before" in shown
    talk.type("/undo\r")
    talk.expect("took back 'question 2?'")
    assert talk.leave(CTRL_D) == 0


@pytest.mark.slow
def test_lines_are_edited_completed_and_remembered(terminal, photo, model_folder, tmp_path):
    shutil.copy(photo, tmp_path / "boat-1.png")
    arguments = ("--model", model_folder, "--no-image", "--max-new-tokens", 4)
    talk = terminal(*arguments)
    talk.expect(PROMPT)
    talk.type("/im\tbo\t\r")  # both completed: there is one command and one image
    talk.expect("boat-1.png is shown with the next question")
    talk.expect(PROMPT)
    talk.type("many?" + CTRL_A + "how \r")
    talk.expect("--max-new-tokens")
    talk.expect(PROMPT)
    talk.type(UP + "\r")  # the question
    talk.expect("how many?")
    talk.expect("--max-new-tokens")
    assert talk.leave("/quit\r") == 0
