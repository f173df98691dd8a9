"""The chat of `generate.py chat`: questions and commands, a line each, from a terminal or a pipe.

Answers go to stdout while they are made, everything else to stderr. At a terminal, Ctrl-C stops an answer;
only /quit (or what people type in its place) or Ctrl-D ends the session. A line that begins with images, such
as files dropped on the terminal, shows them. From a pipe, the exit status is 2 if one of the lines failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from data.tiles import Visual
from generation.options import MAX_SEED, GenerationOptions
from inference.checkpoint import Checkpoint, RequestError
from inference.conversation import Conversation
from inference.errors import user_errors, user_message
from inference.flags import check_image_name, is_image_name, log
from inference.printing import Aside, seen_at, stats_table
from inference.thinking import THINK_TOKENS, form_of, think_first
from messages import did_you_mean, for_terminal

COMMANDS = {
    "/image": ("PATH", "show an image (or its URL) with the next question"),
    "/undo": ("", "take back the last image, or the last question with its answer"),
    "/reset": ("", "start again, without images and questions"),
    "/memory": ("on|off", "whether the model sees earlier questions and answers"),
    "/think": ("on|off", "whether the model thinks before it answers"),
    "/stats": ("", "size and speed of the last answer"),
    "/help": ("", "this list"),
    "/quit": ("", "leave, as Ctrl-D does"),
}
LEAVING = {"/quit", "/exit", "/bye", "/q", "quit", "exit", "bye", "quit()", "exit()", ":q"}
FORGETS = "each question is asked alone, about the last images; /memory on changes that"
ENDINGS = {
    "stopped": "stopped; /undo takes the question back",
    "length": "cut at --max-new-tokens",
    "context": "the context is full: /undo takes questions back, /reset starts again",
}


class Chat:
    """A conversation by lines, with the options of generate.py's command line (`args`). Without memory if the
    model was trained on single questions.

    options: of each answer; if there is a seed, the next answer uses the next one.
    """

    def __init__(self, checkpoint: Checkpoint, args: argparse.Namespace, options: GenerationOptions):
        self.conversation, self.options, self._args = Conversation(checkpoint, args.system), options, args
        self.conversation.remember = not checkpoint.single_turn
        # Whether a person types and reads.
        terminal = sys.stdout.isatty() or sys.stderr.isatty()
        self.at_terminal = sys.stdin is not None and sys.stdin.isatty() and terminal
        self.images: list[Visual] = []  # to show with the next question
        self.failed = self._sent = 0  # lines that failed, questions that were sent
        self._result: dict[str, Any] | None = None  # of the last answer, unless it was taken back

    def show(self, image: Any, name: str) -> None:
        """Show an image or a video with the next question. Raises ImageError."""
        processor = self.conversation.checkpoint.processor
        visuals = [replace(one, name=name) for one in processor.visuals(image)]
        again = name in {one.name for one in self.images}
        if not again and (seen := seen_at(processor.images, visuals[0])):
            log(f"{name}: {seen}")
        self.images += visuals

    def run(self, questions: Sequence[str] = ()) -> int:
        """Send these questions, then do every line up to /quit. Returns the exit status."""
        if self.conversation.checkpoint.introduction:
            log(self.conversation.checkpoint.introduction)
        lines: Iterable[str] = (line.rstrip("\r\n") for line in sys.stdin or ())
        if self.at_terminal:
            lines = terminal_lines()
            log("/help lists the commands, Ctrl-D leaves")
        if not self.conversation.remember:
            log(f"this model was trained on single questions: {FORGETS}")
        for question in questions:
            if self.at_terminal:
                print(for_terminal(f"> {question}"), flush=True)
            self.take(f" {question}")  # a question, even if it begins like a command
        for line in lines:
            if line.rstrip().lower() in LEAVING:
                break
            self.take(line)
        return 2 if self.failed and not self.at_terminal else 0

    def take(self, line: str) -> None:
        """Do one line. What is wrong with it is logged in one sentence."""
        try:
            plain = line.startswith(" ") or line.partition(" ")[0].rstrip() in COMMANDS
            names, line = ([], line) if plain else dropped(line)
            for name in names:
                self._image(name)
            if line.startswith("/"):
                self._command(line.strip())
            elif line.strip():
                self._send(line.strip())
            elif not names:
                log("type a question, or /help")
        except user_errors() as error:
            if isinstance(error, BrokenPipeError):
                raise
            if self._args.debug:
                log(traceback.format_exc())
            self.failed += 1
            memory = "/reset frees the conversation's memory, --device cpu may have more"
            log("error: " + user_message(error, memory))
        except KeyboardInterrupt:
            if not self.at_terminal:
                raise
            log("stopped")

    def _send(self, question: str) -> None:
        options, conversation, images = self.options, self.conversation, self.images
        if options.seed is not None:
            options = replace(options, seed=(options.seed + self._sent) % MAX_SEED)
        self._sent += 1
        if not (images or conversation.remember) and conversation.turns:
            images = list(conversation.turns[-1].images)  # the last ones are still being talked about
        draft, stats = self._args.draft, self._args.stats
        seen, aside = "", Aside()
        with conversation.send(question, images, options, draft) as reply:
            reply.hear = lambda _, piece: aside.put(piece)
            pieces = aside.before(reply.after_draft(draft, draft and stats))
            pixels = conversation.checkpoint.pixels(reply.row, form_of(options) is None)
            try:
                for piece in pixels.each(pieces):
                    print(for_terminal(piece), end="", flush=True)
                    seen = piece or seen
            except KeyboardInterrupt:
                if not self.at_terminal:
                    raise
            finally:
                if seen or reply.kept:
                    print(flush=True)
        result = reply.finish()
        if not reply.kept:
            log("stopped before the first word: the question is not kept")
            return
        self.images.clear()
        self._result = result
        if other := conversation.checkpoint.other_model([reply.turn.answer]):
            log(other)
        if self.at_terminal and reply.turn.ended in ENDINGS:
            log(ENDINGS[reply.turn.ended])
        if stats:
            self._stats()

    # -------------------------------------------------------------------------------------- commands
    def _command(self, line: str) -> None:
        name, _, argument = (part.strip() for part in line.partition(" "))
        if name not in COMMANDS:
            raise RequestError(f"{name}: no such command{did_you_mean(name, COMMANDS)}; /help lists them")
        takes, _ = COMMANDS[name]
        if bool(argument) != bool(takes) or (takes == "on|off" and argument not in ("on", "off")):
            raise RequestError(f"expected {f'{name} {takes}'.strip()}, got {line!r}")
        method = getattr(self, f"_{name[1:]}")
        method(argument) if takes else method()

    def _image(self, argument: str) -> None:
        path = path_of(argument)
        check_image_name(path)
        self.show(path, path)
        log(f"{path} is shown with the next question")

    def _undo(self) -> None:
        if self.images:
            log(f"took back {self.images.pop().name}")
            return
        turn = self.conversation.undo()
        self._result, self.images = None, list(turn.images)
        names = ", ".join(image.name for image in turn.images)
        again = f"; {names} is shown with the next one, unless taken back too" if names else ""
        log(f"took back {turn.question!r}{again}")

    def _reset(self) -> None:
        self.conversation.reset()
        self.images.clear()
        self._result = None
        log("started again, without images")

    def _memory(self, argument: str) -> None:
        self.conversation.remember = argument == "on"
        log("the model sees earlier questions and answers" if argument == "on" else FORGETS)

    def _think(self, argument: str) -> None:
        most = None
        if argument == "on":
            self.conversation.checkpoint.processor.chat.check_thinking("/think on")
            most = self._args.think_tokens or THINK_TOKENS
        self.options = think_first(self.options, most)
        log("the model thinks before it answers" if most else "the model answers at once")

    def _stats(self) -> None:
        if self._result is None:
            raise RequestError("there is no answer yet, or it was taken back")
        checkpoint = self.conversation.checkpoint
        used = self._result["prompt_tokens"] + len(self._result["token_ids"][0])
        log(stats_table(self._result, checkpoint.name, context=f"{used} of {checkpoint.context} tokens"))

    def _help(self) -> None:
        for name, (takes, what) in COMMANDS.items():
            log(f"{name + ' ' + takes:14}  {what}")
        log("A path or a URL alone shows that image, too: drop a file on the terminal.")
        log("Everything else is a question. Put a space before one that begins with a slash or a path.")
        log("Ctrl-C stops an answer, Tab completes, arrows and Ctrl-R find earlier lines.")


def path_of(argument: str) -> str:
    """A path as typed, or as a terminal writes a dropped file: quoted, with escaped spaces, or as a URL."""
    if "\0" in argument:
        raise RequestError(f"expected a path, got {argument!r}")
    if os.path.exists(os.path.expanduser(argument)):
        return argument
    try:
        words = shlex.split(argument)
    except ValueError:  # an apostrophe
        words = []
    word = words[0] if len(words) == 1 else argument
    return url2pathname(urlsplit(word).path) if word.lower().startswith("file:") else word


_WORD = re.compile(r"""\s*((?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+)(?=\s|$)""")


def dropped(line: str) -> tuple[list[str], str]:
    """The images that a line begins with, as `path_of` reads them, and what is left of it. A question may
    begin with a word that is the name of a file; a line that is nothing else is that file."""
    if os.path.isfile(os.path.expanduser(path := path_of(line.strip()))):
        return [path], ""
    names: list[str] = []
    while (found := _WORD.match(line)) and is_image_name(path := path_of(found[1])):
        names, line = [*names, path], line[found.end() :]
    return names, line


# ------------------------------------------------------------------------------------------ the terminal
def terminal_lines() -> Iterator[str]:
    """The lines that a person types, until Ctrl-D. Ctrl-C clears a line."""
    session: PromptSession[str] = PromptSession(
        completer=CommandCompleter(),
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
        output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
    )
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            if not session.default_buffer.text:
                log("Ctrl-D or /quit leaves")
        except EOFError:
            return


class CommandCompleter(Completer):
    """Completes commands, and paths: alone, and after /image."""

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        command, space, argument = document.text_before_cursor.partition(" ")
        if command == "/image" and space:
            yield from PathCompleter(expanduser=True).get_completions(Document(argument), event)
        elif command.startswith("/") and not space:
            for name, (takes, _) in COMMANDS.items():
                if name.startswith(command):
                    yield Completion(name + " " * bool(takes), start_position=-len(command))
        if not space and is_image_name(command):
            yield from PathCompleter(expanduser=True).get_completions(document, event)
