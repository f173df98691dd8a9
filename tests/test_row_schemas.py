"""Rows of every layout become the conversation they are, and samples; what is wrong with a row is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.box_rows import BoxRows
from data.errors import BadRow
from data.packing import IGNORE_INDEX, SampleEncoder
from data.processor import Processor
from data.row_schemas import (
    BAD_CONVERSATION,
    BROKEN_IMAGE,
    EMPTY_TEXT,
    PLACEHOLDERS,
    TOO_LONG,
    TOO_MANY_TILES,
    RowSchema,
)
from tests.processors import KINDS, draw_image, processor
from tests.rows import png

CHAT, TURNS, PLAIN = RowSchema(("messages",)), RowSchema(("texts",)), RowSchema(("question", "answer"))
PAIR, LLAVA = RowSchema(("prompt", "completion")), RowSchema(("conversations",))
PNG = png()
CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def image(value) -> dict:
    return {"type": "image", "image": value}


def said(role: str, *parts) -> dict:
    return {"role": role, "content": list(parts)}


EXPECTED = [said("user", image(PNG), text("what?")), said("assistant", text("a star"))]
TURN = {"user": "what?", "assistant": "a star"}
PLAIN_TEXT = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a star"}]
ANSWER = said("assistant", text("b"))


def human(words: str) -> list[dict]:
    return [{"from": "human", "value": words}, {"from": "gpt", "value": "a star"}]


@pytest.mark.parametrize(
    "schema, row",
    [
        (TURNS, {"images": [{"bytes": PNG, "path": "a.png"}], "texts": [TURN]}),
        (TURNS, {"images": [PNG], "texts": [TURN | {"source": "x"}]}),
        (PLAIN, {"image": {"bytes": PNG, "path": None}, "question": "what?", "answer": "a star"}),
        (PLAIN, {"image": None, "images": [PNG], "question": "what?", "answer": ["a star", "a sun"]}),
        (CHAT, {"messages": EXPECTED}),
        (CHAT, {"image": PNG, "messages": PLAIN_TEXT}),
        (
            CHAT,
            {"images": [PNG], "messages": [said("user", {"type": "image"}, text("what?")), PLAIN_TEXT[1]]},
        ),
        (PAIR, {"images": [PNG], "prompt": PLAIN_TEXT[:1], "completion": PLAIN_TEXT[1:]}),
        (PAIR, {"image": PNG, "prompt": "what?", "completion": "a star"}),
        (PAIR, {"prompt": [said("user", image(PNG), text("what?"))], "completion": "a star"}),
        (
            RowSchema(("question", "answer"), {"question": "query", "answer": "label", "image": "png"}),
            {"png": PNG, "query": "what?", "label": "a star"},
        ),
        (LLAVA, {"image": PNG, "conversations": human("<image>\nwhat?")}),
        (LLAVA, {"images": [PNG], "conversations": human("what?")}),
        (LLAVA, {"image": PNG, "conversations": PLAIN_TEXT}),
        (CHAT, {"image": PNG, "messages": [{"role": "user", "content": "<image>\nwhat?"}, PLAIN_TEXT[1]]}),
        (
            RowSchema(("question", "answer"), {"answer": "json.a.1"}, {"question": "what?"}),
            {"image": PNG, "json": {"a": ["a sun", "a star"]}, "question": "another"},
        ),
        (
            RowSchema(("question", "answer"), boxes=BoxRows(names={7: "a star"})),
            {"image": PNG, "question": "what?", "answer": 7},
        ),
    ],
)
def test_every_schema_is_one_conversation(schema, row):
    assert schema.conversation(row) == EXPECTED


def test_images_stand_where_the_text_marks_them():
    """Over several turns, behind what the system says; rows of text need no mark, and may speak of one."""
    other = png(seed=1)
    turns = [{"from": "system", "value": "Be brief."}, *human("From <image>\n\nto <image>"), *human("why?")]
    system, first, *_, last, _ = LLAVA.conversation({"image": [PNG, other], "conversations": turns})
    assert system == said("system", text("Be brief."))
    assert first["content"] == [text("From "), image(PNG), text("to "), image(other)]
    assert last == said("user", text("why?"))
    given = RowSchema(("question", "answer"), constants={"system": "Be brief."})
    alone = given.conversation({"image": "", "question": "What does <image> mean?", "answer": "a picture"})
    assert alone[:2] == [system, said("user", text("What does <image> mean?"))]


@pytest.mark.parametrize("number", [0, 10**400, -2.5])
@pytest.mark.parametrize(
    "schema, row",
    [
        (PLAIN, lambda number: {"question": "how many?", "answer": number}),
        (PLAIN, lambda number: {"question": "how many?", "answer": [number, 1]}),
        (TURNS, lambda number: {"images": [], "texts": [{"user": "how many?", "assistant": number}]}),
        (PAIR, lambda number: {"prompt": "how many?", "completion": number}),
    ],
)
def test_numbers_as_answers_are_written_out(schema, row, number):
    expected = [said("user", text("how many?")), said("assistant", text(str(number)))]
    assert schema.conversation(row(number)) == expected


def asked(image) -> dict:
    return {"image": image, "question": "a", "answer": "b"}


@pytest.mark.parametrize(
    "schema, row, reason",
    [
        (PLAIN, {"question": " \n", "answer": "b"}, EMPTY_TEXT),
        (PLAIN, {"question": "a", "answer": None}, EMPTY_TEXT),
        (PLAIN, {"question": "a", "answer": float("nan")}, EMPTY_TEXT),
        (PLAIN, {"question": "a", "answer": float("-inf")}, EMPTY_TEXT),
        (PLAIN, asked({"bytes": None, "path": None}), BROKEN_IMAGE),
        (PLAIN, asked("/etc/passwd"), BROKEN_IMAGE),
        (RowSchema(PLAIN.text_columns, folder=CHECKPOINTS), asked("QUJD" * 99), BROKEN_IMAGE),  # base64
        (PLAIN, asked("https://example.org/a.png"), BROKEN_IMAGE),
        (PLAIN, {"images": [None], "question": "a", "answer": "b"}, BROKEN_IMAGE),
        (PLAIN, "rows.jsonl: a line that is not JSON", BAD_CONVERSATION),
        (PAIR, {"prompt": "a", "completion": " "}, EMPTY_TEXT),
        (PAIR, {"prompt": "a", "completion": float("nan")}, BAD_CONVERSATION),
        (PAIR, {"prompt": "a", "completion": None}, BAD_CONVERSATION),
        (TURNS, {"texts": []}, EMPTY_TEXT),
        (TURNS, {"texts": None}, BAD_CONVERSATION),
        (TURNS, {"texts": [TURN, {"user": "c", "assistant": ""}]}, EMPTY_TEXT),
        (CHAT, {"messages": []}, EMPTY_TEXT),
        (CHAT, {"messages": "hello"}, BAD_CONVERSATION),
        (CHAT, {"messages": [said("user", text("a"))]}, EMPTY_TEXT),
        (CHAT, {"messages": [said("user", text("a")), said("assistant", text("  "))]}, EMPTY_TEXT),
        (CHAT, {"messages": [said("user", {"type": "audio"}), ANSWER]}, BAD_CONVERSATION),
        (CHAT, {"images": [PNG], "messages": [said("user", text("a")), ANSWER]}, PLACEHOLDERS),
        (LLAVA, {"image": [PNG, PNG], "conversations": human("<image>\na")}, PLACEHOLDERS),
        (LLAVA, {"image": PNG, "conversations": human("<video>\na")}, PLACEHOLDERS),
        (LLAVA, {"conversations": human("<image>\na")}, PLACEHOLDERS),
        (LLAVA, {"conversations": [{"from": "human"}, ANSWER]}, BAD_CONVERSATION),
        (
            CHAT,
            {"images": [PNG], "messages": [said("user", {"type": "image"}, {"type": "image"}), ANSWER]},
            PLACEHOLDERS,
        ),
    ],
)
def test_bad_rows_have_a_reason(schema, row, reason):
    with pytest.raises(BadRow) as bad:
        schema.conversation(row)
    assert bad.value.reason == reason and "\n" not in str(bad.value)


# ------------------------------------------------------------------------------------------------ samples
def conversation(question: str, answer: str, *more: str, images: int = 1) -> list[dict]:
    """Turns, with images in front of the first."""
    shown = [image(draw_image(40, 24, seed=i)) for i in range(images)]
    messages = [said("user", *shown, text(question)), said("assistant", text(answer))]
    return messages + [said("assistant" if i % 2 else "user", text(words)) for i, words in enumerate(more)]


def labelled(p, sample) -> list[str]:
    """The labelled parts, each decoded with its special tokens."""
    parts, open_part = [], []
    for label in [*sample.labels, IGNORE_INDEX]:
        if label != IGNORE_INDEX:
            open_part.append(label)
        elif open_part:
            parts.append(p.decode(open_part, skip_special_tokens=False))
            open_part = []
    return parts


@pytest.mark.parametrize("kind", [*KINDS, "ocelli-shapes"])
def test_labels_are_the_answers_with_their_end_of_turn(kind):
    p = processor(kind) if kind in KINDS else Processor.from_pretrained(CHECKPOINTS / kind)
    turns = ("two red squares",) if kind == "nanovlm-v0.1" else ("3 or 12", "what colour?", "it is blue")
    sample = SampleEncoder(p, 1000).encode(conversation("how many?", *turns), ("toy", 0))
    parts = labelled(p, sample)
    assert len(parts) == len(turns[::2])
    stops = [p.decode([i], skip_special_tokens=False) for i in p.stop_token_ids]
    for part, answer in zip(parts, turns[::2]):
        (stop,) = [stop for stop in stops if part.endswith(stop)]
        assert part.removesuffix(stop).strip() == answer
    assert [i for i, label in zip(sample.input_ids, sample.labels) if label not in (i, IGNORE_INDEX)] == []
    assert len(sample.labels) == len(sample.input_ids) == sample.tokens


def test_a_sample_waits_undecoded_and_has_its_tiles_in_order():
    p = processor("embedded")
    encoder, talk = SampleEncoder(p, 1000), conversation("how many?", "two", images=2)
    sample, whole = encoder.encode(talk, ("toy", 7)), p.encode_conversation(talk)
    assert sample.input_ids == whole.input_ids
    assert sample.tiles == len(whole.parts) and encoder.tiles(sample).digests == whole.parts.digests


def test_samples_that_are_too_large_or_broken_are_left_out_whole():
    """An image may be broken in its header, or only in its pixels."""
    p, talk = processor("embedded"), conversation("how many?", "two")
    whole = SampleEncoder(p, 1000).encode(talk, ("toy", 0))
    SampleEncoder(p, whole.tokens, whole.tiles).encode(talk, ("toy", 0))
    for limits, messages, reason in (
        ((whole.tokens - 1,), talk, TOO_LONG),
        ((1000, whole.tiles - 1), talk, TOO_MANY_TILES),
        ((4,), talk, TOO_MANY_TILES),
        ((1000,), [said("user", image(b"not an image")), ANSWER], BROKEN_IMAGE),
        ((1000,), [said("user", image(png(40, 24)[:-900])), ANSWER], BROKEN_IMAGE),
    ):
        encoder = SampleEncoder(p, *limits)
        with pytest.raises(BadRow) as bad:
            encoder.tiles(encoder.encode(messages, ("toy", 0)))
        assert bad.value.reason == reason
