"""Lines typed at a terminal: edited, completed, and remembered from one session to the next."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from PIL import Image
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from data.images import FORMATS

PROMPT = "> "


class TerminalLines:
    """Iterate for the lines that a person types, until Ctrl-D. Ctrl-C throws a line away.

    Args:
        commands: to complete at the beginning of a line; those in `take_images` and `take_files` go on with
            a path.
        tell: shows one sentence.
    """

    def __init__(
        self,
        commands: Sequence[str],
        tell: Callable[[str], None],
        take_images: Sequence[str] = (),
        take_files: Sequence[str] = (),
    ):
        self._tell = tell
        self._session: PromptSession[str] = PromptSession(
            history=KeptHistory(history_file(), tell),
            completer=CommandCompleter(commands, take_images, take_files),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
        )

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                line = self._session.prompt(PROMPT)
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    self._tell("Ctrl-D or /quit leaves")
                continue
            except EOFError:
                return
            yield line


class CommandCompleter(Completer):
    """Commands, and behind those that take one a path."""

    def __init__(self, commands: Sequence[str], take_images: Sequence[str], take_files: Sequence[str]):
        self._commands = sorted(commands)
        images = PathCompleter(file_filter=is_image_or_folder, expanduser=True)
        self._arguments = {
            **dict.fromkeys(take_images, images),
            **dict.fromkeys(take_files, PathCompleter(expanduser=True)),
        }

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        command, space, argument = text.partition(" ")
        if space and command in self._arguments:
            yield from self._arguments[command].get_completions(Document(argument), event)
        elif text.startswith("/") and not space:
            for name in self._commands:
                if name.startswith(text):
                    yield Completion(name + " " * (name in self._arguments), start_position=-len(text))


def is_image_or_folder(path: str) -> bool:
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS}
    return os.path.isdir(path) or Path(path).suffix.lower() in suffixes


class KeptHistory(FileHistory):
    """Lines in a file that only its owner may read. Where it cannot be written, that is told once."""

    def __init__(self, path: Path, tell: Callable[[str], None]):
        super().__init__(str(path))
        self._tell: Callable[[str], None] | None = tell
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError as error:
            self._give_up(error)
            return []

    def store_string(self, string: str) -> None:
        if self._tell is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
            super().store_string(string)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if self._tell is not None:
            self._tell(f"what you type is forgotten at the end: {self._path}: {error.strerror}")
        self._tell = None


def history_file() -> Path:
    """In the user's state folder, as the XDG base directories have it."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "ocelli" / "chat_history"
