"""Chat templates: the same text as transformers', and none that hangs, fills memory or reaches Python."""

from __future__ import annotations

import copy
import random

import pytest
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE
from transformers.utils.chat_template_utils import render_jinja_template

from data import chat
from data.chat import SMOLVLM_CHAT_TEMPLATE, ChatEncoder, TemplateRefused, read_conversation, render_bounded
from data.errors import PromptTooLong
from tests.processors import KINDS, LLAMA_TEMPLATE, processor

QUESTION = [{"role": "user", "content": "how many?"}]
# Why each ends is named, since a test for the limit on memory must not pass by a mistake in syntax.
HOSTILE = {
    "a range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "loops": ("{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}", "than 2 s"),
    "doubling": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "MemoryError",
    ),
    "much template": ("x" * 2_000_000, "2000000 characters"),
    "globals": ("{{ raise_exception.__globals__.os.system('id') }}", "unsafe"),
    "a format": ("{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}", "unsafe"),
    "nesting": ("{{" + "[" * 50_000 + "]" * 50_000 + "}}", "recursion"),
    "terminal escapes": (r"{{ raise_exception('\x1b]0;owned\x07\x1b[2J') }}", r"\\x1b\]0;owned\\x07"),
}


def encoder(template: str, kind: str = "embedded") -> ChatEncoder:
    return ChatEncoder(processor(kind).tokenizer, template, image_token="<image>")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_in_a_sentence(name):
    template, reason = HOSTILE[name]
    with pytest.raises(TemplateRefused, match=reason) as caught:
        render_bounded(template, {"messages": []})
    assert str(caught.value).isprintable()


# What systems lack or refuse: the pieces of code are run before the child begins.
NO_PROC = """
import pathlib
real = pathlib.Path.read_text
def read_text(self, *given):
    if str(self).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", str(self))
    return real(self, *given)
pathlib.Path.read_text = read_text
"""
MACOS = (
    NO_PROC
    + """
import resource
def refuse(*given):
    raise ValueError("current limit exceeds maximum limit")
resource.setrlimit = refuse
"""
)
WINDOWS = (
    NO_PROC
    + """
import signal, sys
import psutil  # which needs it here
sys.modules["resource"] = None
del signal.setitimer, signal.ITIMER_PROF
"""
)
GREEDY = "{% set n = namespace(x='x' * 9**6) %}{% for i in range(9) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


@pytest.mark.parametrize("system", [NO_PROC, MACOS, WINDOWS], ids=["no /proc", "macOS", "Windows"])
def test_other_systems_render_and_hold_to_the_limits(monkeypatch, system):
    """What they cannot do to themselves is done from outside."""
    monkeypatch.setattr(chat, "CHILD", f"{system}\n{chat.CHILD}")
    monkeypatch.setattr(chat, "STARTED_SECONDS", 1)
    chat._of_child.cache_clear()
    assert render_bounded(LLAMA_TEMPLATE, {"messages": []}) == "<|begin_of_text|>"
    if system == WINDOWS:  # elsewhere it ends itself
        loops, _ = HOSTILE["loops"]
        monkeypatch.setattr(chat, "SECONDS", 1)
        with pytest.raises(TemplateRefused, match="than 1 s"):
            render_bounded(loops, {})
        # It is ended for its memory: its time would not be over.
        monkeypatch.setattr(chat, "MEMORY", 64 << 20)
        monkeypatch.setattr(chat, "STARTED_MEMORY", 150 << 20)
        monkeypatch.setattr(chat, "SECONDS", 100)
        with pytest.raises(TemplateRefused, match="64 MiB"):
            render_bounded(GREEDY + loops, {})
    chat._of_child.cache_clear()


def test_a_child_that_fails_says_why_and_is_tried_again(monkeypatch):
    """Not that the template takes too long."""
    own = chat.CHILD
    monkeypatch.setattr(chat, "CHILD", "raise OSError('no room for another process')")
    with pytest.raises(TemplateRefused, match="no room for another process"):
        render_bounded("{{ 'fine' }}", {})
    monkeypatch.setattr(chat, "CHILD", own)
    assert render_bounded("{{ 'fine' }}", {}) == "fine"
    monkeypatch.setattr(chat, "CHILD", "import os; os.abort()")
    with pytest.raises(TemplateRefused, match="signal 6"):
        render_bounded("{{ 'aborted' }}", {})


