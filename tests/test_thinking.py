"""Thinking before an answer: off unless asked for, kept apart, ended in time, and never counted as answer."""

from __future__ import annotations

import io
import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.cli.serving.utils import parse_assistant_message

from data.chat import ChatEncoder
from data.conversation import Message
from data.errors import ThinkingError
from eval.__main__ import main as eval_main
from eval.answers import records_of
from eval.metrics import find_metric
from eval.results import summarise
from eval.tasks import EvalSample, EvalTask
from generation.options import GenerationOptions
from generation.sampling import Row, choose
from generation.scheduler import Scheduler
from generation.steps import Step
from inference.answer import answers_of, ask, encode, read_answer
from inference.answer_text import AnswerText
from inference.checkpoint import Checkpoint, Fast, open_checkpoint
from inference.conversation import Conversation
from inference.errors import ContextFullError
from inference.forms import requests_for
from inference.grammar import choice_grammar
from inference.thinking import Think, for_prompt, held_to
from messages import for_terminal
from tests import gemma4_checkpoints, lfm2_checkpoints, qwen_checkpoints
from tests.servers import events, refused, several

# As published templates have it: always open, with a switch whose one side is an empty block, a switch that
# leaves the block to the model, no switch but an empty block, and nothing but the markers of earlier answers.
ENDINGS = {
    "open": "<|im_start|>assistant\\n<think>\\n",
    "switch": "<|im_start|>assistant\\n<think>\\n{% if not enable_thinking | default(false) %}"
    "{{- '\\n</think>\\n\\n' }}{% endif %}",
    "closed": "<|im_start|>assistant\\n{% if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    "empty": "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n",
    "own": "<|im_start|>assistant\\n{# </think> #}",
}
EMPTY = "<think>\n\n</think>\n\n"
QUESTION = "how many circles are there?"


def template(kind: str, plain: str = qwen_checkpoints.TEMPLATE) -> str:
    if not kind:
        return plain
    before, _ = plain.split("{%- if add_generation_prompt %}")
    ending = ENDINGS[kind].replace("\\n", "\n")
    return f"{before}{{%- if add_generation_prompt %}}{ending}{{% endif %}}\n"


def save(folder: Path, family: str, kind: str, markers: bool = True) -> Path:
    """A small random checkpoint whose template thinks in this way, `markers`: with tokens of their own."""
    if family == "gemma4":
        gemma4_checkpoints.save_hf(folder)
        (folder / "chat_template.jinja").write_text(gemma4_checkpoints.TEMPLATE + kind)
        return folder
    if family == "lfm2":
        lfm2_checkpoints.save_hf(folder)
        tokenizer, plain = lfm2_checkpoints.tokenizer(), lfm2_checkpoints.TEMPLATE
    else:
        qwen_checkpoints.save_hf({"qwen": "qwen3_vl"}.get(family, family), folder)
        tokenizer, plain = qwen_checkpoints.tokenizer(), qwen_checkpoints.TEMPLATE
    if markers:
        tokenizer.add_tokens(["<think>", "</think>"])  # as Qwen has them: no special ones
    assert len(tokenizer) <= 352
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template(kind, plain))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("thinking")
    return {
        "qwen": save(root / "qwen", "qwen", "open"),
        "qwen3_5": save(root / "qwen3_5", "qwen3_5", "switch"),
        "gemma4": save(root / "gemma4", "gemma4", "{# <channel|> #}"),
        "lfm2": save(root / "lfm2", "lfm2", "own", markers=False),
        "plain": save(root / "plain", "qwen", "", markers=False),
    }


@pytest.fixture(scope="module", params=["qwen", "qwen3_5", "gemma4", "lfm2"])
def checkpoint(request, folders) -> Checkpoint:
    """Markers of one token, and of several; caches that go back anywhere, and others."""
    return open_checkpoint(folders[request.param], device="cpu")


@pytest.fixture(scope="module")
def opened(folders) -> dict[str, Checkpoint]:
    return {name: open_checkpoint(folder, device="cpu") for name, folder in folders.items()}


def ids_of(checkpoint: Checkpoint, text: str) -> list[int]:
    return checkpoint.processor.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


