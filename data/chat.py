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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property, lru_cache, partial
from typing import Any

from jinja2 import Template, TemplateError, ext, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.errors import PromptError, PromptTooLong, ThinkingError
from data.thinking import MARKERS, Thinking
from data.tokenizer import AnyTokenizer, no_panic, private_tokenizer
from data.tools import Tool, ToolCall, call_text, list_of, marks_of
from messages import one_line
from models.checkpoints.files import Opened, naming

ROLES = ("system", "user", "assistant", "tool")
IMAGE_ORDERS = ("first", "last")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # how templates and programs call what was thought
WINDOW = 8_192  # characters that are tokenized at a time where it is doubtful that all are wanted
NEAR = 8  # pieces of a rendered text in which the mark before a call's name is looked for
LONGEST_NAME = 100  # characters of a special token that are looked for in parts
# What templates look for in tools.
SCHEMA_WORDS = {
    *("array", "boolean", "default", "description", "enum", "function", "integer", "items", "name", "null"),
    *("nullable", "number", "object", "parameters", "properties", "required", "string", "type"),
}
LONGEST_TEXT = 1_000_000  # characters of a conversation: a second of tokenizing, and more than any context

SMOLVLM_CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# transformers' for conversations with videos, whatever the checkpoint has
SMOLVLM_VIDEO_TEMPLATE = SMOLVLM_CHAT_TEMPLATE.replace(
    "{{ '<image>' }}{% endif %}",
    "{{ '<image>' }}{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}",
)
# For a model that learnt images before the text: it puts them there itself, in transformers as here.
IMAGES_FIRST = SMOLVLM_CHAT_TEMPLATE.replace(
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}",
    "{% set images = message['content'] | selectattr('type', 'equalto', 'image') | list %}"
    "{{ ':' if images else ': ' }}{% for line in images %}{{ '<image>' }}{% endfor %}",
).replace("{% elif line['type'] == 'image' %}{{ '<image>' }}", "")
# nanoVLM's, today and in v0.1
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
V01_IMAGE = "<|image|>"  # a token of ours: v0.1 had image features in front of all text, without placeholders
V01_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|image|>Question: ' +"
    " message['content'] | replace('<|image|>', '') + ' Answer:' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Message:
    """One turn.

    parts: in their order, each a text or the source of an image or a video.
    calls, thoughts: what the assistant calls with it, and what it thought before (`reasoning_content`).
    call_id, name: of a tool's result, the id of its call, and the function if that is said.
    as_text: its content was given as a text, not as a list of parts: templates may tell them apart.
    """

    role: str
    parts: tuple[tuple[str, Any], ...]  # ("text", str), ("image", source) or ("video", source)
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    thoughts: str = ""
    name: str = ""
    as_text: bool = False

    @property
    def text(self) -> str:
        return "".join(value for kind, value in self.parts if kind == "text")

    @property
    def images(self) -> list[Any]:
        """Videos as well."""
        return [value for kind, value in self.parts if kind != "text"]


class GivenText(list):
    """The one part of a content that was given as a text."""


@dataclass(frozen=True)
class EncodedText:
    """`input_ids` and, for each, whether the assistant says it (end of turn included)."""

    input_ids: list[int]
    assistant_mask: list[bool]


# ------------------------------------------------------------------------------------- what the caller passes
def read_conversation(
    conversation: Sequence[Mapping[str, Any]], label: str = "conversation", image_order: str | None = None
) -> list[Message]:
    """A conversation in the Hub's form, its content made uniform and its images `in_order`. A PromptError
    names `label` and message."""
    if isinstance(conversation, str | Mapping) or not isinstance(conversation, Sequence) or not conversation:
        raise PromptError(f"{label}: expected a list of messages, got {str(conversation)[:80]!r}")
    messages = []
    for i, message in enumerate(conversation):
        place = f"{label}, message {i}"
        about = dict(message) if isinstance(message, Mapping) else {}
        if about.get("content") is None and any(map(about.get, ("tool_calls", *THOUGHTS))):
            about["content"] = ""
        if not {"role", "content"} <= about.keys():
            raise PromptError(f"{place}: expected {{'role': ..., 'content': ...}}, got {str(message)[:80]!r}")
        role, content = about["role"], about["content"]
        if role not in ROLES:
            raise PromptError(f"{place}: expected role {', '.join(ROLES)}, got {str(role)[:40]!r}")
        as_text = isinstance(content, str | GivenText)
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, Sequence):
            raise PromptError(f"{place}: expected content as text or parts, got {type(content).__name__}")
        parts = tuple(_read_part(part, place) for part in content)
        thought = next((key for key in THOUGHTS if about.get(key)), THOUGHTS[0])
        thoughts, call_id, name = (
            check_text(about.get(key) or "", f"{place}, {key}") for key in (thought, "tool_call_id", "name")
        )
        try:
            calls = tuple(map(ToolCall.read, about.get("tool_calls") or ()))
        except ValueError as error:
            raise PromptError(f"{place}: {error}") from None
        made = Message(role, parts, calls, call_id, thoughts, name, as_text)
        messages.append(in_order(made, image_order))
    check_text("".join(message.thoughts + message.text for message in messages), label)
    return messages


