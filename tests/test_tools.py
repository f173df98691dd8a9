"""Tools: prompts as transformers writes them, and calls that cannot be wrong, in every family's markup."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise

import jsonschema
import openai
import pytest
import torch
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as RESPONSE_TEMPLATES

from data.chat import ChatEncoder
from data.conversation import Message
from data.errors import PromptError
from data.tools import GEMMA, PLAIN, Tool, ToolCall
from inference.calls import CallReader, whole_calls
from inference.constraint import Constraints
from inference.grammar import ToolUse, json_grammar, tool_grammar
from inference.markup import MARKUPS
from tests.house import data_url
from tests.schemas import GROWING, SCHEMAS, record
from tests.servers import (
    CUP,
    EXAMPLE,
    FOLDER,
    NAME,
    STAR,
    events,
    message,
    refused,
    running,
    several,
)  # fmt: skip
from tests.tool_checkpoints import TEMPLATES, save, tokenizer

CALLS = int(os.environ.get("OCELLI_TOOL_CALLS", "40"))  # answers to random tools
PLACE = {"type": "object", "properties": {"x": {"type": "number"}, "tags": {"type": "array"}}}
WEATHER = Tool(
    "get_weather",
    'Weather of a "city",\nor of <b>all</b>',
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": PLACE},
        "required": ["city"],
    },
)
NOW = Tool("now")
CALLED = (
    ToolCall("call_1", "get_weather", '{"city": "São Paulo", "days": 3, "at": {"x": 1.5, "tags": [true]}}'),
    ToolCall("call_2", "now", "{}"),
)


def said(role: str, text: str, *calls: ToolCall, to: str = "") -> Message:
    return Message(role, (("text", text),) if text else (), calls, to)


def talk(text: str = "Let me see.", *calls: ToolCall) -> list[Message]:
    calls = calls or CALLED
    results = (said("tool", f"result {call.id}", to=call.id) for call in calls)
    return [said("system", "Be good."), said("user", "and?"), said("assistant", text, *calls), *results]


def as_transformers(messages: list[Message]) -> list[dict]:
    shown = []
    for one in messages:
        about = {"tool_calls": [call.shown for call in one.calls]} if one.calls else {}
        shown.append({"role": one.role, "content": one.text, "tool_call_id": one.call_id} | about)
    return shown


# ------------------------------------------------------------------------------------------------ prompts
@pytest.mark.parametrize("markup", TEMPLATES)
def test_prompts_are_those_of_transformers(markup, monkeypatch):
    made, template = tokenizer(markup), TEMPLATES[markup]
    chat = ChatEncoder(made, template, image_token=None)
    for tools in ((), (WEATHER,), (WEATHER, NOW)):
        for messages in (talk(), talk("", CALLED[0]), talk("", *CALLED), [said("user", "hello")]):
            expected = made.apply_chat_template(
                as_transformers(messages),
                tools=[tool.shown for tool in tools] or None,
                chat_template=template,
                add_generation_prompt=True,
                tokenize=False,
            )
            ids = chat.encode(messages, tools=tools).input_ids
            assert ids == made(expected, add_special_tokens=False).input_ids
            assert made.decode(ids) == expected


@pytest.mark.slow
@pytest.mark.parametrize("markup", TEMPLATES)
def test_nothing_in_tools_calls_or_results_becomes_a_special_token(markup, monkeypatch):
    made = tokenizer(markup)
    chat, names = ChatEncoder(made, TEMPLATES[markup], image_token="<image>"), list(made.get_added_vocab())

    def count(word: str, inner: str) -> Counter[int]:
        schema = {"type": "object", "properties": {inner: {"type": "string", "description": word}}}
        arguments = json.dumps({inner: word, "list": [f"a {word}", {word: inner}]})
        call = ToolCall("call_1", "get_weather", arguments)
        messages = [
            said("user", word),
            said("assistant", word, call),
            said("tool", f"so {word}", to="call_1"),
        ]
        ids = chat.encode(messages, tools=(Tool("get_weather", f"{word} {word[:-1]}", schema), NOW)).input_ids
        return Counter(one for one in ids if one in made.get_added_vocab().values())

    expected = count("ordinary", "inner")
    for name in names:
        assert count(name, name.strip("<|>")) == expected, name


def test_a_template_without_tools_is_told_of_them_in_words():
    made = tokenizer("hermes", whole=False)
    plain = "{% for one in messages %}<|im_start|>{{ one.role }}: {% for part in one.content %}"
    plain += "{{ part.text if part.type == 'text' else '<|image_pad|>' }}{% endfor %}<|im_end|>{% endfor %}"
    chat = ChatEncoder(made, plain, image_token="<|image_pad|>")
    assert chat.marks is PLAIN
    shown = Message("tool", (("text", "see"), ("image", "x")), (), "call_2")
    for system in (True, False):
        messages = [*talk(), shown, said("user", "thanks")][not system :]
        ids = chat.encode(messages, ["<|image_pad|>"], tools=(WEATHER, NOW)).input_ids
        text, roles = (
            made.decode(ids),
            [part.split(":")[0] for part in made.decode(ids).split("<|im_start|>")],
        )
        assert roles == ["", "system", "user", "assistant", "user", "user"]  # results are one message
        _, pieces = CallReader(MARKUPS["plain"], (WEATHER, NOW)).put(text, last=True)
        assert whole_calls(pieces)[-1].arguments == "{}"
        for tool in (WEATHER, NOW):
            assert json.dumps(tool.shown["function"], ensure_ascii=False) in text
        assert text.count("<|image_pad|>") == 1 and ("Be good." in text) == system
    assert "get_weather" not in made.decode(chat.encode([said("user", "hello")]).input_ids)


def test_images_of_results_stand_where_the_template_has_them():
    images = {"hermes": "<|image_pad|>", "pythonic": "<image>", "gemma": "<|image|>"}
    for markup, image in images.items():
        made = tokenizer(markup)
        chat = ChatEncoder(made, TEMPLATES[markup], image_token=image)
        last = Message("tool", (("text", "here: "), ("image", "x")), (), "call_1")
        ids = chat.encode([*talk("", CALLED[0])[:-1], last], [image], tools=(WEATHER,)).input_ids
        assert "here: " in made.decode(ids) and ids.count(made.convert_tokens_to_ids(image)) == 1
    with pytest.raises(PromptError):  # a template that leaves them out
        bare = TEMPLATES["hermes"].replace("<|image_pad|>", "")
        ChatEncoder(made, bare, image_token=image).encode([*talk("", CALLED[0])[:-1], last], [image])


# ------------------------------------------------------------------------------------------------- reading
def in_pieces(markup, tools, text: str, size: int, must: bool = False) -> tuple[str, list[ToolCall]]:
    reader, shown, pieces = CallReader(markup, tools, must), "", []
    for start in range(0, len(text), size):
        more, calls = reader.put(text[start : start + size])
        shown, pieces = shown + more, pieces + calls
    more, calls = reader.put("", last=True)
    return shown + more, whole_calls(pieces + calls)


@pytest.mark.parametrize("markup", TEMPLATES)
def test_what_a_template_writes_is_read_again(markup):
    made, tools = tokenizer(markup), (WEATHER, NOW)
    for text in ("", "Let me see."):
        rendered = made.apply_chat_template(
            as_transformers(talk(text)), chat_template=TEMPLATES[markup], tokenize=False
        )
        answer = re.split(r"<\|im_end\|>|<\|tool_resp", re.split("assistant\n|model\n", rendered)[1])[0]
        for size in (1, 2, 7, 1000):
            shown, calls = in_pieces(MARKUPS[markup], tools, answer, size)
            assert shown == text and [call.name for call in calls] == ["get_weather", "now"]
            assert [json.loads(one.arguments) for one in calls] == [
                json.loads(one.arguments) for one in CALLED
            ]
            assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("markup", MARKUPS)
def test_what_only_looks_like_a_call_is_text(markup):
    opens = MARKUPS[markup].marks.opens
    for text in (
        opens,
        f"write {opens} or so",
        f"{opens} \n{opens}\n {{",
        f"a {opens[:-1]}",
        f"b \n{opens}[no()",
    ):
        for size in (1, 4, 1000):
            assert in_pieces(MARKUPS[markup], (WEATHER,), text, size) == (text, [])
    assert in_pieces(MARKUPS[markup], (WEATHER,), opens, 4, must=True) == ("", [])  # a call that was cut


# ------------------------------------------------------------------------------- what a call is held to
def random_tool(chance: random.Random, number: int) -> Tool:
    """Whose schema has few or many parameters of all kinds, or is none of a plain list of them."""
    others = ("reference", "open", "all of", "awkward names", "tree")
    if chance.random() < 0.15:
        name = chance.choice(others)
        return Tool(f"f{number}", None, record(at=SCHEMAS["any of"]) if name == "tree" else SCHEMAS[name])
    properties = {}
    for index in range(chance.randint(0, 4)):
        schema = SCHEMAS[chance.choice([one for one in SCHEMAS if one not in (*GROWING, "reference")])]
        if chance.random() < 0.3:
            text = {"type": "string", "maxLength": 6}
            other = chance.choice([{"type": "null"}, {"type": "boolean"}, {"type": "integer", "maximum": 40}])
            schema = chance.choice(
                [{"anyOf": [text, other]}, {"type": ["string", other["type"]], "maxLength": 4}]
            )
        odd = chance.random() < 0.2
        properties[chance.choice(["a b", "x-y", "ä", "while", "image"]) if odd else f"p{index}"] = schema
    required = [name for name in properties if chance.random() < 0.6]
    name = chance.choice(["get_weather", "find", "a.b", "do-it"])
    return Tool(f"{name}{number}", None, {"type": "object", "properties": properties, "required": required})


def fits(call: ToolCall, tools) -> bool:
    """Of decimal numbers: 0.47 is a multiple of 0.01."""
    (schema,) = (tool.schema for tool in tools if tool.name == call.name)
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    jsonschema.Draft202012Validator(exact).validate(json.loads(call.arguments, parse_float=Decimal))
    return True


def babble(constraint, made, begin: str, seed: int, most: int = 700) -> tuple[list[int], bool]:
    """An answer of random logits, which begins like this if it may, and whether it came to an end."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    first, ids = made.backend_tokenizer.encode(begin, add_special_tokens=False).ids, list[int]()
    for place in range(most):
        logits = torch.randn(352, generator=generator) * chance.choice([1, 2, 3])
        logits[made.eos_token_id] += chance.choice([0, 0, 3])
        if place < len(first):
            logits[first[place]] = 99
        forced = constraint.forced()
        constraint.close(logits)
        constraint.mask(logits)
        token_id = int(logits.argmax())
        assert constraint.allows(token_id) and forced[:1] in ([], [token_id])
        constraint.accept(token_id)
        if token_id == made.eos_token_id:
            return ids, True
        ids.append(token_id)
    return ids, False