class Scripted(Step):
    """Says what `say` gives for the tokens since the prompt, of a single row."""

    def __init__(self, language_model, say):
        super().__init__(language_model)
        self.say, self.vocab, self.fed = say, language_model.config.vocab_size, []

    def _logits(self) -> torch.Tensor:
        logits = torch.zeros(self.vocab)
        logits[self.say(self.fed)] = 9.0
        return logits

    def prefill(self, embeddings, lengths, kv_cache, start_pos=0, places=None):
        self.fed = []
        super().prefill(embeddings, lengths, kv_cache, start_pos, places)
        return self._logits()[None]

    def chunk(self, token_ids, kv_cache, start_pos, offset=0):
        logits, made = super().chunk(token_ids, kv_cache, start_pos, offset), []
        if len(token_ids) > 1:  # choices that are looked at
            return logits
        for token_id in token_ids[0].tolist():
            self.fed = [*self.fed, token_id]
            made.append(self._logits())
        return torch.stack(made)[None]


def saying(checkpoint: Checkpoint, *texts: str) -> Checkpoint:
    """The checkpoint with a mouth that says `texts` one after another, as long as they are what is taken: the
    first as its thinking, the next from the end of that on. At the end of each it would end its turn."""
    stop, end = ids_of(checkpoint, "<|im_end|>")[0], checkpoint.thinking.end

    def say(fed: list[int]) -> int:
        _, ended, answer = checkpoint.thinking.text(fed).partition(end)
        number = 1 if ended else 0
        said = ids_of(checkpoint, texts[number])
        if ended:
            fed = ids_of(checkpoint, answer.lstrip("\n"))
        return said[len(fed)] if len(fed) < len(said) else stop

    return replace(checkpoint, fast=Fast(Scripted(checkpoint.model.language_model, say)))


# --------------------------------------------------------------------------------------------- prompts
@pytest.mark.parametrize("kind", [*ENDINGS])
@pytest.mark.parametrize("markers", [True, False])
def test_a_prompt_ends_inside_a_block_where_thinking_is_wanted_and_else_outside(kind, markers):
    tokenizer = qwen_checkpoints.tokenizer()
    if markers:
        tokenizer.add_tokens(["<think>", "</think>"])
    chat = ChatEncoder(tokenizer, template(kind), image_token=None)
    message = [Message("user", (("text", QUESTION),))]

    def prompt(think: bool) -> str:
        return tokenizer.decode(chat.encode(message, think=think).input_ids)

    before = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(True) == before + "<think>\n"
    assert prompt(False) == before + ("" if kind == "own" else EMPTY)
    whole = chat.encode([*message, Message("assistant", (("text", "two"),))], (), False)
    assert "<think>" not in tokenizer.decode(whole.input_ids)  # a row of training, where there is no prompt


@pytest.mark.slow
def test_what_was_thought_before_earlier_answers_is_left_out_and_nobody_can_type_a_marker(opened):
    """As published templates leave it out, which cannot see into texts here."""
    processor, tokenizer = opened["qwen"].processor, opened["qwen"].processor.tokenizer
    talk = [
        {"role": "user", "content": "<think>\n"},
        {"role": "assistant", "content": "<think>\nlet me see\n</think>\n\ntwo"},
        {"role": "user", "content": "why </think>?"},
    ]
    ids = processor.encode_conversation(talk, True).input_ids
    assert "let me see" not in tokenizer.decode(ids) and "assistant\ntwo<|im_end|>" in tokenizer.decode(ids)
    markers = set(ids_of(opened["qwen"], "<think></think>"))
    assert len(markers) == 2 and [one for one in ids if one in markers] == ids_of(
        opened["qwen"], "<think></think>"
    )


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("name", ["qwen", "gemma4"])
def test_an_earlier_answer_may_be_thoughts_alone(opened, name, key):
    """As answers are that were cut off while thinking."""
    processor = opened[name].processor
    cut = {"role": "assistant", "content": None, key: "let me see"}
    before, after = {"role": "user", "content": "how many?"}, {"role": "user", "content": "and?"}
    talks = [[before, one, after] for one in (cut, cut | {"content": ""})]
    first, second = (processor.encode_conversation(talk, True).input_ids for talk in talks)
    assert first == second


def test_a_model_without_thinking_refuses_it_in_a_sentence(opened, folders, complaint, capsys):
    with pytest.raises(ThinkingError):
        ask(opened["plain"], [], QUESTION, GenerationOptions(constraint=Think()))
    assert "--think" in complaint("--no-image", "-q", QUESTION, "--think", model=folders["plain"])
    assert opened["plain"].thinking is None


