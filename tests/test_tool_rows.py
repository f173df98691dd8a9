"""Rows with calls, results and thoughts: learned as each family's chat template writes them, or counted."""

from __future__ import annotations

import copy
import json
import math
import re
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import json as arrow_json
from pyarrow import parquet

from data.chat import ChatEncoder
from data.errors import BadRow, DatasetError
from data.loader import asked
from data.packing import IGNORE_INDEX, Sample, SampleEncoder
from data.processor import Processor
from data.row_schemas import RowSchema
from data.sources import DatasetConfig, open_datasets
from data.tools import ToolCall
from eval.metrics import find_metric
from eval.rows import data_task
from generation.options import GenerationOptions
from models.vision_language_model import VisionLanguageModel
from tests.processors import processor
from tests.tool_checkpoints import TEMPLATES, save
from training.rows import RowsTask
from web import anthropic, responses
from web.guard import ApiLimits
from web.media import Media, prompt_of
from web.protocol import Refused, check_request

WEATHER = {  # with its keys in an order of its own
    "function": {
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
        "name": "get_weather",
        "description": "the weather of a city",
        "strict": True,
    },
    "type": "function",
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, NOW]


def call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": f"call_{number}", "function": {"name": name, "arguments": arguments}}


def calling(content: str, *calls: dict[str, Any], **about: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)} | about


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def answer(text: str, **about: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | about


MESSAGES = [
    {"role": "system", "content": "Be good."},
    {"role": "user", "content": "is it raining there?"},
    calling("let me look", call("get_weather", 1, city="a place", days=2)),
    result(1, "yes"),
    calling("", call("now", 2), call("get_weather", 3, city="größer", days=-1)),
    result(2, "noon"),
    result(3, "no"),
    answer("it is not"),
    {"role": "user", "content": "and here?"},
    calling("", call("now", 4)),
]
TURN = {"gemma": r"<\|turn>model\n(.*?(?:<\|tool_response>|<turn\|>|$))"}
CHATML = r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"


@pytest.fixture(scope="module")
def processors(tmp_path_factory) -> dict[str, Processor]:
    made, root = {}, tmp_path_factory.mktemp("tools")
    for name in TEMPLATES:
        folder = save(root / name, name)
        made[name] = Processor.from_pretrained(folder, VisionLanguageModel.from_pretrained(folder).config)
    return made


def sample_of(own: Processor, row: dict[str, Any], *columns: str) -> Sample:
    schema = RowSchema(columns or ("messages",))
    return SampleEncoder(own, 5000).encode(schema.conversation(row), ("rows", 0), schema.tools(row))


def learned(own: Processor, sample: Sample) -> str:
    """What is labelled, each run of tokens in brackets."""
    pairs = zip(sample.input_ids, sample.labels, strict=True)
    runs = groupby(pairs, lambda pair: pair[1] != IGNORE_INDEX)
    said = ([token for token, _ in run] for is_learned, run in runs if is_learned)
    return "".join(f"⟦{own.decode(ids, skip_special_tokens=False)}⟧" for ids in said)


def with_template(own: Processor, template: str) -> Processor:
    """The processor with another chat template."""
    made, image, stops = copy.copy(own), own.chat.image_token, own.stop_token_ids
    made.chat = ChatEncoder(own.tokenizer, template, image_token=image, stop_token_ids=stops)
    return made


def by_transformers(own: Processor, messages: list, tools: list | None = None, **options: Any) -> str:
    template = own.chat.chat_template
    options |= {"chat_template": template, "tokenize": False, "tools": tools}
    return own.tokenizer.apply_chat_template(messages, **options)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("markup", TEMPLATES)
@pytest.mark.parametrize("form", ["objects", "JSON", "functions"])
def test_calls_are_learned_as_the_template_writes_them(processors, markup, form):
    """With the end of their turn, and nothing that others say; arguments and tools may be JSON in a text."""
    own, row = processors[markup], {"messages": copy.deepcopy(MESSAGES), "tools": TOOLS}
    calls = [made for one in row["messages"] for made in one.get("tool_calls") or ()]
    if form == "JSON":
        row["tools"] = json.dumps(TOOLS)
        for made in calls:
            made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
    if form == "functions":
        for made in calls:
            made |= made.pop("function")
    expected = by_transformers(own, MESSAGES, TOOLS)
    sample = sample_of(own, row)
    assert sample.input_ids == own.tokenizer(expected, add_special_tokens=False).input_ids
    turns = re.findall(TURN.get(markup, CHATML), expected, re.DOTALL)
    assert len(turns) == 4 and learned(own, sample) == "".join(f"⟦{turn}⟧" for turn in turns)


def test_roles_of_llamafactory_are_calls_and_results(processors):
    """Of one call or several, also where nothing but the calls is learned."""
    spoken = [
        {"from": "human", "value": "is it raining?"},
        {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "a place"}}'},
        {"from": "observation", "value": "yes"},
        {"from": "function_call", "value": '[{"name": "now", "arguments": {}}, {"name": "now"}]'},
        {"from": "observation", "value": "noon"},
        {"from": "gpt", "value": "it is"},
    ]
    tools = [{"type": "function", "function": tool["function"]} for tool in TOOLS]
    functions = json.dumps([tool["function"] for tool in TOOLS])
    same = [
        {"role": "user", "content": "is it raining?"},
        calling("", call("get_weather", 1, city="a place")),
        result(1, "yes"),
        calling("", call("now", 2), call("now", 3)),
        result(3, "noon"),
        answer("it is"),
    ]
    for own in processors.values():
        row = {"conversations": spoken, "tools": functions}
        made, expected = (
            sample_of(own, given, column)
            for given, column in ((row, "conversations"), ({"messages": same, "tools": tools}, "messages"))
        )
        assert (made.input_ids, made.labels) == (expected.input_ids, expected.labels)
        assert learned(own, made).count("⟦") == 3


