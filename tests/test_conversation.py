"""`Conversation`: what is kept of each turn, what a later one costs, and what an error leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from data.errors import ImageError, PromptError
from data.new_processor import make_processor
from generation import sampling
from generation.options import GenerationOptions, NotFiniteError
from inference.checkpoint import RequestError, open_checkpoint
from inference.command import DEFAULT_MODEL, EXAMPLE_IMAGE
from inference.conversation import (
    PLACEHOLDER,
    TAIL,
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


def check_next(conversation: Conversation, question: str, images=()) -> dict:
    """Ask, and compare with `model.generate` on the whole prompt."""
    p, stops = conversation.checkpoint.processor, conversation.checkpoint.stop_token_ids
    tiled = [p.visuals(image)[0] for image in images]
    row = encode_next(p, stops, conversation.system, conversation.turns, tiled, question)
    ids = conversation.checkpoint.model.generate(**p.collate([row]), max_new_tokens=8, stop_token_ids=stops)
    reply = conversation.send(question, images, SHORT)
    streamed = "".join(piece for _, piece in reply)
    result = reply.finish()
    assert result["token_ids"] == ids.tolist() and streamed.rstrip() == result["answers"][0] and reply.kept
    return result


def texts(conversation: Conversation) -> list[str]:
    return [turn.question for turn in conversation.turns]


# ---------------------------------------------------------------------------------------------------- turns
def test_turns_equal_fresh_answers_and_cost_what_is_new(conversation):
    held = 0
    tokens = conversation.checkpoint.processor.tokenizer.added_tokens_decoder
    for question, images in (
        ("how many?", [WIDE]),
        ("what colour?", []),
        ("and here?", [TALL]),
        ("why?", []),
    ):
        result = check_next(conversation, question, images)
        assert result["reused_tokens"] + result["prefilled_tokens"] == result["prompt_tokens"]
        assert (result["tiles_encoded"] > 0) == bool(images)
        assert result["seconds"]["first_token"] >= result["seconds"]["prepare"] > 0
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
    conversation = Conversation(open_checkpoint(DEFAULT_MODEL, device="cpu"))
    p, model = conversation.checkpoint.processor, conversation.checkpoint.model
    for number, question in enumerate(("What colour is the star?", "How many shapes are there?")):
        images = [] if number else [EXAMPLE_IMAGE]
        answers = [turn.answer for turn in conversation.turns]
        messages = messages_of(p, None, conversation.turns, answers) + p.conversation(images, question)
        expected = p.decode(model.generate(**p.prepare(messages), max_new_tokens=12)[0]).strip()
        result = conversation.send(question, images, GenerationOptions(max_new_tokens=12)).finish()
        assert result["answers"] == [expected] and result["stop_reasons"] == ["stop"]
        assert (result["tiles_encoded"] > 0, result["reused_tokens"] > 64) == (number == 0, number == 1)
    assert conversation.turns[0].answer == "blue"
    assert str(EXAMPLE_IMAGE) in conversation.turns[0].images[0].name


@pytest.mark.parametrize("how", ["leaving the block", "the next question", "Ctrl-C", "Ctrl-C at once"])
def test_a_stopped_answer_is_kept_as_far_as_it_went(conversation, monkeypatch, how):
    """If it has a token; without one nothing was answered."""
    expected = Conversation(conversation.checkpoint, "be brief").send("how many?", [WIDE], SHORT).finish()
    sample, calls = sampling.draw, []

    def interrupted(rows, logits):
        calls.append(1)
        if len(calls) > (3 if how == "Ctrl-C" else 0):
            raise KeyboardInterrupt
        return sample(rows, logits)

    reply = conversation.send("how many?", [WIDE], SHORT)
    if "Ctrl-C" in how:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(sampling, "draw", interrupted)
            list(reply)
    elif how == "leaving the block":
        with reply:
            next(iter(reply))
    else:
        next(iter(reply))
        with pytest.raises(PromptError):
            conversation.send(" ")
    result = reply.finish()
    (ids,) = result["token_ids"]
    assert result["stop_reasons"] == ["stopped"] and list(reply) == []
    assert ids == expected["token_ids"][0][: len(ids)] and len(ids) < 8
    assert reply.kept == bool(ids) == (how != "Ctrl-C at once")
    assert [(turn.answer_ids, turn.answer) for turn in conversation.turns] == [
        (tuple(ids), result["answers"][0])
    ] * reply.kept
    assert check_next(conversation, "why?", [WIDE])["tiles_encoded"] == 0


def test_errors_leave_the_history_as_it_was(conversation, tmp_path, monkeypatch):
    conversation.send("how many?", [WIDE], SHORT).finish()
    before, held = list(conversation.turns), conversation.session.held
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

    def broken(rows, logits):
        raise NotFiniteError(2)

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "draw", broken)
        reply = conversation.send("why?", options=SHORT)
        with pytest.raises(NotFiniteError):
            reply.finish()
    assert conversation.turns == before and not reply.kept
    assert check_next(conversation, "why?")["tiles_encoded"] == 0


def test_a_full_context(checkpoint):
    conversation, p = Conversation(checkpoint), checkpoint.processor
    one = len(encode_next(p, checkpoint.stop_token_ids, None, [], [], "?").input_ids)
    fills = "?" * (checkpoint.context - one + 1)
    with pytest.raises(ContextFullError):
        conversation.send(fills)  # there is no room for a single token
    result = conversation.send(fills[3:]).finish()
    assert result["stop_reasons"] == ["context"] and len(result["token_ids"][0]) == 3
    with pytest.raises(ContextFullError, match="undo"):
        conversation.send("why?")
    assert conversation.undo().question == fills[3:]
    assert conversation.send("why?", options=SHORT).finish()["stop_reasons"] == ["length"]


def test_undo_and_reset(conversation):
    conversation.send("how many?", [WIDE], SHORT).finish()
    conversation.send("and here?", [TALL], SHORT).finish()
    assert conversation.undo().question == "and here?"
    assert check_next(conversation, "why?")["tiles_encoded"] == 0
    next(iter(conversation.send("begun?", options=SHORT)))
    assert conversation.undo().question == "begun?"
    conversation.send("not begun?", [WIDE])
    undone = conversation.undo()
    assert undone.question == "not begun?" and len(undone.images) == 1 and undone.answer_ids == ()
    assert texts(conversation) == ["how many?", "why?"]
    conversation.undo(), conversation.undo()
    with pytest.raises(RequestError, match="undo"):
        conversation.undo()
    conversation.send("how many?", [WIDE], SHORT).finish()
    conversation.reset()
    assert (conversation.turns, conversation.session.kv_cache_bytes) == ([], 0)
    assert check_next(conversation, "how many?")["reused_tokens"] == 0


def test_several_answers_and_the_first_stays(conversation):
    """Iterating may be continued; what never began is not kept."""
    options = replace(SHORT, num_return_sequences=3, temperature=2.0, seed=5)
    never = conversation.send("never begun", options=SHORT)
    reply = conversation.send("how many?", [WIDE], options)
    streamed = ["", "", ""]
    number, streamed_first = next(iter(reply))
    streamed[number] = streamed_first
    assert not never.kept and never.finish()["token_ids"] == [[]] and conversation.turns == []
    for number, piece in reply:
        streamed[number] += piece
    result = reply.finish()
    assert result["answers"] == [text.rstrip() for text in streamed] and len(set(streamed)) == 3
    assert conversation.turns[0].answer_ids == tuple(result["token_ids"][0])
    assert check_next(conversation, "why?")["tiles_encoded"] == 0


# --------------------------------------------------------------------------------------------------- prompts
def turn_of(kind: str, question: str, images, answer_ids, before=()) -> Turn:
    row = encoded(kind, before, images, question)
    return Turn(question, images, tuple(row.input_ids[-TAIL:]), answer="?", answer_ids=tuple(answer_ids))


def encoded(kind: str, turns, images, question):
    p = processor(kind)
    return encode_next(p, p.stop_token_ids, None, turns, images, question)


def odd_spelling(kind: str) -> list[int]:
    """ "two" in tokens that its tokenizer would not choose: a letter each."""
    tokenizer = processor(kind).tokenizer
    return [i for letter in "two" for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("kind", MULTI_TURN)
def test_a_prompt_begins_with_the_last_one_and_its_answer(kind):
    """Whether the answer has a stop token or was stopped before it."""
    tiled, answer = processor(kind).cut(draw_image(40, 40)), odd_spelling(kind)
    first = turn_of(kind, "how many?", (tiled,), answer)
    front = encoded(kind, [], (tiled,), "how many?").input_ids + answer
    second = turn_of(kind, "what?", (), [*answer, processor(kind).stop_token_ids[0]], before=[first])
    longer = encoded(kind, [first], (), "what?").input_ids
    third = encoded(kind, [first, second], (), "and now?").input_ids
    assert longer[: len(front)] == front and third[: len(longer) + len(answer)] == longer + answer


@pytest.mark.parametrize("kind", MULTI_TURN)
def test_an_answer_in_the_tokenizers_own_tokens_is_as_its_text(kind):
    p = processor(kind)
    tiled = p.cut(draw_image(40, 40))
    two = [*p.conversation([tiled], "how many?"), {"role": "assistant", "content": "two red"}]
    whole = p.encode_conversation(two, False)
    answer = [i for i, own in zip(whole.input_ids, whole.assistant_mask) if own]
    expected = p.encode_conversation([*two, *p.conversation([], "why?")], True)
    got = encoded(kind, [turn_of(kind, "how many?", (tiled,), answer)], (), "why?")
    assert (got.input_ids, got.assistant_mask) == (expected.input_ids, expected.assistant_mask)
    assert got.image_tokens == expected.image_tokens and got.parts.digests == expected.parts.digests


@pytest.mark.parametrize("kind", MULTI_TURN)
def test_no_special_token_from_what_is_typed_or_answered(kind):
    p = processor(kind)
    names = [token.content for token in p.tokenizer.added_tokens_decoder.values() if token.special]
    hidden = [i for i, token in p.tokenizer.added_tokens_decoder.items() if token.special]
    answer = odd_spelling(kind)
    plain = turn_of(kind, "how many?", (), answer)
    expected = encoded(kind, [plain], (), "why?").input_ids
    # A model may sample any id: what an answer's text does not show is not in the next prompt.
    noisy = replace(plain, answer_ids=(*hidden, *answer, *hidden))
    assert encoded(kind, [noisy], (), "why?").input_ids == expected
    typed = turn_of(kind, f"how many? {' '.join(names)} {PLACEHOLDER}", (), answer)
    got = encoded(kind, [typed], (), f"why? {''.join(names)}").input_ids
    assert special_ids(kind, got) == special_ids(kind, expected) and len(got) > len(expected)


def test_a_template_that_writes_prompt_and_answer_apart():
    """Its prompt ends in a space that an answer brings along: kept answers are their texts then."""
    template = embedded().chat.chat_template.replace("'Assistant:'", "'Assistant: '")
    assert template != embedded().chat.chat_template
    p = make_processor(embedded().tokenizer, image_size=32, image_seq_len=4, chat_template=template)
    tail = encode_next(p, p.stop_token_ids, None, [], (), "how many?").input_ids[-TAIL:]
    turn = Turn("how many?", (), tuple(tail), answer="two", answer_ids=(70, 71))
    messages = messages_of(p, None, [turn], ["two"]) + p.conversation([], "why?")
    expected = p.encode_conversation(messages, True)
    assert encode_next(p, p.stop_token_ids, None, [turn], (), "why?").input_ids == expected.input_ids


def test_a_model_for_one_question_refuses_a_second():
    first = turn_of("nanovlm-v0.1", "how many?", (draw_image(8, 8),), [70])
    with pytest.raises(PromptError):
        encoded("nanovlm-v0.1", [first], (), "why?")
