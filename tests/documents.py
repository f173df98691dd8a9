"""What README.md, CONTRIBUTING.md, docs/ and recipes/ tell a reader to run, and where they point."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *(page for pages in ("docs/*.md", "recipes/*/README.md") for page in sorted(ROOT.glob(pages))),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEED = re.compile(r"#.*\bneeds (.+)$", re.MULTILINE)  # a comment that a reader sees, too


@dataclass(frozen=True)
class Command:
    """One line for a shell, joined where it is continued, without its comment.

    need: what its comment says it needs: "a network", "a GPU", "hours"; None for one that anybody can run.
    """

    line: str
    need: str | None


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and that of a ```text block right behind it: what it prints."""

    language: str
    text: str
    output: str | None

    @property
    def need(self) -> bool:
        """Whether its first line says what it needs, for python."""
        return NEED.match(self.text) is not None

    def commands(self) -> list[Command]:
        """Of a shell. A comment belongs to its line; one on a line of its own, to the next command."""
        made, above = [], ""
        for line in self.text.replace("\\\n", " ").splitlines():
            command, hash_sign, comment = re.match(r"(.*?)(?:(?:^|\s)(#)(.*))?$", line).groups("")
            need = NEED.search(above) or NEED.search(hash_sign + comment)
            if command.strip():
                made.append(Command(" ".join(command.split()), need[1] if need else None))
                above = ""
            else:
                above = hash_sign + comment
        return made


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    found = list(FENCE.finditer(text))
    for fence, following in zip(found, [*found[1:], None]):
        output = None
        if following and following[1] == "text" and not text[fence.end() : following.start()].strip():
            output = following[2]
        yield Block(*fence.groups(), output)


def python_blocks(page: Path) -> list[str]:
    return [block.text for block in blocks(page) if block.language == "python"]


def shell_commands(page: Path) -> list[Command]:
    return [command for block in blocks(page) if block.language == "bash" for command in block.commands()]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_code(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def links(page: Path) -> list[str]:
    """Targets of links and images."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