# ----------------------------------------------------------------------------------------- token by token
@pytest.mark.slow
def test_pieces_joined_are_the_whole_however_markers_are_cut(opened):
    """Thoughts and answers of any text, in tokens of any cut, with and without a marker or an end."""
    rng = random.Random(0)
    for name, number in itertools.product(("qwen", "lfm2"), range(150)):
        checkpoint = opened[name]
        thinking, words = (
            checkpoint.thinking,
            ["two", " circles", "<", "</", "think", ">", "\n", "é", " "],
        )
        thought, answer = ("".join(rng.choices(words, k=rng.randint(0, 9))) for _ in range(2))
        if "</think>" in thought + answer or "<think>" in thought + answer:
            continue
        asked, ended = rng.random() < 0.6, rng.random() < 0.8
        text = thought + (f"</think>\n\n{answer}" if ended else "")
        ids = ids_of(checkpoint, ("" if asked else " <think>") + text)
        if rng.random() < 0.5 and len(thinking.end_ids) > 1:  # a character at a time
            ids = [
                one
                for character in ("" if asked else "<think>") + text
                for one in ids_of(checkpoint, character)
            ]
        if rng.random() < 0.5:
            ids = [*ids, checkpoint.stop_token_ids[0]]
        options = GenerationOptions(constraint=Think() if asked else None)
        reader, thoughts, said = AnswerText(checkpoint, options), list[str](), list[str]()
        for token_id in ids:
            said.append(reader.put(token_id))
            thoughts.append(reader.thought())
        said.append(reader.finish())
        thoughts.append(reader.thought())
        assert "".join(thoughts) == thought.strip(), (name, number)
        assert "".join(said).rstrip() == answer.strip() * ended == read_answer(checkpoint, ids, options)[1]
        row = encode(checkpoint, [], QUESTION)
        result = answers_of(checkpoint, row, [ids], options)
        assert result["thinking"] == ["".join(thoughts)] and result["answers"] == [answer.strip() * ended]
        assert len(result["token_ids"][0]) + result["thinking_tokens"][0] == len(ids)
        own = checkpoint.processor.tokenizer.decode(result["token_ids"][0], skip_special_tokens=True)
        assert own.strip() == answer.strip() * ended


def test_gemma_thinks_between_markers_of_its_own(opened):
    checkpoint = opened["gemma4"]
    decode = checkpoint.processor.tokenizer.decode
    asked, plain = (
        decode(encode(checkpoint, [], QUESTION, think=think).input_ids) for think in (True, False)
    )
    assert asked == plain + "<|channel>thought\n" and plain.endswith("<|turn>model\n")
    for think in (True, False):
        text = ("" if think else "<|channel>thought\n") + "let me see\n<channel|>two circles<turn|>"
        options = GenerationOptions(constraint=Think() if think else None)
        result = answers_of(checkpoint, encode(checkpoint, [], "?"), [ids_of(checkpoint, text)], options)
        assert (result["thinking"], result["answers"]) == (["let me see"], ["two circles"])


def test_thinking_and_answer_are_those_that_transformers_serve_reads(opened):
    """From the same tokens, after a prompt that has opened the block, and after one that has not."""
    checkpoint, rng = opened["qwen"], random.Random(1)
    of_theirs = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_vl"))
    processor = SimpleNamespace(tokenizer=qwen_checkpoints.tokenizer())
    processor.tokenizer.add_tokens(["<think>", "</think>"])
    for think in (True, False) * 20:
        words = rng.choices(["two", " circles", "<b>", "\n", "é", " ", "."], k=12)
        thought, answer = "".join(words[:6]), "".join(words[6:])
        if not (thought.strip() and answer.strip()):
            continue
        text = f"{'' if think else '<think>'}{thought}</think>\n\n{answer}<|im_end|>"
        ids, options = ids_of(checkpoint, text), GenerationOptions(constraint=Think() if think else None)
        row = encode(checkpoint, [], QUESTION, think=think)
        before = row.input_ids if think else row.input_ids[: -len(ids_of(checkpoint, EMPTY))]
        content, reasoning, _ = parse_assistant_message(processor, of_theirs, ids, before)
        result = answers_of(checkpoint, row, [ids], options)
        assert (result["answers"], result["thinking"]) == ([content.strip()], [reasoning.strip()])


