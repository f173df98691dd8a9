"""Chat templates: the same text as transformers', and none that reaches Python or files."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from data import chat
from data.chat import ChatEncoder, TemplateRefused, render
from data.conversation import read_conversation
from data.templates import SMOLVLM_CHAT_TEMPLATE
from tests import qwen_checkpoints
from tests.processors import LLAMA_TEMPLATE, processor

QUESTION = [{"role": "user", "content": "how many?"}]
HOSTILE = {
    "a range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "globals": ("{{ raise_exception.__globals__.os.system('id') }}", "unsafe"),
    "a format": ("{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}", "unsafe"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "changes": ("{% set _ = messages.append(1) %}{{ messages }}", "unsafe|not safely"),
    "nesting": ("{{" + "[" * 50_000 + "]" * 50_000 + "}}", "recursion"),
    "terminal escapes": (r"{{ raise_exception('\x1b]0;owned\x07\x1b[2J') }}", r"\\x1b\]0;owned\\x07"),
}


def encoder(template: str, kind: str = "embedded") -> ChatEncoder:
    return ChatEncoder(processor(kind).tokenizer, template, image_token="<image>")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_in_a_sentence(name):
    template, reason = HOSTILE[name]
    with pytest.raises(TemplateRefused, match=reason) as caught:
        render(template, {"messages": []})
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
    """The same text from transformers' own sandbox and from ours."""

    def of_transformers(template: str, variables: dict) -> str:
        (text,), _ = render_jinja_template([variables.pop("messages")], chat_template=template, **variables)
        return text

    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "  how many? <image> \u00e9 \U0001f600 "},
        {"role": "assistant", "content": "two"},
    ]
    ids = []
    for way in (of_transformers, chat.render):
        monkeypatch.setattr(chat, "render", way)
        ids.append(encoder(template, "llama").encode(read_conversation(messages)).input_ids)
        monkeypatch.undo()
    assert ids[0] == ids[1]


BOTH = (  # of a text and of a list of parts it makes something else
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{% if one.content is string %}{{ one.content }}"
    "{% else %}{% for part in one.content %}{{ ' ' + part.text }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = BOTH.replace(
    "{% if one.content is string %}{{ one.content }}", "{% if true %}{{ one.content | trim }}"
)
LISTS = BOTH.replace("{% if one.content is string %}{{ one.content }}", "{% if false %}")
MIXED = BOTH.replace("one.content is string", "one.role == 'system'").replace(
    "{{ one.content }}", "{{ one.content | trim }}"
)


@pytest.mark.parametrize("template", [BOTH, TEXTS, LISTS, MIXED], ids=["both", "texts", "lists", "mixed"])
@pytest.mark.parametrize("given", ["texts", "lists"])
@pytest.mark.parametrize("asked", [True, False])
def test_content_reaches_a_template_as_it_was_given_or_as_the_template_was_written(template, given, asked):
    """As in transformers, but that a template which was written for one form gets no other."""
    tokenizer = qwen_checkpoints.tokenizer()
    own = ChatEncoder(tokenizer, template, image_token=None)
    texts = [("system", "be brief"), ("user", "how many?"), ("assistant", "two"), ("user", "why?")]

    def messages(as_texts: set[str]) -> list[dict]:
        whole = ({"role": role, "content": text} for role, text in texts)
        return [
            one if one["role"] in as_texts else one | {"content": [{"type": "text", "text": one["content"]}]}
            for one in whole
        ]

    roles = {role for role, _ in texts}
    as_texts = roles if given == "texts" else set()
    as_texts = {TEXTS: roles, LISTS: set(), MIXED: {"system"}}.get(template, as_texts)
    made = own.encode(read_conversation(messages(roles if given == "texts" else set())), (), asked)
    expected = tokenizer.apply_chat_template(
        messages(as_texts), chat_template=template, tokenize=False, add_generation_prompt=asked
    )
    assert tokenizer.decode(made.input_ids) == expected
