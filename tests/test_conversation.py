"""`Conversation`: what is kept of each turn, what a later one costs, and what an error leaves."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread

import pytest
import torch

import generate
from data.errors import ImageError, PromptError
from data.processor import make_processor
from generation.decoding import GenerationOptions
from generation.sampling import NotFiniteError, Sampler
from inference.checkpoint import RequestError, open_checkpoint
from inference.conversation import (
    PLACEHOLDER,
    TAIL,
    Answer,
    ContextFullError,
    Conversation,
    Turn,
    encode_next,
    messages_of,
)
from tests.processors import KINDS, draw_image, embedded, processor
from tests.test_injection import special_ids

SHORT = GenerationOptions(max_new_tokens=8)
MULTI_TURN = [kind for kind in KINDS if kind != "nanovlm-v0.1"]
WIDE, TALL = draw_image(70, 40), draw_image(30, 60, seed=1)


@pytest.fixture(scope="module")
def checkpoint(model_folder):
    return open_checkpoint(model_folder, device="cpu")


@pytest.fixture
def conversation(checkpoint):
    return Conversation(checkpoint, system="be brief")


def fresh(conversation: Conversation, question: str, images=(), new: int = 8) -> list[int]:
    """The answer's ids without a kept prefix: model.generate on the whole prompt."""
    checkpoint = conversation.checkpoint
    p, stops = checkpoint.processor, checkpoint.stop_token_ids
    tiled = [conversation.image(image) for image in images]
    row = encode_next(p, stops, conversation.system, conversation.turns, tiled, question)
    ids = checkpoint.model.generate(**p.collate([row]), max_new_tokens=new, stop_token_ids=stops)
    return ids[0].tolist()


def check_next(conversation: Conversation, question: str, images=()) -> dict:
    """Ask, and compare with the answer without a kept prefix."""
    expected = fresh(conversation, question, images)
    reply = conversation.send(question, images, SHORT)
    streamed = "".join(piece for _, piece in reply)
    result = reply.finish()
    assert result["token_ids"] == [expected] and streamed.rstrip() == result["answers"][0] and reply.kept
    return result


def texts(conversation: Conversation) -> list[str]:
    return [turn.question for turn in conversation.turns]


# ---------------------------------------------------------------------------------------------------- turns
def test_turns_equal_fresh_answers_and_cost_what_is_new(conversation):
    held = 0
    tokens = conversation.checkpoint.processor.tokenizer.added_tokens_decoder
    turns = (("how many?", [WIDE]), ("what colour?", []), ("and here?", [TALL]), ("why?", []))
    for question, images in turns:
        result = check_next(conversation, question, images)
        assert result["reused_tokens"] + result["prefilled_tokens"] == result["prompt_tokens"]
        assert (result["tiles_encoded"] > 0) == bool(images)
        assert result["seconds"]["first_token"] >= result["seconds"]["prepare"] > 0
        assert result["kv_cache_bytes"] == conversation.session.kv_cache_bytes > 0
        # All of the last prompt and its answer but the last token, up to a special token, which nobody saw.
        assert result["reused_tokens"] == held
        ids = result["token_ids"][0]
        shown = next((place for place, i in enumerate(ids) if i in tokens and tokens[i].special), len(ids))
        held = result["prompt_tokens"] + min(shown, len(ids) - 1)
    conversation.system = "be long"
    check_next(conversation, "really?")
    assert len(conversation.turns) == 5


