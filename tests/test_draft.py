"""Answers with a draft are those without one; when there is a draft, and who gets to see it."""

from __future__ import annotations

import io
import math
import os
import random
import sys
from copy import copy
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from data.processor import Processor
from generation.fast.native.step import NativeStep
from generation.features import FeatureCache
from generation.options import GenerationOptions
from generation.session import Session
from inference.checkpoint import open_checkpoint
from inference.conversation import Conversation
from inference.draft import Draft
from inference.printing import GREY
from tests.invariants import fast_step
from tests.processors import KINDS, draw_image, processor
from tests.prompts import NO_STOP, ImageBlock, inputs_of, record, tiny_vlm, words

QUESTIONS = int(os.environ.get("OCELLI_QUESTIONS", "24"))  # of each kind of step
ALWAYS = {"SHARE": math.inf, "LEAST_WAIT": 0, "MOST_PROMPT": math.inf}
SAMPLINGS = (
    {},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 3},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.3, "seed": 11},
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.1, "presence_penalty": -0.1},
)
WIDE, TALL = draw_image(70, 40), draw_image(30, 60, seed=1)
SHORT = {"max_new_tokens": 6, **NO_STOP}


@pytest.fixture(scope="module")
def vlm():
    return hasty_vlm()


@pytest.fixture(scope="module")
def checkpoint(model_folder):
    return open_checkpoint(model_folder, device="cpu")


@pytest.fixture
def always(monkeypatch):
    """Drafts are made however small the model."""
    for name, value in ALWAYS.items():
        monkeypatch.setattr(f"inference.draft.{name}", value)


# ------------------------------------------------------------------------------------------- the answer
def hasty_vlm():
    """A tiny model that goes by its last token more than by its image: drafts are right now and then."""
    model = tiny_vlm()
    with torch.no_grad():
        for layer in model.language_model.layers:
            layer.self_attn.o_proj.weight *= 0.05
    return model


def prompts(seed: int, tiles: int, question: int = 4) -> tuple[dict, dict]:
    """Inputs of a prompt with all tiles of an image, the whole one last, and with that alone."""
    before, after = words(seed, 3), words(seed + 1, question)
    cut = [part for n in range(tiles - 1) for part in (ImageBlock(100 * seed + n), *words(n, 1))]
    whole = ImageBlock(100 * seed + 99)
    return inputs_of([*before, *cut, whole, *after]), inputs_of([*before, whole, *after])


def drafted(
    session: Session, full: dict, short: dict | None, most: int, limits: dict[str, float] = ALWAYS, **options
) -> tuple[Draft, list[int]]:
    """A draft of at most so many tokens, and then the answer's ids."""
    with patch.multiple("inference.draft", **limits):
        draft = Draft(session, full, short, GenerationOptions(**options))
        for number, _ in enumerate(draft, 1):
            if number == most:
                break
        return draft, [int(ids) for ids in session.generate_stream(**full, **options)]


def new_session(vlm) -> Session:
    return Session(vlm, FeatureCache(vlm, 2**20))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "native"])
def test_the_answer_is_the_one_without_a_draft(kind):
    """In sessions of three questions each, with drafts that are left early, right and wrong; `make soak` asks
    many."""
    vlm, seen = hasty_vlm(), set[bool]()
    step = fast_step(vlm, NativeStep) if kind == "native" else None
    for seed in range(QUESTIONS):
        chance = random.Random(seed)
        if seed % 3 == 0:
            session = new_session(vlm)
        full, short = prompts(seed, chance.randint(5, 17), chance.randint(1, 9))
        options = SAMPLINGS[seed % len(SAMPLINGS)] | {"max_new_tokens": chance.randint(1, 24), **NO_STOP}
        draft, answer = drafted(session, full, short, chance.randint(1, 30), **options, decode_step=step)
        expected = vlm.generate_detailed(**full, **options, decode_step=step).rows()[0]
        assert answer == expected, f"question {seed}"
        seen.add(draft.accepted(answer) == min(len(draft.token_ids), len(answer)))
    assert seen == {True, False}


@pytest.mark.usefixtures("always")
def test_the_whole_image_is_encoded_once_and_before_the_others(vlm, monkeypatch):
    passes, images = record(monkeypatch, vlm)
    full, short = prompts(2, 9)
    session = new_session(vlm)
    draft = Draft(session, full, short, GenerationOptions(**SHORT))
    next(iter(draft))
    assert images == [1] and passes == [short["input_ids"].shape[1]] and draft.seconds > 0
    output = session.generate_detailed(**full, **SHORT)
    assert images == [1, 8] and output.prefilled in passes
    assert (output.tiles_encoded, output.tiles_reused, len(draft.token_ids)) == (8, 1, 1)


@pytest.mark.slow
def test_a_draft_takes_its_share_of_the_time_and_no_more(vlm):
    full, short = prompts(2, 17)
    for share, tokens in ((0.0, 1), (1e9, 60)):
        limits = {"SHARE": share, "LEAST_WAIT": 0, "MOST_PROMPT": 1}
        draft, _ = drafted(new_session(vlm), full, short, 10**6, limits, **NO_STOP, max_new_tokens=60)
        assert len(draft.token_ids) == tokens, share
    limits = {"LEAST_WAIT": 3600, "MOST_PROMPT": 1}
    assert not drafted(new_session(vlm), full, short, 1, limits, **SHORT)[0].token_ids