@pytest.fixture(scope="module")
def constraints() -> dict:
    made = {}
    for name in MARKUPS:
        for whole in (True, False):  # whether the marks are tokens of their own
            own = tokenizer("hermes" if name == "plain" else name, whole)
            made[name, whole] = own, Constraints(own, 352, [own.eos_token_id])
    return made


@pytest.mark.slow
def test_any_call_of_any_tool_fits_its_schema(constraints):
    """In every markup, whether it must come or may, and however its text arrives. See OCELLI_TOOL_CALLS."""
    kinds = Counter[str]()
    for seed in range(CALLS):
        chance = random.Random(seed)
        name, whole = chance.choice([*MARKUPS]), chance.random() < 0.5
        (made, own), markup = constraints[name, whole], MARKUPS[name]
        tools = tuple(random_tool(chance, number) for number in range(chance.randint(1, 3)))
        use = ToolUse(tools, must=chance.random() < 0.6, several=chance.random() < 0.6)
        grammar = tool_grammar(markup, use, made.get_added_vocab().get)
        make = own(grammar) if use.must else own.may_call(grammar, markup.marks.opens, use.several)
        ids, ended = babble(make(), made, "" if use.must else f"let me see\n{markup.marks.opens}", seed)
        text = made.decode(ids)
        shown, calls = in_pieces(markup, tools, text, chance.choice([1, 2, 5, 1000]), use.must)
        assert all(fits(call, tools) for call in calls), seed
        assert calls or not ended, f"{seed}: {text}"
        assert use.several or len(calls) <= 1, seed
        assert not (use.must and shown.strip()), f"{seed}: {shown}"
        assert use.must or markup.marks.opens not in shown or not ended, f"{seed}: {shown}"
        kinds["calls"] += len(calls)
        kinds["cut"] += not ended
    assert kinds["calls"] > CALLS / 2 and kinds["cut"] < CALLS / 10, kinds


