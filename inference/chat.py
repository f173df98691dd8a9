"""The chat of `generate.py --chat`: lines in, answers out as they are made, and commands between them.

From a terminal, with line editing and Ctrl-C for an answer; or from a pipe, a question or command a line.
Answers go to stdout, everything else to stderr. No line can end the session but /quit; the exit status of a
pipe is 2 where one of its lines could not be done.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.errors import did_you_mean
from data.files import expanded
from data.inputs import TiledImage
from generation.decoding import GenerationOptions
from generation.options import MAX_SEED
from inference.chat import save_transcript
from inference.checkpoint import RequestError
from inference.cli import check_image_name
from inference.conversation import Conversation, TurnReply
from inference.errors import mistakes, sentence
from inference.stats import as_table, stats_rows

COMMANDS = {
    "/image": ("PATH", "show an image (or its URL) with the next question"),
    "/undo": ("", "take back the last image, or the last question with its answer"),
    "/reset": ("", "begin anew: no images, no questions"),
    "/memory": ("on|off", "whether earlier questions and answers stand before the next one"),
    "/save": ("FILE", "write the conversation to a new file: .md to read, .jsonl to train on"),
    "/stats": ("", "what the last answer took"),
    "/help": ("", "this list"),
    "/quit": ("", "leave, as Ctrl-D does"),
}
REMEMBERS = "each question is asked with the questions and answers before it"
FORGETS = "each question is asked alone, about the images shown last; /memory on changes that"
KEYS = "Ctrl-C stops an answer, Tab completes, arrows and Ctrl-R find earlier lines."
MORE_MEMORY = "/reset gives the conversation's memory back, --device cpu may have more"
# Control characters in an answer could do anything to a terminal; line breaks and tabs are text.
CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


class Chat:
    """A conversation by lines.

    Args:
        conversation: to go on with, without memory where its model was trained on single questions.
        options: of each answer; each next one draws with the next seed, where there is one.
        stats: tell what each answer took.
        debug: show the traceback of an error.

    `images` are shown with the next question; `failed` counts lines that could not be done; `at_terminal`
    says whether a person watches: Ctrl-C stops the answer then, and how one ended is told.
    """

    def __init__(
        self,
        conversation: Conversation,
        options: GenerationOptions,
        stats: bool = False,
        debug: bool = False,
    ):
        self.conversation, self.options, self.stats, self.debug = conversation, options, stats, debug
        conversation.remember = not conversation.checkpoint.single_turn
        self.at_terminal = is_at_terminal()
        self.images: list[TiledImage] = []
        self.failed = self._asked = 0
        self._made: dict[str, Any] | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/image": self._image,
            "/undo": self._undo,
            "/reset": self._reset,
            "/memory": self._memory,
            "/save": self._save,
            "/stats": self._stats,
            "/help": self._help,
        }

    def show(self, image: Any, name: str) -> None:
        """Show an image (anything that `load_image` takes) under this name with the next question.

        Raises:
            ImageError: see `load_image`.
        """
        self.images.append(replace(self.conversation.image(image), name=name))

    def run(self, questions: Sequence[str] = ()) -> int:
        """Ask these, then do every line that is typed or piped in, up to /quit: the exit status."""
        lines: Iterable[str] = piped_lines()
        if self.at_terminal:
            from inference.chat import TerminalLines

            lines = TerminalLines(tuple(COMMANDS), tell, take_images=["/image"], take_files=["/save"])
            tell("/help lists the commands, Ctrl-D leaves")
        if not self.conversation.remember:
            tell(f"this model was trained on single questions: {FORGETS}")
        for question in questions:
            if self.at_terminal:
                print(f"> {question}", flush=True)
            self.take(f" {question}")  # a question, even if it begins like a command
        for line in lines:
            if line.split() == ["/quit"]:
                break
            self.take(line)
        return 2 if self.failed and not self.at_terminal else 0

    def take(self, line: str) -> None:
        """Do one line. What is wrong with it is told in one sentence."""
        try:
            self._do(line)
        except BrokenPipeError:
            raise
        except mistakes() as error:
            if self.debug:
                traceback.print_exc()
            self.failed += 1
            tell("error: " + sentence(error, MORE_MEMORY))
        except KeyboardInterrupt:
            if not self.at_terminal:
                raise
            tell("stopped")

    def _do(self, line: str) -> None:
        if not line.strip():
            tell("type a question, or /help")
        elif line.startswith("/"):
            name, _, argument = line.strip().partition(" ")
            if name not in COMMANDS:
                raise RequestError(f"{name}: no such command{did_you_mean(name, COMMANDS)}; /help lists them")
            takes, _ = COMMANDS[name]
            if bool(argument.strip()) != bool(takes):
                raise RequestError(f"expected {f'{name} {takes}'.strip()}, got {line.strip()!r}")
            self._commands[name](argument.strip())
        else:
            self._ask(line.strip())

    def _ask(self, question: str) -> None:
        options = self.options
        if options.seed is not None:
            options = replace(options, seed=(options.seed + self._asked) % MAX_SEED)
        self._asked += 1
        reply, talk = None, self.conversation
        images = self.images
        if not (images or talk.remember) and talk.turns:
            images = list(talk.turns[-1].images)  # those shown last stay on the table
        try:
            with stoppable(self.at_terminal) as begun:
                reply = talk.ask(question, images, options)
                self._stream(reply, begun)
        except KeyboardInterrupt:
            if reply is None or not self.at_terminal:
                raise
        made = reply.finish()
        if not reply.kept:
            tell("stopped before the first word: the question is not kept")
            return
        self.images.clear()
        self._made = made | {"model": self.conversation.checkpoint.name}
        if self.at_terminal:
            self._tell_ending(made["stop_reasons"][0])
        if self.stats:
            self._stats()

    def _stream(self, reply: TurnReply, begun: Callable[[TurnReply], None]) -> None:
        shown = False
        try:
            for _, piece in reply:
                if not shown:
                    begun(reply)
                shown = True
                print(piece.translate(CONTROL) if self.at_terminal else piece, end="", flush=True)
        finally:
            if shown or reply.kept:
                print(flush=True)

    def _tell_ending(self, ending: str) -> None:
        if ending == "stopped":
            tell("stopped; /undo takes the question back")
        elif ending == "length":
            tell(f"cut after {self.options.max_new_tokens} tokens: --max-new-tokens allows more")
        elif ending == "context":
            tell("the context is full: /undo takes questions back, /reset begins anew")

    # -------------------------------------------------------------------------------------- commands
    def _image(self, argument: str) -> None:
        path = path_of(argument)
        check_image_name(path)
        self.show(path, path)
        tell(f"{path} is shown with the next question")

    def _undo(self, _: str) -> None:
        if self.images:
            tell(f"took back {self.images.pop().name}")
            return
        turn = self.conversation.undo()
        self._made = None
        self.images = list(turn.images)
        names = ", ".join(image.name for image in turn.images)
        shown = f"; {names} is shown with the next one, unless taken back too" if names else ""
        tell(f"took back {turn.question!r}{shown}")

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self.images.clear()
        self._made = None
        tell("begun anew, without images")

    def _memory(self, argument: str) -> None:
        if argument not in ("on", "off"):
            raise RequestError(f"expected /memory on or /memory off, got {argument!r}")
        self.conversation.remember = argument == "on"
        tell(REMEMBERS if argument == "on" else FORGETS)

    def _save(self, argument: str) -> None:
        path = Path(expanded(path_of(argument)))
        save_transcript(self.conversation, path)
        tell(f"saved to {path}")

    def _stats(self, _: str = "") -> None:
        if self._made is None:
            raise RequestError("no answer yet, or it was taken back: nothing to tell about")
        used = self._made["prompt_tokens"] + len(self._made["token_ids"][0])
        context = f"{used} of {self.conversation.checkpoint.context} tokens"
        tell(as_table(stats_rows(self._made) | {"context": context}))

    def _help(self, _: str) -> None:
        for name, (takes, what) in COMMANDS.items():
            tell(f"{name + ' ' + takes:12}  {what}")
        tell("Everything else is a question; one that begins with a slash takes a space in front of it.")
        tell(KEYS)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def path_of(argument: str) -> str:
    """A path as typed, or as a terminal writes one that was dropped on it: quoted, or its spaces escaped."""
    if os.path.exists(expanded(argument)):
        return argument
    try:
        words = shlex.split(argument)
    except ValueError:  # an apostrophe
        return argument
    return words[0] if len(words) == 1 else argument


@contextmanager
def stoppable(enabled: bool) -> Iterator[Callable[[TurnReply], None]]:
    """Gives what to call once an answer has begun: from then on Ctrl-C lets it end at its next token, so that
    nothing is torn; before, and a second time, it interrupts whatever is being done."""
    begun: list[TurnReply] = []

    def interrupt(*_) -> None:
        if not begun:
            raise KeyboardInterrupt
        begun.pop().stop()

    before = signal.signal(signal.SIGINT, interrupt) if enabled else None
    try:
        yield begun.append
    finally:
        if enabled:
            signal.signal(signal.SIGINT, before)


def is_at_terminal() -> bool:
    """Whether a person types, and sees what is told."""
    return sys.stdin is not None and sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())


def piped_lines() -> Iterator[str]:
    """Lines of stdin, none where it is closed."""
    for line in sys.stdin or ():
        yield line.rstrip("\r\n")
