"""Conversations → token ids, such that text a person typed can never become a special token.

A tokenizer turns `<image>` or `<|im_end|>` into one special id wherever it reads it, typed or not. Here it
never reads it: `ChatEncoder` works with a copy of the tokenizer in which every special token has a private,
unguessable name. The chat template is rendered with stand-ins for the typed texts; the special tokens that
the *template* wrote are given their private names; then the texts are put in, verbatim, and the whole is
tokenized once. Ids are the original ones, so on ordinary text the result equals the original tokenizer's,
while typed special tokens, in any spelling, are text.

Templates are rendered as transformers does, in Jinja's sandbox: they reach neither Python nor files. A
checkpoint is its user's choice, so nothing bounds the time and memory that its template takes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property, lru_cache
from typing import Any

from jinja2 import Template, TemplateError, ext, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.conversation import ROLES, THOUGHTS, Message
from data.errors import PromptError, ThinkingError
from data.labels import SPOKEN, Labels, Piece
from data.plain_calls import in_words
from data.thinking import THINKING, ThinkingMarks
from data.tokenizer import AnyTokenizer, no_panic, private_tokenizer
from data.tools import PLAIN, Guard, Tool, marks_of, shown_call
from messages import one_line
from models.checkpoints.files import Opened, naming

_LONG = 8_192  # characters, beyond which other threads run while a text is tokenized


@dataclass(frozen=True)
class EncodedText:
    """`input_ids` and, for each, whether the assistant says it (end of turn included)."""

    input_ids: list[int]
    assistant_mask: list[bool]


# --------------------------------------------------------------------------------------- a folder's template
def chat_template(opened: Opened) -> str | None:
    """The chat template that transformers 5.23 takes for a processor: processor_config.json's, that of
    chat_template.json, then `tokenizer_template`."""
    for name in ("processor_config.json", "chat_template.json"):
        if (written := opened.json(name).get("chat_template")) is not None:
            return _default(written)
    return tokenizer_template(opened)


def tokenizer_template(opened: Opened) -> str | None:
    """The chat template of a tokenizer: chat_template.jinja, with those of other names in a folder beside it,
    or what tokenizer_config.json has."""
    files = {path.stem: path for path in opened.folder.glob("additional_chat_templates/*.jinja")}
    if (path := opened.file("chat_template.jinja")) is not None:
        files["default"] = path
    written = {}
    for name, path in files.items():
        with naming(path):
            written[name] = path.read_text(encoding="utf-8")
    return _default(written or opened.json("tokenizer_config.json").get("chat_template"))


def _default(written: Any) -> str | None:
    """The default of several templates by name, which are a dictionary or a list of objects."""
    named = {entry["name"]: entry["template"] for entry in written} if isinstance(written, list) else written
    template = named.get("default") if isinstance(named, dict) else named
    if not isinstance(template, str) and written is not None:
        raise PromptError(f"expected a chat template, as text or named default, got {str(written)[:80]}")
    return template


# ---------------------------------------------------------------------------------------- rendering templates
class TemplateRefused(Exception):
    """Why a conversation could not be rendered, in a few words."""


@cache
def _sandbox():
    """The sandbox that transformers renders chat templates in, with the same names in it."""

    class Generation(ext.Extension):
        """`{% generation %}` marks what an assistant says; here it only stands around it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message):
        raise TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        """Jinja's own writes it for HTML, and with its keys sorted."""
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _sandbox().from_string(template)  # takes 5 ms, as long as all else that a row of training takes


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text that a template makes of these variables (JSON's types). Raises TemplateRefused."""
    try:
        return _compiled(template).render(**variables)
    except Exception as error:  # a template raises anything
        raise TemplateRefused(one_line(error, 200)) from error


# ------------------------------------------------------------------------------------------------- to tokens
class StandIns:
    """The texts of a conversation with their roles, in the order of the stand-ins that a template gets in
    their place. The role "" is of what a template may leave out, as it may "thoughts"."""

    def __init__(self, nonce: str):
        self.texts, self._nonce = list[tuple[str, str]](), nonce

    def name(self, number: int | str) -> str:
        """The stand-in of a text, or, for "", of nothing."""
        return f"\ue000{self._nonce}.{number}\ue001"

    def add(self, text: str, role: str) -> str:
        self.texts.append((role, text))
        return self.name(len(self.texts) - 1)

    def put(self, text: str, role: str) -> str:
        """A text with a stand-in. Outer whitespace stays outside, so that a template which trims it or tests
        for it still can."""
        core = text.strip()
        return text.replace(core, self.add(core, role)) if core else text

    def lost(self, rendered: str) -> set[str]:
        """The roles of messages some of whose texts a template has left out."""
        missing = {role for at, (role, _) in enumerate(self.texts) if self.name(at) not in rendered}
        return missing.intersection(ROLES)


class ChatEncoder:
    """Renders and tokenizes conversations for one tokenizer and chat template.

    Args:
        string_content: the template takes a message's content as one string (nanoVLM) rather than as parts.
        image_token: the placeholder that stands once for every image in the rendered template.
        video_token: that of a video; video_template: for conversations with videos, where it is another.
        stop_token_ids: the ids that end a turn; the one after an answer is part of the answer.
        add_special_tokens: let the tokenizer's post-processor add its own (a BOS), unless the template did.

    `thinking` holds the markers of what the model thinks before it answers, None for a model that does not.
    `marks` stand around its calls of tools.
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
        video_token: str | None = None,
        video_template: str | None = None,
    ):
        self.chat_template, self._video_template = chat_template, video_template or chat_template
        self.image_token, self._of_visuals = image_token, {image_token, video_token} - {None}
        self.string_content, self.add_special_tokens = string_content, add_special_tokens
        self.thinking = _thinking(tokenizer, chat_template)
        self.marks = marks_of(chat_template) if "tools" in chat_template else PLAIN
        self._variables = {**tokenizer.special_tokens_map, "tools": None, "documents": None}
        self._bos = tokenizer.bos_token
        self._stop_ids = frozenset(stop_token_ids)
        stops = (tokenizer.backend_tokenizer.id_to_token(one) for one in stop_token_ids)
        self._stops = tuple(one for one in stops if isinstance(one, str))
        # The key that a template has its own place for thoughts under.
        named = (key for key in THOUGHTS if re.search(rf"[.'\"]{key}\b", chat_template))
        self.thoughts_key = next(named, None)
        # Digits and private-use characters survive anything a template does to a string (trim, capitalize).
        self._nonce = f"{secrets.randbelow(10**30):030d}"
        private = private_tokenizer(tokenizer, self._nonce)
        self._tokenizer, self._ids, self._names, unknown_id = private
        self._watched = frozenset(self._ids.values()) - {unknown_id}
        # Special to the tokenizer or not.
        own = [
            *([] if video_token is None else [video_token]),
            *(self.marks.texts if self.marks.native else ()),
        ]
        self._specials = sorted({*self._names, *own}, key=len, reverse=True)
        stand_in = f"\ue000{self._nonce}\\.(?P<text>\\d*)\ue001"
        self._pieces = re.compile("|".join([stand_in, *map(re.escape, self._specials)]))

    def encode(
        self,
        messages: Sequence[Message],
        image_prompts: Sequence[str] = (),
        add_generation_prompt: bool = True,
        label: str = "conversation",
        think: bool = False,
        tools: Sequence[Tool] = (),
    ) -> EncodedText:
        """Token ids of a conversation.

        Args:
            image_prompts: what replaces each image's placeholder, in the order of the images: special
                tokens by their ordinary names, and plain text. Written by a processor, never by a person.
            think: the prompt ends inside a block of thinking. ThinkingError for a model without.
            tools: that the prompt speaks of.
        """
        if think:
            self.check_thinking()
        rendered, texts = self._render(messages, add_generation_prompt, label, think, tools)
        pieces, placed = self._fill(rendered, texts, image_prompts, label)
        own_bos = bool(self._bos) and rendered.startswith(self._bos)
        special = self.add_special_tokens and not own_bos
        text = "".join(piece.text for piece in pieces)
        with _readable(label):
            if len(text) > _LONG:
                (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
            else:
                encoding = self._tokenizer.encode(text, add_special_tokens=special)
        inside = [i for i, added in zip(encoding.ids, encoding.special_tokens_mask) if not added]
        if [i for i in inside if i in self._watched] != [i for i in placed if i in self._watched]:
            raise PromptError(f"{label}: the text turns into special tokens in this tokenizer; reword it")
        spoken = any(role in SPOKEN for role, _ in texts)
        mask = self._labels.mask(pieces, encoding.offsets) if spoken else [False] * len(encoding.ids)
        return EncodedText(list(encoding.ids), mask)

    def check_thinking(self, option: str = "thinking") -> None:
        """Raises ThinkingError for a model that cannot be asked to think, as this option does."""
        if self.thinking is None or not self.thinking.in_template:
            raise ThinkingError(option)

    def _render(
        self, messages: Sequence[Message], asked: bool, label: str, think: bool, tools: Sequence[Tool]
    ) -> tuple[str, list[tuple[str, str]]]:
        """The template's output with stand-ins, and each stand-in's role and text. `asked`: it ends in a turn
        of the assistant.

        Messages of text alone are texts or lists of parts, as they were given. A template that was written
        for one of these leaves out the other or fails on it, and then gets all of them in its own form.
        """
        if not self.marks.native and (tools or any(one.calls or one.role == "tool" for one in messages)):
            messages, tools = in_words(messages, tools), ()
        videos = any(kind == "video" for message in messages for kind, _ in message.parts)
        template = self._video_template if videos else self.chat_template
        made: tuple[str, list[tuple[str, str]]] | None = None
        refusal: TemplateRefused | None = None
        forms = dict(self._forms)  # of the messages of a role: whether they are texts
        for other in (True, False, False, False):
            stand_ins = StandIns(self._nonce)
            shown = [self._shown(message, asked, forms, stand_ins) for message in messages]
            variables = self._variables | {"messages": shown, "enable_thinking": think}
            if tools:
                variables["tools"] = [self._guard(tool.shown) for tool in tools]
            try:
                rendered = render(template, variables | {"add_generation_prompt": asked})
                # Of values within lists some templates write what Python's repr or ASCII's JSON makes.
                nothing = stand_ins.name("")
                rendered = rendered.replace(ascii(nothing)[1:-1], nothing)
                made = self._with_turn(rendered, think) if asked else rendered, stand_ins.texts
            except TemplateRefused as error:
                refusal, forms = refusal or error, dict.fromkeys(ROLES, other)
                continue
            if not (lost := stand_ins.lost(made[0])):
                break
            given = {message.role: message.as_text for message in messages if message.as_text}
            forms |= {role: not forms.get(role, role in given) for role in lost}
        if made is None:
            raise PromptError(f"{label}: the checkpoint's chat template refuses it ({refusal})") from refusal
        return made

    def _with_turn(self, rendered: str, think: bool) -> str:
        """A prompt that ends in a turn of the assistant. Some templates open none after a tool's result, even
        where they have closed the one of the call."""
        thinking = self.thinking
        ended = rendered.rstrip().removesuffix(thinking.begin if thinking else "").rstrip()
        if self._stops and ended.endswith(self._stops):
            without, opened = (self._question(turn, think) for turn in (False, True))
            if opened.startswith(without):
                rendered = ended + without[len(without.rstrip()) :] + opened[len(without) :]
        return rendered if thinking is None else thinking.prompt(rendered, think)

    def _shown(
        self, message: Message, asked: bool, forms: Mapping[str, bool], stand_ins: StandIns
    ) -> dict[str, Any]:
        """A message as a template gets it. `forms`: roles whose messages of text alone are texts, or lists of
        parts; others are as they were given."""
        if self.thinking is not None and message.role == "assistant":
            message = self._apart(message, asked)
        about: dict[str, Any] = {"role": message.role}
        if message.thoughts and self.thoughts_key:
            about[self.thoughts_key] = stand_ins.put(message.thoughts, "thoughts")
        parts = [
            {"type": kind, "text": stand_ins.put(value, message.role)} if kind == "text" else {"type": kind}
            for kind, value in message.parts
        ]
        content: Any = parts or [{"type": "text", "text": ""}]
        words, given = all(kind == "text" for kind, _ in message.parts), message.as_text or not parts
        if self.string_content or (words and forms.get(message.role, given)):
            content = "".join(part.get("text", self.image_token or "") for part in parts)
        if message.calls:
            about["tool_calls"] = [
                shown_call(one, self._guard, stand_ins.put, "" if asked else stand_ins.add("", "call"))
                for one in message.calls
            ]
        if message.role == "tool":
            about["tool_call_id"] = self._guard(message.call_id)  # equal to the call's
            about |= {"name": self._guard(message.name)} if message.name else {}
        return about | {"content": content}

    def _apart(self, message: Message, asked: bool) -> Message:
        """A message of the assistant with the thoughts that a client has left in its text apart, as templates
        that have a place for them read it. Where a prompt's template has none, they are left out."""
        assert self.thinking is not None, "only a model that thinks has thoughts in its texts"
        placed, text = self.thoughts_key or asked, message.text
        if not placed or self.thinking.end not in text or message.images:
            return message
        thoughts, answer = self.thinking.apart(text)
        return replace(message, parts=(("text", answer),), thoughts=message.thoughts or thoughts)

    @cached_property
    def _guard(self) -> Guard:
        return Guard(self._specials, StandIns(self._nonce).name(""))

    @cached_property
    def _labels(self) -> Labels:
        """Finds what the assistant says in pieces of `_fill`."""
        begin, ends = "", set[str]()
        if self.thinking is not None:
            begin, ends = self.thinking.begin, {self.thinking.end}
            # A mark that prompts end in is not one that a model writes itself.
            begin = "" if self._question(True, True).rstrip().endswith(begin) else begin
        opens, closes, begin = (
            self._pieces.sub(lambda match: self._names.get(match[0], match[0]), text)
            for text in (self.marks.opens, self.marks.closes, begin)
        )
        inside = {self.marks.opens, self.marks.closes, *ends}
        stops = {name for name, token_id in self._ids.items() if token_id in self._stop_ids}
        return Labels(opens, closes, begin, self.marks.closes, inside, stops)

    @cached_property
    def _forms(self) -> dict[str, bool]:
        """The forms that a template which was written for lists of parts alone gets: texts for no role."""
        taken = StandIns(self._nonce).name(0) in self._question(False, False, as_text=True)
        return {} if taken else dict.fromkeys(ROLES, False)

    @cached_property
    def writes_videos(self) -> bool:
        """True if the template has a place for a video, or refuses a message of a video alone."""
        with suppress(PromptError):
            rendered, _ = self._render([Message("user", (("video", None),))], True, "", False, ())
            return any(match[0] in self._of_visuals for match in self._pieces.finditer(rendered))
        return True

    def _question(self, turn: bool, think: bool, as_text: bool | None = None) -> str:
        """A question alone as the template writes it, with a turn of the assistant or without; "" if it
        refuses that."""
        variables = self._variables | {"add_generation_prompt": turn, "enable_thinking": think}
        text: Any = StandIns(self._nonce).name(0)
        if not (not self._forms if as_text is None else as_text):
            text = [{"type": "text", "text": text}]
        with suppress(TemplateRefused):
            return render(self.chat_template, variables | {"messages": [{"role": "user", "content": text}]})
        return ""

    def _fill(
        self, rendered: str, texts: list[tuple[str, str]], image_prompts: Sequence[str], label: str
    ) -> tuple[list[Piece], list[int]]:
        """Put names, images and texts in their places: the pieces of the final string, and the ids of its
        special tokens in their order."""
        pieces, placed, used, last, images = list[Piece](), list[int](), set[int](), 0, 0

        def rename(match: re.Match) -> str:
            if match[0] not in self._ids:
                return match[0]
            placed.append(self._ids[match[0]])
            return self._names[match[0]]

        for match in self._pieces.finditer(rendered):
            pieces.append(Piece(rendered[last : match.start()]))
            last = match.end()
            if match["text"]:
                role, text = texts[index := int(match["text"])]
                used.add(index)
                pieces.append(Piece(text, role))
            elif match[0] in self._of_visuals:
                prompt = image_prompts[images] if images < len(image_prompts) else ""
                pieces.append(Piece(self._pieces.sub(rename, prompt), "image"))
                images += 1
            elif match["text"] is None:
                pieces.append(Piece(rename(match), "special", match[0]))
        pieces.append(Piece(rendered[last:]))
        if images != len(image_prompts):
            raise PromptError(
                f"{label}: this model's chat template has {images} places for {len(image_prompts)} images "
                "and videos: put them into what the user says, or take another model"
            )
        if not used >= {index for index, (role, _) in enumerate(texts) if role in ROLES}:
            raise PromptError(f"{label}: the checkpoint's chat template leaves out part of the text")
        return pieces, placed


def _thinking(tokenizer: AnyTokenizer, chat_template: str) -> ThinkingMarks | None:
    """None where neither the template nor the tokenizer has markers of thinking."""
    known = tokenizer.get_added_vocab()
    for marks in THINKING:
        if marks.begin in chat_template or marks.end in chat_template:
            return marks._replace(in_template=True)
        if known.keys() >= {marks.begin, marks.end}:
            return marks
    return None


@contextmanager
def _readable(label: str) -> Iterator[None]:
    """Raises PromptError for what a tokenizer raises in here."""
    try:
        with no_panic():
            yield
    except Exception as error:  # the library raises bare Exception
        raise PromptError(f"{label}: the tokenizer cannot read it ({one_line(error, 200)})") from error
