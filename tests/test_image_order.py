"""A model that learnt to read images before the text, or after it, reads every message so."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from PIL import Image

import serve
from data.conversation import Message, in_order
from data.packing import SampleEncoder
from data.processor import Processor
from data.templates import SMOLVLM_CHAT_TEMPLATE
from generation.options import GenerationOptions
from inference.answer import ask
from inference.checkpoint import open_checkpoint
from inference.conversation import Conversation
from models.checkpoints.sources import open_files
from tests.documents import ROOT

EXAMPLE, CUP = ROOT / "assets/example.png", ROOT / "assets/cup.png"
QUESTIONS = ("What colour is the star?", "How many shapes are there?")


@pytest.fixture(scope="module")
def embedded() -> Processor:
    return Processor.from_pretrained(serve.DEFAULT_MODEL)


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded model whose files say another order, and whose template leaves it."""

    def say(order):
        copy = tmp_path / str(order)
        shutil.copytree(serve.DEFAULT_MODEL, copy)
        (copy / "chat_template.jinja").write_text(SMOLVLM_CHAT_TEMPLATE)
        path = copy / "generation_config.json"
        kept = {key: value for key, value in json.loads(path.read_text()).items() if key != "image_order"}
        path.write_text(json.dumps(kept | ({} if order is None else {"image_order": order})))
        return copy

    return say


def user(*parts) -> dict:
    """A message of texts, and of images, which are files."""
    kinds = ("text" if isinstance(part, str) else "image" for part in parts)
    return {"role": "user", "content": [{"type": kind, kind: part} for kind, part in zip(kinds, parts)]}


def same_images(one, other) -> bool:
    pairs = zip(one.parts, other.parts, strict=True)
    return all(torch.equal(a.pixels, b.pixels) for a, b in pairs)


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("parts", "first", "last"),
    [
        ("tI", "I t", "t I"),
        ("It", "I t", "t I"),
        ("IIt", "I I t", "t I I"),
        ("tItI", "I I t  t", "t  t I I"),  # a space where an image parted two words
        ("t ItI", "I I t  t", "t  t I I"),
        ("ttI", "I t t", "t t I"),  # nothing between texts that had nothing between them
        ("ttt", "t t t", "t t t"),
        ("II", "I I", "I I"),
    ],
)
def test_images_keep_their_order_and_texts_theirs(parts, first, last):
    read, images, texts = [], iter("ABCD"), iter("wxyz")
    for letter in parts:
        if letter == " ":
            read[-1] = ("text", read[-1][1] + " ")
        else:
            read.append(("image", next(images)) if letter == "I" else ("text", next(texts)))
    message = Message("user", tuple(read))
    assert in_order(message, None) == message
    for order, wanted in (("first", first), ("last", last)):
        made = in_order(message, order)
        assert "".join(v for k, v in made.parts if k == "image") == "".join(
            v for k, v in read if k == "image"
        )
        assert made.text.replace(" ", "") == message.text.replace(" ", "")
        assert [kind[0] for kind, _ in made.parts] == [letter.lower() for letter in wanted.split()]
        assert len(made.text) == sum(letter != "I" for letter in wanted.replace(" ", "")) + wanted.count("  ")


def test_the_embedded_model_says_its_order_and_every_order_is_one_prompt(embedded):
    assert open_files(serve.DEFAULT_MODEL).generation_config["image_order"] == "first"
    for question in QUESTIONS:
        right = embedded.ask([EXAMPLE], question)["input_ids"].tolist()
        assert embedded.prepare([user(question, EXAMPLE)])["input_ids"].tolist() == right
        asked, how = [user(question, Image.open(EXAMPLE))], {"tokenize": True, "return_dict": True}
        made = embedded.hf_processor.apply_chat_template(asked, add_generation_prompt=True, **how)
        assert made["input_ids"] == right  # transformers', to which the template alone says the order
    parted = embedded.encode_conversation([user("Here are", CUP, "and", EXAMPLE, "; how many?")], True)
    whole = embedded.encode_conversation([user(CUP, EXAMPLE, "Here are and ; how many?")], True)
    assert parted.input_ids == whole.input_ids and same_images(parted, whole)


@pytest.mark.slow
def test_answers_are_the_same_in_any_order_and_rows_are_those_that_the_model_is_asked():
    checkpoint, options = open_checkpoint(serve.DEFAULT_MODEL, device="cpu"), GenerationOptions()
    right = ask(checkpoint, [EXAMPLE], QUESTIONS[0], options).finish()["answers"]
    assert Conversation(checkpoint).send(QUESTIONS[0], [EXAMPLE]).finish()["answers"] == right
    encoder = SampleEncoder(checkpoint.processor, 2048)
    rows = [[user(*parts), said("blue")] for parts in ((QUESTIONS[0], EXAMPLE), (EXAMPLE, QUESTIONS[0]))]
    text_first, image_first = (encoder.encode(row, ("rows", 0)) for row in rows)
    assert text_first.input_ids == image_first.input_ids and text_first.labels == image_first.labels


def test_a_model_that_says_nothing_is_asked_as_it_comes_and_one_may_have_learnt_the_other_order(folder):
    silent, last = (Processor.from_pretrained(folder(order)) for order in (None, "last"))
    orders = [user(QUESTIONS[0], EXAMPLE)], [user(EXAMPLE, QUESTIONS[0])]
    text_first, image_first = (silent.prepare(one)["input_ids"].tolist() for one in orders)
    assert text_first != image_first
    assert [last.prepare(one)["input_ids"].tolist() for one in orders] == [text_first, text_first]