@pytest.mark.parametrize("markup", TEMPLATES)
def test_rows_of_a_table_and_of_lines_teach_the_same_calls(processors, tmp_path, markup):
    """Parquet gives each call the arguments of all, and each tool the keywords of all, with null in them."""
    weather = {"type": "function", "function": {**NOW["function"], **WEATHER["function"]}}
    weather["function"]["parameters"] = {"type": "object", **WEATHER["function"]["parameters"]}
    either = {"anyOf": [{"type": "array", "minItems": 1}, {"type": "object", "title": "one"}]}
    parameters = {"type": "object", "properties": {"among": either}}
    find = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    nested = call("find", 5, city="Rome", among=[{"a": 1}, {"b": {"c": 2}}])
    rows = [{"messages": MESSAGES, "tools": [weather, NOW]}]
    rows += [{"messages": [MESSAGES[1], calling("", nested)], "tools": [find, NOW]}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    parquet.write_table(arrow_json.read_json(tmp_path / "rows.jsonl"), tmp_path / "rows.parquet")
    table = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert table[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["days"] is None
    own = processors[markup]
    for row, line in zip(table, rows, strict=True):
        made, expected = sample_of(own, row), sample_of(own, line)
        assert (made.input_ids, made.labels) == (expected.input_ids, expected.labels)


def test_nulls_in_a_text_of_json_stay():
    tool = {"name": "find", "parameters": {"properties": {"city": {"default": None}}}}
    row = {"tools": json.dumps([tool]), "messages": [MESSAGES[1], calling("", call("find", 1))]}
    row["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"city": null}'
    schema = RowSchema(("messages",))
    assert schema.tools(row)[0].parameters == tool["parameters"]
    as_text = json.dumps([{"name": "find", "arguments": {"city": None}}])
    for calls in (row["messages"][1]["tool_calls"], as_text):
        row["messages"][1]["tool_calls"] = calls
        assert schema.conversation(row)[-1]["tool_calls"][0].arguments == '{"city": null}'


# As published templates write thoughts: after the last question in a block that prompts open, or that the
# model opens itself; in every answer; and between calls alone.
THOUGHT = "{%- set thoughts = message.reasoning_content | default('') | trim %}"
BLOCK = "{{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}"
THINKING = {
    "opened": (f"{THOUGHT}{BLOCK}", "<think>\\n", False),
    "own": (f"{THOUGHT}{{%- if thoughts %}}{BLOCK}{{%- endif %}}", "", True),
    "of calls": (f"{THOUGHT}{{%- if thoughts and message.tool_calls %}}{BLOCK}{{%- endif %}}", "", True),
}


@pytest.mark.parametrize("kind", THINKING)
@pytest.mark.parametrize("where", ["beside", "within"])
def test_thoughts_are_learned_where_the_template_writes_them(processors, kind, where):
    """As `reasoning_content`, and at the beginning of a text, as templates read it there themselves."""
    block, opened, marked = THINKING[kind]
    template = TEMPLATES["hermes"].replace(
        "{{- '<|im_start|>assistant\\n' + said(message) }}",
        "{{- '<|im_start|>assistant\\n' }}" + block + "{{- said(message) }}",
    )
    start = "'<|im_start|>assistant\\n'"
    template = template.replace(f"{start} }}}}{{% endif %}}", f"{start[:-1]}{opened}' }}}}{{% endif %}}")
    own = with_template(processors["hermes"], template)
    about = {"reasoning_content": "I need\nto look"}
    messages = [MESSAGES[1], calling("let me look", call("now", 1), **about), result(1, "noon")]
    messages += [answer("it is", reasoning_content="it is noon")]
    row = {"messages": copy.deepcopy(messages), "tools": TOOLS}
    if where == "within":
        for one in (row["messages"][1], row["messages"][3]):
            one["content"] = f"<think>\n{one.pop('reasoning_content')}\n</think>\n\n{one['content']}"
    expected, sample = by_transformers(own, messages, TOOLS), sample_of(own, row)
    assert sample.input_ids == own.tokenizer(expected, add_special_tokens=False).input_ids
    turns = re.findall(CHATML, expected, re.DOTALL)
    assert all("<think>" in turn for turn in turns[: 1 + (kind != "of calls")])
    said = "".join(f"⟦{turn if marked else turn.removeprefix('<think>' + chr(10))}⟧" for turn in turns)
    assert learned(own, sample) == said


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("tools", {"messages": [MESSAGES[1], answer("no")], "tools": TOOLS}),
        ("tool_calls", {"messages": [MESSAGES[1], calling("", call("now", 1))]}),
        ("tool's result", {"messages": [MESSAGES[1], result(1, "noon"), answer("no")]}),
        ("reasoning_content", {"messages": [MESSAGES[1], answer("no", reasoning_content="so")]}),
        ("reasoning_content", {"messages": [MESSAGES[1], answer("no", reasoning="so")]}),
        ("reasoning_content", {"messages": [MESSAGES[1], answer("no", thinking="so")]}),
    ],
)
def test_what_a_family_has_no_markup_for_is_a_bad_row_that_names_it(key, row):
    with pytest.raises(BadRow, match=key) as caught:
        sample_of(processor("embedded"), row)
    assert caught.value.reason == "bad conversation"


LOST = [
    ("tools", {"messages": [{"role": "system", "content": "so", "tools": TOOLS}, *MESSAGES[1:]]}),
    ("functions", {"messages": MESSAGES, "functions": TOOLS}),
    ("functions", {"messages": MESSAGES, "functions": json.dumps(TOOLS)}),
    ("tool_calls", {"messages": MESSAGES, "tool_calls": [call("now", 1)]}),
    ("tool_calls", {"messages": [MESSAGES[1] | {"tool_calls": [call("now", 1)]}, answer("no")]}),
    ("function_call", {"messages": [MESSAGES[1] | {"function_call": {"name": "now"}}, answer("no")]}),
    ("tools", {"question": "?", "answer": "no", "tools": TOOLS}),
    ("tool_calls", {"question": "?", "answer": "no", "tool_calls": json.dumps([call("now", 1)])}),
    ("tools", {"texts": [{"user": "?", "assistant": "no"}], "tools": TOOLS}),
]


@pytest.mark.parametrize(("key", "row"), LOST)
def test_tools_and_calls_where_none_are_read_are_named(key, row):
    names = ("question", "answer") if "question" in row else ("texts",) if "texts" in row else ("messages",)
    with pytest.raises(BadRow, match=key):
        RowSchema(names).conversation(row)


def test_columns_of_another_kind_may_have_such_names():
    row = {"question": "?", "answer": "no", "tools": "a saw", "functions": ["cuts"], "tool_calls": []}
    assert RowSchema(("question", "answer")).conversation(row)
    talk = {"messages": MESSAGES, "functions": TOOLS}
    schema = RowSchema(("messages",), {"tools": "functions"})
    assert schema.conversation(talk) and [one.name for one in schema.tools(talk)] == ["get_weather", "now"]


UNREAD = [  # calls whose arguments stand elsewhere, or are no JSON
    *({"function": {"name": "now", key: {"at": 7}}} for key in ("parameters", "input", "args")),
    *({"name": "now", key: {"at": 7}} for key in ("parameters", "input", "args")),
    *({"function": {"name": "now"}, key: {"at": 7}} for key in ("arguments", "parameters")),
    *(
        {"function": {"name": "now", "arguments": f'{{"at": [{number}]}}'}}
        for number in ("NaN", "Infinity", "-Infinity", "1e999")
    ),
    {"function": {"name": "now", "arguments": {"at": [math.nan]}}},
    {"function": {"name": "now", "arguments": {"at": math.inf}}},
]


@pytest.mark.parametrize("given", UNREAD, ids=str)
def test_calls_without_readable_arguments_are_refused(given):
    """By the rows and by the server."""
    with pytest.raises(ValueError, match="arguments"):
        ToolCall.read(given)
    talk = [{"role": "user", "content": "?"}, calling("", given), result(1, "noon")]
    with pytest.raises(Refused, match="tool_calls"):
        check_request({"model": "m", "messages": talk})


@pytest.mark.parametrize("more", [{}, {"id": "1", "type": "function", "index": 0}, {"arguments": None}])
def test_a_bare_name_is_a_call_without_arguments(more):
    assert ToolCall.read({"name": "now"} | more).arguments == "{}"
    assert ToolCall.read({"function": {"name": "now"}} | more).arguments == "{}"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": MESSAGES, "tools": "no JSON"},
        {"messages": MESSAGES, "tools": [{"description": "without a name"}]},
        {"messages": [MESSAGES[1], calling("", {"function": {"name": "now", "arguments": "{"}})]},
        {"messages": [MESSAGES[1], calling("", {"function": {"name": "now", "arguments": [1]}})]},
        {"messages": [MESSAGES[1], calling("", {"id": "call_1"})]},
        *({"messages": [MESSAGES[1], calling("", one)]} for one in UNREAD),
        {"messages": [MESSAGES[1], {"role": "function_call", "content": "now()"}]},
    ],
)
def test_calls_and_tools_of_another_form_are_bad_rows(processors, row):
    with pytest.raises(BadRow) as caught:
        sample_of(processors["hermes"], row)
    assert caught.value.reason == "bad conversation"


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("markup", TEMPLATES)
def test_nothing_typed_in_a_row_is_a_mark_and_the_labels_stay_in_place(processors, markup):
    own, marks = processors[markup], processors[markup].chat.marks.texts
    for mark in (*marks, "<|im_end|>", "<turn|>", "<|turn>model"):
        odd = call("get_weather", 1, city=f'say "{mark}"', days=[mark])
        plain = call("get_weather", 1, city='say "word"', days=["word"])
        talks = (
            [{"role": "user", "content": word}, calling(word, one), result(1, word), answer(f"so {word}")]
            for word, one in (("word", plain), (mark, odd))
        )
        expected, made = (sample_of(own, {"messages": talk, "tools": TOOLS}) for talk in talks)
        special = [token for token in made.input_ids if token in own.tokenizer.all_special_ids]
        assert special == [t for t in expected.input_ids if t in own.tokenizer.all_special_ids]
        assert learned(own, made) == learned(own, expected).replace("word", mark)