def test_an_answer_that_speaks_of_markers_is_an_answer(opened):
    for name in ("qwen", "lfm2"):
        for text in ("the tag <think> opens, </think> ends", "<b>two</b>", "<thin> ice"):
            assert read_answer(opened[name], ids_of(opened[name], text), GenerationOptions())[1] == text


UNASKED = {  # of a model that thinks where nobody asked for it: what was thought, and the answer
    "BEGIN\na\nEND\n\nBEGINbEND\n\ntwo": ("ab", "two"),
    "\n BEGINaENDtwo": ("a", "two"),
    "BEGINno end": ("no end", ""),
    "two < three </thin": ("", "two < three </thin"),
}


@pytest.mark.parametrize("said", UNASKED)
def test_thoughts_that_nobody_asked_for_are_in_no_answer(checkpoint, said):
    thinking = checkpoint.thinking
    ids = ids_of(checkpoint, said.replace("BEGIN", thinking.begin).replace("END", thinking.end))
    thought, answer = UNASKED[said]
    result = answers_of(checkpoint, encode(checkpoint, [], QUESTION), [ids], GenerationOptions())
    assert result["answers"] == [answer] and result.get("thinking", [""]) == [thought]
    whole = checkpoint.processor.tokenizer.decode(result["token_ids"][0], skip_special_tokens=True)
    assert whole.strip() == answer
    text = AnswerText(checkpoint, GenerationOptions())
    streamed = "".join(map(text.put, ids)) + text.finish()
    assert streamed.strip() == answer


# ------------------------------------------------------------------------------------------------- answers
@pytest.mark.slow
def test_an_answer_is_the_same_alone_in_company_and_by_the_compiled_step(checkpoint):
    """And takes both limits' tokens at most; where it was cut is said."""
    options = GenerationOptions(max_new_tokens=9, constraint=Think(14), seed=3, temperature=0.9)
    alone = ask(checkpoint, [], QUESTION, options).finish()
    assert 0 < alone["thinking_tokens"][0] <= 14 + len(checkpoint.thinking.close_ids)
    assert len(alone["token_ids"][0]) == 9 or alone["stop_reasons"] == ["stop"]
    reply, heard = ask(checkpoint, [], QUESTION, options), list[str]()
    reply.hear = lambda number, piece: heard.append(piece)
    assert "".join(piece for _, piece in reply).rstrip() == alone["answers"][0]
    assert "".join(heard) == alone["thinking"][0]
    row = encode(checkpoint, [], QUESTION, think=True)
    scheduler = Scheduler(checkpoint.model, slots=3, prefill_chunk=5)
    plain = encode(checkpoint, [], "what colour?")
    requests = [
        *requests_for(checkpoint, row, 9, replace(options, num_return_sequences=2)),
        *requests_for(checkpoint, plain, 30, GenerationOptions()),
    ]
    outputs = {out.key: out for out in scheduler.run(replace(one, key=n) for n, one in enumerate(requests))}
    result = answers_of(checkpoint, row, [outputs[0].token_ids], options)
    assert {name: alone[name] for name in result} == result
    fast = ask(checkpoint.compiled(), [], QUESTION, options).finish()
    assert fast["token_ids"] == alone["token_ids"] and fast["thinking"] == alone["thinking"]


@pytest.mark.slow
def test_a_model_that_ends_its_thinking_by_itself_answers_at_once(opened):
    """And one that would end its turn there answers, too; what it is held to begins with the answer."""
    for name in ("qwen", "lfm2"):
        for thought in ("let me see</think>", "let me see"):
            model = saying(opened[name], thought, "two circles")
            options = GenerationOptions(max_new_tokens=30, constraint=Think(50), logprobs=0)
            result = ask(model, [], QUESTION, options).finish()
            assert (result["thinking"], result["answers"]) == (["let me see"], ["two circles"]), thought
            assert result["stop_reasons"] == ["stop"] and 0 < result["thinking_tokens"][0] < 50
            assert len(result["logprobs"][0]) == len(result["token_ids"][0])
            held = held_to(options, model.forms.constraint(choice_grammar(["none", "three"])))
            result = ask(model, [], QUESTION, held).finish()
            assert result["thinking"] == ["let me see"] and result["answers"][0] in ("none", "three")


