"""Conversations → token ids, such that text a person typed can never become a special token.

A tokenizer turns `<image>` or `<|im_end|>` into one special id wherever it reads it, typed or not. Here it
never reads it: `ChatEncoder` works with a copy of the tokenizer in which every special token has a private,
unguessable name. The chat template is rendered with stand-ins for the typed texts; the special tokens that
the *template* wrote are given their private names; then the texts are put in, verbatim, and the whole is
tokenized once. Ids are the original ones, so on ordinary text the result equals the original tokenizer's,
while typed special tokens, in any spelling, are text.

Templates are strangers: Jinja's sandbox keeps one from reaching Python, but not from three nested loops or
from doubling a string forty times. No bound inside a process holds for all that Jinja can call, so a template
that is not one of ours is rendered by a child process with little memory and processor time. As texts are
stand-ins, the result depends on the form of a conversation alone and is kept: a training run starts a child
for each form, not for each row.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date, datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import psutil
from jinja2 import Template, TemplateError, ext, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from data.errors import PromptError, PromptTooLong, ThinkingError
from data.thinking import MARKERS, Thinking
from data.tokenizer import AnyTokenizer, naming_file, no_panic, private_tokenizer, read_object
from data.tools import Tool, ToolCall, call_text, list_of, markup_of
from messages import one_line
from models.checkpoints.hub import MAX_CONFIG, check_size

ROLES = ("system", "user", "assistant", "tool")
IMAGE_ORDERS = ("first", "last")
WINDOW = 8_192  # characters that are tokenized at a time where it is doubtful that all are wanted
LONGEST_NAME = 100  # characters of a special token that are looked for in parts
# What templates look for in tools.
SCHEMA_WORDS = {
    *("array", "boolean", "default", "description", "enum", "function", "integer", "items", "name", "null"),
    *("nullable", "number", "object", "parameters", "properties", "required", "string", "type"),
}
LONGEST_REMEMBERED = 65_536  # characters of what a template was rendered with
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
OWN_TEMPLATES = (SMOLVLM_CHAT_TEMPLATE, SMOLVLM_VIDEO_TEMPLATE, IMAGES_FIRST, CHATML_TEMPLATE, V01_TEMPLATE)


@dataclass(frozen=True)
class Message:
    """One turn: its parts in order, each a text or the source of an image or a video; what the assistant
    calls with it; and of a tool's result, the id of its call."""

    role: str
    parts: tuple[tuple[str, Any], ...]  # ("text", str), ("image", source) or ("video", source)
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""

    @property
    def text(self) -> str:
        return "".join(value for kind, value in self.parts if kind == "text")

    @property
    def images(self) -> list[Any]:
        """Videos as well."""
        return [value for kind, value in self.parts if kind != "text"]


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
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise PromptError(f"{place}: expected {{'role': ..., 'content': ...}}, got {str(message)[:80]!r}")
        role, content = message["role"], message["content"]
        calls, call_id = tuple(message.get("tool_calls") or ()), message.get("tool_call_id", "")
        if role not in ROLES:
            raise PromptError(f"{place}: expected role {', '.join(ROLES)}, got {str(role)[:40]!r}")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, Sequence):
            raise PromptError(f"{place}: expected content as text or parts, got {type(content).__name__}")
        parts = tuple(_read_part(part, place) for part in content)
        messages.append(in_order(Message(role, parts, calls, call_id), image_order))
    check_text("".join(message.text for message in messages), label)
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


def read_image_order(folder: Path) -> str | None:
    """Where the images of a message stood in a checkpoint's training, "first" or "last", if its
    generation_config.json says so: such a model answers with less sense where they stand elsewhere."""
    order = read_object(folder / "generation_config.json").get("image_order")
    if order not in (None, *IMAGE_ORDERS):
        wanted = " or ".join(IMAGE_ORDERS)
        raise PromptError(f"generation_config.json: image_order: expected {wanted}, got {str(order)[:80]!r}")
    return order


# --------------------------------------------------------------------------------------- a folder's template
def chat_template(folder: Path) -> str | None:
    """The chat template that transformers 5.23 takes for a processor: processor_config.json's, that of
    chat_template.json, then `tokenizer_template`."""
    for name in ("processor_config.json", "chat_template.json"):
        if (written := read_object(folder / name).get("chat_template")) is not None:
            return _default(written)
    return tokenizer_template(folder)


