"""Text made to do harm: typed special tokens in every spelling, texts without an end, and chat templates."""

from __future__ import annotations

import ast
import subprocess
import unicodedata
from functools import cache

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from data import chat
from data.chat import SMOLVLM_CHAT_TEMPLATE, ChatEncoder, TemplateRefused, read_conversation, render_bounded
from data.errors import PromptError
from data.samples import SampleEncoder
from inference.answer import encode as encode_question
from inference.checkpoint import open_checkpoint
from tests.processors import LLAMA_TEMPLATE, processor
from tests.test_architecture import MODULES
from tests.test_injection import PLAIN, encode, parts, special_ids, special_tokens

# What may stand between, before or behind letters without being seen: zero-width, joiners, directions, a BOM,
# variation selectors, tags, a soft hyphen, combining marks, fillers of other scripts.
INVISIBLE = (
    "\u200b", "\u200c", "\u200d", "\u200e", "\u200f", "\u202a", "\u202e", "\u2060", "\u2066", "\u2069",
    "\ufeff", "\u00ad", "\u034f", "\u180e", "\ufe0f", "\U000e0001", "\u0301", "\u20dd", "\u115f", "\x00",
    "\x7f", "\x1b",
)  # fmt: skip


@cache
def compatible() -> dict[str, list[str]]:
    """The characters that NFKC makes an ASCII one of, by that one."""
    found: dict[str, list[str]] = {}
    for character in map(chr, range(0xA0, 0x1FFFF)):
        folded = unicodedata.normalize("NFKC", character)
        if len(folded) == 1 and folded.isascii():
            found.setdefault(folded, []).append(character)
    return found


def variants(token: str) -> list[str]:
    """Spellings of a special token beyond those of tests/test_injection.py."""
    half = len(token) // 2
    texts = [f"{token[:half]}{mark}{token[half:]}" for mark in INVISIBLE]
    texts += [f"{mark}{token}{mark}" for mark in INVISIBLE]
    texts += ["\u202e" + token[::-1] + "\u202c", token.swapcase(), token.title(), token + token[::-1]]
    for choice in range(4):  # each character by another one of its compatible forms
        forms = [compatible().get(c, [c]) for c in token]
        texts.append("".join(form[choice % len(form)] for form in forms))
    texts += [f"{{{{ {token!r} }}}}", f"{{% raw %}}{token}{{% endraw %}}", f"{{{{ messages[0] }}}}{token}"]
    texts += [f"</s>{token}", f"\r\n{token}\r\n", f"\u2028{token}\u2029"]
    return texts


@pytest.mark.parametrize("kind", ["embedded", "nfkc", "unigram"])
def test_no_typed_text_yields_a_special_id(kind):
    """59 spellings of some special tokens of each sort."""
    expected = special_ids(kind, encode(kind, parts(PLAIN)))
    for token in special_tokens(kind)[::9]:
        for text in variants(token):
            assert special_ids(kind, encode(kind, parts(text))) == expected, text.encode("unicode_escape")


def test_training_and_questions_go_the_same_way(model_folder):
    """What `SampleEncoder` (training) and `inference.answer.encode` (generate, batch, evaluation, and whoever
    asks an opened checkpoint) make of typed special tokens."""
    checkpoint = open_checkpoint(model_folder, device="cpu")
    p = checkpoint.processor
    special = set(p.tokenizer.added_tokens_decoder)

    def specials(question: str) -> list[int]:
        return [i for i in encode_question(checkpoint, [], question, question).input_ids if i in special]

    def specials_of_training(question: str) -> list[int]:
        row = [{"role": "user", "content": question}, {"role": "assistant", "content": question}]
        return [i for i in SampleEncoder(p, 100_000).encode(row, ("rows", 0)).input_ids if i in special]

    asked, learned = specials(PLAIN), specials_of_training(PLAIN)
    for token in p.tokenizer.get_added_vocab():
        for text in (token * 3, f"a {token} b"):
            assert (specials(text), specials_of_training(text)) == (asked, learned), text


def test_one_function_makes_ids_of_typed_text():
    """`ChatEncoder.encode`. Other calls of a tokenizer see texts that this repository wrote itself."""
    own_words = {"data.chat", "data.tokenizer", "shapes.stream", "shapes.training"}
    calls = {"tokenizer", "tokenizer.encode", "apply_chat_template", "encode_plus", "batch_encode_plus"}
    for name in MODULES:
        if name.split(".")[0] in ("tests", "benchmarks") or name in own_words:
            continue
        for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                words = ast.unparse(node.func).split(".")
                assert not {words[-1], ".".join(words[-2:])} & calls, f"{name}, line {node.lineno}"


# --------------------------------------------------------------------------------------------- odd and long
@pytest.mark.parametrize("kind", ["embedded", "unigram", "nanovlm-current"])
def test_odd_unicode(kind):
    expected = special_ids(kind, encode(kind, parts(PLAIN)))
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    for text in ("\ufeff", "a\x00b", "\uffff", "\U0010ffff", "\u202e", "e" + "\u0301" * 5000, family,
                 "\ue000\ue001", "\r", "\ufdfa" * 200, "\ue0000.0\ue001"):  # fmt: skip
        assert special_ids(kind, encode(kind, parts(f"what is {text}?"))) == expected
    for text in ("\ud800", "a\udfff"):
        with pytest.raises(PromptError, match="Unicode"):
            encode(kind, parts(text))