def test_the_context_leaves_the_thinking_what_the_answer_leaves(checkpoint):
    """In Python, where it would be refused otherwise, and in a conversation."""
    room = checkpoint.context - len(encode(checkpoint, [], QUESTION, think=True).input_ids)
    closing = len(checkpoint.thinking.close_ids)
    for answer in (room // 4, room - closing - 3, room):
        options = GenerationOptions(max_new_tokens=answer, constraint=Think(10**6))
        bound = for_prompt(checkpoint, encode(checkpoint, [], QUESTION, think=True), options)
        tokens = max(room - answer, room // 2) - closing
        assert bound.max_new_tokens == room and bound.constraint.tokens == tokens
    chosen = replace(checkpoint.forms.constraint(choice_grammar(["none"])), tokens=room - closing - 3)
    options = replace(options, max_new_tokens=chosen.tokens, constraint=Think(10**6, chosen))
    bound = for_prompt(checkpoint, encode(checkpoint, [], QUESTION, think=True), options)
    assert bound.constraint.tokens == 3, "a choice that is cut is none"
    longer = replace(options, max_new_tokens=room - closing + 1)
    with pytest.raises(ContextFullError):
        for_prompt(checkpoint, encode(checkpoint, [], QUESTION, think=True), longer)


def ctrl_c(number: int, piece: str) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_conversation_goes_on_from_answers_without_their_thinking(checkpoint):
    conversation = Conversation(checkpoint)
    options = GenerationOptions(max_new_tokens=6, constraint=Think(8))
    first = conversation.send(QUESTION, options=options).finish()
    assert conversation.turns[0].answer == first["answers"][0] and first["thinking"][0]
    talk = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first["answers"][0]},
        {"role": "user", "content": "why?"},
    ]
    row = checkpoint.processor.encode_conversation(talk, True, think=True)
    reply = conversation.send("why?", options=options)
    again = reply.finish()
    assert reply.row.input_ids == row.input_ids
    assert again["prefilled_tokens"] + again["reused_tokens"] == len(row.input_ids)
    alone = (
        Conversation(checkpoint).send("what colour?", options=GenerationOptions(max_new_tokens=6)).finish()
    )
    conversation.reset()
    off = conversation.send("what colour?", options=GenerationOptions(max_new_tokens=6)).finish()
    assert off["token_ids"] == alone["token_ids"] and "thinking" not in off


def test_an_empty_answer_after_thinking_is_as_likely_as_its_end(checkpoint):
    """Not certain, or it would be picked before every other."""
    options = GenerationOptions(max_new_tokens=9, confidence=True, stop_token_ids=checkpoint.stop_token_ids)
    row = encode(checkpoint, [], QUESTION, think=True)
    options = for_prompt(checkpoint, row, replace(options, constraint=Think(0)))
    one = Row(options, torch.tensor(row.input_ids))
    while not one.stop_reason:
        logits = torch.zeros(1, checkpoint.model.config.text.vocab_size)
        logits[0, checkpoint.stop_token_ids[0]] = 1
        choose([one], logits).read()
    assert one.tokens == [*checkpoint.thinking.close_ids, checkpoint.stop_token_ids[0]]
    assert one.confidence < 0.5


# ------------------------------------------------------------------------------------------------- the doors
THINK = ("--no-image", "-q", QUESTION, "--max-new-tokens", 6, "--think", "--think-tokens", 9)


@pytest.mark.slow
def test_the_command_line_shows_thinking_apart(cli, as_json, opened, folders):
    for name in ("qwen", "lfm2"):
        options = GenerationOptions(max_new_tokens=6, constraint=Think(9), confidence=True)
        expected = ask(opened[name], [], QUESTION, options).finish()
        status, out, err = cli(*THINK, model=folders[name])
        (thought,), (answer,) = expected["thinking"], expected["answers"]
        assert status == 0 and out.rstrip("\n") == for_terminal(answer)
        assert f"[thinking] {for_terminal(thought)}" in err
        (result,) = as_json(*THINK, model=folders[name])
        for field in ("thinking", "thinking_tokens", "answers", "token_ids", "stop_reasons"):
            assert result[field] == expected[field]
        several = (*THINK, "--num-answers", 2, "--temperature", 1, "--seed", 4)
        (result,) = as_json(*several, model=folders[name])
        status, out, err = cli(*several, model=folders[name])
        numbered = (f"{number}. {one}\n" for number, one in enumerate(result["answers"], 1))
        assert out == for_terminal("".join(numbered))
        assert all(for_terminal(one) in err for one in result["thinking"])
    (result,) = as_json(*THINK[:5], model=folders["qwen"])
    assert "thinking" not in result