LEAF = {"enum": ["red", "blue"]}
REF = {"$ref": "#/$defs/leaf"}
REFERRING = {
    "shared": {"properties": {f"p{n}": REF | {"title": f"{n}"} for n in range(5)}, "$defs": {"leaf": LEAF}},
    "chain": {
        "properties": {"a": REF},
        "$defs": {"leaf": {"$ref": "#/definitions/b"}},
        "definitions": {"b": LEAF},
    },
    "recursive": {
        "properties": {"a": {"$ref": "#/$defs/node"}, "b": REF},
        "$defs": {
            "node": record(False, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
            | {"maxProperties": 1},
            "leaf": LEAF,
        },
    },
    "of itself": {
        "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "b": LEAF},
        "required": ["b"],
    },
    "a pointer": {"properties": {"a": LEAF, "b": {"$ref": "#/properties/a"}}},
    "escaped": {"properties": {"a": {"$ref": "#/$defs/a~1b%20c"}}, "$defs": {"a/b c": LEAF}},
    "inside": {"properties": {"a": {"$ref": "#/$defs/b/properties/c"}}, "$defs": {"b": record(c=LEAF)}},
    "list": {"properties": {"a": {"type": "array", "items": REF, "maxItems": 2}}, "$defs": {"leaf": LEAF}},
    "unused": {"properties": {"a": LEAF}, "$defs": {"leaf": {"type": "no such type"}}},
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", REFERRING)
def test_references_are_followed_wherever_they_lead(constraints, name):
    """And tools whose definitions have the same names keep apart."""
    other = {"properties": {"z": REF}, "$defs": {"leaf": {"enum": [1, 2]}}, "required": ["z"]}
    tools = Tool("f", None, {"required": [], **REFERRING[name]}), Tool("g", None, other)
    called = Counter[str]()
    for number, markup in enumerate(MARKUPS):
        made, own = constraints[markup, True]
        grammar = tool_grammar(MARKUPS[markup], ToolUse(tools, must=True), made.get_added_vocab().get)
        for seed in range(3):
            ids, _ = babble(own(grammar)(), made, "", 10 * number + seed)
            _, calls = in_pieces(MARKUPS[markup], tools, made.decode(ids), 1000, True)
            assert all(fits(call, tools) for call in calls)
            called.update(call.name for call in calls)
    assert {*called} == {"f", "g"}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("form", ["titled", "either"])
@pytest.mark.parametrize(("tools", "shared", "parameters"), [(1, 60, 300), (6, 10, 30), (20, 2, 15)])
def test_definitions_make_no_grammar_long(form, tools, shared, parameters):
    """In no markup is it much longer than what the client wrote."""
    names = [f"D{number}" for number in range(shared)]
    defs = {
        one: record(a={"enum": [one]}, next={"$ref": f"#/$defs/{after}"}) for one, after in pairwise(names)
    }
    defs[names[-1]] = record(a={"enum": list(map(str, range(20)))})

    def parameter(number: int) -> dict:
        ref = {"$ref": "#/$defs/D0"}
        return {"titled": ref | {"title": f"{number}"}, "either": {"anyOf": [ref, {"type": "null"}]}}[form]

    schema = {"properties": {f"p{number}": parameter(number) for number in range(parameters)}, "$defs": defs}
    given = tuple(Tool(f"f{number}", None, schema) for number in range(tools))
    written = sum(len(json.dumps(tool.schema)) for tool in given)
    for markup in MARKUPS.values():
        grammar = tool_grammar(markup, ToolUse(given, must=True), {}.get)
        assert len(grammar) < 2**18 and len(grammar) < 4 * written, (markup, written, len(grammar))


def test_a_grammar_has_a_bound():
    """Where a definition cannot stand where it is referred to."""

    def inner(number: int) -> dict:
        leaves = {f"q{at}": {"$ref": "#/$defs/long", "maxLength": 100 * number + at} for at in range(20)}
        return {"type": "object", "properties": leaves}

    outer = {f"p{number}": inner(number) for number in range(20)}
    schema = {"properties": outer, "$defs": {"long": {"enum": [["a"] * 10, "b" * 3000]}}}
    grammar = tool_grammar(MARKUPS["gemma"], ToolUse((Tool("f", None, schema),), must=True), {}.get)
    assert len(grammar) < 2 * len(json.dumps(schema))


def test_what_a_call_of_gemma_begins_with_is_forced(constraints):
    """Marks that a text may not have are no reason to ask the model for every token of a call."""
    made, own = constraints["gemma", True]
    free = Tool("find", None, {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]})
    grammar = tool_grammar(MARKUPS["gemma"], ToolUse((free,), must=True), made.get_added_vocab().get)
    constraint = own(grammar)()
    constraint.accept(made.convert_tokens_to_ids(GEMMA.opens))
    assert made.decode(constraint.forced()).startswith("call:find{x:")


def test_text_that_is_no_call_is_left_alone(constraints):
    (made, own), logits = constraints["hermes", False], torch.arange(352.0)
    grammar = tool_grammar(MARKUPS["hermes"], ToolUse((WEATHER,)), made.get_added_vocab().get)
    constraint = own.may_call(grammar, MARKUPS["hermes"].marks.opens, True)()
    for token_id in made.backend_tokenizer.encode("a <tool_ <tool_cal b tool_call>").ids:
        constraint.close(logits)
        constraint.mask(logits)
        assert torch.equal(logits, torch.arange(352.0)) and not constraint.forced()
        constraint.accept(token_id)


@pytest.mark.parametrize(
    ("markup", "models"), [("hermes", "qwen3_vl"), ("xml", "qwen3_5"), ("gemma", "gemma4")]
)
def test_transformers_reads_our_calls(constraints, markup, models):
    """Whose reader takes the space around a text for its own in Xml, and untyped values for texts."""
    made, own = constraints[markup, True]
    template = next(one for names, one in RESPONSE_TEMPLATES.items() if models in names)
    kinds = ("word", "boolean", "integer", "record", "some", "nested", "pattern")
    for seed in range(CALLS // 4):
        chance = random.Random(seed)
        properties = {kind: SCHEMAS[kind] for kind in chance.sample(kinds, 3)}
        tools = (Tool("f", None, record(False, **properties)), NOW)
        use = ToolUse(tools, must=True, several=False)
        ids, ended = babble(
            own(tool_grammar(markup_ := MARKUPS[markup], use, made.get_added_vocab().get))(), made, "", seed
        )
        (call,) = whole_calls(CallReader(markup_, tools).put(made.decode(ids), last=True)[1])
        prompt = "<|turn>model\n" if markup == "gemma" else "<|im_start|>assistant\n"
        said = made.parse_response(ids, template, prefix=prompt, tools=[tool.shown for tool in tools])
        (read,) = said["tool_calls"]
        ours = {
            name: one.strip() if isinstance(one, str) and markup == "xml" else one
            for name, one in json.loads(call.arguments).items()
        }
        assert ended and read["function"] == {"name": call.name, "arguments": ours}


# --------------------------------------------------------------------------------------------- the server
COLOURS = {"type": "string", "enum": ["red", "green", "blue", "yellow"]}
PAINT = {"name": "paint", "description": "Paint it.", "parameters": record(colour=COLOURS)}
MOVE = {"name": "move", "strict": True, "parameters": record(to=SCHEMAS["integer"], why=SCHEMAS["word"])}
TOOLS = [{"type": "function", "function": one} for one in (PAINT, MOVE)]
NAMED = {"type": "function", "function": {"name": "paint"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("tools")
    with several(FOLDER, *(save(root / one, one) for one in TEMPLATES), max_new_tokens=600) as server:
        yield server


def asked(model: str = NAME, **fields) -> dict:
    return {"model": model, "messages": [message(STAR, EXAMPLE)], "tools": TOOLS, "max_tokens": 300} | fields


def streamed(client: openai.OpenAI, **fields):
    """The message and reason of a stream, whose pieces must come as the protocol has them."""
    calls, text, reason = list[dict](), "", None
    for chunk in client.chat.completions.create(stream=True, **fields):
        (choice,) = chunk.choices
        text, reason = text + (choice.delta.content or ""), choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls) and call.function.name and not call.function.arguments
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            else:
                assert call.index == len(calls) - 1
                calls[-1]["arguments"] += call.function.arguments
    return text, calls, reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "choice"),
    [*((one, "required") for one in (NAME, *TEMPLATES)), (NAME, "named"), ("hermes", "allowed")],
)
def test_a_client_gets_the_calls_that_it_asks_for(served, model, choice):
    client = served.client()
    fields = asked(model, parallel_tool_calls=False, seed=3, temperature=1)
    fields["tool_choice"] = {"required": "required", "named": NAMED, "allowed": ALLOWED}[choice]
    answer = client.chat.completions.create(**fields)
    text, calls, reason = streamed(client, **fields)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == reason == "tool_calls"
    assert answer.choices[0].message.content is None and text == ""
    assert calls[0]["name"] == call.function.name and calls[0]["arguments"] == call.function.arguments
    assert call.id.startswith("call_") and call.id != calls[0]["id"] and len(calls) == 1
    tools = [Tool(one["name"], None, one["parameters"]) for one in (PAINT, MOVE)]
    assert fits(ToolCall(call.id, call.function.name, call.function.arguments), tools)
    assert choice == "required" or call.function.name == "paint"


def test_the_embedded_model_answers_as_without_tools(served):
    """Its prompts do not speak of them."""
    client = served.client()
    for choice in ("auto", "none"):
        message = client.chat.completions.create(**asked(tool_choice=choice)).choices[0].message
        assert message.content == "blue" and message.tool_calls is None


@pytest.mark.slow
@pytest.mark.parametrize("model", [NAME, *TEMPLATES])
def test_calls_and_results_are_sent_back(served, model):
    """With images, as content parts or text, in what follows a call."""
    client = served.client()
    first = client.chat.completions.create(**asked(model, tool_choice=NAMED, parallel_tool_calls=False))
    sent = first.choices[0].message.model_dump(exclude_none=True)
    called = sent["tool_calls"][0]["id"]
    texts = [{"type": "text", "text": "this is it"}]
    image = {"type": "image_url", "image_url": {"url": data_url(CUP)}}
    counts = []
    for content in ("this is it", texts, [*texts, image]):
        result = {"role": "tool", "tool_call_id": called, "content": content}
        talk = [*asked()["messages"], sent, result]
        answer = client.chat.completions.create(
            **asked(model, messages=talk, tool_choice="none", max_tokens=3)
        )
        counts.append(answer.usage.prompt_tokens)
    assert counts[0] == counts[1] < counts[2]


def test_an_answer_that_is_cut_says_so(served):
    """Its last call is not whole: a client that waits for all of the answer does not get it."""
    wanted = asked("hermes", tool_choice={"type": "function", "function": {"name": "move"}}, max_tokens=9)
    choice = served.client().chat.completions.create(**wanted).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert streamed(served.client(), **wanted)[2] == "length"


@pytest.mark.slow
def test_a_schema_for_the_answer_holds_beside_tools(served):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": record(n=SCHEMAS["integer"])}}
    for seed in range(6):
        wanted = asked("hermes", response_format=form, seed=seed, temperature=2, parallel_tool_calls=False)
        message = served.client().chat.completions.create(**wanted).choices[0].message
        assert message.tool_calls or json.loads(message.content).keys() == {"n"}
    choice = served.client().chat.completions.create(**asked(response_format=form)).choices[0]
    assert choice.message.tool_calls is None and json.loads(choice.message.content).keys() == {"n"}


def test_the_grammar_of_tools_is_not_written_where_everybody_waits(served, monkeypatch):
    """But in the thread in which grammars are compiled; and once."""
    written = []

    def write(*arguments) -> str:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        written.append(tool_grammar(*arguments))
        return written[-1]

    monkeypatch.setattr("inference.forms.tool_grammar", write)
    other = {"name": "other", "parameters": record(a={"enum": ["another"]})}
    wanted = asked("hermes", tools=[{"type": "function", "function": other}], tool_choice="required")
    answers = [served.client().chat.completions.create(**wanted, seed=1).choices[0] for _ in range(2)]
    assert answers[0].message.tool_calls and len(written) == 1


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("key", ["minLength", "maxItems", "minProperties"])
@pytest.mark.parametrize("value", ["0}", -1, 1.5, True])
def test_lengths_are_whole_numbers(served, key, value):
    schema = record(a={"type": "string", key: value})
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for fields, param in (
        ({"tools": [], "response_format": form}, "response_format"),
        ({"tools": [tool], "tool_choice": "required"}, "tools"),
    ):
        assert refused(served.send("POST", json=asked("xml") | fields), 400)["param"] == param
    named = record(**{key: {"enum": ["a"]}})  # a name is no keyword
    assert json_grammar(named) and json_grammar({"enum": [{key: value}]})


@pytest.mark.slow
def test_what_cannot_be_asked_for_is_refused(served):
    def function(**fields) -> list:
        return [{"type": "function", "function": {"name": "f"} | fields}]

    called = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}
    called["tool_calls"][0]["function"]["arguments"] = "[1"
    for param, fields in (
        ("tools", {"tools": TOOLS + TOOLS}),
        ("tools[0]", {"tools": function(name="a b")}),
        ("tools[0]", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
        ("tools", {"tools": function(parameters={"type": "object", "properties": {"a": {"type": "no"}}})}),
        ("tools[0]", {"tools": function(parameters={"type": "string"})}),
        ("tool_choice", {"tools": [], "tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "other"}}}),
        ("messages[0].tool_calls[0]", {"messages": [called]}),
        ("functions", {"functions": [PAINT]}),
    ):
        for stream in (False, True):
            error = refused(served.send("POST", json=asked("hermes", stream=stream) | fields), 400)
            assert error["param"] == param, error


@pytest.mark.slow
def test_thinking_stays_apart_from_calls(tmp_path):
    """Also before a call that must come."""
    folder, thoughts = save(tmp_path / "thinker", "xml"), ""
    begins = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}\n"
    template = TEMPLATES["xml"].rpartition("{%- if add_generation_prompt %}")[0] + begins
    (folder / "chat_template.jinja").write_text(template)
    with running(folder, max_new_tokens=600) as server:
        for seed in range(4):
            wanted = asked("thinker", tool_choice="required", parallel_tool_calls=False, seed=seed)
            wanted |= {"reasoning_effort": "low", "thinking_token_budget": 9, "temperature": 1}
            wanted |= {"messages": [{"role": "user", "content": STAR}]}
            answer = server.send("POST", json=wanted).json()
            (choice,), thought, sent = answer["choices"], "", ""
            for event in events(server.send("POST", json=wanted | {"stream": True})):
                delta = event["choices"][0]["delta"]
                thought += delta.get("reasoning_content", "")
                sent += "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["arguments"] == sent and json.loads(sent)
            assert choice["message"].get("reasoning_content", "") == thought
            assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
            thoughts += thought
    assert thoughts


def test_json_of_any_form(served):
    """Whose names and values are the model's own."""
    wanted = asked("hermes", tools=[], response_format={"type": "json_object"}, max_tokens=600, temperature=1)
    choices = served.client().chat.completions.create(**wanted, n=4, seed=5).choices
    texts = [choice.message.content for choice in choices if choice.finish_reason == "stop"]
    assert texts and all(isinstance(json.loads(text), dict) for text in texts)


# As the published one of Gemma 4 writes a turn with a call: the call, its result, then what is said with it.
RESULT_FIRST = """\
{{- bos_token }}
{%- set last = namespace(kind='') %}
{%- for message in messages if message.role != 'tool' %}
{%- set at = loop.index0 %}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- set last.kind = 'text' %}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call>call:' + call.function.name + '{}<tool_call|>' }}{% set last.kind = 'call' %}
{%- for answer in messages if answer.role == 'tool' and answer.tool_call_id == call.id %}
{{- '<|tool_response>response:' + call.function.name + '{value:<|"|>' + answer.content + '<|"|>}' }}
{{- '<tool_response|>' }}{% set last.kind = 'result' %}
{%- endfor %}
{%- endfor %}
{{- message.content }}
{{- '<turn|>\\n' if message.content or last.kind == 'text' }}
{%- endfor %}
{%- if add_generation_prompt and last.kind not in ('call', 'result') %}{{- '<|turn>model\\n' }}
{%- elif add_generation_prompt and enable_thinking and last.kind == 'result' %}{{- '<|channel>thought\\n' }}
{%- endif %}
{#- thoughts end in <channel|>; tools #}
"""


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("text", ["let me look", ""])
def test_a_prompt_ends_in_a_turn_of_the_model_after_any_result(think, text):
    """Where the template has closed the turn of the call, it is opened again; else it goes on."""
    made = tokenizer("gemma")
    chat = ChatEncoder(made, RESULT_FIRST, image_token=None, stop_token_ids=[made.eos_token_id])
    said_first = [
        said("user", "when?"),
        replace(said("assistant", text, ToolCall("1", "now", "{}")), as_text=True),
    ]
    talk = [*said_first, replace(said("tool", "noon", to="1"), as_text=True)]
    prompt = made.decode(chat.encode(talk, think=think).input_ids)
    ending = "<tool_response|>" + f"{text}<turn|>\n<|turn>model\n" * bool(text)
    assert prompt.endswith(ending + "<|channel>thought\n" * think)
    whole = chat.encode(talk, (), False)
    assert "<|turn>model\n" not in made.decode(whole.input_ids).partition("<|tool_call>")[2]