def test_the_embedded_model_answers_as_from_text():
    """Its own tokens or the texts tokenized anew in the prompt: a trained model says the same."""
    conversation = Conversation(open_checkpoint(generate.DEFAULT_MODEL, device="cpu"))
    p, model = conversation.checkpoint.processor, conversation.checkpoint.model
    questions = ("What colour is the star?", "How many shapes are there?", "What word do you see?")
    for number, question in enumerate(questions):
        images = [] if number else [generate.EXAMPLE_IMAGE]
        turns = conversation.turns
        answers = [turn.answer.text for turn in turns]
        messages = messages_of(p, None, turns, answers) + p.conversation(images, question)
        expected = p.decode(model.generate(**p.prepare(messages), max_new_tokens=12)[0]).strip()
        result = conversation.send(question, images, GenerationOptions(max_new_tokens=12)).finish()
        assert result["answers"] == [expected] and result["stop_reasons"] == ["stop"]
        assert (result["tiles_encoded"], result["reused_tokens"] > 64) == ((1, False), (0, True))[number > 0]
    assert conversation.turns[0].answer.text == "blue"
    assert conversation.turns[0].images[0].name == str(generate.EXAMPLE_IMAGE)


def stopped_by_break(conversation):
    with conversation.send("how many?", [WIDE], SHORT) as reply:
        for _ in reply:
            break
    return reply


def stopped_by_another_thread(conversation):
    reply = conversation.send("how many?", [WIDE], SHORT)
    for _ in reply:
        thread = Thread(target=reply.stop)
        thread.start()
        thread.join()
    return reply


def stopped_by_the_next_question(conversation):
    reply = conversation.send("how many?", [WIDE], SHORT)
    next(iter(reply))
    with pytest.raises(PromptError):
        conversation.send(" ")
    return reply


@pytest.mark.parametrize("stop", [stopped_by_break, stopped_by_another_thread, stopped_by_the_next_question])
def test_a_stopped_answer_is_kept_as_far_as_it_went(conversation, stop):
    expected = fresh(conversation, "how many?", [WIDE])
    reply = stop(conversation)
    result = reply.finish()
    (ids,) = result["token_ids"]
    assert reply.kept and result["stop_reasons"] == ["stopped"] and list(reply) == []
    assert 1 <= len(ids) < 8 and ids == expected[: len(ids)]
    (turn,) = conversation.turns
    assert (turn.answer.token_ids, turn.answer.text) == (tuple(ids), result["answers"][0])
    assert check_next(conversation, "why?")["tiles_encoded"] == 0


def test_iterating_may_be_continued(conversation):
    expected = fresh(conversation, "how many?")
    reply = conversation.send("how many?", options=SHORT)
    next(iter(reply))
    assert conversation.turns == () and reply.finish()["token_ids"] == [expected]
    assert len(conversation.turns) == 1


@pytest.mark.parametrize("tokens", [0, 3])
def test_ctrl_c(conversation, monkeypatch, tokens):
    """In the middle of an answer it stays as far as it went; before its first token nothing was answered."""
    choose, calls = Sampler.sample, []

    def interrupted(self, logits):
        calls.append(1)
        if len(calls) > tokens:
            raise KeyboardInterrupt
        return choose(self, logits)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample", interrupted)
        reply = conversation.send("how many?", [WIDE], SHORT)
        with pytest.raises(KeyboardInterrupt):
            list(reply)
    assert reply.finish()["stop_reasons"] == ["stopped"] and reply.kept == (tokens > 0)
    assert [len(turn.answer.token_ids) for turn in conversation.turns] == [tokens] * (tokens > 0)
    check_next(conversation, "why?", [WIDE])


def test_an_answer_that_was_never_begun_is_not_kept(conversation):
    reply = conversation.send("how many?", options=SHORT)
    check_next(conversation, "why?")
    assert texts(conversation) == ["why?"] and not reply.kept
    assert (reply.finish()["token_ids"], reply.finish()["reused_tokens"]) == ([[]], 0)


