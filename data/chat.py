"""Conversations → token ids, such that text a person typed can never become a special token.

A tokenizer turns `<image>` or `<|im_end|>` into one special id wherever it reads it, typed or not. Here it
never reads it: `ChatEncoder` works with a copy of the tokenizer in which every special token has a private,
unguessable name. The chat template is rendered with stand-ins for the typed texts; the special tokens that
the *template* wrote are given their private names; then the texts are put in, verbatim, and the whole is
tokenized once. Ids are the original ones, so on ordinary text the result equals the original tokenizer's,
while typed special tokens, in any spelling, are text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Encoding

from data.errors import PromptError, one_line
from data.private_tokenizer import private_tokenizer
from data.templates import TemplateProcess, TemplateRefused, render
from data.tokenizer import AnyTokenizer
from data.tokenizer_limits import no_panic

ROLES = ("system", "user", "assistant")
LONGEST_TEXT = 1_000_000  # characters of a conversation: a second of tokenizing, and more than any context


@dataclass(frozen=True)
class Message:
    """One turn: its parts in order, each a text or an image source."""

    role: str
    parts: tuple[tuple[str, Any], ...]  # ("text", str) or ("image", source)

    @property
    def text(self) -> str:
        return "".join(value for kind, value in self.parts if kind == "text")


@dataclass(frozen=True)
class EncodedText:
    """`input_ids` and, for each, whether the assistant says it (end of turn included)."""

    input_ids: list[int]
    assistant_mask: list[bool]


# ------------------------------------------------------------------------------------- what the caller passes
def read_conversation(
    conversation: Sequence[Mapping[str, Any]], where: str = "conversation"
) -> list[Message]:
    """Check a conversation in the Hub's form and make its content uniform.

    Raises:
        PromptError: naming `where` and the message.
    """
    if isinstance(conversation, str | Mapping) or not isinstance(conversation, Sequence):
        raise PromptError(f"{where}: expected a list of messages, got {type(conversation).__name__}")
    if not conversation:
        raise PromptError(f"{where}: expected at least one message, got none")
    messages = [_read_message(message, f"{where}, message {i}") for i, message in enumerate(conversation)]
    check_length(sum(len(message.text) for message in messages), where)
    return messages


def _read_message(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise PromptError(f"{where}: expected {{'role': ..., 'content': ...}}, got {str(message)[:80]!r}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise PromptError(f"{where}: expected a role out of {', '.join(ROLES)}, got {str(role)[:40]!r}")
    if isinstance(content, str):
        return Message(role, (("text", check_text(content, where)),))
    if not isinstance(content, Sequence):
        raise PromptError(
            f"{where}: expected content as text or a list of parts, got {type(content).__name__}"
        )
    return Message(role, tuple(_read_part(part, where) for part in content))


def _read_part(part: Mapping[str, Any], where: str) -> tuple[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and "text" in part:
        return "text", check_text(part["text"], where)
    if kind == "image":
        for key in ("image", "url", "path", "base64"):
            if part.get(key) is not None:
                return "image", part[key]
        raise PromptError(f"{where}: the image part holds no image: expected one under 'image'")
    raise PromptError(
        f"{where}: expected a part {{'type': 'text', 'text': ...}} or {{'type': 'image', 'image': ...}}, "
        f"got {str(part)[:80]!r}"
    )


def check_length(characters: int, where: str) -> None:
    if characters > LONGEST_TEXT:
        raise PromptError(
            f"{where}: expected at most {LONGEST_TEXT:,} characters of text, got {characters:,}"
        )


def check_text(text: Any, where: str) -> str:
    """`text` itself, if it is a string of bounded length that can be written as UTF-8."""
    if not isinstance(text, str):
        raise PromptError(f"{where}: expected text, got {type(text).__name__}")
    check_length(len(text), where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where}: expected valid Unicode, got half a surrogate pair at character {error.start}"
        ) from error
    return text


# ------------------------------------------------------------------------------------------------- to tokens
class ChatEncoder:
    """Renders and tokenizes conversations for one tokenizer and chat template.

    Args:
        string_content: the template takes a message's content as one string (nanoVLM) rather than as parts.
        image_token: the placeholder that stands once for every image in the rendered template.
        stop_token_ids: the ids that end a turn; the one after an answer is part of the answer.
        add_special_tokens: let the tokenizer's post-processor add its own (a BOS), unless the template did.
        harmless_template: it is this repository's own, and needs no limits; see `data/templates.py`.
    """

    def __init__(
        self,
        tokenizer: AnyTokenizer,
        chat_template: str,
        *,
        image_token: str | None,
        stop_token_ids: Sequence[int] = (),
        string_content: bool = False,
        add_special_tokens: bool = True,
        harmless_template: bool = False,
    ):
        self.chat_template = chat_template
        self.image_token = image_token
        self.string_content = string_content
        self.add_special_tokens = add_special_tokens
        self._template_variables = dict(tokenizer.special_tokens_map)
        try:
            self._template_process = None if harmless_template else TemplateProcess(chat_template)
        except TemplateRefused as error:
            raise PromptError(f"chat template: {error}") from error
        self._bos = tokenizer.bos_token
        self._stop_ids = frozenset(stop_token_ids)
        # Digits and private-use characters survive anything a template does to a string (trim, capitalize).
        self._nonce = f"{secrets.randbelow(10**30):030d}"
        private = private_tokenizer(tokenizer, self._nonce)
        self._private, self._ids, self._names = private.tokenizer, private.ids, private.names
        self._longest = private.longest
        self._watched = frozenset(self._ids.values()) - {private.unknown_id}
        longest_first = sorted(self._names, key=len, reverse=True)
        self._name_length = min(map(len, self._names.values()), default=0)
        stand_in = f"\ue000{self._nonce}\\.(?P<text>\\d+)\ue001"
        self._pieces = re.compile("|".join([stand_in, *map(re.escape, longest_first)]))

    def encode(
        self,
        messages: Sequence[Message],
        image_prompts: Sequence[str] = (),
        add_generation_prompt: bool = True,
        where: str = "conversation",
    ) -> EncodedText:
        """Token ids of a conversation.

        Args:
            image_prompts: what replaces each image's placeholder, in the order of the images: special
                tokens by their ordinary names, and plain text. Written by a processor, never by a person.
        """
        rendered, texts = self._render(messages, add_generation_prompt, where)
        pieces, placed, spans = self._fill(rendered, texts, list(image_prompts), where)
        own_bos = bool(self._bos) and rendered.startswith(self._bos)
        encoding = self._encoded(pieces, placed, self.add_special_tokens and not own_bos, where)
        inside = [i for i, added in zip(encoding.ids, encoding.special_tokens_mask) if not added]
        if [i for i in inside if i in self._watched] != [i for i in placed if i in self._watched]:
            raise PromptError(f"{where}: the text turns into special tokens in this tokenizer; reword it")
        return EncodedText(list(encoding.ids), _covered(encoding.offsets, spans))

    def _encoded(
        self, pieces: list[str], placed: list[int], add_special_tokens: bool, where: str
    ) -> Encoding:
        """The pieces tokenized as one text.

        Raises:
            PromptError: more text than this tokenizer can read in bounded time and memory; it cannot read it.
        """
        length = sum(map(len, pieces)) - len(placed) * self._name_length
        if length > self._longest:
            raise PromptError(
                f"{where}: expected at most {self._longest:,} characters, got {length:,}: this checkpoint's "
                "tokenizer would take too long; shorten the text"
            )
        try:
            with no_panic():
                return self._private.encode("".join(pieces), add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises bare Exception
            raise PromptError(f"{where}: the tokenizer cannot read it ({one_line(error, 200)})") from error

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, where: str
    ) -> tuple[str, list[tuple[str, str]]]:
        """The template's output with stand-ins, and for each stand-in its role and text."""
        texts: list[tuple[str, str]] = []

        def stand_in(text: str, role: str) -> str:
            """Outer whitespace stays outside, so that a template which trims it or tests for it still can."""
            core = text.strip()
            if not core:
                return text
            start = text.index(core)
            texts.append((role, core))
            name = f"\ue000{self._nonce}.{len(texts) - 1}\ue001"
            return text[:start] + name + text[start + len(core) :]

        shown = []
        for message in messages:
            parts = [
                {"type": "text", "text": stand_in(value, message.role)}
                if kind == "text"
                else {"type": "image"}
                for kind, value in message.parts
            ]
            if self.string_content:
                shown.append({"role": message.role, "content": self._as_string(parts)})
            else:
                shown.append({"role": message.role, "content": parts or [{"type": "text", "text": ""}]})
        return self._rendered(shown, add_generation_prompt, where), texts

    def _rendered(self, shown: list[dict], add_generation_prompt: bool, where: str) -> str:
        """The template's output: from here for this repository's templates, which are harmless, and from a
        process with limits for all others."""
        variables = {**self._template_variables, "tools": None, "documents": None}
        variables |= {"messages": shown, "add_generation_prompt": add_generation_prompt}
        try:
            if self._template_process is None:
                return render(self.chat_template, variables)
            return self._template_process.render(variables)
        except TemplateRefused as error:
            raise PromptError(
                f"{where}: the checkpoint's chat template refuses it ({one_line(error, 200)})"
            ) from error

    def _as_string(self, parts: list[dict]) -> str:
        return "".join(part["text"] if part["type"] == "text" else self.image_token or "" for part in parts)

    def _fill(
        self, rendered: str, texts: list[tuple[str, str]], image_prompts: list[str], where: str
    ) -> tuple[list[str], list[int], list[tuple[int, int]]]:
        """Put names, images and texts in their places.

        Returns:
            The pieces of the final string, the special ids placed, in order, and the (start, end) characters
            of what the assistant says.
        """
        pieces: list[str] = []
        placed: list[int] = []
        spans: list[tuple[int, int]] = []
        used, answering, length, last, images = set(), False, 0, 0, 0

        def put(text: str) -> None:
            nonlocal length
            pieces.append(text)
            length += len(text)

        for match in self._pieces.finditer(rendered):
            put(rendered[last : match.start()])
            last = match.end()
            if match["text"] is not None:
                index = int(match["text"])
                role, text = texts[index]
                used.add(index)
                if role == "assistant":
                    start = spans.pop()[0] if answering else length - _blank_end(pieces)
                    spans.append((start, length + len(text)))
                    answering = True
                put(text)
                continue
            name = match[0]
            if name == self.image_token:
                if images < len(image_prompts):
                    put(self._named(image_prompts[images], placed))
                images += 1
                continue
            put(self._names[name])
            placed.append(self._ids[name])
            if answering and self._ids[name] in self._stop_ids:
                spans[-1] = (spans[-1][0], length)
            answering = False
        put(rendered[last:])
        if images != len(image_prompts):
            raise PromptError(
                f"{where}: the chat template places {images} images, the messages hold {len(image_prompts)}"
            )
        if len(used) != len(texts):
            raise PromptError(f"{where}: the checkpoint's chat template leaves out part of the text")
        return pieces, placed, spans

    def _named(self, prompt: str, placed: list[int]) -> str:
        """An image's prompt with private names, its special ids appended to `placed`."""

        def rename(match: re.Match) -> str:
            placed.append(self._ids[match[0]])
            return self._names[match[0]]

        return self._pieces.sub(rename, prompt)


def _blank_end(pieces: list[str]) -> int:
    """Spaces in front of an answer's first word: one token with it, or the answer's own."""
    before = pieces[-1] if pieces else ""
    return len(before) - len(before.rstrip(" "))


def _covered(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Which tokens touch one of the character spans; both in order."""
    mask, at = [], 0
    for start, end in offsets:
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        mask.append(at < len(spans) and start < end and end > spans[at][0])
    return mask