# ------------------------------------------------------------------------------- where no draft can help
def nothing_left(vlm, session, full, short):
    session.generate(**full, **SHORT)
    return session, full, short


def another_question(vlm, session, full, short):
    session.generate(**full, **SHORT)
    return session, *prompts(3, 6, question=9)


def known_tiles(vlm, session, full, short):
    other = Session(vlm, session.feature_cache)
    other.generate(**full, **SHORT)
    return session, full, short


NO_DRAFT = {
    "no short prompt": lambda vlm, session, full, short: (session, full, None),
    "one tile": lambda vlm, session, full, short: (session, short, short),
    "text": lambda vlm, session, full, short: (session, inputs_of([3, 4]), inputs_of([3, 4])),
    "the same question": nothing_left,
    "another question about the image": another_question,
    "tiles that another session has encoded": known_tiles,
    "no features are kept": lambda vlm, session, full, short: (Session(vlm), full, short),
}


@pytest.mark.parametrize("case", NO_DRAFT)
def test_there_is_no_draft_where_it_cannot_help(vlm, case):
    session, full, short = NO_DRAFT[case](vlm, new_session(vlm), *prompts(3, 6))
    draft, answer = drafted(session, full, short, 9, **SHORT)
    assert not draft.token_ids and answer == vlm.generate(**full, **SHORT)[0].tolist()


# ---------------------------------------------------------------------------------------- short prompts
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nanovlm-v0.1"])
def test_the_short_prompt_is_that_of_an_image_which_is_not_cut(kind):
    own = processor(kind)
    for image in (WIDE, TALL, draw_image(20, 20)):
        tiled = own.cut(image)
        alone = own.images.whole(tiled)
        if alone is None:
            assert kind.startswith("nanovlm") and own.images.global_token is None
            continue
        assert len(alone.parts) == 1 and alone.parts.digests[0] in tiled.parts.digests
        row = own.encode_conversation(own.conversation([alone, alone], "what is it?"), True)
        small = draw_image(16, 16) if kind.startswith("nanovlm") else image
        uncut = not_cutting(own)
        expected = uncut.encode_conversation(uncut.conversation([small, small], "what is it?"), True)
        assert row.input_ids == expected.input_ids and len(row.parts) == len(expected.parts) == 2


def not_cutting(own: Processor) -> Processor:
    """The processor, which does not cut small images."""
    images = copy(own.images)
    images.splits = images.to_max_side = False  # the one is Idefics3's, the other nanoVLM's
    return Processor(images, own.tokenizer, own.chat.chat_template)


# ---------------------------------------------------------------------------------------- command line
def test_json_tells_of_the_draft(as_json, photo, always):
    ask = (photo, "-q", "how many?", "--max-new-tokens", 12)
    (expected,), (made,) = as_json(*ask), as_json(*ask, "--draft")
    draft = made.pop("draft")
    for name in ("answers", "token_ids", "stop_reasons", "prompt_tokens"):
        assert made[name] == expected[name]
    assert 0 < draft["tokens"] <= 12 and 0 <= draft["accepted"] <= draft["tokens"] and draft["text"]
    assert 0 < draft["first_token_seconds"] <= draft["draft_seconds"]
    first, second = as_json(*ask, "-q", "what is it?", "--draft")
    assert first["draft"]["text"] == draft["text"] and second["draft"] is None


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_at_a_terminal_the_draft_stands_in_grey_before_the_answer(cli, photo, always, monkeypatch):
    ask = (photo, "-q", "how many?", "--max-new-tokens", 12)
    expected = cli(*ask)[:2]

    def shown(*more) -> tuple[tuple, str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", screen := Terminal())
            return cli(*ask, *more)[:2], screen.getvalue()

    answered, before = shown("--draft")
    assert answered == expected and before.count(f"{GREY}[draft] ") == 1
    for more in ((), ("--draft", "--json")):
        assert GREY not in shown(*more)[1]
    assert "[draft]" not in cli(*ask, "--draft")[2]  # no terminal


# ----------------------------------------------------------------------------------- conversations, page
def test_a_turn_with_new_images_has_a_draft_and_the_next_one_none(checkpoint, always):
    options = GenerationOptions(max_new_tokens=8)
    plain, talk = (Conversation(replace(checkpoint)) for _ in range(2))  # each with features of its own
    for question, images, wanted in (
        ("how many?", [WIDE], True),
        ("why?", [], False),
        ("and?", [TALL], True),
    ):
        expected = plain.send(question, images, options).finish()
        with talk.send(question, images, options, draft=True) as reply:
            pieces = list(reply.draft())
            assert bool("".join(pieces)) == wanted, question
            got = reply.finish()
        assert got["token_ids"] == expected["token_ids"] and "draft" not in expected
        assert (got["draft"] is not None) == wanted
        assert got["seconds"]["first_token"] > (got["draft"]["draft_seconds"] if wanted else 0)