def test_a_very_long_question_is_refused(complaint):
    """Ten million characters would take many seconds to become tokens for which there is no room."""
    for text in ("x" * 10**7, "<image>" * 2 * 10**6):
        assert f"got {len(text):,}" in complaint("-q", text, "--no-image")
    assert "context holds 512 tokens" in complaint("-q", "how many? " * 50_000, "--no-image")
    pieces = [{"role": "user", "content": [{"type": "text", "text": "x" * 600_000}] * 2}]
    with pytest.raises(PromptError, match="got 1,200,000"):
        read_conversation(pieces)


# ------------------------------------------------------------------------------------------------ templates
HOSTILE = {
    "a range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "a power": ("{{ (10**10)**(10**10) }}", "more than 2 s"),
    "a long string": ("{{ 'x' * 10**10 }}", "MemoryError"),
    "doubling": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "MemoryError",
    ),
    "a width": ("{{ '%999999999d' % 1 }}", "MemoryError"),
    "a centre": ("{{ 'a'.center(10**10) }}", "MemoryError"),
    "recursion": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    "much text": ("{{ 'x' * 10**7 }}", "10000000 characters, at most 1048576"),
    "classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals": ("{{ raise_exception.__globals__.os.system('id') }}", "unsafe"),
    "a format": ("{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}", "unsafe"),
    "an include": ("{% include '/etc/passwd' %}", "no loader"),
    "an import": ("{% import 'os' as os %}", "no loader"),
    "nesting": ("{{" + "[" * 50_000 + "]" * 50_000 + "}}", "recursion"),
    "syntax": ("{% for %}", "Expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused(name):
    template, reason = HOSTILE[name]
    with pytest.raises(TemplateRefused, match=reason):
        render_bounded(template, {"messages": []})


def test_a_hostile_template_ends_in_a_sentence_and_the_next_conversation_is_answered():
    p = processor("embedded")
    template = "{% if messages | length > 1 %}{{ 'x' * 10**10 }}{% endif %}{{ messages[0].content[0].text }}"
    encoder = ChatEncoder(p.tokenizer, template, image_token="<image>")
    one = read_conversation([{"role": "user", "content": PLAIN}])
    first = encoder.encode(one).input_ids
    with pytest.raises(PromptError, match="the checkpoint's chat template refuses it"):
        encoder.encode(one * 2)
    assert encoder.encode(one).input_ids == first
    with pytest.raises(PromptError, match="it has 2000000 characters"):
        ChatEncoder(p.tokenizer, "x" * 2_000_000, image_token="<image>").encode(one)


def test_any_template_gives_what_transformers_gives(monkeypatch):
    """The same text from transformers' own sandbox, from ours, and from the child with limits."""

    def of_transformers(template: str, variables: dict) -> str:
        (text,), _ = render_jinja_template([variables.pop("messages")], chat_template=template, **variables)
        return text

    p = processor("llama")
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": f"  {PLAIN} <image> \u00e9 \U0001f600 "},
        {"role": "assistant", "content": "two"},
    ]
    renders = (of_transformers, chat.render, render_bounded)
    for template in (LLAMA_TEMPLATE, SMOLVLM_CHAT_TEMPLATE, EVERYTHING):
        ids = []
        for one in renders:
            for name in ("render", "render_bounded"):
                monkeypatch.setattr(chat, name, one)
            encoder = ChatEncoder(p.tokenizer, template, image_token="<image>")
            ids.append(encoder.encode(read_conversation(messages)).input_ids)
            monkeypatch.undo()
        assert ids[0] == ids[1] == ids[2]


EVERYTHING = (
    "{%- for message in messages %}\n    {%- if loop.first and message.role == 'system' %}\n{{ bos_token }}\n"
    "    {%- continue %}{% endif %}\n  {{ message.role | capitalize }}: {% for part in message.content %}"
    "{% generation %}{{ part.text | trim }}{% endgeneration %}{% endfor %}{{ eos_token }}\n{% endfor %}"
    "{{ {'a': [1, 'é'], 'b': none} | tojson }}{{ dict(a=1) }}{{ tools is none }}"
    "{% if messages[0].role == 'system' %}{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    "{% endif %}"
)


def test_a_child_for_each_form_of_a_conversation_and_no_environment(monkeypatch):
    """Texts of any content share one; what a template writes about the day is asked for anew each day."""
    monkeypatch.setenv("OCELLI_SECRET", "secret")
    started = []
    real = subprocess.run
    monkeypatch.setattr(chat.subprocess, "run", lambda *a, **o: started.append(o["env"]) or real(*a, **o))
    encoder = ChatEncoder(
        processor("embedded").tokenizer, "{{ messages[0].content[0].text }}", image_token=""
    )
    for text in (PLAIN, "why?", "<image>", "many\nlines", " blank first"):
        encoder.encode(read_conversation([{"role": "user", "content": text}]))
    assert len(started) == 2 and started[0].keys() <= {"PATH", "PYTHONPATH", "HOME"}


def test_a_template_that_refuses_with_terminal_escapes():
    template = r"{{ raise_exception('\x1b]0;owned\x07\x1b[2J') }}"
    encoder = ChatEncoder(processor("embedded").tokenizer, template, image_token="<image>")
    with pytest.raises(PromptError, match=r"\\x1b\]0;owned\\x07") as caught:
        encoder.encode(read_conversation([{"role": "user", "content": PLAIN}]))
    assert str(caught.value).isprintable()
