"""`Conversation`: what is kept of each turn, what a later one costs, and that nothing goes wrong for good."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread

import pytest

import generate
from data.errors import ImageError, PromptError
from generation.chooser import Chooser, NotFiniteError
from generation.decoding import GenerationOptions
from inference.checkpoint import RequestError, open_checkpoint
from inference.conversation import ContextFullError, Conversation, encode_next, messages_of
from tests.processors import draw_image

SHORT = GenerationOptions(max_new_tokens=8)


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
    pictures = [conversation.image(image) for image in images]
    row = encode_next(p, stops, conversation.system, conversation.turns, pictures, question)
    made = checkpoint.model.generate(**p.collate([row]), max_new_tokens=new, stop_token_ids=stops)
    return made[0].tolist()


def texts(conversation: Conversation) -> list[str]:
    return [turn.question for turn in conversation.turns]


def test_turns_with_images_equal_fresh_answers_and_cost_what_is_new(conversation):
    held = 0
    for question, images in (
        ("how many?", [draw_image(70, 40)]),
        ("what colour is the triangle?", []),
        ("and in this one?", [draw_image(30, 60, seed=1)]),
        ("why?", []),
    ):
        expected = fresh(conversation, question, images)
        reply = conversation.send(question, images, SHORT)
        streamed = "".join(piece for _, piece in reply)
        made = reply.finish()
        assert made["token_ids"] == [expected] and streamed.rstrip() == made["answers"][0]
        assert made["reused_tokens"] == held  # all that was prompt, and what was answered but for its end
        assert made["reused_tokens"] + made["prefilled_tokens"] == made["prompt_tokens"]
        assert (made["tiles_encoded"] > 0) == bool(images)
        assert made["seconds"]["first_token"] >= made["seconds"]["prepare"] > 0
        assert made["kv_cache_bytes"] == conversation.session.kv_cache_bytes > 0
        held = conversation.session.held
    assert len(conversation.turns) == 4 and reply.kept


def test_the_embedded_model_in_a_conversation_answers_as_from_text():
    """Kept tokens or the texts tokenized anew: a trained model says the same."""
    conversation = Conversation(open_checkpoint(generate.DEFAULT_MODEL, device="cpu"))
    p, model = conversation.checkpoint.processor, conversation.checkpoint.model
    questions = ("What colour is the star?", "How many shapes are there?", "What word do you see?")
    for number, question in enumerate(questions):
        images = [] if number else [generate.EXAMPLE_IMAGE]
        turns = conversation.turns
        said = [turn.answer.text for turn in turns]
        messages = messages_of(p, None, turns, said) + p.conversation(images, question)
        expected = p.decode(model.generate(**p.prepare(messages), max_new_tokens=12)[0]).strip()
        made = conversation.send(question, images, GenerationOptions(max_new_tokens=12)).finish()
        assert made["answers"] == [expected] and made["stop_reasons"] == ["stop"]
        assert (made["tiles_encoded"], made["reused_tokens"] > 64) == ((1, False), (0, True))[number > 0]
    assert conversation.turns[0].answer.text == "blue"
    assert conversation.turns[0].images[0].name == str(generate.EXAMPLE_IMAGE)


def stopped_by_break(conversation):
    with conversation.send("how many?", [draw_image(70, 40)], SHORT) as reply:
        for _ in reply:
            break
    return reply


def stopped_by_another_thread(conversation):
    reply = conversation.send("how many?", [draw_image(70, 40)], SHORT)
    for _ in reply:
        thread = Thread(target=reply.stop)
        thread.start()
        thread.join()
    return reply


def stopped_by_the_next_question(conversation):
    reply = conversation.send("how many?", [draw_image(70, 40)], SHORT)
    next(iter(reply))
    with pytest.raises(PromptError):
        conversation.send(" ")
    return reply


@pytest.mark.parametrize("stop", [stopped_by_break, stopped_by_another_thread, stopped_by_the_next_question])
def test_a_stopped_answer_is_kept_as_far_as_it_went(conversation, stop):
    expected = fresh(conversation, "how many?", [draw_image(70, 40)])
    reply = stop(conversation)
    made = reply.finish()
    (ids,) = made["token_ids"]
    assert reply.kept and made["stop_reasons"] == ["stopped"]
    assert 1 <= len(ids) < 8 and ids == expected[: len(ids)]
    assert made["prefilled_tokens"] == made["prompt_tokens"]
    (turn,) = conversation.turns
    assert (turn.answer.token_ids, turn.answer.text) == (tuple(ids), made["answers"][0])
    assert list(reply) == []  # it is over
    expected = fresh(conversation, "why?")
    made = conversation.send("why?", options=SHORT).finish()
    assert made["token_ids"] == [expected] and made["tiles_encoded"] == 0
    assert made["reused_tokens"] >= made["prompt_tokens"] - made["prefilled_tokens"] > made["image_tokens"]


def test_iterating_may_be_taken_up_again(conversation):
    expected = fresh(conversation, "how many?")
    reply = conversation.send("how many?", options=SHORT)
    next(iter(reply))
    assert conversation.turns == () and reply.finish()["token_ids"] == [expected]
    assert len(conversation.turns) == 1


@pytest.mark.parametrize("tokens", [0, 3])
def test_ctrl_c(conversation, monkeypatch, tokens):
    """In the middle of an answer it stays as far as it went; before its first token nothing was answered."""
    choose, calls = Chooser.choose, []

    def interrupted(self, logits):
        calls.append(1)
        if len(calls) > tokens:
            raise KeyboardInterrupt
        return choose(self, logits)

    with monkeypatch.context() as patch:
        patch.setattr(Chooser, "choose", interrupted)
        reply = conversation.send("how many?", [draw_image(70, 40)], SHORT)
        with pytest.raises(KeyboardInterrupt):
            list(reply)
    assert reply.finish()["stop_reasons"] == ["stopped"] and reply.kept == (tokens > 0)
    assert [len(turn.answer.token_ids) for turn in conversation.turns] == [tokens] * (tokens > 0)
    expected = fresh(conversation, "why?", [draw_image(70, 40)])
    assert conversation.send("why?", [draw_image(70, 40)], SHORT).finish()["token_ids"] == [expected]


def test_an_answer_that_was_never_begun_is_not_kept(conversation):
    reply = conversation.send("how many?", options=SHORT)
    assert conversation.send("why?", options=SHORT).finish()["answers"][0]
    assert texts(conversation) == ["why?"] and not reply.kept
    assert (reply.finish()["token_ids"], reply.finish()["reused_tokens"]) == ([[]], 0)


def test_errors_leave_the_history_as_it_was(conversation, tmp_path, monkeypatch):
    conversation.send("how many?", [draw_image(70, 40)], SHORT).finish()
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
    with pytest.raises(RequestError, match="expected use_cache=True"):
        conversation.send("why?", options=replace(SHORT, use_cache=False))
    assert (conversation.turns, conversation.session.held) == (before, held)

    def broken(self, logits):
        raise NotFiniteError(2)

    with monkeypatch.context() as patch:
        patch.setattr(Chooser, "choose", broken)
        reply = conversation.send("why?", options=SHORT)
        with pytest.raises(NotFiniteError):
            reply.finish()
    assert conversation.turns == before and not reply.kept
    expected = fresh(conversation, "why?")
    made = conversation.send("why?", options=SHORT).finish()
    assert made["token_ids"] == [expected] and made["tiles_encoded"] == 0


def test_a_full_context_says_what_to_do(checkpoint):
    conversation = Conversation(checkpoint)
    with pytest.raises(
        ContextFullError, match=r"fewer than 512 tokens, got \d+ .*; shorten the question, or show less"
    ):
        conversation.send("why " * 400)
    question = "why " * next(count for count in range(400, 0, -1) if fits(conversation, "why " * count))
    made = conversation.send(question).finish()
    assert made["stop_reasons"] == ["context"] and len(made["token_ids"][0]) == 512 - made["prompt_tokens"]
    with pytest.raises(ContextFullError, match="undo some turns, or reset"):
        conversation.send("why?")
    assert conversation.undo().question == question
    assert conversation.send("why?", options=SHORT).finish()["stop_reasons"] == ["length"]


def fits(conversation: Conversation, question: str) -> bool:
    try:
        conversation.send(question)
    except ContextFullError:
        return False
    return True


def test_undo_goes_on_from_the_turn_before(conversation):
    conversation.send("how many?", [draw_image(70, 40)], SHORT).finish()
    expected = fresh(conversation, "why?")
    conversation.send("and here?", [draw_image(30, 60, seed=1)], SHORT).finish()
    assert conversation.undo().question == "and here?"
    made = conversation.send("why?", options=SHORT).finish()
    assert made["token_ids"] == [expected] and made["tiles_encoded"] == 0
    assert texts(conversation) == ["how many?", "why?"]
    conversation.undo(), conversation.undo()
    with pytest.raises(RequestError, match="nothing to undo"):
        conversation.undo()


def test_undo_takes_back_what_is_being_answered(conversation):
    reply = conversation.send("how many?", options=SHORT)
    next(iter(reply))
    assert conversation.undo().question == "how many?" and conversation.turns == ()


def test_undo_before_the_first_token_leaves_the_turn_before(conversation):
    conversation.send("how many?", options=SHORT).finish()
    conversation.send("and here?", [draw_image(70, 40)], SHORT)
    undone = conversation.undo()
    assert undone.question == "and here?" and len(undone.images) == 1 and undone.answer.token_ids == ()
    assert texts(conversation) == ["how many?"]
    assert conversation.undo().question == "how many?" and conversation.turns == ()


def test_reset(conversation):
    expected = fresh(conversation, "how many?")
    conversation.send("why?", [draw_image(70, 40)], SHORT).finish()
    conversation.reset()
    assert (conversation.turns, conversation.session.kv_cache_bytes) == ((), 0)
    made = conversation.send("how many?", options=SHORT).finish()
    assert (made["token_ids"], made["reused_tokens"]) == ([expected], 0)


def test_several_answers_and_the_one_to_go_on_behind(conversation):
    options = replace(SHORT, num_return_sequences=3, temperature=2.0, seed=5)
    reply = conversation.send("how many?", [draw_image(70, 40)], options)
    streamed = ["", "", ""]
    for number, piece in reply:
        streamed[number] += piece
    made = reply.finish()
    assert made["answers"] == [text.rstrip() for text in streamed] and len(set(streamed)) == 3
    (turn,) = conversation.turns
    assert turn.answer.text == made["answers"][0]
    with pytest.raises(RequestError, match="from 0 to below 3, got 3"):
        conversation.choose(3)
    conversation.choose(2)
    assert conversation.turns[0].answer.token_ids == tuple(made["token_ids"][2])
    expected = fresh(conversation, "why?")
    made = conversation.send("why?", options=SHORT).finish()
    assert made["token_ids"] == [expected] and made["tiles_encoded"] == 0


def test_the_system_message_may_change(conversation):
    conversation.send("how many?", [draw_image(70, 40)], SHORT).finish()
    conversation.system = "be long"
    expected = fresh(conversation, "why?")
    assert conversation.send("why?", options=SHORT).finish()["token_ids"] == [expected]
