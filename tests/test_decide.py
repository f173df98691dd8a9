"""Choices: the probability of each is what teacher forcing gives it, by every way to an answer, and what is
chosen is the likeliest as a whole."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import generation.score
from data.errors import PromptError
from generation.options import GenerationOptions, NotFiniteError
from generation.requests import Request, RequestOutput
from generation.scheduler import Scheduler
from generation.score import Choices
from inference.answer import ask, encode
from inference.checkpoint import open_checkpoint
from inference.conversation import Conversation
from inference.errors import RequestError
from inference.grammar import choice_grammar, read_choices
from inference.thinking import Think, held_to
from tests import invariants, qwen_checkpoints
from tests.invariants import details
from tests.processors import draw_image
from tests.prompts import inputs_of, tiny_vlm, words
from tests.test_qwen_vl import for_transformers
from tests.test_thinking import folders as folders

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "assets" / "example.png"
STOPS = (5, 3)
# One begins another, some begin alike, and they end by different tokens.
ANSWERS = ((7, 5), (7, 9, 5), (12, 20, 31, 3), (12, 20, 40, 41, 42, 3), (30, 5))
ENTRANCES = (
    *("cached", "left padding", "session", "three slots", "graph slots", "native padded", "native slots"),
    *("chunks session", "kept session", "kept native session"),
)


@torch.no_grad()
def forced(vlm, inputs: dict, answers=ANSWERS, stops=STOPS) -> list[float]:
    """The log-probability of each answer, from one pass over all of the prompt and it, without a cache."""
    found, prompt = [], inputs["input_ids"].shape[1]
    for ids in answers:
        said = torch.tensor([ids[:-1]])
        hidden, _ = vlm.hidden_states(**inputs | {"input_ids": torch.cat((inputs["input_ids"], said), 1)})
        logprobs = vlm.language_model.logits(hidden[0, prompt - 1 :]).double().log_softmax(-1)
        of_tokens = logprobs[range(len(ids) - 1), ids[:-1]].sum()
        found.append((of_tokens + logprobs[-1, list(stops)].logsumexp(-1)).item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entrance", "model"),
    [
        *((entrance, "placeholder") for entrance in ENTRANCES),
        *((entrance, model) for entrance in ("cached", "three slots") for model in invariants.MODELS),
    ],
)
def test_every_way_gives_the_probabilities_of_teacher_forcing(entrance, model, monkeypatch):
    monkeypatch.setattr(generation.score, "AHEAD_POSITIONS", 4)  # an answer or two at a time
    vlm, rows, *_ = invariants.case(model, "two answers, penalty")
    chosen = Choices(ANSWERS, STOPS)
    for more in ({}, {"temperature": 2.0, "seed": 4, "num_return_sequences": 2, "repetition_penalty": 1.5}):
        options = {"max_new_tokens": 6, "stop_token_ids": STOPS, "constraint": chosen, "confidence": True}
        got = iter(details(vlm, entrance, rows, **options | more))
        for row in rows:
            expected = forced(vlm, row)
            for _ in range(more.get("num_return_sequences", 1)):
                one = next(got)
                assert one.decision.logprobs == pytest.approx(expected, abs=2e-5)
                assert tuple(one.token_ids) == ANSWERS[one.decision.chosen]
                assert one.confidence == one.decision.probabilities[one.decision.chosen]
                assert more or one.decision.chosen == max(range(len(ANSWERS)), key=expected.__getitem__)


def logprob_of(logits: torch.Tensor, ids, stops) -> float:
    logprobs = logits.double().log_softmax(-1)  # (n, V)
    said = logprobs[range(len(ids) - 1), list(ids[:-1])].sum()
    return (said + logprobs[-1, list(stops)].logsumexp(-1)).item()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> tuple:
    folder = tmp_path_factory.mktemp("qwen")
    return qwen_checkpoints.save_hf("qwen3_vl", folder), open_checkpoint(folder, device="cpu")


TEXTS = ["red", "red square", "blue", "no", "none of\nthese, <|im_end|> says so"]


def test_probabilities_are_those_of_transformers_with_the_template(qwen):
    """Of the whole conversation, answer included, as the template writes it and the model learns it."""
    theirs, checkpoint = qwen
    image, question = draw_image(100, 60), "what colour?"
    options = GenerationOptions(constraint=checkpoint.forms.constraint(choice_grammar(TEXTS)))
    reply = ask(checkpoint, [image], question, options)
    result = reply.finish()
    messages = checkpoint.processor.conversation([image], question)
    prompt = len(encode(checkpoint, [image], question).input_ids)
    stops, expected = list(checkpoint.stop_token_ids), []
    for text in TEXTS:
        answer = {"role": "assistant", "content": [{"type": "text", "text": text}]}
        inputs = checkpoint.processor.prepare([*messages, answer], add_generation_prompt=False)
        ids = inputs["input_ids"][0].tolist()
        end = next(place for place in range(prompt, len(ids)) if ids[place] in stops)
        with torch.no_grad():
            logits = theirs(**for_transformers(inputs, checkpoint.model.config)).logits[0, prompt - 1 : end]
        expected.append(logprob_of(logits, ids[prompt : end + 1], stops))
    shares = torch.tensor(expected).softmax(0).tolist()
    assert result["probabilities"] == [pytest.approx(dict(zip(TEXTS, shares)), abs=1e-5)]
    assert result["probability_mass"] == [pytest.approx(sum(map(math.exp, expected)), rel=1e-4)]
    assert result["answers"] == [TEXTS[shares.index(max(shares))]]
    assert sum(result["probabilities"][0].values()) == pytest.approx(1, abs=1e-12)


def test_logits_that_are_not_finite_are_an_error():
    vlm, inputs = tiny_vlm(), inputs_of(words(1, 9))
    vlm.language_model.embed_tokens.weight.data[9] = math.nan  # seen while the answers are looked at
    with pytest.raises(NotFiniteError):
        vlm.generate(**inputs, constraint=Choices(((7, 5), (9, 5)), STOPS), stop_token_ids=STOPS)


def test_after_thinking_choices_are_looked_at_where_the_answer_begins(folders):
    checkpoint = open_checkpoint(folders["qwen3_5"], device="cpu")
    form, question = checkpoint.forms.constraint(choice_grammar(TEXTS[:4])), "how many circles are there?"
    options = held_to(GenerationOptions(constraint=Think(6), temperature=1.0, seed=3), form)
    reply = ask(checkpoint, [], question, options)
    result = reply.finish()
    thought = reply.ids[0][: result["thinking_tokens"][0]]
    inputs = {
        "input_ids": torch.tensor([[*encode(checkpoint, [], question, think=True).input_ids, *thought]])
    }
    logprobs = forced(checkpoint.model, inputs, form.constraint.answers, form.constraint.stop_ids)
    shares = dict(zip(TEXTS[:4], torch.tensor(logprobs).softmax(0).tolist()))
    assert result["probabilities"] == [pytest.approx(shares, abs=1e-5)] and result["answers"][0] in shares


@pytest.mark.parametrize("model", ["Qwen2.5-VL", "Qwen3.5"])
def test_choices_and_other_answers_side_by_side_are_as_alone(model, monkeypatch):
    monkeypatch.setattr(generation.score, "AHEAD_POSITIONS", 4)
    vlm, rows, *_ = invariants.case(model, "two answers, penalty")
    chosen = {"constraint": Choices(ANSWERS, STOPS), "stop_token_ids": STOPS, "max_new_tokens": 6}
    plain, chosen = GenerationOptions(max_new_tokens=25, stop_token_ids=()), GenerationOptions(**chosen)
    slots = Scheduler(vlm, slots=3, prefill_chunk=64)
    for key, options in enumerate((plain, chosen, chosen)):
        inputs = rows[key] | {"input_ids": rows[key]["input_ids"][0]}
        slots.add(Request(**inputs, options=options, key=key))
    outputs = {}
    while not slots.idle:
        for event in slots.step():
            outputs |= {event.key: event} if isinstance(event, RequestOutput) else {}
    alone = vlm.generate_detailed(**rows[0], options=plain)
    assert outputs[0].token_ids == alone.rows()[0]
    for key in (1, 2):
        assert outputs[key].decision.logprobs == pytest.approx(forced(vlm, rows[key]), abs=2e-5)


def test_a_conversation_goes_on_after_a_choice(qwen):
    _, checkpoint = qwen
    options = GenerationOptions(constraint=checkpoint.forms.constraint(choice_grammar(TEXTS[:4])))
    conversation = Conversation(checkpoint)
    first = conversation.send("what colour?", [draw_image(60, 60)], options).finish()
    second = conversation.send("what colour?", [], options).finish()
    assert second["answers"][0] in TEXTS and second["reused_tokens"] > first["prompt_tokens"]
    fresh = Conversation(checkpoint)
    fresh.turns = conversation.turns[:1]
    again = fresh.send("what colour?", [], options).finish()
    assert again["probabilities"][0] == pytest.approx(second["probabilities"][0], abs=1e-5)


# ------------------------------------------------------------------------------ what people give and get
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yes, no", ["yes", "no"]),
        ("1..5", ["1", "2", "3", "4", "5"]),
        ("-1..1", ["-1", "0", "1"]),
        ('["1..5", "a, b"]', ["1..5", "a, b"]),
        ("5..1", RequestError),
        ("0..1000", RequestError),
    ],
)
def test_choices_of_a_command_line(text, expected):
    if isinstance(expected, list):
        assert read_choices(text) == expected
    else:
        with pytest.raises(expected):
            read_choices(text)


def test_json_has_the_probability_of_each_choice(as_json, cli, photo):
    (made,) = as_json(photo, "how many?", "--choices", "1..5", "--max-new-tokens", 1)
    (shares,) = made["probabilities"]
    assert [*shares] == ["1", "2", "3", "4", "5"] and sum(shares.values()) == pytest.approx(1, abs=1e-12)
    assert made["answers"] == [max(shares, key=shares.get)] and made["stop_reasons"] == ["stop"]
    assert made["confidences"] == [max(shares.values())] and 0 < made["probability_mass"][0] < 1
    expected = sum(int(text) * share for text, share in shares.items())
    assert made["expected_value"] == [pytest.approx(expected)]
    (words,) = as_json(photo, "how many?", "--choices", "yes,no")
    assert [*words["probabilities"][0]] == ["yes", "no"] and "expected_value" not in words
    _, out, err = cli(photo, "how many?", "--choices", "yes,no", "--stats")
    assert out.strip() == words["answers"][0]
    assert all(f"{text} {share:.1%}" in err for text, share in words["probabilities"][0].items())
    (free,) = as_json(photo, "how many?", "--max-new-tokens", 2)
    assert "probabilities" not in free


PIECES = ["<|im_end|>", "<image>", "</s>", " ", "\n", "yes", "é", "e\u0301", "\u200b", "日", "\x07"]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(
        st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=4).map("".join), max_size=6
    )
)
def test_any_texts_are_refused_or_chosen_from(qwen, texts):
    """Whatever they hold: the answer is one of them, and each has what teacher forcing gives it."""
    _, checkpoint = qwen
    try:
        form = checkpoint.forms.constraint(choice_grammar(texts))
    except (RequestError, PromptError):
        return
    result = ask(checkpoint, [], "what?", GenerationOptions(constraint=form)).finish()
    (shares,) = result["probabilities"]
    assert [*shares] == texts and result["answers"][0] in texts
    inputs = {"input_ids": torch.tensor([encode(checkpoint, [], "what?").input_ids])}
    logprobs = forced(checkpoint.model, inputs, form.constraint.answers, form.constraint.stop_ids)
    assert [*shares.values()] == pytest.approx(torch.tensor(logprobs).softmax(0).tolist(), abs=1e-5)


def test_what_cannot_be_chosen_is_refused(complaint, photo, folders):
    """What the model would not be read as saying, and what its context has no room for."""
    checkpoint = open_checkpoint(folders["qwen3_5"], device="cpu")
    for texts in (["yes", "<think> no"], ["a\x00"], ["ab" * 1500, "b"]):
        with pytest.raises(RequestError):
            form = checkpoint.forms.constraint(choice_grammar(texts))
            ask(checkpoint, [], "what?", GenerationOptions(constraint=form, max_new_tokens=3))
    for wrong in ("", "a,a", "a,", '["a"', "9..0"):
        assert complaint(photo, "what?", "--choices", wrong)
    assert complaint(photo, "what?", "--choices", "yes,no", "--no-cache", "--compile", "off")