def test_of_two_calls_one_is_preferred_with_the_tools_in_the_prompt(processors):
    row = {"prompt": [MESSAGES[1]], "tools": TOOLS, "chosen": [calling("", call("now", 1))]}
    row |= {
        "chosen": [calling("", call("now", 1))],
        "rejected": [calling("", call("get_weather", 1, city="a"))],
    }
    own = processors["hermes"]
    schemas = [RowSchema(("prompt", "completion"), {"completion": side}) for side in ("chosen", "rejected")]
    given = [schema.conversation(row) for schema in schemas]
    pair = SampleEncoder(own, 5000).encode_answers(given, ("rows", 0), schemas[0].tools(row))
    assert "get_weather" in own.decode(pair.input_ids) and "get_weather" not in learned(own, pair)
    assert "get_weather" in learned(own, pair.others[0])


def test_runs_and_evaluations_score_answers_in_words_alone(tmp_path):
    """Both with the same answers: the others of a list are as good as the first."""
    words = [{"role": "user", "content": "and you?"}, answer("no")]
    talks = [words, [MESSAGES[1], calling("", call("now", 1))], MESSAGES]
    rows = [{"messages": talk, "tools": [], "images": []} for talk in talks]
    rows.append({"messages": words, "tools": TOOLS, "images": []})
    listed = [
        {"question": "how many?", "answer": ["two", "2", None, "a pair", " "]},
        {"question": "?", "answer": "a"},
    ]
    for given, targets in ((rows, [("no",)]), (listed, [("two", "2", "a pair"), ("a",)])):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
        entry = {"path": str(path), "allow_text_only": True}
        task = SimpleNamespace(held_out=open_datasets([entry]), processor=processor("embedded"))
        asked_in_run = RowsTask.questions(task, 9)
        assert sorted((one.target, *one.accept) for one in asked_in_run) == sorted(targets)
        if given is rows:  # an evaluation has no rows that it may pass over
            with pytest.raises(DatasetError, match=r"row 2: tools.*2 more"):
                data_task(DatasetConfig(**entry), find_metric("exact_match"))
        else:
            scored = data_task(DatasetConfig(**entry), find_metric("exact_match"))
            assert sorted(one.targets for one in scored.samples) == sorted(targets)