def in_order(message: Message, image_order: str | None) -> Message:
    """A message with its images "first" or "last", in their order; None leaves them where they are. A space
    stands between texts that had an image between them."""
    texts, images, parted = list[tuple[str, Any]](), list[tuple[str, Any]](), False
    for kind, value in message.parts:
        if kind != "text":
            images.append((kind, value))
        elif parted and texts and texts[-1][1][-1:].strip() and value[:1].strip():
            texts.append((kind, f" {value}"))
        else:
            texts.append((kind, value))
        parted = kind != "text"
    if image_order is None or not images:
        return message
    return replace(message, parts=(*images, *texts) if image_order == "first" else (*texts, *images))


def _read_part(part: Mapping[str, Any], label: str) -> tuple[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and "text" in part:
        return "text", check_text(part["text"], label)
    if kind in ("image", "video"):
        for key in (kind, "url", "path", "base64"):
            if part.get(key) is not None:
                return kind, part[key]
    wanted = "{'type': 'text', 'text': ...}, or 'image' or 'video' likewise"
    raise PromptError(f"{label}: expected a part {wanted}, got {str(part)[:80]!r}")


def check_question(messages: Sequence[Message], label: str) -> None:
    """Raises PromptError unless the user asks something last."""
    last = next((message for message in reversed(messages) if message.role == "user"), None)
    if last is None or not last.text.strip():
        got = "no message of the user" if last is None else repr(last.text)
        raise PromptError(f"{label}: expected a question, got {got}")


def check_text(text: Any, label: str) -> str:
    """`text` itself, if it is a string of bounded length that can be written as UTF-8."""
    if not isinstance(text, str):
        raise PromptError(f"{label}: expected text, got {type(text).__name__}")
    if len(text) > LONGEST_TEXT:
        raise PromptError(f"{label}: expected at most {LONGEST_TEXT:,} characters, got {len(text):,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{label}: expected valid Unicode, got half a surrogate at {error.start}"
        ) from error
    return text


def read_image_order(opened: Opened) -> str | None:
    """Where the images of a message stood in a checkpoint's training, "first" or "last", if its
    generation_config.json says so: such a model answers with less sense where they stand elsewhere."""
    order = opened.generation_config.get("image_order")
    if order not in (None, *IMAGE_ORDERS):
        wanted = " or ".join(IMAGE_ORDERS)
        raise PromptError(f"generation_config.json: image_order: expected {wanted}, got {str(order)[:80]!r}")
    return order


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
    """Of several templates by name, a dictionary or a list of objects, the one that is used unasked."""
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
    """What a template makes of these variables (JSON's types); TemplateRefused if nothing."""
    try:
        return _compiled(template).render(**variables)
    except Exception as error:  # a template raises anything
        raise TemplateRefused(one_line(error, 200)) from error


# ------------------------------------------------------------------------------------------------- to tokens
class ChatEncoder:
    """Renders and tokenizes conversations for one tokenizer and chat template.

    Args:
        string_content: the template takes a message's content as one string (nanoVLM) rather than as parts.
        image_token: the placeholder that stands once for every image in the rendered template.
        video_token: that of a video; video_template: for conversations with videos, where it is another.
        stop_token_ids: the ids that end a turn; the one after an answer is part of the answer.
        add_special_tokens: let the tokenizer's post-processor add its own (a BOS), unless the template did.

    `thinking` is how the model thinks before it answers; None for one that does not. `marks` stand around its
    calls of tools.
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
        self.chat_template = chat_template
        self.image_token = image_token
        self._of_visuals = {image_token, video_token} - {None}
        self._video_template = video_template or chat_template
        self.string_content = string_content
        self.add_special_tokens = add_special_tokens
        self.thinking, self.marks = _thinking(tokenizer, chat_template), marks_of(chat_template)
        self._variables = {**tokenizer.special_tokens_map, "tools": None, "documents": None}
        self._bos = tokenizer.bos_token
        self._stop_ids = frozenset(stop_token_ids)
        stops = (tokenizer.backend_tokenizer.id_to_token(one) for one in stop_token_ids)
        self._stops = tuple(one for one in stops if isinstance(one, str))
        # The key that a template has its own place for thoughts under.
        named = (key for key in THOUGHTS if re.search(rf"[.'\"]{key}\b", chat_template))
        self._thoughts_key = next(named, None)
        # Digits and private-use characters survive anything a template does to a string (trim, capitalize).
        self._nonce = f"{secrets.randbelow(10**30):030d}"
        private = private_tokenizer(tokenizer, self._nonce)
        self._tokenizer, self._ids, self._names, unknown_id = private
        self._watched = frozenset(self._ids.values()) - {unknown_id}
        # Special to the tokenizer or not.
        own = [*([] if video_token is None else [video_token]), *self.marks.texts * self.marks.native]
        longest_first = sorted({*self._names, *own}, key=len, reverse=True)
        self._beginnings = {name[:end] for name in longest_first for end in range(1, len(name))}
        self._inside = "\n".join(longest_first)
        ends = {re.escape(name[-1]) for name in longest_first}
        self._ends = re.compile("|".join(f"(?={one})" for one in ends) or "(?!)")
        stand_in = f"\ue000{self._nonce}\\.(?P<text>\\d*)\ue001"
        self._pieces = re.compile("|".join([stand_in, *map(re.escape, longest_first)]))

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
        pieces, placed, spans = self._fill(rendered, texts, image_prompts, label)
        own_bos = bool(self._bos) and rendered.startswith(self._bos)
        special = self.add_special_tokens and not own_bos
        text = "".join(pieces)
        with _readable(label):
            if len(text) > WINDOW:  # other threads run meanwhile
                (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=special)
            else:
                encoding = self._tokenizer.encode(text, add_special_tokens=special)
        inside = [i for i, added in zip(encoding.ids, encoding.special_tokens_mask) if not added]
        if [i for i in inside if i in self._watched] != [i for i in placed if i in self._watched]:
            raise PromptError(f"{label}: the text turns into special tokens in this tokenizer; reword it")
        return EncodedText(list(encoding.ids), _covered(encoding.offsets, spans))

    def check_thinking(self, option: str = "thinking") -> None:
        """Raises ThinkingError for a model that cannot be asked to think, as this option does."""
        if self.thinking is None or not self.thinking.in_template:
            raise ThinkingError(option)

    def check_length(self, texts: Iterable[str], most: int, label: str = "conversation") -> None:
        """Raises PromptTooLong if texts have more than twice `most` tokens, as soon as so many are counted:
        they are tokenized in windows, each of which may have a few more than it has in one piece. Meanwhile
        other threads run, which they do not during the library's `encode`."""
        text = "\n".join(map(str.strip, texts))  # templates trim it
        size, count = max(WINDOW, 4 * most), 0
        for start in range(0, len(text), size) if len(text) > size else ():
            with _readable(label):
                count += len(self._tokenizer.encode_batch_fast([text[start : start + size]])[0])
            if count > 2 * most:
                raise PromptTooLong(f"{label}: expected fewer than {most} tokens, got more than {2 * most}")

    def check_written(self, messages: Sequence[Message], tools: Sequence[Tool], label: str) -> None:
        """Raises PromptError for what the template has no markup for, and which would be learned otherwise
        than the model is asked with it."""
        calling = not self.marks.native
        for key, lost in (
            ("tools", calling and tools),
            ("tool_calls", calling and any(message.calls for message in messages)),
            ("a tool's result", calling and any(message.role == "tool" for message in messages)),
            ("reasoning_content", not self._thoughts_key and any(message.thoughts for message in messages)),
        ):
            if lost:
                raise PromptError(f"{label}: {key}: this model's chat template has no markup for it")

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        label: str,
        think: bool,
        tools: Sequence[Tool],
    ) -> tuple[str, list[tuple[str, str]]]:
        """The template's output with stand-ins, and for each stand-in its role and text; "" is the role of
        what a template may leave out, as it may "thoughts", and "call" that of nothing, before the name of
        what is called in a row that is learned.

        Messages of text alone are texts or lists of parts, as they were given. A template that was written
        for one of these leaves out the other or fails on it, and then gets all of them in its own form.
        """
        if not self.marks.native:
            messages, tools = _in_words(messages, tools), ()
        videos = any(kind == "video" for message in messages for kind, _ in message.parts)
        template = self._video_template if videos else self.chat_template
        made: tuple[str, list[tuple[str, str]]] | None = None
        refusal: TemplateRefused | None = None
        forms = dict(self._forms)  # of the messages of a role: whether they are texts
        for other in (True, False, False, False):
            shown, texts = self._shown(messages, add_generation_prompt, forms)
            variables = self._variables | {"messages": shown, "enable_thinking": think}
            if tools:
                variables["tools"] = [self._guarded(tool.shown) for tool in tools]
            try:
                rendered = render(template, variables | {"add_generation_prompt": add_generation_prompt})
                # Of values within lists some templates write what Python's repr or ASCII's JSON makes.
                rendered = rendered.replace(ascii(self._stand_in(""))[1:-1], self._stand_in(""))
                if add_generation_prompt:
                    rendered = self._with_turn(rendered, think)
            except TemplateRefused as error:
                refusal, forms = refusal or error, dict.fromkeys(ROLES, other)
                continue
            made = rendered, texts
            lost = {role for at, (role, _) in enumerate(texts) if self._stand_in(at) not in rendered}
            if not (lost := lost.intersection(ROLES)):
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

    def _stand_in(self, number: int | str) -> str:
        """What stands in rendered text for one of its texts, or, without a number, for nothing."""
        return f"\ue000{self._nonce}.{number}\ue001"

    def _shown(
        self, messages: Sequence[Message], asked: bool, forms: Mapping[str, bool]
    ) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
        """Messages as a template gets them, and the texts of their stand-ins. `forms`: roles whose messages
        of text alone are texts, or lists of parts; others are as they were given."""
        texts: list[tuple[str, str]] = []

        def stand_in(text: str, role: str) -> str:
            """Outer whitespace stays outside, so that a template which trims it or tests for it still can."""
            core = text.strip()
            if not core:
                return text
            texts.append((role, core))
            return text.replace(core, self._stand_in(len(texts) - 1))

        def argument(value: Any) -> Any:
            """A text that no way to write it changes is not part of what is rendered, as in messages."""
            same = isinstance(value, str) and value.strip() == value and json.dumps(value)[1:-1] == value
            return stand_in(value, "") if same else self._guarded(value)

        def call(one: ToolCall) -> dict[str, Any]:
            shown = one.shown
            name, arguments = self._guarded(one.name), shown["function"]["arguments"]
            if not asked:
                texts.append(("call", ""))
                name = self._stand_in(len(texts) - 1) + name
            arguments = {self._guarded(key): argument(value) for key, value in arguments.items()}
            return shown | {"id": self._guarded(one.id), "function": {"name": name, "arguments": arguments}}

        shown: list[dict[str, Any]] = []
        for message in map(partial(self._apart, asked=asked), messages):
            about: dict[str, Any] = {"role": message.role}
            if message.thoughts and self._thoughts_key:
                about[self._thoughts_key] = stand_in(message.thoughts, "thoughts")
            parts = [
                {"type": kind, "text": stand_in(value, message.role)} if kind == "text" else {"type": kind}
                for kind, value in message.parts
            ]
            content: Any = parts or [{"type": "text", "text": ""}]
            words, given = all(kind == "text" for kind, _ in message.parts), message.as_text or not parts
            if self.string_content or (words and forms.get(message.role, given)):
                content = "".join(part.get("text", self.image_token or "") for part in parts)
            if message.calls:
                about["tool_calls"] = list(map(call, message.calls))
            if message.role == "tool":
                about["tool_call_id"] = self._guarded(message.call_id)  # equal to the call's
                about |= {"name": self._guarded(message.name)} if message.name else {}
            shown.append(about | {"content": content})
        return shown, texts

    @cached_property
    def _own_begin(self) -> str:
        """The mark that a model writes itself before its thoughts; "" where its template's prompts do."""
        if self.thinking is None:
            return ""
        return (
            "" if self._question(True, True).rstrip().endswith(self.thinking.begin) else self.thinking.begin
        )

    @cached_property
    def _forms(self) -> dict[str, bool]:
        """What a template that was written for lists of parts alone gets of all roles: no texts."""
        taken = self._stand_in(0) in self._question(False, False, as_text=True)
        return {} if taken else dict.fromkeys(ROLES, False)

    @cached_property
    def writes_videos(self) -> bool:
        """Whether the template has a place for a video; one that refuses a video without more may have."""
        with suppress(PromptError):
            rendered, _ = self._render([Message("user", (("video", None),))], True, "", False, ())
            return any(match[0] in self._of_visuals for match in self._pieces.finditer(rendered))
        return True

    def _question(self, turn: bool, think: bool, as_text: bool | None = None) -> str:
        """What the template makes of a question alone, with a turn of the assistant or without; "" if it
        refuses that."""
        variables = self._variables | {"add_generation_prompt": turn, "enable_thinking": think}
        text: Any = self._stand_in(0)
        if not (not self._forms if as_text is None else as_text):
            text = [{"type": "text", "text": text}]
        with suppress(TemplateRefused):
            return render(self.chat_template, variables | {"messages": [{"role": "user", "content": text}]})
        return ""

    def _private(self, text: str) -> str:
        """A text of a template with the private names of its special tokens."""
        return self._pieces.sub(lambda match: self._names.get(match[0], match[0]), text)

    def _guarded(self, value: Any) -> Any:
        """JSON that templates look into, its texts with stand-ins for nothing wherever else a special token
        could begin or end: neither they nor what a template writes around them becomes one."""
        if isinstance(value, dict):
            return {self._guarded(key): self._guarded(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._guarded(one) for one in value]
        if not isinstance(value, str) or value in SCHEMA_WORDS:
            return value
        nothing = self._stand_in("")
        ends = (value[-n:] for n in range(1, 1 + min(len(value), LONGEST_NAME)))
        meets = value in self._inside or not self._beginnings.isdisjoint(ends)
        return self._ends.sub(nothing, value) + nothing * meets

    def _apart(self, message: Message, asked: bool) -> Message:
        """A message of the assistant with the thoughts that a client has left in its text apart, as templates
        that have a place for them read it. Where a prompt's template has none, they are left out."""
        thinking, text = self.thinking, message.text
        if message.role != "assistant" or thinking is None or thinking.end not in text or message.images:
            return message
        if not (self._thoughts_key or asked):
            return message
        thoughts = text.rpartition(thinking.end)[0].strip().removeprefix(thinking.begin).strip()
        answer = (("text", thinking.answer_in(text)),)
        return replace(message, parts=answer, thoughts=message.thoughts or thoughts)

    def _fill(
        self, rendered: str, texts: list[tuple[str, str]], image_prompts: Sequence[str], label: str
    ) -> tuple[list[str], list[int], list[tuple[int, int]]]:
        """Put names, images and texts in their places: the pieces of the final string, the special ids put,
        in order, and the (start, end) characters of what the assistant says."""
        pieces, placed, spans = list[str](), list[int](), list[tuple[int, int]]()
        used, length, last, images = set[int](), 0, 0, 0
        answering = calling = False  # after words of the assistant; within one of its calls
        called = -1  # where its last call ends: what follows at once is the model's as well
        marks = (self.marks.opens, self.marks.closes, self.thinking and self.thinking.end)

        def put(text: str) -> None:
            nonlocal length
            pieces.append(text)
            length += len(text)

        def named(prompt: str) -> str:
            """Text of ours with private names, its special ids appended to `placed`."""

            def rename(match: re.Match) -> str:
                if match[0] not in self._ids:
                    return match[0]
                placed.append(self._ids[match[0]])
                return self._names[match[0]]

            return self._pieces.sub(rename, prompt)

        def say(text: str, since: int | None = None) -> None:
            """The assistant says it, or all `since` a place; what follows one another is one answer."""
            nonlocal answering
            if since is None:  # spaces in front of its first word are one token with it, or its own
                since = length - len(before := pieces[-1]) + len(before.rstrip(" "))
            put(text)
            spans.append((spans.pop()[0] if answering else since, length))
            answering = True

        opens, closes, begin = map(self._private, (self.marks.opens, self.marks.closes, self._own_begin))
        for match in self._pieces.finditer(rendered):
            put(rendered[last : match.start()])
            last = match.end()
            if match["text"] == "":
                continue
            if match["text"] is not None:
                role, text = texts[index := int(match["text"])]
                used.add(index)
                near = "".join(pieces[-NEAR:])
                if role == "call" and near.rfind(opens) > near.rfind(closes):  # else a result that names it
                    say("", length - len(near) + near.rfind(opens))
                    calling = True
                elif role == "thoughts" and begin and near.rstrip().endswith(begin):
                    say(text, length - len(near) + near.rindex(begin))
                elif role in ("assistant", "thoughts"):
                    say(text)
                else:
                    put(text)
                    answering = answering and calling
            elif match[0] in self._of_visuals:
                put(named(image_prompts[images]) if images < len(image_prompts) else "")
                images += 1
            else:
                is_stop, hands_over = self._ids.get(match[0]) in self._stop_ids, length == called
                ends_call = calling and match[0] == self.marks.closes
                put(named(match[0]))
                # After its thinking the answer goes on, and around its calls.
                calling, called = calling and not ends_call, length if ends_call else called
                goes_on = calling or match[0] in marks
                if answering and (is_stop or ends_call or (hands_over and not goes_on)):
                    spans[-1] = (spans[-1][0], length)
                answering = answering and goes_on
        put(rendered[last:])
        if images != len(image_prompts):
            raise PromptError(
                f"{label}: this model's chat template has {images} places for {len(image_prompts)} images "
                "and videos: put them into what the user says, or take another model"
            )
        if not used >= {index for index, (role, _) in enumerate(texts) if role in ROLES}:
            raise PromptError(f"{label}: the checkpoint's chat template leaves out part of the text")
        return pieces, placed, spans


def _in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """A conversation with tools for a template that knows none: what the system says lists them, calls are
    part of an answer's text, and results are what the user says."""
    said, results = list[Message](), False
    for message in [Message("system", ()), *messages] if tools and messages[0].role != "system" else messages:
        parts, role = message.parts, message.role
        if role == "system" and tools:
            parts, tools = (*parts, ("text", "\n\n" * bool(parts) + list_of(tools))), ()
        if message.calls:
            text = "\n".join(map(call_text, message.calls))
            parts = (*parts, ("text", "\n" * bool(message.text.strip()) + text))
        if role == "tool":
            images = [part for part in parts if part[0] != "text"]
            text = f"<tool_response>\n{message.text}\n</tool_response>"
            parts, role = (*images, ("text", text)), "user"
            if results:
                parts = (*said.pop().parts, ("text", "\n"), *parts)
        results = message.role == "tool"
        said.append(Message(role, parts, as_text=message.as_text and len(parts) == 1))
    return said


def _thinking(tokenizer: AnyTokenizer, chat_template: str) -> Thinking | None:
    """None where neither the template nor the tokenizer has markers of thinking."""
    known = tokenizer.get_added_vocab()
    for begin, end, gap in MARKERS:
        in_template = begin in chat_template or end in chat_template
        if in_template or known.keys() >= {begin, end}:
            return Thinking(tokenizer, begin, end, gap, in_template)
    return None


@contextmanager
def _readable(label: str) -> Iterator[None]:
    """Raises PromptError for what a tokenizer raises in here."""
    try:
        with no_panic():
            yield
    except Exception as error:  # the library raises bare Exception
        raise PromptError(f"{label}: the tokenizer cannot read it ({one_line(error, 200)})") from error


def _covered(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Which tokens touch one of the character spans; both in order."""
    mask, at = [], 0
    for start, end in offsets:
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        mask.append(at < len(spans) and start < end and end > spans[at][0])
    return mask
