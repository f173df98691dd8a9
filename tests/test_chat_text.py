"""Chat templates: the same text as transformers', and none that hangs, fills memory or reaches Python."""

from __future__ import annotations

import subprocess

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from data import chat
from data.chat import SMOLVLM_CHAT_TEMPLATE, ChatEncoder, TemplateRefused, read_conversation, render_bounded
from tests.processors import LLAMA_TEMPLATE, processor

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
    "classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals": ("{{ raise_exception.__globals__.os.system('id') }}", "unsafe"),
    "a format": ("{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}", "unsafe"),
    "nesting": ("{{" + "[" * 50_000 + "]" * 50_000 + "}}", "recursion"),
    "syntax": ("{% for %}", "Expected"),
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
    real = subprocess.run
    monkeypatch.setattr(chat.subprocess, "run", lambda *a, **o: started.append(o["env"]) or real(*a, **o))
    own = encoder("{{ messages[0].content[0].text }}")
    for text in ("how many?", "why?", "<image>", "many\nlines", " blank first"):
        own.encode(read_conversation([{"role": "user", "content": text}]))
    assert len(started) == 2 and started[0].keys() <= {"PATH", "PYTHONPATH", "HOME"}