def test_rewards_refuse_a_call_as_the_answer_that_they_compare_with():
    talk = [{"role": "user", "content": [{"type": "text", "text": "?"}]}, calling("", call("now", 1))]
    with pytest.raises(BadRow, match="tool_calls"):
        asked(talk, {})


def test_thoughts_of_earlier_messages_reach_the_prompt_through_every_protocol(processors):
    """Where the template writes them; one without a place for them is asked as before."""
    thought, asks = "I need to look", "is it raining?"
    function = {"name": "now", "arguments": "{}"}
    of_chat = [
        {"role": "user", "content": asks},
        {
            "role": "assistant",
            "reasoning_content": thought,
            "tool_calls": [{"id": "1", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    renamed = copy.deepcopy(of_chat)
    renamed[1]["reasoning"] = renamed[1].pop("reasoning_content")
    of_responses = [
        {"role": "user", "content": asks},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": thought}], "summary": []},
        {"type": "function_call", "call_id": "1", **function},
        {"type": "function_call_output", "call_id": "1", "output": "noon"},
    ]
    of_messages = [
        {"role": "user", "content": asks},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": thought, "signature": ""},
                {"type": "tool_use", "id": "1", "name": "now", "input": {}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "noon"}]},
    ]
    bodies = (
        {"model": "m", "messages": of_chat},
        {"model": "m", "messages": renamed},
        responses.chat_body({"model": "m", "input": of_responses}),
        anthropic.chat_body({"model": "m", "max_tokens": 9, "messages": of_messages}),
    )
    block, *_ = THINKING["of calls"]
    start = "{{- '<|im_start|>assistant\\n' + said(message) }}"
    ours = start.replace(" + said(message)", "") + block + "{{- said(message) }}"
    template = TEMPLATES["hermes"].replace(start, ours)
    own = with_template(processors["hermes"], template)
    expected = [of_chat[0], of_chat[1] | {"content": "", "tool_calls": [call("now", 1)]}, of_chat[2]]
    text = by_transformers(own, expected, add_generation_prompt=True)
    assert thought in text
    for body in bodies:
        asked_for = check_request(body)
        checkpoint: Any = SimpleNamespace(processor=own, knows_tools=True)
        made, _ = prompt_of(asked_for, Media(ApiLimits()), [], GenerationOptions(), checkpoint)
        assert own.decode(made.input_ids, skip_special_tokens=False).startswith(text)