EVERYTHING = (
    "{%- for message in messages %}\n    {%- if loop.first and message.role == 'system' %}\n{{ bos_token }}\n"
    "    {%- continue %}{% endif %}\n  {{ message.role | capitalize }}: {% for part in message.content %}"
    "{% generation %}{{ part.text | trim }}{% endgeneration %}{% endfor %}{{ eos_token }}\n{% endfor %}"
    "{{ {'a': [1, 'é'], 'b': none} | tojson }}{{ dict(a=1) }}{{ tools is none }}"
    "{{ {'b': 2, 'a': messages[-1]} | tojson(False, 1) }}{% for key in messages[0] %}{{ key }}{% endfor %}"
    "{{ {'b': 2, 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}"
    "{% if messages[0].role == 'system' %}{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    "{% endif %}"
)


def test_transformers_own_template_needs_no_child_process():
    assert DEFAULT_CHAT_TEMPLATE in chat.OWN_TEMPLATES


@pytest.mark.parametrize("template", [LLAMA_TEMPLATE, SMOLVLM_CHAT_TEMPLATE, EVERYTHING])
def test_any_template_gives_what_transformers_gives(template, monkeypatch):
    """The same text from transformers' own sandbox, from ours, and from the child with limits."""

    def of_transformers(template: str, variables: dict) -> str:
        (text,), _ = render_jinja_template([variables.pop("messages")], chat_template=template, **variables)
        return text

    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "  how many? <image> \u00e9 \U0001f600 "},
        {"role": "assistant", "content": "two"},
    ]
    ids = []
    for way in (of_transformers, chat.render, render_bounded):
        for name in ("render", "render_bounded"):
            monkeypatch.setattr(chat, name, way)
        ids.append(encoder(template, "llama").encode(read_conversation(messages)).input_ids)
        monkeypatch.undo()
    assert ids[0] == ids[1] == ids[2]


def test_a_child_for_each_form_of_a_conversation_and_no_environment(monkeypatch):
    """Texts of any content share one; what a template writes about the day is asked for anew each day."""
    monkeypatch.setenv("OCELLI_SECRET", "secret")
    started = []
    real = chat._watched
    monkeypatch.setattr(chat, "_watched", lambda c, given, env: started.append(env) or real(c, given, env))
    own = encoder("{{ messages[0].content[0].text }}")
    for text in ("how many?", "why?", "<image>", "many\nlines", " blank first"):
        own.encode(read_conversation([{"role": "user", "content": text}]))
    assert len(started) == 2 and started[0].keys() <= {"PATH", "PYTHONPATH", "HOME"}


class Counting:
    """A tokenizer that notes how many characters it was given."""

    def __init__(self, tokenizer):
        self._tokenizer, self.characters = tokenizer, 0

    def encode_batch_fast(self, texts: list[str]):
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts)


@pytest.mark.parametrize("kind", KINDS)
def test_only_as_much_is_tokenized_as_may_be_used(kind, monkeypatch):
    """No text that fits is refused or read otherwise; of one that is far too long the beginning is looked
    at."""
    monkeypatch.setattr(chat, "WINDOW", 100)
    encoder, most, rng = processor(kind).chat, 60, random.Random(kind)
    encoder = copy.copy(encoder)
    encoder._tokenizer = counting = Counting(encoder._tokenizer)
    pieces = ["how many ", "    ", "größe", "\U0001f989", "aaaa", "\n\n", "1234", "日本", "."]
    refused = fitting = 0
    for _ in range(40):
        few = rng.sample(pieces, rng.randint(1, 3))
        text = "".join(rng.choice(few) for _ in range(int(2 ** rng.uniform(0, 12))))
        messages = read_conversation([{"role": "user", "content": text or "x"}])
        images = ["<|image|>"] if kind == "nanovlm-v0.1" else []  # its template has one in front
        expected = processor(kind).chat.encode(messages, images)
        with monkeypatch.context() as unbounded:
            unbounded.setattr(chat, "WINDOW", 2**30)
            assert processor(kind).chat.encode(messages, images) == expected
        counting.characters = 0
        try:
            encoder.check_length([text], most)
            fitting += 1
        except PromptTooLong:
            assert len(expected.input_ids) > most
            refused += 1
            assert counting.characters <= 4 * most * (1 + len(text) // len(expected.input_ids))
    assert refused > 2 and fitting > 2