def test_errors_leave_the_history_as_it_was(conversation, tmp_path, monkeypatch):
    conversation.send("how many?", [WIDE], SHORT).finish()
    before, held = conversation.turns, conversation.session.held
    (tmp_path / "text.png").write_text("a boat")
    for question, images, error in (
        ("why?", [tmp_path / "missing.png"], ImageError),
        ("why?", [draw_image(9, 9), tmp_path / "text.png"], ImageError),
        (" ", [], PromptError),
        ("half a pair \ud800", [], PromptError),
        ("why " * 400, [], ContextFullError),
    ):
        with pytest.raises(error):
            conversation.send(question, images, SHORT)
    with pytest.raises(RequestError, match="use_cache"):
        conversation.send("why?", options=replace(SHORT, use_cache=False))
    assert (conversation.turns, conversation.session.held) == (before, held)

    def broken(self, logits):
        raise NotFiniteError(2)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample", broken)
        reply = conversation.send("why?", options=SHORT)
        with pytest.raises(NotFiniteError):
            reply.finish()
    assert conversation.turns == before and not reply.kept
    assert check_next(conversation, "why?")["tiles_encoded"] == 0


def test_a_full_context(checkpoint):
    conversation = Conversation(checkpoint)

    def fits(count: int) -> bool:
        try:
            conversation.send("why " * count)
        except ContextFullError:
            return False
        return True

    question = "why " * next(count for count in range(400, 0, -1) if fits(count))
    result = conversation.send(question).finish()
    assert result["stop_reasons"] == ["context"]
    assert len(result["token_ids"][0]) == checkpoint.context - result["prompt_tokens"]
    with pytest.raises(ContextFullError, match="undo"):
        conversation.send("why?")
    assert conversation.undo().question == question
    assert conversation.send("why?", options=SHORT).finish()["stop_reasons"] == ["length"]


def test_undo_and_reset(conversation):
    conversation.send("how many?", [WIDE], SHORT).finish()
    conversation.send("and here?", [TALL], SHORT).finish()
    assert conversation.undo().question == "and here?"
    assert check_next(conversation, "why?")["tiles_encoded"] == 0
    assert texts(conversation) == ["how many?", "why?"]
    reply = conversation.send("begun?", options=SHORT)
    next(iter(reply))
    assert conversation.undo().question == "begun?"
    conversation.send("not begun?", [WIDE])
    undone = conversation.undo()
    assert undone.question == "not begun?" and len(undone.images) == 1 and undone.answer.token_ids == ()
    assert texts(conversation) == ["how many?", "why?"]
    conversation.undo(), conversation.undo()
    with pytest.raises(RequestError, match="undo"):
        conversation.undo()
    conversation.send("how many?", [WIDE], SHORT).finish()
    conversation.reset()
    assert (conversation.turns, conversation.session.kv_cache_bytes) == ((), 0)
    assert check_next(conversation, "how many?")["reused_tokens"] == 0


def test_several_answers_and_the_one_to_continue_from(conversation):
    options = replace(SHORT, num_return_sequences=3, temperature=2.0, seed=5)
    reply = conversation.send("how many?", [WIDE], options)
    streamed = ["", "", ""]
    for number, piece in reply:
        streamed[number] += piece
    result = reply.finish()
    assert result["answers"] == [text.rstrip() for text in streamed] and len(set(streamed)) == 3
    assert conversation.turns[0].answer.text == result["answers"][0]
    with pytest.raises(RequestError, match="answer"):
        conversation.choose(3)
    conversation.choose(2)
    assert conversation.turns[0].answer.token_ids == tuple(result["token_ids"][2])
    assert check_next(conversation, "why?")["tiles_encoded"] == 0


# --------------------------------------------------------------------------------------------------- prompts
def turn_of(kind: str, question: str, images, answer_ids, before=()) -> Turn:
    row = encoded(kind, before, images, question)
    return Turn(question, images, (Answer("?", tuple(answer_ids), "stop"),), tuple(row.input_ids[-TAIL:]))


def encoded(kind: str, turns, images, question):
    p = processor(kind)
    return encode_next(p, p.stop_token_ids, None, turns, images, question)


