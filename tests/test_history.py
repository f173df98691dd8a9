"""The prompt of a conversation's next question: begins as the cache does, typed text stays text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data.errors import PromptError
from data.processor import make_processor
from inference.conversation import PLACEHOLDER, TAIL, Answer, Turn, encode_next, messages_of
from tests.processors import KINDS, draw_image, embedded, processor
from tests.test_injection import special_ids

MULTI_TURN = [kind for kind in KINDS if kind != "nanovlm-v0.1"]


def turn_of(kind: str, question: str, images, answer_ids, before=(), chosen: int = 0) -> Turn:
    p = processor(kind)
    row = encode_next(p, p.stop_token_ids, None, before, images, question)
    return Turn(
        question, images, (Answer("?", tuple(answer_ids), "stop"),), tuple(row.input_ids[-TAIL:]), chosen
    )


def ids_of(kind: str, turns, images, question) -> list[int]:
    p = processor(kind)
    return encode_next(p, p.stop_token_ids, None, turns, images, question).input_ids


def odd_spelling(kind: str) -> list[int]:
    """ "two" in tokens that its tokenizer would not choose: a letter each."""
    tokenizer = processor(kind).tokenizer
    return [i for letter in "two" for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("kind", MULTI_TURN)
@pytest.mark.parametrize("stopped", [False, True])
def test_a_prompt_begins_with_the_last_one_and_its_answer(kind, stopped):
    tiled = processor(kind).tile(draw_image(40, 40))
    said = odd_spelling(kind)
    end = [] if stopped else [processor(kind).stop_token_ids[0]]
    first = turn_of(kind, "how many?", (tiled,), said + end)
    front = ids_of(kind, [], (tiled,), "how many?") + said
    second = turn_of(kind, "what colour?", (), said + end, before=[first])
    longer = ids_of(kind, [first], (), "what colour?")
    assert longer[: len(front)] == front
    assert ids_of(kind, [first, second], (), "and now?")[: len(longer) + len(said)] == longer + said


@pytest.mark.parametrize("kind", MULTI_TURN)
def test_an_answer_in_the_tokenizers_own_tokens_is_as_its_text(kind):
    p = processor(kind)
    tiled = p.tile(draw_image(40, 40))
    asked = p.conversation([tiled], "how many?")
    two = [*asked, {"role": "assistant", "content": "two red"}]
    whole = p.encode_conversation(two, False)
    said = [i for i, own in zip(whole.input_ids, whole.assistant_mask) if own]
    turn = turn_of(kind, "how many?", (tiled,), said)
    expected = p.encode_conversation([*two, *p.conversation([], "why?")], True)
    got = encode_next(p, p.stop_token_ids, None, [turn], (), "why?")
    assert (got.input_ids, got.assistant_mask) == (expected.input_ids, expected.assistant_mask)
    assert got.image_tokens == expected.image_tokens and torch.equal(got.tiles, expected.tiles)


@pytest.mark.parametrize("kind", MULTI_TURN)
def test_no_special_token_from_what_is_typed_or_answered(kind):
    p = processor(kind)
    names = [token.content for token in p.tokenizer.added_tokens_decoder.values() if token.special]
    hidden = [i for i, token in p.tokenizer.added_tokens_decoder.items() if token.special]
    said = odd_spelling(kind)
    plain = turn_of(kind, "how many?", (), said)
    expected = ids_of(kind, [plain], (), "why?")
    # A model may draw any id: what an answer's text does not show is not in the next prompt.
    noisy = replace(plain, answers=(Answer("?", (*hidden, *said, *hidden), "stopped"),))
    assert ids_of(kind, [noisy], (), "why?") == expected
    typed = turn_of(kind, f"how many? {' '.join(names)} {PLACEHOLDER}", (), said)
    got = ids_of(kind, [typed], (), f"why? {''.join(names)}")
    assert special_ids(kind, got) == special_ids(kind, expected) and len(got) > len(expected)


@pytest.mark.parametrize("answer", ["two", ""])
def test_a_template_that_writes_prompt_and_answer_apart(answer):
    """Its prompt ends in a space that an answer brings along: kept answers are their texts then."""
    template = embedded().chat.chat_template.replace("'Assistant:'", "'Assistant: '")
    assert template != embedded().chat.chat_template
    p = make_processor(embedded().tokenizer, image_size=32, image_seq_len=4, chat_template=template)
    row = encode_next(p, p.stop_token_ids, None, [], (), "how many?")
    turn = Turn("how many?", (), (Answer(answer, (70, 71), "stop"),), tuple(row.input_ids[-TAIL:]))
    expected = p.encode_conversation(
        messages_of(p, None, [turn], [answer]) + p.conversation([], "why?"), True
    )
    assert encode_next(p, p.stop_token_ids, None, [turn], (), "why?").input_ids == expected.input_ids


def test_a_model_for_one_question_says_so():
    first = turn_of("nanovlm-v0.1", "how many?", (draw_image(8, 8),), [70])
    with pytest.raises(PromptError, match="takes one image and one question"):
        ids_of("nanovlm-v0.1", [first], (), "why?")