@pytest.mark.slow
def test_a_chat_switches_it_and_a_batch_keeps_it_apart(cli, opened, folders, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{QUESTION}\n/think on\n{QUESTION}\n/think off\n/quit\n"))
    flags = ("--max-new-tokens", 6, "--no-image", "--compile", "off")
    status, out, err = cli("chat", *flags, "--think-tokens", 3, "--stats", model=folders["qwen"])
    assert status == 0 and err.count("[thinking] ") == 1 and "[thinking]" not in out
    limit = 3 + len(opened["qwen"].thinking.close_ids)
    assert 0 < int(re.search(r"(\d+) tokens of thinking", err)[1]) <= limit
    monkeypatch.setattr("sys.stdin", io.StringIO("/think on\n"))
    status, _, err = cli("chat", *flags, model=folders["plain"])
    assert status == 2 and "thinking" in err
    questions, results = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    line = {"question": QUESTION, "image": None}
    questions.write_text(
        "".join(json.dumps(line | more) + "\n" for more in ({}, {"choices": ["one", "two"]}))
    )
    batch = ("batch", questions, "--out", results, *THINK[3:], "--compile", "off")
    status, _, err = cli(*batch, model=folders["qwen"])
    plain, chosen = map(json.loads, results.read_text().splitlines())
    assert (
        status == 0
        and plain["thinking"][0]
        and chosen["thinking"][0]
        and chosen["answers"][0] in ("one", "two")
    )
    options = GenerationOptions(max_new_tokens=6, constraint=Think(9))
    expected = ask(opened["qwen"], [], QUESTION, options).finish()
    assert (plain["answers"], plain["thinking"]) == (expected["answers"], expected["thinking"])
    assert cli(*batch[:-4], *batch[-2:], model=folders["qwen"])[0] == 2  # another run: without a budget


@pytest.mark.slow
def test_metrics_see_the_answer_alone(opened, capsys):
    """Also of a model that thinks without being asked to."""
    for name, think in itertools.product(("qwen", "lfm2"), (None, 50)):
        model = saying(opened[name], "<think>" * (think is None) + "one, or so\n</think>", "two circles")
        sample = EvalSample("a", QUESTION, QUESTION, ("two circles",), list, "a", 60)
        task = EvalTask("a", [sample], find_metric("exact_match"), "", {}, think=think)
        (record,) = records_of(model, task, [sample], 1, [[0]])
        assert record["answer"] == "two circles" and record["tokens"] == len(ids_of(model, "two circles")) + 1
        assert record["score"] == 1 and record["thinking"].strip() == "one, or so"
        assert record["thinking_tokens"] >= len(ids_of(model, "one, or so"))
        assert record["stop_reason"] == record["thinking_stop_reason"] == "stop"
    assert eval_main(["--tasks", "shapes", "--limit", "1", "--think"]) == 2  # of the embedded model
    assert "thinking" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen", "lfm2"])
def test_thinking_that_is_ended_by_force_is_counted(opened, name):
    """But not that which ends by itself with the last token that it may have."""
    model = saying(opened[name], "one or two\n</think>", "two circles")
    whole = len(ids_of(model, "one or two\n</think>"))
    sample = EvalSample("a", QUESTION, QUESTION, ("two circles",), list, "a", 60)
    for think, reason in (
        (0, "length"),
        (1, "length"),
        (whole - 1, "length"),
        (whole, "stop"),
        (1000, "stop"),
    ):
        task = EvalTask("a", [sample], find_metric("exact_match"), "", {}, think=think)
        (record,) = records_of(model, task, [sample], 1, [[0]])
        assert record["thinking_stop_reason"] == reason and record["stop_reason"] == "stop", think
        assert summarise(task, {"a": record})["thinking_stop_reasons"] == {reason: 1}


@pytest.fixture(scope="module")
def served(folders):
    with several(folders["qwen"], folders["plain"]) as server:
        yield server


def asked(**fields) -> dict:
    return {"model": "qwen", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6} | fields


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_program_gets_thinking_beside_the_answer(served, opened, stream):
    options = GenerationOptions(max_new_tokens=6, constraint=Think(9), num_return_sequences=2)
    expected = ask(opened["qwen"], [], QUESTION, options).finish()
    wanted = asked(reasoning_effort="low", thinking_token_budget=9, n=2, logprobs=True, stop=["\n\n\n"])
    wanted |= {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    answer = served.send("POST", json=wanted)
    texts, thoughts, tokens = ["", ""], ["", ""], ["", ""]
    if stream:
        told = events(answer)
        usage = told[-1]["usage"]
        for choice in (choice for event in told for choice in event["choices"]):
            index, delta = choice["index"], choice["delta"]
            assert not (delta.get("content") and delta.get("reasoning_content"))
            assert not (texts[index] and delta.get("reasoning_content"))
            texts[index] += delta.get("content") or ""
            thoughts[index] += delta.get("reasoning_content") or ""
            tokens[index] += "".join(
                one["token"] for one in (choice["logprobs"] or {"content": []})["content"]
            )
    else:
        usage = answer.json()["usage"]
        for choice in answer.json()["choices"]:
            index, message = choice["index"], choice["message"]
            texts[index], thoughts[index] = message["content"], message["reasoning_content"]
            tokens[index] = "".join(one["token"] for one in choice["logprobs"]["content"])
    assert [text.rstrip() for text in texts] == expected["answers"] and thoughts == expected["thinking"]
    assert all(text.strip() in token for text, token in zip(texts, tokens))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": sum(expected["thinking_tokens"])}
    assert usage["completion_tokens"] == sum(expected["thinking_tokens"]) + sum(
        map(len, expected["token_ids"])
    )


@pytest.mark.slow
def test_who_does_not_ask_for_thinking_or_cannot_have_it(served):
    for fields in ({}, {"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer = served.send("POST", json=asked(**fields)).json()
        assert "reasoning_content" not in answer["choices"][0]["message"]
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    for param, fields in {
        "reasoning_effort": {"reasoning_effort": "minimal"},
        "chat_template_kwargs.enable_thinking": {"chat_template_kwargs": {"enable_thinking": True}},
        "thinking_token_budget": {},
    }.items():
        fields |= {"thinking_token_budget": 5}
        assert served.send("POST", json=asked(**fields)).json()["choices"][0]["message"]["reasoning_content"]
        for more in ({}, {"stream": True}):
            error = refused(served.send("POST", json=asked(model="plain", **fields, **more)), 400)
            assert error["param"] == param and param in error["message"]
    assert (
        refused(served.send("POST", json=asked(reasoning_effort="much")), 400)["param"] == "reasoning_effort"
    )
    answer = served.send("POST", json=asked(thinking_token_budget=0)).json()["choices"][0]["message"]
    assert not answer.get("reasoning_content")
    assert served.send("POST", json=asked(reasoning_effort="low", thinking_token_budget=10**9)).is_success


def test_a_stop_string_in_the_thinking_ends_nothing_and_history_comes_back_without_it(served, opened):
    options = GenerationOptions(max_new_tokens=6, constraint=Think(9))
    (thought,) = ask(opened["qwen"], [], QUESTION, options).finish()["thinking"]
    stop = next(one for one in map("".join, itertools.pairwise(thought)) if one.strip() == one)
    wanted = asked(reasoning_effort="low", thinking_token_budget=9)
    client = served.client()
    first = client.chat.completions.create(**asked(), reasoning_effort="low", stop=[stop],
                                           extra_body={"thinking_token_budget": 9})  # fmt: skip
    message = first.choices[0].message
    assert message.reasoning_content == thought and first.usage.completion_tokens_details.reasoning_tokens
    prompts = []
    for said in (message.model_dump(), {"role": "assistant", "content": message.content or "."}):
        said |= {"content": said["content"] or "."}
        talk = [*wanted["messages"], said, {"role": "user", "content": "why?"}]
        answer = served.send("POST", json=wanted | {"messages": talk}).json()
        prompts.append(answer["usage"]["prompt_tokens"])
    assert prompts[0] == prompts[1]