def tokenizer_template(folder: Path) -> str | None:
    """The chat template of a tokenizer: chat_template.jinja, with those of other names in a folder beside it,
    or what tokenizer_config.json has."""
    files = {path.stem: path for path in folder.glob("additional_chat_templates/*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    written = {}
    for name, path in files.items():
        with naming_file(path):
            check_size(path, MAX_CONFIG)
            written[name] = path.read_text(encoding="utf-8")
    return _default(written or read_object(folder / "tokenizer_config.json").get("chat_template"))


def _default(written: Any) -> str | None:
    """Of several templates by name, a dictionary or a list of objects, the one that is used unasked."""
    named = {entry["name"]: entry["template"] for entry in written} if isinstance(written, list) else written
    template = named.get("default") if isinstance(named, dict) else named
    if not isinstance(template, str) and written is not None:
        raise PromptError(f"expected a chat template, as text or named default, got {str(written)[:80]}")
    return template


# ---------------------------------------------------------------------------------------- rendering templates
MEMORY, SECONDS = 512 * 2**20, 2  # of the child, beyond what it starts with
STARTED_MEMORY, STARTED_SECONDS = 512 * 2**20, 5  # more than it starts with, where that is not known
WATCHED_EVERY = 0.05  # seconds
CHILD = "import data.chat; data.chat.child()"
LONGEST_TEMPLATE, LONGEST_RESULT = 2**20, 2**20  # characters; texts are put in later


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
    """What a template makes of these variables (JSON's types), without limits; TemplateRefused if nothing."""
    try:
        text = _compiled(template).render(**variables)
    except Exception as error:  # a template raises anything
        raise TemplateRefused(one_line(error, 200)) from error
    if len(text) > LONGEST_RESULT:
        raise TemplateRefused(f"it makes {len(text)} characters, at most {LONGEST_RESULT} are read")
    return text


def render_bounded(template: str, variables: Mapping[str, Any]) -> str:
    """`render` for a stranger's template, in a child that has `MEMORY` and `SECONDS` for it."""
    if len(template) > LONGEST_TEMPLATE:
        raise TemplateRefused(f"it has {len(template)} characters, at most {LONGEST_TEMPLATE} are read")
    said = json.dumps(variables)  # a template sees keys in order
    rendered = _of_child if len(said) <= LONGEST_REMEMBERED else _of_child.__wrapped__
    text, refusal = rendered(template, said, date.today())
    if refusal:
        raise TemplateRefused(refusal)
    return text


@lru_cache(maxsize=1024)
def _of_child(template: str, variables: str, today: date) -> tuple[str, str]:
    """(text, why there is none); `today` because a template may ask for it."""
    names = ("PATH", "HOME", "SYSTEMROOT")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    done, over = _watched(
        [sys.executable, "-P", "-c", CHILD],
        json.dumps([template, variables]).encode(),
        environment | {"PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    if over or (done.returncode < 0 and -done.returncode == getattr(signal, "SIGPROF", None)):
        return "", f"it takes more than {SECONDS} s or {MEMORY // 2**20} MiB for one conversation"
    if done.returncode < 0:
        return "", f"it ends the process that renders it, with signal {-done.returncode}"
    if done.returncode:  # not the template's fault, so not remembered
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
        raise TemplateRefused(f"the process that renders it has failed: {one_line(said[-1], 200)}")
    text, refusal = json.loads(done.stdout)
    return text, refusal


def _watched(
    command: list[str], given: bytes, environment: Mapping[str, str]
) -> tuple[subprocess.CompletedProcess[bytes], bool]:
    """A process that has ended, and whether it was ended here: for systems on which `child` cannot limit
    itself, macOS and Windows, its memory and time are looked at from outside, where that is possible."""
    ended, over = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(WATCHED_EVERY):
            with suppress(psutil.Error, OSError):
                seen = psutil.Process(process.pid)
                memory, seconds = seen.memory_info().rss, sum(seen.cpu_times()[:2])
                if memory > STARTED_MEMORY + MEMORY or seconds > STARTED_SECONDS + SECONDS:
                    over.set()
                    process.kill()
                    return

    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            printed, said = process.communicate(given)
        finally:
            ended.set()
            watcher.join()
    return subprocess.CompletedProcess(command, process.returncode, printed, said), over.is_set()


def child() -> None:
    """Render what stdin says under limits: the whole of a process that `_of_child` starts."""
    template, variables = json.loads(sys.stdin.buffer.read())
    _limit_this_process()
    try:
        answer = (render(template, json.loads(variables)), "")
    except TemplateRefused as error:
        answer = ("", str(error))
    print(json.dumps(answer), flush=True)


def _limit_this_process() -> None:
    """As far as the system does that: Linux limits both time and memory, macOS the time."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # which ends the process, whatever it is doing
    try:
        import resource
    except ImportError:  # on Windows
        return
    try:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # without /proc it is not known what is mapped already
        mapped = STARTED_MEMORY
    for limit, most in ((resource.RLIMIT_AS, mapped + MEMORY), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # on macOS more is mapped than may be
            resource.setrlimit(limit, (most, most))


# ------------------------------------------------------------------------------------------------- to tokens
class ChatEncoder:
    """Renders and tokenizes conversations for one tokenizer and chat template.

    Args:
        string_content: the template takes a message's content as one string (nanoVLM) rather than as parts.
        image_token: the placeholder that stands once for every image in the rendered template.
        video_token: that of a video; video_template: for conversations with videos, where it is another.
        stop_token_ids: the ids that end a turn; the one after an answer is part of the answer.
        add_special_tokens: let the tokenizer's post-processor add its own (a BOS), unless the template did.

    `thinking` is how the model thinks before it answers; None for one that does not. `markup` is how it calls
    tools.
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
        self.thinking, self.markup = _thinking(tokenizer, chat_template), markup_of(chat_template)
        self._variables = {**tokenizer.special_tokens_map, "tools": None, "documents": None}
        self._bos = tokenizer.bos_token
        self._stop_ids = frozenset(stop_token_ids)
        # Digits and private-use characters survive anything a template does to a string (trim, capitalize).
        self._nonce = f"{secrets.randbelow(10**30):030d}"
        private = private_tokenizer(tokenizer, self._nonce)
        self._tokenizer, self._ids, self._names, unknown_id = private
        self._watched = frozenset(self._ids.values()) - {unknown_id}
        own = [] if video_token is None else [video_token]  # special to the tokenizer or not
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
        return self._encode(rendered, texts, image_prompts, label)

    def encode_text(self, text: str, label: str) -> EncodedText:
        """Token ids of a text as if a template had written all of it."""
        return self._encode(text, [], (), label)

    def _encode(
        self, rendered: str, texts: list[tuple[str, str]], image_prompts: Sequence[str], label: str
    ) -> EncodedText:
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

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        label: str,
        think: bool,
        tools: Sequence[Tool],
    ) -> tuple[str, list[tuple[str, str]]]:
        """The template's output with stand-ins, and for each stand-in its role and text; "" is the role of
        what a template may leave out."""
        texts: list[tuple[str, str]] = []
        if not self.markup.native:
            messages, tools = _in_words(messages, tools), ()
        asked = self.thinking if add_generation_prompt else None

        def stand_in(text: str, role: str) -> str:
            """Outer whitespace stays outside, so that a template which trims it or tests for it still can."""
            if asked is not None and role == "assistant":
                text = asked.answer_in(text)
            core = text.strip()
            if not core:
                return text
            texts.append((role, core))
            return text.replace(core, f"\ue000{self._nonce}.{len(texts) - 1}\ue001")

        def argument(value: Any) -> Any:
            """A text that no way to write it changes is not part of what is rendered, as in messages."""
            same = isinstance(value, str) and value.strip() == value and json.dumps(value)[1:-1] == value
            return stand_in(value, "") if same else self._guarded(value)

        shown: list[dict[str, Any]] = []
        asked_last = max((at for at, one in enumerate(messages) if one.role == "user"), default=-1)
        for at, message in enumerate(messages):
            about: dict[str, Any] = {"role": message.role}
            thoughts, spoken = self._thoughts(message) if asked is None else ("", message)
            if thoughts and at > asked_last:  # of earlier answers a template leaves it out
                about["reasoning_content"] = stand_in(thoughts, "assistant")
            message = spoken
            parts = [
                {"type": kind, "text": stand_in(value, message.role)} if kind == "text" else {"type": kind}
                for kind, value in message.parts
            ]
            content: Any = parts or [{"type": "text", "text": ""}]
            words = all(kind == "text" for kind, _ in message.parts)
            if self.string_content or (words and (message.calls or message.role == "tool")):
                content = "".join(part.get("text", self.image_token or "") for part in parts)
            if message.calls:
                about["tool_calls"] = calls = [call.shown for call in message.calls]
                for call in calls:
                    made = call["function"]["arguments"].items()
                    call["function"]["arguments"] = {self._guarded(name): argument(one) for name, one in made}
                    call["id"] = self._guarded(call["id"])
            if message.role == "tool":
                about["tool_call_id"] = self._guarded(message.call_id)  # equal to the call's
            shown.append(about | {"content": content})
        variables = self._variables | {"messages": shown, "add_generation_prompt": add_generation_prompt}
        if tools:
            variables["tools"] = [self._guarded(tool.shown) for tool in tools]
        variables["enable_thinking"] = think
        videos = any(kind == "video" for message in messages for kind, _ in message.parts)
        template = self._video_template if videos else self.chat_template
        renders = render if template in OWN_TEMPLATES else render_bounded
        try:
            rendered = renders(template, variables)
            return rendered if asked is None else asked.prompt(rendered, think), texts
        except TemplateRefused as error:
            raise PromptError(f"{label}: the checkpoint's chat template refuses it ({error})") from error

    def _guarded(self, value: Any) -> Any:
        """JSON that templates look into, its texts with stand-ins for nothing wherever else a special token
        could begin or end: neither they nor what a template writes around them becomes one."""
        if isinstance(value, dict):
            return {self._guarded(key): self._guarded(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._guarded(one) for one in value]
        if not isinstance(value, str) or value in SCHEMA_WORDS:
            return value
        nothing = f"\ue000{self._nonce}.\ue001"
        ends = (value[-n:] for n in range(1, 1 + min(len(value), LONGEST_NAME)))
        meets = value in self._inside or not self._beginnings.isdisjoint(ends)
        return self._ends.sub(nothing, value) + nothing * meets

    def _thoughts(self, message: Message) -> tuple[str, Message]:
        """What an answer of a training row has of thinking, and the answer without it, where the template
        has its own place for that."""
        thinking = self.thinking
        if message.role != "assistant" or thinking is None or "reasoning_content" not in self.chat_template:
            return "", message
        if thinking.end not in message.text or message.images:
            return "", message
        thoughts = message.text.rpartition(thinking.end)[0].strip().removeprefix(thinking.begin).strip()
        return thoughts, replace(message, parts=(("text", thinking.answer_in(message.text)),))

    def _fill(
        self, rendered: str, texts: list[tuple[str, str]], image_prompts: Sequence[str], label: str
    ) -> tuple[list[str], list[int], list[tuple[int, int]]]:
        """Put names, images and texts in their places: the pieces of the final string, the special ids put,
        in order, and the (start, end) characters of what the assistant says."""
        pieces, placed, spans = list[str](), list[int](), list[tuple[int, int]]()
        used, answering, length, last, images = set[int](), False, 0, 0, 0

        def put(text: str) -> None:
            nonlocal length
            pieces.append(text)
            length += len(text)

        def named(prompt: str) -> str:
            """Text of ours with private names, its special ids appended to `placed`."""

            def rename(match: re.Match) -> str:
                placed.append(self._ids[match[0]])
                return self._names[match[0]]

            return self._pieces.sub(rename, prompt)

        for match in self._pieces.finditer(rendered):
            put(rendered[last : match.start()])
            last = match.end()
            if match["text"] == "":
                continue
            if match["text"] is not None:
                role, text = texts[index := int(match["text"])]
                used.add(index)
                if role == "assistant":  # parts that follow one another are one answer
                    # Spaces in front of its first word are one token with it, or its own.
                    before = pieces[-1]
                    start = spans.pop()[0] if answering else length - len(before) + len(before.rstrip(" "))
                    spans.append((start, length + len(text)))
                    answering = True
                put(text)
            elif match[0] in self._of_visuals:
                put(named(image_prompts[images]) if images < len(image_prompts) else "")
                images += 1
            else:
                put(named(match[0]))
                if answering and placed[-1] in self._stop_ids:
                    spans[-1] = (spans[-1][0], length)
                # After its thinking the answer goes on.
                answering = answering and self.thinking is not None and match[0] == self.thinking.end
        put(rendered[last:])
        if images != len(image_prompts):
            raise PromptError(
                f"{label}: this model's chat template has {images} places for {len(image_prompts)} images "
                "and videos: put them into what the user says, or take another model"
            )
        if not used >= {index for index, (role, _) in enumerate(texts) if role}:
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
        said.append(Message(role, parts))
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