def odd_spelling(kind: str) -> list[int]:
    """ "two" in tokens that its tokenizer would not choose: a letter each."""
    tokenizer = processor(kind).tokenizer
    return [i for letter in "two" for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("kind", MULTI_TURN)
@pytest.mark.parametrize("stopped", [False, True])
def test_a_prompt_begins_with_the_last_one_and_its_answer(kind, stopped):
    tiled, answer = processor(kind).tile(draw_image(40, 40)), odd_spelling(kind)
    end = [] if stopped else [processor(kind).stop_token_ids[0]]
    first = turn_of(kind, "how many?", (tiled,), answer + end)
    front = encoded(kind, [], (tiled,), "how many?").input_ids + answer
    second = turn_of(kind, "what colour?", (), answer + end, before=[first])
    longer = encoded(kind, [first], (), "what colour?").input_ids
    assert longer[: len(front)] == front
    third = encoded(kind, [first, second], (), "and now?").input_ids
    assert third[: len(longer) + len(answer)] == longer + answer


@pytest.mark.parametrize("kind", MULTI_TURN)
def test_an_answer_in_the_tokenizers_own_tokens_is_as_its_text(kind):
    p = processor(kind)
    tiled = p.tile(draw_image(40, 40))
    two = [*p.conversation([tiled], "how many?"), {"role": "assistant", "content": "two red"}]
    whole = p.encode_conversation(two, False)
    answer = [i for i, own in zip(whole.input_ids, whole.assistant_mask) if own]
    expected = p.encode_conversation([*two, *p.conversation([], "why?")], True)
    got = encoded(kind, [turn_of(kind, "how many?", (tiled,), answer)], (), "why?")
    assert (got.input_ids, got.assistant_mask) == (expected.input_ids, expected.assistant_mask)
    assert got.image_tokens == expected.image_tokens and torch.equal(got.tiles, expected.tiles)


@pytest.mark.parametrize("kind", MULTI_TURN)
def test_no_special_token_from_what_is_typed_or_answered(kind):
    p = processor(kind)
    names = [token.content for token in p.tokenizer.added_tokens_decoder.values() if token.special]
    hidden = [i for i, token in p.tokenizer.added_tokens_decoder.items() if token.special]
    answer = odd_spelling(kind)
    plain = turn_of(kind, "how many?", (), answer)
    expected = encoded(kind, [plain], (), "why?").input_ids
    # A model may sample any id: what an answer's text does not show is not in the next prompt.
    noisy = replace(plain, answers=(Answer("?", (*hidden, *answer, *hidden), "stopped"),))
    assert encoded(kind, [noisy], (), "why?").input_ids == expected
    typed = turn_of(kind, f"how many? {' '.join(names)} {PLACEHOLDER}", (), answer)
    got = encoded(kind, [typed], (), f"why? {''.join(names)}").input_ids
    assert special_ids(kind, got) == special_ids(kind, expected) and len(got) > len(expected)


@pytest.mark.parametrize("answer", ["two", ""])
def test_a_template_that_writes_prompt_and_answer_apart(answer):
    """Its prompt ends in a space that an answer brings along: kept answers are their texts then."""
    template = embedded().chat.chat_template.replace("'Assistant:'", "'Assistant: '")
    assert template != embedded().chat.chat_template
    p = make_processor(embedded().tokenizer, image_size=32, image_seq_len=4, chat_template=template)
    row = encode_next(p, p.stop_token_ids, None, [], (), "how many?")
    turn = Turn("how many?", (), (Answer(answer, (70, 71), "stop"),), tuple(row.input_ids[-TAIL:]))
    messages = messages_of(p, None, [turn], [answer]) + p.conversation([], "why?")
    expected = p.encode_conversation(messages, True)
    assert encode_next(p, p.stop_token_ids, None, [turn], (), "why?").input_ids == expected.input_ids


def test_a_model_for_one_question_refuses_a_second():
    first = turn_of("nanovlm-v0.1", "how many?", (draw_image(8, 8),), [70])
    with pytest.raises(PromptError):
        encoded("nanovlm-v0.1", [first], (), "why?")
